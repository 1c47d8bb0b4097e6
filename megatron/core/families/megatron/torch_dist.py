"""Megatron Core's distributed format (`torch_dist`), read box by box and without running its pickles.

    FOLDER/metadata.json          sharded_backend: torch_dist; written last
    FOLDER/.metadata              pickled index of torch.distributed.checkpoint: tensors, their boxes, where each box lies
    FOLDER/__R_N.distcp           boxes, each a small file of torch.save
    FOLDER/common.pt              arguments and counters (later versions: `common_state` among the boxes)

Layers that are all alike are one tensor with a leading layer axis; others carry their number in the name. State of the
optimizer is read where it is stored by parameter (`optimizer.state.exp_avg.<parameter>`); the default of Megatron, flat
buckets of one data-parallel layout, says nothing about parameters and is left out.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.source import Format
from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.core.families.megatron.names import Layout, is_over_vocabulary, merged, our_names
from megatron.core.families.megatron.pickles import Record, attributes, read_torch_bytes, read_torch_file
from megatron.core.families.megatron.progress import parameter_of, values_of
from megatron.core.families.megatron.settings import completed, run_settings_of, settings_of
from megatron.core.parallel.boxes import Box, intersect, whole

_SLOTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": "master", "param": "master"}
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)$")
_STACKED = re.compile(r"^(encoder|decoder)\.layers\.(?!\d)(.+)$")
_STATES = re.compile(r"^(optimizer|rng_state|rerun_state_machine_state|common_state|chained_\d+\.optimizer)\b|_extra_state")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a stored tensor, and the bytes that hold it."""

    box: Box
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as the index has it. layer: the slice along its first axis that is meant, if layers are stacked."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    layer: int | None = None


class TorchDistSource:
    """A folder in the format. skipped: what of it is not read, in a sentence; empty when all is.

    run_settings: what its arguments say beside the network, for a run that goes on with it.
    """

    def __init__(self, folder: Path, parts: Mapping[str, Stored], layout: Layout, settings: Mapping[str, Any],
                 values: Mapping[str, Any], skipped: str, run_settings: Mapping[str, Any]) -> None:
        self.where, self.settings, self.values, self.skipped, self.run_settings = str(folder), settings, values, skipped, run_settings
        self._folder, self._parts, self._layout = folder, parts, layout
        self._last: tuple[str, Tensor] | None = None
        self.formats: dict[str, Format] = {}
        for name, stored in parts.items():
            shape = stored.shape if stored.layer is None else stored.shape[1:]
            ours = merged(name, [torch.empty(shape, device="meta")], layout)
            self.formats[name] = Format((self._rows(name, ours), *ours.shape[1:]), stored.dtype)

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor, in the dtype it was saved in."""
        if self._last is None or self._last[0] != name:
            ours = merged(name, [self._assembled(self._parts[name])], self._layout)
            self._last = (name, ours[:self._rows(name, ours)])
        return self._last[1][box.slices()]

    def _rows(self, name: str, ours: Tensor) -> int:
        """Rows without the padding of the vocabulary."""
        size = self.settings.get("true_vocab_size")
        return size if size and is_over_vocabulary(parameter_of(name)) else ours.shape[0]

    def _assembled(self, stored: Stored) -> Tensor:
        """The whole tensor, or the layer that is meant, from the boxes that meet it."""
        wanted = whole(stored.shape)
        if stored.layer is not None:
            wanted = Box((stored.layer, *wanted.offset[1:]), (1, *wanted.shape[1:]))
        tensor, filled = torch.empty(wanted.shape, dtype=stored.dtype), 0
        for chunk in stored.chunks:
            common = intersect(chunk.box, wanted)
            if common is not None:
                values = self._values_of(chunk, stored)
                back = common.shifted(tuple(-start for start in chunk.box.offset))
                tensor[common.shifted(tuple(-start for start in wanted.offset)).slices()] = values[back.slices()]
                filled += common.size
        if filled != wanted.size:
            raise CheckpointError(f"{self._folder} is incomplete: of {stored.key} it holds {filled} of {wanted.size} elements")
        return tensor if stored.layer is None else tensor[0]

    def _values_of(self, chunk: Chunk, stored: Stored) -> Tensor:
        path = self._folder / chunk.file
        try:
            with path.open("rb") as file:
                file.seek(chunk.start)
                content = file.read(chunk.length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        if len(content) != chunk.length:
            raise CheckpointError(f"{path} ends early: {stored.key} lies behind its end")
        values = read_torch_bytes(content, f"{path} ({stored.key})")
        if not isinstance(values, Tensor) or values.numel() != chunk.box.size or values.dtype != stored.dtype:
            raise CheckpointError(f"{path} is damaged: what it holds for {stored.key} is not the box that the index promises")
        return values.reshape(chunk.box.shape)


def open_torch_dist(folder: str | Path, given: Mapping[str, Any] | None = None) -> TorchDistSource:
    """The checkpoint in one iteration's folder.

    given: settings that win over those in the folder, and `true_vocab_size`, without which the rows that pad the
    vocabulary count as ids. Raises `CheckpointError` for a folder that is damaged, or holds no model with our names.
    """
    folder = Path(folder)
    index = _read_index(folder / ".metadata")
    tensors, texts = _entries(index, folder)
    common = _common(folder, texts)
    parts, skipped = _by_our_names(tensors)
    words = parts.get("model.embedding.word_embeddings.weight")
    if words is None:
        raise CheckpointError(f"{folder} holds no embedding.word_embeddings.weight; it has {', '.join(sorted(tensors)[:5])}, ...")
    shapes = {parameter_of(name): stored.shape for name, stored in parts.items() if name.startswith("model.")}
    arguments = attributes(common.get("args"))
    settings = completed(settings_of(arguments, given or {}), shapes, where=str(folder))
    if not settings.get("untie_embeddings_and_output_weights", "model.output_layer.weight" in parts):
        parts = {name: stored for name, stored in parts.items() if parameter_of(name) != "output_layer.weight"}
    if (settings.get("true_vocab_size") or 0) > words.shape[0]:
        raise CheckpointError(f"{folder} has {words.shape[0]} rows of word embeddings, fewer than the tokenizer's "
                              f"{settings['true_vocab_size']} ids; it is another tokenizer's")
    values = values_of(common)
    if any(name.startswith("optimizer.") for name in parts) and "run.optimizer_steps" not in values:
        parts = {name: stored for name, stored in parts.items() if not name.startswith("optimizer.")}
        skipped = "the optimizer's moments are left out: the checkpoint does not say how many steps they have seen"
    return TorchDistSource(folder, parts, Layout.of(settings, 3.0), settings, values, skipped, run_settings_of(arguments))


def is_torch_dist(folder: str | Path) -> bool:
    """Whether a folder holds a checkpoint in this format."""
    try:
        mark = json.loads((Path(folder) / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(mark, dict) and mark.get("sharded_backend") == "torch_dist" and (Path(folder) / ".metadata").is_file()


class _IndexUnpickler(pickle.Unpickler):
    """Makes records of the index's classes; knows shapes and dtypes, and nothing that could act."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name == "Size":
            return tuple
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "collections" and name == "OrderedDict":
            return dict
        if re.fullmatch(r"torch\.distributed(\.\w+)*|torch\.serialization|pathlib(\._local)?|megatron(\.\w+)*", module):
            return _IndexRecord
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in an index")


