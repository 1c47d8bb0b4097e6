"""Fill a tree from any checkpoint: every rank asks the source for the boxes that it holds, and gets those and no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from megatron.core.dist_checkpointing.files import DISK, Files
from megatron.core.dist_checkpointing.memory import copy_all
from megatron.core.dist_checkpointing.plan import placed
from megatron.core.dist_checkpointing.saved import Saved, open_saved
from megatron.core.dist_checkpointing.source import Source
from megatron.core.dist_checkpointing.store import CheckpointError, SavedStep
from megatron.core.dist_checkpointing.tree import Placed, Tree
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis

_ALONE = Axis("world")


def load(
    state: Tree,
    source: Source,
    axis: Axis = _ALONE,
    *,
    complete: tuple[str, ...] = (),
    instead: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Fill the tensors of the tree from a source; names that the tree lacks are left alone. Returns the other values.

    All ranks of the axis call this together, each with what it holds; all fail, or none, and before any tensor is changed
    if names or shapes do not fit. Dtypes are converted. complete: beginnings of names under which every name of the
    checkpoint must be asked for by some rank. instead: name -> the checkpoint's name to read in its place.
    """
    instead, tensors = instead or {}, placed(state)
    problems = [_unfit(instead.get(name, name), tensors.get(name), source) for name in state]
    message = _of_all_ranks(list(filter(None, problems)), axis)
    message += _not_requested(state, source, axis, complete)
    if message:
        raise CheckpointError(f"{len(message)} names of the checkpoint do not fit this run", message)
    failure = _fill(tensors, source, instead)
    if failures := _of_all_ranks([failure] if failure else [], axis):
        raise CheckpointError(f"{source.where} cannot be read", failures)
    return {name: source.values[instead.get(name, name)] for name in state if name not in tensors}


def _not_requested(state: Tree, source: Source, axis: Axis, complete: tuple[str, ...]) -> list[str]:
    """The names of a checkpoint with these beginnings that no rank of the axis asks for, as messages."""
    if not complete:
        return []
    expected = sorted(name for name in (*source.formats, *source.values) if name.startswith(complete))
    requested = 0  # a bit a name: checkpoints have many names
    for names in collectives.gather_objects(sum(1 << i for i, name in enumerate(expected) if name in state), axis):
        requested |= names
    return [
        f"{name}: unexpected, the checkpoint has it and this run does not"
        for i, name in enumerate(expected)
        if not requested >> i & 1
    ]


def _of_all_ranks(problems: Sequence[str], axis: Axis) -> list[str]:
    """The problems of all ranks of the axis, each once: the same list on all of them."""
    return list(dict.fromkeys(chain.from_iterable(collectives.gather_objects(problems, axis))))


def verify(source: Saved, axis: Axis = _ALONE) -> list[str]:
    """Read every byte of a checkpoint once, each rank its share; what is wrong, the same list on all ranks."""
    return _of_all_ranks(source.verify(part=axis.rank, parts=axis.size), axis)


def open_sound(
    steps: Sequence[SavedStep], axis: Axis = _ALONE, *, verified: bool = True, files: Files = DISK
) -> tuple[Saved, list[str]]:
    """The first of these checkpoints that is sound, and what is wrong with those before it: the same on all ranks.

    verified: every byte is read; otherwise only what opening reads. Raises `CheckpointError` with all that was found when
    none is sound.
    """
    refused: list[str] = []
    for step in steps:
        saved, problems = _opened(step, axis, files)
        if saved is not None and not problems and verified:
            problems = verify(saved, axis)
        if saved is not None and not problems:
            return saved, refused
        refused += [
            f"the checkpoint of iteration {step.iteration} is refused:",
            *(f"  {problem}" for problem in problems),
        ]
    raise CheckpointError("no checkpoint is sound", refused)


def _opened(step: SavedStep, axis: Axis, files: Files) -> tuple[Saved | None, list[str]]:
    """A checkpoint, opened by every rank of the axis, and what is wrong with it: the same problems on all ranks."""
    saved, problems = None, tuple[str, ...]()
    try:
        saved = open_saved(step.folder, files=files)
    except CheckpointError as error:
        problems = error.problems or (str(error),)
    everywhere = _of_all_ranks(problems, axis)
    saves = collectives.gather_objects(saved.commit.save if saved is not None else "", axis)
    if not everywhere and len(set(saves)) > 1:
        return None, [
            f"the ranks see different checkpoints in {step.folder}; it must lie where all of them see the same files"
        ]
    return saved, everywhere


def _fill(tensors: Mapping[str, Placed], source: Source, instead: Mapping[str, str]) -> str:
    """Read this rank's boxes; why that failed, or nothing."""
    pairs = (
        (tensor, source.read(instead.get(name, name), box))
        for name, value in tensors.items()
        for box, tensor in value.pieces
    )
    try:
        if isinstance(source, Saved):  # whose boxes are views as a rule, of which many may wait to be copied
            copy_all(pairs)
        else:
            for target, value in pairs:
                target.copy_(value)
    except CheckpointError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - the other ranks wait to be told, whatever it is
        return f"{type(error).__name__}: {error}"
    return ""


def _unfit(name: str, value: Placed | None, source: Source) -> str:
    """Why a name of the checkpoint cannot become this value, or nothing. value: None for one that is no tensor."""
    if name not in source.formats and name not in source.values:
        return f"{name}: missing in the checkpoint"
    format = source.formats.get(name)
    if value is None or format is None:
        there, here = ("value" if one is None else "tensor" for one in (format, value))
        return "" if there == here else f"{name}: the checkpoint holds a {there}, not a {here}"
    if tuple(format.shape) != tuple(value.shape):
        return f"{name}: shape {tuple(format.shape)} in the checkpoint, {tuple(value.shape)} expected"
    return ""
