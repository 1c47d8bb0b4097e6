"""Convert a checkpoint between Hugging Face folders, this project's format and Megatron-LM's, from any to any.

    python tools/checkpoint/convert.py --load Qwen2.5-0.5B --save checkpoints/qwen
    python tools/checkpoint/convert.py --load checkpoints/qwen --save exported --saver hf --like Qwen2.5-0.5B --verify
    python tools/checkpoint/convert.py --load Qwen2.5-0.5B --save for_megatron --saver megatron --target-tensor-parallel-size 2

Runs on one processor, without torch.distributed, and holds one or two tensors in memory, however large the model is.
Of a Hugging Face folder the weights are all there is; where the source has more (optimizer, counters), this project's
own format keeps it. For Megatron weights alone are written. All but Megatron's files of ranks are whole: they load under any layout.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from megatron.cli.commands.checkpoint.export import DTYPES
from megatron.cli.tool_parser import ToolArgumentParser, add_ckpt_step
from megatron.core.config.flags.declare import ConfigError, config_to_flat_dict
from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.rewrite import CastSource, rewrite_checkpoint
from megatron.core.dist_checkpointing.saved import NativeCheckpoint
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.families import hf_export
from megatron.core.families.registry import FAMILIES
from megatron.core.families.tokenizer_files import tokenizer_settings_of_folder
from megatron.core.models.parameter_names import WORD_EMBEDDING
from megatron.core.parallel.boxes import Box
from megatron.megatron_lm.checkpoint.export import (
    extra_flags_for_megatron,
    write_legacy_checkpoint,
    write_torch_dist_checkpoint,
)
from megatron.megatron_lm.checkpoint.open import read_megatron_arguments
from megatron.training.checkpoint.export import export_hf_with_tokenizer
from megatron.training.checkpoint.foreign_settings import foreign_checkpoint_settings
from megatron.training.checkpoint.formats import HUGGING_FACE, MEGATRON_LM, NATIVE, open_checkpoint
from megatron.training.launch.launch_info import install_interrupt_excepthook
from megatron.verify.compare.checkpoints import compare_sources

OWN, PUBLISHED, MEGATRON = "own", "hf", "megatron"
TORCH_DIST, TORCH = "torch_dist", "torch"
CHECKPOINT_FORMATS = {OWN: NATIVE, PUBLISHED: HUGGING_FACE, MEGATRON: MEGATRON_LM}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# Flags of Megatron's tool that have nothing to set here, and why; they are accepted and named.
NEEDLESS = {
    "--max-queue-size": "reader and writer are one process",
    "--megatron-path": "Megatron is not imported",
    "--loader-transformer-impl": "the names in the file tell",
    "--no-checking": "names and shapes are always checked",
}


class ProgressReportingSource:
    """A source that advances a progress bar by the bytes that are read from it."""

    def __init__(self, source: CheckpointSource, bar: tqdm) -> None:
        self.where, self.formats = source.where, source.formats
        self.values, self.settings = source.values, source.settings
        self._source, self._bar = source, bar

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor, [*box.shape], and advance the progress bar by its bytes; see `Source`."""
        values = self._source.read(name, box)
        self._bar.update(values.nbytes)
        return values


def open_source_to_convert(args: argparse.Namespace) -> tuple[str, CheckpointSource]:
    """Open what --load names: (format, source). `CheckpointError` if it holds no checkpoint."""
    given = {"true_vocab_size": args.true_vocab_size} if args.true_vocab_size else {}
    formats = [args.loader] if args.loader else list(CHECKPOINT_FORMATS)
    for name in formats:
        place = CHECKPOINT_FORMATS[name].find(args.load, args.ckpt_step)
        if place is not None:
            return name, CHECKPOINT_FORMATS[name].open(place, given)
    if args.loader:
        raise CheckpointError(f"--load {args.load} holds no checkpoint of the format {args.loader}")
    return "", open_checkpoint(args.load, args.ckpt_step, given)  # says what it looked for


def require_matching_model_type(source: CheckpointSource, model_type: str | None) -> None:
    """Raise `ConfigError` if the checkpoint is not of the --model-type."""
    architecture = str(source.settings.get("architecture", "gpt")).upper()
    if model_type is not None and model_type != architecture:
        raise ConfigError(f"--model-type {model_type}: {source.where} holds a {architecture}")


