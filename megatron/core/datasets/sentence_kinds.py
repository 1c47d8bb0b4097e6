"""Kinds of data sets of sentences, for encoders: how a prefix is opened, and how samples with masked words are made of documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import DataConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.datasets.bert import BERTDataset, BERTSampleOptions
from megatron.core.datasets.dataset_protocols import DatasetKind, SplitRequest
from megatron.core.datasets.gpt import TokenSource
from megatron.core.datasets.masking import TokenMaskingOptions, word_continuation_mask
from megatron.core.datasets.mock import MockSentences
from megatron.core.datasets.sentence_map import usable_document_mask
from megatron.core.datasets.special_tokens import refuse_added_special_tokens
from megatron.core.datasets.t5 import T5Dataset, T5SampleOptions
from megatron.core.datasets.text_kinds import open_indexed_pair
from megatron.core.tokenizers.base import Tokenizer, tokenizer_fingerprint_fields


@dataclass(frozen=True, slots=True)
class SentenceDatasetKind(DatasetKind):
    """Samples of sentences; --split counts documents. tokenizer: its fingerprint; plain: its ids without a special meaning."""

    config: DataConfig
    dataset: type[BERTDataset] | type[T5Dataset]
    options: Any
    least_sentences: int
    seed: int
    tokenizer: Mapping[str, str | int]
    plain: np.ndarray

    @property
    def name(self) -> str:
        """The class name of the dataset."""
        return self.dataset.__name__

    def open(self, prefix: str) -> TokenSource:
        """The sentences behind a prefix, or made-up ones; `DataError` when another tokenizer wrote them."""
        return (
            MockSentences(self.plain)
            if self.config.mock_data
            else open_indexed_pair(self.config, prefix, self.tokenizer)
        )

    def split_has_any_sample(self, source: TokenSource, part: range) -> bool:
        """Whether one of these documents makes a sample."""
        bounds = source.document_indices[part.start : part.stop + 1]
        return len(bounds) > 1 and bool(
            usable_document_mask(source.sequence_lengths, bounds, self.least_sentences).any()
        )

    def build_one_split(self, source: TokenSource, request: SplitRequest) -> BERTDataset | T5Dataset:
        """Samples of these documents."""
        return self.dataset(source, self.options, request, seed=self.seed)


def make_bert_dataset_kind(run: RunConfig, tokenizer: Tokenizer) -> DatasetKind:
    """Return the dataset kind of a BERT. `ConfigError` if the tokenizer lacks a special token."""
    masking, pairs = run.data.masking, run.model.bert_binary_head
    cls, sep, mask, pad = _require_special_token_ids(
        tokenizer, "BERT", cls="[CLS]", sep="[SEP]", mask="[MASK]", pad="padding"
    )
    options = BERTSampleOptions(
        sequence_length=run.train.seq_length,
        short_seq_prob=masking.short_seq_prob,
        masking=TokenMaskingOptions(masking.mask_prob),
        pairs=masking.bert_pair_task if pairs else None,
        continues=word_continuation_mask(tokenizer),
        cls=cls,
        sep=sep,
        mask=mask,
        pad=pad,
    )
    return _make_sentence_dataset_kind(run, tokenizer, BERTDataset, options, least_sentences=2 if pairs else 1)


def make_t5_dataset_kind(run: RunConfig, tokenizer: Tokenizer) -> DatasetKind:
    """Return the dataset kind of a T5. `ConfigError` if the tokenizer lacks a special token."""
    masking = run.data.masking
    bos, eos, pad = _require_special_token_ids(tokenizer, "T5", bos="begin of text", eos="end of text", pad="padding")
    sentinels = tokenizer.additional_special_tokens_ids
    if not sentinels:
        raise ConfigError(
            "T5 needs sentinels in the place of the spans that it takes out; give --vocab-extra-ids, 100 is usual, "
            "also to tools/preprocess_data.py"
        )
    options = T5SampleOptions(
        encoder_length=run.train.seq_length,
        decoder_length=run.train.decoder_seq_length or run.train.seq_length,
        short_seq_prob=masking.short_seq_prob,
        masking=TokenMaskingOptions(masking.mask_prob, max_ngram=10, geometric=True),
        continues=word_continuation_mask(tokenizer),
        sentinels=sentinels,
        bos=bos,
        eos=eos,
        pad=pad,
    )
    return _make_sentence_dataset_kind(run, tokenizer, T5Dataset, options, least_sentences=1)


def _require_special_token_ids(tokenizer: Tokenizer, network: str, **needed: str) -> list[int]:
    """Return the tokenizer's special ids named in `needed`; `ConfigError` for any it lacks, or if it adds ids to every
    text.

    needed: attribute of the tokenizer -> what the message calls it.
    """
    refuse_added_special_tokens(tokenizer)
    lacking = [words for name, words in needed.items() if getattr(tokenizer, name) is None]
    if lacking:
        raise ConfigError(
            f"{network} needs {', '.join(lacking)}, which {type(tokenizer).__name__} does not have; choose a "
            "--tokenizer-type that has them, such as BertWordPieceLowerCase"
        )
    return [getattr(tokenizer, name) for name in needed]


def _make_sentence_dataset_kind(
    run: RunConfig,
    tokenizer: Tokenizer,
    dataset: type[BERTDataset] | type[T5Dataset],
    options: BERTSampleOptions | T5SampleOptions,
    *,
    least_sentences: int,
) -> SentenceDatasetKind:
    special = [tokenizer.eod, *tokenizer.special_ids, *tokenizer.additional_special_tokens_ids]
    special += [] if tokenizer.pad is None else [tokenizer.pad]
    plain = np.setdiff1d(np.arange(tokenizer.vocab_size), special)
    fingerprint = tokenizer_fingerprint_fields(tokenizer)
    return SentenceDatasetKind(run.data, dataset, options, least_sentences, run.train.seed, fingerprint, plain)


SENTENCE_KINDS: Mapping[str, Callable[[RunConfig, Tokenizer], DatasetKind]] = MappingProxyType(
    {"bert": make_bert_dataset_kind, "t5": make_t5_dataset_kind}
)
