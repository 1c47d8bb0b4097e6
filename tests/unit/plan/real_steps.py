"""A step of a run recorded on real tensors, with which a dry run must agree."""

from __future__ import annotations

from megatron.core.config.settings.run import RunConfig
from megatron.core.parallel.mesh import Mesh
from megatron.plan.simulate.dry_run import (
    _without_garbage_collection,
    axis_names,
    make_recorded_trainer,
    num_experts_and_topk,
    record_train_step,
)
from megatron.plan.simulate.recorder import StepRecorder
from megatron.plan.simulate.trace import DryRunResult, Trace


def real_trace(config: RunConfig, mesh: Mesh) -> Trace:
    """Record this rank's step on real tensors, together with all other ranks."""
    axes = (*map(mesh.axis, axis_names(mesh)), *mesh.hybrid_cp)
    recorder = StepRecorder(
        {axis.group.group_name: axis.ranks for axis in axes if axis.group is not None}, num_experts_and_topk(config)
    )
    with _without_garbage_collection(), recorder, recorder.following_fsdp2():
        return record_train_step(make_recorded_trainer(config, mesh, recorder), recorder)


def trace_of(run: DryRunResult, rank: int) -> Trace:
    """The trace that stands for a rank."""
    return next(trace for trace, ranks in zip(run.traces, run.stands_for, strict=True) if rank in ranks)
