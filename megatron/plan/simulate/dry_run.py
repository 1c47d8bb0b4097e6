"""Run the real training step on one CPU, without data, for every distinct kind of rank of a cluster of any size.

    dry_run(config, 1024) -> DryRunResult         traces of all kinds of rank: what each computes, sends and allocates

There is no model of a step here: it is `train_step` on what `build_trainer` builds, by the real pipeline schedule, with three
substitutes: fake tensors (torch's FakeTensorMode), process groups that transfer nothing (torch's fake backend), and fake batches.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.run import RunConfig
from megatron.core.kernels.choice.run_requirements import kernel_requirements
from megatron.core.kernels.choice.table import CANDIDATES, select_kernels, supported_kernel_requests
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.parallel.flight_recorder import FlightRecorder
from megatron.core.parallel.grid import RankLists, axis_rank_groups, hybrid_cp_rank_groups
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.overlap import OverlappedComputation
from megatron.core.parallel.rng import RandomStreams
from megatron.core.parallel.spec import quantized_storage_of
from megatron.core.pipeline_parallel.schedules import Plan, pipeline_plan_of_run, with_reduction_actions
from megatron.core.pipeline_parallel.transfers import Transfer
from megatron.core.tokenizers.build import NullTokenizer
from megatron.plan.simulate.fake_batches import fake_batches, rank_shares_of_fake_documents
from megatron.plan.simulate.fake_tensors import FakeTensorCache, FakeTensorRecorder
from megatron.plan.simulate.layout_build_check import mesh_without_groups
from megatron.plan.simulate.memoization import MicrobatchMemo, TraceMismatch
from megatron.plan.simulate.memory import StorageTracker
from megatron.plan.simulate.providers import PROVIDERS
from megatron.plan.simulate.recorder import RecordedDualBatchThreads, StepRecorder
from megatron.plan.simulate.scan_recorder import KINDS, ScanRecorder
from megatron.plan.simulate.torch_internals import FakeStore
from megatron.plan.simulate.trace import DryRunResult, EventList, Trace
from megatron.training.state.microbatches import BatchSchedule
from megatron.training.state.run import RunContext
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer, build_trainer

_MOST_KINDS = 8
# Kernels that are told where documents begin.
_LENGTHS = ("varlen", "flash_attn_2", "flash_attn_3", "transformer_engine")
_NEVER_REPLAYED = 3  # microbatches: two that are compared, and the last
_BEGIN, _PHASES = "begin", {"reduction of gradients": "reduction"}


class _NoOpRandomStreams(RandomStreams):
    """Random streams without state: without data nothing is drawn."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), {"default": 0})

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Do nothing."""
        yield

    def state(self) -> dict[str, torch.Tensor]:
        """Return no state."""
        return {}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Do nothing."""


class _ForwardingFlightRecorder(FlightRecorder):
    """A flight recorder that also tells a `StepRecorder` which action begins, and the axis of the next collective."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def begin_activity(self, activity: str, iteration: int) -> None:
        """As `FlightRecorder.begin_activity`; the dry run's `StepRecorder` begins the action "begin" too."""
        super().begin_activity(activity, iteration)
        self.recorder.begin_action(_BEGIN)

    def enter_phase(self, action: object) -> None:
        """As `FlightRecorder`'s; the `StepRecorder` begins the action too, except reading data, which another needs."""
        super().enter_phase(action)
        name = _PHASES.get(str(action), str(action))
        if name and not name.startswith("data of"):
            self.recorder.begin_action(name)

    def record_collective(self, what: object, axis: str, ranks: tuple[int, ...], size: int) -> None:
        """As `FlightRecorder`'s; the `StepRecorder` is told the axis and, of a message, the action that consumes it."""
        super().record_collective(what, axis, ranks, size)
        self.recorder.axis = axis
        self.recorder.consumer = str(what.consumer) if isinstance(what, Transfer) else ""


