"""Layers of several kinds: what symbols and flags make of a network, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.mixers.table import recurrent_mixers
from megatron.core.config.plan.layers import mtp_depth_layer_plans, network_layer_plans
from megatron.core.config.plan.pattern import suggested_hybrid_patterns
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.rules.engine import broken_rules
from megatron.core.models.flops import flops_per_token
from tests.helpers import tiny
from tests.helpers.counts import count_layer_parameters

SMALL: dict[str, Any] = {"num_layers": None, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 6}


def problems(world_size: int = 1, **changes: Any) -> str:
    return "; ".join(message for _, message in broken_rules(tiny.config(world_size, **changes), world_size))


def test_symbols_are_layers_of_one_half_each() -> None:
    model = tiny.config(hybrid_layer_pattern="M-*|GE", num_experts=4, pipeline_model_parallel_size=1, **SMALL).model
    assert [(row.mixer, row.mlp) for row in network_layer_plans(model)] == [
        ("mamba", "none"), ("none", "dense"), ("attention", "none"), ("gated_delta_net", "none"), ("none", "moe"),
    ]  # fmt: skip
    assert model.num_layers == 5 and {one.name for one in recurrent_mixers(model)} == {"mamba", "gated_delta_net"}


def test_bars_end_pipeline_stages() -> None:
    config = tiny.config(4, hybrid_layer_pattern="M|M-*|-M|M", pipeline_model_parallel_size=2, **SMALL)
    assert [len(stage.layers) for stage in stage_specs_of_run(config)] == [1, 3, 2, 1]
    assert [stage.rank for stage in stage_specs_of_run(config)] == [0, 1, 0, 1]


def test_every_nth_layer_is_left_as_attention() -> None:
    delta = {"experimental_attention_variant": "gdn", "num_layers": 4}
    mixers = [row.mixer for row in network_layer_plans(tiny.config(linear_attention_freq="2", **delta).model)]
    assert mixers == ["gated_delta_net", "attention"] * 2
    listed = [row.mixer for row in network_layer_plans(tiny.config(linear_attention_freq="[0]*1+[1]*3", **delta).model)]
    assert listed == ["attention", *["gated_delta_net"] * 3]


def test_flops_are_those_of_the_matrices_the_taps_and_the_state() -> None:
    plain, more = (tiny.config(hybrid_layer_pattern=symbols, **SMALL).model for symbols in ("*-", "*-M"))
    hidden, groups = plain.hidden_size, 2 * 6
    inner = more.hybrid.mamba_num_heads * 8
    elements = hidden * (2 * inner + 2 * groups + inner // 8) + inner * hidden
    expected = 3 * (2 * elements + 2 * 4 * (inner + 2 * groups) + 7 * inner * 6)
    assert flops_per_token(more, 64) - flops_per_token(plain, 64) == expected
    vectors = (inner + 2 * groups) * 5 + 3 * inner // 8 + inner
    norm = hidden if more.normalization == "RMSNorm" else 2 * hidden
    assert count_layer_parameters(more, plan=network_layer_plans(more)[2]) == elements + vectors + norm


def test_mamba_beside_attention_costs_what_both_cost() -> None:
    small = {**SMALL, "num_layers": 2, "swiglu": True, "add_bias_linear": False}
    plain, both = (tiny.config(parallel_mamba=there, **small).model for there in (False, True))
    alone = [
        tiny.config(hybrid_layer_pattern=symbols, **{**small, "num_layers": None}).model for symbols in ("MM*", "*")
    ]
    assert [{one.name for one in row.mixers} for row in network_layer_plans(both)] == [{"attention", "mamba"}] * 2 and {
        one.name for one in recurrent_mixers(both)
    } == {"mamba"}
    more = flops_per_token(alone[0], 64) - flops_per_token(alone[1], 64)
    assert flops_per_token(both, 64) - flops_per_token(plain, 64) == pytest.approx(more)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hybrid_layer_pattern": "MX"}, "'X' means no layer"),
        ({"hybrid_layer_pattern": "M M"}, "' ' means no layer"),
        ({"hybrid_layer_pattern": "M/M|M"}, r"write no \| behind /"),
        ({"hybrid_layer_pattern": "M", "mamba_state_dim": 0}, "--mamba-state-dim 0: each must be at least 1"),
        ({"hybrid_layer_pattern": "M", "mamba_head_dim": -8}, "--mamba-head-dim -8: each must be at least 1"),
        ({"hybrid_layer_pattern": "G", "linear_conv_kernel_dim": 0}, "--linear-conv-kernel-dim 0: each must be at least 1"),
        ({"hybrid_layer_pattern": "M/M/*"}, "the same for all"),
        ({"hybrid_layer_pattern": "M/M", "mtp_num_layers": 2}, "the 1 depths of --hybrid-layer-pattern"),
        ({"hybrid_layer_pattern": "MD"}, "D is sparse attention"),
        ({"hybrid_attention_ratio": 0.6, "hybrid_mlp_ratio": 0.6, "num_layers": 4}, "together at most 1"),
        ({"hybrid_layer_pattern": "M--", "num_layers": 2}, "the 3 symbols of --hybrid-layer-pattern are two numbers"),
        ({"hybrid_layer_pattern": "ME"}, "go together"),
        ({"hybrid_layer_pattern": "M+"}, r"\+ in --hybrid-layer-pattern and --multi-latent-attention go together"),
        ({"hybrid_layer_pattern": "M", "mamba_num_groups": 3}, "each group serves as many heads"),
        ({"hybrid_layer_pattern": "M", "mamba_time_step_limit": (0.1, 0.01)}, "the smallest and the largest"),
        ({"hybrid_layer_pattern": "M", "parallel_mamba": True}, "puts Mamba-2 beside the attention"),
        ({"ssm_multipliers": (0.5, 2.0), "num_layers": 2}, "--ssm-multipliers has 2 factors; give one each of z, x, B, C, dt"),
        ({"key_multiplier": 0.0, "num_layers": 2}, "a factor is a number other than 0"),
        ({"mlp_multipliers": (0.5, 2.0), "num_layers": 2}, "--mlp-multipliers: factors are for GPTs with gated MLPs"),
        ({"linear_norm_before_sublayer": True, "num_layers": 2}, "--linear-norm-before-sublayer has no effect; give --norm-after-sublayer, or"),
        ({"linear_norm_epsilon": 0.0, "num_layers": 2}, "--linear-norm-epsilon 0 is no positive number"),
        ({"mamba_norm_epsilon": -1.0, "num_layers": 2}, "--mamba-norm-epsilon -1 is no positive number"),
        ({"linear_attention_freq": "2", "num_layers": 2}, "--linear-attention-freq 2 has no effect; give --experimental-attention-variant, or"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((AssertionError, ConfigError), match=message):
        raise AssertionError(problems(**{**SMALL, **changes}))


def test_ranks_divide_heads_and_groups() -> None:
    changes = {**SMALL, "hybrid_layer_pattern": "M", "mamba_num_heads": 8}
    assert "cannot be divided over --tensor-model-parallel-size 4" in problems(
        4, tensor_model_parallel_size=4, **changes
    )
    assert not problems(4, context_parallel_size=4, **changes)
    odd = {**changes, "mamba_num_heads": 6, "mamba_num_groups": 3}
    assert not problems(4, context_parallel_size=4, **odd), "states are gathered where heads cannot be divided"


@pytest.mark.parametrize(
    "pattern, flags, message",
    [
        ("M|*|-", {}, "| in --hybrid-layer-pattern: 3 stages are not a multiple of --pipeline-model-parallel-size 2"),
        ("M*-", {}, "or say how to cut with | in --hybrid-layer-pattern"),
        ("M|*", {"num_layers_per_virtual_pipeline_stage": 1}, "| in --hybrid-layer-pattern each say how many chunks a rank has"),
        ("M*-", {"pipeline_model_parallel_layout": "Ett|t|L"}, "--pipeline-model-parallel-layout: 3 stages are not a multiple"),
    ],
)  # fmt: skip
def test_a_cut_that_cannot_be_is_named_as_it_was_given(pattern: str, flags: dict[str, Any], message: str) -> None:
    said = problems(2, hybrid_layer_pattern=pattern, pipeline_model_parallel_size=2, **SMALL, **flags)
    assert message in said and said.count("stages are not a multiple") <= 1


@pytest.mark.parametrize(
    "pattern, stages, nearest",
    [
        ("mm*-", 1, "MM*-"), ("M-|M*/*|-", 2, "M-|M*/*-"), ("M-/M-/M*", 1, "M-/M-/M-"), ("M-M*/", 1, "M-M*"), ("MD-", 1, "M*-"), ("M X*", 1, "M*"),
    ],
)  # fmt: skip
def test_a_pattern_that_cannot_be_read_has_one_beside_it_that_can(pattern: str, stages: int, nearest: str) -> None:
    assert suggested_hybrid_patterns(pattern, stages)[0] == nearest
    assert suggested_hybrid_patterns("M-M*-", 2)[-1] == "M-|M*-"


@pytest.mark.parametrize(
    "layers, ratios, pattern",
    [(8, (0.25, 0.0), "MM*MM*MM"), (8, (0.125, 0.5), "M-M-*-M-"), (5, (0.0, 0.4), "MM-M-"), (4, (1.0, 0.0), "****")],
)
def test_ratios_stand_for_a_pattern(layers: int, ratios: tuple[float, float], pattern: str) -> None:
    changes = {**SMALL, "num_layers": layers, "hybrid_attention_ratio": ratios[0], "hybrid_mlp_ratio": ratios[1]}
    model = tiny.config(**changes).model
    counts = (model.hybrid.layer_symbols.count("*"), model.hybrid.layer_symbols.count("-"))
    assert counts == tuple(round(layers * ratio) for ratio in ratios)
    assert model.hybrid.layer_symbols == pattern


def test_a_slash_begins_the_layers_of_each_depth_of_multi_token_prediction() -> None:
    config = tiny.config(2, hybrid_layer_pattern="M-|*/M-/M-", pipeline_model_parallel_size=2, **SMALL)
    model = config.model
    assert model.mtp.mtp_num_layers == 2 and not problems(
        2, hybrid_layer_pattern="M-|*/M-/M-", pipeline_model_parallel_size=2, **SMALL
    )
    assert [[(row.index, row.mixer, row.mlp) for row in mtp_depth_layer_plans(model, depth)] for depth in (0, 1)] == [
        [(3, "mamba", "none"), (4, "none", "dense")], [(5, "mamba", "none"), (6, "none", "dense")],
    ]  # fmt: skip
    assert [(len(stage.layers), stage.has_mtp) for stage in stage_specs_of_run(config)] == [(2, False), (1, True)]


@pytest.mark.parametrize("freq, windows", [(None, [True, True]), ("2", [True, False]), ("[0,1,1]", [False, True])])
def test_windows_of_a_depth_begin_with_its_first_symbol(freq: str | None, windows: list[bool]) -> None:
    changes = {**SMALL, "window_size": "1,0", "window_attn_skip_freq": freq}
    model = tiny.config(hybrid_layer_pattern="M-*/**/**", **changes).model
    for depth in (0, 1):
        rows = mtp_depth_layer_plans(model, depth)
        assert [row.window for row in rows] == [(1, 0) if windowed else None for windowed in windows]
        assert [row.index for row in rows] == [3 + 2 * depth, 4 + 2 * depth]


@pytest.mark.parametrize("pattern", ["M-|M-|", "|M-|M-", "M-||M-"])
def test_a_bar_too_many_is_told_as_a_stage_without_layers(pattern: str) -> None:
    told = problems(2, hybrid_layer_pattern=pattern, pipeline_model_parallel_size=2, **SMALL)
    assert "3 stages are not a multiple" in told and "makes a stage without layers" in told
    told = problems(2, hybrid_layer_pattern="M|M|M", pipeline_model_parallel_size=2, **SMALL)
    assert "3 stages are not a multiple" in told and "without layers" not in told


def test_bars_mean_nothing_on_one_pipeline_rank() -> None:
    assert len(stage_specs_of_run(tiny.config(hybrid_layer_pattern="M|M-*|-M|M", **SMALL))) == 1
