"""From sequences on disk to fixed-length samples: three arrays, the same as Megatron's bit for bit.

Lay the sequences of a split end to end, once per epoch, in the order of the *document index*. Every L tokens a sample
begins; it also takes the next sample's first token, as the label of its last. The *sample index* holds where each
begins, as (place in the document index, token within that sequence). The *shuffle index* says which of them comes k-th.
When the last epoch is needed only in part, it is shuffled by itself, so that early samples do not draw on it.

    one RandomState(seed):  shuffle documents  [, shuffle the last epoch's]  ->  shuffle samples  [, the last epoch's]

`load_or_build` keeps such arrays on disk. Files appear by renaming, so any number of processes may race; whoever finds
a file missing, cut short or of another shape builds it again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.indexed import DataError, temporary_name

LAST_EPOCH_SHARE = 0.80  # a last epoch of which less than this is needed is shuffled by itself

Arrays = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[tuple[int, ...], type]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """How often the sequences are gone through, and how many samples that gives."""

    epochs: int
    samples: int
    samples_before_last: int  # below `samples` when the last epoch is shuffled by itself

    @property
    def separates_last(self) -> bool:
        """Whether the last epoch is shuffled by itself."""
        return self.samples_before_last < self.samples


def plan_epochs(tokens: int, wanted: int | None, *, sequence_length: int, keep_partial: bool = False) -> EpochPlan:
    """The fewest epochs of `tokens` tokens that give `wanted` samples; one epoch when that is None.

    keep_partial: a last sample that is not full counts too.
    """
    assert tokens > 0, "a split without tokens has no samples"
    needed = tokens if wanted is None else wanted * sequence_length + 1
    epochs = max(1, -(-needed // tokens))
    available = epochs * tokens - 1  # the last token is only a label
    samples = -(-available // sequence_length) if keep_partial else available // sequence_length
    if epochs == 1 or wanted is None:
        return EpochPlan(epochs, samples, samples)
    before = ((epochs - 1) * tokens - 1) // sequence_length
    per_epoch = (tokens - 1) // sequence_length
    separate = wanted - before < int(LAST_EPOCH_SHARE * per_epoch)
    return EpochPlan(epochs, samples, before if separate else samples)


def build_indices(lengths: np.ndarray, plan: EpochPlan, *, first: int, sequence_length: int, seed: int) -> Arrays:
    """The three index arrays of the sequences [first, first + len(lengths)) whose lengths are given.

    Returns document_index [epochs * len(lengths)], sample_index [samples + 1, 2], shuffle_index [samples].
    """
    assert plan.samples > 0, "a plan without samples has no index"
    random = np.random.RandomState(seed)
    document_index = _document_index(len(lengths), plan, first, random)
    sample_index = _sample_index(np.array(lengths)[document_index - first], plan.samples, sequence_length)
    shuffle_index = _shuffle_index(plan, random)
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}


def index_shapes(num_sequences: int, plan: EpochPlan) -> Shapes:
    """Shape and type of each array of `build_indices`."""
    documents = num_sequences * plan.epochs
    return {
        "document_index": ((documents,), np.int32),
        "sample_index": ((plan.samples + 1, 2), _place_type(documents)),
        "shuffle_index": ((plan.samples,), _shuffle_type(plan.samples)),
    }


def _place_type(num_documents: int) -> type:
    # Offsets within a sequence always fit, since the format's lengths are int32.
    return np.int32 if num_documents <= np.iinfo(np.int32).max else np.int64


def _shuffle_type(samples: int) -> type:
    return np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64


def _document_index(count: int, plan: EpochPlan, first: int, random: np.random.RandomState) -> np.ndarray:
    together = plan.epochs - 1 if plan.separates_last else plan.epochs
    ids = np.arange(first, first + count, dtype=np.int32)
    index = np.tile(ids, plan.epochs)
    random.shuffle(index[: together * count])
    if plan.separates_last:
        random.shuffle(index[together * count :])
    return index


def _sample_index(lengths: np.ndarray, samples: int, sequence_length: int) -> np.ndarray:
    """Where each sample begins and, last, where the last one ends. lengths: in the order of the document index."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = np.arange(1, samples + 1, dtype=np.int64) * sequence_length
    if starts[-1] >= ends[-1]:
        starts[-1] = ends[-1] - 1  # a last sample that is not full ends with the last token, its last label
    place = np.searchsorted(ends, starts, side="right")
    index = np.zeros((samples + 1, 2), _place_type(len(lengths)))
    # The first sample begins at (0, 0) even when the first sequence is empty.
    index[1:, 0] = place
    index[1:, 1] = starts - ends[place] + lengths[place]
    return index


def _shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    index = np.arange(plan.samples, dtype=_shuffle_type(plan.samples))
    random.shuffle(index[: plan.samples_before_last])
    if plan.separates_last:
        random.shuffle(index[plan.samples_before_last :])
    return index


@dataclass(frozen=True, slots=True)
class IndexCache:
    """Where index arrays are kept; `folder` None: nowhere.

    chosen: the user named the folder, so that failing to write there is an error. Otherwise the arrays are only used.
    """

    folder: Path | None
    chosen: bool = True


def load_or_build(
    cache: IndexCache, name: str, description: Mapping[str, Any], shapes: Shapes, build: Callable[[], Arrays]
) -> Arrays:
    """The arrays that `description` determines: from the cache (mapped), or built and stored there.

    name: what the files are called, after the hash of the description.
    """
    if cache.folder is None:
        return build()
    text = json.dumps(description, indent=4)
    stem = f"{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}-{name}"
    found = _load(cache.folder, stem, text, shapes)
    if found is not None:
        return found
    arrays = build()
    for key, (shape, dtype) in shapes.items():
        assert (arrays[key].shape, arrays[key].dtype) == (shape, np.dtype(dtype)), f"{key} is as announced"
    try:
        cache.folder.mkdir(parents=True, exist_ok=True)
        for key, array in arrays.items():
            _write(cache.folder / f"{stem}-{key}.npy", array)
        _write(cache.folder / f"{stem}-description.txt", text)
    except OSError as error:
        message = f"index cache {cache.folder} cannot be written: {error.strerror}"
        if cache.chosen:
            raise DataError(f"{message}; choose a folder with --data-cache-path") from error
        logger.warning("%s; each process builds its own (--data-cache-path chooses another folder)", message)
        return arrays
    # Processes of one machine share the pages of the mapped files; a built copy would be each one's own.
    return _load(cache.folder, stem, text, shapes) or arrays


def _load(folder: Path, stem: str, text: str, shapes: Shapes) -> Arrays | None:
    description = folder / f"{stem}-description.txt"
    if not description.is_file():
        return None
    arrays: Arrays = {}
    try:
        if description.read_text() != text:
            return None
        for key, (shape, dtype) in shapes.items():
            array = np.load(folder / f"{stem}-{key}.npy", mmap_mode="r")
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(f"{key} has shape {array.shape} and type {array.dtype}")
            arrays[key] = array.view(np.ndarray)
    except (OSError, ValueError, EOFError) as error:
        logger.warning("index cache %s is damaged and is built again: %s", folder / stem, error)
        return None
    return arrays


def _write(path: Path, content: np.ndarray | str) -> None:
    temporary = Path(temporary_name(path))
    try:
        with open(temporary, "wb") as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                np.save(file, content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
