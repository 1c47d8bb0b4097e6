"""Parameters, FLOPs and memory of networks with experts: what a built network has, and what is published."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.config.flags.declare import config_from_flat_dict
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RequestedRun
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.models import flops
from megatron.core.models.describe import (
    WeightShardCounts,
    count_active_parameters,
    count_parameters,
    count_rank_parameters,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import set_global_param_names
from megatron.core.transformer.blocks import make_layer
from megatron.core.transformer.context.forward_context import ForwardContext
from tests.helpers import tiny
from tests.parity.table import MODELS

NETWORKS = ("moe", "moe-bias", "moe-shared", "moe-shared-bias", "moe-no-aux", "moe-mtp3-repeated")
SIZES: dict[str, Any] = {"hidden_size": 64, "moe_ffn_hidden_size": 40, "seq_length": 32, "max_position_embeddings": 32}


def elements(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_are_those_of_a_built_network(name: str) -> None:
    settings = tiny.config(**MODELS[name])
    (stage,) = stage_specs_of_run(settings)
    network = GPTModel(stage, tiny.run_of(settings).layer_build_context)
    assert count_parameters(settings.model).total == elements(network)
    topk, experts = settings.model.moe.moe_router_topk, settings.model.moe.num_experts
    idle = sum(
        param.numel() * (experts - topk) // experts for path, param in network.named_parameters() if ".experts." in path
    )
    assert count_active_parameters(settings.model) == elements(network) - idle


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("tp, ep, etp", [(1, 2, 1), (2, 1, 2), (2, 2, 1), (4, 4, 2)])
def test_a_ranks_parameters_are_those_of_a_built_rank(name: str, tp: int, ep: int, etp: int) -> None:
    settings = tiny.config(
        **{
            **MODELS[name],
            "tensor_model_parallel_size": tp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
        }
    )
    build = tiny.run_of(settings).layer_build_context
    mesh = dataclasses.replace(build.mesh, tp=Axis("tp", tp), ep=Axis("ep", ep), etp=Axis("etp", etp))
    (stage,) = stage_specs_of_run(settings)
    network = GPTModel(stage, dataclasses.replace(build, mesh=mesh))
    assert count_rank_parameters(
        settings.model, [stage], WeightShardCounts.from_parallel(settings.parallel)
    ).total == elements(network)


@pytest.mark.parametrize("name", ["moe", "moe-bias", "moe-shared", "moe-no-aux"])
def test_square_flops_are_what_torch_counts_in_a_step(name: str) -> None:
    settings = tiny.config(
        **{**MODELS[name], **SIZES, "attention_backend": "unfused", "untie_embeddings_and_output_weights": True}
    )
    (stage,) = stage_specs_of_run(settings)
    network = GPTModel(stage, tiny.run_of(settings).layer_build_context).materialize(1)
    ids = torch.zeros((2, 32), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        network(ids=ids, labels=ids).sum().backward()
    assert counter.get_total_flops() == 2 * flops.flops_per_sample(settings.model, 32, "square")


def published(**values: Any) -> ModelConfig:
    """A published network, as its launcher says it."""
    base = {
        "swiglu": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        "group_query_attention": True,
        "seq_length": 4096,
        "micro_batch_size": 1,
    }
    return config_from_flat_dict(RequestedRun, {**base, **values}).resolve(1).model


def test_published_sizes_are_met() -> None:
    mixtral = published(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        ffn_hidden_size=14336,
        num_experts=8,
        padded_vocab_size=32000,
    )
    assert count_parameters(mixtral).total == 46_702_792_704
    assert count_active_parameters(mixtral) == 12_879_925_248
    qwen = published(
        num_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        num_query_groups=4,
        kv_channels=128,
        ffn_hidden_size=6144,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
        qk_layernorm=True,
        padded_vocab_size=151936,
    )
    assert count_parameters(qwen).total / 1e9 == pytest.approx(30.5, abs=0.05)
    assert count_active_parameters(qwen) / 1e9 == pytest.approx(3.3, abs=0.06)


def test_the_optimizer_state_of_experts_is_cut_over_the_ranks_that_have_copies() -> None:
    settings = tiny.config(
        8, **{**MODELS["moe"], "expert_model_parallel_size": 4, "use_distributed_optimizer": True, "bf16": True}
    )
    (memory,) = flops.estimate_memory_by_pipeline_rank(
        settings, stage_specs_of_run(settings), data_parallel_size=8, num_microbatches=1
    )
    experts = count_rank_parameters(settings.model, stage_specs_of_run(settings), WeightShardCounts(1, 4, 1)).experts
    # Of a parameter in bf16 are kept 2 bytes, 4 of its gradient, and 12 of state over the ranks that have it: 8, of experts 2.
    assert memory.weights_and_optimizer == pytest.approx(memory.parameters * (6 + 12 / 8) + experts * (12 / 2 - 12 / 8))


@pytest.mark.parametrize("name", ["moe", "moe-bias", "moe-shared"])
@pytest.mark.parametrize("modules", [(), ("moe_act",), ("moe",)])
def test_activations_of_experts_are_about_what_autograd_keeps(name: str, modules: tuple[str, ...]) -> None:
    changes = {
        **MODELS[name],
        **SIZES,
        "hidden_size": 128,
        "moe_ffn_hidden_size": 96,
        "moe_layer_freq": "1",
        "normalization": "LayerNorm",
        "recompute_granularity": "selective" if modules else None,
        "recompute_modules": modules or None,
    }
    settings = tiny.config(**changes)
    run = tiny.run_of(settings)
    layer = make_layer(network_layer_plans(settings.model)[0], run.layer_build_context)
    set_global_param_names(layer)
    materialize_parameters(layer, run.mesh, seed=1)
    own, kept = {param.untyped_storage().data_ptr() for param in layer.parameters()}, {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(torch.randn(32, 2, 128, requires_grad=True), ForwardContext(AttentionMaskSpec()))
    del output
    estimate = 32 * 2 * flops.layer_activation_bytes_per_token(settings, mlp="moe")
    assert sum(kept.values()) == pytest.approx(estimate, rel=0.15)
