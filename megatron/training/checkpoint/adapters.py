"""Checkpoints of a run with adapters: they hold what is trained, and the hash of the frozen weights that it belongs to.

--pretrained-checkpoint BASE  ->  frozen weights  ->  hash        --load RUN  ->  adapters, if they were trained on that hash
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.config.adapters import WHOLE, is_adapter, is_trained, layer_name, linear_layers
from megatron.core.config.plan import network_layer_plans
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.source import Source, TensorFormat
from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.core.dist_checkpointing.tree import Tree
from megatron.core.families import peft
from megatron.core.families.adapter_set import BASE, OUTPUT_LAYER, AdapterSet, read_adapters, require_matching_network
from megatron.core.families.hf import recorded_name
from megatron.core.parallel import collectives
from megatron.core.parallel.box_hash import box_hash
from megatron.core.parallel.boxes import Box, whole_box
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import derive_seed
from megatron.core.parallel.spec import is_shared_over_tensor, local_shards, quantized_of, spec_of, tensor_axis
from megatron.core.tensor_parallel.quantized import quantize_and_dequantize
from megatron.training.checkpoint.formats import open_checkpoint

_LENGTHS = ".magnitude"
_OF_A_RUN = re.compile(r"iter_\d+|best|release|/")  # folders of a checkpoint within that of its run


def holds_adapters(source: Source) -> bool:
    """Whether a checkpoint holds adapters without the network that they belong to."""
    return BASE in source.values


def open_adapters(path: str | Path, model: ModelConfig) -> AdapterSet:
    """The adapters in a folder of PEFT's, or in a checkpoint of a run with adapters. Raises `CheckpointError` for those of another network."""
    if peft.is_peft(path):
        return peft.read(path, model)
    adapters = read_adapters(open_checkpoint(path))
    require_matching_network(adapters, model)
    return adapters


def adapter_settings(path: str | Path, model: ModelConfig, base: str | None = None) -> AdapterConfig:
    """What makes a network have the adapters of a folder. base: its folder. Raises `CheckpointError` where they are not of this network."""
    known = model if model.true_vocab_size else model.with_vocabulary(1, 1)  # before a tokenizer is built
    adapters = open_adapters(path, known)
    if base is not None:
        require_named_base(adapters, base)
    return replace(adapters.model.adapter, freeze=model.adapter.freeze)


def trained_only(tree: Tree, config: AdapterConfig) -> Tree:
    """The tree without weights that are not trained; all of it in a run without adapters."""
    return {
        name: value
        for name, value in tree.items()
        if not config.has_adapters or not name.startswith("model.") or is_trained(name.removeprefix("model."), config)
    }


def base_weights(tree: Tree) -> Tree:
    """The weights of a tree that a base has, and the lengths of rows, which begin as the base's."""
    return {name: value for name, value in tree.items() if not is_adapter(name) or name.endswith(_LENGTHS)}


class SourceWithRowNorms:
    """A network's source with the lengths of the rows of its matrices, by the names that adapters have for them (DoRA).

    Of matrices that are quantized when they are loaded, the lengths are those of what is multiplied.
    """

    def __init__(self, source: Source, model: ModelConfig) -> None:
        """model: with its adapters."""
        self.where, self.values, self.settings, self._source = source.where, source.values, source.settings, source
        self._config, self._format = model.adapter, model.adapter.lora_base_quantization
        self._rows: dict[str, tuple[str, int, int]] = {}
        for plan in network_layer_plans(model) if model.adapter.dora else ():
            shapes = linear_layers(model, plan)
            for adapter in plan.adapters:
                matrix = f"model.{layer_name(model, plan)}.{adapter.linear}"
                first, size = shapes[adapter.linear].rows(adapter.part)
                self._rows[f"{matrix}.adapter.pairs.{adapter.part or WHOLE}{_LENGTHS}"] = (
                    f"{matrix}.weight",
                    first,
                    size,
                )
        lengths = {
            name: TensorFormat((size,), source.formats[matrix].dtype) for name, (matrix, _, size) in self._rows.items()
        }
        self.formats: Mapping[str, TensorFormat] = {**source.formats, **lengths}

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor, [*box.shape]; DoRA's magnitudes are computed as row norms of the weight."""
        if name not in self._rows:
            return self._source.read(name, box)
        matrix, first, _ = self._rows[name]
        rows = Box((first + box.offset[0], 0), (box.shape[0], self._source.formats[matrix].shape[1]))
        format = self._format if not is_trained(matrix.removeprefix("model."), self._config) else "none"
        values = (
            self._source.read(matrix, rows)
            if format == "none"
            else quantize_and_dequantize(
                partial(self._source.read, matrix), rows, self._source.formats[matrix].shape, format
            )
        )
        return values.to(torch.promote_types(values.dtype, torch.float32)).square().sum(dim=1).sqrt()


