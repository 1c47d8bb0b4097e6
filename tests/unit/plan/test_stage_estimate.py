"""Estimates from one layer of each kind against dry runs of all layers, and what the search shows against the dry run of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import pytest

from megatron.cli.commands.plan import make_layer_estimator
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.plan.cost import step_cost
from megatron.plan.hardware import PROFILES
from megatron.plan.layer_profile import LayerProfiler
from megatron.plan.layout_search import FittingLayout, LayerEstimator, search_layouts
from megatron.plan.simulate.dry_run import dry_run
from megatron.plan.simulate.one_microbatch import layer_runner
from megatron.plan.stage_estimate import estimate_tolerance, profiled_estimate
from tests.unit.plan.drawn_layouts import FAMILIES, drawn_layouts
from tests.unit.plan.hand_made import VOCABULARY, config_of, setting_of

MACHINE = PROFILES["h100-80"]
CLOSE = 0.03  # relative


def wrong_estimates(seed: int, families: tuple[str, ...], count: int) -> list[str]:
    """Drawn layouts whose estimate is further from their dry run than the search says, or than 64 MiB in memory, a millisecond in time."""
    profiler, wrong = LayerProfiler(MACHINE, layer_runner(on_gpu=True, until=math.inf)), []
    for family, ranks, config, flags in islice(drawn_layouts(seed, families), count):
        estimate, within = (
            profiled_estimate(config, ranks, profiler, stage_specs_of_run(config)),
            estimate_tolerance(config),
        )
        run = dry_run(config, ranks, on_gpu=True)
        memory, seconds = run.worst_trace.peak, step_cost(run, MACHINE).time.seconds
        if not (estimate.needs, estimate.time.seconds) == (
            pytest.approx(memory, rel=within, abs=2**26),
            pytest.approx(seconds, rel=within, abs=1e-3),
        ):
            more = f"memory {estimate.needs / memory - 1:+.1%}, time {estimate.time.seconds / seconds - 1:+.1%}"
            wrong.append(f"{more}: {family} on {ranks} ranks: {flags}")
    return wrong


def test_one_layer_of_each_kind_tells_what_the_whole_step_takes() -> None:
    assert not wrong_estimates(5, ("gqa",), 1)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_drawn_layouts_take_what_their_layers_tell(seed: int) -> None:
    assert not wrong_estimates(seed, tuple(FAMILIES), 10)


@pytest.mark.nightly
@pytest.mark.parametrize("families", [("vlm", "t5", "bert"), ("fp8",)])
def test_other_networks_and_numbers_take_what_their_layers_tell(families: tuple[str, ...]) -> None:
    assert not wrong_estimates(3, families, 9)


@pytest.mark.parametrize(
    "flags, ranks", [("--num-experts 4 --moe-router-topk 2", 2), ("--num-layers 4 --pipeline-model-parallel-size 2", 4)]
)
def test_layers_that_fsdp2_gathers_beside_others_tell_nothing(flags: str, ranks: int) -> None:
    config = config_of(f"{flags} --use-torch-fsdp2", ranks)
    assert make_layer_estimator(MACHINE, 0, until=math.inf)(config, ranks) is None


def test_a_layout_of_llama_70b_that_its_dry_run_refuses_is_refused_by_its_layers() -> None:
    """By formulas it took 71.7 GiB and 227 s, by its dry run of 15 seconds 85.1 GiB and 255 s."""
    config = config_of(
        "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
        "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 131072 --swiglu --disable-bias-linear "
        "--untie-embeddings-and-output-weights --normalization RMSNorm --position-embedding-type rope --hidden-dropout 0 "
        "--attention-dropout 0 --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--global-batch-size 1024 --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 4 "
        "--context-parallel-size 2",
        32,
        vocabulary=128256,
    )
    estimate = make_layer_estimator(MACHINE, 0, until=math.inf)(config, 32)
    assert estimate is not None
    assert estimate.needs / 2**30 == pytest.approx(85.10, rel=CLOSE) and estimate.needs > MACHINE.usable_bytes()
    assert estimate.time.seconds == pytest.approx(255, rel=CLOSE)


def test_what_a_search_shows_first_its_dry_run_confirms() -> None:
    flags = (
        "--hidden-size 1024 --seq-length 1024 --max-position-embeddings 1024 --num-attention-heads 8 --swiglu --num-layers 4 "
        "--global-batch-size 2 --bf16 --attention-dropout 0 --hidden-dropout 0"
    )
    setting, machine = setting_of(flags), replace(MACHINE, memory=1.25e9, usable=1.0)

    def first_and_its_peak(estimator: LayerEstimator | None) -> tuple[FittingLayout, int]:
        found = search_layouts(setting, machine, true_vocab_size=VOCABULARY, planner=None, estimator=estimator)
        return found.fits[0], dry_run(found.fits[0].config, 1).worst_trace.peak

    first, peak = first_and_its_peak(None)
    assert first.needs <= machine.memory < peak, "the formulas take a layout that does not fit for the fastest"
    first, peak = first_and_its_peak(make_layer_estimator(machine, 0, until=math.inf))
    assert first.source == "layers" and first.needs == pytest.approx(peak, rel=CLOSE) and peak <= machine.memory
