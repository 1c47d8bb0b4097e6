"""Builds the tokenizer of a run from its settings, and defines the two kinds that need no files.

To add a kind, write its class beside the others, add one row to `KINDS`, and its name to the settings of `TokenizerConfig` that it reads.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from megatron.core.config.flags.declare import ConfigError, flag_name, raise_config_error_if
from megatron.core.config.flags.idle import IdleSetting, config_fields, idle_names, idle_settings
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.tokenizers.base import Tokenizer, character_to_byte_spans, flatten_ids, read_flag_file_text
from megatron.core.tokenizers.bpe import GPT2BPETokenizer
from megatron.core.tokenizers.generation_config import read_generation_defaults
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from megatron.core.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron.core.tokenizers.tiktoken import TikTokenizer
from megatron.core.tokenizers.wordpiece import BertWordPieceTokenizer


class NullTokenizer(Tokenizer):
    """Text that consists of ids separated by white space; the last of `vocab_size` ids ends documents.

    eod, pad: other ids for the end of document and for padding.
    """

    engine = "the text is ids already"

    def __init__(self, vocab_size: int, *, eod: int | None = None, pad: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.eod = self.eos = vocab_size - 1 if eod is None else eod
        self.pad = pad
        self.special_ids = (self.eod,)
        outside = [number for number in (self.eod, pad) if number is not None and not 0 <= number < self.vocab_size]
        if outside:
            raise ConfigError(
                f"--null-tokenizer-eod-id and --null-tokenizer-pad-id are ids below --vocab-size, from 0 to "
                f"{vocab_size - 1}; not {outside[0]}"
            )

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """The name of the algorithm; the vocabulary size determines the rest."""
        return {"algorithm": "ids as text", "size": self.vocab_size}

    def tokenize(self, text: str) -> list[int]:
        """Return the numbers in a text. Raises `ValueError` for words that are no ids of the vocabulary."""
        ids = [int(word) for word in text.split()]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"id {token} is outside the vocabulary of {self.vocab_size}")
        return ids

    def encode_texts_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers in all texts, int32 [tokens], and how many each text has, int64 [texts]."""
        return flatten_ids([self.tokenize(text) for text in texts])

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the numbers separated by spaces."""
        return " ".join(str(int(token)) for token in ids)

    def id_to_token(self, token: int) -> str:
        """Return the number as text."""
        return str(token)

    def token_byte_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the byte range of each number."""
        self.tokenize(text)
        return character_to_byte_spans(text, [word.span() for word in re.finditer(r"\S+", text)])


