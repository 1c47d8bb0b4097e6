"""Megatron Core's distributed format (`torch_dist`), read box by box and without running its pickles.

    FOLDER/metadata.json          sharded_backend: torch_dist; written last
    FOLDER/.metadata              pickled index of torch.distributed.checkpoint: tensors, their boxes, where each box lies
    FOLDER/__R_N.distcp           boxes, each a small file of torch.save
    FOLDER/common.pt              arguments and counters (later versions: `common_state` among the boxes)

Layers that are all alike are one tensor with a leading layer axis; others carry their number in the name. State of the
optimizer is stored by parameter (`optimizer.state.exp_avg.<parameter>`), or in flat buckets, which flat_state.py tells apart.

Megatron FSDP's format (`--ckpt-format fsdp_dtensor`) has the same index and boxes, no metadata.json, and other names:

    model.module.<parameter>                               weights, layer by layer and expert by expert
    optimizer.state.module.<parameter>.exp_avg             Adam's moments
    optimizer.param_to_group_meta.module.<parameter>.step  how many updates it has made (or `step` beside the moments)
    args, iteration, ...                                   what is no tensor

How often `module.` stands before a parameter depends on what wraps the network. The halves of a gated matrix are apart,
`<parameter>_w` and `<parameter>_v`: its rows are cut over ranks, and each rank has rows of both.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.pickles import InertObject, attributes_of_inert, read_torch_file
from megatron.core.parallel.boxes import Box
from megatron.megatron_lm.checkpoint.buffers import WAY_OUT, UnreadableStateError
from megatron.megatron_lm.checkpoint.experts import split_expert_name
from megatron.megatron_lm.checkpoint.flat_state import entries_from_flat_fragments, unflatten_optimizer_buckets
from megatron.megatron_lm.checkpoint.hybrid import join_mixer_pieces, merge_layer_pairs
from megatron.megatron_lm.checkpoint.names import first_name, map_names_to_ours
from megatron.megatron_lm.checkpoint.source import (
    MegatronSource,
    make_megatron_source,
    parameter_of_state_name,
    saved_training_counters,
)
from megatron.megatron_lm.checkpoint.stored import (
    StoredChunk,
    StoredTensor,
    TorchDistIndexEntry,
    read_chunk_values,
    read_stored_box,
    read_stored_chunk,
)

_SLOTS = {
    **{slot: slot for slot in ("exp_avg", "exp_avg_sq", "momentum_buffer")},
    **dict.fromkeys(("fp32_param", "param", "master_param"), "master"),
}
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)$")
_STACKED = re.compile(r"^(encoder|decoder)\.layers\.(?!\d)(.+)$")
_STATES = re.compile(
    r"^(optimizer|rng_state|rerun_state_machine_state|common_state|chained_\d+\.optimizer)\b|_extra_state"
)
_OF_GROUPS = re.compile(
    r"^(?:chained_\d+\.)?optimizer\.(?:distributed\.dp_group_idx_\d+\.)?(optimizer|grad_scaler)(?:/|$)"
)
# Names of Megatron FSDP.
_WEIGHT = re.compile(r"^model\.(?:module\.)*(.+)$")
_MOMENT = re.compile(rf"^optimizer\.state\.(?:module\.)*(.+)\.({'|'.join(_SLOTS)})$")
_STEP = re.compile(r"^optimizer\.(state|param_to_group_meta)\..+\.step$")
_COMMON = ("args", "iteration", "checkpoint_version", "num_floating_point_operations_so_far")
_HALF = re.compile(r"^(.+\.linear_fc1\.(?:weight|bias)\d*)_([wv])$")


def open_torch_dist_checkpoint(folder: str | Path, given: Mapping[str, Any] | None = None) -> MegatronSource:
    """Open the torch_dist checkpoint in one iteration's folder.

    given: settings that override those in the folder, and `true_vocab_size`, without which rows of vocabulary padding
    count as ids. Raises `CheckpointError` for a folder that is damaged, or holds no model with our names.
    """
    folder = Path(folder)
    tensors, texts = _parse_torch_dist_index(_read_torch_dist_index(folder / ".metadata"), folder)
    common = _read_common_state(folder, texts, tensors)
    arguments = attributes_of_inert(common.get("args"))
    if _is_megatron_fsdp((*texts, *tensors)):
        tensors = _rename_fsdp_to_torch_dist(tensors)
    tensors, skipped = _with_optimizer_entries(tensors, texts, folder, arguments)
    entries = {name: StoredTensor(stored, folder) for name, stored in _entries_by_our_names(tensors).items()}
    return make_megatron_source(
        folder,
        {name: [held] for name, held in join_mixer_pieces(merge_layer_pairs(entries, arguments)).items()},
        arguments,
        given=given or {},
        values=saved_training_counters(
            {**common, "optimizer": [common.get("optimizer"), *_read_optimizer_groups(texts, folder)]}
        ),
        skipped=skipped,
    )


def is_fsdp_index(path: Path) -> bool:
    """Whether a .metadata is the index of a checkpoint of Megatron FSDP."""
    try:
        return _is_megatron_fsdp(getattr(_read_torch_dist_index(path), "state_dict_metadata", ()))
    except CheckpointError:
        return False


def torch_dist_run_arguments(folder: str | Path) -> dict[str, Any]:
    """Return the arguments of the run that saved a folder; {} if it has none."""
    folder = Path(folder)
    tensors, texts = (
        ({}, {})
        if (folder / "common.pt").is_file()
        else _parse_torch_dist_index(_read_torch_dist_index(folder / ".metadata"), folder)
    )
    return attributes_of_inert(_read_common_state(folder, texts, tensors).get("args"))


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler of the index: makes inert objects of its classes, and knows only shapes and dtypes besides."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name == "Size":
            return tuple
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "collections" and name == "OrderedDict":
            return dict
        if re.fullmatch(r"torch\.distributed(\.\w+)*|torch\.serialization|pathlib(\._local)?|megatron(\.\w+)*", module):
            return _InertIndexObject
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in an index")


class _InertIndexObject(InertObject):
    """An `InertObject` that also keeps a state that is a tuple, as tensor properties have."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.state = state


