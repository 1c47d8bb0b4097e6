"""The table of mixers: a mixer that no other file names is planned, counted and checked by what its row answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.mixers.mixer import LinearShape, Mixer
from megatron.core.config.mixers.recurrent import RecurrentMixer
from megatron.core.config.mixers.table import MIXERS, recurrent_mixers
from megatron.core.config.plan.layers import LayerPlan, all_layer_plans, network_layer_plans
from megatron.core.config.plan.network import unused_kernel_ops
from megatron.core.config.plan.pattern import layer_symbols, suggested_hybrid_patterns
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.rules.engine import broken_rules
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.models import flops
from megatron.core.models.describe import count_parameters
from megatron.core.parallel.spec import FusedWeightSegment
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.sublayers import MIXER_MODULES
from megatron.inference.cache import cached_heads_and_sizes
from tests.helpers import tiny
from tests.parity.table import MODELS


class RunningMean(Mixer):
    """The mean of what the tokens before brought, with a gate."""

    name, symbol, title = "running_mean", "R", "a running mean"
    kernel_ops = frozenset({"running_mean"})

    def linear_shapes(self, model: ModelConfig) -> Mapping[str, LinearShape]:
        h = model.hidden_size
        return {"in_proj": LinearShape(h, (("v", h), ("gate", h))), "out_proj": LinearShape(h, (("", h),))}

    def forward_flops_per_token(self, model: ModelConfig, keys: float) -> float:
        return 3 * model.hidden_size

    def saved_bytes_per_token(self, config: RunConfig) -> float:
        return 20 * config.model.hidden_size / config.parallel.tp

    def matrix_sizes(self, model: ModelConfig, tp: int) -> Iterator[tuple[str, int, int]]:
        yield "the width of a running mean", model.hidden_size, tp

    def cached_heads(self, model: ModelConfig, tp: int) -> tuple[tuple[int, int], ...]:
        return ((1, model.hidden_size // tp),)

    def problems(self, run: RunConfig) -> Iterator[str]:
        if self.is_requested(run.model) and run.parallel.context_parallel_size > 1:
            yield "a running mean needs whole sequences; leave out --context-parallel-size"


class RunningMeanModule(nn.Module):
    """The module of `RunningMean`."""

    def __init__(self, build: LayerBuildContext, plan: LayerPlan) -> None:
        super().__init__()
        self.build, size = build, FusedWeightSegment(build.model.hidden_size)
        self.in_proj = build.make_column_linear(size.size, (size, size), bias=False, kind="in_proj")
        self.out_proj = build.make_row_linear(size.size, bias=False)

    def forward(self, normed: Tensor, context: ForwardContext, bias: Tensor | None = None) -> Tensor:
        values, gate = self.build.project(self.in_proj, normed).chunk(2, dim=-1)
        means = values.cumsum(0) / torch.arange(1, len(values) + 1)[:, None, None]
        return self.out_proj(means * gate.sigmoid())


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables with one more mixer."""
    monkeypatch.setitem(MIXERS, RunningMean.name, RunningMean())
    monkeypatch.setitem(MIXER_MODULES, RunningMean.name, RunningMeanModule)


def _config(pattern: str, world_size: int = 1, **changes: object) -> RunConfig:
    return tiny.config(world_size, num_layers=None, hybrid_layer_pattern=pattern, **changes)


def test_a_mixer_that_no_file_names_is_planned_built_and_counted(table: None) -> None:
    config, without = _config("R-*-"), _config("-*-")
    model, h = config.model, config.model.hidden_size
    first = network_layer_plans(model)[0]
    assert (first.mixer, first.mlp, first.has_attention) == ("running_mean", "none", False)
    # Its matrices cost 6 FLOPs an element, and the rest three times the forward pass.
    more = flops.flops_per_token(model, 16) - flops.flops_per_token(without.model, 16)
    assert more == 6 * 3 * h * h + 3 * 3 * h
    assert cached_heads_and_sizes(model, first, 2) == ((1, h // 2),)
    assert "running_mean" in unused_kernel_ops(without.model) - unused_kernel_ops(model)
    network = tiny.gpt(tiny.run_of(config), stage_specs_of_run(config)[0]).materialize(3)
    assert sum(weight.numel() for weight in network.parameters()) == count_parameters(model).total


def test_the_estimate_of_memory_asks_the_mixer_what_it_saves(table: None) -> None:
    config = _config("R-*-", normalization="RMSNorm", hidden_dropout=0.0)
    norm = 4 * 2 * config.model.hidden_size  # its input and output
    saved = flops.layer_activation_bytes_per_token(config, mlp="none", mixer=RunningMean.name) - norm
    assert saved == 20 * config.model.hidden_size
    memory, less = (
        flops.estimate_memory_by_pipeline_rank(one, stage_specs_of_run(one), data_parallel_size=1, num_microbatches=1)[
            0
        ].activations
        for one in (config, replace(_config("-*-", normalization="RMSNorm", hidden_dropout=0.0)))
    )
    tokens = config.train.seq_length * config.train.micro_batch_size
    assert memory - less == pytest.approx((saved + norm) * tokens)


def test_rules_ask_the_mixer_whether_it_fits_the_layout(table: None) -> None:
    assert not list(broken_rules(_config("R-*-"), 1))
    found = dict(broken_rules(_config("R-*-", 2, context_parallel_size=2), 2))
    assert found == {"states": "a running mean needs whole sequences; leave out --context-parallel-size"}
    assert not list(broken_rules(_config("--*-", 2, context_parallel_size=2), 2)), "of other networks it says nothing"
    fp8 = _config("R-*-", bf16=True, fp8_format="e4m3", fp8_recipe="mxfp8", hidden_size=80)
    assert "the width of a running mean is 80, no multiple" in dict(broken_rules(fp8, 1))["low-precision-sizes"]
    assert "R" in layer_symbols() and suggested_hybrid_patterns("rQ-", 1)[0] == "R-"


def test_every_row_has_a_module_and_a_symbol_of_its_own() -> None:
    assert MIXERS.keys() == MIXER_MODULES.keys()
    assert all(name == mixer.name for name, mixer in MIXERS.items())
    assert len(set(layer_symbols())) == len(layer_symbols())


@pytest.mark.parametrize("name", MODELS)
def test_the_settings_ask_for_every_mixer_that_layers_have(name: str) -> None:
    model = tiny.config(**MODELS[name]).model
    had = {mixer.name for plan in all_layer_plans(model) for mixer in plan.mixers}
    requested = {mixer.name for mixer in MIXERS.values() if mixer.is_requested(model)}
    assert had <= requested, (had, requested)
    recurrent = {one for one in had if isinstance(MIXERS[one], RecurrentMixer)}
    assert recurrent == {mixer.name for mixer in recurrent_mixers(model)}
