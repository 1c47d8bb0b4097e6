"""Rewrite a checkpoint into another number of files, with weights of another dtype, or with the weights alone.

    megatron checkpoint reshard --load checkpoints --save smaller --weights-only --dtype bfloat16
    megatron checkpoint reshard --load checkpoints/iter_0001000 --save balanced --num-files 16

Loading a checkpoint under another layout needs none of this: it holds whole tensors in boxes, and every rank reads the
boxes that it needs. The result is compared with the source, value by value, before the tool ends.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from megatron.cli.commands.checkpoint.export import DTYPES
from megatron.cli.tool_parser import ToolArgumentParser, add_ckpt_step
from megatron.core.config.flags.declare import config_to_flat_dict
from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.rewrite import CastSource, rewrite_checkpoint
from megatron.core.dist_checkpointing.saved import NativeCheckpoint, open_native_checkpoint
from megatron.core.dist_checkpointing.source import CheckpointSource, FilteredCheckpointSource
from megatron.core.dist_checkpointing.state_hooks import OPTIONAL
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.launch.launch_info import install_interrupt_excepthook
from megatron.verify.compare.checkpoints import compare_sources
from megatron.verify.compare.contents import bytes_with_unit_text, plural_count_text

KEPT = ("run.config", "run.tokenizer", "run.progress", OPTIONAL)  # what weights keep; the others go with the optimizer


def filtered_and_cast_source(source: CheckpointSource, args: argparse.Namespace) -> CheckpointSource:
    """The source as it is to be written; its weights alone load with --finetune, or with --no-load-optim --no-load-rng."""

    def is_name_kept(name: str) -> bool:
        if name in source.formats:
            return name.startswith("model.")
        return not name.startswith("run.") or name in KEPT

    chosen = FilteredCheckpointSource(source, is_name_kept) if args.weights_only else source
    return CastSource(chosen, DTYPES[args.dtype]) if args.dtype else chosen


def rewrite_and_compare(args: argparse.Namespace) -> str:
    """Rewrite the checkpoint, and compare the result with it. Return what was done, in words."""
    started = time.perf_counter()
    opened = open_checkpoint(args.load, args.ckpt_step)
    if isinstance(opened, NativeCheckpoint) and (problems := opened.verify()):
        raise CheckpointError(f"{opened.where} is damaged, and is not rewritten", problems)
    source = filtered_and_cast_source(opened, args)
    settings: dict[str, Any] = dict(source.settings)
    if "architecture" not in settings:  # what a format leaves out has its default
        settings |= config_to_flat_dict(model_config_from_settings(settings))
    iteration = source.values.get("run.progress", {}).get("iteration", 0) if args.iteration is None else args.iteration
    path = rewrite_checkpoint(
        source,
        args.save,
        iteration=iteration,
        settings=settings,
        num_files=args.num_files,
        world_size=opened.description.world_size if isinstance(opened, NativeCheckpoint) else 1,
    )
    made = open_native_checkpoint(path)
    unlike = [*made.verify(), *map(str, compare_sources(made, source))]
    if unlike:
        raise CheckpointError(f"{path} does not hold what {source.where} holds; do not use it", unlike)
    return (
        f"{source.where} -> {path}: {plural_count_text(len(made.formats), 'tensor')}, {bytes_with_unit_text(made.size)} in {plural_count_text(len(made.manifest.files), 'file')}, "
        f"verified, {time.perf_counter() - started:.1f} s\nno layout was chosen: every tensor-, pipeline- and data-parallel size loads "
        "it as it is"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite, and print what was done."""
    install_interrupt_excepthook()
    parser = ToolArgumentParser(description=__doc__)
    parser.add_argument(
        "--load", required=True, metavar="DIR", help="a checkpoint's folder, or a --save folder, of any format"
    )
    add_ckpt_step(parser)
    parser.add_argument("--save", required=True, metavar="DIR", help="folder of checkpoints to write into")
    parser.add_argument(
        "--num-files", type=int, default=1, metavar="N", help="files that share the tensors about evenly (default: 1)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights (default: as they are); moments stay as they are"
    )
    parser.add_argument(
        "--weights-only", action="store_true", help="leave optimizer, schedule and random streams behind"
    )
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="number of the new checkpoint (default: the old one's)"
    )
    args = parser.parse_args(arguments)
    for name, least in (("num_files", 1), ("iteration", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {least}")
    try:
        print(rewrite_and_compare(args))
    except (CheckpointError, OSError) as error:
        sys.exit(f"reshard.py: {error}")
