"""Dry runs made by hand, whose times anybody can add up: a machine that does 1 FLOP a second and waits for nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron.cli.preflight import resolve_and_examine
from megatron.core.config.settings.run import RunConfig
from megatron.core.pipeline_parallel.schedules import Action, pipeline_training_plan, with_reduction_actions
from megatron.plan.analytic_estimate import with_padded_vocabulary
from megatron.plan.command import parse_training_command
from megatron.plan.hardware import Hardware, NetworkLink
from megatron.plan.setup import RunSetup
from megatron.plan.simulate.trace import DryRunResult, MemoryByKind, StepEvent, Trace

FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data"
)
VOCABULARY = 1000
# Links take no time, and an operation 1 s a FLOP; memory is so fast that bytes do not count.
PLAIN = Hardware(
    "plain",
    {"float32": 1.0, "float64": 1.0, "bfloat16": 1.0},
    ((1.0, 1.0),),
    (1.0, 1.0),
    memory=2.0**30,
    memory_rate=1e30,
    launch=0.0,
    node=8,
    inside=NetworkLink(1e30, 0.0),
    network=NetworkLink(1e30, 0.0),
    usable=1.0,
)


def setting_of(flags: str = "", ranks: int = 1) -> RunSetup:
    """A setting of the small network with more flags."""
    command = parse_training_command(f"{FLAGS} {flags}".split(), ranks=ranks)
    assert command.setting is not None and not command.unread, command.unread
    return command.setting


def config_of(flags: str = "", ranks: int = 1, *, vocabulary: int = VOCABULARY) -> RunConfig:
    """Its config, resolved and with its vocabulary."""
    config, problems = resolve_and_examine(setting_of(flags, ranks).config, ranks)
    assert not problems, problems
    return with_padded_vocabulary(config, vocabulary)


def op(seconds: float, action: str, name: str = "aten.mm") -> StepEvent:
    """An operation that takes so long on the plain machine. Less than a FLOP cannot be said, so times are whole."""
    assert seconds == int(seconds), "the plain machine counts whole seconds"
    return StepEvent("op", name, "megatron/core/x.py:1", action, flops=int(seconds), moved=1, dtype="float32")


def summed(
    moved: int, action: str, axis: str = "dp", ranks: Sequence[int] = (0, 1), name: str = "reduce_scatter"
) -> StepEvent:
    """A collective over so many bytes."""
    return StepEvent(
        "collective",
        name,
        "megatron/core/y.py:2",
        action,
        moved=moved,
        axis=axis,
        ranks=tuple(ranks),
        shape=(moved // 4,),
        dtype="float32",
    )


def run_of(
    config: RunConfig,
    world_size: int,
    does: Callable[[Action, int], Sequence[StepEvent]],
    *,
    recorded: int | None = None,
    after: Callable[[int], Sequence[StepEvent]] = lambda place: (),
    peaks: Sequence[int] = (),
) -> DryRunResult:
    """A dry run with one rank a pipeline position. does: the events of an action; after: those behind the schedule.

    recorded: microbatches of the run, if fewer than the step has. peaks: bytes of each position.
    """
    pp, train = config.parallel.pp, config.train
    chunks = config.parallel.num_virtual_stages_per_pipeline_rank or 1
    whole = train.global_batch_size // train.micro_batch_size // config.parallel.data_parallel_size(world_size)
    plans = [with_reduction_actions(pipeline_training_plan(pp, chunks, count)) for count in (recorded or whole, whole)]
    traces = []
    for place, row in enumerate(plans[0]):
        events = tuple(replace(event, action=str(action)) for action in row for event in does(action, place))
        events += tuple(after(place))
        peak = peaks[place] if peaks else 1000 * (place + 1)
        held = MemoryByKind(weights=peak // 2, activations=peak - peak // 2)
        traces.append(
            Trace(
                place * (world_size // pp),
                {"pp": place},
                10,
                events,
                peak,
                0,
                held,
                replace(held, activations=0),
                ((0, replace(held, activations=0)), (max(0, len(events) - 1), held)),
            )
        )
    groups = tuple(tuple(range(place * (world_size // pp), (place + 1) * (world_size // pp))) for place in range(pp))
    return DryRunResult(config, world_size, tuple(traces), groups, recorded or whole, plans[1], whole)
