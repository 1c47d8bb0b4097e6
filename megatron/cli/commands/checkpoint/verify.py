"""Read every byte of checkpoints, and report everything that is wrong with them.

    megatron checkpoint verify checkpoints            the newest of a --save folder, the one that a run would load
    megatron checkpoint verify checkpoints --all      every one in it
    megatron checkpoint verify checkpoints/iter_0001000 Qwen2.5-0.5B

A checkpoint of this project carries a hash of every byte, and is checked against them; those of other projects carry
none, so that all their tensors are read, and what cannot be read or does not fit together is reported. Exit code 1 if anything
is wrong.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from megatron.cli.tool_parser import ToolArgumentParser
from megatron.core.dist_checkpointing.checkpoint_folders import COMMIT, CheckpointError, scan_checkpoint_folder
from megatron.core.dist_checkpointing.saved import NativeCheckpoint, open_native_checkpoint, unknown_files
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.parallel.boxes import whole_box
from megatron.training.checkpoint.formats import find_foreign_checkpoint, open_checkpoint
from megatron.training.launch.launch_info import install_interrupt_excepthook
from megatron.verify.compare.contents import bytes_with_unit_text, plural_count_text

PART = 1 << 28  # bytes between two signs of life


@dataclass(frozen=True, slots=True)
class CheckpointVerification:
    """What verification found about one checkpoint. how: by what it was checked. remarks: harmless. size: bytes read."""

    path: str
    how: str
    problems: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    size: int = 0


def verify_source(source: CheckpointSource, bar: tqdm, threads: int | None) -> CheckpointVerification:
    """Read all of an opened checkpoint, checking hashes if it has them, and return what is wrong."""
    if not isinstance(source, NativeCheckpoint):
        problems, size = [], 0
        for name, one in source.formats.items():
            try:
                size += source.read(name, whole_box(one.shape)).nbytes
            except CheckpointError as error:
                problems.append(str(error))
            bar.update(one.num_bytes)
        return CheckpointVerification(source.where, "reading (it has no hashes)", tuple(problems), size=size)
    problems, parts = [], max(1, min(100, source.size // PART))
    for part in range(parts):
        problems += source.verify(part=part, parts=parts, threads=threads)
        bar.update(source.size // parts)
    strange = [f"{source.folder / name} is none of its files" for name in unknown_files(source)]
    return CheckpointVerification(
        source.where, "its hashes", tuple(dict.fromkeys(problems)), tuple(strange), source.size
    )


def open_checkpoints_at(
    path: str, step: int | None, every: bool
) -> Iterator[CheckpointSource | CheckpointVerification]:
    """Open the checkpoints of a path, one after the other; what cannot be opened is yielded as a `CheckpointVerification`.
    step: only the one of this iteration. every: all of a --save folder, not only the newest.
    """
    scan = scan_checkpoint_folder(path)
    if (Path(path) / COMMIT).is_file() or not scan.steps and (not scan.damaged or find_foreign_checkpoint(path, step)):
        yield _open_or_finding(path, partial(open_checkpoint, path, step))
        return
    damaged = [text for iteration, text in (*scan.newer, *scan.damaged) if step in (None, iteration)]
    yield from (CheckpointVerification(path, "its commit", (text,)) for text in damaged)
    steps = [one for one in scan.steps if step in (None, one.iteration)]
    if not steps and not damaged:
        yield CheckpointVerification(path, "looking", (f"it has no complete checkpoint of iteration {step}",))
    for one in steps if every else steps[:1]:
        yield _open_or_finding(str(one.folder), partial(open_native_checkpoint, one.folder))


def _open_or_finding(path: str, opener: Callable[[], CheckpointSource]) -> CheckpointSource | CheckpointVerification:
    try:
        return opener()
    except (CheckpointError, OSError) as error:
        return CheckpointVerification(path, "opening", tuple(getattr(error, "problems", ())) or (str(error),))


def verification_text(finding: CheckpointVerification, seconds: float) -> str:
    """Return what was found about one checkpoint, as text. seconds: that it took."""
    speed = (
        f", {bytes_with_unit_text(finding.size)} in {seconds:.1f} s ({bytes_with_unit_text(finding.size / max(seconds, 1e-9))}/s)"
        if finding.size
        else ""
    )
    lines = [
        f"{finding.path}: {'sound' if not finding.problems else plural_count_text(len(finding.problems), 'problem')}, by {finding.how}{speed}"
    ]
    return "\n".join(
        [*lines, *(f"  - {problem}" for problem in finding.problems), *(f"  ({remark})" for remark in finding.remarks)]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Verify the checkpoints and print the findings; exit with 1 if anything is wrong."""
    install_interrupt_excepthook()
    parser = ToolArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint's folder, or a --save folder")
    parser.add_argument(
        "--all", action="store_true", help="verify every checkpoint of a --save folder, not only the newest"
    )
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="verify the checkpoint of this iteration")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads that read (default: one a processor, 8 at most)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a checkpoint")
    args = parser.parse_args(arguments)
    if args.threads is not None and args.threads < 1:
        parser.error(f"--threads {args.threads} must be at least 1")
    sound = True
    for path in args.paths:
        for one in open_checkpoints_at(path, args.ckpt_step, args.all):
            started = time.perf_counter()
            if not isinstance(one, CheckpointVerification):
                total = sum(form.num_bytes for form in one.formats.values())
                with tqdm(
                    total=total, unit="B", unit_scale=True, desc=one.where, disable=not sys.stderr.isatty()
                ) as bar:
                    one = verify_source(one, bar, args.threads)
            sound = sound and not one.problems
            facts = {
                "path": one.path,
                "by": one.how,
                "problems": one.problems,
                "remarks": one.remarks,
                "bytes": one.size,
            }
            print(json.dumps(facts) if args.json else verification_text(one, time.perf_counter() - started))
    if not sound:
        sys.exit(1)
