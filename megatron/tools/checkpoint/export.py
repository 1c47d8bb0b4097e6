"""Write the weights of a checkpoint as a Hugging Face folder, with the files of its tokenizer.

    python tools/checkpoint/export.py --load checkpoints --save exported --dtype bfloat16
    python tools/checkpoint/export.py --load checkpoints --save exported --tokenizer Qwen2.5-0.5B

Memory holds one tensor. The folder appears when it is complete, and is read again and compared with the source. The
tokenizer comes from --tokenizer, else from where the run's own settings say; what cannot be found is told.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.core.config.flags import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.rewrite import CastSource
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.families import hf
from megatron.core.families.registry import FAMILIES
from megatron.core.models.parameter_names import WORD_EMBEDDING
from megatron.tools.parser import ToolArgumentParser, add_ckpt_step
from megatron.training.checkpoint import export as exporting
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.launch.launch_info import install_interrupt_excepthook
from megatron.trust.compare.checkpoints import compare_sources
from megatron.trust.compare.contents import bytes_with_unit_text

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KNOWN = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)  # one of them makes a tokenizer
# Kind of tokenizer -> setting that names a file, and what the file is called in a folder.
FILES = {
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase"), {"vocab_file": "vocab.txt"}),
    **dict.fromkeys(
        ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"),
        {"tokenizer_model": "tokenizer.model"},
    ),
    "HuggingFaceTokenizer": {"tokenizer_model": "tokenizer.json"},
}


def tokenizer_folder(source: CheckpointSource) -> Path | None:
    """Return the folder of the tokenizer that the settings name, or the source if it is one; None if neither is."""
    places = (Path(place) for place in (source.settings.get("tokenizer_model"), source.where) if place)
    return next((place for place in places if any((place / name).is_file() for name in KNOWN)), None)


def copy_configured_tokenizer_files(settings: Mapping[str, Any], folder: Path) -> list[str]:
    """Copy the single tokenizer files that the settings name, if they exist. Return their names in the folder."""
    copied = []
    for name, target in FILES.get(settings.get("tokenizer_type") or "", {}).items():
        if settings.get(name) and Path(settings[name]).is_file():
            shutil.copyfile(settings[name], folder / target)
            copied.append(target)
    return copied


def export_and_compare(args: argparse.Namespace) -> str:
    """Export the checkpoint, and compare the result with it. Return what was done, in words."""
    started = time.perf_counter()
    opened = open_checkpoint(args.load, args.ckpt_step)
    source: CheckpointSource = CastSource(opened, DTYPES[args.dtype]) if args.dtype else opened
    like = args.tokenizer or tokenizer_folder(opened)
    family = exporting.export_hf_with_special_tokens(source, args.save, family=args.family, like=like)
    copied = [] if like else copy_configured_tokenizer_files(source.settings, args.save)
    weights = [name for name in source.formats if name.startswith("model.")]
    again = hf.open_hf_folder(args.save, {"true_vocab_size": source.formats[f"model.{WORD_EMBEDDING}"].shape[0]})
    unlike = [str(one) for one in compare_sources(again, source, patterns=("model.*",))]
    if unlike:
        raise CheckpointError(f"{args.save} does not hold what {source.where} holds; do not use it", unlike)
    tokenizer = (
        f"tokenizer files of {like}"
        if like
        else f"tokenizer files {', '.join(copied)}"
        if copied
        else ("no tokenizer files: the run's are not here; give their folder with --tokenizer")
    )
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
