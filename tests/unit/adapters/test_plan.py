"""Which linear layers adapters belong to, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.config.adapters import layer_adapter_plans
from megatron.core.config.plan.layers import network_layer_plans, partition_into_stages
from megatron.core.config.plan.linear_layers import linear_shapes_of_layer
from megatron.core.config.rules.engine import broken_rules
from megatron.core.models.on_meta import build_stage_on_meta
from megatron.core.parallel.mesh import Mesh
from megatron.core.tensor_parallel.linear import AdaptableLinear
from megatron.core.transformer.blocks import Block
from megatron.core.transformer.moe import GroupedLinear
from tests.helpers import tiny
from tests.parity.table import MODELS

NETWORKS = ("llama", "gpt", "moe-shared", "mla", "mla-q", "output-gate", "t5", "bert", "squared-relu", "deepseek")


@pytest.mark.parametrize("name", NETWORKS)
def test_the_list_of_linear_layers_is_that_of_the_network(name: str) -> None:
    model = tiny.config(**MODELS[name]).model
    (stage,) = partition_into_stages(network_layer_plans(model), pp=1)
    layers = [
        module
        for module in build_stage_on_meta(model, Mesh.single_process(), stage).modules()
        if isinstance(module, Block)
    ]
    for layer in layers[: len(stage.layers)]:
        listed = {
            path: (shape.outputs, shape.inputs) for path, shape in linear_shapes_of_layer(model, layer.plan).items()
        }
        there = {
            path: tuple(module.weight.shape)[-2:]
            for path, module in layer.named_modules()
            if isinstance(module, AdaptableLinear | GroupedLinear)
        }
        assert listed == there
        for path, shape in linear_shapes_of_layer(model, layer.plan).items():
            parts = getattr(layer.get_submodule(path).weight, "spec").shards
            cut = next((one.segments for one in parts if one.axis in ("tp", "etp") and one.dim == len(parts) - 1), None)
            if len(shape.parts) > 1:
                assert cut is not None and [part.size for part in cut] == [size for _, size in shape.parts]


def targets(*words: str, **changes: Any) -> set[str]:
    model = tiny.config(**{**MODELS["llama"], "lora_rank": 4, **changes, "lora_targets": words}).model
    return {
        f"{plan.index}.{one.linear.rpartition('.')[2]}.{one.part}={one.rank}:{one.scale:g}"
        for plan in network_layer_plans(model)
        for one in layer_adapter_plans(model, plan)
    }


def test_targets_name_projections_matrices_and_patterns() -> None:
    assert targets("q_proj", "*layers.2*.linear_qkv.v=2:6") == {
        *(f"{i}.linear_qkv.q=4:1" for i in range(4)),
        "2.linear_qkv.v=2:3",
    }
    assert targets("layers.1.mlp.linear_fc2") == {"1.linear_fc2.=4:1"}
    assert targets("linear_qkv", lora_alpha=8.0) == {f"{i}.linear_qkv.=4:2" for i in range(4)}
    assert targets("o_proj", lora_rslora=True, lora_alpha=8.0) == {f"{i}.linear_proj.=4:4" for i in range(4)}
    assert len(targets("all-linear")) == 4 * 7
    assert len(targets("*.layers.3.*")) == 7, "of a fused matrix a pattern means the parts"
    assert targets("q_proj", "*.layers.3.self_attention.linear_qkv.q=2") >= {"3.linear_qkv.q=2:2"}, "the last one holds"


@pytest.mark.parametrize(
    "changes, rule, words",
    [
        ({"lora_targets": ("nothing",)}, "adapter-targets", "names no linear layer"),
        ({"lora_rank": 0}, "adapter-numbers", "not a positive number"),
        ({"lora_rank": 33}, "adapter-targets", "does not fit"),
        ({"lora_targets": ("q_proj=x",)}, "adapter-targets", "NAME=RANK"),
        ({"lora_targets": ("q_proj=0",)}, "adapter-targets", "NAME=RANK"),
        ({"lora_targets": ("q_proj", "linear_qkv")}, "adapter-targets", "as one matrix and its parts"),
        ({"lora_dropout": 1.0}, "adapter-numbers", "must lie in"),
        ({"lora_plus_ratio": 0.0}, "adapter-numbers", "not a positive number"),
        ({"lora_rank": None, "dora": True}, "no-effect", "give --lora-rank"),
        ({"qk_clip": True}, "adapter-fit", "--qk-clip"),
        ({"save": "x", "export_hf": "y"}, "adapter-fit", "--export-hf"),
        ({"optimizer": "muon"}, "adapter-fit", "choose adam"),
        ({"num_experts": 4, "dora": True}, "adapter-targets", "--dora and adapters of experts"),
        ({"num_experts": 4, "lora_dropout": 0.1}, "adapter-targets", "--lora-dropout 0.1 and adapters of experts"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], rule: str, words: str) -> None:
    found = dict(broken_rules(tiny.config(**{**MODELS["llama"], "lora_rank": 4, **changes}), 1))
    assert words in found.get(rule, ""), found


@pytest.mark.parametrize(
    "kind, target, offered, absent",
    [
        ("llama", "nothing", "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, linear_qkv, linear_proj,", "q_a_proj"),
        ("mamba", "linear_qkv", "all-linear, in_proj, out_proj or patterns", "linear_qkv,"),
    ],
)  # fmt: skip
def test_what_names_no_linear_layer_is_refused_with_the_names_of_this_network(
    kind: str, target: str, offered: str, absent: str
) -> None:
    flags = {**MODELS["llama"], "lora_rank": 4, "lora_targets": (target,)}
    if kind == "mamba":
        flags |= {
            "hybrid_layer_pattern": "MM",
            "num_layers": 2,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "mamba_state_dim": 8,
        }
    message = dict(broken_rules(tiny.config(**flags), 1))["adapter-targets"]
    assert offered in message and absent not in message.partition("choose of")[2], message


def test_an_adapter_that_fits_breaks_no_rule() -> None:
    config = tiny.config(
        **{**MODELS["llama"], "lora_rank": 4, "lora_dropout": 0.1, "dora": True, "freeze": ("embedding.*",)}
    )
    assert not [rule for rule, _ in broken_rules(config, 1) if rule.startswith("adapter")]
