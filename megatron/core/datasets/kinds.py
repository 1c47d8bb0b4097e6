"""Which kind of data set the settings ask for: how a prefix is opened, what --split counts, and how samples are cut.

To add a kind, write its class beside the others and a function here that makes its `DatasetKind` from the settings of a
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron.core.config.settings.data import DataConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.datasets.chat import chat_kind
from megatron.core.datasets.fim import build_fill_in_middle
from megatron.core.datasets.gpt import NO_PAD, GPTDataset, Rearrange, TokenSource, WindowOptions
from megatron.core.datasets.image_folder import image_folder_kind
from megatron.core.datasets.index_map import IndexCache
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.mock import MockTokens
from megatron.core.datasets.multimodal import image_chat_kind
from megatron.core.datasets.samples import DatasetKind
from megatron.core.datasets.sentence_kinds import bert_kind, t5_kind
from megatron.core.datasets.sidecar import check_tokenizer
from megatron.core.tokenizers.base import Tokenizer, fingerprint


@dataclass(frozen=True, slots=True)
class TokenWindowKind:
    """Windows of tokens for next-token prediction; --split counts sequences. tokenizer: its fingerprint."""

    config: DataConfig
    options: WindowOptions
    seed: int
    tokenizer: Mapping[str, str | int]
    rearrange: Rearrange | None = None
    name: str = GPTDataset.__name__

    def open(self, prefix: str) -> TokenSource:
        """The ids behind a prefix, or made-up ones; `DataError` when another tokenizer wrote them."""
        if self.config.mock_data:
            return MockTokens(self.options.vocab_size, self.options.eod)
        check_tokenizer(prefix, self.tokenizer)
        return IndexedDataset(prefix, self.config.mmap_bin_files, cache=self.config.object_storage_cache_path)

    def count(self, source: TokenSource) -> int:
        """The number of sequences."""
        return len(source.sequence_lengths)

    def has_sample(self, source: TokenSource, part: range) -> bool:
        """Whether these sequences hold one window and its last label."""
        tokens = source.sequence_lengths[part.start : part.stop].sum(dtype="int64")
        return bool(tokens > self.options.sequence_length)

    def build(
        self, source: TokenSource, part: range, *, num_samples: int | None, split: str, cache: IndexCache
    ) -> GPTDataset:
        """Windows of these sequences."""
        return GPTDataset(
            source,
            self.options,
            sequences=part,
            num_samples=num_samples,
            seed=self.seed,
            split=split,
            cache=cache,
            rearrange=self.rearrange,
        )


def gpt_kind(config: DataConfig, *, sequence_length: int, seed: int, tokenizer: Tokenizer) -> DatasetKind:
    """What a GPT is trained on, as the settings say: windows of tokens, rearranged or not, or conversations."""
    if config.chat.sft:
        return chat_kind(config, sequence_length=sequence_length, seed=seed, tokenizer=tokenizer)
    pad, rearrange = pad_id(tokenizer, config.allow_ambiguous_pad_tokens), None
    if config.fill.fim_data:
        rearrange = build_fill_in_middle(config.fill, tokenizer, seed=seed, pad=pad)
        pad = rearrange.marks.pad
    options = WindowOptions(
        sequence_length=sequence_length,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        pad=pad,
        reset_position_ids=config.restarts_positions,
        reset_attention_mask=config.separates_documents,
        eod_mask_loss=config.eod_mask_loss,
    )
    return TokenWindowKind(config, options, seed, fingerprint(tokenizer), rearrange)


def pad_id(tokenizer: Tokenizer, ambiguous: bool) -> int:
    """The padding that is masked out: none when the tokenizer's has another meaning too, unless that is allowed."""
    if tokenizer.pad is None or (tokenizer.pad in tokenizer.special_ids and not ambiguous):
        return NO_PAD
    return tokenizer.pad


# What each entry script trains on, for tools that look at a run's data without running it.
KINDS: Mapping[str, Callable[[RunConfig, Tokenizer], DatasetKind]] = MappingProxyType(
    {
        "gpt": lambda run, tokenizer: gpt_kind(
            run.data, sequence_length=run.train.seq_length, seed=run.train.seed, tokenizer=tokenizer
        ),
        "bert": bert_kind,
        "t5": t5_kind,
        "vlm": image_chat_kind,
        "vision_classify": image_folder_kind,
    }
)
