"""Ranks that would hang are found from what they do, and ranks that would not are left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from megatron.core.distributed import finalize
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.parallel.grid import axis_rank_groups
from megatron.core.parallel.mesh import Mesh
from megatron.plan.simulate.collective_matching import (
    CollectiveMatchReport,
    RankCommunicationSequence,
    match_collectives,
    match_rank_communication,
    rank_communication_of,
)
from megatron.plan.simulate.dry_run import dry_run
from megatron.plan.simulate.trace import DryRunResult, StepEvent, Trace
from tests.helpers import tiny
from tests.parity.table import MODELS, ROWS, named, read_layout

ROW = "tp2 sp pp2 mb2", "qk-norm"
SAMPLE = (
    ROW,
    ("pp2 vpp2 blocking", "llama"),
    ("cp4 two-level mb2", "llama"),
    ("ep2 dp2 alltoall", "moe-balanced"),
    ("pp2 vpp2 dp2 fsdp keep-layers mb2", "llama-tied"),
    ("hybrid dp4 a2a mb2", "packed"),
    ("pp2 ep2 dp2 turns zero overlap-reduce bucket600", "moe-shared-bias"),
)


def meets(
    group: tuple[int, ...],
    name: str = "all_reduce",
    shape: tuple[int, ...] = (4, 2),
    dtype: str = "float32",
    peer: int = -1,
    axis: str = "tp",
) -> StepEvent:
    """A collective."""
    return StepEvent(
        "collective",
        name,
        f"layer.py:{len(shape)}",
        "F0.0",
        axis=axis,
        ranks=group,
        peer=peer,
        shape=shape,
        dtype=dtype,
    )


def begins(action: str) -> StepEvent:
    """The beginning of an action."""
    return StepEvent("action", action, action=action)


def sends(
    peer: int, action: str = "F0.0", shape: tuple[int, ...] = (4, 2), axis: str = "pp", ranks: tuple[int, ...] = (0, 1)
) -> StepEvent:
    """A message that leaves."""
    return StepEvent(
        "send", "send", "executor.py:1", action, axis=axis, ranks=ranks, peer=peer, shape=shape, dtype="float32"
    )


def takes(
    peer: int, action: str = "F1.0", shape: tuple[int, ...] = (4, 2), axis: str = "pp", ranks: tuple[int, ...] = (0, 1)
) -> StepEvent:
    """A message that comes."""
    return StepEvent(
        "receive", "receive", "executor.py:2", action, axis=axis, ranks=ranks, peer=peer, shape=shape, dtype="float32"
    )


def judged(*ranks: list[StepEvent], overlap: bool = True) -> CollectiveMatchReport:
    """What is said of ranks that do this."""
    lines = {rank: rank_communication_of(rank, rank, events, {}) for rank, events in enumerate(ranks)}
    return match_rank_communication(lines, overlap=overlap)


PAIR = (0, 1)


@pytest.mark.parametrize(
    "second, kind",
    [
        ([meets(PAIR), meets(PAIR, "all_gather")], ""),
        ([meets(PAIR, "all_gather"), meets(PAIR)], "operation"),
        ([meets(PAIR)], "count"),
        ([], "count"),
        ([meets(PAIR), meets(PAIR, "all_gather", (4, 3))], "shape"),
        ([meets(PAIR, dtype="bfloat16"), meets(PAIR, "all_gather")], "dtype"),
        ([meets(PAIR, shape=(8,)), meets(PAIR, "all_gather")], ""),  # as many elements, another shape
    ],
)
def test_ranks_of_a_group_come_to_the_same_collectives_in_the_same_order(second: list[StepEvent], kind: str) -> None:
    found = judged([meets(PAIR), meets(PAIR, "all_gather")], second)
    assert [problem.kind for problem in found.problems] == [kind] * bool(kind), found.text


def test_the_first_that_does_not_fit_is_shown_with_both_lines() -> None:
    found = judged([meets(PAIR), meets(PAIR, shape=(3,))], [meets(PAIR), meets(PAIR, shape=(2, 2))])
    assert found.problems[0].says == "number 2 of the group of ranks 0, 1: different sizes"
    assert "rank 0, F0.0: all_reduce of 3 float32 at layer.py:1" in found.text
    assert "rank 1, F0.0: all_reduce of 2x2 float32 at layer.py:2" in found.text
    assert judged([meets(PAIR, "broadcast", peer=0)], [meets(PAIR, "broadcast", peer=1)]).problems[0].kind == "source"
    assert judged([meets(PAIR, "all_to_all", (5, 4))], [meets(PAIR, "all_to_all", (3, 4))]).problems == (), (
        "each rank sends rows of its own"
    )
    assert judged([meets(PAIR, "all_to_all", (5, 4))], [meets(PAIR, "all_to_all", (5, 3))]).problems[0].kind == "shape"


@pytest.mark.parametrize(
    "second, kind",
    [
        ([takes(0)], ""),
        ([], "count"),
        ([takes(0, shape=(2, 4))], "shape"),
        ([sends(0)], "direction"),
        ([replace(takes(0), dtype="float16")], "dtype"),
        ([takes(0, axis="pp_backward")], "count"),  # another group: nobody sends there
        ([takes(0), takes(0, "F1.1")], "count"),
    ],
)
def test_every_message_has_two_ends_that_mean_the_same(second: list[StepEvent], kind: str) -> None:
    found = judged([sends(1)], second)
    assert {problem.kind for problem in found.problems} == ({kind} if kind else set()), found.text


def test_ranks_that_receive_before_they_send_wait_in_a_circle() -> None:
    ranks = (0, 1, 2)
    circle = [
        [takes((rank - 1) % 3, "F1.0", ranks=ranks), begins("F1.0"), sends((rank + 1) % 3, "F1.0", ranks=ranks)]
        for rank in ranks
    ]
    found = judged(*circle)
    assert [problem.kind for problem in found.problems] == ["waiting"]
    assert (
        "rank 0 waits for rank 2 waits for rank 1 waits for rank 0" in found.text and len(found.problems[0].both) == 3
    )
    early = [
        [
            takes((rank - 1) % 3, "F1.1", ranks=ranks),
            begins("F1.0"),
            sends((rank + 1) % 3, "F1.0", ranks=ranks),
            begins("F1.1"),
        ]
        for rank in ranks
    ]
    assert judged(*early).problems == (), "what is needed an action later may be on its way meanwhile"
    assert [problem.kind for problem in judged(*early, overlap=False).problems] == ["waiting"], (
        "without overlap it holds the rank at once"
    )


def test_sends_hold_a_rank_until_the_action_after_them_is_over() -> None:
    both = [
        [
            sends(1 - rank, axis=("pp", "pp_backward")[rank]),
            begins("F0.1"),
            takes(1 - rank, "F1.0", axis=("pp_backward", "pp")[rank]),
            begins("F1.0"),
        ]
        for rank in PAIR
    ]
    assert [problem.kind for problem in judged(*both).problems] == ["waiting"]
    later = [[events[0], events[2], events[1], events[3]] for events in both]
    assert judged(*later).problems == ()


def test_collectives_of_two_groups_in_other_orders_wait_for_each_other() -> None:
    tp, other = meets(PAIR), meets((0, 1, 2), axis="world")
    found = judged([tp, other], [other, tp], [other])
    assert [problem.kind for problem in found.problems] == ["waiting"] and "all_reduce" in found.text
    assert judged([tp, other], [tp, other], [other]).problems == ()


def test_groups_of_one_list_of_ranks_are_one_but_for_those_made_apart() -> None:
    assert judged([meets(PAIR, axis="dp")], [meets(PAIR, axis="dp_cp")]).problems == ()
    assert judged([meets(PAIR, axis="pp")], [meets(PAIR, axis="pp_backward")]).problems != ()


def test_a_trace_stands_for_ranks_in_their_own_groups() -> None:
    lists = axis_rank_groups(tiny.config(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2).parallel, 8)
    line = rank_communication_of(3, 0, [meets((0, 1)), sends(4, ranks=(0, 4)), begins("F0.1")], lists)
    assert isinstance(line, RankCommunicationSequence) and [getattr(step, "group", step) for step in line.steps] == [
        ("", (2, 3)),
        ("", (3, 7)),
        "F0.1",
    ]
    assert line.steps[1].peer == 7


@cache
def traced(layout: str, model: str) -> DryRunResult:
    """The dry run of a row of the table."""
    ranks, changes = read_layout(layout)
    return dry_run(tiny.config(ranks, **{**MODELS[model], **changes}), ranks)


def agrees(layout: str, model: str) -> None:
    """A good row is left alone, and something of it was looked at."""
    ranks, _ = read_layout(layout)
    found = match_collectives(traced(layout, model))
    assert found.problems == (), found.text
    # At the least, gradients are summed, and the norm is counted.
    assert found.played == ranks and found.collectives + found.messages >= 2 * (ranks > 1)


@pytest.mark.parametrize("layout, model", SAMPLE, ids=[named(*row) for row in SAMPLE])
def test_a_layout_that_runs_is_left_alone(layout: str, model: str) -> None:
    agrees(layout, model)


@pytest.mark.nightly
@pytest.mark.parametrize("layout, model", ROWS, ids=[named(*row) for row in ROWS])
def test_no_row_of_the_table_is_said_to_hang(layout: str, model: str) -> None:
    agrees(layout, model)


def test_what_a_pass_takes_holds_it_where_it_begins() -> None:
    run = traced(*ROW)
    events = list(run.traces[0].events)
    first = next(event for event in events if event.kind == "receive")
    taker = next(number for number, event in enumerate(events) if event.kind == "action" and event.name == first.action)
    assert first.action == "B0.0" and events.index(first) < taker
    begun = events[: taker + 1]
    # What the other stage needs for its forward passes leaves when the gradient of one of them has come.
    late = (
        [event for event in begun if event.kind != "send"]
        + [event for event in begun if event.kind == "send"]
        + events[taker + 1 :]
    )
    found = match_collectives(replace(run, traces=(replace(run.traces[0], events=tuple(late)), *run.traces[1:])))
    assert [problem.kind for problem in found.problems] == ["waiting"], found.text


def with_events(run: DryRunResult, place: int, change: str, where: int) -> DryRunResult:
    """The run with a mistake in one trace, at one of its collectives or messages."""
    trace = run.traces[place]
    events, talks = list(trace.events), [number for number, event in enumerate(trace.events) if event.is_communication]
    at, after = talks[where], talks[where + 1]
    if change == "skip":
        del events[at]
    elif change == "swap":
        events[at], events[after] = events[after], events[at]
    elif change == "shape":
        events[at] = replace(events[at], shape=(*events[at].shape, 3))
    else:
        events[at] = replace(events[at], dtype="int8")
    changed: Trace = replace(trace, events=tuple(events))
    return replace(run, traces=(*run.traces[:place], changed, *run.traces[place + 1 :]))


def test_any_collective_or_message_that_one_rank_leaves_out_or_changes_is_noticed() -> None:
    run = traced(*ROW)
    count = min(sum(event.is_communication for event in trace.events) for trace in run.traces)
    for where in range(0, count - 1, 5):
        for change in ("skip", "shape", "dtype"):
            place = where % len(run.traces)
            found = match_collectives(with_events(run, place, change, where))
            assert found.problems, f"{change} at {where} of trace {place} was not noticed"
            blamed = {one.rank for problem in found.problems for one in problem.both}
            assert any(rank in blamed for rank in run.stands_for[place]), found.text


SHARES = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "global_batch_size": 16,
}
EXPERTS = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 24,
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}


def _sums(run: DryRunResult, rank: int) -> list[tuple[int, ...]]:
    (trace,) = (trace for trace in run.traces if trace.rank == rank)
    return [
        event.shape
        for event in trace.events
        if event.is_communication and event.where.startswith(finalize.__name__.replace(".", "/"))
    ]


def test_sums_of_owners_are_compared_where_traces_have_the_same_share() -> None:
    run = dry_run(tiny.config(16, **SHARES, **EXPERTS), 16)
    stands = {rank: trace.rank for trace, ranks in zip(run.traces, run.stands_for, strict=True) for rank in ranks}
    assert (stands[6], stands[7]) == (2, 7) and _sums(run, 2) != _sums(run, 7), (
        "other shares stand for tensor ranks 6 and 7"
    )
    assert match_collectives(run).problems == ()
    for rank in (0, 3, 15):  # whose tensor rank is traced with the same share
        place = next(place for place, trace in enumerate(run.traces) if trace.rank == rank)
        changed = tuple(
            replace(event, shape=(event.shape[0] - 8,))
            if event.is_communication and "finalize.py" in event.where
            else event
            for event in run.traces[place].events
        )
        traces = (*run.traces[:place], replace(run.traces[place], events=changed), *run.traces[place + 1 :])
        found = match_collectives(replace(run, traces=traces))
        assert {problem.kind for problem in found.problems} == {"shape"} and "finalize.py" in found.text, found.text


def test_a_tensor_rank_that_leaves_a_parameter_out_of_the_sums_of_owners_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = finalize.sum_replicated_grads

    def one_less(segments: Sequence[OwnedSegment], mesh: Mesh) -> None:
        summed = [segment for segment in segments if "tp" in segment.spec.sum_over]
        whole(
            [segment for segment in segments if mesh.tp.is_first or segment is not summed[-1]] if summed else segments,
            mesh,
        )

    monkeypatch.setattr(finalize, "sum_replicated_grads", one_less)
    found = match_collectives(dry_run(tiny.config(16, **SHARES), 16))
    assert found.problems and "finalize.py" in found.text, found.text