def make_recorded_trainer(
    config: RunConfig,
    mesh: Mesh,
    recorder: StepRecorder,
    *,
    on_gpu: bool = False,
    specs: tuple[StageSpec, ...] | None = None,
) -> Trainer:
    """Build a trainer as every run does, with a flight recorder that reports to `recorder`.
    on_gpu: attend to documents as a GPU's varlen kernel does, and scan by kernels for GPUs, if the run would use them.
    specs: as for `build_trainer`.
    """
    shared: dict[str, Any] = {
        "flight_recorder": _ForwardingFlightRecorder(recorder),
        "overlap": OverlappedComputation(make_threads=partial(RecordedDualBatchThreads, recorder)),
    }
    axes = {name: replace(mesh.axis(name), **shared) for name in axis_names(mesh)}
    mesh = replace(mesh.with_axes(axes), hybrid_cp=tuple(replace(axis, **shared) for axis in mesh.hybrid_cp))
    if config.parallel.use_torch_fsdp2:
        recorder.shared = {
            axis.group.group_name: axis.name for axis in (mesh.edp, mesh.dp_cp) if axis.group is not None
        }
    need, wishes = kernel_requirements(config, mesh.device), config.model.all_requested_kernels
    if wishes["cross_entropy"] == "auto":
        wishes["cross_entropy"] = "native"  # as on the GPUs of the plan, which must not be promised too little memory
    kernels = select_kernels(need, supported_kernel_requests(need, wishes))
    if on_gpu and uses_varlen_attention(config):
        kernels = replace(kernels, attention=partial(_attend_to_whole_rows, kernels.attention))
    if isinstance(recorder, FakeTensorRecorder):
        fused = fused_scans_of_run(config) if on_gpu else ()
        kernels = ScanRecorder(recorder, recorder.world.scans).replace_scans_with_recorded(kernels, fused)
    run = RunContext(
        config=config,
        mesh=mesh,
        kernels=kernels,
        tokenizer=NullTokenizer(config.model.true_vocab_size or 2),
        streams=_NoOpRandomStreams(),
        log=logging.getLogger("megatron.dry_run"),
    )
    # The machines of the plan have memory beside their devices'.
    trainer = build_trainer(run, *PROVIDERS[config.model.architecture.name], specs=specs, separate_memory=True)
    trainer.loss_names = trainer.note_names = ()  # ranks ask each other once, in their first step
    return trainer


def uses_varlen_attention(config: RunConfig) -> bool:
    """Whether a run on a GPU would separate documents by a varlen attention kernel, without a mask."""
    need = replace(kernel_requirements(config, torch.device("cpu")), device="cuda")
    varlen = next(one for one in CANDIDATES if (one.op, one.name) == ("attention", "varlen"))
    requested = config.model.all_requested_kernels["attention"] in ("auto", *_LENGTHS)
    return requested and need.documents and not need.window and not varlen.unsupported_reason(need)


def fused_scans_of_run(config: RunConfig) -> list[str]:
    """Return the scans that a run on a GPU computes by a kernel of their own, and not by torch's operations. One that is asked
    for counts as installed there.
    """
    need = replace(kernel_requirements(config, torch.device("cpu")), device="cuda")
    requests = config.model.all_requested_kernels

    def taken(op: str) -> str:
        candidates = [one for one in CANDIDATES if one.op == op]
        usable = (one for one in candidates if not (one.unsupported_reason(need) or one.not_default_reason(need)))
        name = requests.get(op, "auto")
        return next(usable).name if name == "auto" else name

    return [kind.name for kind in KINDS if taken(kind.name) not in ("torch", "")]


def _attend_to_whole_rows(
    attention: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMaskSpec,
    dropout: float = 0.0,
    scores: AttentionScoreModifiers = AttentionScoreModifiers(),
) -> Tensor:
    """Compute attention without document mask: the most that documents can take, keeping q, k, v and the output."""
    return attention(q, k, v, replace(mask, documents=None, starts=None), dropout, scores)


def record_train_step(
    trainer: Trainer, recorder: StepRecorder, around: AbstractContextManager[None] = nullcontext()
) -> Trace:
    """Record one step of the trainer and return its trace. around: a context in which the step runs."""
    memory, mesh = recorder.memory, trainer.run.mesh
    if recorder.shared:
        gc.collect()  # rings of references that cutting weights leaves behind
    params = [param for stage in trainer.stages for param in stage.parameters()]
    _label_persistent_memory(memory, trainer, params)
    recorder.events = EventList()
    memory.begin_peak_measurement()
    began = memory.clock
    with recorder.track_current_module(trainer.stages), around:
        train_step(trainer, fake_batches(trainer))
    recorder.begin_action("end")
    place = {name: mesh.axis(name).rank for name in ("tp", "cp", "dp", "pp", "ep", "etp", "edp")}
    parameters = sum(_num_local_elements(param) for param in params)
    return Trace(
        mesh.world.rank,
        place,
        parameters,
        recorder.events,
        memory.peak,
        memory.peak_event,
        memory.memory_at(memory.peak_clock),
        memory.memory_at(memory.clock),
        memory.timeline(began),
        memory.bytes_kept_per_microbatch(recorder.begins["reduction"]),
    )