def write_converted(
    source: CheckpointSource, args: argparse.Namespace, *, checkpoint_format: str
) -> tuple[Path, list[str]]:
    """Write the source as --saver says. checkpoint_format: the source's. Return (folder, remarks on idle flags)."""
    sizes = {
        "--target-tensor-parallel-size": args.target_tensor_parallel_size,
        "--target-pipeline-parallel-size": args.target_pipeline_parallel_size,
    }
    iteration = (
        args.iteration if args.iteration is not None else source.values.get("run.progress", {}).get("iteration", 0)
    )
    if args.saver == MEGATRON:
        return write_for_megatron(source, args, iteration)
    remarks = [
        f"{flag} {size} has nothing to cut: what is written is whole, and loads under any layout"
        for flag, size in sizes.items()
        if size and size > 1
    ]
    if args.saver == PUBLISHED:
        tokenizer = megatron_run_settings(args) if checkpoint_format == MEGATRON else {}
        _, remark = export_hf_with_tokenizer(
            source, args.save, family=args.family, like=args.like, shard_bytes=args.max_shard_size, tokenizer=tokenizer
        )
        return args.save, [*remarks, remark]
    settings = dict(source.settings)
    if checkpoint_format != OWN:  # what it leaves out has its default
        settings = {**settings, **config_to_flat_dict(model_config_from_settings(settings))}
        settings |= (
            tokenizer_settings_of_folder(Path(source.where))
            if checkpoint_format == PUBLISHED
            else megatron_run_settings(args)
        )
    num_files = max(1, math.ceil(sum(one.num_bytes for one in source.formats.values()) / args.max_shard_size))
    ranks = source.description.world_size if isinstance(source, NativeCheckpoint) else 1
    return rewrite_checkpoint(
        source, args.save, iteration=iteration, settings=settings, num_files=num_files, world_size=ranks
    ), remarks


def megatron_run_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return a Megatron checkpoint's settings beside its network: tokenizer, sequence length, loss averaging."""
    network, tokenizer = foreign_checkpoint_settings(args.load, args.ckpt_step) or ({}, {})
    if ids := network.get("null_tokenizer_ids"):
        tokenizer |= {"vocab_size": ids, "true_vocab_size": ids}
    mean = read_megatron_arguments(args.load, args.ckpt_step).get("calculate_per_token_loss")
    return tokenizer | ({"calculate_per_token_loss": mean} if isinstance(mean, bool) else {})


def write_for_megatron(source: CheckpointSource, args: argparse.Namespace, iteration: int) -> tuple[Path, list[str]]:
    """Write in one of Megatron's formats. Return (folder, remarks: flags for Megatron)."""
    sizes = [args.target_tensor_parallel_size or 1, args.target_pipeline_parallel_size or 1]
    for_ranks = max(sizes) > 1 or source.settings.get("architecture") == "bert"
    fused = args.saver_transformer_impl != "local"
    if (args.ckpt_format or (TORCH if for_ranks else TORCH_DIST)) == TORCH:
        path = write_legacy_checkpoint(
            source, args.save, iteration=iteration, tensor_size=sizes[0], pipeline_size=sizes[1], fused_norms=fused
        )
    else:
        path = write_torch_dist_checkpoint(
            source, args.save, iteration=iteration, tensor_size=sizes[0], fused_norms=fused
        )
    flags = extra_flags_for_megatron(source, sizes[1])
    return path, [
        f"in Megatron: --load {args.save} --use-checkpoint-args --finetune{' ' * bool(flags)}{flags}"
        f"{'' if fused else ' --transformer-impl local'}"
    ]


def verify_converted(source: CheckpointSource, path: Path, saver: str) -> None:
    """Read the target again and compare with the source. Raises `CheckpointError` with everything that differs."""
    target = CHECKPOINT_FORMATS[saver].open(
        path, {"true_vocab_size": source.formats[f"model.{WORD_EMBEDDING}"].shape[0]}
    )
    problems = target.verify() if isinstance(target, NativeCheckpoint) else []
    problems += map(str, compare_sources(source, target, patterns=() if saver == OWN else ("model.*",)))
    if problems:
        raise CheckpointError(f"{path} does not hold what {source.where} holds", problems)


