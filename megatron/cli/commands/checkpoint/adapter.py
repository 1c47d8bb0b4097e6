"""Export adapters for PEFT, import them, merge them into the weights of their base, or take them out again.

    megatron checkpoint adapter export --adapter checkpoints/lora --save my_adapter --base meta-llama/Llama-3.1-8B
    megatron checkpoint adapter import --adapter my_adapter --base Llama-3.1-8B --save checkpoints/from_peft
    megatron checkpoint adapter merge --adapter my_adapter --base Llama-3.1-8B --save merged
    megatron checkpoint adapter unmerge --adapter my_adapter --base merged --save base_again

--adapter is a folder of PEFT's or a checkpoint of a run with adapters, --base a network in any format. merge computes W + (alpha / r) B A
in fp32 or wider and rounds once; a merged network is written in the format of its base, unless --saver says otherwise. Weights that
were rounded to 16 bits are not had back to the last bit by unmerge.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.adapters.files import (
    BASE,
    InMemoryAdapterSource,
    LoadedAdapter,
    MergedAdapterSource,
    read_native_adapter_checkpoint,
)
from megatron.adapters.peft_export import write_peft_folder
from megatron.adapters.saved import require_matching_base, source_base_hash
from megatron.cli.commands.checkpoint.export import DTYPES
from megatron.cli.tool_parser import ToolArgumentParser
from megatron.core.config.flags.declare import ConfigError, config_to_flat_dict
from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.rewrite import CastSource, rewrite_checkpoint
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.families.hf_folder import is_hf_checkpoint
from megatron.core.families.tokenizer_files import tokenizer_settings_of_folder
from megatron.training.checkpoint.adapters import open_adapters
from megatron.training.checkpoint.export import export_hf_with_tokenizer
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.launch.launch_info import install_interrupt_excepthook

OWN, PUBLISHED = "own", "hf"


def open_adapters_for_base(base: CheckpointSource, adapter: str, *, merging: bool = False) -> LoadedAdapter:
    """Open the adapters in a folder; `CheckpointError` if they are another base's, by shapes and hash, or else name.

    merging: take those, too, that can only be merged.
    """
    adapters = open_adapters(adapter, model_config_from_settings(base.settings), merging=merging)
    model, known = adapters.model, adapters.base.get("hash") is not None
    mine = {
        "hash": source_base_hash(base, model.adapter, reward_head=model.reward_head) if known else None,
        "where": base.where,
    }
    require_matching_base(adapters, mine)
    return adapters


def export_adapters(args: argparse.Namespace) -> str:
    """Write the adapters of a run's checkpoint as a PEFT folder. Return what was done, in words."""
    adapters = read_native_adapter_checkpoint(open_checkpoint(args.adapter, args.ckpt_step))
    write_peft_folder(adapters, args.save, base=args.base or adapters.base.get("where"))
    return _adapters_summary_text(adapters, f"{args.save} (PEFT)")


def import_adapters(args: argparse.Namespace) -> str:
    """Write a PEFT folder as a checkpoint of a run with adapters, at iteration 0. Return what was done, in words."""
    base = open_checkpoint(args.base, args.ckpt_step)
    adapters = open_adapters_for_base(base, args.adapter)
    source = InMemoryAdapterSource(adapters)
    source.values[BASE] = {"hash": source_base_hash(base, adapters.model.adapter), "where": base.where}
    source.values |= {name: value for name, value in base.values.items() if name == "run.tokenizer"}
    path = rewrite_checkpoint(
        source, args.save, iteration=0, settings={**_run_settings_of_source(base), **source.settings}
    )
    return _adapters_summary_text(adapters, str(path))


