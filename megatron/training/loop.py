"""pretrain(): the one loop that every entry script shares."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path

import torch

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.flags.figures import match_metric_name
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.run import CheckpointConfig, RunConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.saver import SaveOutcome
from megatron.core.models.flops import estimate_memory_by_pipeline_rank, flops_per_sample
from megatron.core.parallel import collectives
from megatron.core.parallel.device import device_memory_stats, device_name, empty_cache, profiler_activities
from megatron.core.parallel.late_reduction import LaggedIntegerReduction
from megatron.core.parallel.mesh import Axis
from megatron.training.accelerate.compile import LayerCompiler
from megatron.training.accelerate.cuda_graphs import LayerGraphCapturer
from megatron.training.checkpoint.checkpointing import Checkpointer, lock_save_folder
from megatron.training.health.bad_steps import BadStepError, RollBackRequest, StepValidator
from megatron.training.health.causality_check import require_causal_attention
from megatron.training.health.exit_conditions import ExitConditions, InterruptHandler, NonFiniteError, TorchProfile
from megatron.training.health.failures import annotate_errors
from megatron.training.health.replica_check import ReplicaCheck, ReplicaMismatchError
from megatron.training.health.rerun import ResultRejectedError, StepRerun
from megatron.training.health.stragglers import StragglerDetector
from megatron.training.health.watchdog import HangDetector
from megatron.training.hooks.run_record import add_steps_to_run_log, record_run_start_and_error
from megatron.training.hooks.writers import Writers
from megatron.training.launch.launch_info import read_launch_info
from megatron.training.loader import DatasetProvider, EvaluationData, SplitBatches, build_split_batches
from megatron.training.report.metrics import (
    FlopsPerSample,
    StepMetricsMeter,
    known_peak_tflops,
    memory_line,
    progress_file_line,
    theoretical_memory_line,
)
from megatron.training.report.run_log import LogFile
from megatron.training.report.timers import max_times_by_tag, timer_report_text
from megatron.training.state.batch import require_next_batch
from megatron.training.state.evaluate import evaluate_loss, evaluation_mode
from megatron.training.state.run import RunContext, TrainingProgress
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Evaluate, ForwardStep, ModelProvider, Samples, Trainer, build_trainer


def pretrain(
    run: RunContext,
    datasets: DatasetProvider,
    model: ModelProvider,
    forward_step: ForwardStep,
    samples: Callable[[RunContext], Samples] | None = None,
    *,
    benchmark: Callable[[RunContext, str], tuple[str, Evaluate]] | None = None,
    data_of: Callable[[Trainer], SplitBatches] | None = None,
) -> None:
    """Train, evaluate, save and report as the config says. datasets(run, (train, valid, test) sample counts) -> three
    datasets; model(run, stage spec) -> one stage of the network; forward_step(run, batches, stage) -> (output, loss
    function). samples(run): makes the generator for --eval-generate. benchmark(run, file): makes (task name,
    evaluation) for --online-evaluation-config. data_of(trainer): the data, if not read from datasets.
    """
    with lock_save_folder(run) as lock, record_run_start_and_error(run), HangDetector(run), annotate_errors(run):
        require_causal_attention(run)
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
        compiler = LayerCompiler(trainer) if run.config.compilation.compile else None
        recordings = LayerGraphCapturer(trainer) if run.config.graphs.cuda_graph_impl == "local" else None
        checkpoint = Checkpointer(trainer, lock=lock)
        if checkpoint.resume():
            run.run_log.add("loaded", **dataclasses.asdict(run.progress))
            _warn_of_other_batches(trainer)
        trainer.batches.require_divisible_sizes(run.progress.consumed_train_samples)
        reruns = run.config.faults.effective_rerun_mode != "disabled"
        validator = StepRerun(trainer) if reruns else StepValidator(run.config)
        if reruns or run.config.faults.validates_steps:
            trainer.add_hook(validator)
        while True:
            try:
                with closing(build_split_batches(trainer, datasets) if data_of is None else data_of(trainer)) as data:
                    return TrainingSession(trainer, checkpoint, data, validator, compiler or recordings).run()
            except RollBackRequest as bad:
                run.print_rank_0(
                    f"WARNING: {bad}\nThe run goes back to its last checkpoint, and will pass over the data of that iteration"
                )
                checkpoint.roll_back(bad)
                run.run_log.add("rollback", reason=str(bad), **dataclasses.asdict(run.progress))


def _warn_of_other_batches(trainer: Trainer) -> None:
    """Log if the iterations before a checkpoint took other batches than the schedule of this run would have."""
    progress = trainer.run.progress
    if note := trainer.batches.resume_note(progress.iteration, progress.consumed_train_samples):
        trainer.run.print_rank_0(f"WARNING: {note}")


class TrainingSession:
    """One stretch of a run, from a checkpoint (or the start) to an exit or rollback."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoint: Checkpointer,
        data: SplitBatches,
        validator: StepValidator,
        layers: LayerCompiler | LayerGraphCapturer | None = None,
    ) -> None:
        """layers: who makes layers faster, and tells of it."""
        self.trainer, self.checkpoint, self.data = trainer, checkpoint, data
        self.validator, self.layers = validator, layers
        self.rerun = validator if isinstance(validator, StepRerun) else None
        self.config, self.mesh, self.log = trainer.run.config, trainer.run.mesh, trainer.run.log
        self.meter = StepMetricsMeter(lambda tensor: collectives.all_reduce(tensor, self.mesh.world))
        self.total = trainer.batches.num_iterations(self.config.train)
        self.writers = Writers.of_run(trainer.run, train_iters=self.total)
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
        """Train until there is a reason to stop; then save, and evaluate if the run came to its end."""
        self._log_sizes()
        with closing(self.writers), self._exit_conditions() as watch:
            try:
                reason = "" if self.config.train.skip_train else self._train_loop(watch)
                self._resolve_and_write_metrics(watch)
            except ResultRejectedError:
                if self.trainer.progress.iteration:  # the state before the step, to run it again from
                    self._save_if_unsaved(watch)
                self._record_save(self.checkpoint.wait_for_save_outcome())
                raise
            except (NonFiniteError, BadStepError, RollBackRequest, ReplicaMismatchError):
                # All ranks know of these: they can still end a save together.
                self._record_save(self.checkpoint.wait_for_save_outcome())
                raise
            self._save_and_evaluate_at_end(reason, watch)
            self.trainer.run.run_log.add("end", reason=reason or "complete", iteration=self.trainer.progress.iteration)

    def _train_loop(self, watch: ExitConditions) -> str:
        """Run iterations to the end or until there is a reason to stop; return the reason, "" at the end."""
        progress, reason = self.trainer.progress, ""
        self.checkpoint.preallocate_for_async_saves()
        self.since = time.perf_counter()
        # Asked after a step, never before the first: a run that resumes where it exited must get on.
        while progress.iteration < self.total and not reason:
            self._run_iteration(watch)
            if progress.iteration < self.total:
                reason = watch.reason_to_stop(progress.iteration)
        return reason

    def _run_iteration(self, watch: ExitConditions) -> None:
        """Run one training step, or skip its data, and what is due after it."""
        progress = self.trainer.progress
        before = self.trainer.batches.batch_size_after(progress.consumed_train_samples).num_microbatches
        watch.start_profiler_if_due(progress.iteration)
        if (flag := self._flag_causing_skip(progress.iteration + 1)) is not None:
            self._skip_iteration(flag)
        else:
            assert self.data.train is not None, "build_split_batches refuses a run that trains without data"
            with nullcontext() if self.layers is None else self.layers.log_new_graphs_of_step(progress.iteration + 1):
                step = self.rerun.train_step_checked if self.rerun is not None else partial(train_step, self.trainer)
                self.meter.add(step(self.data.train))
            if self.config.checkpoint.save_best is not None:
                require_save_best_metric(self.config.checkpoint.save_best, self.trainer.loss_names or ())
            self.steps_since += 1
            progress.floating_point_operations += int(self.work.causal_flops * before * self.trainer.batches.unit)
            if self.validator.problem:
                self._handle_bad_step(watch, before * self.trainer.batches.unit)
        self.mesh.flight_recorder.enter_phase("")
        watch.profile_and_collect_garbage(progress.iteration)
        self._after_step(watch, before)

    def _after_step(self, watch: ExitConditions, before: int) -> None:
        """Do what is due: replica check, log line, evaluation, checkpoint. before: the step's microbatches."""
        progress, train = self.trainer.progress, self.config.train
        if self._is_due(self.config.faults.check_weight_hash_across_dp_replicas_interval):
            self.replica_check.require_equal_replicas()
        if train.empty_unused_memory_level:
            empty_cache(self.mesh.device)  # level 2 also does so between the backward pass and the update
        if self._is_due(self.config.log.log_interval) or progress.iteration == 1:
            self._log_steps(watch)
        if self._is_due(train.eval_interval) and self.data.valid is not None:
            self._evaluate(watch)
        if self._is_due(train.eval_interval):
            self._run_online_evaluations()
        after = self.trainer.batches.batch_size_after(progress.consumed_train_samples).num_microbatches
        if self._is_due(self.config.checkpoint.save_interval) or (after != before and self.config.checkpoint.save):
            self._save_if_unsaved(watch)
        self._record_save(self.checkpoint.poll_save())

    def _flag_causing_skip(self, iteration: int) -> str | None:
        """Return the flag that says to skip an iteration's data, or None to train on it."""
        if iteration in self.config.train.iterations_to_skip:
            return "--iterations-to-skip"
        if iteration in self.validator.passed_over:
            return "--on-bad-step rollback"
        if self.rerun is not None and iteration in self.rerun.skipped:
            return "--result-rejected-tracker-filename"
        return None

    def _is_due(self, interval: int | None) -> bool:
        """Whether the current iteration is a multiple of the interval; False without one."""
        return interval is not None and interval > 0 and self.trainer.progress.iteration % interval == 0

    def _handle_bad_step(self, watch: ExitConditions, samples: int) -> None:
        """Do as --on-bad-step says; raises unless the run goes on. samples: of the step that made no update."""
        progress = self.trainer.progress
        progress.skipped_train_samples += samples
        self._resolve_and_write_metrics(watch)
        self.trainer.run.run_log.add(
            "bad step", iteration=progress.iteration, samples=samples, reason=self.validator.problem
        )
        self.trainer.run.print_rank_0(f"WARNING: {self.validator.decide_after_bad_step(progress.iteration)}")

    def _skip_iteration(self, reason: str) -> None:
        """Read and drop the data of one iteration. reason: the flag that asks for it."""
        size = self.trainer.batches.batch_size_after(self.trainer.progress.consumed_train_samples)
        assert self.data.train is not None, "build_split_batches refuses a run that trains without data"
        for _ in range(size.num_microbatches):
            require_next_batch(self.data.train)
        progress = self.trainer.progress
        progress.iteration += 1
        progress.consumed_train_samples += size.global_batch_size
        progress.skipped_train_samples += size.global_batch_size
        self.trainer.run.run_log.add(
            "skip", iteration=progress.iteration, samples=size.global_batch_size, reason=reason
        )

    def _resolve_and_write_metrics(self, watch: ExitConditions) -> None:
        """Bring the steps' numbers to the host, and write and check them. Collective."""
        steps = self.meter.resolve()
        self.writers.write_steps(steps)
        add_steps_to_run_log(self.trainer.run.run_log, steps)
        watch.require_finite(steps)

    def _log_steps(self, watch: ExitConditions) -> None:
        """Write one log line for the steps since the last."""
        self._resolve_and_write_metrics(watch)
        if not self.steps_since:
            return
        progress, log = self.trainer.progress, self.config.log
        seconds = time.perf_counter() - self.since
        times = self.trainer.run.timers.collect_times_of_all_ranks(steps=self.steps_since)
        report = self.meter.report(
            train_iters=self.total,
            seconds=seconds,
            skipped_samples=progress.skipped_train_samples,
            work=self.work if log.log_throughput else None,
            seq_length=self.config.train.seq_length,
            samples_left=self.trainer.batches.samples_of_next_steps(
                self.total - progress.iteration, progress.consumed_train_samples
            ),
        )
        self.writers.write_interval_report(report)
        self.writers.write_times(
            progress.iteration, timer_report_text(times, log.timing_log_option), max_times_by_tag(times)
        )
        if not self.reported_memory or self._is_due(log.log_memory_interval):
            self.reported_memory = True
            memory = device_memory_stats(self.mesh.device)
            self.writers.write_memory(progress.iteration, memory)
            if self.mesh.dp.is_first:  # data-parallel ranks hold the same
                self.log.info(memory_line(self.mesh.world.rank, progress.iteration, memory))
        if self.rerun is not None and (determinism := self.rerun.determinism_report()):
            self.trainer.run.print_rank_0(determinism)
        if self.stragglers is not None:
            self.trainer.run.print_rank_0(
                self.stragglers.report(self.steps_since, count=self.config.faults.straggler_minmax_count)
            )
        self.since, self.steps_since = time.perf_counter(), 0

    def _evaluate(self, watch: ExitConditions) -> None:
        """Compute and write the validation losses; save if they are the best and --save-best is given."""
        progress = self.trainer.progress
        paused = time.perf_counter()
        self._resolve_and_write_metrics(watch)
        watch.collect_evaluation_garbage()
        assert self.data.valid is not None, "only runs with validation data evaluate"
        losses = self._evaluation_losses(self.data.valid)
        if not self.config.data.full_validation:
            progress.consumed_valid_samples += self.data.valid.iterations * self.trainer.batches.evaluation_batch_size
        self.writers.write_validation(
            losses, iteration=progress.iteration, consumed_samples=progress.consumed_train_samples
        )
        self.trainer.run.run_log.add("validation", iteration=progress.iteration, losses=losses)
        watch.collect_evaluation_garbage()
        self.since += time.perf_counter() - paused
        if self.config.checkpoint.save_best is not None:
            self._save_if_best(losses, watch)

    def _save_if_best(self, losses: Mapping[str, float], watch: ExitConditions) -> None:
        """Begin to save if an evaluation is better than all before (--save-best)."""
        progress = self.trainer.progress
        if note_if_best(progress, losses, self.config.checkpoint, self.mesh.world):
            self.trainer.run.print_rank_0(
                f"iteration {progress.iteration} is the best so far: {progress.best_figure[4:]} {progress.best_value:.6E}"
            )
            self._save_if_unsaved(watch)

    def _run_online_evaluations(self) -> None:
        """Write the completions of --eval-generate's prompts and the scores of --online-evaluation-config."""
        trainer, iteration = self.trainer, self.trainer.progress.iteration
        if trainer.samples is not None or trainer.benchmark is not None:
            paused = time.perf_counter()
            with (
                evaluation_mode(self.trainer),
                torch.compiler.set_stance("force_eager") if isinstance(self.layers, LayerCompiler) else nullcontext(),
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

    def _save_if_unsaved(self, watch: ExitConditions) -> None:
        """Begin to save, if --save is given and this iteration is not saved yet."""
        iteration = self.trainer.progress.iteration
        if self.config.checkpoint.save and iteration not in (self.checkpoint.last_saved, self.checkpoint.on_its_way):
            paused = time.perf_counter()
            self._resolve_and_write_metrics(watch)
            self.mesh.flight_recorder.begin_activity("save", iteration)
            ended = self.checkpoint.begin_save()
            self.notes[iteration] = self._progress_file_line("Saved checkpoint")
            for outcome in ended:
                self._record_save(outcome)
            self.since += time.perf_counter() - paused

    def _record_save(self, outcome: SaveOutcome | None) -> None:
        """Write the outcome of a save to writers and run log, and count failures; nothing for None."""
        if outcome is None:
            return
        self.failed_saves += bool(outcome.problems)
        self.writers.write_save_result(outcome, failures=self.failed_saves)
        self.trainer.run.run_log.add(
            "checkpoint",
            iteration=outcome.iteration,
            seconds=outcome.seconds,
            bytes=outcome.size,
            problems=list(outcome.problems) or None,
        )
        text = self.notes.pop(outcome.iteration)
        if not outcome.problems:
            self._append_progress_file(text)

    def _progress_file_line(self, event: str) -> str:
        """Return a line for SAVE/progress.txt with the current counters."""
        progress, devices = self.trainer.progress, self.mesh.world.size
        seconds = max(1e-9, time.monotonic() - self.trainer.run.started)
        done = progress.floating_point_operations - self.flops_at_start
        return progress_file_line(
            event,
            now=datetime.now(),
            job_id=read_launch_info().job,
            num_devices=devices,
            iteration=progress.iteration,
            job_tflops=done / seconds / devices / 1e12,
            total_flops=progress.floating_point_operations,
            total_tokens=progress.consumed_tokens,
        )

    def _append_progress_file(self, text: str) -> None:
        """Append to SAVE/progress.txt (`--log-progress`)."""
        if self.progress_file is not None:
            self.progress_file.add(text)

    def _save_and_evaluate_at_end(self, reason: str, watch: ExitConditions) -> None:
        """Save, and evaluate after a whole run (reason ""); `CheckpointError` if the last save failed."""
        progress, train = self.trainer.progress, self.config.train
        losses: dict[str, float] | None = None
        if self.config.checkpoint.save_best and not (reason or train.skip_train or self._is_due(train.eval_interval)):
            losses = self._evaluation_losses(self.data.valid)  # before the last save, which may be the best
            self._save_if_best(losses, watch)
        if not train.skip_train:
            # If it is of this very iteration and failed, here is another chance.
            self._record_save(self.checkpoint.wait_for_save_outcome())
            self._save_if_unsaved(watch)
            self._record_save(self.checkpoint.wait_for_save_outcome())
        if reason:
            self.trainer.run.print_rank_0(reason)
        else:
            self._evaluate_at_end(losses)
        if self.config.checkpoint.save and not train.skip_train and self.checkpoint.last_saved != progress.iteration:
            raise CheckpointError(
                f"the last checkpoint of this run, of iteration {progress.iteration}, could not be saved; see above"
            )

    def _evaluation_losses(self, evaluations: EvaluationData | None) -> dict[str, float]:
        """Return the mean of each loss, by name, over the evaluation samples of a split that has data."""
        assert evaluations is not None, "only splits with data are evaluated"
        with evaluations.open_next_evaluation() as (batches, iterations):
            return evaluate_loss(self.trainer, batches, iterations)

    def _evaluate_at_end(self, validated: dict[str, float] | None) -> None:
        """Evaluate and write each split that has data. validated: the validation losses, if they are known."""
        progress, train = self.trainer.progress, self.config.train
        if train.skip_train or not self._is_due(train.eval_interval):  # else it has just been done
            self._run_online_evaluations()
        for name, evaluations in (("validation", self.data.valid), ("test", self.data.test)):
            if evaluations is not None:
                known = validated if name == "validation" else None
                losses = self._evaluation_losses(evaluations) if known is None else known
                self.writers.write_validation(
                    losses, iteration=progress.iteration, consumed_samples=progress.consumed_train_samples, final=name
                )
                self.trainer.run.run_log.add("validation", iteration=progress.iteration, losses=losses, final=name)

    def _exit_conditions(self) -> ExitConditions:
        config = self.config
        profile = TorchProfile.build(
            config.log,
            rank=self.mesh.world.rank,
            activities=profiler_activities(self.mesh.device),
            folder=config.log.tensorboard_dir or config.checkpoint.save or ".",
        )
        run, vote = self.trainer.run, LaggedIntegerReduction(self.mesh.world, self.mesh.device, "max", first=0)
        return ExitConditions(
            config.train,
            agree=lambda yes: bool(vote.reduce_and_wait(yes)),
            poll=lambda yes: bool(vote.start_and_return_previous(yes)),
            started=run.started,
            ending=run.ending,
            tolerates_overflow=config.precision.fp16 and config.precision.loss_scale is None,
            profile=profile,
            interrupts=InterruptHandler(run.ending, first=self._print_interrupted, last=self._log_forced_exit),
        )

    def _print_interrupted(self) -> None:
        saves = "and saves" if self.config.checkpoint.save else "without a save, for which there is no --save"
        self.trainer.run.print_rank_0(
            f"SIGINT: the run ends after this step {saves}; once more (Ctrl-C) ends it at once"
        )

    def _log_forced_exit(self) -> None:
        """Log that a second SIGINT ends the run; the caller then ends the process."""
        last = self.checkpoint.last_saved
        self.trainer.run.run_log.add(
            "end", reason="SIGINT, twice", iteration=self.trainer.progress.iteration, failed=True
        )
        self.trainer.run.print_rank_0(
            f"SIGINT again: the run ends at once, in iteration {self.trainer.progress.iteration + 1}; "
            + (f"its last checkpoint is that of iteration {last}" if last is not None else "it has no checkpoint")
        )

    def _log_sizes(self) -> None:
        """Print once the parameters of each rank of the first replica, and the theoretical memory footprint."""
        count = sum(param.numel() for stage in self.trainer.stages for param in stage.parameters())
        rows = collectives.gather_objects(
            (self.mesh.dp.rank, self.mesh.tp.rank, self.mesh.pp.rank, count), self.mesh.world
        )
        for data, tensor, pipeline, number in rows:
            if data == 0:
                self.trainer.run.print_rank_0(f"parameters on (tensor, pipeline) rank ({tensor}, {pipeline}): {number}")
        count = self.trainer.batches.batch_size_after(self.trainer.progress.consumed_train_samples).num_microbatches
        stages, copies = stage_specs_of_run(self.config), self.mesh.dp.size
        held = estimate_memory_by_pipeline_rank(self.config, stages, data_parallel_size=copies, num_microbatches=count)
        largest = max(held, key=lambda estimate: estimate.total)
        self.trainer.run.print_rank_0(theoretical_memory_line(largest.weights_and_optimizer, largest.activations))
        self._append_progress_file(self._progress_file_line("Starting job"))


def require_save_best_metric(word: str, names: Sequence[str]) -> str:
    """Return the metric among `names` that --save-best `word` means (`match_metric_name`); `ConfigError` if there is none."""
    figure = match_metric_name(word, names)
    if figure is None:
        raise ConfigError(
            f"--save-best {word}: evaluations of this run give no such figure; choose of: {', '.join(names)}"
        )
    return figure


def note_if_best(
    progress: TrainingProgress, losses: Mapping[str, float], options: CheckpointConfig, world: Axis
) -> bool:
    """Record an evaluation in `progress` if its --save-best metric is the best; return whether it was. Collective. NaN
    and inf are never better; if metric or direction are not those recorded, this evaluation is the first.
    """
    assert options.save_best is not None, "only runs with --save-best look for the best evaluation"
    figure = require_save_best_metric(options.save_best, list(losses))
    mode = options.save_best_mode or ("min" if figure.endswith("loss") else "max")
    value, described = collectives.broadcast_object(losses[figure], world), f"{mode} {figure}"
    if not math.isfinite(value):
        return False
    if progress.best_value is not None and progress.best_figure == described:
        if not (value < progress.best_value if mode == "min" else value > progress.best_value):
            return False
    progress.best_iteration, progress.best_value, progress.best_figure = progress.iteration, value, described
    return True


def _flops_per_sample(trainer: Trainer) -> FlopsPerSample:
    config: RunConfig = trainer.run.config
    length = config.train.seq_length
    peak = config.log.peak_tflops or known_peak_tflops(
        device_name(trainer.run.mesh.device), config.precision.param_dtype_name
    )
    causal, square = (
        flops_per_sample(config.model, length, count, decoder_length=config.train.decoder_seq_length)
        for count in ("causal", "square")
    )
    return FlopsPerSample(
        seq_length=length, causal_flops=causal, square_flops=square, num_devices=trainer.run.mesh.world.size, peak=peak
    )