def _read_torch_dist_index(path: Path) -> Any:
    """Read .metadata without running its pickle. `CheckpointError` if it is missing, damaged or names other classes."""
    try:
        with path.open("rb") as file:
            return _IndexUnpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise CheckpointError(f"{path} is no index of torch.distributed.checkpoint, or is damaged: {error}") from None


def _parse_torch_dist_index(index: Any, folder: Path) -> tuple[dict[str, TorchDistIndexEntry], dict[str, StoredChunk]]:
    """Return the tensors of an index, and where its other objects lie, by name."""
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
                    chunks.append(
                        StoredChunk(
                            Box(tuple(chunk.offsets), tuple(chunk.sizes)), info.relative_path, info.offset, info.length
                        )
                    )
                tensors[name] = TorchDistIndexEntry(
                    name, tuple(entry.size), _dtype_of_properties(entry.properties), tuple(chunks)
                )
            elif (name, None) in places:
                info = places[name, None]
                texts[name] = StoredChunk(Box((), ()), info.relative_path, info.offset, info.length)
        return tensors, texts
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / '.metadata'} is damaged: its entries lack {error}") from None


def _read_optimizer_groups(texts: Mapping[str, StoredChunk], folder: Path) -> Iterator[Any]:
    """Yield the groups of distributed optimizers and their loss scales, by kind, where every rank saved its own."""
    for name, chunk in sorted(texts.items(), key=lambda entry: entry[0]):
        if match := _OF_GROUPS.match(name):
            yield {match[1]: read_stored_chunk(chunk, folder, name)}


def _dtype_of_properties(properties: Any) -> torch.dtype:
    state = getattr(properties, "state", None)
    value = state[0] if isinstance(state, tuple) and state else getattr(properties, "dtype", None)
    if not isinstance(value, torch.dtype):
        raise TypeError("the dtype of a tensor")
    return value