class _IndexRecord(Record):
    """A record that also keeps a state that is a tuple, as tensor properties have."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.state = state


def _read_index(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _IndexUnpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise CheckpointError(f"{path} is no index of torch.distributed.checkpoint, or is damaged: {error}") from None


def _entries(index: Any, folder: Path) -> tuple[dict[str, Stored], dict[str, Chunk]]:
    """The tensors of an index, and where its other values lie."""
    try:
        places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
        for key, info in index.storage_data.items():
            if Path(info.relative_path).name != info.relative_path:
                raise CheckpointError(f"{folder / '.metadata'} names a file outside its folder: {info.relative_path}")
            offset = getattr(key, "offset", None)  # a default is not in the state of a record
            places[key.fqn, None if offset is None else tuple(offset)] = info
        tensors, texts = {}, {}
        for name, entry in index.state_dict_metadata.items():
            if hasattr(entry, "chunks"):
                chunks = []
                for chunk in entry.chunks:
                    info = places[name, tuple(chunk.offsets)]
                    chunks.append(Chunk(Box(tuple(chunk.offsets), tuple(chunk.sizes)), info.relative_path, info.offset, info.length))
                tensors[name] = Stored(name, tuple(entry.size), _dtype(entry.properties), tuple(chunks))
            elif (name, None) in places:
                info = places[name, None]
                texts[name] = Chunk(Box((), ()), info.relative_path, info.offset, info.length)
        return tensors, texts
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / '.metadata'} is damaged: its entries lack {error}") from None


def _dtype(properties: Any) -> torch.dtype:
    state = getattr(properties, "state", None)
    found = state[0] if isinstance(state, tuple) and state else getattr(properties, "dtype", None)
    if not isinstance(found, torch.dtype):
        raise TypeError("the dtype of a tensor")
    return found


def _common(folder: Path, texts: Mapping[str, Chunk]) -> dict[str, Any]:
    """What is no tensor: arguments, counters, the optimizer's groups."""
    if (folder / "common.pt").is_file():
        found = read_torch_file(folder / "common.pt")
        return found if isinstance(found, dict) else {}
    for name, chunk in texts.items():
        if name.split("/")[0] == "common_state":
            with (folder / chunk.file).open("rb") as file:
                file.seek(chunk.start)
                found = read_torch_bytes(file.read(chunk.length), f"{folder / chunk.file} ({name})")
            return found if isinstance(found, dict) else {}
    return {}


def _by_our_names(tensors: Mapping[str, Stored]) -> tuple[dict[str, Stored], str]:
    """Our name in a saved state -> where it lies; layers that are stacked are told apart."""
    found: dict[str, Stored] = {}
    flat = False
    for prefix, key, stored in _parameters(tensors):
        match = _STACKED.match(key)
        if match and stored.shape:
            for layer in range(stored.shape[0]):
                one = Stored(stored.key, stored.shape, stored.dtype, stored.chunks, layer)
                found[f"{prefix}{match[1]}.layers.{layer}.{match[2]}"] = one
        else:
            found[f"{prefix}{key}"] = stored
    flat = any(name.startswith(("optimizer.distributed.", "chained_")) for name in tensors)
    renamed = our_names([parameter_of(name) for name in found])
    parts = {f"{name[:len(name) - len(parameter_of(name))]}{renamed[parameter_of(name)]}": stored for name, stored in found.items()
             if parameter_of(name) in renamed}
    return parts, ("the optimizer's state is left out: it is stored in flat buckets of one data-parallel layout" if flat else "")


def _parameters(tensors: Mapping[str, Stored]) -> Iterator[tuple[str, str, Stored]]:
    """(beginning of our name, their parameter, entry) of weights and of moments by parameter."""
    for key, stored in tensors.items():
        slot = _OPTIMIZER.match(key)
        if slot:
            yield f"optimizer.{_SLOTS[slot[1]]}.", slot[2], stored
        elif not _STATES.search(key):
            yield "model.", key, stored
