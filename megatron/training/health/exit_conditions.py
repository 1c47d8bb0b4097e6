"""When a run stops early, when it must fail, and what else happens at fixed iterations.

    with ExitConditions(...) as watch:
        while iteration < train_iters and not reason:
            watch.before_step(iteration)
            ... one step ...
            iteration += 1
            watch.after_step(iteration)
            reason = watch.reason_to_stop(iteration)

The question comes after the step: a run that resumes at a multiple of --exit-interval must get on. `iteration` is
everywhere the number of steps done so far. A clock and a signal are a matter of one rank, but all ranks must stop after
the same step: such questions go through `agree`, which says whether any rank said yes. No step waits for the answer:
`poll` says what the ranks answered a step ago, and `agree` is called only when that was yes.

Python runs the handlers of signals only between two steps of its main thread, which may sit in a collective that never completes.
For Ctrl-C the system writes the number of each signal into a socket (signal.set_wakeup_fd), and a thread reads it there.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from megatron.core.config.settings.run import LogConfig, TrainConfig
from megatron.core.parallel.device import profiler_activities
from megatron.core.parallel.late_reduction import LaggedIntegerReduction
from megatron.training.report.metrics import ResolvedStepMetrics
from megatron.training.state.hooks import RunStop
from megatron.training.state.run import RunContext, TerminationSignalState

# Seconds in which a second SIGINT is the first again: a terminal sends it to all processes, and a launcher passes it on.
_ONCE = 1.0
EXIT_CODE = 128 + signal.SIGINT


class NonFiniteError(RunStop):
    """A loss or a gradient norm is NaN or infinite."""


class ExitConditions:
    """Decides when a run stops or fails, and runs profiler and garbage collection at fixed iterations.
    A context manager: signal handlers, garbage collector and profiler are restored at the end.
    agree: whether any rank said True, a collective. poll: the same, but the answer may be that of the call before, so
    that nothing waits; called once a step if a signal or the clock can end the run. started: `time.monotonic()` at the
    start of the job, for --exit-duration-in-mins. ending: where a signal is noted. tolerates_overflow: the loss scaler
    skips steps that are not finite, so they are no error. interrupts: handles Ctrl-C; without it, KeyboardInterrupt.
    """

    def __init__(
        self,
        train: TrainConfig,
        *,
        agree: Callable[[bool], bool] = bool,
        poll: Callable[[bool], bool] = bool,
        started: float | None = None,
        ending: TerminationSignalState | None = None,
        tolerates_overflow: bool = False,
        profile: TorchProfile | None = None,
        interrupts: InterruptHandler | None = None,
    ) -> None:
        self._train = train
        self._interrupts = interrupts
        self._agree, self._poll = agree, poll
        self._polls = train.exit_signal_handler or train.exit_duration_in_mins is not None
        self._started = time.monotonic() if started is None else started
        self._checks_numbers = train.check_for_nan_in_loss_and_grad and not tolerates_overflow
        self._profile = profile
        self._ending = TerminationSignalState() if ending is None else ending
        self._handlers_before: dict[int, Any] = {}
        self._collected_before = True
        self._open = ExitStack()

    def __enter__(self) -> ExitConditions:
        # Python delivers signals to the main thread only; who runs a loop in another thread has to catch them himself.
        if self._train.exit_signal_handler and threading.current_thread() is threading.main_thread():
            number = getattr(signal, self._train.exit_signal)
            self._handlers_before[number] = signal.signal(number, self._note_signal)
            if self._interrupts is not None:  # after it, since --exit-signal may be SIGINT too
                self._open.enter_context(self._interrupts)
        if self._train.manual_gc:
            self._collected_before = gc.isenabled()
            gc.disable()
            gc.collect()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        self._handlers_before.clear()
        if self._train.manual_gc and self._collected_before:
            gc.enable()
        if self._profile:
            self._profile.finish()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: record the signal's name."""
        self._ending.signal = signal.Signals(number).name

    def reason_to_stop(self, iteration: int) -> str:
        """Return why the run ends after this many steps, in words, or "" to go on; the same on every rank."""
        signalled = bool(self._ending.signal)
        if self._polls and self._poll(signalled or self._exceeds_duration()):
            if self._agree(signalled):
                interrupted = self._agree(self._ending.signal == "SIGINT")
                return f"exiting program after receiving {'SIGINT' if interrupted else self._train.exit_signal}"
            minutes = (time.monotonic() - self._started) / 60.0
            return f"exiting program after {minutes:.1f} minutes (--exit-duration-in-mins {self._train.exit_duration_in_mins})"
        interval = self._train.exit_interval
        if interval and iteration and iteration % interval == 0:
            return f"exiting program at iteration {iteration} (--exit-interval {interval})"
        return ""

    def _exceeds_duration(self) -> bool:
        limit = self._train.exit_duration_in_mins
        return limit is not None and (time.monotonic() - self._started) / 60.0 > limit

    def require_finite(self, steps: Sequence[ResolvedStepMetrics]) -> None:
        """Raise `NonFiniteError` on all ranks if a step's loss or gradient norm is not finite. Collective. To be called
        with all that `StepMetricsMeter.resolve` gives, so that no checkpoint is written after such a step.
        """
        if not self._checks_numbers:
            return
        problem = next(filter(None, map(_nonfinite_text, steps)), "")
        if self._agree(bool(problem)):
            raise NonFiniteError(
                f"{problem or 'another rank found a loss or gradient that is not finite'}; look at the data of that step and "
                "at --lr, or go on regardless with --no-check-for-nan-in-loss-and-grad"
            )

    def start_profiler_if_due(self, iteration: int) -> None:
        """Start the profiler if it begins at this iteration."""
        if self._profile:
            self._profile.before_step(iteration)

    def profile_and_collect_garbage(self, iteration: int) -> None:
        """Stop the profiler if it ends here, and collect garbage if it is time."""
        if self._profile:
            self._profile.after_step(iteration)
        interval = self._train.manual_gc_interval
        if self._train.manual_gc and interval and iteration % interval == 0:
            gc.collect()

    def collect_evaluation_garbage(self) -> None:
        """Collect garbage, under --manual-gc; called before and after an evaluation, on all ranks at once."""
        if self._train.manual_gc:
            gc.collect()


