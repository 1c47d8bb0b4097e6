"""pretrain(): the one loop that every entry script shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

from megatron.core.config.flags import to_values
from megatron.core.config.rules import stages_of
from megatron.core.config.run import RunConfig
from megatron.core.datasets.indexed import DataError
from megatron.core.models.flops import flops_per_sample, rank_memory
from megatron.core.parallel import collectives
from megatron.core.parallel.device import empty_cache, memory_report, name_of, profiler_activities
from megatron.training.batch import Batch
from megatron.training.checkpointing import Checkpoint
from megatron.training.data import Dataset, microbatches, needs_text, samples_needed, take
from megatron.training.evaluate import evaluate
from megatron.training.metrics import (
    Meter,
    Work,
    known_peak,
    memory_line,
    progress_facts,
    progress_line,
    theoretical_memory_line,
)
from megatron.training.place import launcher_place
from megatron.training.run import Run
from megatron.training.stages import ForwardStep, ModelProvider, Trainer, build_trainer
from megatron.training.step import train_step
from megatron.training.timers import times_scalars, times_text
from megatron.training.watch import Profile, Watch
from megatron.training.writers import Writers

Datasets = tuple[Dataset | None, Dataset | None, Dataset | None]
DatasetProvider = Callable[[Run, tuple[int, int, int]], Datasets]


@dataclass(frozen=True, slots=True)
class Data:
    """Microbatches of each split, for this rank. A split without data is None."""

    train: Iterator[Batch] | None
    valid: Iterator[Batch] | None
    test: Iterator[Batch] | None


def pretrain(run: Run, datasets: DatasetProvider, model: ModelProvider, forward_step: ForwardStep) -> None:
    """Train, evaluate, save and report as the config says.

    datasets(run, (train, valid, test) samples) -> three datasets; model(run, stage) -> one stage of the network;
    forward_step(run, batches, stage) -> (output, loss function).
    """
    trainer = build_trainer(run, model, forward_step)
    checkpoint = Checkpoint(trainer)
    checkpoint.resume()
    trainer.batches.check(run.progress.consumed_train_samples)
    data = build_data(trainer, datasets)
    Session(trainer, checkpoint, data).run()


def build_data(trainer: Trainer, provider: DatasetProvider) -> Data:
    """The microbatches that come next, from the counters alone. Rank 0 builds index caches first, the others read them."""
    run, progress = trainer.run, trainer.progress
    reads = needs_text(run.config, trainer.specs)
    counts = samples_needed(run.config, trainer.batches)
    if run.mesh.world.is_first:
        found = provider(run, counts)
    collectives.barrier(run.mesh.world)
    if not run.mesh.world.is_first:
        found = provider(run, counts)
    if found[0] is None and not run.config.train.skip_train:
        raise DataError("the training split holds no data; give it a share in --split")

    def iterate(dataset: Dataset | None, consumed: int) -> Iterator[Batch] | None:
        return None if dataset is None else microbatches(run, dataset, consumed_samples=consumed, reads=reads)

    # A run that only evaluates has a validation set for one evaluation, and begins at its beginning.
    seen = 0 if run.config.train.skip_train else progress.consumed_valid_samples
    return Data(iterate(found[0], progress.consumed_train_samples), iterate(found[1], seen), iterate(found[2], 0))


class Session:
    """One stretch of a run, from a checkpoint (or the start) to an exit."""

    def __init__(self, trainer: Trainer, checkpoint: Checkpoint, data: Data) -> None:
        self.trainer, self.checkpoint, self.data = trainer, checkpoint, data
        self.config, self.mesh, self.log = trainer.run.config, trainer.run.mesh, trainer.run.log
        self.meter = Meter(lambda tensor: collectives.all_reduce(tensor, self.mesh.world))
        self.total = _total_iterations(trainer)
        self.writers = Writers(self.config.log, speaks=self.mesh.world.is_last, world_size=self.mesh.world.size,
                               start_iteration=trainer.progress.iteration, train_iters=self.total,
                               settings=to_values(self.config))
        self.work = _work(trainer)
        self.flops_at_start = trainer.progress.floating_point_operations
        self.since = time.perf_counter()
        self.steps_since = 0
        self.reported_memory = False

    def run(self) -> None:
        """Train until there is a reason to stop; then evaluate and save."""
        progress, reason = self.trainer.progress, ""
        self._describe()
        with closing(self.writers), self._watch() as watch:
            if not self.config.train.skip_train:
                self.since = time.perf_counter()
                # Asked after a step, never before the first: a run that resumes where it exited must get on.
                while progress.iteration < self.total and not reason:
                    self._one_iteration(watch)
                    if progress.iteration < self.total:
                        reason = watch.reason_to_stop(progress.iteration)
            self._resolve(watch)
            self._finish(reason, watch)

    def _one_iteration(self, watch: Watch) -> None:
        progress, train = self.trainer.progress, self.config.train
        before = self.trainer.batches.at(progress.consumed_train_samples).num_microbatches
        watch.before_step(progress.iteration)
        if progress.iteration + 1 in train.iterations_to_skip:
            self._skip()
        else:
            assert self.data.train is not None, "build_data refuses a run that trains without data"
            self.meter.add(train_step(self.trainer, self.data.train))
            self.steps_since += 1
            progress.floating_point_operations += int(self.work.causal_flops * before * self.trainer.batches.unit)
        watch.after_step(progress.iteration)
        if train.empty_unused_memory_level:
            empty_cache(self.mesh.device)  # level 2 also does so between the backward pass and the update
        if self._due(self.config.log.log_interval) or progress.iteration == 1:
            self._report(watch)
        if self._due(train.eval_interval) and train.eval_iters and self.data.valid is not None:
            self._evaluate(watch)
        after = self.trainer.batches.at(progress.consumed_train_samples).num_microbatches
        if self._due(self.config.checkpoint.save_interval) or (after != before and self.config.checkpoint.save):
            self._save(watch)

    def _due(self, interval: int | None) -> bool:
        return bool(interval) and self.trainer.progress.iteration % interval == 0

    def _skip(self) -> None:
        """Pass over the data of one iteration (`--iterations-to-skip`)."""
        size = self.trainer.batches.at(self.trainer.progress.consumed_train_samples)
        for _ in range(size.num_microbatches):
            take(self.data.train)
        progress = self.trainer.progress
        progress.iteration += 1
        progress.consumed_train_samples += size.global_batch_size
        progress.skipped_train_samples += size.global_batch_size

    def _resolve(self, watch: Watch) -> None:
        steps = self.meter.resolve()
        self.writers.steps(steps)
        watch.demand_finite(steps)

    def _report(self, watch: Watch) -> None:
        """One log line for the steps since the last."""
        self._resolve(watch)
        if not self.steps_since:
            return
        progress, log = self.trainer.progress, self.config.log
        seconds = time.perf_counter() - self.since
        times = self.trainer.run.timers.collect(steps=self.steps_since)
        report = self.meter.report(train_iters=self.total, seconds=seconds, skipped_samples=progress.skipped_train_samples,
                                   work=self.work if log.log_throughput else None)
        self.writers.report(report)
        self.writers.times(progress.iteration, times_text(times, log.timing_log_option), times_scalars(times))
        if not self.reported_memory or self._due(log.log_memory_interval):
            self.reported_memory = True
            memory = memory_report(self.mesh.device)
            self.writers.memory(progress.iteration, memory)
            if self.mesh.dp.is_first:  # data-parallel ranks hold the same
                self.log.info(memory_line(self.mesh.world.rank, progress.iteration, memory))
        self.since, self.steps_since = time.perf_counter(), 0

    def _evaluate(self, watch: Watch) -> None:
        """The mean validation loss over --eval-iters global batches."""
        progress, train = self.trainer.progress, self.config.train
        paused = time.perf_counter()
        self._resolve(watch)
        watch.around_evaluation()
        losses = evaluate(self.trainer, self.data.valid, train.eval_iters)
        progress.consumed_valid_samples += train.eval_iters * self.trainer.batches.full
        self.writers.validation(losses, iteration=progress.iteration, consumed_samples=progress.consumed_train_samples)
        watch.around_evaluation()
        self.since += time.perf_counter() - paused

    def _save(self, watch: Watch) -> None:
        if self.config.checkpoint.save and self.checkpoint.last_saved != self.trainer.progress.iteration:
            paused = time.perf_counter()
            self._resolve(watch)
            self.checkpoint.save()
            self._note_progress("Saved checkpoint")
            self.since += time.perf_counter() - paused

    def _note_progress(self, event: str) -> None:
        """A line in SAVE/progress.txt (`--log-progress`)."""
        folder = self.config.checkpoint.save
        if not (self.config.log.log_progress and folder and self.mesh.world.is_first):
            return
        progress, devices = self.trainer.progress, self.mesh.world.size
        seconds = max(1e-9, time.monotonic() - self.trainer.run.started)
        done = progress.floating_point_operations - self.flops_at_start
        facts = progress_facts(progress.iteration, job_tflops=done / seconds / devices / 1e12, total_flops=progress.floating_point_operations,
                               total_tokens=progress.consumed_tokens)
        line = progress_line(event, now=datetime.now(), job_id=launcher_place().job, num_devices=devices, facts=facts)
        with open(Path(folder) / "progress.txt", "a", encoding="utf-8") as file:
            file.write(line)

    def _finish(self, reason: str, watch: Watch) -> None:
        """Save, and evaluate if the run came to its end."""
        progress, train = self.trainer.progress, self.config.train
        if not train.skip_train:
            self._save(watch)
        if reason:
            self.trainer.run.say(reason)
            return
        for name, batches in (("validation", self.data.valid), ("test", self.data.test)):
            if batches is not None and train.eval_iters:
                losses = evaluate(self.trainer, batches, train.eval_iters)
                self.writers.validation(losses, iteration=progress.iteration,
                                        consumed_samples=progress.consumed_train_samples, final=name)

    def _watch(self) -> Watch:
        config = self.config
        dynamic = config.precision.fp16 and config.precision.loss_scale is None
        profile = Profile.build(config.log, rank=self.mesh.world.rank, activities=profiler_activities(self.mesh.device),
                                folder=config.log.tensorboard_dir or config.checkpoint.save or ".")

        def agree(vote: bool) -> bool:
            tensor = torch.tensor(int(vote), device=self.mesh.device)
            return bool(collectives.all_reduce(tensor, self.mesh.world, "max")) if self.mesh.world.size > 1 else vote

        return Watch(config.train, agree=agree, started=self.trainer.run.started, tolerates_overflow=dynamic, profile=profile)

    def _describe(self) -> None:
        """Sizes, once: what each rank of the first replica holds, and the footprint that follows from the config."""
        count = sum(param.numel() for stage in self.trainer.stages for param in stage.parameters())
        rows = collectives.gather_objects((self.mesh.dp.rank, self.mesh.tp.rank, self.mesh.pp.rank, count), self.mesh.world)
        for data, tensor, pipeline, held in rows:
            if data == 0:
                self.trainer.run.say(f"parameters on (tensor, pipeline) rank ({tensor}, {pipeline}): {held}")
        count = self.trainer.batches.at(self.trainer.progress.consumed_train_samples).num_microbatches
        largest = max(rank_memory(self.config, stages_of(self.config), data_parallel_size=self.mesh.dp.size,
                                  num_microbatches=count), key=lambda held: held.total)
        self.trainer.run.say(theoretical_memory_line(largest.weights_and_optimizer, largest.activations))
        self._note_progress("Starting job")


def _total_iterations(trainer: Trainer) -> int:
    train = trainer.run.config.train
    if train.train_iters is not None:
        return train.train_iters
    return trainer.batches.iterations(train.train_samples) if train.train_samples is not None else 0


def _work(trainer: Trainer) -> Work:
    config: RunConfig = trainer.run.config
    length = config.train.seq_length
    peak = config.log.peak_tflops or known_peak(name_of(trainer.run.mesh.device), config.precision.dtype)
    return Work(seq_length=length, causal_flops=flops_per_sample(config.model, length, "causal"),
                square_flops=flops_per_sample(config.model, length, "square"), num_devices=trainer.run.mesh.world.size, peak=peak)
