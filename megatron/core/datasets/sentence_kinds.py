"""Which samples of sentences the settings ask for: pairs with hidden words, or texts with spans taken out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.config.flags import ConfigError
from megatron.core.config.settings.data import DataConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.datasets.bert import BERTDataset, BERTSampleOptions
from megatron.core.datasets.dataset_protocols import DatasetKind
from megatron.core.datasets.gpt import TokenSource
from megatron.core.datasets.index_map import IndexCacheFolder
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.masking import TokenMaskingOptions, word_continuation_mask
from megatron.core.datasets.mock import MockSentences
from megatron.core.datasets.sentence_map import usable_document_mask
from megatron.core.datasets.sidecar import check_dataset_tokenizer
from megatron.core.datasets.special_tokens import refuse_added_special_tokens
from megatron.core.datasets.t5 import T5Dataset, T5SampleOptions
from megatron.core.tokenizers.base import Tokenizer, tokenizer_fingerprint_fields


@dataclass(frozen=True, slots=True)
class SentenceDatasetKind:
    """Samples of sentences; --split counts documents. tokenizer: its fingerprint; plain: its ids without a special meaning."""

    config: DataConfig
    options: BERTSampleOptions | T5SampleOptions
    least_sentences: int
    seed: int
    tokenizer: Mapping[str, str | int]
    plain: np.ndarray
    name: str

    def open(self, prefix: str) -> TokenSource:
        """The sentences behind a prefix, or made-up ones; `DataError` when another tokenizer wrote them."""
        if self.config.mock_data:
            return MockSentences(self.plain)
        check_dataset_tokenizer(prefix, self.tokenizer)
        return IndexedDataset(prefix, self.config.mmap_bin_files, cache=self.config.object_storage_cache_path)

    def num_split_units(self, source: TokenSource) -> int:
        """The number of documents."""
        return len(source.document_indices) - 1

    def split_has_any_sample(self, source: TokenSource, part: range) -> bool:
        """Whether one of these documents makes a sample."""
        bounds = source.document_indices[part.start : part.stop + 1]
        return len(bounds) > 1 and bool(
            usable_document_mask(source.sequence_lengths, bounds, self.least_sentences).any()
        )

    def build_one_split(
        self, source: TokenSource, part: range, *, num_samples: int | None, split: str, cache: IndexCacheFolder
    ) -> BERTDataset | T5Dataset:
        """Samples of these documents."""
        shared: dict[str, Any] = {
            "documents": part,
            "num_samples": num_samples,
            "seed": self.seed,
            "split": split,
            "cache": cache,
        }
        if isinstance(self.options, BERTSampleOptions):
            return BERTDataset(source, self.options, **shared)
        return T5Dataset(source, self.options, **shared)


def bert_dataset_kind(run: RunConfig, tokenizer: Tokenizer) -> DatasetKind:
    """Return the dataset kind that a BERT is trained on, as the settings say. `ConfigError` if the tokenizer lacks a
    special token.
    """
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
    return SentenceDatasetKind(
        run.data,
        options,
        2 if pairs else 1,
        run.train.seed,
        tokenizer_fingerprint_fields(tokenizer),
        _ordinary_token_ids(tokenizer),
        BERTDataset.__name__,
    )


def t5_dataset_kind(run: RunConfig, tokenizer: Tokenizer) -> DatasetKind:
    """Return the dataset kind that a T5 is trained on, as the settings say. `ConfigError` if the tokenizer lacks a
    special token.
    """
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
    return SentenceDatasetKind(
        run.data,
        options,
        1,
        run.train.seed,
        tokenizer_fingerprint_fields(tokenizer),
        _ordinary_token_ids(tokenizer),
        T5Dataset.__name__,
    )


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


def _ordinary_token_ids(tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids that are not special tokens. int64 [ids]"""
    special = [tokenizer.eod, *tokenizer.special_ids, *tokenizer.additional_special_tokens_ids]
    special += [] if tokenizer.pad is None else [tokenizer.pad]
    return np.setdiff1d(np.arange(tokenizer.vocab_size), special)
