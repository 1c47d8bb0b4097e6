"""State of the optimizer in Megatron's old format, told apart by parameter.

    model_optim_rng.pt   plain optimizer: `state` by number. Parameters are numbered group by group: those with weight decay,
                         those without it (biases and everything of one axis), ...; beside it their fp32 weights by group
    distrib_optim.pt     distributed optimizer: a flat buffer a kind of state, as all data-parallel ranks hold it together

Neither names a parameter. Both follow the order in which the network defines its parameters, and that is the order of the
names in the state dict of the model in the same file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.pickles import attributes_of_inert, read_torch_file
from megatron.megatron_lm.checkpoint.buffers import (
    WAY_OUT,
    BucketSpan,
    UnreadableStateError,
    bucket_size_limit,
    candidate_buffer_layouts,
)
from megatron.megatron_lm.checkpoint.names import is_second_name

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
SLOTS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}  # of a distributed optimizer
# What a state dict holds beside parameters.
_BUFFERS = re.compile(
    r"(^|[._])(extra_state(/.*)?|inv_freq|expert_bias|local_tokens_per_expert|global_tokens_per_expert)$"
)
_EXPERT = re.compile(r"\.experts\.")
_SHARED = re.compile(r"(word_embeddings|word_embeddings_for_head|output_layer)\.weight$")
_COMPARED = 4096  # elements at each end of a parameter

Slots = dict[str, dict[str, Tensor]]  # slot -> key of a parameter -> tensor
State = dict[str, list[dict[str, Tensor]]]  # slot -> for each chunk: their name -> tensor, shaped as the parameter


@dataclass(frozen=True, slots=True)
class ChunkParameter:
    """A parameter of a rank. chunk: number of the pipeline chunk that defines it."""

    chunk: int
    name: str
    weight: Tensor

    @property
    def key_within_rank(self) -> str:
        """Name that is unique among the parameters of the rank: chunk and name."""
        return f"{self.chunk}.{self.name}"


def read_rank_optimizer_state(
    path: Path, content: Mapping[str, Any], chunks: Sequence[Mapping[str, Tensor]], arguments: Mapping[str, Any]
) -> State:
    """Return the optimizer state in one rank's file: slot -> for each model chunk, name -> tensor; {} if it has none.

    path: of the file; content: its object; chunks: its weights by name, of any shape; arguments: of the run that saved.
    Raises `UnreadableStateError` if it cannot be known what belongs to which parameter, and `CheckpointError` for a
    damaged file.
    """
    parameters = [
        ChunkParameter(number, name, tensor)
        for number, chunk in enumerate(chunks)
        for name, tensor in chunk.items()
        if not _BUFFERS.search(name) and not is_second_name(name, chunk)
    ]
    flat, numbered = path.with_name("distrib_optim.pt"), content.get("optimizer")
    if flat.is_file():
        optimizer_state = _read_distributed_optimizer(read_torch_file(flat), parameters, arguments, flat)
    elif isinstance(numbered, Mapping):
        optimizer_state = _undistributed_optimizer_state(numbered, parameters, path)
    else:
        return {}
    state: State = {slot: [{} for _ in chunks] for slot in optimizer_state}
    for slot, tensors in optimizer_state.items():
        for parameter in parameters:
            state[slot][parameter.chunk][parameter.name] = tensors[parameter.key_within_rank]
    return state


def _undistributed_optimizer_state(
    optimizer: Mapping[str, Any], parameters: Sequence[ChunkParameter], path: Path
) -> Slots:
    """Return slot -> key -> tensor of an optimizer that numbers its parameters group by group; {} if it has no state."""
    inner = optimizer.get("optimizer", optimizer)
    main = optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16"))
    states = attributes_of_inert(inner).get("state")
    if not isinstance(states, Mapping) or not (states or main):
        return {}
    kept = _slots_of_states(states, path)
    left, slots = list(parameters), Slots({slot: {} for slot in ("master", *kept)})
    for place, group in enumerate(inner.get("param_groups", ())):
        members = _parameters_of_group(left, group, f"{path}: group {place} of the optimizer")
        left = [parameter for parameter in left if parameter not in members]
        for slot in kept:
            slots[slot] |= {
                member.key_within_rank: _require_matching_shape(states.get(number, {}).get(slot), member, path)
                for number, member in zip(group["params"], members)
            }
        if main:
            slots["master"] |= _main_weights(main[place], members, path)
    _require_none_left(left, path)
    if slots["master"]:  # one that the model has in fp32 is its own main weight
        slots["master"] = {one.key_within_rank: one.weight for one in parameters} | slots["master"]
    return {slot: tensors for slot, tensors in slots.items() if tensors}


def _require_none_left(parameters: Sequence[ChunkParameter], path: Path) -> None:
    """Raise `UnreadableStateError` for parameters that no group of the optimizer has."""
    if parameters:
        raise UnreadableStateError(f"{path}: no group of the optimizer has {parameters[0].name}; {WAY_OUT}")


def _slots_of_states(states: Mapping[Any, Mapping[str, Any]], path: Path) -> list[str]:
    """Return what an optimizer keeps of each parameter beside counts. `UnreadableStateError` for what is not kept here."""
    kept = sorted(
        {name for state in states.values() for name, value in state.items() if isinstance(value, Tensor)} - {"step"}
    )
    if strangers := [name for name in kept if name not in MOMENTS]:
        raise UnreadableStateError(
            f"{path}: its optimizer keeps {', '.join(strangers)}, and those that are built here {', '.join(MOMENTS)}"
        )
    return kept


def _main_weights(weights: Iterable[Any], members: Sequence[ChunkParameter], path: Path) -> dict[str, Tensor]:
    """Return the fp32 weights, by key, of a group's members that the model has in low precision."""
    rounded = [member for member in members if member.weight.dtype != torch.float32]
    return {
        member.key_within_rank: _require_main_weight_matches(
            _require_matching_shape(tensor, member, path), member, path
        )
        for member, tensor in zip(rounded, chain(weights, repeat(None)))
    }