class ByteTokenizer(Tokenizer):
    """The UTF-8 bytes of a text are its ids; 256 ends a document."""

    vocab_size = 257
    eod = 256
    eos: int | None = eod
    special_ids: tuple[int, ...] = (eod,)
    special: Mapping[str, int] = MappingProxyType({"<eod>": eod})
    engine = "the bytes of the text are its ids"

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """The name of the algorithm."""
        return {"algorithm": "bytes"}

    def tokenize(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def encode_texts_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of all texts, int32 [tokens], and how many each text has, int64 [texts]."""
        content = [text.encode() for text in texts]
        return (
            np.frombuffer(b"".join(content), np.uint8).astype(np.int32),
            np.fromiter(map(len, content), np.int64, len(content)),
        )

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of the bytes, without ends of documents."""
        return bytes(int(token) for token in ids if token < self.eod).decode(errors="replace")

    def piece_after(self, before: Sequence[int], token: int) -> bytes:
        """Return the byte that an id is."""
        return bytes([token] if 0 <= token < self.eod else [])

    def id_to_token(self, token: int) -> str:
        """Return a byte as <0x41>."""
        return "<eod>" if token == self.eod else f"<0x{token:02X}>"

    def token_byte_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the range of each byte."""
        return [(place, place + 1) for place in range(len(text.encode()))]


def _build_bert_tokenizer(config: TokenizerConfig) -> Tokenizer:
    return BertWordPieceTokenizer(
        _assert_path_given(config.vocab_file),
        lower_case=config.tokenizer_type == "BertWordPieceLowerCase",
        extra_ids=config.vocab_extra_ids,
    )


def _build_tiktoken(config: TokenizerConfig) -> Tokenizer:
    return TikTokenizer(
        _assert_path_given(config.tokenizer_model),
        config.tiktoken_pattern,
        vocab_size=config.vocab_size,
        num_special=config.tiktoken_num_special_tokens,
        names=config.tokenizer_special_tokens,
    )


def _build_sentencepiece(special: Literal["bare", "begun", "named"], config: TokenizerConfig) -> Tokenizer:
    extra_ids = config.vocab_extra_ids if special == "named" else 0
    return SentencePieceTokenizer(_assert_path_given(config.tokenizer_model), special, extra_ids=extra_ids)


def _build_null_tokenizer(config: TokenizerConfig) -> Tokenizer:
    pad = None if config.null_tokenizer_pad_id == -1 else config.null_tokenizer_pad_id
    assert config.vocab_size is not None, "a tokenizer without its size is refused"
    return NullTokenizer(config.vocab_size, eod=config.null_tokenizer_eod_id, pad=pad)


def _assert_path_given(path: str | None) -> str:
    """Return the path of a file that `tokenizer_flag_problems` requires for this kind."""
    assert path is not None, "a tokenizer without its files is refused"
    return path


@dataclass(frozen=True, slots=True)
class TokenizerKind:
    """A kind of tokenizer. needs: settings that it cannot do without. Those that it reads at all say so where they are
    declared (`TokenizerConfig`); any other would be ignored: `build_tokenizer` refuses it, and a run, which leaves it out, says so.
    """

    build: Callable[[TokenizerConfig], Tokenizer]
    needs: tuple[str, ...] = ("tokenizer_model",)


KINDS: Mapping[str, TokenizerKind] = MappingProxyType(
    {
        "GPT2BPETokenizer": TokenizerKind(
            lambda config: GPT2BPETokenizer(
                _assert_path_given(config.vocab_file), _assert_path_given(config.merge_file)
            ),
            ("vocab_file", "merge_file"),
        ),
        "BertWordPieceLowerCase": TokenizerKind(_build_bert_tokenizer, ("vocab_file",)),
        "BertWordPieceCase": TokenizerKind(_build_bert_tokenizer, ("vocab_file",)),
        "SentencePieceTokenizer": TokenizerKind(partial(_build_sentencepiece, "named")),
        "GPTSentencePieceTokenizer": TokenizerKind(partial(_build_sentencepiece, "bare")),
        "Llama2Tokenizer": TokenizerKind(partial(_build_sentencepiece, "begun")),
        "HuggingFaceTokenizer": TokenizerKind(
            lambda config: HuggingFaceTokenizer(
                _assert_path_given(config.tokenizer_model), include_special=config.tokenizer_hf_include_special_tokens
            )
        ),
        "TikTokenizer": TokenizerKind(_build_tiktoken),
        "ByteTokenizer": TokenizerKind(lambda config: ByteTokenizer(), ()),
        "NullTokenizer": TokenizerKind(_build_null_tokenizer, ("vocab_size",)),
    }
)


def settings_of_kind(kind: str) -> frozenset[str]:
    """Return the names of the settings that this kind of tokenizer reads, beside those that every kind has."""
    conditional = {name for name, one in config_fields(TokenizerConfig).items() if one.conditions}
    return frozenset(conditional - idle_names(TokenizerConfig, {"tokenizer_type": kind}.__getitem__))


def tokenizer_flag_problems(config: TokenizerConfig) -> list[str]:
    """Return a sentence for each problem of the tokenizer settings that the flags alone show; empty if there is none."""
    kind = config.tokenizer_type
    if kind is None or kind not in KINDS:
        problem = f"--tokenizer-type {kind} is not known" if kind else "no --tokenizer-type is given"
        near = difflib.get_close_matches(kind or "", KINDS, n=1)
        return [f"{problem}; choose one of {', '.join(KINDS)}" + (f"; did you mean {near[0]}?" if near else "")]
    problems = [
        f"--tokenizer-type {kind} needs {flag_name(name)}; give it"
        for name in KINDS[kind].needs
        if getattr(config, name) is None
    ]
    if kind == "NullTokenizer" and config.vocab_size is not None and config.vocab_size < 1:
        problems.append(f"--tokenizer-type NullTokenizer needs --vocab-size of 1 or more, not {config.vocab_size}")
    if config.vocab_extra_ids < 0:
        problems.append(f"--vocab-extra-ids {config.vocab_extra_ids} is a number of sentinels; give 0 or more")
    return problems


def _idle_tokenizer_settings(config: TokenizerConfig) -> list[IdleSetting]:
    """Return the settings that are given but not read by this kind of tokenizer."""
    return list(idle_settings(config, partial(getattr, config)))


def drop_unused_settings(config: TokenizerConfig) -> TokenizerConfig:
    """Return the settings without those that this kind of tokenizer does not use."""
    fields, idle = config_fields(TokenizerConfig), _idle_tokenizer_settings(config)
    usual: dict[str, Any] = {one.name: fields[one.name].field.default for one in idle}
    return replace(config, **usual)


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer that the settings describe; `ConfigError` if they name none, or contain unused settings."""
    raise_config_error_if([*tokenizer_flag_problems(config), *map(str, _idle_tokenizer_settings(config))])
    assert config.tokenizer_type is not None, "settings without a kind are refused"
    tokenizer = KINDS[config.tokenizer_type].build(config)
    if config.chat_template is not None:
        tokenizer.chat_template, tokenizer.tool_chat_template = _read_chat_template_flag(config.chat_template), None
    if (folder := tokenizer_folder(config)) is not None:
        tokenizer.end_ids = read_generation_defaults(folder).end_ids
    return tokenizer


def tokenizer_folder(config: TokenizerConfig) -> Path | None:
    """Return the folder of the tokenizer's files, or None if it has none."""
    path = config.tokenizer_model or config.vocab_file
    return None if not path else Path(path) if Path(path).is_dir() else Path(path).parent


def missing_tokenizer_files(config: TokenizerConfig) -> list[str]:
    """Return the given tokenizer files that do not exist."""
    return [
        file
        for file in (config.vocab_file, config.merge_file, config.tokenizer_model)
        if file is not None and not (file and Path(file).exists())
    ]


def expected_vocab_size(config: TokenizerConfig) -> tuple[int, str]:
    """Return (number of ids, note): from the tokenizer's files; if that fails, as flags say, with a note on why."""
    if absent := missing_tokenizer_files(config):
        return config.vocab_size_without_tokenizer, f"{', '.join(absent)}: not here"
    files = [file for file in (config.vocab_file, config.merge_file, config.tokenizer_model) if file is not None]
    if not files and config.tokenizer_type != "ByteTokenizer":
        return (
            config.vocab_size_without_tokenizer,
            "" if config.tokenizer_type == "NullTokenizer" and config.vocab_size else "no file of a tokenizer is named",
        )
    try:
        return build_tokenizer(config).vocab_size, ""
    except (ConfigError, OSError, ValueError) as error:
        return config.vocab_size_without_tokenizer, str(error)


def _read_chat_template_flag(setting: str) -> str:
    """Return the Jinja template given as text or as a path. `ConfigError` if it is neither."""
    if any(mark in setting for mark in ("{{", "{%", "\n")):
        return setting
    if not Path(setting).exists():
        raise ConfigError(f"--chat-template {setting} is neither a file nor a Jinja template, which has {{{{ or {{%")
    return read_flag_file_text(setting, "--chat-template")
