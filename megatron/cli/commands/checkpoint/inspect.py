"""Show what is in a checkpoint of any format: names, shapes, dtypes, sizes, files, and the settings of its run.

    megatron checkpoint inspect checkpoints                       the newest in a --save folder
    megatron checkpoint inspect checkpoints/iter_0001000 --boxes --match 'model.decoder.layers.0.*'
    megatron checkpoint inspect Qwen2.5-0.5B --json --config

No tensor is read, and no hash checked: `megatron checkpoint verify` does that.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from megatron.cli.tool_parser import ToolArgumentParser, add_ckpt_step
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError, scan_checkpoint_folder
from megatron.training.launch.launch_info import install_interrupt_excepthook
from megatron.verify.compare.contents import (
    OWN,
    CheckpointContents,
    TensorEntry,
    bytes_with_unit_text,
    contents_as_json,
    matches_pattern,
    native_checkpoint_folder,
    native_contents,
    plural_count_text,
)

SHOWN = 100  # characters of a value


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ToolArgumentParser(description=__doc__)
    parser.add_argument("path", metavar="PATH", help="a checkpoint's folder, or a --save folder")
    add_ckpt_step(parser, "show")
    parser.add_argument(
        "--match", nargs="+", default=[], metavar="PATTERN", help="show only names like these, such as 'model.*.bias'"
    )
    parser.add_argument("--boxes", action="store_true", help="also show which file holds which box of a tensor")
    parser.add_argument("--summary", action="store_true", help="no list of tensors, only sums")
    parser.add_argument("--config", action="store_true", help="also show the settings of the run that wrote it")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    return parser.parse_args(arguments)


def print_contents(contents: CheckpointContents, args: argparse.Namespace) -> None:
    """Print a checkpoint's contents, as far as the arguments ask for."""
    if args.json:
        print(json.dumps(contents_as_json(contents, args.match)))
        return
    chosen = contents.matching_tensors(args.match)
    print("\n".join([*checkpoint_heading_lines(contents), *sibling_checkpoint_lines(args.path, contents)]))
    if not args.summary:
        print("\n".join(["", *tensor_table(chosen, boxes=args.boxes)]))
    values = {name: value for name, value in contents.values.items() if matches_pattern(name, args.match)}
    print(
        "\n".join(
            ["", *(f"{name} = {short_json(value)}" for name, value in values.items()), *group_total_lines(contents)]
        )
    )
    if args.match:
        print(
            f"shown: {len(chosen)} of {len(contents.tensors)} tensors, {bytes_with_unit_text(sum(one.size for one in chosen))}"
        )
    if args.config:
        print("\n".join(["", *(f"{name} = {short_json(value)}" for name, value in sorted(contents.settings.items()))]))


def checkpoint_heading_lines(contents: CheckpointContents) -> list[str]:
    """Return lines with format, iteration, ranks and files of a checkpoint."""
    facts = [
        f"of {contents.checkpoint_format}",
        *([f"iteration {contents.iteration}"] if contents.iteration is not None else []),
        *([f"written by {plural_count_text(contents.world_size, 'rank')}"] if contents.world_size is not None else []),
        *(
            [
                f"{plural_count_text(len(contents.files), 'file')} of {bytes_with_unit_text(sum(contents.files.values()))}"
            ]
            if contents.files
            else []
        ),
    ]
    return [
        f"{contents.path}: {', '.join(facts)}",
        *(f"  {name}  {bytes_with_unit_text(size)}" for name, size in contents.files.items()),
    ]


def sibling_checkpoint_lines(path: str, contents: CheckpointContents) -> list[str]:
    """Return lines on the other iterations and damaged checkpoints in a --save folder of this project; empty otherwise."""
    if contents.checkpoint_format != OWN or os.path.abspath(path) == os.path.abspath(contents.path):
        return []
    tree = scan_checkpoint_folder(path)
    here = ", ".join(str(step.iteration) for step in sorted(tree.steps, key=lambda step: step.iteration))
    return [f"iterations in {path}: {here}"] * bool(tree.steps) + [f"damaged: {text}" for _, text in tree.damaged]


def tensor_table(tensors: Sequence[TensorEntry], *, boxes: bool) -> list[str]:
    """Return a line for each tensor and, with `boxes`, for each of its boxes."""
    width = max((len(one.name) for one in tensors), default=0)
    lines = []
    for one in tensors:
        shape = "x".join(map(str, one.shape)) or "scalar"
        cut = f"  {len(one.places)} boxes" if len(one.places) > 1 else ""
        lines.append(f"{one.name:<{width}}  {one.dtype:<5} {shape:<16} {bytes_with_unit_text(one.size):>10}{cut}")
        if boxes:
            lines += [
                f"    {place.file}  [{', '.join(f'{low}:{low + size}' for low, size in zip(place.offset, place.shape, strict=True))}]"
                for place in one.places
            ]
    return lines


def group_total_lines(contents: CheckpointContents) -> list[str]:
    """Return a line for each group of tensors, and one for all."""
    rows = [(name, *counts) for name, counts in contents.totals_by_group().items()]
    total = ("all", len(contents.tensors), sum(one.elements for one in contents.tensors), contents.total_bytes)
    return [
        f"{name:<24} {count:>6} tensors {elements:>16,} elements {bytes_with_unit_text(size):>10}"
        for name, count, elements, size in (*rows, total)
    ]


def short_json(value: Any) -> str:
    """Return a value as JSON, truncated."""
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def print_native_without_torch(args: argparse.Namespace) -> bool:
    """Print a checkpoint of our own format, without importing torch. Return whether it is one."""
    try:
        folder = native_checkpoint_folder(args.path, args.ckpt_step)
        if folder is not None:
            print_contents(native_contents(folder), args)
    except (CheckpointError, OSError) as error:
        sys.exit(f"inspect.py: {error}")
    return folder is not None


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the contents."""
    install_interrupt_excepthook()
    args = parse_arguments(arguments)
    if print_native_without_torch(args):
        return
    from megatron.verify.compare.foreign_contents import foreign_checkpoint_contents  # imports torch

    try:
        print_contents(foreign_checkpoint_contents(args.path, args.ckpt_step), args)
    except (CheckpointError, OSError) as error:
        sys.exit(f"inspect.py: {error}")