def _parameters_of_group(
    parameters: Sequence[ChunkParameter], group: Mapping[str, Any], what: str
) -> list[ChunkParameter]:
    """Return a group's parameters, in order. what: names it in errors. `UnreadableStateError` if counts differ."""
    members = [parameter for parameter in parameters if _is_in_param_group(parameter, group)]
    if len(members) != len(group["params"]):
        raise UnreadableStateError(
            f"{what} has {len(group['params'])} parameters where {len(members)} of the network belong to it; {WAY_OUT}"
        )
    return members


def _is_in_param_group(parameter: ChunkParameter, group: Mapping[str, Any]) -> bool:
    """Whether Megatron's rules for weight decay and decoupled learning rate put a parameter into a group."""
    decays = not (parameter.name.endswith(".bias") or parameter.weight.dim() == 1)
    decayed = bool(group["wd_mult"]) if "wd_mult" in group else bool(group.get("weight_decay"))
    decoupled = bool(group.get("is_decoupled_lr"))
    return decays == decayed and (not decoupled or bool(_SHARED.search(parameter.name)))


def main_weight_matches(master: Tensor, weight: Tensor) -> bool:
    """Whether fp32 main weights (any shape) equal a weight after rounding.

    Only the first and last elements are compared, so that large files are not read twice.
    """
    mine, theirs = master.reshape(-1), weight.reshape(-1)
    return all(
        torch.equal(mine[part].to(weight.dtype), theirs[part]) for part in (slice(_COMPARED), slice(-_COMPARED, None))
    )


def _require_matching_shape(tensor: Any, parameter: ChunkParameter, path: Path) -> Tensor:
    if not isinstance(tensor, Tensor) or tensor.shape != parameter.weight.shape:
        shape = f"of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else "missing"
        raise UnreadableStateError(
            f"{path}: the optimizer's state of {parameter.name} is {shape}, its weight {tuple(parameter.weight.shape)}; {WAY_OUT}"
        )
    return tensor


def _require_main_weight_matches(master: Tensor, parameter: ChunkParameter, path: Path) -> Tensor:
    if not main_weight_matches(master, parameter.weight):
        raise UnreadableStateError(f"{path}: the optimizer's fp32 weights are not those of {parameter.name}; {WAY_OUT}")
    return master


