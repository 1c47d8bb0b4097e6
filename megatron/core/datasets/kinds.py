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
from megatron.core.datasets.chat import chat_dataset_kind
from megatron.core.datasets.dataset_protocols import DatasetKind
from megatron.core.datasets.fim import build_fill_in_middle
from megatron.core.datasets.gpt import NO_PAD, GPTDataset, GPTSampleOptions, Rearrange, TokenSource
from megatron.core.datasets.image_folder import image_folder_dataset_kind
from megatron.core.datasets.index_map import IndexCacheFolder
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.mock import MockTokens
from megatron.core.datasets.multimodal import image_chat_dataset_kind
from megatron.core.datasets.sentence_kinds import bert_dataset_kind, t5_dataset_kind
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
        check_dataset_tokenizer(prefix, self.tokenizer)
        return IndexedDataset(prefix, self.config.mmap_bin_files, cache=self.config.object_storage_cache_path)

    def num_split_units(self, source: TokenSource) -> int:
        """The number of sequences."""
        return len(source.sequence_lengths)

    def split_has_any_sample(self, source: TokenSource, part: range) -> bool:
        """Whether these sequences hold one window and its last label."""
        tokens = source.sequence_lengths[part.start : part.stop].sum(dtype="int64")
        return bool(tokens > self.options.sequence_length)

    def build_one_split(
        self, source: TokenSource, part: range, *, num_samples: int | None, split: str, cache: IndexCacheFolder
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


def gpt_dataset_kind(config: DataConfig, *, sequence_length: int, seed: int, tokenizer: Tokenizer) -> DatasetKind:
    """Return the dataset kind that a GPT is trained on: token windows, with fill-in-the-middle or not, or conversations
    (--sft).
    """
    if config.chat.sft:
        return chat_dataset_kind(config, sequence_length=sequence_length, seed=seed, tokenizer=tokenizer)
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
    """Return the padding id whose loss is masked, or `NO_PAD` if the tokenizer has none, or if it is also a special id
    and `ambiguous` is false.
    """
    if tokenizer.pad is None or (tokenizer.pad in tokenizer.special_ids and not ambiguous):
        return NO_PAD
    return tokenizer.pad


# What each entry script trains on, for tools that look at a run's data without running it.
KINDS: Mapping[str, Callable[[RunConfig, Tokenizer], DatasetKind]] = MappingProxyType(
    {
        "gpt": lambda run, tokenizer: gpt_dataset_kind(
            run.data, sequence_length=run.train.seq_length, seed=run.train.seed, tokenizer=tokenizer
        ),
        "bert": bert_dataset_kind,
        "t5": t5_dataset_kind,
        "vlm": image_chat_dataset_kind,
        "vision_classify": image_folder_dataset_kind,
    }
)