class InterruptHandler:
    """Context manager in the main thread for SIGINT: the first is noted in `ending`, the second ends the process.
    first: called at the first. last: called before the process ends because of the second.
    """

    def __init__(self, ending: TerminationSignalState, *, first: Callable[[], None], last: Callable[[], None]) -> None:
        self._ending, self._first, self._last = ending, first, last
        self._noticed = 0.0
        self._ours, self._systems = socket.socketpair()
        self._systems.setblocking(False)
        self._thread = threading.Thread(target=self._signal_reader_thread, name="interrupts", daemon=True)

    def __enter__(self) -> InterruptHandler:
        self._wakeup_before = signal.set_wakeup_fd(self._systems.fileno(), warn_on_full_buffer=False)
        self._handler_before = signal.signal(signal.SIGINT, lambda number, frame: None)  # no KeyboardInterrupt
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._handler_before)
        signal.set_wakeup_fd(self._wakeup_before)
        self._systems.close()  # which ends the thread
        self._thread.join()
        self._ours.close()

    def _signal_reader_thread(self) -> None:
        """Thread: read signal numbers from the wake-up socket until it closes."""
        while numbers := self._ours.recv(64):
            if signal.SIGINT in numbers:
                self._on_interrupt()

    def _on_interrupt(self) -> None:
        """Handle a SIGINT: the first is noted, a later one ends the process; repetitions within a second are one."""
        if not self._noticed:
            self._noticed, self._ending.signal = time.monotonic(), "SIGINT"
            self._first()
        elif time.monotonic() - self._noticed > _ONCE:
            self._last()
            os._exit(EXIT_CODE)


