"""Which format a folder of adapters has: PEFT's, or that of a checkpoint of a run that trained them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.adapters import peft
from megatron.adapters.files import LoadedAdapter, read_native_adapter_checkpoint, require_adapters_fit_network
from megatron.adapters.saved import require_same_base_model_name, require_same_vocabulary
from megatron.core.config.adapters import layer_adapter_plans
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families.hf import hf_vocabulary_rows
from megatron.training.checkpoint.formats import open_checkpoint

_MOST_FOLDERS = 10_000  # in that of a run


def open_adapters(
    path: str | Path, model: ModelConfig, *, merging: bool = False, largest_rank: int | None = None
) -> LoadedAdapter:
    """Read a PEFT folder or a checkpoint of a run with adapters; `CheckpointError` if of another network.

    merging: take adapters of matrices, too, that have none in a run. largest_rank: refuse a higher one of a PEFT folder unread.
    """
    if peft.is_peft_folder(path):
        adapters = peft.read_peft_folder(path, model, largest_rank=largest_rank)
    else:
        _require_regular_files(Path(path))
        adapters = read_native_adapter_checkpoint(open_checkpoint(path))
    if not merging:
        require_adapters_fit_network(adapters, model)
    return adapters


def _require_regular_files(folder: Path) -> None:
    """Raise `CheckpointError` if a folder holds a pipe or a device, which might never end, or very many files."""
    for count, (where, _, names) in enumerate(os.walk(folder)):
        for name in names:
            path = Path(where) / name
            if path.exists() and not path.is_file():
                raise CheckpointError(f"{path} is no regular file, and {folder} is no checkpoint of adapters")
        if count >= _MOST_FOLDERS:
            raise CheckpointError(f"{folder} holds more than {_MOST_FOLDERS} folders, and is no checkpoint of adapters")


def adapter_config_of(
    path: str | Path, model: ModelConfig, base: str | None, given: Mapping[str, Any]
) -> tuple[AdapterConfig, bool]:
    """Return the `AdapterConfig` of a folder's adapters, with `freeze` of `model`, and whether settings that are given, by
    field name, make the same ones; `CheckpointError` if they are not of this network or name another base than the folder `base`.
    """
    known = model if model.true_vocab_size else model.with_vocabulary(1, 1)  # before a tokenizer is built
    adapters = open_adapters(path, known)
    if base is not None:
        require_same_base_model_name(adapters, base)
        if known is model or hf_vocabulary_rows(base) is not None:
            require_same_vocabulary(adapters, base)
    theirs = replace(adapters.model.adapter, freeze=model.adapter.freeze)
    both = theirs, replace(theirs, **given)
    plans, others = (
        [layer_adapter_plans(replace(model, adapter=one), plan) for plan in network_layer_plans(model)] for one in both
    )
    return theirs, plans == others and both[0].dora == both[1].dora
