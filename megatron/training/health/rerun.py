"""A step with a bad result is run again, to tell a fault of the machine from a result of the data (`--rerun-mode`).

    1. in place       the same microbatches, weights and random streams. Another result: a transient error of the machine.
    2. elsewhere      the same result: the run saves the state before the step and ends with exit code 16. Restarted on other
                      devices it runs the step once more. Another result: the devices of before have a persistent error;
                      the same result: it is the correct one, a real spike or NaN of the data or the learning rate.

A run ends with exit code 17 once it knows (16 and 17 are Megatron's exit codes), and goes on from its last checkpoint when it
is started again. With `--on-bad-step skip` or `rollback` nothing ends: the step is run again in place, a good second result is
used, and a bad one is left behind as that flag says. The last diagnosis is in `rerun.json` in --save, every one in the run log.

`--rerun-mode report_stats` runs every step twice and reports by how much the two results differ.
"""

from __future__ import annotations

import copy
import json
import math
import random
import re
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.core.datasets.storage import atomic_file
from megatron.core.parallel import collectives
from megatron.training.checkpoint.resuming import decide_on_first_rank
from megatron.training.health.bad_steps import BadStepError, StepValidator, mean_losses
from megatron.training.launch.launch_info import read_launch_info
from megatron.training.report.metrics import StepMetrics
from megatron.training.state.batch import Batch
from megatron.training.state.step import StepFunction, StepWork, train_step
from megatron.training.state.trainer import Trainer

FILE = "rerun.json"  # in --save
RESTART_ELSEWHERE, REJECTED = 16, 17  # exit codes
# Relative. Kernels that add in changing order differ by 1e-6 or so; a result is bad by a factor of ten, or is not finite.
TOLERANCE = 1e-2
_TRACKED = re.compile(r"ts=.+ node=.+ device=.+ jobID=(.+) rank=(.+) iteration=(.+) status=(.+) result=.+ message=.+")
_REPRODUCED = ("rerun_disabled", "first_rerun_reproducible", "second_rerun_reproducible")


class ResultRejectedError(BadStepError):
    """Ends the run since a step's result is bad; its exit code says whether to restart on other devices."""

    saves = True

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class RankEvidence:
    """A rank's device and numbers in a bad step. suspicious: its own numbers were not finite before any reduction."""

    rank: int
    host: str
    device: str
    suspicious: bool
    results: dict[str, float]

    @property
    def device_label(self) -> str:
        """Host and device, as text."""
        return f"{self.host} {self.device}"


@dataclass(slots=True)
class BadStepDiagnosis:
    """What is known of the last bad step. classification: "" while it has to be run on other devices.
    results: losses and gradient norm of the whole step. layout: world size and parallel sizes. injected: the kind of
    error that --error-injection-rate injected, or "". witnesses: of every rank.
    """

    iteration: int
    reason: str
    classification: str
    results: dict[str, float]
    layout: list[int]
    injected: str
    witnesses: list[RankEvidence] = field(default_factory=list)

    @staticmethod
    def read(path: Path) -> BadStepDiagnosis | None:
        """Return the diagnosis in a file; None without a file, or if it cannot be read."""
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            known = {name.name: stored[name.name] for name in fields(BadStepDiagnosis)}
            return BadStepDiagnosis(**{**known, "witnesses": [RankEvidence(**one) for one in stored["witnesses"]]})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Write the diagnosis to a file, replacing it atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, durable=False) as file:
            file.write((json.dumps(asdict(self)) + "\n").encode())