def require_base(adapters: AdapterSet, mine: Mapping[str, Any], names: Iterable[str] = ()) -> None:
    """Refuse adapters of another base: by the hash of its weights or, where they have none, as folders of PEFT's, by its name.

    mine: the value of `BASE`. names: that the base has beside those of its folder.
    """
    if adapters.base.get("hash") is not None:
        require_same_base(adapters.base, mine, adapters.where)
    else:
        require_named_base(adapters, str(mine["where"]), names)


def require_same_base(saved: Mapping[str, Any], mine: Mapping[str, Any], where: str) -> None:
    """Refuse adapters that were trained on other frozen weights. saved, mine: the values of `BASE`."""
    if saved.get("hash") != mine["hash"]:
        raise CheckpointError(
            f"{where} holds adapters of another base: they were trained on {saved.get('where')} with hash {saved.get('hash')}, and the "
            f"frozen weights here, of {mine['where']}, have {mine['hash']}; give their base"
        )


def require_named_base(adapters: AdapterSet, where: str, names: Iterable[str] = ()) -> None:
    """Refuse adapters without a hash that name another base than the one in a folder. names: that it has beside those of its folder."""
    theirs = adapters.base.get("where")
    if adapters.base.get("hash") is not None or not theirs:
        return
    known = base_names(where).union(*map(base_names, names))
    if not known & (claimed := base_names(theirs)) and known and claimed:
        raise CheckpointError(
            f"{adapters.where} holds adapters of another base: they say that they were trained on {theirs}, and the base here is {where}; "
            f"give theirs with --pretrained-checkpoint (--base of adapter.py). If it is the same network under another name, write {where} "
            f"as base_model_name_or_path into {Path(adapters.where) / peft.CONFIG}"
        )


def base_names(where: str) -> set[str]:
    """What the network in a folder may be called, in lower case: after the folder, what a link to it leads to, and its config.json.

    Of a checkpoint that is the folder of its run, in the hub's cache the repository. where: may also be a name alone, such as of a hub.
    """
    return {_last_name(name) for name in (where, str(Path(where).resolve()), recorded_name(where))} - {""}


def _last_name(where: str) -> str:
    """runs/lora/base/iter_0000150 -> base; hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f -> llama-3.1-8b"""
    parts = list(Path(where).parts)
    if "snapshots" in parts:
        parts = parts[: parts.index("snapshots")]
    while parts and _OF_A_RUN.fullmatch(parts[-1]):
        parts.pop()
    return parts[-1].rpartition("--")[2].lower() if parts else ""


def base_hash(stages: Iterable[nn.Module], mesh: Mesh, config: AdapterConfig) -> str:
    """A hash of the frozen weights that is the same under every layout, and in every format that bfloat16 is rounded from.

    All ranks call this together. Quantized weights count as they were before. A sum over elements, modulo 2**64, of a number made of the name, the place and the value.
    """
    total = torch.zeros((), dtype=torch.int64, device=mesh.device)
    seen: set[str] = set()
    for stage in stages:
        for param in stage.parameters():
            spec, quantized = spec_of(param), quantized_of(param)
            frozen = not is_adapter(spec.name) and not is_trained(spec.name, config)
            counted = mesh.axis(spec.reduce_over).is_first and not (
                is_shared_over_tensor(spec) and not mesh.axis(tensor_axis(spec)).is_first
            )
            if spec.tied:
                counted = counted and mesh.axis(spec.tied_over).is_first and spec.name not in seen
            seen.add(spec.name)
            for index, piece in enumerate(local_shards(spec, mesh) if frozen and counted else ()):
                known = None if quantized is None else quantized.hashes[index]
                if piece.is_first_replica:
                    total += (
                        box_hash(
                            param.detach()[piece.local.slices()], piece.box, spec.shape, derive_seed("base", spec.name)
                        )
                        if known is None
                        else known
                    )
    return f"{int(collectives.all_reduce(total, mesh.world)) % 2**64:016x}"


def source_hash(source: Source, config: AdapterConfig, *, reward_head: bool = False) -> str:
    """The same hash of the network of a source. reward_head: as a reward model begins with it, which leaves the output layer."""
    total = torch.zeros((), dtype=torch.int64)
    for full_name, one in source.formats.items():
        name = full_name.removeprefix("model.")
        left = reward_head and name.startswith(OUTPUT_LAYER)
        if full_name != name and not (left or is_adapter(name) or is_trained(name, config)):
            box = whole_box(one.shape)
            total += box_hash(source.read(full_name, box), box, one.shape, derive_seed("base", name))
    return f"{int(total) % 2**64:016x}"
