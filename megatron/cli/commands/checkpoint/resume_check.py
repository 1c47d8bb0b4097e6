"""Check that a run that is killed and resumed continues as one that was not: every piece of its state, bit for bit.

    megatron checkpoint resume-check --steps 10 --nproc 2 <all flags of the run>

Trains 2N steps in one go; then N steps, kill -9 of all ranks, and N more from the checkpoint, by the run's own entry
script and with its own flags. Then compares the two runs' checkpoints of iteration N and of iteration 2N, item by item
of the inventory of state. Exit code 0 when all are equal, 1 when one is not or is not saved at all, or when a checkpoint holds
names of no item; 2 when a run fails.

The ranks are processes on this machine. Flags that are not the tool's own go to the entry script; --save, --load,
--save-interval, --exit-interval and --save-keep-last are the tool's to set. What the runs print is kept with --workdir.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch.distributed as dist

from megatron.cli.tool_parser import ToolArgumentParser
from megatron.core.dist_checkpointing.checkpoint_folders import (
    TRACKER,
    CheckpointError,
    iteration_folder,
    scan_checkpoint_folder,
)
from megatron.core.dist_checkpointing.rewrite import rewrite_checkpoint
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.core.dist_checkpointing.source import FilteredCheckpointSource
from megatron.training.launch.launch_info import install_interrupt_excepthook
from megatron.verify.compare.contents import matches_pattern
from megatron.verify.state_inventory import StateCategoryComparison, compare_training_states

ROOT = Path(__file__).resolve().parents[4]
OURS = (
    "--save",
    "--load",
    "--save-interval",
    "--exit-interval",
    "--save-keep-last",
    "--save-retain-interval",
)  # each with a value
LOOK_EVERY = 0.01  # seconds
SHOWN = 5  # differences of an item that are printed
LAST_LINES = 8  # of a run that failed
WAY_OUT = "add it to the slots of its update rule, or as a row of INVENTORY in megatron/verify/state_inventory.py"


class CheckedRunFailed(Exception):
    """A run failed, or ended without an expected checkpoint."""


@dataclass(frozen=True, slots=True)
class ResumeCheckPlan:
    """The runs to make. flags: for the entry script. work: folder for checkpoints and for what the runs print."""

    entry: Path
    flags: tuple[str, ...]
    ranks: int
    steps: int
    work: Path

    def run_command(self, save: Path, load: Path | None) -> list[str]:
        """Return the entry script's command line, with folders to save into and to load from."""
        more = [
            "--save",
            save,
            "--save-interval",
            self.steps,
            "--exit-interval",
            2 * self.steps,
            *(["--load", load] if load else []),
        ]
        return [sys.executable, str(self.entry), *self.flags, *map(str, more)]