def merge_adapters(args: argparse.Namespace) -> str:
    """Write a base with adapters merged into its weights, or (unmerge) subtracted. Return what was done, in words."""
    base = open_checkpoint(args.base, args.ckpt_step)
    taken_out = args.command == "unmerge"
    adapters = (
        open_adapters(args.adapter, model_config_from_settings(base.settings), merging=True)
        if taken_out
        else open_adapters_for_base(base, args.adapter, merging=True)
    )
    source: CheckpointSource = MergedAdapterSource(base, adapters, sign=-1.0 if taken_out else 1.0)
    source = CastSource(source, DTYPES[args.dtype]) if args.dtype else source
    if (args.saver or (PUBLISHED if is_hf_checkpoint(base.where) else OWN)) == PUBLISHED:
        like = base.where if is_hf_checkpoint(base.where) else None
        _, tokenizer = export_hf_with_tokenizer(source, args.save, like=like)
        done = _adapters_summary_text(adapters, f"{args.save} (Hugging Face)")
        return f"{done}; {tokenizer}{_quantized_base_note(adapters)}"
    iteration = base.values.get("run.progress", {}).get("iteration", 0)
    path = rewrite_checkpoint(source, args.save, iteration=iteration, settings=_run_settings_of_source(source))
    return _adapters_summary_text(adapters, str(path)) + _quantized_base_note(adapters)


def _quantized_base_note(adapters: LoadedAdapter) -> str:
    """Return a note for adapters that were trained on a quantized base, else ""."""
    format = adapters.model.adapter.lora_base_quantization
    if format == "none":
        return ""
    return f"\nthey were trained on this base in {format}, and are in its weights as they were before: evaluate what was merged"


def _run_settings_of_source(source: CheckpointSource) -> dict[str, Any]:
    """Return a run's settings for what a source holds; what its format leaves out has its default."""
    network = (
        {}
        if "architecture" in source.settings and not is_hf_checkpoint(source.where)
        else config_to_flat_dict(model_config_from_settings(source.settings))
    )
    tokenizer = tokenizer_settings_of_folder(Path(source.where)) if is_hf_checkpoint(source.where) else {}
    return {**source.settings, **network, **tokenizer}


def _adapters_summary_text(adapters: LoadedAdapter, target: str) -> str:
    ranks = sorted({pair.rank for pair in adapters.pairs})
    whole = f", {len(adapters.saved)} whole parameters" if adapters.saved else ""
    return f"{adapters.where}: {len(adapters.pairs)} adapters of rank {', '.join(map(str, ranks))}{whole} -> {target}"


COMMANDS = {
    "export": (export_adapters, "adapters of a run, as a folder that PEFT loads"),
    "import": (import_adapters, "a folder of PEFT's, as a checkpoint of a run with adapters"),
    "merge": (merge_adapters, "a base with adapters in its weights"),
    "unmerge": (merge_adapters, "the base of a network that was merged"),
}


def parser() -> argparse.ArgumentParser:
    """Make the tool's argument parser."""
    made = ToolArgumentParser(description=__doc__)
    made.add_argument(
        "command", choices=COMMANDS, help="; ".join(f"{name}: {what}" for name, (_, what) in COMMANDS.items())
    )
    made.add_argument(
        "--adapter", required=True, metavar="DIR", help="a folder of PEFT's, or a checkpoint of a run with adapters"
    )
    made.add_argument(
        "--base",
        metavar="DIR",
        help="the network that the adapters belong to (unmerge: the merged one); export: what the folder is to call it",
    )
    made.add_argument("--save", required=True, type=Path, metavar="DIR", help="folder to write")
    made.add_argument(
        "--ckpt-step", type=int, metavar="N", help="iteration to read, where a folder has several (default: the newest)"
    )
    made.add_argument("--saver", choices=(OWN, PUBLISHED), help="merge, unmerge: format (default: the base's)")
    made.add_argument("--dtype", choices=DTYPES, help="merge, unmerge: of the weights (default: as they are)")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, and print what was done."""
    install_interrupt_excepthook()
    made = parser()
    args = made.parse_args(arguments)
    if args.base is None and args.command != "export":
        made.error(f"{args.command} needs the network that the adapters belong to; give --base")
    if (args.saver or args.dtype) and args.command in ("export", "import"):
        made.error(f"--saver and --dtype are of networks, and {args.command} writes adapters; leave them out")
    try:
        print(COMMANDS[args.command][0](args))
    except (CheckpointError, ConfigError, OSError) as error:
        sys.exit(f"adapter.py: {error}")
