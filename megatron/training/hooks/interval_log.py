"""The log line of an interval: losses, rates and speed of the steps since the last, with timers, memory, and what other
hooks have to say of the interval (`StepHooks.interval_line`). At the start: how large the network is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.models.flops import estimate_memory_by_pipeline_rank, flops_per_sample
from megatron.core.parallel import collectives
from megatron.core.parallel.device import device_memory_stats, device_name
from megatron.training.report.metrics import FlopsPerSample, known_peak_tflops, memory_line, theoretical_memory_line
from megatron.training.report.timers import max_times_by_tag, timer_report_text
from megatron.training.state.hooks import StepHooks
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import Trainer

if TYPE_CHECKING:
    from megatron.training.session import TrainingSession


class IntervalLog(StepHooks):
    """Writes a log line for the steps since the last, at --log-interval and after the first step of a run."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.log = trainer, trainer.run.config.log
        self.work = _flops_per_sample(trainer.run)
        self.reported_memory = False

    def begin_run(self, session: TrainingSession) -> None:
        """Print once the parameters of each rank of the first replica, and the theoretical memory footprint."""
        self.reported_memory = False
        run, mesh = self.trainer.run, self.trainer.run.mesh
        count = sum(param.numel() for stage in self.trainer.stages for param in stage.parameters())
        rows = collectives.gather_objects((mesh.dp.rank, mesh.tp.rank, mesh.pp.rank, count), mesh.world)
        for data, tensor, pipeline, number in rows:
            if data == 0:
                run.print_rank_0(f"parameters on (tensor, pipeline) rank ({tensor}, {pipeline}): {number}")
        held = estimate_memory_by_pipeline_rank(
            run.config,
            stage_specs_of_run(run.config),
            data_parallel_size=mesh.dp.size,
            num_microbatches=self.trainer.next_batch_size().num_microbatches,
        )
        largest = max(held, key=lambda estimate: estimate.total)
        run.print_rank_0(theoretical_memory_line(largest.weights_and_optimizer, largest.activations))

    def end_step(self, *, updated: bool) -> None:
        """Count the floating-point operations of the step, which is not counted itself yet."""
        size = self.trainer.next_batch_size().global_batch_size
        self.trainer.progress.floating_point_operations += int(self.work.causal_flops * size)

    def after_iteration(self, session: TrainingSession) -> None:
        """Write the line, if it is due and there were steps."""
        iteration = self.trainer.progress.iteration
        if not session.is_due(self.log.log_interval) and iteration != 1:
            return
        session.report_steps()
        steps = session.meter.num_steps
        if not steps:
            return
        times = self.trainer.run.timers.collect_times_of_all_ranks(steps=steps)
        self._write_report(session)
        session.writers.write_times(
            iteration, timer_report_text(times, self.log.timing_log_option), max_times_by_tag(times)
        )
        if not self.reported_memory or session.is_due(self.log.log_memory_interval):
            self.reported_memory = True
            self._write_memory(session)
        for hook in self.trainer.hooks:
            if line := hook.interval_line(steps):
                self.trainer.run.print_rank_0(line)
        session.clock.restart()

    def _write_report(self, session: TrainingSession) -> None:
        progress = self.trainer.progress
        report = session.meter.report(
            train_iters=session.total,
            seconds=session.clock.seconds(),
            skipped_samples=progress.skipped_train_samples,
            work=self.work if self.log.log_throughput else None,
            seq_length=self.trainer.run.config.train.seq_length,
            samples_left=self.trainer.batches.samples_of_next_steps(
                session.total - progress.iteration, progress.consumed_train_samples
            ),
        )
        session.writers.write_interval_report(report)

    def _write_memory(self, session: TrainingSession) -> None:
        run, iteration = self.trainer.run, self.trainer.progress.iteration
        memory = device_memory_stats(run.mesh.device)
        session.writers.write_memory(iteration, memory)
        if run.mesh.dp.is_first:  # data-parallel ranks hold the same
            run.log.info(memory_line(run.mesh.world.rank, iteration, memory))


def _flops_per_sample(run: RunContext) -> FlopsPerSample:
    config = run.config
    peak = config.log.peak_tflops or known_peak_tflops(device_name(run.mesh.device), config.precision.param_dtype_name)
    causal, square = (
        flops_per_sample(config.model, config.train.seq_length, count, decoder_length=config.train.decoder_seq_length)
        for count in ("causal", "square")
    )
    return FlopsPerSample(
        seq_length=config.train.seq_length,
        causal_flops=causal,
        square_flops=square,
        num_devices=run.mesh.world.size,
        peak=peak,
    )
