"""Conversations as samples: only the answers are learnt, and several short conversations share a sample.

    ids         <user> How ? <end> <bot> So . <end>      8 ids
    tokens      <user> How ? <end> <bot> So .            take 7 places
    labels      How ? <end> <bot> So . <end>
    loss mask   0   0 0     0     1  1 1

    a sample    conversation 4 | conversation 0 | conversation 9 | padding
    documents   0 0 0 0 0 0    | 1 1 1          | 2 2 2 2        | 3 3 3
    positions   0 1 2 3 4 5    | 0 1 2          | 0 1 2 3        | 0 1 2

A conversation that is longer than a sample is cut at its end. Which conversations share a sample is planned once, from the
seed and their lengths (`packing.py`); each epoch goes through the samples in an order of its own.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron.core.config.settings.data import DataConfig
from megatron.core.datasets.conversations import ConversationEncoder, open_conversations
from megatron.core.datasets.dataset_protocols import DatasetKind, Sample, SplitRequest, TokenSpan
from megatron.core.datasets.gpt import TokenSource
from megatron.core.datasets.index_map import IndexCacheFolder, load_or_build_arrays
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.mock import MockConversations
from megatron.core.datasets.packing import plan_sequence_packs, shuffle_epochs
from megatron.core.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)


class ChatDataset:
    """The conversations of some documents of a source, as shuffled samples of `sequence_length` tokens.

    source: a sequence a conversation, ids that are not learnt as ~id. request: its part is a range of documents. A
    sample holds tokens, labels, position_ids, document_ids, padding_mask (int64 [L]; 0 at padding) and loss_mask (float32 [L]).
    """

    def __init__(self, source: TokenSource, request: SplitRequest, *, sequence_length: int, seed: int) -> None:
        documents, split = request.part, request.name
        self.source, self.prefix, self.sequence_length = source, source.prefix, sequence_length
        first, stop = (int(source.document_indices[document]) for document in (documents.start, documents.stop))
        lengths = np.array(source.sequence_lengths[first:stop], np.int64)
        long = np.flatnonzero(lengths > sequence_length + 1)
        unanswered = [
            place for place in long.tolist() if not (source.get(first + place, 1, sequence_length) >= 0).any()
        ]
        retained = np.delete(np.arange(len(lengths)), unanswered)
        if len(retained) == 0:
            raise DataError(
                f"the {split} split of {self.prefix} holds {len(lengths)} conversations, and none with an answer "
                f"within {sequence_length + 1} tokens; give it more, or a larger --seq-length"
            )
        sizes = np.minimum(lengths[retained] - 1, sequence_length)
        self.description = {
            "class": type(self).__name__,
            "prefix": self.prefix,
            "documents": [documents.start, documents.stop, len(source.document_indices) - 1],
            "sizes": hashlib.sha256(sizes.tobytes()).hexdigest(),
            "seed": seed,
            "split": split,
            "sequence_length": sequence_length,
        }  # not the number of samples: the plan is the same for any
        arrays = load_or_build_arrays(
            request.cache,
            f"{type(self).__name__}-{split}",
            self.description,
            {"order": ((len(retained),), np.int64), "last_of_pack": ((len(retained),), bool)},
            lambda: dict(zip(("order", "last_of_pack"), plan_sequence_packs(sizes, sequence_length, seed))),
        )
        self._conversations = first + retained[arrays["order"]]
        ends = np.flatnonzero(arrays["last_of_pack"]) + 1
        self._packs = np.concatenate([[0], ends])
        self._order = shuffle_epochs(len(ends), request.num_samples, seed)
        self._places = np.arange(sequence_length)
        self.tokens_per_epoch, self.samples_per_epoch = int(sizes.sum()), float(len(ends))
        logger.info(
            "%s (%s): %d conversations in %d samples of %d tokens, %.1f %% of which are filled; %d are cut, %d are "
            "left out since no answer is within the cut",
            self.prefix,
            split,
            len(retained),
            len(ends),
            sequence_length,
            100 * self.fill_ratio,
            len(long) - len(unanswered),
            len(unanswered),
        )

    @property
    def fill_ratio(self) -> float:
        """The share of the samples' places that is not padding."""
        return self.tokens_per_epoch / (self.samples_per_epoch * self.sequence_length)

    def __len__(self) -> int:
        """The number of samples; at least as many as were asked for."""
        return len(self._order)

    def __getitem__(self, index: int) -> Sample:
        """The index-th sample in shuffled order."""
        size = self.sequence_length
        tokens, labels = np.zeros(size, np.int64), np.zeros(size, np.int64)
        starts: list[int] = []
        at = 0
        for conversation in self._packed_conversation_indices(index):
            ids = self.source.get(conversation, 0, size + 1)
            starts.append(at)
            end = at + len(ids) - 1
            tokens[at:end], labels[at:end] = ids[:-1], ids[1:]
            at = end
        loss_mask = (labels >= 0).astype(np.float32)
        loss_mask[at:] = 0
        sizes = np.diff([*starts, at, size])
        positions = self._places - np.repeat([*starts, at], sizes)
        documents = np.repeat(np.arange(len(sizes)), sizes)
        # An id that is not learnt is kept as ~id, which is what is below zero.
        return {
            "tokens": tokens ^ (tokens >> 63),
            "labels": labels ^ (labels >> 63),
            "loss_mask": loss_mask,
            "position_ids": positions,
            "document_ids": documents,
            "padding_mask": (self._places < at).astype(np.int64),
        }

    def token_sources(self, index: int) -> list[TokenSpan]:
        """Return which conversations the index-th sample holds. The last token of each is a label only and not counted."""
        spans: list[TokenSpan] = []
        at = 0
        for conversation in self._packed_conversation_indices(index):
            document = int(np.searchsorted(self.source.document_indices, conversation, side="right")) - 1
            size = min(int(self.source.sequence_lengths[conversation]) - 1, self.sequence_length)
            spans.append(TokenSpan(self.prefix, document, conversation, 0, size, at))
            at += size
        return spans

    def samples_with_document(self, document: int) -> np.ndarray:
        """The samples with a conversation of this document, in rising order. int64 [samples]"""
        first, stop = self.source.document_indices[document : document + 2].tolist()
        local = np.flatnonzero((self._conversations >= first) & (self._conversations < stop))
        packs = np.searchsorted(self._packs, local, side="right") - 1
        return np.flatnonzero(np.isin(self._order, packs))

    def _packed_conversation_indices(self, index: int) -> Sequence[int]:
        """Return the numbers of the conversations packed into sample `index`. `IndexError` out of range."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        pack = self._order[index]
        return self._conversations[self._packs[pack] : self._packs[pack + 1]].tolist()


@dataclass(frozen=True, slots=True)
class ChatDatasetKind(DatasetKind):
    """Conversations; --split counts the lines of a file, which are the documents."""

    config: DataConfig
    tokenizer: Tokenizer
    encoder: ConversationEncoder | None  # of made-up conversations none
    sequence_length: int
    seed: int
    name: str = ChatDataset.__name__

    def open(self, prefix: str) -> TokenSource:
        """The ids of a file's conversations, or made-up ones."""
        if self.encoder is None:
            return MockConversations(self.tokenizer.vocab_size, self.tokenizer.eod)
        return open_conversations(prefix, self.encoder, self._index_cache(prefix))

    def build_one_split(self, source: TokenSource, request: SplitRequest) -> ChatDataset:
        """Samples of these lines' conversations."""
        if self.encoder is not None:
            request = replace(request, cache=self._index_cache(source.prefix))
        return ChatDataset(source, request, sequence_length=self.sequence_length, seed=self.seed)

    def _index_cache(self, path: str) -> IndexCacheFolder:
        """Return where ids and packing plan are cached: --data-cache-path, else PATH.cache beside the file."""
        beside = Path(f"{path}.cache") / f"{self.name}_indices"
        return IndexCacheFolder.from_flag(self.config.data_cache_path, otherwise=beside)


def make_chat_dataset_kind(
    config: DataConfig, *, sequence_length: int, seed: int, tokenizer: Tokenizer
) -> ChatDatasetKind:
    """Return the dataset kind of --sft. `ConfigError` if the tokenizer has no chat template and no format is named."""
    encoder = None if config.mock_data else ConversationEncoder(tokenizer, config.chat.sft_tokenizer_prompt_format)
    return ChatDatasetKind(config, tokenizer, encoder, sequence_length, seed)