def _read_common_state(
    folder: Path, texts: Mapping[str, StoredChunk], tensors: Mapping[str, TorchDistIndexEntry]
) -> dict[str, Any]:
    """Return what is no tensor: arguments, counters, optimizer groups; {} if there is none."""
    if _is_megatron_fsdp((*texts, *tensors)):
        return _read_fsdp_common_state(folder, texts, tensors)
    if (folder / "common.pt").is_file():
        state = read_torch_file(folder / "common.pt")
        return state if isinstance(state, dict) else {}
    for name, chunk in texts.items():
        if name.split("/")[0] == "common_state":
            state = read_stored_chunk(chunk, folder, name)
            state = state[0] if isinstance(state, list) and len(state) == 1 else state  # the state of one of one rank
            return state if isinstance(state, dict) else {}
    return {}


def _read_fsdp_common_state(
    folder: Path, texts: Mapping[str, StoredChunk], tensors: Mapping[str, TorchDistIndexEntry]
) -> dict[str, Any]:
    """As `_read_common_state`, for Megatron FSDP, whose optimizer steps are stored one by one."""
    steps = [
        *(read_stored_chunk(chunk, folder, name) for name, chunk in texts.items() if _STEP.match(name)),
        *(read_stored_box(stored, folder) for name, stored in tensors.items() if _STEP.match(name)),
    ]
    common = {name: read_stored_chunk(texts[name], folder, name) for name in _COMMON if name in texts}
    nested = _read_fsdp_values(("opt_param_scheduler", "optimizer.grad_scaler"), folder, texts, tensors)
    state = [*({"step": step} for step in steps), {"grad_scaler": nested["optimizer.grad_scaler"]}]
    return {**common, "opt_param_scheduler": nested["opt_param_scheduler"], "optimizer": state}


def _read_fsdp_values(
    prefixes: Sequence[str], folder: Path, texts: Mapping[str, StoredChunk], tensors: Mapping[str, TorchDistIndexEntry]
) -> dict[str, dict[str, Any]]:
    """Return prefix -> the values that are stored by names `<prefix>.<name>`."""
    return {
        prefix: {
            **{
                name.removeprefix(f"{prefix}."): read_stored_chunk(chunk, folder, name)
                for name, chunk in texts.items()
                if name.startswith(f"{prefix}.")
            },
            **{
                name.removeprefix(f"{prefix}."): read_stored_box(stored, folder)
                for name, stored in tensors.items()
                if name.startswith(f"{prefix}.")
            },
        }
        for prefix in prefixes
    }


def _with_optimizer_entries(
    tensors: Mapping[str, TorchDistIndexEntry],
    texts: Mapping[str, StoredChunk],
    folder: Path,
    arguments: Mapping[str, Any],
) -> tuple[dict[str, TorchDistIndexEntry], str]:
    """Return the entries with all optimizer state by parameter, and ""; or without it, and why it is left out."""
    tied = not arguments.get("untie_embeddings_and_output_weights", "output_layer.weight" in tensors)
    try:
        if gathered := next((name for name in texts if ".param_state" in name), ""):
            raise UnreadableStateError(
                f"{gathered} is of a release that gathered it on one rank (dp_zero_gather_scatter); {WAY_OUT}"
            )
        _require_known_slots(tensors)
        buckets = unflatten_optimizer_buckets(
            tensors, arguments, lambda stored, chunk: read_chunk_values(chunk, stored, folder), tied=tied
        )
        return {**tensors, **entries_from_flat_fragments(tensors), **buckets}, ""
    except UnreadableStateError as error:
        return {
            key: stored for key, stored in tensors.items() if not _OPTIMIZER.match(key)
        }, f"the optimizer's state is left out: {error}"


def _require_known_slots(tensors: Mapping[str, TorchDistIndexEntry]) -> None:
    """Raise `UnreadableStateError` for state of an optimizer that is not built here."""
    slots = sorted({match[1] for key in tensors if (match := _OPTIMIZER.match(key))} - {*_SLOTS, "step"})
    if slots:
        raise UnreadableStateError(
            f"its optimizer keeps {', '.join(slots)}, and those that are built here {', '.join(sorted(set(_SLOTS.values())))}"
        )