def convert(args: argparse.Namespace) -> str:
    """Convert as the arguments say. Return a line that says what was done."""
    started = time.perf_counter()
    checkpoint_format, source = open_source_to_convert(args)
    require_matching_model_type(source, args.model_type)
    args.saver = args.saver or (OWN if checkpoint_format == PUBLISHED else PUBLISHED)
    if args.saver != PUBLISHED and (args.family or args.like):
        raise ConfigError(f"--family and --like are for --saver {PUBLISHED}; this one is {args.saver}")
    converted = CastSource(source, DTYPES[args.dtype]) if args.dtype else source
    kept = "" if args.saver == OWN else "model."
    size = sum(one.num_bytes for name, one in converted.formats.items() if name.startswith(kept))
    with tqdm(total=size, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        path, remarks = write_converted(
            ProgressReportingSource(converted, bar), args, checkpoint_format=checkpoint_format
        )
    seconds = time.perf_counter() - started
    for remark in remarks:
        print(remark)
    if args.verify:
        verify_converted(converted, path, args.saver)
    count = sum(one.num_elements for name, one in source.formats.items() if name.startswith("model."))
    words = f"{count:,} parameters, {size / 1e9:.3g} GB in {seconds:.1f} s ({size / 1e9 / seconds:.2g} GB/s)"
    return f"{source.where} ({CHECKPOINT_FORMATS[checkpoint_format].name}): {words} -> {path} ({CHECKPOINT_FORMATS[args.saver].name}){', verified' if args.verify else ''}"


def parse_shard_size(word: str) -> int:
    """Parse a size such as `5GB` or `500MB` into bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|TB)", word.strip(), re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{word} is no size; write it as 5GB or 500MB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def parser() -> argparse.ArgumentParser:
    """Make the tool's argument parser."""
    made = ToolArgumentParser(description=__doc__)
    group = made.add_argument_group("what is read")
    group.add_argument("--load", "--load-dir", required=True, type=Path, metavar="DIR", help="folder of the checkpoint")
    group.add_argument("--loader", choices=CHECKPOINT_FORMATS, help="its format (default: as it looks)")
    add_ckpt_step(group)
    group.add_argument("--model-type", choices=("GPT", "BERT", "T5"), help="refuse any other")
    group.add_argument(
        "--true-vocab-size",
        type=int,
        metavar="N",
        help="ids of the tokenizer; rows of the embedding behind them are left out",
    )
    group = made.add_argument_group("what is written")
    group.add_argument(
        "--save",
        "--save-dir",
        required=True,
        type=Path,
        metavar="DIR",
        help="folder to write; a Hugging Face folder must not be there yet",
    )
    group.add_argument(
        "--saver", choices=CHECKPOINT_FORMATS, help="its format (default: own, or hf for what is not of Hugging Face)"
    )
    group.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are)")
    group.add_argument(
        "--max-shard-size",
        type=parse_shard_size,
        default=hf_export.SHARD_BYTES,
        metavar="SIZE",
        help="of one file (default: 5GB)",
    )
    group.add_argument(
        "--iteration",
        type=int,
        metavar="N",
        help="own, megatron: number of the checkpoint (default: the source's, or 0)",
    )
    group.add_argument(
        "--family", choices=FAMILIES, help="hf: architecture (default: the source's, or the first that fits)"
    )
    group.add_argument(
        "--like", type=Path, metavar="DIR", help="hf: folder whose tokenizer files and token ids are carried over"
    )
    group.add_argument(
        "--ckpt-format",
        choices=(TORCH_DIST, TORCH),
        help="megatron: whole tensors, which any layout reads, or files "
        "of ranks (default: torch for more ranks than one and for a BERT, else torch_dist)",
    )
    group.add_argument(
        "--target-tensor-parallel-size",
        type=int,
        metavar="N",
        help="megatron: ranks that share matrices; others are whole",
    )
    group.add_argument(
        "--target-pipeline-parallel-size",
        type=int,
        metavar="N",
        help="megatron: ranks that share layers; others are whole",
    )
    group.add_argument(
        "--saver-transformer-impl",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
        help="megatron: whose names its norms have",
    )
    group.add_argument("--verify", action="store_true", help="read the result again and compare every byte")
    group = made.add_argument_group("accepted for old command lines, and named as needless")
    for flag, reason in NEEDLESS.items():
        group.add_argument(flag, nargs="?", const="", default=None, metavar="VALUE", help=reason)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert, and print what was done."""
    install_interrupt_excepthook()
    args = parser().parse_args(arguments)
    given: dict[str, Any] = vars(args)
    for flag, reason in NEEDLESS.items():
        if given[flag[2:].replace("-", "_")] is not None:
            print(f"{flag} has nothing to set: {reason}")
    try:
        print(convert(args))
    except (CheckpointError, ConfigError, OSError) as error:
        sys.exit(f"convert.py: {error}")
