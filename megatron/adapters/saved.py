"""Checkpoints of a run with adapters: they hold what is trained, and the hash of the frozen weights that it belongs to.

--pretrained-checkpoint BASE  ->  frozen weights  ->  hash        --load RUN  ->  adapters, if they were trained on that hash
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.adapters.files import BASE, OUTPUT_LAYER, InMemoryAdapterSource, LoadedAdapter, planned_adapters
from megatron.adapters.peft_config import CONFIG
from megatron.adapters.quantized_base import quantize_dequantize_box
from megatron.core.config.adapters import WHOLE, is_adapter_parameter, is_trained_parameter
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.sharded_state import Tree
from megatron.core.dist_checkpointing.source import CheckpointSource, ShapeAndDtype
from megatron.core.dist_checkpointing.state_hooks import StateHooks
from megatron.core.families.hf_folder import hf_model_name_or_path
from megatron.core.parallel import collectives
from megatron.core.parallel.box_hash import box_hash
from megatron.core.parallel.boxes import Box, whole_box
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import derive_seed
from megatron.core.parallel.spec import (
    is_replicated_over_tensor,
    local_shard_boxes,
    param_spec_of,
    quantized_storage_of,
    tensor_parallel_axis_name,
)

_LENGTHS = ".magnitude"
_OF_A_RUN = re.compile(r"iter_\d+|best|release|/")  # folders of a checkpoint within that of its run


def is_adapter_checkpoint(source: CheckpointSource) -> bool:
    """Whether a checkpoint holds adapters only, without the base network."""
    return BASE in source.values


def trained_weights_only(tree: Tree, config: AdapterConfig) -> Tree:
    """Return the tree without frozen weights; the whole tree in a run without adapters."""
    return {
        name: value
        for name, value in tree.items()
        if not config.has_adapters
        or not name.startswith("model.")
        or is_trained_parameter(name.removeprefix("model."), config)
    }


def base_weights(tree: Tree) -> Tree:
    """Return what a base network fills of a tree: its weights, and DoRA's magnitudes, which start as its row norms."""
    return {name: value for name, value in tree.items() if not is_adapter_parameter(name) or name.endswith(_LENGTHS)}


class SourceWithRowNorms:
    """A base network's `Source` that also gives DoRA's magnitudes, by their adapter names: the row norms of its
    matrices. For matrices that are quantized on load, the norms are those of the dequantized values.
    """

    def __init__(self, source: CheckpointSource, model: ModelConfig) -> None:
        """model: with its adapters."""
        self.where, self.values, self.settings, self._source = source.where, source.values, source.settings, source
        self._config, self._format = model.adapter, model.adapter.lora_base_quantization
        self._rows: dict[str, tuple[str, int, int]] = {}
        for linear, part, (first, size), _ in planned_adapters(model) if model.adapter.dora else ():
            magnitude = f"model.{linear}.adapter.pairs.{part or WHOLE}{_LENGTHS}"
            self._rows[magnitude] = (f"model.{linear}.weight", first, size)
        lengths = {
            name: ShapeAndDtype((size,), source.formats[matrix].dtype) for name, (matrix, _, size) in self._rows.items()
        }
        self.formats: Mapping[str, ShapeAndDtype] = {**source.formats, **lengths}

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor, [*box.shape]; DoRA's magnitudes are computed as row norms of the weight."""
        if name not in self._rows:
            return self._source.read(name, box)
        matrix, first, _ = self._rows[name]
        rows = Box((first + box.offset[0], 0), (box.shape[0], self._source.formats[matrix].shape[1]))
        format = self._format if not is_trained_parameter(matrix.removeprefix("model."), self._config) else "none"
        if format == "none":
            values = self._source.read(matrix, rows)
        else:
            shape = self._source.formats[matrix].shape
            values = quantize_dequantize_box(partial(self._source.read, matrix), rows, shape, format)
        return values.to(torch.promote_types(values.dtype, torch.float32)).square().sum(dim=1).sqrt()


