"""Run one microbatch forward and backward, without data, on a rank whose only pipeline stage has the layers that are asked for.

A dry run of a whole step (dry_run.py) follows every layer of every stage. What one layer costs is known from less: a network of a
few layers, with the shapes of the run's, and no update. plan/layer_profile.py adds up whole networks from such runs.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from functools import partial

from megatron.core.config.plan.layers import LayerPlan, StageSpec
from megatron.core.config.settings.run import RunConfig
from megatron.core.parallel.grid import axis_rank_groups
from megatron.plan.simulate.dry_run import (
    enable_mixed_dtype_addmm,
    fake_groups,
    fake_recorder,
    make_recorded_trainer,
    mesh_with_fake_groups,
)
from megatron.plan.simulate.fake_batches import fake_batches
from megatron.plan.simulate.fake_tensors import FakeTensorCache
from megatron.plan.simulate.trace import EventList, MemoryByKind, Trace
from megatron.training.state.step import StepWork


def one_microbatch(
    config: RunConfig,
    world_size: int,
    layers: Sequence[LayerPlan],
    world: FakeTensorCache,
    *,
    on_gpu: bool = False,
    until: float = math.inf,
) -> Trace:
    """Return what rank 0 does for one microbatch: its events, each with the bytes allocated after it.

    config: without pipeline, of one microbatch a step. layers: of the network. on_gpu: as for `make_recorded_trainer`;
    until: as for `dry_run`.
    """
    try:
        with fake_groups(world_size, 0):
            return _trace_in_fake_groups(config, world_size, layers, world, on_gpu, until)
    finally:
        gc.unfreeze()


def layer_runner(*, on_gpu: bool, until: float) -> Callable[[RunConfig, int, Sequence[LayerPlan]], Trace]:
    """Return `one_microbatch` for many calls, which share what they learn of shapes."""
    return partial(one_microbatch, world=FakeTensorCache(), on_gpu=on_gpu, until=until)


def _trace_in_fake_groups(
    config: RunConfig, world_size: int, layers: Sequence[LayerPlan], world: FakeTensorCache, on_gpu: bool, until: float
) -> Trace:
    """As `one_microbatch`, within the process groups of the rank; a separate function so that nothing outlives them."""
    mesh, ranks = mesh_with_fake_groups(axis_rank_groups(config.parallel, world_size), 0)
    stage = StageSpec(0, 1, 0, 0, tuple(layers), has_embedding=True, has_output=True, has_mtp=True)
    recorder = fake_recorder(config, ranks, world)
    recorder.until = until
    with world.mode, recorder, recorder.following_fsdp2():
        trainer = make_recorded_trainer(config, mesh, recorder, on_gpu=on_gpu, specs=(stage,))
        enable_mixed_dtype_addmm(trainer)
        if recorder.shared:
            gc.collect()  # rings of references that cutting weights leaves behind
        trainer.zero_gradients()
        recorder.events = EventList()
        recorder.begin_action("begin")
        with recorder.track_current_module(trainer.stages):
            work = StepWork(trainer, fake_batches(trainer), 1, training=True)
            for hook in trainer.hooks:
                hook.begin_step(work)
            trainer.run_schedule(work, 1, training=True)
        recorder.begin_action("end")
        memory = recorder.memory
        place = {name: 0 for name in ("tp", "cp", "dp", "pp", "ep", "etp", "edp")}
        return Trace(0, place, 0, recorder.events, memory.peak, memory.peak_event, MemoryByKind(), MemoryByKind())
