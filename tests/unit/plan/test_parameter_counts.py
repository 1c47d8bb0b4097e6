"""What the rules accept can be built: random configurations, every rank's place, exact counts. No process groups are needed."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from megatron.cli.preflight import resolve_and_examine
from megatron.core.config.flags.declare import config_from_flat_dict
from megatron.core.config.rules.engine import broken_rules
from megatron.core.config.settings.run import RequestedRun, RunConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel.grid import axis_rank_groups
from megatron.plan.repair import mending_edits
from megatron.plan.setup import RunSetup
from megatron.plan.simulate import layout_build_check as built
from megatron.plan.simulate.layout_build_check import check_layout_parameters, mesh_without_groups

BASE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 12,
    "seq_length": 48,
    "micro_batch_size": 1,
    "train_iters": 10,
    "lr": 1e-3,
    "mock_data": True,
    "make_vocab_size_divisible_by": 4,
}
VOCABULARY = 50


def some(*values: Any) -> tuple[Any, ...]:
    """The first value more often than the others, which keeps most configurations acceptable."""
    return (*values[:1] * 2, *values)


SHAPE: dict[str, tuple[Any, ...]] = {
    "num_layers": some(4, 6, 3, 5),
    "hidden_size": some(48, 96, 50),
    "num_attention_heads": some(12, 8, 6, 5),
    "ffn_hidden_size": some(None, 96, 60, 33),
    "kv_channels": some(None, None, 4, 6),
    "group_query_attention": some(False, True),
    "num_query_groups": some(4, 2, 1, 6),
    "normalization": some("LayerNorm", "RMSNorm"),
    "add_bias_linear": some(True, False),
    "add_qkv_bias": some(False, True),
    "swiglu": some(False, True),
    "squared_relu": some(False, False, True),
    "qk_layernorm": some(False, True),
    "sandwich_norm": some(False, False, True),
    "untie_embeddings_and_output_weights": some(False, True),
    "position_embedding_type": some("rope", "learned_absolute", "none", "yarn", "relative"),
    "softmax_type": some("vanilla", "vanilla", "learnable"),
    "attention_output_gate": some(False, False, True),
    "window_size": some(None, None, "4,0"),
    "architecture": some("gpt", "gpt", "bert", "t5"),
    "seq_length": some(48, 32, 30),
    "bert_binary_head": some(True, False),
    "embedding_layernorm": some(False, False, False, True),
    "mtp_num_layers": some(None, None, 1, 2),
    "mtp_use_repeated_layer": some(False, False, True),
}
EXPERTS: dict[str, tuple[Any, ...]] = {
    "num_experts": some(None, 8, 6),
    "moe_router_topk": some(2, 2, 1),
    "moe_ffn_hidden_size": some(None, 24, 18),
    "moe_layer_freq": some("1", "2"),
    "moe_shared_expert_intermediate_size": some(None, None, 24),
    "moe_shared_expert_gate": some(False, False, True),
    "moe_router_score_function": some("softmax", "sigmoid"),
    "moe_router_enable_expert_bias": some(False, False, True),
    "expert_model_parallel_size": some(1, 2, 4),
    "expert_tensor_parallel_size": some(None, 1, 2),
}
LATENTS: dict[str, tuple[Any, ...]] = {
    "multi_latent_attention": some(False, False, True),
    "kv_lora_rank": some(32, 12),
    "q_lora_rank": some(None, 10),
    "v_head_dim": some(128, 6),
    "qk_head_dim": some(128, 6),
    "qk_pos_emb_head_dim": some(64, 4),
}
LAYOUT: dict[str, tuple[Any, ...]] = {
    "tensor_model_parallel_size": some(1, 2, 4, 3),
    "pipeline_model_parallel_size": some(1, 2, 3),
    "context_parallel_size": some(1, 1, 2),
    "sequence_parallel": some(False, True),
    "num_virtual_stages_per_pipeline_rank": some(None, 2),
    "use_tp_pp_dp_mapping": some(False, True),
    "account_for_embedding_in_pipeline_split": some(False, False, True),
    "decoder_last_pipeline_num_layers": some(None, None, 1),
    "use_distributed_optimizer": some(False, True),
    "global_batch_size": some(None, 8),
}


def left_out(values: dict[str, Any]) -> dict[str, Any]:
    """What belongs to a feature goes with it, or hardly anything would be accepted."""
    network, drop = values["architecture"], set()
    if values["num_experts"] is None or network != "gpt":
        drop |= set(EXPERTS)
    if not values["multi_latent_attention"] or network != "gpt":
        drop |= set(LATENTS)
    else:
        drop |= {"group_query_attention", "add_qkv_bias", "softmax_type", "attention_output_gate"}
        values = {**values, "position_embedding_type": "rope"}
    if values["mtp_num_layers"] is None or network != "gpt":
        drop |= {"mtp_num_layers", "mtp_use_repeated_layer"}
    if network != "bert":
        drop |= {"embedding_layernorm", "bert_binary_head"}
    if network != "gpt":
        drop |= {"context_parallel_size"}
    if values["pipeline_model_parallel_size"] == 1:
        drop |= {"num_virtual_stages_per_pipeline_rank", "decoder_last_pipeline_num_layers"}
    if network == "t5":
        drop |= {"softmax_type", "attention_output_gate", "window_size", "sandwich_norm"}
    elif values["position_embedding_type"] == "relative":
        drop |= {"position_embedding_type"}
    return {**BASE, **{name: value for name, value in values.items() if name not in drop}}


def chosen(seed: int) -> tuple[dict[str, Any], int]:
    """A configuration, and how many ranks there are."""
    random = Random(seed)
    return left_out(
        {name: random.choice(values) for name, values in {**SHAPE, **EXPERTS, **LATENTS, **LAYOUT}.items()}
    ), random.choice(RANKS)


RANKS = some(8, 12, 4, 2, 6)
CONFIGS = st.integers(0, 2**32).map(chosen)
FEW = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=350, **FEW)
@given(case=CONFIGS)
def accepted(found: list[tuple[dict[str, Any], int]], case: tuple[dict[str, Any], int]) -> None:
    """Collect what the rules accept, once each. On the way: no rule fails, whatever it is asked."""
    if case not in found and not resolve_and_examine(config_from_flat_dict(RequestedRun, case[0]), case[1])[1]:
        found.append(case)


def test_what_the_rules_accept_builds_on_every_rank_with_the_exact_parameter_count() -> None:
    found: list[tuple[dict[str, Any], int]] = []
    accepted(found)
    assert len(found) > 60, f"only {len(found)} configurations were accepted, which shows little"
    assert {"gpt", "bert", "t5"} <= {values["architecture"] for values, _ in found}
    for feature in (
        "num_experts",
        "multi_latent_attention",
        "mtp_num_layers",
        "sequence_parallel",
        "num_virtual_stages_per_pipeline_rank",
    ):
        assert any(values.get(feature) for values, _ in found), f"none with {feature}"
    for feature in (
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "pipeline_model_parallel_size",
    ):
        assert any((values.get(feature) or 1) > 1 for values, _ in found), f"none with {feature}"
    for values, ranks in found:
        config = config_from_flat_dict(RequestedRun, values).resolve(ranks)
        answer = check_layout_parameters(config, ranks, true_vocab_size=VOCABULARY)
        wanted = config.model.num_layers * (1 + config.model.architecture.is_encoder_decoder)
        assert answer.problems == () and answer.layers == wanted, (ranks, values, answer)


@settings(max_examples=25, **FEW)
@given(case=CONFIGS)
def test_a_change_of_a_random_configuration_keeps_the_rule_that_it_is_for(case: tuple[dict[str, Any], int]) -> None:
    start = RunSetup(config_from_flat_dict(RequestedRun, case[0]), case[1])
    rules = start.find_broken_rules()
    for one in rules:
        for edit in mending_edits(start, one):
            after = start.with_values({edit.name: edit.after}).find_broken_rules()
            assert sum(other.rule == one.rule for other in after) < sum(other.rule == one.rule for other in rules)


def config_of(ranks: int = 4, **changes: Any) -> RunConfig:
    config = config_from_flat_dict(RequestedRun, {**BASE, **changes}).resolve(ranks)
    assert not list(broken_rules(config, ranks))
    return config


def test_a_missing_layer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    config, whole = config_of(pipeline_model_parallel_size=2), built.stage_specs_of_run

    def short(config: RunConfig) -> Any:
        first, *rest = whole(config)
        return (dataclasses.replace(first, layers=first.layers[1:]), *rest)

    monkeypatch.setattr(built, "stage_specs_of_run", short)
    said = " ".join(check_layout_parameters(config, 4, true_vocab_size=VOCABULARY).problems)
    assert "the stages have 3 layers, and the network 4" in said and "the ranks hold" in said


def test_a_parameter_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = built.build_stage_on_meta

    def wide(*arguments: Any) -> GPTModel:
        network = whole(*arguments)
        linear = network.decoder.layers["0"].self_attention.linear_proj
        linear.extra = nn.Parameter(linear.weight.detach().clone())
        linear.extra.spec = dataclasses.replace(linear.weight.spec, name="extra")
        return network

    monkeypatch.setattr(built, "build_stage_on_meta", wide)
    said = check_layout_parameters(config_of(tensor_model_parallel_size=2), 4, true_vocab_size=VOCABULARY).problems
    assert len(said) == 2 and all("parameters" in line for line in said), said


def test_elements_that_no_rank_holds_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = built._representative_rank_meshes
    monkeypatch.setattr(
        built,
        "_representative_rank_meshes",
        lambda *arguments: [place for place in whole(*arguments) if place.tp.rank == 0],
    )
    said = check_layout_parameters(config_of(tensor_model_parallel_size=2), 4, true_vocab_size=VOCABULARY).problems
    assert any("linear_fc1.weight is (192, 48), and the ranks hold 4,608 of its elements" in line for line in said), (
        said
    )


def test_a_mesh_made_by_hand_is_where_its_rank_is() -> None:
    config = config_of(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    lists = axis_rank_groups(config.parallel, 8)
    for rank in range(8):
        mesh = mesh_without_groups(lists, rank)
        assert (mesh.tp.rank, mesh.dp.rank, mesh.pp.rank) == (
            rank % 2,
            rank // 2 % 2,
            rank // 4,
        )  # tensor, data, pipeline
        assert mesh.pp_backward.ranks == mesh.pp.ranks == (rank % 4, rank % 4 + 4) and mesh.tp.group is None
