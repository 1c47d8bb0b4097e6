"""Passes that are counted again against passes that are followed op by op: the same events, bytes and moments."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.rules.engine import broken_rules
from megatron.core.config.settings.run import RunConfig
from megatron.core.transformer.mlp import MLP
from megatron.plan.cost import step_cost
from megatron.plan.hardware import PROFILES
from megatron.plan.simulate.collective_matching import match_collectives
from megatron.plan.simulate.dry_run import dry_run
from megatron.plan.simulate.trace import DryRunResult, EventList, Trace
from tests.helpers import tiny
from tests.unit.plan.test_dry_run import CHANGES, SMALL

PP2 = {**SMALL, "pipeline_model_parallel_size": 2, "num_layers": 4, "global_batch_size": 6}
CHUNKS = {"num_layers_per_virtual_pipeline_stage": 1}
EXPERTS = {
    "num_experts": 4,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.1,),
}
SHARED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "bf16": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
NAMES = ("peak", "peak_event", "at_peak", "steady", "kept_per_microbatch", "parameters", "place")


def again(trace: Trace) -> int:
    """EventList that were not followed."""
    assert isinstance(trace.events, EventList)
    return sum(len(part.events) for part in trace.events.parts if part.again)


def agree(config: RunConfig, ranks: int, some: Sequence[int] | None = None) -> tuple[DryRunResult, DryRunResult]:
    """The dry runs of a whole step, of all ranks or some, which are alike: the one that followed all of it, and the other."""
    followed, counted = dry_run(config, ranks, some, whole=True, follows=True), dry_run(config, ranks, some, whole=True)
    for one, other in zip(followed.traces, counted.traces, strict=True):
        assert again(one) == 0
        for number, (event, found) in enumerate(zip(one.events, other.events, strict=True)):
            assert found == event, f"event {number} of rank {one.rank}"
        for name in NAMES:
            assert getattr(other, name) == getattr(one, name), f"{name} of rank {one.rank}"
        # Behind the last operation all is let go at once, in no order that matters.
        timelines = [[point for point in trace.timeline if point[0] < len(trace.events) - 2] for trace in (one, other)]
        assert timelines[0] == timelines[1] and timelines[0]
    return followed, counted


def test_what_is_counted_again_is_what_following_it_gives_event_for_event():
    followed, counted = agree(tiny.config(2, **PP2), 2)
    assert all(again(trace) > 0.2 * len(trace.events) for trace in counted.traces)
    # And who reads the traces finds the same in both.
    times = [step_cost(run, PROFILES["h200"]) for run in (counted, followed)]
    assert (
        times[0].time.seconds == pytest.approx(times[1].time.seconds, rel=1e-9) and times[0].traffic == times[1].traffic
    )
    assert match_collectives(counted) == match_collectives(followed)


@pytest.mark.parametrize(
    "changes",
    [
        {**CHUNKS, **SHARED, "expert_model_parallel_size": 2, "mtp_num_layers": 1},
        pytest.param(FULL, marks=pytest.mark.nightly),
    ],
    ids=["chunks", "recomputed"],
)
def test_experts_that_note_their_losses_in_either_pass_are_counted_again_as_they_are_followed(changes):
    ranks = 2 * changes.get("expert_model_parallel_size", 1)
    _, counted = agree(
        tiny.config(ranks, **{**PP2, "global_batch_size": 3 * ranks, **EXPERTS, **changes}), ranks, [ranks // 2]
    )
    assert all(again(trace) > 0 for trace in counted.traces)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
def test_random_configurations_are_counted_again_as_they_are_followed(seed):
    chance, found = random.Random(seed), 0
    while found < 12:
        ranks, changes = chance.choice((2, 4)), {**PP2, "global_batch_size": chance.choice((12, 16))}
        for change in chance.sample(CHANGES, chance.randint(1, 5)):
            changes |= {
                name: value for name, value in change.items() if name not in ("num_layers", "pipeline_schedule")
            }
        try:
            config = tiny.config(ranks, **changes)
            if list(broken_rules(config, ranks)):
                continue
        except (ConfigError, AssertionError, ZeroDivisionError):
            continue
        found += 1
        agree(config, ranks)


@pytest.mark.parametrize(
    "more", ["left behind", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("unlike", "handed on"))]
)
def test_passes_that_differ_or_leave_something_behind_are_followed_to_the_end(monkeypatch, more):
    plain, passes, kept = MLP.forward, Counter(), []

    def forward(self: MLP, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        passes[self] += 1
        if more != "unlike":
            del kept[: len(kept) if more == "handed on" else 0]
            kept.append(x * 2.0)  # which stays, or ends in the pass of another microbatch
        elif passes[self] % 2:
            x = x * 1.0
        return plain(self, x, *rest)

    monkeypatch.setattr(MLP, "forward", forward)
    _, counted = agree(tiny.config(2, **PP2), 2)
    assert all(again(trace) == 0 for trace in counted.traces)
