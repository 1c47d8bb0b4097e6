"""One optimizer step: forward, backward, reduce, update.

The loss of a step is the sum over all its tokens over their number, whatever the cut of the batch. The number is known
only when all microbatches have been seen; so each microbatch's sum is scaled by the number expected (every token
counts), and the update multiplies by expected over true.

Losses of the layers themselves (balance of experts) are means over a microbatch, which join as the mean of its tokens'
losses does: each microbatch alike, or with --calculate-per-token-loss by its number of tokens that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.core.config.plan.layers import num_layers_of_mtp_depth
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.optimizer.optimizer import OptimizerStepResult
from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.executor import Shape
from megatron.core.transformer.context.forward_context import MicrobatchContext
from megatron.core.transformer.mixers.qk_clip import qk_clip_row_factors
from megatron.core.transformer.router import routers_of
from megatron.training.report.metrics import ExpertLoads, StepMetrics
from megatron.training.state.batch import Batch, VariableCountBatches, require_next_batch
from megatron.training.state.trainer import Trainer

if TYPE_CHECKING:
    from megatron.core.distributed.fsdp import Parallel

StepFunction = Callable[[Iterator[Batch]], StepMetrics]  # trains on the next global batch


class StepWork:
    """One step of a trainer as the pipeline executor sees it: its microbatches, and the stages' passes over them.
    reports: metrics of each microbatch's loss. count: tokens with loss so far.
    """

    def __init__(
        self,
        trainer: Trainer,
        batches: Iterator[Batch],
        num_microbatches: int,
        *,
        training: bool,
        again: StepWork | None = None,
    ) -> None:
        """again: an earlier pass over the same global batch, whose microbatches are used again."""
        self.trainer, self.training, self.num_microbatches = trainer, training, num_microbatches
        self.device = trainer.run.mesh.device
        self._batches = batches
        self._seen: list[Batch] = [] if again is None else list(again.taken_microbatches)
        self.own_microbatches: int = num_microbatches if again is None else again.own_microbatches
        # Sequences that are divided by their length make another number of microbatches on every rank.
        if again is None and isinstance(batches, VariableCountBatches):
            self.own_microbatches = batches.prepare_step(num_microbatches)
        self._contexts: dict[int, MicrobatchContext] = {}
        self.reports: list[dict[str, Tensor]] = []
        self.data_figures: tuple[str, ...] = ()  # names of those that tell of the data alone
        self.count = torch.zeros(
            (), dtype=torch.float64 if trainer.run.config.precision.fp64 else torch.float32, device=self.device
        )
        self._scale = self._loss_scale()

    @property
    def taken_microbatches(self) -> tuple[Batch, ...]:
        """The microbatches read so far, in order."""
        return tuple(self._seen)

    def input_specs(self, stage: int, microbatch: int) -> tuple[Shape, ...]:
        """Return the shapes of a stage's input message."""
        return self.trainer.stages[stage // self.trainer.run.mesh.pp.size].received_tensor_specs(
            self.trainer.run.config.train
        )

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run one stage on one microbatch. received: the previous stage's message, activations [s, b, h]; empty for the
        first. Returns the message to the next stage; the last stage returns the scaled loss, a scalar.
        """
        chunk = self.trainer.stages[stage // self.trainer.run.mesh.pp.size]
        batch = replace(self._microbatch(microbatch), microbatch_context=self._cached_microbatch_context(microbatch))
        if received:
            batch = replace(batch, hidden=received[0], message=received)
        with self.trainer.run.timers("forward-compute", 2):
            output, loss_function = self.trainer.forward_step(self.trainer.run, iter((batch,)), chunk)
        if not chunk.stage.has_output:
            return output if isinstance(output, tuple) else (output,)
        total, count, report = loss_function(output)
        self.reports.append(report)
        self.count += count.detach()
        return (self._scale_loss(total, count),)

    def before_backward(self, stage: int, microbatch: int, last: bool) -> None:
        """Before a stage's last backward pass, let its gradients be reduced as they become final."""
        if last:
            self._data_parallel_of_stage(stage).before_last_backward()

    def start_gradient_reduction(self, stage: int) -> None:
        """Start the reduction of a stage's gradients."""
        self._data_parallel_of_stage(stage).start_reduction()

    def loss_sums(self) -> dict[str, Tensor]:
        """Return [sum, count] of each loss, this rank's share: zeros unless it has the last stage and is first of its
        tensor group. Collective over the pipeline in the first step.
        """
        speaks = self.trainer.stages[-1].stage.has_output and self.trainer.run.mesh.tp.is_first
        if self.trainer.loss_names is None:
            names = tuple(self.reports[0]) if self.reports else ()
            last = stage_specs_of_run(self.trainer.run.config)[-1]
            self.trainer.loss_names = collectives.broadcast_object(names, self.trainer.run.mesh.pp, last.rank)
        zero = torch.zeros(2, dtype=self.count.dtype, device=self.device)
        return {
            name: sum((report[name] for report in self.reports), zero) if speaks else zero.clone()
            for name in self.trainer.loss_names
        }

    def layer_metric_sums(self) -> dict[str, Tensor]:
        """Return [sum, count] of what layers or the data reported, this rank's share. Collective in the first step."""
        notes: dict[str, Tensor] = {}
        for microbatch_context in self._contexts.values():
            for name, pair in microbatch_context.metrics.items():
                notes[name] = notes[name] + pair if name in notes else pair
        if isinstance(self._batches, VariableCountBatches):
            facts = self._batches.batch_metrics()
            self.data_figures = tuple(facts)
            notes |= {name: self.count.new_tensor(pair) for name, pair in facts.items()}
        if self.trainer.note_names is None:
            names = collectives.gather_objects(tuple(notes), self.trainer.run.mesh.world)
            self.trainer.note_names = tuple(dict.fromkeys(name for theirs in names for name in theirs))
        return {name: notes.get(name, torch.zeros_like(self.count).expand(2)) for name in self.trainer.note_names}

    def remaining_gradient_scale(self) -> float | Tensor:
        """Return the scalar that gradients lack, expected over true tokens: collective; 1 for means of means."""
        if not self.trainer.run.config.train.calculate_per_token_loss:
            return 1.0
        mesh = self.trainer.run.mesh
        speaks = self.trainer.stages[-1].stage.has_output and mesh.tp.is_first
        count = collectives.all_reduce(self.count.clone() if speaks else torch.zeros_like(self.count), mesh.world)
        return self._expected_tokens() / count.clamp(min=1.0)

    def _expected_tokens(self) -> int:
        train = self.trainer.run.config.train
        return self.num_microbatches * train.micro_batch_size * self.trainer.run.mesh.dp.size * train.seq_length

    def _loss_scale(self) -> float:
        """Return the loss scale, times the number of data and context ranks if the gradient reduction averages."""
        averages = self.trainer.run.config.parallel.ddp_average_in_collective
        return self.trainer.optimizer.scaler.scale * (self.trainer.run.mesh.dp_cp.size if averages else 1)

    def _scale_loss(self, total: Tensor, count: Tensor) -> Tensor:
        """Scale a loss sum so that gradients of all microbatches and ranks add up. Collective over context ranks."""
        if self.trainer.run.config.train.calculate_per_token_loss:
            return total * (self._scale / self._expected_tokens())
        # Each context rank sees a piece of every sequence: its share of the sum, over the number of all.
        count = collectives.all_reduce(count.detach().clone(), self.trainer.run.mesh.cp)
        return total / count.clamp(min=1.0) * (self._scale / (self.num_microbatches * self.trainer.run.mesh.dp.size))

    def _cached_microbatch_context(self, microbatch: int) -> MicrobatchContext:
        """Return the context in which a microbatch's layers report losses and metrics, one for all chunks of this rank."""
        if microbatch not in self._contexts:
            train, dp = self.trainer.run.config.train, self.trainer.run.mesh.dp
            sample = (microbatch * dp.size + dp.rank) * train.micro_batch_size
            self._contexts[microbatch] = MicrobatchContext(
                self._layer_loss_weight(self._microbatch(microbatch)),
                training=self.training,
                sample=sample,
                token_masks=self._microbatch(microbatch).token_masks,
            )
        return self._contexts[microbatch]

    def _layer_loss_weight(self, batch: Batch) -> float | Tensor:
        """Return the weight of a microbatch's mean layer loss in the objective, before `remaining_gradient_scale`."""
        train, mesh = self.trainer.run.config.train, self.trainer.run.mesh
        if not train.calculate_per_token_loss:
            return self._scale / (self.num_microbatches * mesh.dp.size)
        if batch.loss_mask is None:
            return float("nan")  # `stages_read_data` gives one to every stage whose layers have losses
        return collectives.all_reduce(batch.loss_mask.sum().to(self.count.dtype), mesh.cp) * (
            self._scale / self._expected_tokens()
        )

    def _microbatch(self, microbatch: int) -> Batch:
        """Return a microbatch by index, reading as far as necessary."""
        flight_recorder = self.trainer.run.mesh.flight_recorder
        while len(self._seen) <= microbatch:
            action = flight_recorder.action
            flight_recorder.enter_phase(f"data of microbatch {len(self._seen)}")
            with self.trainer.run.timers("batch-generator", 2):
                self._seen.append(require_next_batch(self._batches))
            flight_recorder.enter_phase(action)
        return self._seen[microbatch]

    def _data_parallel_of_stage(self, stage: int) -> Parallel:
        return self.trainer.parallels[stage // self.trainer.run.mesh.pp.size]


def train_step(trainer: Trainer, batches: Iterator[Batch], *, again: StepWork | None = None) -> StepMetrics:
    """Run one optimizer step on the next global batch. Waits for the device only for fp16's overflow check.
    again: an earlier pass over this global batch, which is run once more instead of reading the next one.
    """
    timers, recorder = trainer.run.timers, trainer.run.mesh.flight_recorder
    size = trainer.next_batch_size()
    recorder.begin_activity("training", trainer.progress.iteration + 1)
    trainer.zero_gradients()
    work = StepWork(trainer, batches, size.num_microbatches, training=True, again=again)
    for hook in trainer.hooks:
        hook.begin_step(work)
    with timers("forward-backward", 1):
        trainer.run_schedule(work, work.own_microbatches, training=True)
    recorder.enter_phase("reduction of gradients")
    with timers("all-grads-sync", 1):
        trainer.finish_reductions()
    trainer.set_rates()
    for hook in trainer.hooks:
        hook.before_update()
    losses = work.loss_sums() | work.layer_metric_sums()
    # Microbatches were scaled by the tokens expected; only now is their true number known.
    scale = work.remaining_gradient_scale()
    recorder.enter_phase("optimizer")
    with timers("optimizer", 1):
        result = trainer.optimizer.step(
            multiplier=scale,
            count_zero_elements=trainer.run.config.log.log_num_zeros_in_grad,
            row_factors=qk_clip_factors(trainer),
            accepts=partial(trainer.all_hooks_accept, work, losses),
        )
    # Before `end_step`, in which routers reset their tallies.
    loads = expert_loads(trainer)
    norm = trainer.optimizer.weights_norm() if trainer.run.config.log.log_params_norm else None
    for hook in trainer.hooks:
        hook.end_step(updated=result.stepped)
    trainer.count_step(size, updated=result.stepped)
    return _step_metrics(trainer, work, losses, result, params_norm=norm, loads=loads)


def qk_clip_factors(trainer: Trainer) -> dict[str, Tensor]:
    """Return the factors by which --qk-clip rescales rows of query and key weights after this step, by parameter
    name: [rows] each.
    """
    model = trainer.run.config.model
    if not model.qk_clip:
        return {}
    modules = (module for stage in trainer.stages for module in stage.modules())
    return qk_clip_row_factors(modules, trainer.run.mesh, threshold=model.qk_clip_threshold, alpha=model.qk_clip_alpha)


def expert_loads(trainer: Trainer) -> ExpertLoads | None:
    """Return how many tokens chose each expert in this step, this rank's share; None without experts."""
    model = trainer.run.config.model
    if not model.moe.num_experts:
        return None
    num_mtp_layers = (model.mtp.mtp_num_layers or 0) * num_layers_of_mtp_depth(model)
    shape = (model.num_layers + num_mtp_layers, model.moe.num_experts + 1)
    table = torch.zeros(shape, dtype=torch.int64, device=trainer.run.mesh.device)
    for router in routers_of(trainer.stages):
        for depth_index, tally in enumerate(router.tally):
            table[router.layer_number(depth_index)] = tally
    return ExpertLoads(table, model.moe.moe_per_layer_logging)


def _step_metrics(
    trainer: Trainer,
    work: StepWork,
    losses: dict[str, Tensor],
    result: OptimizerStepResult,
    *,
    params_norm: Tensor | None,
    loads: ExpertLoads | None,
) -> StepMetrics:
    """Return the numbers of the step that was just counted, on the device. losses: [2] each, sum and count of this rank."""
    progress = trainer.progress
    assert trainer.schedule is not None, "a trainer that trains has a schedule"
    return StepMetrics(
        iteration=progress.iteration,
        consumed_samples=progress.consumed_train_samples,
        batch_size=work.num_microbatches * trainer.batches.unit,
        learning_rate=trainer.schedule.lr(progress.schedule_samples),
        losses=losses,
        loads=loads,
        decoupled_learning_rate=trainer.decoupled_learning_rate,
        loss_scale=trainer.optimizer.scaler.scale,
        grad_norm=result.norm,
        num_zeros=result.zeros,
        params_norm=params_norm,
        skipped=not result.stepped,
        data_figures=work.data_figures,
    )
