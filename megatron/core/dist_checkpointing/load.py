"""Fill a tree from any checkpoint: every rank reads exactly the boxes that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError, CommittedCheckpoint
from megatron.core.dist_checkpointing.files import DISK, FileSystem
from megatron.core.dist_checkpointing.save_plan import sharded_tensors_of_state
from megatron.core.dist_checkpointing.saved import NativeCheckpoint, open_native_checkpoint
from megatron.core.dist_checkpointing.sharded_state import ShardedTensor, Tree
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.dist_checkpointing.state_hooks import OPTIONAL
from megatron.core.dist_checkpointing.threaded_copy import copy_tensors_in_threads
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis

_ALONE = Axis("world")


def load_into_sharded_state(
    state: Tree,
    source: CheckpointSource,
    axis: Axis = _ALONE,
    *,
    complete: tuple[str, ...] = (),
    instead: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Fill the tensors of the tree from a source, and return the values for the names of the tree that are no tensors.

    Collective over the axis: each rank passes what it holds; either all fail or none, and before any tensor is changed
    if names or shapes do not fit. Raises `CheckpointError` with all problems. Names that the tree lacks are ignored;
    dtypes are converted. complete: prefixes of names that some rank must request if the checkpoint has them. instead:
    name of the tree -> name of the checkpoint to read in its place.
    """
    instead, tensors = instead or {}, sharded_tensors_of_state(state)
    problems = [_mismatch_message(instead.get(name, name), tensors.get(name), source) for name in state]
    message = _union_over_ranks(list(filter(None, problems)), axis)
    message += _unrequested_name_problems(state, source, axis, complete)
    if message:
        raise CheckpointError(f"{len(message)} names of the checkpoint do not fit this run", message)
    failure = _fill_local_boxes(tensors, source, instead)
    if failures := _union_over_ranks([failure] if failure else [], axis):
        raise CheckpointError(f"{source.where} cannot be read", failures)
    return {name: source.values[instead.get(name, name)] for name in state if name not in tensors}


def _unrequested_name_problems(
    state: Tree, source: CheckpointSource, axis: Axis, complete: tuple[str, ...]
) -> list[str]:
    """Return a message for each name of the checkpoint with these prefixes that no rank of the axis requests."""
    if not complete:
        return []
    optional = tuple(source.values.get(OPTIONAL, ()))
    expected = sorted(
        name
        for name in (*source.formats, *source.values)
        if name.startswith(complete) and not name.startswith(optional)
    )
    requested = 0  # a bit a name: checkpoints have many names
    for names in collectives.gather_objects(sum(1 << i for i, name in enumerate(expected) if name in state), axis):
        requested |= names
    return [
        f"{name}: unexpected, the checkpoint has it and this run does not"
        for i, name in enumerate(expected)
        if not requested >> i & 1
    ]


def _union_over_ranks(problems: Sequence[str], axis: Axis) -> list[str]:
    """Return the problems of all ranks without duplicates: the same list on every rank."""
    return list(dict.fromkeys(chain.from_iterable(collectives.gather_objects(problems, axis))))


def verify_checkpoint(source: NativeCheckpoint, axis: Axis = _ALONE) -> list[str]:
    """Read every byte of a checkpoint once, each rank its share; returns the problems, the same list on all ranks."""
    return _union_over_ranks(source.verify(part=axis.rank, parts=axis.size), axis)


def open_first_valid(
    steps: Sequence[CommittedCheckpoint], axis: Axis = _ALONE, *, verified: bool = True, files: FileSystem = DISK
) -> tuple[NativeCheckpoint, list[str]]:
    """Open the first valid checkpoint of `steps`, in their order. Collective; the same result on all ranks.

    Returns it, and the problems of those before it. verified: read every byte; else only what opening reads.
    Raises `CheckpointError` with all problems if none is valid.
    """
    refused: list[str] = []
    for step in steps:
        saved, problems = _open_and_gather_problems(step, axis, files)
        if saved is not None and not problems and verified:
            problems = verify_checkpoint(saved, axis)
        if saved is not None and not problems:
            return saved, refused
        refused += [
            f"the checkpoint of iteration {step.iteration} is refused:",
            *(f"  {problem}" for problem in problems),
        ]
    raise CheckpointError("no checkpoint is sound", refused)


def _open_and_gather_problems(
    step: CommittedCheckpoint, axis: Axis, files: FileSystem
) -> tuple[NativeCheckpoint | None, list[str]]:
    """Open a checkpoint on every rank of the axis; return it (None if that failed) and the problems of all ranks."""
    saved, problems = None, tuple[str, ...]()
    try:
        saved = open_native_checkpoint(step.folder, files=files)
    except CheckpointError as error:
        problems = error.problems or (str(error),)
    everywhere = _union_over_ranks(problems, axis)
    saves = collectives.gather_objects(saved.commit.save if saved is not None else "", axis)
    if not everywhere and len(set(saves)) > 1:
        return None, [
            f"the ranks see different checkpoints in {step.folder}; it must lie where all of them see the same files"
        ]
    return saved, everywhere


def _fill_local_boxes(
    tensors: Mapping[str, ShardedTensor], source: CheckpointSource, instead: Mapping[str, str]
) -> str:
    """Read this rank's boxes; returns why that failed, or ""."""
    pairs = (
        (tensor, source.read(instead.get(name, name), box))
        for name, value in tensors.items()
        for box, tensor in value.pieces
    )
    try:
        if isinstance(source, NativeCheckpoint):  # whose boxes are views as a rule, of which many may wait to be copied
            copy_tensors_in_threads(pairs)
        else:
            for target, value in pairs:
                target.copy_(value)
        for name, whole in tensors.items():
            for box, receive in whole.receivers:
                receive(source.read(instead.get(name, name), box))
    except CheckpointError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - the other ranks must learn of any failure
        return f"{type(error).__name__}: {error}"
    return ""


def _mismatch_message(name: str, value: ShardedTensor | None, source: CheckpointSource) -> str:
    """Return why a tensor or value of the checkpoint does not fit the tree's, or "". value: None if it is no tensor."""
    if name not in source.formats and name not in source.values:
        return f"{name}: missing in the checkpoint"
    format = source.formats.get(name)
    if value is None or format is None:
        there, here = ("value" if one is None else "tensor" for one in (format, value))
        return "" if there == here else f"{name}: the checkpoint holds a {there}, not a {here}"
    if tuple(format.shape) != tuple(value.shape):
        return f"{name}: shape {tuple(format.shape)} in the checkpoint, {tuple(value.shape)} expected"
    return ""