class AdapterState(StateHooks):
    """Saves what is trained and the hash of the frozen weights; loads a base, or adapters that belong to the base loaded before.

    base: hash and origin (`where`) of the frozen weights, the value saved as `BASE`; empty until it is needed.
    """

    def __init__(self, stages: Sequence[nn.Module], mesh: Mesh, model: ModelConfig) -> None:
        self.base: dict[str, Any] = {}
        self._stages, self._mesh, self._model = stages, mesh, model

    def chosen(self, state: Tree) -> Tree:
        """Leave frozen weights out, and add the hash of the base. Collective."""
        return {**trained_weights_only(state, self._model.adapter), BASE: self._known_base()}

    def opened(self, source: CheckpointSource) -> CheckpointSource:
        """Add DoRA's magnitudes to a base; raise `CheckpointError` for adapters of another base. Collective."""
        if not is_adapter_checkpoint(source):
            return SourceWithRowNorms(source, self._model)
        require_same_base_hash(source.values[BASE], self._known_base(), source.where)
        return source

    def targets(self, source: CheckpointSource, state: Tree) -> Tree:
        """Leave out what is not the source's: of adapters the base, of a base the adapters."""
        return (
            trained_weights_only(state, self._model.adapter) if is_adapter_checkpoint(source) else base_weights(state)
        )

    def loaded(self, source: CheckpointSource) -> None:
        """Record a base that was loaded. Collective."""
        if not is_adapter_checkpoint(source):
            self.base = self._base_from(source.where)

    def source_of(self, adapters: LoadedAdapter) -> InMemoryAdapterSource:
        """Return the tensors of adapters in memory; raise `CheckpointError` if they are of another base than that loaded."""
        require_matching_base(adapters, self.base)
        return InMemoryAdapterSource(adapters)

    def _known_base(self) -> dict[str, Any]:
        self.base = self.base or self._base_from("the initial values of --seed")
        return self.base

    def _base_from(self, where: str) -> dict[str, Any]:
        return {"hash": base_weights_hash(self._stages, self._mesh, self._model.adapter), "where": where}


class AdaptersRefused(StateHooks):
    """Refuses adapters in a run that has none."""

    def opened(self, source: CheckpointSource) -> CheckpointSource:
        """Raise `CheckpointError` for a checkpoint of adapters."""
        if is_adapter_checkpoint(source):
            raise CheckpointError(
                f"{source.where} holds adapters without their network; give its flags (--use-checkpoint-args), and the network with "
                "--pretrained-checkpoint"
            )
        return source


def require_matching_base(adapters: LoadedAdapter, mine: Mapping[str, Any], names: Iterable[str] = ()) -> None:
    """Raise `CheckpointError` if adapters are of another base: by its weights' hash, else (PEFT folders) by its name; or of
    another number of tokens. mine: this run's value of `BASE`. names: further names of the base beside its folder's.
    """
    require_same_vocabulary(adapters, str(mine["where"]))
    if adapters.base.get("hash") is not None:
        require_same_base_hash(adapters.base, mine, adapters.where)
    else:
        require_same_base_model_name(adapters, str(mine["where"]), names)


def require_same_vocabulary(adapters: LoadedAdapter, base: str) -> None:
    """Raise `CheckpointError` if a saved embedding has rows for other tokens than that of the base. base: its folder.

    Only of a Hugging Face folder is it known how many rows the embedding had before a tokenizer's size cut it.
    """
    from megatron.core.families.hf import (
        hf_vocabulary_rows,  # asks all families, which a run without adapters does not wait for
    )

    theirs, mine = adapters.vocabulary_rows, hf_vocabulary_rows(base)
    if theirs is not None and theirs != (mine := mine or adapters.model.true_vocab_size or theirs):
        raise CheckpointError(
            f"{adapters.where} holds an embedding or output layer for {theirs} tokens, and {base} has {mine}: tokens were added to the base before the "
            "adapter was trained; give the base with these rows (in transformers: resize_token_embeddings, then save_pretrained)"
        )


def require_same_base_hash(saved: Mapping[str, Any], mine: Mapping[str, Any], where: str) -> None:
    """Raise `CheckpointError` for adapters of other frozen weights. saved, mine: values of `BASE` (hash, where)."""
    if saved.get("hash") != mine["hash"]:
        raise CheckpointError(
            f"{where} holds adapters of another base: they were trained on {saved.get('where')} with hash {saved.get('hash')}, and the "
            f"frozen weights here, of {mine['where']}, have {mine['hash']}; give their base"
        )


