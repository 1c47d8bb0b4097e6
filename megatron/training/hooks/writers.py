"""Where a run's numbers go: console lines, a JSONL file, TensorBoard, Weights & Biases, a progress bar.

`Writers` is given resolved steps, reports, validation results, memory and timers, and knows the words each place uses.
Only one rank speaks (Megatron's last rank, since the loss is there); on the others every call does nothing. A place that cannot be
written is told of once and never ends the run: a file is tried again with the next line, TensorBoard every minute, in a new file of
its own; W&B, which may wait for a network, is given up.

    JSONL        every step and every report, one object a line, whatever the other switches say: the full record
    TensorBoard  Megatron's scalar names, many of them once more as `X vs samples`, by the --log-...-to-tensorboard flags
    W&B          the same names, against the metric `iteration`, so that a late point is never dropped
    console      one line a report and a sample; a progress bar only if standard error is a terminal
"""

from __future__ import annotations

import dataclasses
import html
import importlib.util
import json
import math
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.config.flags.declare import config_to_flat_dict, raise_config_error_if
from megatron.core.config.settings.run import LogConfig
from megatron.core.dist_checkpointing.saver import SaveOutcome
from megatron.training.report.metrics import (
    IntervalReport,
    ResolvedStepMetrics,
    has_perplexity,
    interval_log_line,
    perplexity,
    time_left_line,
    unskipped_losses,
    validation_text,
)
from megatron.training.report.run_log import LogFile, to_json_value
from megatron.training.state.run import RunContext

TENSORBOARD = "--tensorboard-dir"
RETRY_SECONDS = 60.0
MEMORY_NAMES = {
    "reserved": "mem-reserved-bytes",
    "allocated": "mem-allocated-bytes",
    "max allocated": "mem-max-allocated-bytes",
    "allocated count": "mem-allocated-count",
}


def missing_packages(log: LogConfig) -> list[str]:
    """Return a line for each requested writer whose package is not installed, with the command that installs it."""
    flags = {"tensorboard": ("--tensorboard-dir", log.tensorboard_dir), "wandb": ("--wandb-project", log.wandb_project)}
    return [
        f"{flag} {value} needs the package {package}, which is not installed: pip install {package}"
        for package, (flag, value) in flags.items()
        if value and importlib.util.find_spec(package) is None
    ]


