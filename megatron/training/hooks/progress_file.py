"""SAVE/progress.txt (--log-progress): a line at the start of each job, and one for each checkpoint that was saved."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.saver import SaveOutcome
from megatron.training.launch.launch_info import read_launch_info
from megatron.training.report.metrics import progress_file_line
from megatron.training.report.run_log import LogFile
from megatron.training.state.hooks import StepHooks
from megatron.training.state.run import RunContext

if TYPE_CHECKING:
    from megatron.training.session import TrainingSession


class ProgressFile(StepHooks):
    """Appends to progress.txt on the first rank. notes: iteration that is being saved -> its line."""

    def __init__(self, run: RunContext, folder: str) -> None:
        self.run = run
        self.file = LogFile(Path(folder) / "progress.txt", "--log-progress") if run.mesh.world.is_first else None
        self.notes: dict[int, str] = {}
        self.flops_at_start = 0

    def begin_run(self, session: TrainingSession) -> None:
        """Say that a job starts."""
        self.notes, self.flops_at_start = {}, self.run.progress.floating_point_operations
        self._add(self._line("Starting job"))

    def before_save(self) -> None:
        """Note the counters of what is being saved: training goes on meanwhile."""
        self.notes[self.run.progress.iteration] = self._line("Saved checkpoint")

    def after_save(self, outcome: SaveOutcome) -> None:
        """Say that it was saved, unless that failed."""
        line = self.notes.pop(outcome.iteration)
        if not outcome.problems:
            self._add(line)

    def _line(self, event: str) -> str:
        progress, devices = self.run.progress, self.run.mesh.world.size
        seconds = max(1e-9, time.monotonic() - self.run.started)
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

    def _add(self, line: str) -> None:
        if self.file is not None:
            self.file.add(line)