def require_same_base_model_name(adapters: LoadedAdapter, where: str, names: Iterable[str] = ()) -> None:
    """Raise `CheckpointError` if adapters without a hash name another base than the folder `where` or `names`."""
    theirs = adapters.base.get("where")
    if adapters.base.get("hash") is not None or not theirs:
        return
    known = possible_base_model_names(where).union(*map(possible_base_model_names, names))
    if not known & (claimed := possible_base_model_names(theirs)) and known and claimed:
        raise CheckpointError(
            f"{adapters.where} holds adapters of another base: they say that they were trained on {theirs}, and the base here is {where}; "
            f"give theirs with --pretrained-checkpoint (--base of megatron checkpoint adapter). If it is the same network under another name, write {where} "
            f"as base_model_name_or_path into {Path(adapters.where) / CONFIG}"
        )


def possible_base_model_names(where: str) -> set[str]:
    """Return the names that a base network may go by, in lower case: of its folder (of the run, of the hub's
    repository), of the folder that it links to, and in its config.json. where: a folder, or a name alone.
    """
    return {_base_name_from_path(name) for name in (where, os.path.realpath(where), hf_model_name_or_path(where))} - {
        ""
    }


def _base_name_from_path(where: str) -> str:
    """Return the base's name in a path: runs/lora/base/iter_0000150 -> base;
    hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f -> llama-3.1-8b.
    """
    parts = list(Path(where).parts)
    if "snapshots" in parts:
        parts = parts[: parts.index("snapshots")]
    while parts and _OF_A_RUN.fullmatch(parts[-1]):
        parts.pop()
    return parts[-1].rpartition("--")[2].lower() if parts else ""


def base_weights_hash(stages: Iterable[nn.Module], mesh: Mesh, config: AdapterConfig) -> str:
    """Return a 16-digit hex hash of the frozen weights, the same under every layout and in every format that bfloat16
    is rounded from. Collective. Quantized weights count with their values before. The sum over elements, modulo 2**64,
    of a number made of name, position and value.
    """
    total = torch.zeros((), dtype=torch.int64, device=mesh.device)
    seen: set[str] = set()
    for stage in stages:
        for param in stage.parameters():
            spec, quantized = param_spec_of(param), quantized_storage_of(param)
            frozen = not is_adapter_parameter(spec.name) and not is_trained_parameter(spec.name, config)
            counted = mesh.axis(spec.reduce_over).is_first and not (
                is_replicated_over_tensor(spec) and not mesh.axis(tensor_parallel_axis_name(spec)).is_first
            )
            if spec.tied:
                counted = counted and mesh.axis(spec.tied_over).is_first and spec.name not in seen
            seen.add(spec.name)
            for index, piece in enumerate(local_shard_boxes(spec, mesh) if frozen and counted else ()):
                known = None if quantized is None else quantized.unquantized_hashes[index]
                if piece.is_first_replica:
                    values, seed = param.detach()[piece.local.slices()], derive_seed("base", spec.name)
                    total += box_hash(values, piece.box, spec.shape, seed) if known is None else known
    return f"{int(collectives.all_reduce(total, mesh.world)) % 2**64:016x}"


def source_base_hash(source: CheckpointSource, config: AdapterConfig, *, reward_head: bool = False) -> str:
    """Return the hash that `base_weights_hash` gives for the frozen weights of the network in a source.
    reward_head: leave the output layer out, as a reward model that starts from the source does.
    """
    total = torch.zeros((), dtype=torch.int64)
    for full_name, one in source.formats.items():
        name = full_name.removeprefix("model.")
        left = reward_head and name.startswith(OUTPUT_LAYER)
        if full_name != name and not (left or is_adapter_parameter(name) or is_trained_parameter(name, config)):
            box = whole_box(one.shape)
            total += box_hash(source.read(full_name, box), box, one.shape, derive_seed("base", name))
    return f"{int(total) % 2**64:016x}"