def _entries_by_our_names(tensors: Mapping[str, TorchDistIndexEntry]) -> dict[str, TorchDistIndexEntry]:
    """Return our name in a saved state -> entry, with stacked layers split."""
    entries: dict[str, TorchDistIndexEntry] = {}
    for prefix, key, stored in _weight_and_moment_entries(tensors):
        key = key if prefix == "model." else first_name(key)
        match = _STACKED.match(key)
        if match and stored.shape:
            for layer in range(stored.shape[0]):
                one = TorchDistIndexEntry(stored.key, stored.shape, stored.dtype, stored.chunks, layer)
                entries[f"{prefix}{match[1]}.layers.{layer}.{match[2]}"] = one
        else:
            entries[f"{prefix}{key}"] = stored
    renamed = map_names_to_ours([parameter_of_state_name(name) for name in entries])
    return {
        f"{name[: len(name) - len(parameter_of_state_name(name))]}{renamed[parameter_of_state_name(name)]}": stored
        for name, stored in entries.items()
        if parameter_of_state_name(name) in renamed
    }


def _weight_and_moment_entries(
    tensors: Mapping[str, TorchDistIndexEntry],
) -> Iterator[tuple[str, str, TorchDistIndexEntry]]:
    """Yield (prefix of our name, their parameter name, entry) of weights and of optimizer state by parameter."""
    for key, stored in tensors.items():
        slot = _OPTIMIZER.match(key)
        if slot and slot[1] in _SLOTS:
            yield f"optimizer.{_SLOTS[slot[1]]}.", slot[2], stored
        elif not _STATES.search(key):
            yield "model.", key, stored


def _is_megatron_fsdp(names: Collection[str]) -> bool:
    """Whether the names of an index are those of Megatron FSDP's format."""
    return "args" in names and any(name.startswith("model.module.") for name in names)


def _rename_fsdp_to_torch_dist(tensors: Mapping[str, TorchDistIndexEntry]) -> dict[str, TorchDistIndexEntry]:
    """Return the entries by torch_dist's names: weights by their own, moments `optimizer.state.<slot>.<parameter>`."""
    renamed: dict[str, TorchDistIndexEntry] = {}
    for key, stored in tensors.items():
        moment, weight = _MOMENT.match(key), _WEIGHT.match(key)
        if moment:
            renamed[f"optimizer.state.{moment[2]}.{moment[1]}"] = stored
        elif weight:
            renamed[weight[1]] = stored
    return _stack_expert_entries(_join_gated_half_entries(renamed))


def _join_gated_half_entries(entries: Mapping[str, TorchDistIndexEntry]) -> dict[str, TorchDistIndexEntry]:
    """Join the halves (_w, _v) of each gated matrix along dimension 0."""
    joined = {}
    for key, stored in entries.items():
        half = _HALF.match(key)
        if not half:
            joined[key] = stored
        elif half[2] == "w" and f"{half[1]}_v" in entries:
            below = entries[f"{half[1]}_v"]
            rows, shift = stored.shape[0], (stored.shape[0], *(0,) * (len(stored.shape) - 1))
            chunks = (*stored.chunks, *(replace(chunk, box=chunk.box.shifted(shift)) for chunk in below.chunks))
            joined[half[1]] = TorchDistIndexEntry(
                half[1], (rows + below.shape[0], *stored.shape[1:]), stored.dtype, chunks
            )
    return joined


def _stack_expert_entries(entries: Mapping[str, TorchDistIndexEntry]) -> dict[str, TorchDistIndexEntry]:
    """Stack single experts to one entry with a leading axis."""
    tensors, stacks = {}, dict[str, dict[int, TorchDistIndexEntry]]()
    for key, stored in entries.items():
        if one := split_expert_name(key):
            stacks.setdefault(one[0], {})[one[1]] = stored
        else:
            tensors[key] = stored
    for key, experts in stacks.items():
        first = next(iter(experts.values()))
        chunks = tuple(
            _shift_chunk_to_expert(chunk, expert) for expert, stored in experts.items() for chunk in stored.chunks
        )
        tensors[key] = TorchDistIndexEntry(key, (len(experts), *first.shape), first.dtype, chunks)
    return tensors


def _shift_chunk_to_expert(chunk: Any, expert: int) -> StoredChunk:
    return replace(chunk, box=Box((expert, *chunk.box.offset), (1, *chunk.box.shape)))
