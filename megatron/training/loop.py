"""pretrain(): the one loop that every entry script shares."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path

import torch

from megatron.core.config.flags import ConfigError, to_values
from megatron.core.config.settings.run import RunConfig
from megatron.core.config.stages import stages_of
from megatron.core.dist_checkpointing.saver import SaveOutcome
from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.core.models.flops import flops_per_sample, rank_memory
from megatron.core.parallel import collectives
from megatron.core.parallel.device import device_name, empty_cache, memory_report, profiler_activities
from megatron.training.accelerate.compile import Compiler
from megatron.training.accelerate.cuda_graphs import CapturedGraphs
from megatron.training.checkpoint.best import note_if_best, require_metric
from megatron.training.checkpoint.checkpointing import Checkpoint, lock_save_folder
from megatron.training.evaluate import evaluate, evaluation_mode
from megatron.training.health.bad_steps import BadStep, RollBack, StepValidator
from megatron.training.health.causality_check import demand_no_leak
from megatron.training.health.exit_conditions import ExitConditions, NotFinite, Profile
from megatron.training.health.failures import with_location
from megatron.training.health.interrupts import Interrupts
from megatron.training.health.replica_check import ReplicaCheck, ReplicasDiffer
from megatron.training.health.rerun import ResultRejected, StepRerun
from megatron.training.health.stragglers import StragglerDetector
from megatron.training.health.vote import Vote
from megatron.training.health.watchdog import HangDetector
from megatron.training.launch.launch_info import read_launch_info
from megatron.training.loader import DatasetProvider, EvaluationData, SplitBatches, build_data, next_batch
from megatron.training.report.metrics import (
    FlopsPerSample,
    Meter,
    known_peak,
    memory_line,
    progress_facts,
    progress_line,
    theoretical_memory_line,
)
from megatron.training.report.run_log import LogFile
from megatron.training.report.run_record import record_run, record_steps
from megatron.training.report.timers import times_scalars, times_text
from megatron.training.report.writers import Writers
from megatron.training.run import Run
from megatron.training.step import train_step
from megatron.training.trainer import Evaluate, ForwardStep, ModelProvider, Samples, Trainer, build_trainer


def pretrain(
    run: Run,
    datasets: DatasetProvider,
    model: ModelProvider,
    forward_step: ForwardStep,
    samples: Callable[[Run], Samples] | None = None,
    *,
    benchmark: Callable[[Run, str], tuple[str, Evaluate]] | None = None,
    data_of: Callable[[Trainer], SplitBatches] | None = None,
) -> None:
    """Train, evaluate, save and report as the config says.

    datasets(run, (train, valid, test) samples) -> three datasets; model(run, stage) -> one stage of the network;
    forward_step(run, batches, stage) -> (output, loss function). samples(run): what continues the prompts of --eval-generate, of
    networks that can. benchmark(run, file): what --online-evaluation-config asks for, of networks that can. data_of(trainer): the data, where they are not read from datasets.
    """
    with lock_save_folder(run) as lock, record_run(run), HangDetector(run), with_location(run):
        demand_no_leak(run)
        trainer = build_trainer(run, model, forward_step)
        if run.config.train.eval_generate:
            if samples is None:
                raise ConfigError(
                    "--eval-generate: this script gives pretrain() nothing that continues text; leave it out"
                )
            trainer.samples = samples(run)
        if (file := run.config.data.multimodal.online_evaluation_config) is not None:
            if benchmark is None:
                raise ConfigError(
                    "--online-evaluation-config: this script answers no questions about images; leave it out"
                )
            trainer.benchmark = benchmark(run, file)
        compiler = Compiler(trainer) if run.config.compilation.compile else None
        recordings = CapturedGraphs(trainer) if run.config.graphs.cuda_graph_impl == "local" else None
        checkpoint = Checkpoint(trainer, lock=lock)
        if checkpoint.resume():
            run.run_log.add("loaded", **dataclasses.asdict(run.progress))
        trainer.batches.check(run.progress.consumed_train_samples)
        validator = StepValidator(run.config)
        rerun = StepRerun(trainer, validator) if run.config.faults.step_rerun != "disabled" else None
        if run.config.faults.validates_steps and rerun is None:
            trainer.add_hook(validator)
        while True:
            try:
                with closing(build_data(trainer, datasets) if data_of is None else data_of(trainer)) as data:
                    return Session(trainer, checkpoint, data, validator, rerun, compiler or recordings).run()
            except RollBack as bad:
                run.print_rank_0(
                    f"WARNING: {bad}\nThe run goes back to its last checkpoint, and will pass over the data of that iteration"
                )
                checkpoint.roll_back(bad)
                run.run_log.add("rollback", reason=str(bad), **dataclasses.asdict(run.progress))


class Session:
    """One stretch of a run, from a checkpoint (or the start) to an exit."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoint: Checkpoint,
        data: SplitBatches,
        validator: StepValidator,
        rerun: StepRerun | None = None,
        layers: Compiler | CapturedGraphs | None = None,
    ) -> None:
        """layers: who makes layers faster, and tells of it."""
        self.trainer, self.checkpoint, self.data, self.validator, self.rerun, self.layers = (
            trainer,
            checkpoint,
            data,
            validator,
            rerun,
            layers,
        )
        self.config, self.mesh, self.log = trainer.run.config, trainer.run.mesh, trainer.run.log
        self.meter = Meter(lambda tensor: collectives.all_reduce(tensor, self.mesh.world))
        self.total = _total_iterations(trainer)
        self.writers = Writers(
            self.config.log,
            speaks=self.mesh.world.is_last,
            world_size=self.mesh.world.size,
            start_iteration=trainer.progress.iteration,
            train_iters=self.total,
            settings=to_values(self.config),
        )
        if self.config.checkpoint.save_best and data.valid is None:
            raise ConfigError("--save-best: there are no validation data; give them a share in --split")
        self.work = _flops_per_sample(trainer)
        self.replica_check = ReplicaCheck(trainer)
        self.stragglers = StragglerDetector(self.mesh) if self.config.faults.log_straggler else None
        self.flops_at_start = trainer.progress.floating_point_operations
        self.since = time.perf_counter()
        self.steps_since = 0
        self.reported_memory = False
        self.failed_saves = 0
        folder = self.config.checkpoint.save if self.config.log.log_progress and self.mesh.world.is_first else None
        self.progress_file = LogFile(Path(folder) / "progress.txt", "--log-progress") if folder else None
        self.notes: dict[int, str] = {}  # iteration that is being saved -> its line in progress.txt

    def run(self) -> None:
        """Train until there is a reason to stop; then evaluate and save."""
        self._log_sizes()
        with closing(self.writers), self._exit_conditions() as watch:
            try:
                reason = "" if self.config.train.skip_train else self._train_loop(watch)
                self._resolve_steps(watch)
            except ResultRejected:
                if self.trainer.progress.iteration:  # the state before the step, to run it again from
                    self._save_if_due(watch)
                self._record_save(self.checkpoint.finish())
                raise
            except (
                NotFinite,
                BadStep,
                RollBack,
                ReplicasDiffer,
            ):  # of which all ranks know: they can still end a save together
                self._record_save(self.checkpoint.finish())
                raise
            self._finish(reason, watch)
            self.trainer.run.run_log.add("end", reason=reason or "complete", iteration=self.trainer.progress.iteration)

    def _train_loop(self, watch: ExitConditions) -> str:
        """Iterate to the end, or until there is a reason to stop, which is returned."""
        progress, reason = self.trainer.progress, ""
        self.checkpoint.prepare()
        self.since = time.perf_counter()
        # Asked after a step, never before the first: a run that resumes where it exited must get on.
        while progress.iteration < self.total and not reason:
            self._one_iteration(watch)
            if progress.iteration < self.total:
                reason = watch.reason_to_stop(progress.iteration)
        return reason

    def _one_iteration(self, watch: ExitConditions) -> None:
        progress = self.trainer.progress
        before = self.trainer.batches.step_after(progress.consumed_train_samples).num_microbatches
        watch.before_step(progress.iteration)
        if (flag := self._skipped_by(progress.iteration + 1)) is not None:
            self._skip_iteration(flag)
        else:
            assert self.data.train is not None, "build_data refuses a run that trains without data"
            with nullcontext() if self.layers is None else self.layers.watch_step(progress.iteration + 1):
                step = self.rerun.step if self.rerun is not None else partial(train_step, self.trainer)
                self.meter.add(step(self.data.train))
            if self.config.checkpoint.save_best is not None:
                require_metric(self.config.checkpoint.save_best, self.trainer.loss_names or ())
            self.steps_since += 1
            progress.floating_point_operations += int(self.work.causal_flops * before * self.trainer.batches.unit)
            if self.validator.problem:
                self._bad_step(watch, before * self.trainer.batches.unit)
        self.mesh.flight_recorder.enter_phase("")
        watch.after_step(progress.iteration)
        self._after_step(watch, before)

    def _after_step(self, watch: ExitConditions, before: int) -> None:
        """What is due after this iteration: checks, log line, evaluation, checkpoint. before: its microbatches."""
        progress, train = self.trainer.progress, self.config.train
        if self._is_due(self.config.faults.check_weight_hash_across_dp_replicas_interval):
            self.replica_check.check()
        if train.empty_unused_memory_level:
            empty_cache(self.mesh.device)  # level 2 also does so between the backward pass and the update
        if self._is_due(self.config.log.log_interval) or progress.iteration == 1:
            self._log_steps(watch)
        if self._is_due(train.eval_interval) and self.data.valid is not None:
            self._evaluate(watch)
        if self._is_due(train.eval_interval):
            self._show_samples()
        after = self.trainer.batches.step_after(progress.consumed_train_samples).num_microbatches
        if self._is_due(self.config.checkpoint.save_interval) or (after != before and self.config.checkpoint.save):
            self._save_if_due(watch)
        self._record_save(self.checkpoint.poll())

    def _skipped_by(self, iteration: int) -> str | None:
        """The flag that lets the run pass over the data of an iteration, None where it is trained on."""
        if iteration in self.config.train.iterations_to_skip:
            return "--iterations-to-skip"
        if iteration in self.validator.passed_over:
            return "--on-bad-step rollback"
        if self.rerun is not None and iteration in self.rerun.skipped:
            return "--result-rejected-tracker-filename"
        return None

    def _is_due(self, interval: int | None) -> bool:
        return interval is not None and interval > 0 and self.trainer.progress.iteration % interval == 0

    def _bad_step(self, watch: ExitConditions, samples: int) -> None:
        """What becomes of the run after a step without an update (`--on-bad-step`); raises unless it goes on."""
        progress = self.trainer.progress
        progress.skipped_train_samples += samples
        self._resolve_steps(watch)
        self.trainer.run.run_log.add(
            "bad step", iteration=progress.iteration, samples=samples, reason=self.validator.problem
        )
        self.trainer.run.print_rank_0(f"WARNING: {self.validator.decide_after_bad_step(progress.iteration)}")

    def _skip_iteration(self, reason: str) -> None:
        """Pass over the data of one iteration; reason: the flag that asks for it."""
        size = self.trainer.batches.step_after(self.trainer.progress.consumed_train_samples)
        assert self.data.train is not None, "build_data refuses a run that trains without data"
        for _ in range(size.num_microbatches):
            next_batch(self.data.train)
        progress = self.trainer.progress
        progress.iteration += 1
        progress.consumed_train_samples += size.global_batch_size
        progress.skipped_train_samples += size.global_batch_size
        self.trainer.run.run_log.add(
            "skip", iteration=progress.iteration, samples=size.global_batch_size, reason=reason
        )

    def _resolve_steps(self, watch: ExitConditions) -> None:
        steps = self.meter.resolve()
        self.writers.write_steps(steps)
        record_steps(self.trainer.run.run_log, steps)
        watch.demand_finite(steps)

    def _log_steps(self, watch: ExitConditions) -> None:
        """One log line for the steps since the last."""
        self._resolve_steps(watch)
        if not self.steps_since:
            return
        progress, log = self.trainer.progress, self.config.log
        seconds = time.perf_counter() - self.since
        times = self.trainer.run.timers.collect(steps=self.steps_since)
        report = self.meter.report(
            train_iters=self.total,
            seconds=seconds,
            skipped_samples=progress.skipped_train_samples,
            work=self.work if log.log_throughput else None,
            seq_length=self.config.train.seq_length,
            samples_left=self.trainer.batches.num_samples(
                self.total - progress.iteration, progress.consumed_train_samples
            ),
        )
        self.writers.write_report(report)
        self.writers.write_times(progress.iteration, times_text(times, log.timing_log_option), times_scalars(times))
        if not self.reported_memory or self._is_due(log.log_memory_interval):
            self.reported_memory = True
            memory = memory_report(self.mesh.device)
            self.writers.write_memory(progress.iteration, memory)
            if self.mesh.dp.is_first:  # data-parallel ranks hold the same
                self.log.info(memory_line(self.mesh.world.rank, progress.iteration, memory))
        if self.rerun is not None and (determinism := self.rerun.report()):
            self.trainer.run.print_rank_0(determinism)
        if self.stragglers is not None:
            self.trainer.run.print_rank_0(
                self.stragglers.report(self.steps_since, count=self.config.faults.straggler_minmax_count)
            )
        self.since, self.steps_since = time.perf_counter(), 0

    def _evaluate(self, watch: ExitConditions) -> None:
        """The mean validation loss over --eval-iters global batches, or over all of the validation data."""
        progress = self.trainer.progress
        paused = time.perf_counter()
        self._resolve_steps(watch)
        watch.around_evaluation()
        assert self.data.valid is not None, "only runs with validation data evaluate"
        losses = self._losses_of(self.data.valid)
        if not self.config.data.full_validation:
            progress.consumed_valid_samples += self.data.valid.iterations * self.trainer.batches.evaluation_batch_size
        self.writers.write_validation(
            losses, iteration=progress.iteration, consumed_samples=progress.consumed_train_samples
        )
        self.trainer.run.run_log.add("validation", iteration=progress.iteration, losses=losses)
        watch.around_evaluation()
        self.since += time.perf_counter() - paused
        if self.config.checkpoint.save_best is not None:
            self._save_if_best(losses, watch)

    def _save_if_best(self, losses: Mapping[str, float], watch: ExitConditions) -> None:
        """Begin to save where an evaluation is better than all before (--save-best)."""
        progress = self.trainer.progress
        if note_if_best(progress, losses, self.config.checkpoint, self.mesh.world):
            self.trainer.run.print_rank_0(
                f"iteration {progress.iteration} is the best so far: {progress.best_figure[4:]} {progress.best_value:.6E}"
            )
            self._save_if_due(watch)

    def _show_samples(self) -> None:
        """What the network says after the prompts of --eval-generate, and its scores of --online-evaluation-config."""
        trainer, iteration = self.trainer, self.trainer.progress.iteration
        if trainer.samples is not None or trainer.benchmark is not None:
            paused = time.perf_counter()
            with (
                evaluation_mode(self.trainer),
                torch.compiler.set_stance("force_eager") if isinstance(self.layers, Compiler) else nullcontext(),
            ):
                if trainer.samples is not None:
                    self.writers.write_samples(trainer.samples(trainer.stages), iteration=iteration)
                if trainer.benchmark is not None:
                    task, evaluate = trainer.benchmark
                    scores = evaluate(trainer.stages, iteration)
                    listed = " | ".join(f"{name}: {score:.2f}" for name, score in scores.items())
                    self.trainer.run.print_rank_0(f" {task} at iteration {iteration} | {listed} |")
                    self.writers.write_scores(task, scores, iteration=iteration)
            self.since += time.perf_counter() - paused

    def _save_if_due(self, watch: ExitConditions) -> None:
        """Begin to save, if that is asked for and has not been done in this iteration."""
        iteration = self.trainer.progress.iteration
        if self.config.checkpoint.save and iteration not in (self.checkpoint.last_saved, self.checkpoint.on_its_way):
            paused = time.perf_counter()
            self._resolve_steps(watch)
            self.mesh.flight_recorder.begin_activity("save", iteration)
            ended = self.checkpoint.begin_save()
            self.notes[iteration] = self._progress_text("Saved checkpoint")
            for outcome in ended:
                self._record_save(outcome)
            self.since += time.perf_counter() - paused

    def _record_save(self, outcome: SaveOutcome | None) -> None:
        """Record how a save ended, if one did."""
        if outcome is None:
            return
        self.failed_saves += bool(outcome.problems)
        self.writers.write_save_result(
            outcome.iteration,
            seconds=outcome.seconds,
            blocked=outcome.blocked,
            size=outcome.size,
            failures=self.failed_saves,
        )
        self.trainer.run.run_log.add(
            "checkpoint",
            iteration=outcome.iteration,
            seconds=outcome.seconds,
            bytes=outcome.size,
            problems=list(outcome.problems) or None,
        )
        text = self.notes.pop(outcome.iteration)
        if not outcome.problems:
            self._note_progress(text)

    def _progress_text(self, event: str) -> str:
        """A line for SAVE/progress.txt, as things are now."""
        progress, devices = self.trainer.progress, self.mesh.world.size
        seconds = max(1e-9, time.monotonic() - self.trainer.run.started)
        done = progress.floating_point_operations - self.flops_at_start
        facts = progress_facts(
            progress.iteration,
            job_tflops=done / seconds / devices / 1e12,
            total_flops=progress.floating_point_operations,
            total_tokens=progress.consumed_tokens,
        )
        return progress_line(event, now=datetime.now(), job_id=read_launch_info().job, num_devices=devices, facts=facts)

    def _note_progress(self, text: str) -> None:
        """Append to SAVE/progress.txt (`--log-progress`)."""
        if self.progress_file is not None:
            self.progress_file.add(text)

    def _finish(self, reason: str, watch: ExitConditions) -> None:
        """Save, and evaluate if the run came to its end."""
        progress, train = self.trainer.progress, self.config.train
        losses: dict[str, float] | None = None
        if self.config.checkpoint.save_best and not (reason or train.skip_train or self._is_due(train.eval_interval)):
            losses = self._losses_of(self.data.valid)  # before the last save, which may be the best
            self._save_if_best(losses, watch)
        if not train.skip_train:
            self._record_save(
                self.checkpoint.finish()
            )  # if it is of this very iteration and failed, here is another chance
            self._save_if_due(watch)
            self._record_save(self.checkpoint.finish())
        if reason:
            self.trainer.run.print_rank_0(reason)
        else:
            self._evaluate_at_end(losses)
        if self.config.checkpoint.save and not train.skip_train and self.checkpoint.last_saved != progress.iteration:
            raise CheckpointError(
                f"the last checkpoint of this run, of iteration {progress.iteration}, could not be saved; see above"
            )

    def _losses_of(self, evaluations: EvaluationData | None) -> dict[str, float]:
        """The losses of the next evaluation of a split."""
        assert evaluations is not None, "only splits with data are evaluated"
        with evaluations.next() as (batches, iterations):
            return evaluate(self.trainer, batches, iterations)

    def _evaluate_at_end(self, validated: dict[str, float] | None) -> None:
        """One evaluation of each split that is there. validated: the losses of the validation split, where they are known already."""
        progress, train = self.trainer.progress, self.config.train
        if train.skip_train or not self._is_due(train.eval_interval):  # else it has just been done
            self._show_samples()
        for name, evaluations in (("validation", self.data.valid), ("test", self.data.test)):
            if evaluations is not None:
                known = validated if name == "validation" else None
                losses = self._losses_of(evaluations) if known is None else known
                self.writers.write_validation(
                    losses, iteration=progress.iteration, consumed_samples=progress.consumed_train_samples, final=name
                )
                self.trainer.run.run_log.add("validation", iteration=progress.iteration, losses=losses, final=name)

    def _exit_conditions(self) -> ExitConditions:
        config = self.config
        dynamic = config.precision.fp16 and config.precision.loss_scale is None
        profile = Profile.build(
            config.log,
            rank=self.mesh.world.rank,
            activities=profiler_activities(self.mesh.device),
            folder=config.log.tensorboard_dir or config.checkpoint.save or ".",
        )

        run, vote = self.trainer.run, Vote(self.mesh.world, self.mesh.device)
        return ExitConditions(
            config.train,
            agree=vote.result,
            poll=vote.poll,
            started=run.started,
            ending=run.ending,
            tolerates_overflow=dynamic,
            profile=profile,
            interrupts=Interrupts(run.ending, first=self._say_interrupted, last=self._end_at_once),
        )

    def _say_interrupted(self) -> None:
        saves = "and saves" if self.config.checkpoint.save else "without a save, for which there is no --save"
        self.trainer.run.print_rank_0(
            f"SIGINT: the run ends after this step {saves}; once more (Ctrl-C) ends it at once"
        )

    def _end_at_once(self) -> None:
        last = self.checkpoint.last_saved
        self.trainer.run.run_log.add(
            "end", reason="SIGINT, twice", iteration=self.trainer.progress.iteration, failed=True
        )
        self.trainer.run.print_rank_0(
            f"SIGINT again: the run ends at once, in iteration {self.trainer.progress.iteration + 1}; "
            + (f"its last checkpoint is that of iteration {last}" if last is not None else "it has no checkpoint")
        )

    def _log_sizes(self) -> None:
        """Sizes, once: what each rank of the first replica holds, and the footprint that follows from the config."""
        count = sum(param.numel() for stage in self.trainer.stages for param in stage.parameters())
        rows = collectives.gather_objects(
            (self.mesh.dp.rank, self.mesh.tp.rank, self.mesh.pp.rank, count), self.mesh.world
        )
        for data, tensor, pipeline, held in rows:
            if data == 0:
                self.trainer.run.print_rank_0(f"parameters on (tensor, pipeline) rank ({tensor}, {pipeline}): {held}")
        count = self.trainer.batches.step_after(self.trainer.progress.consumed_train_samples).num_microbatches
        largest = max(
            rank_memory(
                self.config, stages_of(self.config), data_parallel_size=self.mesh.dp.size, num_microbatches=count
            ),
            key=lambda held: held.total,
        )
        self.trainer.run.print_rank_0(theoretical_memory_line(largest.weights_and_optimizer, largest.activations))
        self._note_progress(self._progress_text("Starting job"))


def _total_iterations(trainer: Trainer) -> int:
    train = trainer.run.config.train
    if train.train_iters is not None:
        return train.train_iters
    return trainer.batches.num_whole_steps(train.train_samples) if train.train_samples is not None else 0


def _flops_per_sample(trainer: Trainer) -> FlopsPerSample:
    config: RunConfig = trainer.run.config
    length = config.train.seq_length
    peak = config.log.peak_tflops or known_peak(device_name(trainer.run.mesh.device), config.precision.dtype)
    causal, square = (
        flops_per_sample(config.model, length, count, decoder_length=config.train.decoder_seq_length)
        for count in ("causal", "square")
    )
    return FlopsPerSample(
        seq_length=length, causal_flops=causal, square_flops=square, num_devices=trainer.run.mesh.world.size, peak=peak
    )
