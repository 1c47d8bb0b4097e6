"""This rank's stages, the buckets around them, and the optimizer: everything a step works on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.adapters.quantized_base import freeze_untrained
from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.distributed.buffers import default_bucket_size
from megatron.core.distributed.ddp import DataParallel
from megatron.core.distributed.finalize import finalize_gradients
from megatron.core.models.stage_model import StageModel
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.optimizer.schedule import OptimizerParamSchedule
from megatron.core.parallel.device import has_separate_memory
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.pipeline_parallel.executor import PipelineWork, run_rank_script
from megatron.core.pipeline_parallel.schedules import forward_only_plan, pipeline_plan_of_run, with_reduction_actions
from megatron.core.pipeline_parallel.transfers import RankScript, build_rank_script
from megatron.core.transformer.activation_offloading import set_up_activation_offload
from megatron.core.transformer.blocks import Block
from megatron.training.state.batch import Batch, LossFunction
from megatron.training.state.hooks import LowPrecisionAndAfterStepHook, StepHooks
from megatron.training.state.microbatches import BatchSchedule, StepBatchSize
from megatron.training.state.run import RunContext, TrainingProgress

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.state_hooks import StateHooks
    from megatron.core.distributed.fsdp import Parallel

ModelProvider = Callable[[RunContext, StageSpec], StageModel]
# (run, microbatches, stage) -> the message to the next stage, one tensor or several; on the last, what the loss is made of
ForwardStep = Callable[[RunContext, Iterator[Batch], Any], tuple[Any, LossFunction]]
# this rank's stages -> prompts with what the network says after them, on every rank
Samples = Callable[[Sequence[Any]], list[tuple[str, str]]]
# (this rank's stages, iteration) -> scores of a benchmark by name, on every rank
Evaluate = Callable[[Sequence[Any], int], Mapping[str, float]]


@dataclass(slots=True)
class Trainer:
    """What a step works on. specs, stages, parallels: this rank's chunks in order. schedule: None in evaluation alone.
    state_hooks: take part in saving and loading, after those of the run's settings; a `Checkpointer` takes those that
    are there when it is made.
    """

    run: RunContext
    forward_step: ForwardStep
    specs: tuple[StageSpec, ...]
    stages: list[StageModel]
    parallels: list[Parallel]
    optimizer: Optimizer
    schedule: OptimizerParamSchedule | None
    batches: BatchSchedule
    scripts: dict[tuple[int, bool], RankScript] = field(default_factory=dict)
    loss_names: tuple[str, ...] | None = None
    note_names: tuple[str, ...] | None = None
    hooks: list[StepHooks] = field(default_factory=list)
    state_hooks: list[StateHooks] = field(default_factory=list)

    def __post_init__(self) -> None:
        stay = all(isinstance(parallel, DataParallel) for parallel in self.parallels)
        wait = self.run.config.parallel.overlap_param_gather
        self.add_hook(LowPrecisionAndAfterStepHook(self.stages, weights_stay=stay, weights_wait=wait))

    def add_hook(self, hook: StepHooks) -> None:
        """Call this hook in every step from now on."""
        self.hooks.append(hook)
        for parallel in self.parallels:
            if isinstance(parallel, DataParallel):
                parallel.bucket_hooks.append(hook.bucket_ready)

    @property
    def progress(self) -> TrainingProgress:
        """The run's counters."""
        return self.run.progress

    def pipeline_script(self, num_microbatches: int, *, training: bool) -> RankScript:
        """Return this rank's pipeline actions of one step, or of one forward-only pass."""
        key = (num_microbatches, training)
        if key not in self.scripts:
            parallel, axis = self.run.config.parallel, self.run.mesh.pp
            if training:
                plan = with_reduction_actions(pipeline_plan_of_run(self.run.config, num_microbatches))
            else:
                plan = forward_only_plan(axis.size, len(self.stages), num_microbatches, parallel.stage_placement)
            self.scripts[key] = build_rank_script(
                plan,
                axis.rank,
                overlap=parallel.overlap_p2p_communication,
                dual_batch_overlap=training and parallel.overlap_moe_expert_parallel_comm,
            )
        return self.scripts[key]

    def next_batch_size(self) -> StepBatchSize:
        """Return the batch size of the next step."""
        return self.batches.batch_size_after(self.progress.consumed_train_samples)

    def zero_gradients(self) -> None:
        """Begin a step with gradients of zero."""
        for parallel in self.parallels:
            parallel.zero_gradients()

    def run_schedule(self, work: PipelineWork, num_microbatches: int, *, training: bool) -> None:
        """Run this rank's passes and messages of a step, or of a forward-only pass; the last passes start reductions."""
        run_rank_script(
            self.pipeline_script(num_microbatches, training=training),
            work=work,
            axis=self.run.mesh.pp,
            backward_axis=self.run.mesh.pp_backward,
            delays=training and self.run.config.parallel.delay_wgrad_compute,
        )

    def finish_reductions(self) -> None:
        """Wait for the sums over data-parallel ranks, then sum tied, replicated and key/value-head gradients. Collective."""
        for parallel in self.parallels:
            parallel.finish_reduction()
        finalize_gradients(self.optimizer.segments, self.run.mesh)

    def set_rates(self) -> None:
        """Give the optimizer the learning rate and weight decay of the next step."""
        assert self.schedule is not None, "a trainer that trains has a schedule"
        done = self.progress.schedule_samples
        self.optimizer.set_rates(self.schedule.lr(done), self.schedule.weight_decay(done), self.decoupled_learning_rate)

    @property
    def decoupled_learning_rate(self) -> float | None:
        """The learning rate of embedding and output layer (--decoupled-lr), or None."""
        config = self.run.config.optimizer
        if config.decoupled_lr is None or self.schedule is None:
            return None
        return self.schedule.lr_between(
            self.progress.schedule_samples, max_lr=config.decoupled_lr, min_lr=config.decoupled_min_lr or 0.0
        )

    def all_hooks_accept(self, work: Any, losses: Mapping[str, Tensor], norm: Tensor) -> bool:
        """Return whether all hooks accept the update (`StepHooks.accept_update`). Every hook is asked, for all ranks alike.
        losses: sums by name, and norm, scalars.
        """
        return all([hook.accept_update(work, losses, norm) for hook in self.hooks])

    def count_step(self, size: StepBatchSize, *, updated: bool) -> None:
        """Count a step of this batch size in the run's counters. updated: whether it changed the weights."""
        self.progress.iteration += 1
        self.progress.consumed_train_samples += size.global_batch_size
        self.progress.consumed_tokens += size.global_batch_size * self.run.config.train.seq_length
        if updated:
            self.progress.schedule_samples += size.global_batch_size

    def set_train_mode(self, training: bool) -> None:
        """Set all stages to training mode, or to evaluation mode (dropout off)."""
        for stage in self.stages:
            stage.train(training)


