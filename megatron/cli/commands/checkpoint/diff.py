"""Compare two checkpoints, whatever layouts or formats wrote them; the exit code is 1 if they differ.

    megatron checkpoint diff checkpoints/iter_0001000 other/iter_0001000
    megatron checkpoint diff checkpoints Qwen2.5-0.5B --match 'model.*' --ignore-dtype --rtol 1e-2

Names that only one of them has, shapes, dtypes, counters, and of tensors: how many elements differ, the first and the
largest difference with index and values, and the norm of the difference relative to the second checkpoint. Without a
tolerance every bit counts. Differences between the settings of the two runs are told, and do not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from megatron.cli.tool_parser import ToolArgumentParser
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.saved import NativeCheckpoint
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.launch.launch_info import install_interrupt_excepthook
from megatron.verify.compare.checkpoints import (
    CheckpointEntryDifference,
    Tolerance,
    compare_sources,
    settings_difference_lines,
)
from megatron.verify.compare.contents import matches_pattern, plural_count_text


def open_sources_to_compare(
    paths: Sequence[str], steps: Sequence[int | None]
) -> tuple[CheckpointSource, CheckpointSource]:
    """Open both checkpoints. If only one knows the tokenizer's vocabulary size, the other's padding is left out."""
    a, b = (open_checkpoint(path, step) for path, step in zip(paths, steps, strict=True))
    given = [
        {"true_vocab_size": one.settings["true_vocab_size"]}
        if isinstance(one, NativeCheckpoint) and one.settings.get("true_vocab_size")
        else None
        for one in (a, b)
    ]
    if given[0] and not isinstance(b, NativeCheckpoint):
        b = open_checkpoint(paths[1], steps[1], given[0])
    if given[1] and not isinstance(a, NativeCheckpoint):
        a = open_checkpoint(paths[0], steps[0], given[1])
    return a, b


def difference_as_json(difference: CheckpointEntryDifference) -> dict[str, Any]:
    """Return a difference as JSON-serializable values."""
    return {
        "name": difference.name,
        "what": difference.what,
        "gap": dataclasses.asdict(difference.gap) if difference.gap else None,
    }


def print_checkpoint_differences(args: argparse.Namespace) -> bool:
    """Print the differences of the two checkpoints. Return whether there are any."""
    steps = args.ckpt_step or [None]
    a, b = open_sources_to_compare((args.a, args.b), (steps[0], steps[-1]))
    names = [name for name in dict.fromkeys([*a.formats, *b.formats]) if matches_pattern(name, args.match)]
    if not names:
        raise CheckpointError(f"no tensor has a name like {' or '.join(args.match)}, so nothing would be compared")
    total = sum(one.num_bytes for name, one in a.formats.items() if name in names)
    with tqdm(total=total, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        differences = list(
            compare_sources(
                a,
                b,
                tolerance=Tolerance(args.rtol, args.atol),
                patterns=args.match,
                dtypes=not args.ignore_dtype,
                advance=bar.update,
            )
        )
    differences.sort(
        key=lambda one: one.gap is not None
    )  # what is missing or of another kind, and counters, before numbers
    settings = settings_difference_lines(a, b)
    if args.json:
        print(
            json.dumps(
                {
                    "a": a.where,
                    "b": b.where,
                    "differences": [difference_as_json(one) for one in differences],
                    "settings": settings,
                }
            )
        )
    else:
        print(f"a: {a.where}\nb: {b.where}")
        for line in _checkpoint_difference_lines(differences, settings, args.most):
            print(line)
        print(f"{plural_count_text(len(differences), 'difference')} in {plural_count_text(len(names), 'tensor')}")
    return bool(differences)


def _checkpoint_difference_lines(
    differences: Sequence[CheckpointEntryDifference], settings: Sequence[str], most: int
) -> Iterator[str]:
    """Yield lines with the first `most` differences, the largest of all, and the settings that differ."""
    yield from (f"  {one}" for one in differences[:most])
    if len(differences) > most:
        yield f"  ... and {len(differences) - most} more (--most)"
    gaps = [(one.gap.relative_norm, one.name) for one in differences if one.gap]
    if gaps:
        largest, name = max(gaps)
        yield f"largest relative norm: {largest:.3g} in {name}"
    if settings:
        yield from ["settings that differ:", *(f"  {line}" for line in settings)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the differences; exit with 1 if there are any, 2 on errors."""
    install_interrupt_excepthook()
    parser = ToolArgumentParser(description=__doc__)
    parser.add_argument("a", metavar="A", help="a checkpoint's folder, or a --save folder")
    parser.add_argument("b", metavar="B", help="the other; values and norms are relative to it")
    parser.add_argument(
        "--ckpt-step",
        type=int,
        nargs="+",
        metavar="N",
        help="iteration of both, or of A and of B, in folders of several",
    )
    parser.add_argument(
        "--match", nargs="+", default=[], metavar="PATTERN", help="compare only names like these, such as 'model.*'"
    )
    parser.add_argument("--rtol", type=float, default=0.0, metavar="X", help="|a - b| up to X |b| is no difference")
    parser.add_argument("--atol", type=float, default=0.0, metavar="X", help="|a - b| up to X is no difference")
    parser.add_argument("--ignore-dtype", action="store_true", help="another dtype alone is no difference")
    parser.add_argument("--most", type=int, default=50, metavar="N", help="differences to print")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    if args.ckpt_step and len(args.ckpt_step) > 2:
        parser.error(f"--ckpt-step takes one iteration or two, not {len(args.ckpt_step)}")
    if not (args.rtol >= 0.0 and args.atol >= 0.0):
        parser.error("--rtol and --atol are not negative")
    try:
        differs = print_checkpoint_differences(args)
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"diff.py: {error}\n")
        sys.exit(2)
    if differs:
        sys.exit(1)
