"""Megatron's multimodal .bin/.idx pairs: each document a text (mode 0) and an image (mode 1), as tools/preprocess_mmdata.py writes them.

    text    ids, filled up to one length with end-of-document ids
    image   [padding, the bytes of its file, four to an int32]

A document becomes a conversation without a question: the image, then its text, all of which is learnt, with one end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron.core.datasets.image_conversations import SLOT, ConversationRowSource, ImageConversationRow
from megatron.core.datasets.indexed import IndexedDataset, bin_path, idx_path
from megatron.core.datasets.sidecar import check_dataset_tokenizer
from megatron.core.datasets.storage import DataError
from megatron.core.tokenizers.base import Tokenizer, tokenizer_fingerprint_fields

TEXT, IMAGE = 0, 1  # modes


def is_bin_idx_pair(prefix: str) -> bool:
    """Return whether a prefix names a .bin/.idx pair."""
    return os.path.isfile(idx_path(prefix)) and not os.path.isfile(prefix)


def image_bytes_to_int32(content: bytes) -> np.ndarray:
    """Encode an image file's bytes as a sequence: the number of zeros added, then the bytes. int32 [1 + bytes / 4]"""
    padding = -len(content) % 4
    return np.concatenate([np.array([padding], "<i4"), np.frombuffer(content + bytes(padding), "<i4")])


def bin_idx_row_source(prefix: str, tokenizer: Tokenizer) -> ConversationRowSource:
    """Return the documents of a multimodal pair as conversation rows. `DataError` if another tokenizer wrote it."""
    check_dataset_tokenizer(prefix, tokenizer_fingerprint_fields(tokenizer))
    state = os.stat(bin_path(prefix))
    identity = {"pair": os.path.abspath(prefix), "bytes": state.st_size, "time": state.st_mtime_ns}
    folder = os.path.dirname(os.path.abspath(prefix))
    return ConversationRowSource(prefix, folder, identity, lambda: _read_bin_idx_documents(prefix, tokenizer.eod))


def _read_bin_idx_documents(prefix: str, eod: int) -> Iterator[ImageConversationRow | str]:
    """Yield each document of a multimodal pair as an `ImageConversationRow`, or as a text saying why it cannot be used."""
    data = IndexedDataset(prefix, multimodal=True)
    modes, name = data.sequence_modes, Path(bin_path(prefix)).name
    assert modes is not None, "a pair opened as multimodal has modes"
    if data.dtype != np.int32:
        raise DataError(
            f"{prefix} holds {data.dtype}; pairs with images hold int32, as tools/preprocess_mmdata.py writes"
        )
    for number in range(len(data.document_indices) - 1):
        first, last = data.document_indices[number : number + 2].tolist()
        ids: list[np.ndarray] = []
        images: list[str] = []
        for sequence in range(first, last):
            if modes[sequence] == IMAGE:
                padding = int(data.get(sequence, 0, 1)[0]) if data.sequence_lengths[sequence] else -1
                size = 4 * (int(data.sequence_lengths[sequence]) - 1) - padding
                if not 0 <= padding < 4 or size < 0:
                    break
                images.append(f"{name}@{int(data.offsets(sequence, sequence + 1)[0]) + 4}+{size}/image {sequence}")
            else:
                ids.append(_trim_eod_padding(data.get(sequence), eod))
        else:
            text = np.concatenate([np.empty(0, np.int32), *ids])
            marks = np.full(len(images), ~SLOT, np.int32)
            yield (
                ImageConversationRow([], images, np.concatenate([marks, text]))
                if len(text)
                else f"document {number} has no text"
            )
            continue
        yield f"document {number}: its image does not begin with a number of padding bytes"


def _trim_eod_padding(ids: np.ndarray, eod: int) -> np.ndarray:
    """Return the ids with the run of `eod` that pads them cut to one."""
    text = np.asarray(ids, np.int32)
    others = np.flatnonzero(text != eod)
    length = int(others[-1]) + 1 if len(others) else 0
    return text[: min(len(text), length + 1)]