def _label_persistent_memory(memory: StorageTracker, trainer: Trainer, params: Sequence[Tensor]) -> None:
    """Label the storages held between steps: weights with buffers, gradients, and the optimizer's state."""
    segments, parallels = trainer.optimizer.segments, trainer.parallels
    memory.label((segment.grad for segment in segments), "gradients")
    memory.label((segment.data for segment in segments), "weights")
    buckets = (bucket for parallel in parallels for bucket in getattr(parallel, "buckets", ()))
    memory.label((whole for bucket in buckets for whole in bucket.all_gather_outputs), "weights")
    for param in params:
        if quantized_storage_of(param) is not None:
            memory.count_as_zero(param)
    memory.label((held for param in params for held in _local_storage_of_parameter(param)), "weights")
    memory.label((buffer for stage in trainer.stages for buffer in stage.buffers()), "weights")
    memory.label(trainer.optimizer.storage_tensors(), "optimizer")


def _local_storage_of_parameter(param: Tensor) -> tuple[Tensor, ...]:
    """Return what a rank holds of a parameter between steps: its shard, or the codes and scales of one that is quantized."""
    quantized = quantized_storage_of(param)
    if quantized is not None:
        return quantized.storage_tensors()
    return (param.to_local() if isinstance(param, DTensor) else param,)


def _num_local_elements(param: Tensor) -> int:
    return param.to_local().numel() if isinstance(param, DTensor) else param.numel()


def dry_run(
    config: RunConfig,
    world_size: int,
    ranks: Sequence[int] | None = None,
    *,
    whole: bool = False,
    follows: bool = False,
    on_gpu: bool = False,
    until: float = math.inf,
) -> DryRunResult:
    """Simulate one step of every distinct kind of rank, or of the given ranks; return their traces. config: resolved,
    with its vocabulary. whole: all microbatches of the step; otherwise as many as the pipeline needs to reach its
    steady state. follows: simulate every microbatch op by op; otherwise repeated ones are replayed (memoization.py).
    on_gpu: as for `make_recorded_trainer`. until: `TimeoutError` at the first pass that begins later, by time.monotonic().
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a dry run makes a world of its own, and this process already belongs to one; start it in another process"
        )
    lists = axis_rank_groups(config.parallel, world_size) | hybrid_cp_rank_groups(config.parallel, world_size)
    count = _num_microbatches(config, world_size)
    enough = count if whole else _microbatches_to_peak(config, count)
    kinds = group_ranks_by_kind(config, lists, count) if ranks is None else [(rank,) for rank in ranks]
    short = _with_microbatches(config, world_size, enough)
    world = FakeTensorCache()
    try:
        traces = tuple(
            _extrapolate_peak_memory(
                fake_trace(short, lists, kind[0], world, 0 if follows else enough, on_gpu=on_gpu, until=until),
                enough,
                count,
            )
            for kind in kinds
        )
    finally:
        gc.unfreeze()
    if config.parallel.hybrid_context_parallel:  # whose ranks have microbatches of their own, all of which were run
        enough = count = max(
            sum(event.kind == "action" and event.name[0] == "F" for event in trace.events) for trace in traces
        )
    return DryRunResult(config, world_size, traces, tuple(kinds), enough, schedule_plan(config, count), count)


def _extrapolate_peak_memory(trace: Trace, known: int, count: int) -> Trace:
    """Return the trace with the peak of a step of `count` microbatches, each of which keeps its batch and its losses allocated."""
    more = trace.kept_per_microbatch * (count - known)
    return replace(
        trace, peak=trace.peak + more, at_peak=replace(trace.at_peak, activations=trace.at_peak.activations + more)
    )


def group_ranks_by_kind(config: RunConfig, lists: dict[str, RankLists], num_microbatches: int) -> list[tuple[int, ...]]:
    """Return the ranks of a world, grouped by kind.

    Pipeline stages differ, and ranks with different shares of the documents. Along the other axes, the first, the last and the ranks between can
    differ by a few small tensors; where that makes many kinds, all ranks of one stage count as one kind, represented by the first.
    """
    shares = _hybrid_cp_shares_by_rank(config, lists, num_microbatches)
    axes = ("tp",) if shares else ("tp", "cp", "dp", "ep", "etp")
    edges = [
        {rank: _first_middle_or_last(place, len(ranks)) for ranks in lists[axis] for place, rank in enumerate(ranks)}
        for axis in axes
    ]
    for marks in (edges, []):
        ranks_of_kind: dict[tuple[Any, ...], list[int]] = {}
        for ranks in lists["pp"]:
            for stage, rank in enumerate(ranks):
                ranks_of_kind.setdefault((stage, shares.get(rank, ()), *(mark[rank] for mark in marks)), []).append(
                    rank
                )
        if len(ranks_of_kind) <= _MOST_KINDS:
            break
    return [tuple(ranks_of_kind[key]) for key in sorted(ranks_of_kind)]


def _hybrid_cp_shares_by_rank(
    config: RunConfig, lists: dict[str, RankLists], num_microbatches: int
) -> dict[int, tuple[Any, ...]]:
    """Return each rank's share of a global batch whose documents are divided by length."""
    if not config.parallel.hybrid_context_parallel:
        return {}
    shares = rank_shares_of_fake_documents(config, num_microbatches, len(lists["dp"][0]))
    return {
        rank: tuple((size, _first_middle_or_last(at, size), length) for size, at, length in shares[place])
        for group in lists["dp"]
        for place, rank in enumerate(group)
    }


