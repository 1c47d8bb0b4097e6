"""Windows of tokens for next-token prediction.

A `GPTDataset` is one split of one token source, cut into samples of L tokens by the indices of `index_map.py`. Sample k
is L + 1 tokens: the first L are the input, the last L the labels. Documents follow each other within a sample; the
options say whether positions, attention and loss notice where one ends.

    ids        a b EOD c d e EOD f      L = 7
    tokens     a b EOD c d e EOD        labels  b EOD c d e EOD f
    positions  0 1 2   0 1 2 3          with reset_position_ids
    documents  0 0 0   1 1 1 1          with reset_attention_mask: only equal numbers see each other
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron.core.datasets.dataset_protocols import Sample, SplitRequest, TokenSpan
from megatron.core.datasets.index_map import (
    build_gpt_indices,
    gpt_index_shapes,
    hash_arrays,
    load_or_build_arrays,
    plan_epochs,
)
from megatron.core.datasets.indexed import DataError

NO_PAD = -1  # padding that no token id equals

# What is done to the ids of sample `index` before they are cut or padded to L + 1: (ids [t], index) -> ids, of any length.
Rearrange = Callable[[np.ndarray, int], np.ndarray]


class TokenSource(Protocol):
    """Sequences of token ids, from files (`IndexedDataset`) or made up.

    document_indices: the first sequence of each document and, last, the number of sequences.
    """

    prefix: str
    sequence_lengths: np.ndarray
    document_indices: np.ndarray

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Ids [offset, offset + length) of one sequence, to its end when `length` is None."""


@dataclass(frozen=True, slots=True)
class GPTSampleOptions:
    """How a window of ids becomes a sample.

    pad: this id has no loss and is fed as 0. keep_partial: a last window that is not full is padded, not dropped.
    """

    sequence_length: int
    vocab_size: int
    eod: int
    pad: int = NO_PAD
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    keep_partial: bool = False


