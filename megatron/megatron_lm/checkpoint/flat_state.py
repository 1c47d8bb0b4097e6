"""State of the optimizer in Megatron's distributed format where it is stored flat, as if it were stored by parameter.

    optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_(...).bucket_idx_N.exp_avg     `dp_reshardable`, Megatron's default
    optimizer.state.exp_avg.<parameter> of shape [fragments ..., elements]               `fully_sharded_model_space`, until 0.14

In the first, G counts tensor and pipeline ranks (expert ranks too, for experts that these divide), and a bucket holds
parameters end to end: see buffers.py and parameter_order.py. In the second a fragment is what one tensor rank holds.
Both become entries `optimizer.state.<slot>.<parameter>` with the boxes of the parameter's weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.megatron_lm.checkpoint.buffers import WAY_OUT, UnreadableStateError, spans_in_buckets
from megatron.megatron_lm.checkpoint.names import is_second_name
from megatron.megatron_lm.checkpoint.parameter_order import (
    GlobalParameter,
    LocalParameter,
    SavedRunLayout,
    parameters_of_rank,
)
from megatron.megatron_lm.checkpoint.stored import FlatBox, StoredChunk, TorchDistIndexEntry

_BUCKET = re.compile(
    r"^(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)"
    r"\.dtype_(?P<dtype>.+)\.bucket_idx_(?P<bucket>\d+)\.(?P<slot>param|exp_avg|exp_avg_sq)$"
)
_FLAT = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.")
_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.[a-z0-9_]+\.(.+)$")
_OTHERS = re.compile(r"_extra_state|expert_bias$|tokens_per_expert$|inv_freq$")
_LAYERS = re.compile(r"^(?:encoder|decoder)\.layers\.(\d+)\.")
_COMPARED = 2**16  # elements; larger parameters are not read twice to compare their weights
Entries = dict[str, TorchDistIndexEntry]
Read = Callable[[TorchDistIndexEntry, StoredChunk | FlatBox], Tensor]


@dataclass(frozen=True, slots=True)
class OptimizerBuffer:
    """One buffer of the distributed optimizer. buckets: slot -> stored tensors of its buckets, in order."""

    buckets: Mapping[str, list[TorchDistIndexEntry]]

    @property
    def elements_per_bucket(self) -> list[int]:
        """Number of elements of each bucket."""
        return [stored.shape[0] for stored in self.buckets["param"]]


def entries_from_flat_fragments(tensors: Mapping[str, TorchDistIndexEntry]) -> Entries:
    """Return entries for optimizer state that is stored by parameter but in rows of elements, with the boxes of the
    weights. `UnreadableStateError` for other shapes.
    """
    unflat = {}
    for key, stored in tensors.items():
        match = _STATE.match(key)
        weight = tensors.get(match[1]) if match else None
        if weight is None or stored.shape == weight.shape:
            continue
        if len(stored.shape) != len(weight.shape) + 1:
            raise UnreadableStateError(f"{key} has the shape {stored.shape}, its weight {weight.shape}; {WAY_OUT}")
        boxes = []
        for chunk in weight.chunks:
            place = tuple(start // size for start, size in zip(chunk.box.offset, chunk.box.shape))
            boxes.append(FlatBox(chunk.box, stored, (*place, 0), chunk.box.shape, (0,) * len(chunk.box.shape)))
        unflat[key] = TorchDistIndexEntry(key, weight.shape, stored.dtype, tuple(boxes))
    return unflat


def unflatten_optimizer_buckets(
    tensors: Mapping[str, TorchDistIndexEntry], arguments: Mapping[str, Any], read: Read, *, tied: bool
) -> Entries:
    """Return entries `optimizer.state.<slot>.<parameter>` for optimizer state that is stored in flat buckets; {} if none is.

    read: returns the stored values of a box; used to compare small fp32 weights with the model. tied: word embedding
    and output layer are one matrix. Raises `UnreadableStateError` if it cannot be known what belongs to which
    parameter.
    """
    if not any(_FLAT.match(key) for key in tensors):
        return {}
    model = [
        GlobalParameter(key, stored.shape, tuple(chunk.box for chunk in stored.chunks))
        for key, stored in tensors.items()
        if not _OTHERS.search(key)
        and not key.startswith(("optimizer.", "chained_", "rng_state", "rerun_state"))
        and not is_second_name(key, tensors)
    ]
    orders = (False, True) if any(".conv1d." in one.key for one in model) else (False,)
    for own_conv in orders:  # which release wrote them, the names do not say, and the weights do
        try:
            return _unflatten_buckets_in_order(model, tensors, arguments, read, tied=tied, own_conv=own_conv)
        except UnreadableStateError:
            if own_conv == orders[-1]:
                raise
    raise AssertionError("there is an order")


def _unflatten_buckets_in_order(
    model: Sequence[GlobalParameter],
    tensors: Mapping[str, TorchDistIndexEntry],
    arguments: Mapping[str, Any],
    read: Read,
    *,
    tied: bool,
    own_conv: bool,
) -> Entries:
    """As `unflatten_optimizer_buckets`, with one of the two orders of definition. own_conv: see `parameters_of_rank`."""
    ranks = SavedRunLayout.from_arguments(arguments, _count_layers(model))
    buffers = _group_entries_by_buffer(tensors)
    chunks: dict[tuple[str, str], dict[tuple[int, ...], FlatBox]] = {}  # (slot, parameter) -> by offset
    for (chain, group, number), buffer in sorted(buffers.items()):
        members = _parameters_of_buffer(model, ranks, chain, group, number, tensors, tied=tied, own_conv=own_conv)
        layout = spans_in_buckets([(one.name, one.size) for one in members], buffer.elements_per_bucket)
        if layout is None:
            raise UnreadableStateError(
                f"buffer {number} of group {group} has {sum(buffer.elements_per_bucket)} elements in {len(buffer.elements_per_bucket)} buckets, and the "
                f"{len(members)} parameters of its rank do not fill them in an order that is known here; {WAY_OUT}"
            )
        for slot, buckets in buffer.buckets.items():
            for one in members:
                for part in one.parts:
                    flat = FlatBox(
                        part.box,
                        buckets[layout[one.name].bucket],
                        (layout[one.name].start,),
                        one.shape,
                        part.inside.offset,
                        part.inside.shape,
                        transposed=part.transposed,
                    )
                    chunks.setdefault((slot, part.key), {}).setdefault(part.box.offset, flat)
    keys, state = {one.key for one in model}, Entries()
    for (slot, name), boxes in chunks.items():
        if name in keys:
            key = f"optimizer.state.{slot}.{name}"
            state[key] = TorchDistIndexEntry(key, tensors[name].shape, torch.float32, tuple(boxes.values()))
            _require_state_covers_weight(state[key], tensors[name], slot, read)
    return state


def _count_layers(model: Sequence[GlobalParameter]) -> int:
    """Return the number of layers, from stacked shapes or from numbers in the keys."""
    stacked = [one.shape[0] for one in model if re.match(r"^(encoder|decoder)\.layers\.(?!\d)", one.key)]
    return max([*stacked, *(1 + int(match[1]) for one in model for match in [_LAYERS.match(one.key)] if match)])


def _group_entries_by_buffer(tensors: Mapping[str, TorchDistIndexEntry]) -> dict[tuple[int, int, int], OptimizerBuffer]:
    """Return (optimizer of a chain, group, number) -> buffer. `UnreadableStateError` for buckets of another kind."""
    by_buffer: dict[tuple[int, int, int], dict[str, dict[int, TorchDistIndexEntry]]] = {}
    for key, stored in tensors.items():
        if _FLAT.match(key):
            match = _BUCKET.match(key)
            if not match:
                raise UnreadableStateError(
                    f"{key} is stored in flat buckets of another kind than dp_reshardable; {WAY_OUT}"
                )
            place = (int(match["chain"] or 0), int(match["group"]), int(match["buffer"]))
            by_buffer.setdefault(place, {}).setdefault(match["slot"], {})[int(match["bucket"])] = stored
    buffers = {}
    for place, slots in by_buffer.items():
        if (
            slots.keys() - {"exp_avg_sq"} != {"param", "exp_avg"}
            or len({tuple(sorted(buckets)) for buckets in slots.values()}) > 1
        ):
            raise UnreadableStateError(
                f"buffer {place[2]} of group {place[1]} holds {', '.join(sorted(slots))}, and not Adam's state or Lion's; {WAY_OUT}"
            )
        buffers[place] = OptimizerBuffer(
            {slot: [buckets[number] for number in sorted(buckets)] for slot, buckets in slots.items()}
        )
    return buffers


def _parameters_of_buffer(
    model: Sequence[GlobalParameter],
    ranks: SavedRunLayout,
    chain: int,
    group: int,
    number: int,
    tensors: Mapping[str, TorchDistIndexEntry],
    *,
    tied: bool,
    own_conv: bool,
) -> list[LocalParameter]:
    """Return the parameters of one buffer, in the order of definition. `UnreadableStateError` if there is none such."""
    experts_apart = ranks.expert > 1
    expert, expert_tensor = 0, 0
    if experts_apart and chain > 0:
        expert_tensor, expert, pipeline = (
            group % ranks.expert_tensor,
            group // ranks.expert_tensor % ranks.expert,
            group // (ranks.expert_tensor * ranks.expert),
        )
        tensor = 0
    else:
        tensor, pipeline = group % ranks.tensor, group // ranks.tensor
        expert_tensor = tensor
    if pipeline >= ranks.pipeline:
        raise UnreadableStateError(
            f"there is a group {group}, and the arguments say {ranks.tensor} tensor and {ranks.pipeline} pipeline ranks; {WAY_OUT}"
        )
    chunks = parameters_of_rank(
        model,
        ranks,
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        expert_tensor=expert_tensor,
        tied=tied,
        own_conv=own_conv,
    )
    members = []
    for chunk in chunks:
        here = [one for one in chunk if not experts_apart or one.is_expert == (chain > 0)]
        for dtype in dict.fromkeys(tensors[one.parts[0].key].dtype for one in here):
            members.append([one for one in here if tensors[one.parts[0].key].dtype == dtype])
    if number >= len(members):
        raise UnreadableStateError(
            f"there is a buffer {number} of group {group}, and its rank has {len(members)}; {WAY_OUT}"
        )
    return members[number]


def _require_state_covers_weight(
    state: TorchDistIndexEntry, weight: TorchDistIndexEntry, slot: str, read: Read
) -> None:
    """Raise `UnreadableStateError` unless the state covers its weight and, in slot "param" of small ones, equals it."""
    covered = {chunk.box.offset for chunk in state.chunks}
    missing = [chunk for chunk in weight.chunks if chunk.box.offset not in covered]
    if missing:
        raise UnreadableStateError(f"no buffer holds {weight.key} from {missing[0].box.offset} on; {WAY_OUT}")
    theirs = {chunk.box.offset: chunk for chunk in weight.chunks}
    for chunk in state.chunks if slot == "param" else ():
        if chunk.box.num_elements <= _COMPARED:
            mine, model = read(state, chunk), read(weight, theirs[chunk.box.offset])
            if not torch.equal(mine.to(model.dtype), model):
                raise UnreadableStateError(f"the optimizer's fp32 weights are not those of {weight.key}; {WAY_OUT}")
