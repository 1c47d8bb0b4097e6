"""One optimizer step: forward, backward, reduce, update.

The loss of a step is the sum over all its tokens over their number, whatever the cut of the batch. The number is known
only when all microbatches have been seen; so each microbatch's sum is scaled by the number expected (every token
counts), and the update multiplies by expected over true.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron.core.distributed.ddp import DataParallel
from megatron.core.parallel import collectives
from megatron.core.parallel.device import empty_cache
from megatron.core.pipeline_parallel.executor import Shape, run
from megatron.training.batch import Batch
from megatron.training.data import take
from megatron.training.metrics import Step
from megatron.training.stages import Trainer


class StepWork:
    """The executor's view of one step of a trainer: which tensors its stages take, and what they do with them."""

    def __init__(self, trainer: Trainer, batches: Iterator[Batch], num_microbatches: int, *, training: bool) -> None:
        self.trainer, self.training, self.num_microbatches = trainer, training, num_microbatches
        self.device = trainer.run.mesh.device
        self._batches = batches
        self._seen: list[Batch] = []
        self.reports: list[dict[str, Tensor]] = []
        self.count = torch.zeros((), dtype=torch.float64 if _wide(trainer) else torch.float32, device=self.device)
        self._scale = self._loss_scale()

    def receives(self, stage: int, microbatch: int) -> tuple[Shape, ...]:
        """What the stage says."""
        return self.trainer.stages[stage // self.trainer.run.mesh.pp.size].receives(self.trainer.run.config.train)

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One stage on one microbatch; the last stage gives the scaled loss."""
        chunk = self.trainer.stages[stage // self.trainer.run.mesh.pp.size]
        batch = self._batch(microbatch)
        if received:
            batch = replace(batch, hidden=received[0], message=received)
        with self.trainer.run.timers("forward-compute", 2):
            output, loss_function = self.trainer.forward_step(self.trainer.run, iter((batch,)), chunk)
        if not chunk.stage.heads:
            return output if isinstance(output, tuple) else (output,)
        total, count, report = loss_function(output)
        self.reports.append(report)
        self.count += count.detach()
        return (self._scaled(total, count),)

    def before_backward(self, stage: int, microbatch: int, last: bool) -> None:
        """Gradients of the stage's last backward pass are final as they come."""
        if last:
            self._parallel(stage).before_last_backward()

    def reduce(self, stage: int) -> None:
        """Start to sum the stage's gradients."""
        self._parallel(stage).start_reduction()

    def report(self) -> dict[str, Tensor]:
        """[sum, count] of every loss: this rank's share, zero unless it has the loss and is first of its tensor group."""
        speaks = self.trainer.stages[-1].stage.heads and self.trainer.run.mesh.tp.is_first
        if self.trainer.loss_names is None:
            names = tuple(self.reports[0]) if self.reports else ()
            axis = self.trainer.run.mesh.pp
            self.trainer.loss_names = collectives.broadcast_object(names, axis, axis.size - 1)
        zero = torch.zeros(2, dtype=self.count.dtype, device=self.device)
        return {name: sum((report[name] for report in self.reports), zero) if speaks else zero
                for name in self.trainer.loss_names}

    def missing_factor(self) -> float | Tensor:
        """What gradients still lack once all microbatches are in: expected over true number of tokens."""
        if not self.trainer.run.config.train.calculate_per_token_loss:
            return 1.0
        mesh = self.trainer.run.mesh
        speaks = self.trainer.stages[-1].stage.heads and mesh.tp.is_first
        count = collectives.all_reduce(self.count.clone() if speaks else torch.zeros_like(self.count), mesh.world)
        return self._expected() / count.clamp(min=1.0)

    def _expected(self) -> int:
        train = self.trainer.run.config.train
        return self.num_microbatches * train.micro_batch_size * self.trainer.run.mesh.dp.size * train.seq_length

    def _loss_scale(self) -> float:
        """Loss scale, and the data-parallel size where the collective divides by it."""
        averages = self.trainer.run.config.parallel.ddp_average_in_collective
        return self.trainer.optimizer.scaler.scale * (self.trainer.run.mesh.dp.size if averages else 1)

    def _scaled(self, total: Tensor, count: Tensor) -> Tensor:
        if self.trainer.run.config.train.calculate_per_token_loss:
            return total * (self._scale / self._expected())
        return total / count.clamp(min=1.0) * (self._scale / (self.num_microbatches * self.trainer.run.mesh.dp.size))

    def _batch(self, microbatch: int) -> Batch:
        while len(self._seen) <= microbatch:
            with self.trainer.run.timers("batch-generator", 2):
                self._seen.append(take(self._batches))
        return self._seen[microbatch]

    def _parallel(self, stage: int) -> DataParallel:
        return self.trainer.parallels[stage // self.trainer.run.mesh.pp.size]


def _wide(trainer: Trainer) -> bool:
    return trainer.run.config.precision.fp64


def train_step(trainer: Trainer, batches: Iterator[Batch]) -> Step:
    """Train on the next global batch. Nothing waits for the device but an fp16 run's test for overflow."""
    run_, progress, timers = trainer.run, trainer.progress, trainer.run.timers
    config, mesh, optimizer = run_.config, run_.mesh, trainer.optimizer
    assert trainer.schedule is not None, "a trainer that trains has a schedule"
    size = trainer.batches.at(progress.consumed_train_samples)
    for parallel in trainer.parallels:
        parallel.zero_gradients()
    work = StepWork(trainer, batches, size.num_microbatches, training=True)
    with timers("forward-backward", 1):
        run(trainer.script(size.num_microbatches, training=True), work=work, axis=mesh.pp, backward_axis=mesh.pp_backward)
    with timers("all-grads-sync", 1):
        for parallel in trainer.parallels:
            parallel.finish_reduction()
    if config.train.empty_unused_memory_level == 2:
        empty_cache(mesh.device)
    rate = trainer.schedule.lr(progress.schedule_samples)
    decoupled = _decoupled_rate(trainer)
    optimizer.set_rates(rate, trainer.schedule.weight_decay(progress.schedule_samples), decoupled)
    scale = optimizer.scaler.scale
    with timers("optimizer", 1):
        result = optimizer.step(multiplier=work.missing_factor(), count_zero_elements=config.log.log_num_zeros_in_grad)
    norm = optimizer.weights_norm() if config.log.log_params_norm else None
    progress.iteration += 1
    progress.consumed_train_samples += size.global_batch_size
    progress.consumed_tokens += size.global_batch_size * config.train.seq_length
    if result.stepped:
        progress.schedule_samples += size.global_batch_size
    return Step(iteration=progress.iteration, consumed_samples=progress.consumed_train_samples,
                batch_size=size.global_batch_size, learning_rate=rate, losses=work.report(),
                decoupled_learning_rate=decoupled, loss_scale=scale, grad_norm=result.norm, num_zeros=result.zeros,
                params_norm=norm, skipped=not result.stepped)


def _decoupled_rate(trainer: Trainer) -> float | None:
    config = trainer.run.config.optimizer
    if config.decoupled_lr is None or trainer.schedule is None:
        return None
    return trainer.schedule.scaled_lr(trainer.progress.schedule_samples, max_lr=config.decoupled_lr,
                                      min_lr=config.decoupled_min_lr or 0.0)