class RankProcesses:
    """The processes of a run's ranks, with a store that this one keeps, as under torchrun. output: what they print."""

    def __init__(self, command: list[str], count: int, output: Path) -> None:
        self.output = output
        self._open = ExitStack()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = [
            f"WORLD_SIZE={count}",
            f"LOCAL_WORLD_SIZE={count}",
            "MASTER_ADDR=127.0.0.1",
            f"MASTER_PORT={self._store.port}",
            "TORCHELASTIC_USE_AGENT_STORE=True",
            "TORCHELASTIC_RESTART_COUNT=0",
        ]
        file: IO[bytes] = self._open.enter_context(output.open("wb"))
        self._processes = [
            subprocess.Popen(
                ["env", *([f"RANK={rank}", f"LOCAL_RANK={rank}", *shared] if count > 1 else []), *command],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for rank in range(count)
        ]

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._open.close()

    @property
    def exit_codes(self) -> list[int | None]:
        """Exit code of every rank; None while it runs."""
        return [process.poll() for process in self._processes]

    def kill(self) -> None:
        """kill -9 all ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def wait_for_success(self, what: str) -> None:
        """Wait until all ranks end. `CheckedRunFailed` with their last lines if one failed. what: the run, in words."""
        while None in (codes := self.exit_codes):
            time.sleep(LOOK_EVERY)
        if any(codes):
            lines = self.output.read_text(errors="replace").splitlines()
            errors = [number for number, line in enumerate(lines) if re.match(r"[\w.]*Error: ", line)]
            excerpt = lines[errors[-1] :][:LAST_LINES] if errors else lines[-LAST_LINES:]
            raise CheckedRunFailed(
                "\n".join([f"{what} failed with exit codes {codes}:", *(f"  {line}" for line in excerpt)])
            )


def run_uninterrupted(plan: ResumeCheckPlan) -> Path:
    """Run 2N steps in one go. Return the folder of its checkpoints. Raises `CheckedRunFailed`."""
    save = plan.work / "straight"
    with RankProcesses(plan.run_command(save, None), plan.ranks, plan.work / "straight.log") as ranks:
        ranks.wait_for_success("the run of 2N steps")
    for iteration in (plan.steps, 2 * plan.steps):
        if not iteration_folder(save, iteration).is_dir():
            raise CheckedRunFailed(
                f"the run of 2N steps has no checkpoint of iteration {iteration}; its flags end it earlier: choose a smaller --steps"
            )
    return save


def run_and_kill(plan: ResumeCheckPlan) -> Path:
    """Run N steps, kill -9 when their checkpoint is committed; return its folder. Raises `CheckedRunFailed`."""
    save = plan.work / "killed"
    with RankProcesses(plan.run_command(save, None), plan.ranks, plan.work / "killed.log") as ranks:
        while plan.steps not in (step.iteration for step in scan_checkpoint_folder(save).steps):
            if None not in ranks.exit_codes:
                ranks.wait_for_success("the run of N steps")
                raise CheckedRunFailed(f"the run of N steps ended without a checkpoint of iteration {plan.steps}")
            time.sleep(LOOK_EVERY)
        ranks.kill()
    # Where the kill came late, as if it had come at once.
    shutil.rmtree(iteration_folder(save, 2 * plan.steps), ignore_errors=True)
    (save / TRACKER).write_text(f"{plan.steps}\n", encoding="ascii")
    return save


def run_resumed(plan: ResumeCheckPlan, load: Path) -> Path:
    """Run N more steps from a checkpoint. Return the folder of checkpoints. Raises `CheckedRunFailed`."""
    with RankProcesses(plan.run_command(load, load), plan.ranks, plan.work / "resumed.log") as ranks:
        ranks.wait_for_success("the resumed run")
    return load


def write_checkpoint_without(folder: Path, plan: ResumeCheckPlan, patterns: Sequence[str]) -> Path:
    """Write a copy of the checkpoint of iteration N without names that match; return its folder."""
    saved = open_native_checkpoint(iteration_folder(folder, plan.steps))
    rewrite_checkpoint(
        FilteredCheckpointSource(saved, lambda name: not matches_pattern(name, patterns)),
        plan.work / "without",
        iteration=plan.steps,
        settings=saved.settings,
        world_size=saved.description.world_size,
    )
    return plan.work / "without"


def compare_states_at(a: Path, b: Path, iteration: int) -> list[StateCategoryComparison]:
    """Compare the training states in both runs' checkpoints of an iteration."""
    mine, theirs = (open_native_checkpoint(iteration_folder(folder, iteration)) for folder in (a, b))
    return list(compare_training_states(mine, theirs, world_size=mine.description.world_size))


def state_comparison_lines(columns: dict[str, list[StateCategoryComparison]]) -> list[str]:
    """Return a table with a row for each item and a column for each comparison, then what differs."""
    rows = list(zip(*columns.values(), strict=True))
    width = max(len(row[0].item.what) for row in rows)
    lines = [f"{'':<{width}}  {'names':>6}  " + "  ".join(f"{title:<14}" for title in columns).rstrip()]
    for row in rows:
        if not any(one.count or one.missing for one in row):
            lines.append(f"{row[0].item.what:<{width}}       -  this run has none")
            continue
        words = [f"{_verdict(one):<14}" for one in row]
        lines.append(f"{row[0].item.what:<{width}}  {max(one.count for one in row):>6}  {'  '.join(words)}".rstrip())
    for title, results in columns.items():
        for one in results:
            texts = [
                *(f"missing: {name}" for name in one.missing),
                *map(str, one.differences),
                *(f"{name} is in no item of the inventory; {WAY_OUT}" for name in one.unknown),
            ]
            lines += [f"{title}: {one.item.what}: {text}" for text in texts[:SHOWN]]
            lines += [f"{title}: {one.item.what}: ... and {len(texts) - SHOWN} more"] * (len(texts) > SHOWN)
    return lines


def _verdict(one: StateCategoryComparison) -> str:
    """Return how an item compares, in a word or two."""
    counts = {"MISSING": len(one.missing), "DIFFER": len(one.differences), "UNKNOWN": len(one.unknown)}
    return next((f"{count} {word}" for word, count in counts.items() if count), "equal")


def run_resume_check(plan: ResumeCheckPlan, lost: Sequence[str]) -> bool:
    """Run and compare; print the report. Return whether all is equal. lost: patterns of names to leave out."""
    print(f"{2 * plan.steps} steps in one go ...", flush=True)
    straight = run_uninterrupted(plan)
    print(f"{plan.steps} steps, then kill -9 ...", flush=True)
    killed = run_and_kill(plan)
    if lost:
        killed = write_checkpoint_without(killed, plan, lost)
    columns = {f"iteration {plan.steps}": compare_states_at(straight, killed, plan.steps)}
    print(f"{plan.steps} steps from the checkpoint ...", flush=True)
    failure = ""
    try:
        resumed = run_resumed(plan, killed)
        columns[f"iteration {2 * plan.steps}"] = compare_states_at(straight, resumed, 2 * plan.steps)
    except CheckedRunFailed as error:
        failure = str(error)
    print("\n".join(state_comparison_lines(columns)))
    if failure:
        print(failure)
    equal = not failure and all(one.is_equal for rows in columns.values() for one in rows)
    print(
        "the resumed run is the run that was not stopped, bit for bit"
        if equal
        else "THE RESUMED RUN IS NOT THE RUN THAT WAS NOT STOPPED"
    )
    return equal


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line: (the tool's own arguments, flags of the run)."""
    parser = ToolArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=5, metavar="N", help="steps before and after the kill (default: 5)"
    )
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks (default: 1)")
    parser.add_argument(
        "--entry",
        type=Path,
        default=ROOT / "pretrain_gpt.py",
        metavar="FILE",
        help="entry script (default: pretrain_gpt.py)",
    )
    parser.add_argument(
        "--workdir",
        type=Path,
        metavar="DIR",
        help="keep checkpoints and output here (default: a folder that is removed)",
    )
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="leave names like these out of the checkpoint before it is resumed: the check must then name them",
    )
    args, flags = parser.parse_known_args(arguments)
    for flag in OURS:
        if flag in flags or any(word.startswith(f"{flag}=") for word in flags):
            parser.error(f"{flag} is for this tool to set; leave it out")
    for name in ("steps", "nproc"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    if not args.entry.is_file():
        parser.error(f"--entry {args.entry} is no file")
    if args.workdir and args.workdir.exists() and any(args.workdir.iterdir()):
        parser.error(f"--workdir {args.workdir} is not empty")
    return args, flags


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the check; exit with 1 if anything differs, 2 if a run fails."""
    install_interrupt_excepthook()
    args, flags = parse_arguments(arguments)
    work = (args.workdir or Path(tempfile.mkdtemp(prefix="resume_check"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        equal = run_resume_check(
            ResumeCheckPlan(args.entry.resolve(), tuple(flags), args.nproc, args.steps, work), args.without
        )
    except (CheckedRunFailed, CheckpointError, OSError) as error:
        sys.stderr.write(f"resume_check.py: {error}\n")
        sys.exit(2)
    finally:
        if args.workdir is None:
            shutil.rmtree(work, ignore_errors=True)
    if not equal:
        sys.exit(1)
