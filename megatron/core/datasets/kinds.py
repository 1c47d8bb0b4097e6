"""Which kind of data set the settings ask for: how a prefix is opened, what --split counts, and how samples are cut.

To add a kind, write its class beside the others and a function here that makes its `DatasetKind` from the settings of a
run.
"""

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
from megatron.core.datasets.chat import make_chat_dataset_kind
from megatron.core.datasets.dataset_protocols import DatasetKind, SplitRequest
from megatron.core.datasets.fim import build_fill_in_middle
from megatron.core.datasets.gpt import NO_PAD, GPTDataset, GPTSampleOptions, Rearrange, TokenSource
from megatron.core.datasets.image_folder import make_image_folder_dataset_kind
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.masking import TokenMaskingOptions, word_continuation_mask
from megatron.core.datasets.mock import MockSentences, MockTokens
from megatron.core.datasets.multimodal import make_image_chat_dataset_kind
from megatron.core.datasets.sentence_map import usable_document_mask
from megatron.core.datasets.sidecar import check_dataset_tokenizer
from megatron.core.datasets.special_tokens import refuse_added_special_tokens
from megatron.core.datasets.t5 import T5Dataset, T5SampleOptions
from megatron.core.tokenizers.base import Tokenizer, tokenizer_fingerprint_fields


@dataclass(frozen=True, slots=True)
class GPTDatasetKind:
    """Windows of tokens for next-token prediction; --split counts sequences. tokenizer: its fingerprint."""

    config: DataConfig
    options: GPTSampleOptions
    seed: int
    tokenizer: Mapping[str, str | int]
    rearrange: Rearrange | None = None
    name: str = GPTDataset.__name__

    def open(self, prefix: str) -> TokenSource:
        """Open the pair behind a prefix, or mock tokens. `DataError` if another tokenizer wrote it."""
        if self.config.mock_data:
            return MockTokens(self.options.vocab_size, self.options.eod)
        return _open_pair(self.config, prefix, self.tokenizer)

    def num_split_units(self, source: TokenSource) -> int:
        """The number of sequences."""
        return len(source.sequence_lengths)

    def split_has_any_sample(self, source: TokenSource, part: range) -> bool:
        """Whether these sequences hold one window and its last label."""
        tokens = source.sequence_lengths[part.start : part.stop].sum(dtype="int64")
        return bool(tokens > self.options.sequence_length)

    def build_one_split(self, source: TokenSource, request: SplitRequest) -> GPTDataset:
        """Windows of these sequences."""
        return GPTDataset(source, self.options, request, seed=self.seed, rearrange=self.rearrange)


def make_gpt_dataset_kind(config: DataConfig, *, sequence_length: int, seed: int, tokenizer: Tokenizer) -> DatasetKind:
    """Return the dataset kind of a GPT: token windows, with or without fill-in-the-middle, or conversations (--sft)."""
    if config.chat.sft:
        return make_chat_dataset_kind(config, sequence_length=sequence_length, seed=seed, tokenizer=tokenizer)
    pad, rearrange = maskable_pad_id(tokenizer, config.allow_ambiguous_pad_tokens), None
    if config.fill.fim_data:
        rearrange = build_fill_in_middle(config.fill, tokenizer, seed=seed, pad=pad)
        pad = rearrange.marks.pad
    options = GPTSampleOptions(
        sequence_length=sequence_length,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        pad=pad,
        reset_position_ids=config.restarts_positions,
        reset_attention_mask=config.separates_documents,
        eod_mask_loss=config.eod_mask_loss,
    )
    return GPTDatasetKind(config, options, seed, tokenizer_fingerprint_fields(tokenizer), rearrange)


def maskable_pad_id(tokenizer: Tokenizer, ambiguous: bool) -> int:
    """Return the id of padding without loss; `NO_PAD` if there is none, or it is a special id and not `ambiguous`."""
    if tokenizer.pad is None or (tokenizer.pad in tokenizer.special_ids and not ambiguous):
        return NO_PAD
    return tokenizer.pad


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
        return MockSentences(self.plain) if self.config.mock_data else _open_pair(self.config, prefix, self.tokenizer)

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


def _open_pair(config: DataConfig, prefix: str, tokenizer: Mapping[str, str | int]) -> IndexedDataset:
    """Open a .bin/.idx pair. `DataError` if another tokenizer wrote it. tokenizer: its fingerprint."""
    check_dataset_tokenizer(prefix, tokenizer)
    return IndexedDataset(prefix, config.mmap_bin_files, cache=config.object_storage_cache_path)


def dataset_kind_of_run(run: RunConfig, tokenizer: Tokenizer) -> DatasetKind:
    """Return the dataset kind that the entry script of a network reads. `ConfigError` if the tokenizer or the settings
    cannot give it.
    """
    return KINDS["vlm" if run.model.has_vision else run.model.architecture.dataset](run, tokenizer)


# What each entry script trains on, for tools that look at a run's data without running it.
KINDS: Mapping[str, Callable[[RunConfig, Tokenizer], DatasetKind]] = MappingProxyType(
    {
        "gpt": lambda run, tokenizer: make_gpt_dataset_kind(
            run.data, sequence_length=run.train.seq_length, seed=run.train.seed, tokenizer=tokenizer
        ),
        "bert": make_bert_dataset_kind,
        "t5": make_t5_dataset_kind,
        "vlm": make_image_chat_dataset_kind,
        "vision_classify": make_image_folder_dataset_kind,
    }
)
