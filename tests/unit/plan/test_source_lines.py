"""Source code that the recorder knows: a call of each is planted, and must be taken for what it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from megatron.core.distributed import finalize
from megatron.core.kernels.low_precision.fp8 import E4M3, emulated_quantized_matmul, quantize_per_block
from megatron.core.kernels.ops import chunked_attention, fused
from megatron.core.kernels.ops.linear_loss import VocabularyShard, blockwise_linear_cross_entropy
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.parallel import collectives, flight_recorder, recompute
from megatron.core.parallel.device import empty_host_tensor
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.rng import RandomStreams
from megatron.core.pipeline_parallel import executor
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.plan.simulate.dry_run import dry_run
from megatron.plan.simulate.recorder import StepRecorder
from megatron.plan.simulate.source_lines import lines_of, role_of, source_of
from megatron.plan.simulate.trace import SourceRole, StepEvent, Trace
from tests.helpers import tiny

HERE = "tests/unit/plan/test_source_lines.py"


def recorded(does: Callable[[], object]) -> list[StepEvent]:
    """The operations of a call."""
    with StepRecorder({}) as recorder:
        does()
    return list(recorder.events)


def numbers(*shape: int) -> Tensor:
    """A leaf of the graph."""
    return torch.ones(shape, requires_grad=True)


def heads() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [s, b, n, d]."""
    return numbers(4, 1, 2, 8), numbers(4, 1, 2, 8), numbers(4, 1, 2, 8)


EIGHT_BITS = quantize_per_block(torch.ones(32, 32), E4M3, (1, 32))


PLANTED: dict[str, tuple[SourceRole, str, Callable[[], object]]] = {
    "attention with padding": (
        "attention",
        "aten.masked_fill",
        lambda: fused.attention_by_sdpa(*heads(), AttentionMaskSpec(padding=torch.zeros(1, 4, dtype=torch.bool))),
    ),
    "attention with dropout": (
        "attention in chunks",
        "aten.bmm",
        lambda: chunked_attention.attention_by_query_chunks(*heads(), AttentionMaskSpec(), 0.1).sum().backward(),
    ),
    "loss": (
        "blocks",
        "aten.exp_",
        lambda: vocab_parallel_cross_entropy(numbers(4, 1, 16).clone(), torch.ones(4, 1).long(), Axis("tp"), 16),
    ),
    "loss without logits": (
        "blocks",
        "aten.mm",
        lambda: blockwise_linear_cross_entropy(
            numbers(4, 8),
            numbers(16, 8),
            None,
            torch.ones(4).long(),
            VocabularyShard(0, 16, None, partial(collectives.all_gather, axis=Axis("tp"))),
        ),
    ),
    "product of 8 bits": (
        "emulated product",
        "aten.mm",
        lambda: emulated_quantized_matmul(EIGHT_BITS, EIGHT_BITS, torch.float32),
    ),
    "values of 8 bits taken back": (
        "emulated product",
        "aten._to_copy",
        lambda: emulated_quantized_matmul(EIGHT_BITS, EIGHT_BITS, torch.float32),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_an_operation_is_known_by_the_code_that_runs_it(name: str) -> None:
    role, operation, does = PLANTED[name]
    events = recorded(does)
    assert {event.role for event in events if event.name == operation} == {role}, events
    assert all(event.role == "" for event in events if event.where.startswith(HERE))


def sum_twice(x: Tensor) -> Tensor:
    """A sum of products."""
    return (x * x).sum()


def test_a_pass_that_is_computed_again_goes_back_to_the_lines_of_its_forward_pass() -> None:
    streams = RandomStreams(torch.device("cpu"), {"default": 0})
    events = recorded(lambda: recompute.recompute(sum_twice, streams, numbers(4)).backward())
    known = lines_of(sum_twice)
    backward = [event for event in events if event.name == "aten.mul"][1:]  # behind those of both forward passes
    assert len(backward) >= 2 and {event.where for event in backward} == {f"{HERE}:{known.lines.start + 2}"}, backward


def test_room_in_the_memory_of_the_host_takes_none_of_the_device() -> None:
    with StepRecorder({}) as recorder:
        away, here = empty_host_tensor((64,), torch.float32, pinned=False), torch.empty(64)
        copied = away * 2.0
    assert [recorder.memory.lifetime_of(each).elsewhere for each in (away, here, copied)] == [True, False, True]
    assert recorder.memory.live == here.nbytes


@cache
def trace_of_two_stages() -> Trace:
    """The first rank of two stages x two tensor ranks."""
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
    return dry_run(tiny.config(4, **layout), 4).traces[0]


def test_what_only_watches_is_no_line_of_a_step() -> None:
    found = {event.where.rpartition(":")[0] for event in trace_of_two_stages().events if event.kind != "action"}
    watching = {source_of(module).path for module in (collectives, flight_recorder)}
    assert found.isdisjoint(watching) and not any(file.startswith("megatron/plan/") for file in found), found


def test_backward_passes_of_a_stage_go_back_to_the_lines_of_its_layers() -> None:
    """Of what torch's own nodes run: those of this project are on the call stack themselves."""
    events = [event for event in trace_of_two_stages().events if event.name == "aten.native_layer_norm_backward"]
    assert events and all(event.action.startswith("B") for event in events)
    assert all(event.where.rpartition(":")[0] != source_of(executor).path for event in events)


def test_sums_of_shares_are_those_that_finish_the_gradients() -> None:
    sums = [event for event in trace_of_two_stages().events if event.role == "sum of shares"]
    assert {event.axis for event in sums if event.is_communication} >= {"tp"}
    assert {event.where.rpartition(":")[0] for event in sums} == {source_of(finalize).path}


def test_lines_are_those_of_the_whole_function_and_of_no_other() -> None:
    known, (source, first) = lines_of(sum_twice), inspect.getsourcelines(sum_twice)
    ends = [first - 1, first, first + len(source) - 1, first + len(source)]
    assert [known.includes(f"{HERE}:{line}") for line in ends] == [False, True, True, False]
    assert not known.includes(f"megatron/x.py:{first}") and not known.includes("")
    assert role_of("") == role_of(f"{HERE}:1") == ""
