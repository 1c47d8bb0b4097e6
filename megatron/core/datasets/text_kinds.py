"""Kinds of data sets of running text: how a prefix is opened, what --split counts, and how windows of tokens are cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.core.config.settings.data import DataConfig
from megatron.core.datasets.chat import make_chat_dataset_kind
from megatron.core.datasets.dataset_protocols import DatasetKind, SplitRequest
from megatron.core.datasets.fim import build_fill_in_middle
from megatron.core.datasets.gpt import NO_PAD, GPTDataset, GPTSampleOptions, Rearrange, TokenSource
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.mock import MockTokens
from megatron.core.datasets.sidecar import check_dataset_tokenizer
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
        return open_indexed_pair(self.config, prefix, self.tokenizer)

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


def open_indexed_pair(config: DataConfig, prefix: str, tokenizer: Mapping[str, str | int]) -> IndexedDataset:
    """Open a .bin/.idx pair. `DataError` if another tokenizer wrote it. tokenizer: its fingerprint."""
    check_dataset_tokenizer(prefix, tokenizer)
    return IndexedDataset(prefix, config.mmap_bin_files, cache=config.object_storage_cache_path)