class GPTDataset:
    """One split of one token source, as shuffled samples.

    request: its part is a range of sequences. A sample holds tokens, labels, position_ids (int64 [L]), loss_mask (float32 [L]), and document_ids (int64 [L], the
    number of ends of document before each position) when attention is to be reset.
    """

    def __init__(
        self,
        source: TokenSource,
        options: GPTSampleOptions,
        request: SplitRequest,
        *,
        seed: int,
        rearrange: Rearrange | None = None,
    ) -> None:
        sequences, num_samples = request.part, request.num_samples
        lengths = source.sequence_lengths[sequences.start : sequences.stop]
        tokens = int(lengths.sum(dtype=np.int64))
        size = options.sequence_length
        if tokens == 0 or (num_samples is None and tokens <= size):
            raise DataError(
                f"the {request.name} split of {source.prefix} holds {len(sequences)} of its "
                f"{len(source.sequence_lengths)} sequences, with {tokens} tokens; samples of {size} tokens "
                f"need at least {size + 1}: give that split a larger share in --split, or none"
            )
        plan = plan_epochs(tokens, num_samples, sequence_length=size, keep_partial=options.keep_partial)
        description = {
            "class": type(self).__name__,
            "prefix": source.prefix,
            "sequences": [sequences.start, sequences.stop, len(source.sequence_lengths)],
            "tokens": tokens,
            "lengths": hash_arrays(lengths),
            "num_samples": num_samples,
            "split": request.name,
            "seed": seed,
            "sequence_length": size,
            "keep_partial": options.keep_partial,
        }
        arrays = load_or_build_arrays(
            request.cache,
            f"{type(self).__name__}-{request.name}",
            description,
            gpt_index_shapes(len(sequences), plan),
            lambda: build_gpt_indices(lengths, plan, first=sequences.start, sequence_length=size, seed=seed),
        )
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]
        self.source, self.options, self.description, self.rearrange = source, options, description, rearrange
        self.prefix, self.tokens_per_epoch, self.samples_per_epoch = source.prefix, tokens, tokens / size
        self._can_pad = options.pad != NO_PAD or options.keep_partial or rearrange is not None
        self._positions = np.arange(size, dtype=np.int64)
        self._positions.flags.writeable = False

    def __len__(self) -> int:
        """The number of samples; at least as many as were asked for."""
        return len(self.shuffle_index)

    def __getitem__(self, index: int) -> Sample:
        """The index-th sample in shuffled order."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        options, window = self.options, self._token_window(int(self.shuffle_index[index]), index)
        tokens, labels = window[:-1], window[1:].copy()
        loss_mask = np.ones(options.sequence_length, np.float32)
        sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": self._positions}
        if options.eod_mask_loss or options.reset_position_ids or options.reset_attention_mask:
            self._reset_at_document_ends(sample)
        padding = labels == options.pad
        if self._can_pad:
            sample["padding_mask"] = (tokens != options.pad).astype(np.int64)
        if padding.any() or tokens[0] == options.pad:
            loss_mask[padding] = 0
            labels[padding] = 0
            tokens[tokens == options.pad] = 0
        return sample

    def token_sources(self, index: int) -> list[TokenSpan]:
        """Where the L + 1 tokens of the index-th sample came from; the last is a label only."""
        place = int(self.shuffle_index[index])
        (first, offset), (last, end) = self.sample_index[place].tolist(), self.sample_index[place + 1].tolist()
        spans: list[TokenSpan] = []
        at = 0
        for position in range(first, last + 1):
            sequence = int(self.document_index[position])
            start = offset if position == first else 0
            stop = end + 1 if position == last else int(self.source.sequence_lengths[sequence])
            if stop > start:
                document = int(np.searchsorted(self.source.document_indices, sequence, side="right")) - 1
                spans.append(TokenSpan(self.prefix, document, sequence, start, stop - start, at))
            at += stop - start
        return spans

    def samples_with_document(self, document: int) -> np.ndarray:
        """The samples with a token of this document among their L + 1, in rising order. int64 [samples]"""
        count = len(self.source.document_indices) - 1
        if not 0 <= document < count:
            raise DataError(f"{self.prefix} has no document {document}; it has documents 0 to {count - 1}")
        sequences = range(*self.source.document_indices[document : document + 2].tolist())
        local = (self.document_index >= sequences.start) & (self.document_index < sequences.stop)
        positions = np.flatnonzero(local)
        positions = positions[self.source.sequence_lengths[self.document_index[positions]] > 0]
        begins = np.searchsorted(self.sample_index[1:, 0], positions, side="left")
        ends = np.searchsorted(self.sample_index[:-1, 0], positions, side="right")
        held = np.zeros(len(self) + 1, np.int64)
        np.add.at(held, begins, 1)
        np.add.at(held, ends, -1)
        return np.flatnonzero(np.cumsum(held)[:-1][self.shuffle_index] > 0)

    def _reset_at_document_ends(self, sample: Sample) -> None:
        """Set loss mask, positions and document ids of a sample by its end-of-document tokens, as the options say, in
        place. Such a token belongs to the document that it ends.
        """
        options = self.options
        ends = sample["tokens"] == options.eod
        if options.eod_mask_loss:
            sample["loss_mask"][ends] = 0
        if options.reset_position_ids:
            starts = np.zeros(options.sequence_length, np.int64)
            starts[1:][ends[:-1]] = np.flatnonzero(ends[:-1]) + 1
            sample["position_ids"] = self._positions - np.maximum.accumulate(starts)
        if options.reset_attention_mask:
            sample["document_ids"] = np.cumsum(ends, dtype=np.int64) - ends

    def _token_window(self, place: int, index: int) -> np.ndarray:
        """Return the L + 1 ids of window `place` (before shuffling), padded at the end. int64 [L + 1]

        index: the sample's number, which seeds the rearrangement. `DataError` if the index does not fit the data, or an
        id is outside the vocabulary.
        """
        (first, offset), (last, end) = self.sample_index[place].tolist(), self.sample_index[place + 1].tolist()
        window = np.empty(self.options.sequence_length + 1, np.int64)
        filled = 0
        try:
            for position, sequence in enumerate(self.document_index[first : last + 1].tolist(), first):
                start = offset if position == first else 0
                ids = self.source.get(sequence, start, end + 1 - start if position == last else None)
                window[filled : filled + len(ids)] = ids
                filled += len(ids)
        except (IndexError, ValueError) as error:
            raise DataError(
                f"the index of {self.source.prefix} does not fit its data ({error}); if the files were "
                "replaced while the run was going on, start again; else remove the index cache"
            ) from error
        check_ids_in_vocab(window[:filled], self.options.vocab_size, self.prefix)
        if self.rearrange is not None:
            ids = self.rearrange(window[:filled], index)[: len(window)]
            filled = len(ids)
            window[:filled] = ids
        window[filled:] = self.options.pad
        return window


def check_ids_in_vocab(ids: np.ndarray, vocab_size: int, prefix: str) -> None:
    """Raise `DataError` if one of the ids [t] is not in [0, vocab_size). prefix: the dataset, named in the message."""
    low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"{prefix} holds the id {low if low < 0 else high}, but the vocabulary has {vocab_size} ids; train with "
            "the tokenizer the data was written with"
        )