def _first_middle_or_last(place: int, size: int) -> int:
    """Return 0 for the first of `size` places, 2 for the last, else 1."""
    return 0 if place == 0 else 2 if place == size - 1 else 1


def _num_microbatches(config: RunConfig, world_size: int) -> int:
    """Return the number of microbatches of a full step."""
    train, copies = config.train, config.parallel.data_parallel_size(world_size)
    schedule = BatchSchedule.build(train, data_parallel_size=copies, seq_length=train.seq_length)
    return schedule.final_batch_size // schedule.unit


def _microbatches_to_peak(config: RunConfig, count: int) -> int:
    """Return after how many microbatches a schedule has reached its highest memory on every rank."""
    parallel, chunks = config.parallel, len(stage_specs_of_run(config)) // config.parallel.pp
    if parallel.pipeline_schedule == "gpipe" or parallel.hybrid_context_parallel:
        return count
    if parallel.splits_backward:
        return min(count, chunks * parallel.pp + 2)
    if chunks == 1:
        return min(
            count,
            2 * parallel.pp + 1
            if parallel.overlap_moe_expert_parallel_comm
            else parallel.pp + 2
            if parallel.pp > 1
            else 2,
        )
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage or parallel.pp
    warm = 2 * (parallel.pp - 1) + (chunks - 1) * group  # forward passes of a rank before its first backward pass
    rounds = -(-(warm + 1) // (group * chunks)) + 1
    return min(count, rounds * group + count % group)


def _with_microbatches(config: RunConfig, world_size: int, count: int) -> RunConfig:
    size = count * config.train.micro_batch_size * config.parallel.data_parallel_size(world_size)
    train = replace(config.train, global_batch_size=size, rampup_batch_size=None, step_batch_size_schedule=None)
    return replace(config, train=train)


def schedule_plan(config: RunConfig, count: int) -> Plan:
    """Return the pipeline schedule of a step of so many microbatches."""
    return with_reduction_actions(pipeline_plan_of_run(config, count))


def fake_trace(
    config: RunConfig,
    lists: dict[str, RankLists],
    rank: int,
    world: FakeTensorCache,
    copied: int = 0,
    *,
    on_gpu: bool = False,
    until: float = math.inf,
) -> Trace:
    """Simulate one rank's step on fake tensors (any shape) and return its trace.
    copied: number of microbatches of the step, of which repeated ones are replayed; 0: simulate every one. until: as for `dry_run`.
    """
    try:
        with fake_groups(len(lists["world"][0]), rank):
            return _trace_in_fake_groups(config, lists, rank, world, copied, on_gpu, until)
    except TraceMismatch as unlike:
        logging.getLogger("megatron.dry_run").debug("rank %d is followed op by op: %s", rank, unlike)
    return fake_trace(config, lists, rank, world, on_gpu=on_gpu, until=until)


def _trace_in_fake_groups(
    config: RunConfig,
    lists: dict[str, RankLists],
    rank: int,
    world: FakeTensorCache,
    copied: int,
    on_gpu: bool,
    until: float,
) -> Trace:
    """As `fake_trace`, within the process groups of this rank; a separate function so that nothing outlives them."""
    mesh, ranks = mesh_with_fake_groups(lists, rank)
    recorder = fake_recorder(config, ranks, world)
    recorder.until = until
    with world.mode, recorder, recorder.following_fsdp2():
        trainer = make_recorded_trainer(config, mesh, recorder, on_gpu=on_gpu)
        enable_mixed_dtype_addmm(trainer)
        around = (
            MicrobatchMemo(recorder, copied).installed_on(trainer.stages)
            if copied > _NEVER_REPLAYED and _can_replay_microbatch_passes(config)
            else nullcontext()
        )
        return record_train_step(trainer, recorder, around)


def fake_recorder(config: RunConfig, ranks: dict[str, tuple[int, ...]], world: FakeTensorCache) -> FakeTensorRecorder:
    """Return the recorder of a run's step. ranks: name of a process group -> its global ranks."""
    return FakeTensorRecorder(
        ranks,
        num_experts_and_topk(config),
        world,
        knows=config.parallel.hybrid_context_parallel,
        masks=config.model.kernels.cross_entropy_fusion_impl == "linear",
    )


def enable_mixed_dtype_addmm(trainer: Trainer) -> None:
    """Let matmuls of 16-bit numbers add to fp32 gradients, which they do on the GPUs of the plan but not on a CPU."""
    for bucket in (bucket for parallel in trainer.parallels for bucket in getattr(parallel, "buckets", ())):
        for main_grad in bucket.main_grads:
            main_grad.mixed_dtype_addmm = main_grad.total.dtype == torch.float32 and bucket.data.dtype in (
                torch.float16,
                torch.bfloat16,
            )


def _can_replay_microbatch_passes(config: RunConfig) -> bool:
    """Whether a stage runs its microbatches one after the other and each backward pass in one piece, so that it can be replayed."""
    parallel = config.parallel
    return (
        parallel.pipeline_schedule == "1f1b"
        and not parallel.defers_weight_gradients
        and not parallel.hybrid_context_parallel
        and not parallel.overlap_moe_expert_parallel_comm
        and not parallel.use_torch_fsdp2
        and not config.offload.offloads_activations
    )


def axis_names(mesh: Mesh) -> list[str]:
    """Return the names of a mesh's axes, in the order in which their groups are made."""
    return [field.name for field in fields(Mesh) if isinstance(getattr(mesh, field.name), Axis)]


def num_experts_and_topk(config: RunConfig) -> tuple[int, int] | None:
    """Return (number of experts, experts chosen by a token), or None without experts."""
    moe = config.model.moe
    return (moe.num_experts, moe.moe_router_topk) if moe.num_experts else None


@contextmanager
def fake_groups(world_size: int, rank: int) -> Iterator[None]:
    """Within: a default process group of torch's fake backend, as this rank, and no garbage collection."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with _without_garbage_collection():
            yield
    finally:
        dist.destroy_process_group()
        gc.collect()
        gc.freeze()  # the next collection need not look through this rank's events


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector, so that memory does not depend on when it runs."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def mesh_with_fake_groups(lists: dict[str, RankLists], rank: int) -> tuple[Mesh, dict[str, tuple[int, ...]]]:
    """Return a rank's mesh with fake process groups for its own axes only, and the ranks of each group by name."""
    mesh, ranks, axes = mesh_without_groups(lists, rank), {}, {}
    made: dict[tuple[int, ...], Any] = {}

    def axis_with_fake_group(axis: Axis) -> Axis:
        if axis.size == 1:
            return axis
        if axis.ranks not in made:
            made[axis.ranks] = dist.new_group(list(axis.ranks), backend="fake")
        ranks[made[axis.ranks].group_name] = axis.ranks
        return replace(axis, group=made[axis.ranks])

    for name in axis_names(mesh):
        if name == "pp_backward":  # as in Mesh.build
            made.clear()
        axes[name] = axis_with_fake_group(mesh.axis(name))
    made.clear()
    return replace(mesh.with_axes(axes), hybrid_cp=tuple(map(axis_with_fake_group, mesh.hybrid_cp))), ranks
