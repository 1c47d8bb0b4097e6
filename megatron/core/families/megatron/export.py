"""Write Megatron's old format, for its own programmes: `mp_rank_XX[_YYY]/model_optim_rng.pt`, weights only.

Names and row orders are Megatron Core's of checkpoint_version 3: what `--ckpt-format torch` saves today.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.flags import from_values
from megatron.core.config.model import ModelConfig
from megatron.core.dist_checkpointing.source import Source
from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.core.families.megatron.expressible import without_counterpart
from megatron.core.families.megatron.names import Layout, cut, divided_over, is_over_vocabulary
from megatron.core.parallel.boxes import whole

_WORDS = "embedding.word_embeddings.weight"
_FUSED = ((".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"), (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"))
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_TRACKER = "latest_checkpointed_iteration.txt"


def write_legacy(source: Source, folder: str | Path, *, iteration: int = 0, tensor_size: int = 1, pipeline_size: int = 1,
                 fused_norms: bool = True) -> Path:
    """Write the weights of a GPT or a BERT for so many tensor and pipeline ranks. Returns the iteration's folder.

    fused_norms: name norms as Transformer Engine's layers do (Megatron's default), not as `--transformer-impl local` does.
    Raises `CheckpointError` when Megatron has no such network, the ranks cannot share it, or the folder has that iteration
    already.
    """
    layout = Layout.of(source.settings, 3.0)
    names = [name.removeprefix("model.") for name in source.formats if name.startswith("model.")]
    layers = 1 + max(int(found[1]) for name in names for found in [_LAYER.search(name)] if found)
    problems = _unwritable(source, names)
    problems += [f"{name}: {reason} cannot be divided over {tensor_size} tensor ranks" for name in names
                if (reason := divided_over(name, tensor_size, layout))]
    if layers % pipeline_size:
        problems.append(f"{layers} layers cannot be divided over {pipeline_size} pipeline ranks")
    target = Path(folder) / f"iter_{iteration:07d}"
    if target.exists():
        problems.append(f"{target} is there already; move it away, or choose another folder")
    if problems:
        raise CheckpointError(f"{source.where} cannot be written for Megatron", problems)
    made = target.with_suffix(".tmp")
    shutil.rmtree(made, ignore_errors=True)
    for p in range(pipeline_size):
        held = {name: _shards(source, name, tensor_size, layout) for name in names if _stage(name, layers, pipeline_size) == p}
        if pipeline_size > 1 and p == pipeline_size - 1 and not source.settings.get("untie_embeddings_and_output_weights"):
            held["output_layer.weight"] = _shards(source, _WORDS, tensor_size, layout)
        for t in range(tensor_size):
            place = made / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline_size > 1 else ""))
            place.mkdir(parents=True)
            model = {_their_name(name, layers // pipeline_size, fused_norms): shards[t] for name, shards in held.items()}
            torch.save({"args": _arguments(source, tensor_size, pipeline_size, iteration), "checkpoint_version": 3.0,
                        "iteration": iteration, "model": model}, place / "model_optim_rng.pt")
    os.rename(made, target)
    tracker = Path(folder) / _TRACKER
    tracker.with_suffix(".tmp").write_text(str(iteration), encoding="ascii")
    tracker.with_suffix(".tmp").replace(tracker)
    return target


def _unwritable(source: Source, names: list[str]) -> list[str]:
    """Why Megatron's programmes could not build the network, a line each."""
    if len({name.partition(".")[0] for name in names} & {"encoder", "decoder"}) > 1:
        return ["a T5 is read from Megatron's files, and not written"]
    return without_counterpart(from_values(ModelConfig, source.settings).resolve())


def _shards(source: Source, name: str, ranks: int, layout: Layout) -> list[Tensor]:
    """What each tensor rank holds of a parameter, in memory of its own."""
    tensor = source.read(f"model.{name}", whole(source.formats[f"model.{name}"].shape))
    if is_over_vocabulary(name):
        padding = _padded(tensor.shape[0], source.settings, ranks) - tensor.shape[0]
        tensor = torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])])
    return [shard.clone() for shard in cut(name, tensor, ranks, layout)]


def _padded(rows: int, settings: Mapping[str, Any], ranks: int) -> int:
    multiple = int(settings.get("make_vocab_size_divisible_by") or 128) * ranks
    return math.ceil(rows / multiple) * multiple


def _stage(name: str, layers: int, pipeline_size: int) -> int:
    found = _LAYER.search(name)
    if found:
        return int(found[1]) * pipeline_size // layers
    return 0 if name.startswith("embedding.") else pipeline_size - 1


def _their_name(name: str, layers_of_a_stage: int, fused: bool) -> str:
    """Core's name, with layers counted from the first of the stage."""
    name = _LAYER.sub(lambda found: f".layers.{int(found[1]) % layers_of_a_stage}.", name)
    for ours, theirs in _FUSED if fused else ():
        name = name.replace(ours, theirs)
    return name


def _arguments(source: Source, tensor_size: int, pipeline_size: int, iteration: int) -> types.SimpleNamespace:
    plain = {name: value for name, value in source.settings.items()
             if value is None or isinstance(value, (bool, int, float, str))}
    rows = source.formats[f"model.{_WORDS}"].shape[0]
    return types.SimpleNamespace(**{
        "untie_embeddings_and_output_weights": False, **plain, "padded_vocab_size": _padded(rows, source.settings, tensor_size), "iteration": iteration,
        "tensor_model_parallel_size": tensor_size, "pipeline_model_parallel_size": pipeline_size,
        "consumed_train_samples": 0, "consumed_valid_samples": 0, "use_mcore_models": True})
