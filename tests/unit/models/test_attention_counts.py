"""Parameters and FLOPs of networks with gates, sinks and windows."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.models import flops
from megatron.core.models.describe import WeightShardCounts, count_parameters
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel.spec import param_spec_of
from tests.helpers import tiny
from tests.helpers.counts import count_layer_parameters

GATE = {
    "attention_output_gate": True,
    "softmax_type": "learnable",
    "group_query_attention": True,
    "num_query_groups": 2,
}


@pytest.mark.parametrize(
    "changes",
    [
        GATE,
        {**GATE, "add_bias_linear": False},
        {**GATE, "add_bias_linear": False, "add_qkv_bias": True},
        {"softmax_type": "off-by-one"},
    ],
)
def test_gates_and_sinks_are_counted(changes: dict[str, Any]) -> None:
    config = tiny.config(**changes)
    model = GPTModel(stage_specs_of_run(config)[0], tiny.run_of(config).layer_build_context)
    held = sum(param.numel() for param in model.parameters())
    assert count_parameters(config.model).total == held
    cut = sum(
        param.numel() for name, param in model.named_parameters() if "layers.0." in name and param_spec_of(param).shards
    )
    whole = count_layer_parameters(config.model)
    assert whole - count_layer_parameters(config.model, WeightShardCounts(2, 1, 2)) == cut // 2


@pytest.mark.parametrize(
    "window, pattern",
    [("3,0", None), ("3,0", "[1,0,1,1]"), ("0,0", "2"), ("100,0", None), ("-1,-1", None), ("12,0", None)],
)
def test_the_causal_count_leaves_out_what_a_window_hides(window: str, pattern: str | None) -> None:
    length = 16
    with_window, without = tiny.config(window_size=window, window_attn_skip_freq=pattern).model, tiny.config().model
    expected = flops.flops_per_token(without, length)
    for index in range(4):
        hidden = {None: True, "2": index % 2 == 0}.get(pattern, index != 1)
        left = int(window.split(",")[0])
        if hidden and left >= 0:
            met = sum(min(i, left) + 1 for i in range(length)) / length
            expected -= max(0.0, length / 2 - met) * 12 * without.query_projection_width
    assert flops.flops_per_token(with_window, length) == pytest.approx(expected, rel=1e-12)
    assert flops.flops_per_token(with_window, length, "square") == flops.flops_per_token(without, length, "square")
