"""Settings to tokenizer, as a table of kinds; and the two kinds that need no files.

To add a kind, write its class beside the others and add one row to `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType

from megatron.core.config.data import TokenizerConfig
from megatron.core.config.flags import ConfigError, refuse, spelling
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.bpe import GPT2BPETokenizer


class NullTokenizer:
    """Text that is ids already, with white space between; ids below the size given are text, the next is the end."""

    pad = None

    def __init__(self, text_vocab_size: int) -> None:
        self.eod = text_vocab_size
        self.vocab_size = text_vocab_size + 1
        self.special_ids = (self.eod,)

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """The kind and the size."""
        return {"class": type(self).__name__, "vocab_size": self.vocab_size}

    def tokenize(self, text: str) -> list[int]:
        """The numbers of a text."""
        ids = [int(word) for word in text.split()]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"id {token} is outside the vocabulary of {self.vocab_size}")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers of each text."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The numbers, with a space between."""
        return " ".join(str(token) for token in ids)


class ByteTokenizer:
    """The UTF-8 bytes of a text are its ids; 256 ends a document."""

    vocab_size = 257
    eod = 256
    pad = None
    special_ids = (eod,)

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """The kind alone."""
        return {"class": type(self).__name__, "vocab_size": self.vocab_size}

    def tokenize(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The bytes of each text."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of the bytes; ends of documents are left out."""
        return bytes(token for token in ids if token < self.eod).decode(errors="replace")


def _gpt2(config: TokenizerConfig) -> Tokenizer:
    for flag, value in (("--vocab-file", config.vocab_file), ("--merge-file", config.merge_file)):
        if value is None:
            raise ConfigError(f"--tokenizer-type GPT2BPETokenizer needs {flag}")
    return GPT2BPETokenizer(config.vocab_file, config.merge_file)


def _null(config: TokenizerConfig) -> Tokenizer:
    if config.vocab_size is None or config.vocab_size < 1:
        raise ConfigError(f"--tokenizer-type NullTokenizer needs --vocab-size of 1 or more, not {config.vocab_size}")
    return NullTokenizer(config.vocab_size)


KINDS: Mapping[str, Callable[[TokenizerConfig], Tokenizer]] = MappingProxyType({
    "GPT2BPETokenizer": _gpt2,
    "ByteTokenizer": lambda config: ByteTokenizer(),
    "NullTokenizer": _null,
})

# Settings that each kind reads; any other that is given would be ignored in silence, and is refused instead.
READS: Mapping[str, frozenset[str]] = MappingProxyType({
    "GPT2BPETokenizer": frozenset({"vocab_file", "merge_file"}),
    "ByteTokenizer": frozenset(),
    "NullTokenizer": frozenset({"vocab_size"}),
})


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that the settings describe; `ConfigError` when they name none, or say what it does not read."""
    kind = config.tokenizer_type
    if kind not in KINDS:
        problem = f"--tokenizer-type {kind} is not known" if kind else "no --tokenizer-type is given"
        raise ConfigError(f"{problem}; choose one of {', '.join(KINDS)}")
    refuse(f"{spelling(field.name)} {getattr(config, field.name)} is not read by --tokenizer-type {kind}; leave it out"
           for field in fields(config)
           if field.name not in READS[kind] | {"tokenizer_type"} and getattr(config, field.name) is not None)
    return KINDS[kind](config)