class Writers:
    """All metric destinations of one run. Made on every rank, so that a missing package stops all of them alike."""

    def __init__(
        self,
        log: LogConfig,
        *,
        speaks: bool,
        world_size: int = 1,
        start_iteration: int = 0,
        train_iters: int = 0,
        settings: Mapping[str, Any] | None = None,
        console: Callable[[str], None] | None = None,
    ) -> None:
        """speaks: whether this rank writes. settings: the run's config, for W&B. console: shows a line (default: stdout)."""
        raise_config_error_if(missing_packages(log))
        self._log, self._speaks, self._world_size = log, speaks, world_size
        self._boards: dict[str, MetricsBackend] = {}
        self._journal = LogFile(Path(log.log_jsonl), "--log-jsonl") if speaks and log.log_jsonl else None
        self._bar = _tqdm_bar_if_terminal(start_iteration, train_iters) if speaks and console is None else None
        self._console = console or (self._bar.write if self._bar else _print_line)
        self._openers = _writer_openers(log, settings or {}) if speaks else {}
        self._failed: dict[str, float] = {}  # name of a board -> when to try it again
        for name in self._openers:
            self._warn_on_failure(name, partial(self._open_writer, name))
        self._write_jsonl_event("start", iteration=start_iteration, world_size=world_size)

    @classmethod
    def of_run(cls, run: RunContext, *, train_iters: int) -> Writers:
        """Return the writers of a run, which write on the rank that has the loss."""
        return cls(
            run.config.log,
            speaks=run.mesh.world.is_last,
            world_size=run.mesh.world.size,
            settings=config_to_flat_dict(run.config),
            start_iteration=run.progress.iteration,
            train_iters=train_iters,
        )

    def print_text(self, text: str | None) -> None:
        """Print a line or a block of lines on the writing rank; nothing for None."""
        if self._speaks and text is not None:
            self._console(text)

    def write_steps(self, steps: Sequence[ResolvedStepMetrics]) -> None:
        """Write resolved steps: all to the JSONL file, every --tensorboard-log-interval th to TensorBoard and W&B."""
        for step in steps:
            if self._bar:
                self._bar.update(step.iteration - self._bar.n)
            fields = dataclasses.asdict(step)
            del fields["data_figures"]
            self._write_jsonl_event("step", **fields)
            if self._openers and step.iteration % self._log.tensorboard_log_interval == 0:
                values = self._step_scalars(step)
                self._write_values(values, iteration=step.iteration, samples=step.consumed_samples)

    def write_interval_report(self, report: IntervalReport) -> None:
        """Print an interval's log line and when the run ends, and write its speed."""
        if not self._speaks:
            return
        now = datetime.now()
        self._console(interval_log_line(report, now))
        self.print_text(time_left_line(report, now))
        fields = dataclasses.asdict(report)
        last = fields.pop("last")
        self._write_jsonl_event(
            "report", iteration=last["iteration"], consumed_samples=last["consumed_samples"], **fields
        )
        values: dict[str, float] = {}
        if self._log.log_timers_to_tensorboard:
            values["iteration-time"] = report.seconds_per_iteration
            if report.throughput:
                values["throughput"] = report.throughput.causal_tflops
        if report.skipped_samples > 0:
            values["skipped-train-samples"] = report.skipped_samples
        self._write_values(values, iteration=last["iteration"])

    def write_validation(
        self, losses: Mapping[str, float], *, iteration: int, consumed_samples: int, final: str | None = None
    ) -> None:
        """Print and write validation losses.
        final: `validation` or `test` for evaluations after training; these are not written to TensorBoard and W&B,
        where they would look like points of the curve.
        """
        if not self._speaks:
            return
        where = f"iteration {iteration}" + ("" if final is None else f" on {final} set")
        self._console(validation_text(losses, where))
        self._write_jsonl_event(
            "validation", iteration=iteration, consumed_samples=consumed_samples, final=final, losses=losses
        )
        if final is not None:
            return
        values = {f"{name} validation": loss for name, loss in losses.items()}
        if self._log.log_validation_ppl_to_tensorboard:
            values |= {
                f"{name} validation ppl": perplexity(loss) for name, loss in losses.items() if has_perplexity(name)
            }
        self._write_values(values, iteration=iteration, samples=consumed_samples)

    def write_scores(self, task: str, scores: Mapping[str, float], *, iteration: int) -> None:
        """Write the scores of a task after an iteration, by name."""
        self._write_jsonl_event("task", iteration=iteration, task=task, scores=dict(scores))
        self._write_values({f"{task} {name}": score for name, score in scores.items()}, iteration=iteration)

    def write_samples(self, samples: Sequence[tuple[str, str]], *, iteration: int) -> None:
        """Print and write (prompt, continuation) pairs."""
        for number, (prompt, text) in enumerate(samples, start=1):
            self.print_text(f" sample {number} at iteration {iteration} | {prompt!r} -> {text!r}")
        self._write_jsonl_event(
            "samples", iteration=iteration, samples=[{"prompt": prompt, "text": text} for prompt, text in samples]
        )
        texts = {f"sample {number}": prompt + text for number, (prompt, text) in enumerate(samples, start=1)}
        self._for_each_writer(lambda board: board.write_texts(texts, iteration=iteration))

    def write_memory(self, iteration: int, memory: Mapping[str, float]) -> None:
        """Write memory statistics in bytes, as `device.device_memory_stats` gives them."""
        self._write_jsonl_event(
            "memory", iteration=iteration, **{name.replace(" ", "_"): value for name, value in memory.items()}
        )
        if self._log.log_memory_to_tensorboard:
            self._write_values(
                {MEMORY_NAMES[name]: memory[name] for name in MEMORY_NAMES if name in memory}, iteration=iteration
            )

    def write_save_result(self, outcome: SaveOutcome, *, failures: int) -> None:
        """Write the times of a save. failures: failed saves of this job so far."""
        iteration, seconds, blocked = outcome.iteration, outcome.seconds, outcome.blocked
        self._write_jsonl_event(
            "checkpoint", iteration=iteration, seconds=seconds, blocked=blocked, bytes=outcome.size, failures=failures
        )
        self._write_values(
            {"checkpoint-seconds": seconds, "checkpoint-blocked-seconds": blocked, "checkpoint-failures": failures},
            iteration=iteration,
        )

    def write_times(self, iteration: int, text: str | None, scalars: Mapping[str, float]) -> None:
        """Print a block of timers and write their seconds."""
        self.print_text(text)
        if scalars:
            self._write_jsonl_event("times", iteration=iteration, seconds=dict(scalars))
        if self._log.log_timers_to_tensorboard:
            self._write_values(scalars, iteration=iteration)

    def close(self) -> None:
        """Flush and close all destinations."""
        self._for_each_writer(lambda board: board.close())
        if self._bar:
            self._bar.close()

    def _step_scalars(self, step: ResolvedStepMetrics) -> dict[str, float]:
        """Return a step's numbers by Megatron's scalar names, without those that are None."""
        values: dict[str, float | None] = {"learning-rate": step.learning_rate, "batch-size": step.batch_size}
        values["decoupled-learning-rate"] = step.decoupled_learning_rate
        values |= unskipped_losses(step)
        if self._log.log_loss_scale_to_tensorboard:
            values["loss-scale"] = step.loss_scale
        if self._log.log_world_size_to_tensorboard:
            values["world-size"] = self._world_size
        values |= {"grad-norm": step.grad_norm, "num-zeros": step.num_zeros, "params-norm": step.params_norm}
        return {name: value for name, value in values.items() if value is not None}

    def _write_values(self, values: Mapping[str, float], *, iteration: int, samples: int | None = None) -> None:
        """Write scalars to TensorBoard and W&B."""
        if values:
            self._for_each_writer(lambda board: board.write(values, iteration=iteration, samples=samples))

    def _open_writer(self, name: str) -> None:
        """Open a destination and add it to those that are written."""
        self._boards[name] = self._openers[name]()

    def _for_each_writer(self, action: Callable[[MetricsBackend], None]) -> None:
        """Apply an action to TensorBoard and W&B, reopening a failed TensorBoard once a minute."""
        for name, due in list(self._failed.items()):
            if name not in self._boards and time.monotonic() >= due:
                self._warn_on_failure(name, partial(self._open_writer, name))
        for name, board in list(self._boards.items()):
            self._warn_on_failure(name, partial(action, board))

    def _warn_on_failure(self, name: str, action: Callable[[], None]) -> None:
        """Run a destination's action. If it fails (disk full, no network), warn once and remove it; the run goes on."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever another package raises
            self._boards.pop(name, None)
            again = name.startswith(TENSORBOARD)
            if name not in self._failed:
                self.print_text(
                    f"WARNING: {name} cannot be written: {type(error).__name__}: {error}; the run goes on without it"
                    + ", and tries it again every minute" * again
                )
            self._failed[name] = time.monotonic() + (RETRY_SECONDS if again else math.inf)

    def _write_jsonl_event(self, kind: str, **fields: Any) -> None:
        """Append an event to the JSONL file, if there is one; infinity and NaN become "inf", "-inf" and "nan". A run
        that resumes begins with kind `start` and its iteration: of steps above it that come again, the later line counts.
        """
        if self._journal:
            self._journal.add(json.dumps(to_json_value({"kind": kind, **fields}), allow_nan=False) + "\n")


def _writer_openers(log: LogConfig, settings: Mapping[str, Any]) -> dict[str, Callable[[], MetricsBackend]]:
    """Return name -> function that opens it, for the destinations that the flags ask for."""
    openers: dict[str, Callable[[], MetricsBackend]] = {}
    if log.tensorboard_dir:
        openers[f"{TENSORBOARD} {log.tensorboard_dir}"] = lambda: TensorBoard(log)
    if log.wandb_project:
        openers[f"--wandb-project {log.wandb_project}"] = lambda: WeightsAndBiases(log, settings)
    return openers


def _hide_tensorboard_thread_error(failure: threading.ExceptHookArgs) -> None:
    """threading.excepthook without errors of TensorBoard's threads, which the next write raises again."""
    if not type(failure.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(failure)


class TensorBoard:
    """Event files in --tensorboard-dir."""

    def __init__(self, log: LogConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if threading.excepthook is threading.__excepthook__:
            threading.excepthook = _hide_tensorboard_thread_error
        try:
            self._writer = SummaryWriter(log_dir=log.tensorboard_dir, max_queue=log.tensorboard_queue_size)
        except OSError:  # a full disk still has room for the name of a file
            for left in Path(str(log.tensorboard_dir)).glob(f"events.out.tfevents.*.{os.getpid()}.*"):
                if not left.stat().st_size:
                    left.unlink()
            raise

    def write(self, values: Mapping[str, float], *, iteration: int, samples: int | None) -> None:
        """Write a scalar for each name at an iteration and, with `samples`, one named `X vs samples`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
            if samples is not None:
                self._writer.add_scalar(f"{name} vs samples", value, samples)

    def write_texts(self, texts: Mapping[str, str], *, iteration: int) -> None:
        """Write texts, each under its name, verbatim instead of as Markdown."""
        for name, text in texts.items():
            self._writer.add_text(name, textwrap.indent(text, "    ", lambda line: True), iteration)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """A run of --wandb-project."""

    def __init__(self, log: LogConfig, settings: Mapping[str, Any]) -> None:
        import wandb

        folder = log.wandb_save_dir
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=log.wandb_project,
            name=log.wandb_exp_name,
            entity=log.wandb_entity,
            dir=folder,
            config=dict(settings),
        )
        self._module = wandb
        # W&B drops points whose own step goes back; against a metric of ours they may come in any order.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, values: Mapping[str, float], *, iteration: int, samples: int | None) -> None:
        """Log a scalar for each name at an iteration; `samples`, if given, is logged along as an x axis."""
        self._run.log({**values, "iteration": iteration, **({} if samples is None else {"samples": samples})})

    def write_texts(self, texts: Mapping[str, str], *, iteration: int) -> None:
        """Log texts, each under its name, verbatim."""
        pages = {name: self._module.Html(f"<pre>{html.escape(text)}</pre>") for name, text in texts.items()}
        self._run.log({**pages, "iteration": iteration})

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


MetricsBackend = TensorBoard | WeightsAndBiases


def _print_line(text: str) -> None:
    """Print a line at once; ignore a full disk or closed pipe."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError:
        pass  # a full disk, or a pipe whose reader has ended; there is nobody to tell


def _tqdm_bar_if_terminal(start: int, total: int) -> Any | None:
    """Return a tqdm bar on standard error if that is a terminal and tqdm is installed, else None."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        return None
    from tqdm import tqdm

    return tqdm(total=total or None, initial=start, unit="it", dynamic_ncols=True)