class StepRerun(StepValidator):
    """Runs training steps, and runs those with a bad result again. Every method is collective.
    skipped: iterations to skip, since --result-rejected-tracker-filename has them rejected twice.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer.run.config)
        self.trainer, self.mesh = trainer, trainer.run.mesh
        faults, save = self.config.faults, self.config.checkpoint.save
        self.mode = faults.effective_rerun_mode
        self.goes_on = faults.on_bad_step in ("skip", "rollback")
        self.file = Path(save) / FILE if save else None
        self.known = decide_on_first_rank(
            self.mesh.world, lambda: BadStepDiagnosis.read(self.file) if self.file else None
        )
        if self.known and not self.known.classification and self.known.iteration != trainer.progress.iteration + 1:
            self.known = None  # this run does not go on from the state that was saved for it
        tracker = faults.result_rejected_tracker_filename
        self.skipped = decide_on_first_rank(
            self.mesh.world, lambda: iterations_rejected_twice(tracker) if tracker else set()
        )
        # Name of a number -> [pairs compared, of them equal, largest difference].
        self.variation: dict[str, list[float]] = {}
        self._judges = False  # whether this pass is the one after a restart on other devices
        self._injected, self._injects_at = "", 0
        self._work: StepWork | None = None
        self._own: dict[str, float] = {}  # this rank's numbers of the last pass
        self._whole: dict[str, float] = {}  # those of all ranks together
        self._suspicious = False

    def train_step_checked(self, batches: Iterator[Batch]) -> StepMetrics:
        """Train on the next global batch, and rerun a bad result; `ResultRejectedError` when the run is to end."""
        before, iteration = self._snapshot(), self.trainer.progress.iteration + 1
        self.repeats, self._own, self._whole = False, {}, {}
        self._injected = self._draw_injected_error_kind(iteration)
        self._judges = self.known is not None and self.known.iteration == iteration and not self.known.classification
        step = train_step(self.trainer, batches)
        if self.mode == "report_stats":
            return self._compare_passes(before, batches)
        if self._judges:
            assert self.known is not None, "there is a diagnosis to complete"
            return self._classify_after_restart(self.known, before, step)
        return self._rerun_in_place(before, batches, iteration) if self.problem else step

    def reason_to_skip(self, iteration: int) -> str:
        """Return why the data of an iteration is passed over: it was bad, or rejected by earlier starts of the run."""
        rejected = "--result-rejected-tracker-filename" if iteration in self.skipped else ""
        return super().reason_to_skip(iteration) or rejected

    def interval_line(self, steps: int) -> str:
        """Return how much two passes differed since the last interval; "" but for `report_stats`. Collective."""
        if self.mode != "report_stats":
            return ""
        variation, self.variation = self.variation, {}
        everyone = collectives.gather_objects((self.mesh.world.rank, variation), self.mesh.world)
        rows = [(rank, name, row) for rank, table in everyone for name, row in table.items()]
        pairs, equal = (int(sum(row[place] for _, _, row in rows)) for place in (0, 1))
        differences = ((rank, name, row[2]) for rank, name, row in rows)
        rank, name, largest = max(differences, key=lambda one: one[2], default=(0, "", 0.0))
        worst = f"; the largest relative difference is {largest:.3e} ({name}, rank {rank})" if pairs > equal else ""
        return f"determinism: of {pairs} results computed twice, {equal} were equal{worst}"

    def accept_update(self, work: StepWork, losses: Mapping[str, Tensor], norm: Tensor) -> bool:
        """Return whether the update of this pass may be made; keeps its numbers for the comparison.
        losses: [2] each (total, count); norm: a scalar.
        """
        if self._injected and not (self.repeats and self._injected == "transient_error"):
            losses = self._inject_error(work, losses)
        if self.mode == "report_stats" and not self.repeats:
            self._keep_results(work, losses, norm)
            return False
        sound = super().accept_update(work, losses, norm)
        self._keep_results(work, losses, norm)
        return sound and (self.goes_on or self.mode == "report_stats" or not (self.repeats or self._judges))

    def _keep_results(self, work: StepWork, losses: Mapping[str, Tensor], norm: Tensor) -> None:
        """Keep this pass's losses, gradients and norm, of this rank and of the whole step, for the comparison."""
        self._work = work
        state = {
            f"{name} of microbatch {index}": float(pair[0] / pair[1].clamp(min=1.0))
            for index, report in enumerate(work.reports)
            for name, pair in report.items()
        }
        state |= {f"gradient of bucket {index}": float(value) for index, value in enumerate(self.largest)}
        self._suspicious = not all(map(math.isfinite, state.values()))
        self._own, self._whole = state, {**mean_losses(losses, norm, self.mesh), "gradient norm": float(norm)}

    def _compare_passes(self, before: dict[str, Any], batches: Iterator[Batch]) -> StepMetrics:
        """Rerun the step, add the differences of both passes to the statistics (`report_stats`); return the second."""
        first = self._own | self._whole
        step = self._repeat_step(before, batches)
        for name, value in (self._own | self._whole).items():
            row = self.variation.setdefault(name, [0, 0, 0.0])
            difference = symmetric_relative_difference(
                first.get(name, value), value
            )  # a pass that overflowed in fp16 has none
            row[:] = row[0] + 1, row[1] + (difference == 0.0), max(row[2], difference)
        return step

    def _rerun_in_place(self, before: dict[str, Any], batches: Iterator[Batch], iteration: int) -> StepMetrics:
        """Rerun a bad step on the same devices and classify it: the second result, or `ResultRejectedError`."""
        reason, first, witness = self.problem, self._own | self._whole, self._own_result()
        witnesses = collectives.gather_objects(witness, self.mesh.world)
        diagnosis = BadStepDiagnosis(
            iteration, reason, "", self._whole, self._parallel_sizes(), self._injected, witnesses
        )
        self._append_rejected(witness, iteration, "initial_run", reason)
        self.trainer.run.print_rank_0(f"WARNING: iteration {iteration} is bad: {reason}\nIt is run again in place")
        step = self._repeat_step(before, batches)
        differs = self._largest_difference_text(first, self._own | self._whole)
        self._append_rejected(witness, iteration, f"first_rerun_{'not_' if differs else ''}reproducible", reason)
        devices, known, code = _suspect_devices_text(witnesses), self.known, REJECTED
        if differs:
            diagnosis.classification = "transient_error"
            result_text = f"another result ({differs}): a transient error of {devices}"
        elif self.goes_on:
            diagnosis.classification, result_text = "reproduced", "the same result"
        elif known and known.iteration == iteration and known.classification == "correct_result":
            diagnosis.classification = "correct_result"
            result_text = (
                "the same result, as it did on other devices before: it is the correct result of this data and these "
                "weights"
            )
        elif self.file is None:
            diagnosis.classification = "reproduced"
            result_text = "the same result, so it is no transient error; with --save it could be run on other devices"
        else:
            code = RESTART_ELSEWHERE
            result_text = (
                f"the same result; start the run again on other devices than {devices}, to see whether they compute "
                "another one"
            )
        return self._conclude_rerun(diagnosis, f"run again in place, it gave {result_text}", before, step, code)

    def _classify_after_restart(
        self, diagnosis: BadStepDiagnosis, before_step: dict[str, Any], step: StepMetrics
    ) -> StepMetrics:
        """Classify the step that was bad before the restart by its result on other devices; see `_conclude_rerun`."""
        mine, same_layout = self._own_result(), diagnosis.layout == self._parallel_sizes()
        now = collectives.gather_objects(mine, self.mesh.world)
        suspects = [one for one in diagnosis.witnesses if one.suspicious] or diagnosis.witnesses
        devices = {one.device_label for one in now}
        if same_layout:
            moved = all(one.device_label != now[one.rank].device_label for one in suspects)
        else:
            moved = not any(one.device_label in devices for one in suspects)
        if not moved:
            self._say_and_record(
                diagnosis,
                f"iteration {diagnosis.iteration} was run on the same devices again: {_suspect_devices_text(suspects)}",
            )
            self._restore(before_step)
            raise ResultRejectedError(
                f"iteration {diagnosis.iteration} was bad on {_suspect_devices_text(suspects)}, and this restart uses the same devices; "
                "start the run on others, or give --rerun-mode disabled to go on without a classification",
                RESTART_ELSEWHERE,
            )
        before = diagnosis.witnesses[mine.rank].results if same_layout else {}
        differs = self._largest_difference_text(before | diagnosis.results, self._own | self._whole)
        self._append_rejected(
            mine, diagnosis.iteration, f"second_rerun_{'not_' if differs else ''}reproducible", diagnosis.reason
        )
        diagnosis.classification = "persistent_error" if differs else "correct_result"
        text = (
            f"on other devices it gave another result ({differs}): a persistent error of {_suspect_devices_text(suspects)}; leave these out"
            if differs
            else "on other devices it gave the same result: it is the correct result of this data and these weights; "
            "look at the data and at --lr, or pass over it with --iterations-to-skip or --on-bad-step skip"
        )
        return self._conclude_rerun(diagnosis, text, before_step, step)

    def _conclude_rerun(
        self,
        diagnosis: BadStepDiagnosis,
        text: str,
        before: dict[str, Any],
        step: StepMetrics,
        exit_code: int = REJECTED,
    ) -> StepMetrics:
        """Log and save a diagnosis; return the step, or restore the state before and raise `ResultRejectedError`."""
        message = f"iteration {diagnosis.iteration} was bad: {diagnosis.reason}; {text}"
        self._say_and_record(diagnosis, message)
        self.known = diagnosis
        if (file := self.file) is not None:
            decide_on_first_rank(self.mesh.world, lambda: diagnosis.write(file))
        if self.goes_on:
            return step
        self._restore(before)
        raise ResultRejectedError(message, exit_code)

    def _say_and_record(self, diagnosis: BadStepDiagnosis, message: str) -> None:
        """Print a diagnosis's message and add it to the run log."""
        run = self.trainer.run
        run.print_rank_0(f"WARNING: {message}")
        run.run_log.add(
            "rerun",
            iteration=diagnosis.iteration,
            classification=diagnosis.classification or "run it on other devices",
            reason=message,
            injected=diagnosis.injected or None,
            ranks=[one.rank for one in diagnosis.witnesses if one.suspicious],
        )

    def _repeat_step(self, before: dict[str, Any], batches: Iterator[Batch]) -> StepMetrics:
        """Run the same step once more, from its microbatches, counters, random streams and loss scale."""
        self._restore(before)
        self.repeats = True
        return train_step(self.trainer, batches, again=self._work)

    def _snapshot(self) -> dict[str, Any]:
        """Return what a step without an update changes: counters, scaler state, random streams."""
        return {
            "progress": copy.copy(self.trainer.progress),
            "scaler": self.trainer.optimizer.scaler.state(),
            "streams": {name: state.clone() for name, state in self.trainer.run.streams.state().items()},
        }

    def _restore(self, before: dict[str, Any]) -> None:
        """Restore a snapshot."""
        for counter in fields(self.trainer.progress):
            setattr(self.trainer.progress, counter.name, getattr(before["progress"], counter.name))
        self.trainer.optimizer.scaler.load(before["scaler"])
        self.trainer.run.streams.load({name: state.clone() for name, state in before["streams"].items()})

    def _largest_difference_text(self, before: Mapping[str, float], now: Mapping[str, float]) -> str:
        """Describe the number that differs most between two passes, over all ranks; "" within tolerance. Collective."""
        shared = {name: symmetric_relative_difference(before[name], now[name]) for name in before if name in now}
        worst = max(shared, key=lambda name: shared[name], default=None)
        mine = (0.0, "")
        if worst is not None:
            text = f"{worst} on rank {self.mesh.world.rank}: {before[worst]:.6g}, then {now[worst]:.6g}"
            mine = (shared[worst], text)
        largest = max(collectives.gather_objects(mine, self.mesh.world))
        return largest[1] if largest[0] > TOLERANCE else ""

    def _own_result(self) -> RankEvidence:
        """Return this rank's device and its numbers of the last pass."""
        host, device = host_and_device(str(self.mesh.device))
        return RankEvidence(self.mesh.world.rank, host, device, self._suspicious, self._own)

    def _parallel_sizes(self) -> list[int]:
        axes = (self.mesh.world, self.mesh.tp, self.mesh.pp, self.mesh.cp, self.mesh.ep)
        return [*(axis.size for axis in axes), self.config.train.micro_batch_size or 0]

    def _draw_injected_error_kind(self, iteration: int) -> str:
        """Return the kind of error to inject into this step, or "": the same on all ranks, and after a restart."""
        faults = self.config.faults
        if self.known is not None and self.known.iteration == iteration:  # was drawn before
            return "correct_result" if self.known.injected == "correct_result" else ""
        if not faults.error_injection_rate:
            return ""
        drawn = random.Random(f"{self.config.train.seed} {iteration}")
        self._injects_at = drawn.randrange(self.mesh.dp_cp.size)
        return faults.error_injection_type if drawn.randrange(faults.error_injection_rate) == 0 else ""

    def _inject_error(self, work: StepWork, losses: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the losses with an injected error: one rank's first microbatch is NaN."""
        if not work.reports or self.mesh.dp_cp.rank != self._injects_at % self.mesh.dp_cp.size:
            return losses
        work.reports[0] = {name: pair * math.nan for name, pair in work.reports[0].items()}
        return {name: pair * math.nan if name in work.reports[0] else pair for name, pair in losses.items()}

    def _append_rejected(self, witness: RankEvidence, iteration: int, status: str, reason: str) -> None:
        """Append to --result-rejected-tracker-filename, in Megatron's format; failing to write is a warning."""
        path = self.config.faults.result_rejected_tracker_filename
        if path is None or not (witness.suspicious or self.mesh.world.is_first):
            return
        bad_values = (value for value in witness.results.values() if not math.isfinite(value))
        result = next(bad_values, self._whole.get("lm loss", math.nan))
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(
                    f"ts={datetime.now()} node={witness.host} device={witness.device} jobID={read_launch_info().job or 'N/A'} "
                    f"rank={witness.rank} iteration={iteration} status={status} result={result} message='{reason.splitlines()[0]}'\n"
                )
        except OSError as error:
            self.trainer.run.log.warning(
                f"--result-rejected-tracker-filename {path} cannot be written: {error.strerror}"
            )


def add_step_validation(trainer: Trainer) -> StepFunction:
    """Add the hook by which steps are judged, if flags ask for it. Return what makes a step: `train_step`, with reruns."""
    faults = trainer.run.config.faults
    if faults.effective_rerun_mode != "disabled":
        rerun = StepRerun(trainer)
        trainer.add_hook(rerun)
        return rerun.train_step_checked
    if faults.validates_steps:
        trainer.add_hook(StepValidator(trainer.run.config))
    return partial(train_step, trainer)


def symmetric_relative_difference(a: float, b: float) -> float:
    """2 |a - b| / (|a| + |b|); 0 for two NaN or two equal infinities, infinite where only one of them is finite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return 2 * abs(a - b) / (abs(a) + abs(b))


def host_and_device(device: str) -> tuple[str, str]:
    """Host and device of this process, by which a restart knows whether it runs elsewhere."""
    return socket.gethostname(), device


def iterations_rejected_twice(path: str) -> set[int]:
    """Return a tracker file's iterations that one rank rejected twice, and no two of a job; none without a file."""
    try:
        lines: Iterable[str] = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    seen: set[tuple[str, int]] = set()
    twice: set[int] = set()
    ranks: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for line in lines:
        match = _TRACKED.search(line)
        if match is None or match[4].split(".")[-1].lower() not in _REPRODUCED or not match[3].isdecimal():
            continue
        job, rank, iteration = match[1], match[2], int(match[3])
        if (rank, iteration) in seen:
            twice.add(iteration)
        seen.add((rank, iteration))
        ranks[job, iteration].add(rank)
    return twice - {iteration for (_, iteration), sightings in ranks.items() if len(sightings) > 1}


def _suspect_devices_text(witnesses: Iterable[RankEvidence]) -> str:
    """Return the devices of the suspicious ranks, or else of all, in words."""
    every = list(witnesses)
    chosen = [one for one in every if one.suspicious] or every
    text = ", ".join(f"rank {one.rank} (node {one.host}, {one.device})" for one in chosen[:4])
    return text + (f" and {len(chosen) - 4} more" if len(chosen) > 4 else "")
