"""Which text a run reads, and how it becomes ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.flags import flag


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Data.

    One of --mock-data, --data-path (or its file) or paths for each split.
    """

    data_path: tuple[str, ...] | None = flag(None, "prefixes of .bin/.idx pairs, or weights and prefixes in turn")
    data_args_path: str | None = flag(None, "file with the words of --data-path")
    train_data_path: tuple[str, ...] | None = flag(None, "like --data-path, for training only")
    valid_data_path: tuple[str, ...] | None = flag(None, "like --data-path, for validation only")
    test_data_path: tuple[str, ...] | None = flag(None, "like --data-path, for the test only")
    per_split_data_args_path: str | None = flag(None, "JSON file with keys train, valid and test")
    mock_data: bool = flag(False, "made-up samples instead of files")
    split: str | None = flag(None, "shares of training, validation and test of --data-path (default: 969, 30, 1)")
    data_cache_path: str | None = flag(None, "folder for the index caches; left out: beside the data")
    mmap_bin_files: bool = flag(True, "map the .bin files into memory; off: read them")
    num_workers: int = flag(2, "threads that read samples ahead; 0: read in the training loop")
    dataloader_type: Literal["single", "cyclic"] = flag("single", "single: in the shuffled order; cyclic: a new shuffle each epoch")
    reset_position_ids: bool = flag(False, "positions start again after each end of document")
    reset_attention_mask: bool = flag(False, "a token does not attend to earlier documents of its sequence")
    eod_mask_loss: bool = flag(False, "no loss where the input is an end of document")
    mid_level_dataset_surplus: float = flag(0.005, "share of extra samples prepared in each dataset of a blend")
    allow_ambiguous_pad_tokens: bool = flag(False, "accept a padding id that is also another special token")
    num_dataset_builder_threads: int = flag(1, "threads that build the indices of a blend's datasets")


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """Tokenizer.

    How text becomes ids.
    """

    tokenizer_type: str | None = flag(None, "kind of tokenizer: GPT2BPETokenizer, ByteTokenizer or NullTokenizer")
    vocab_file: str | None = flag(None, "vocabulary file")
    merge_file: str | None = flag(None, "merges of a byte-level BPE")
    tokenizer_model: str | None = flag(None, "model file of the tokenizer")
    vocab_size: int | None = flag(None, "number of ids before the end of document, for NullTokenizer")
