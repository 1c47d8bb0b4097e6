"""Fill a tree from any checkpoint: every rank asks the source for the boxes that it holds, and gets those and no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    expected = (
        sorted(name for name in (*source.formats, *source.values) if name.startswith(complete)) if complete else []
    )
    here = sum(1 << place for place, name in enumerate(expected) if name in state)
    result = collectives.gather_objects((list(filter(None, problems)), here), axis)
    requested = 0
    for _, names in result:
        requested |= names
    message = list(dict.fromkeys(problem for theirs, _ in result for problem in theirs))
    message += [
        f"{name}: unexpected, the checkpoint has it and this run does not"
        for place, name in enumerate(expected)
        if not requested >> place & 1
    ]
    if message:
        raise CheckpointError(f"{len(message)} names of the checkpoint do not fit this run", message)
    failures = collectives.gather_objects(_fill(tensors, source, instead), axis)
    if any(failures):
        raise CheckpointError(f"{source.where} cannot be read", list(dict.fromkeys(filter(None, failures))))
    return {name: source.values[instead.get(name, name)] for name in state if name not in tensors}


def verify(source: Saved, axis: Axis = _ALONE) -> list[str]:
    """Read every byte of a checkpoint once, each rank its share; what is wrong, the same list on all ranks."""
    result = collectives.gather_objects(source.verify(part=axis.rank, parts=axis.size), axis)
    return list(dict.fromkeys(problem for theirs in result for problem in theirs))


def open_sound(
    steps: Sequence[SavedStep], axis: Axis = _ALONE, *, verified: bool = True, files: Files = DISK
) -> tuple[Saved, list[str]]:
    """The first of these checkpoints that is sound, and what is wrong with those before it: the same on all ranks.

    verified: every byte is read; otherwise only what opening reads. Raises `CheckpointError` with all that was found when
    none is sound.
    """
    refused: list[str] = []
    for step in steps:
        saved, save = None, ""
        problems: tuple[str, ...] = ()
        try:
            saved = open_saved(step.folder, files=files)
            save = saved.commit.save
        except CheckpointError as error:
            problems = error.problems or (str(error),)
        seen = collectives.gather_objects((save, problems), axis)
        result = list(dict.fromkeys(problem for _, theirs in seen for problem in theirs))
        if not result and len({save for save, _ in seen}) > 1:
            result = [
                f"the ranks see different checkpoints in {step.folder}; it must lie where all of them see the same files"
            ]
        if not result and saved is not None:
            result = verify(saved, axis) if verified else []
            if not result:
                return saved, refused
        refused += [
            f"the checkpoint of iteration {step.iteration} is refused:",
            *(f"  {problem}" for problem in result),
        ]
    raise CheckpointError("no checkpoint is sound", refused)


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
    is_tensor = name in source.formats
    if value is None or not is_tensor:
        if value is None and not is_tensor:
            return ""
        return f"{name}: the checkpoint holds a {'tensor' if is_tensor else 'value'}, not a {'value' if is_tensor else 'tensor'}"
    if tuple(source.formats[name].shape) != tuple(value.shape):
        return f"{name}: shape {tuple(source.formats[name].shape)} in the checkpoint, {tuple(value.shape)} expected"
    return ""
