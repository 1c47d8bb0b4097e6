"""Write the weights of a checkpoint as a Hugging Face folder, with the files of its tokenizer.

    megatron checkpoint export --load checkpoints --save exported --dtype bfloat16
    megatron checkpoint export --load checkpoints --save exported --tokenizer Qwen2.5-0.5B

Memory holds one tensor. The folder appears when it is complete, and is read again and compared with the source. The
tokenizer comes from --tokenizer, else from where the run's own settings say; what cannot be found is told.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.cli.tool_parser import ToolArgumentParser, add_ckpt_step
from megatron.core.config.flags.declare import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.rewrite import CastSource
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.families import hf
from megatron.core.families.registry import FAMILIES
from megatron.core.models.parameter_names import WORD_EMBEDDING
from megatron.training.checkpoint.export import export_hf_with_tokenizer
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.launch.launch_info import install_interrupt_excepthook
from megatron.verify.compare.checkpoints import compare_sources
from megatron.verify.compare.contents import bytes_with_unit_text

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_and_compare(args: argparse.Namespace) -> str:
    """Export the checkpoint, and compare the result with it. Return what was done, in words."""
    started = time.perf_counter()
    opened = open_checkpoint(args.load, args.ckpt_step)
    source: CheckpointSource = CastSource(opened, DTYPES[args.dtype]) if args.dtype else opened
    family, tokenizer = export_hf_with_tokenizer(source, args.save, family=args.family, like=args.tokenizer)
    weights = [name for name in source.formats if name.startswith("model.")]
    again = hf.open_hf_folder(args.save, {"true_vocab_size": source.formats[f"model.{WORD_EMBEDDING}"].shape[0]})
    unlike = [str(one) for one in compare_sources(again, source, patterns=("model.*",))]
    if unlike:
        raise CheckpointError(f"{args.save} does not hold what {source.where} holds; do not use it", unlike)
    size = sum(path.stat().st_size for path in Path(args.save).iterdir())
    return (
        f"{source.where} -> {args.save}: {family.name}, {len(weights)} tensors, {bytes_with_unit_text(size)}, compared, "
        f"{time.perf_counter() - started:.1f} s\n{tokenizer}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Export, and print what was done."""
    install_interrupt_excepthook()
    parser = ToolArgumentParser(description=__doc__)
    parser.add_argument(
        "--load", required=True, metavar="DIR", help="a checkpoint's folder, or a --save folder, of any format"
    )
    add_ckpt_step(parser)
    parser.add_argument(
        "--save", required=True, type=Path, metavar="DIR", help="folder to write; it must not be there yet"
    )
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="Hugging Face folder whose tokenizer files and token ids are carried over"
    )
    parser.add_argument(
        "--family", choices=FAMILIES, help="architecture (default: the source's, or the first that fits)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are)")
    args = parser.parse_args(arguments)
    try:
        print(export_and_compare(args))
    except (CheckpointError, ConfigError, OSError) as error:
        sys.exit(f"export.py: {error}")