def build_trainer(
    run: RunContext,
    model: ModelProvider,
    forward_step: ForwardStep,
    *,
    specs: tuple[StageSpec, ...] | None = None,
    separate_memory: bool = False,
) -> Trainer:
    """Build this rank's stages with their initial values, their buckets and the optimizer. specs: other stages than the run's.
    separate_memory: the CPU's memory counts as another than the device's, even if the device is the CPU."""
    config, mesh = run.config, run.mesh
    if specs is None:
        specs = tuple(spec for spec in stage_specs_of_run(config) if spec.rank == mesh.pp.rank)
    stages = [model(run, spec) for spec in specs]
    for stage in stages:
        freeze_untrained(stage, config.model.adapter, mesh)
    for stage in stages:
        set_up_activation_offload(stage, config.offload, mesh.device)
    parallels = [_initialize_and_wrap_stage(run, stage) for stage in stages]
    offloads = config.optimizer.optimizer_cpu_offload and (separate_memory or has_separate_memory(mesh.device))
    optimizer = Optimizer(
        parallels, mesh, config.optimizer, config.precision, adamw=run.kernels.adamw, offloads=offloads
    )
    if config.optimizer.optimizer_cpu_offload and not offloads:
        run.print_rank_0("--optimizer-cpu-offload moves nothing: this run's memory is the CPU's already")
    batches = BatchSchedule.build(config.train, data_parallel_size=mesh.dp.size, seq_length=config.train.seq_length)
    schedule = None
    if not config.train.skip_train:
        schedule = OptimizerParamSchedule.build(config.schedule, config.optimizer, config.train)
    state_hooks = [*stages[0].state_hooks]
    return Trainer(run, forward_step, specs, stages, parallels, optimizer, schedule, batches, state_hooks=state_hooks)


def _initialize_and_wrap_stage(run: RunContext, stage: StageModel) -> Parallel:
    """Initialize a stage's parameters and wrap it for data parallelism or FSDP2."""
    parallel, grad_dtype = run.config.parallel, getattr(torch, run.config.precision.gradient_dtype_name)
    seed, source = run.config.train.seed, torch.device("cpu") if parallel.use_cpu_initialization else None
    if parallel.use_torch_fsdp2 and run.mesh.dp_cp.group is not None:
        # And with it torch's DTensor, which takes as long as torch itself.
        from megatron.core.distributed.fsdp import FullySharded

        return FullySharded(
            stage,
            [part for part in stage.modules() if isinstance(part, Block)],
            run.mesh,
            grad_dtype=grad_dtype,
            average=parallel.ddp_average_in_collective,
            keep_layers=parallel.torch_fsdp2_no_reshard_after_forward,
            fill=partial(materialize_parameters, mesh=run.mesh, seed=seed, draw_on=source),
        )
    stage.materialize(seed, draw_on=source)
    size: int | None = None
    if parallel.ddp_num_buckets is not None:
        size = -(-sum(p.numel() for p in stage.parameters()) // parallel.ddp_num_buckets)
    elif parallel.ddp_bucket_size is not None or parallel.overlap_grad_reduce or parallel.overlap_param_gather:
        size = parallel.ddp_bucket_size or default_bucket_size(run.mesh.dp.size)
    return DataParallel(
        stage,
        run.mesh,
        grad_dtype=grad_dtype,
        sharded=parallel.use_distributed_optimizer,
        bucket_size=size,
        overlap_reduce=parallel.overlap_grad_reduce,
        overlap_gather=parallel.overlap_param_gather,
        average=parallel.ddp_average_in_collective,
    )