def _read_distributed_optimizer(
    content: Any, parameters: Sequence[ChunkParameter], arguments: Mapping[str, Any], path: Path
) -> Slots:
    """Return slot -> key -> tensor of a distributed optimizer; every tensor is a view of its buffer."""
    states = content if isinstance(content, list) else [content]
    left, slots = list(parameters), Slots((slot, {}) for slot in SLOTS.values())
    for number, state in enumerate(states):
        members = left if len(states) == 1 else [one for one in left if bool(_EXPERT.search(one.name)) == (number > 0)]
        for place, formats, buffer in _iter_optimizer_buffers(state, path):
            here = _parameters_in_buffer(members, formats, place)
            layout = _find_buffer_layout(buffer, here, arguments, path)
            for one in here:
                span = slice(layout[one.key_within_rank].start, layout[one.key_within_rank].stop)
                for name, slot in SLOTS.items():
                    slots[slot][one.key_within_rank] = buffer[name][span].view(one.weight.shape)
            left = [one for one in left if one not in here]
            members = [one for one in members if one not in here]
    if left:
        raise UnreadableStateError(f"{path}: no buffer of the optimizer holds {left[0].name}; {WAY_OUT}")
    return slots


def _iter_optimizer_buffers(state: Any, path: Path) -> Iterator[tuple[int, Any, Any]]:
    """Yield (number, dtypes, buffer) of each buffer of a distributed optimizer, in order; nothing if the state is None."""
    if state is None:
        return
    numbered = (
        {place: part for place, part in state.items() if isinstance(place, int)} if isinstance(state, Mapping) else None
    )
    if numbered is None or not all(isinstance(part, Mapping) for part in numbered.values()):
        raise CheckpointError(f"{path} is damaged: it holds no buffers by number")
    for place in sorted(numbered):
        for formats, buffer in numbered[place].items():
            yield place, formats, buffer


def _parameters_in_buffer(members: Sequence[ChunkParameter], formats: Any, place: int) -> list[ChunkParameter]:
    """Return the parameters of one buffer: those of its dtype, and if there are several chunks, of the first one left."""
    rounded = formats[0] if isinstance(formats, tuple) else formats
    alike = [one for one in members if not isinstance(rounded, torch.dtype) or one.weight.dtype == rounded]
    several = len({one.chunk for one in members}) > 1 or place > 0
    first = min((one.chunk for one in alike), default=0)
    return [one for one in alike if one.chunk == first] if several else alike


def _find_buffer_layout(
    buffer: Any, members: Sequence[ChunkParameter], arguments: Mapping[str, Any], path: Path
) -> dict[str, BucketSpan]:
    """Return where members lie in a buffer: where its fp32 weights equal the model's, or `UnreadableStateError`."""
    if not isinstance(buffer, Mapping) or any(
        not isinstance(buffer.get(name), Tensor) or buffer[name].dim() != 1 for name in SLOTS
    ):
        raise UnreadableStateError(
            f"{path} holds no buffers of {', '.join(SLOTS)}, but those of a release that this does not read; {WAY_OUT}"
        )
    weights, sizes = buffer["param"], [(one.key_within_rank, one.weight.numel()) for one in members]
    ranks = int(arguments.get("data_parallel_size") or 1) * int(arguments.get("context_parallel_size") or 1)
    shared = {one.key_within_rank for one in members if _SHARED.search(one.name)}
    total = int(buffer.get("numel_unpadded") or weights.numel())
    for layout in candidate_buffer_layouts(sizes, total, bucket_size_limit(dict(arguments), ranks), shared):
        if all(
            main_weight_matches(
                weights[layout[one.key_within_rank].start : layout[one.key_within_rank].stop], one.weight
            )
            for one in members
        ):
            return layout
    raise UnreadableStateError(
        f"{path}: its buffer of {total} elements does not hold the {sum(size for _, size in sizes)} of this model's "
        f"weights in an order that is known here; {WAY_OUT}"
    )