class TorchProfile:
    """A torch profiler for iterations start .. end (steps done before), written as a trace file for Chrome or Perfetto."""

    def __init__(self, *, start: int, end: int, activities: Sequence[ProfilerActivity], path: Path) -> None:
        self._start, self._end, self._path = start, end, path
        self._profiler = torch.profiler.profile(activities=list(activities), record_shapes=True)
        self._runs = False

    @classmethod
    def build(
        cls, log: LogConfig, *, rank: int, activities: Sequence[ProfilerActivity], folder: str | Path
    ) -> TorchProfile | None:
        """Return the profiler of this rank, or None if --profile does not ask for one."""
        if not log.profile or rank not in log.profile_ranks:
            return None
        path = Path(folder) / f"profile_rank{rank}_iterations{log.profile_step_start}-{log.profile_step_end}.json"
        return cls(start=log.profile_step_start, end=log.profile_step_end, activities=activities, path=path)

    def before_step(self, iteration: int) -> None:
        """Start profiling if `start` steps are done."""
        if iteration == self._start:
            self._profiler.start()
            self._runs = True

    def after_step(self, iteration: int) -> None:
        """Stop and write the trace if `end` steps are done."""
        if iteration == self._end:
            self.finish()

    def finish(self) -> None:
        """Stop and write the trace, if profiling has begun. A file that cannot be written is a warning."""
        if self._runs:
            self._runs = False
            self._profiler.stop()
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._profiler.export_chrome_trace(str(self._path))
            except (OSError, RuntimeError) as error:  # a full disk ends no run
                logging.getLogger("megatron").warning(f"WARNING: the profile {self._path} cannot be written: {error}")


def exit_conditions_of_run(run: RunContext, *, last_saved: Callable[[], int | None]) -> ExitConditions:
    """Return the exit conditions of a run, whose questions all ranks answer together. last_saved: the iteration to tell of
    when Ctrl-C ends the run at once.
    """
    config, mesh = run.config, run.mesh
    vote = LaggedIntegerReduction(mesh.world, mesh.device, "max", first=0)

    def print_interrupted() -> None:
        saves = "and saves" if config.checkpoint.save else "without a save, for which there is no --save"
        run.print_rank_0(f"SIGINT: the run ends after this step {saves}; once more (Ctrl-C) ends it at once")

    def log_forced_exit() -> None:
        last, iteration = last_saved(), run.progress.iteration
        run.run_log.add("end", reason="SIGINT, twice", iteration=iteration, failed=True)
        run.print_rank_0(
            f"SIGINT again: the run ends at once, in iteration {iteration + 1}; "
            + (f"its last checkpoint is that of iteration {last}" if last is not None else "it has no checkpoint")
        )

    return ExitConditions(
        config.train,
        agree=lambda yes: bool(vote.reduce_and_wait(yes)),
        poll=lambda yes: bool(vote.start_and_return_previous(yes)),
        started=run.started,
        ending=run.ending,
        tolerates_overflow=config.precision.fp16 and config.precision.loss_scale is None,
        profile=TorchProfile.build(
            config.log,
            rank=mesh.world.rank,
            activities=profiler_activities(mesh.device),
            folder=config.log.tensorboard_dir or config.checkpoint.save or ".",
        ),
        interrupts=InterruptHandler(run.ending, first=print_interrupted, last=log_forced_exit),
    )


def _nonfinite_text(step: ResolvedStepMetrics) -> str:
    """Return what of a resolved step is not finite, in words; "" if nothing or if the step was skipped."""
    if step.skipped:
        return ""
    values = {**step.losses, **({} if step.grad_norm is None else {"gradient norm": step.grad_norm})}
    texts = (f"{name} is {value}" for name, value in values.items() if not math.isfinite(value))
    return next((f"{text} in iteration {step.iteration}" for text in texts), "")
