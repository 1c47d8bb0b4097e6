"""The interface of every tokenizer, and helpers that several kinds share."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from megatron.core.config.flags.declare import ConfigError


class Tokenizer(Protocol):
    """Text to ids and back.

    vocab_size: number of ids, without padding. eod: id of the end of a document. bos, eos: begin and end of a text;
    cls, sep, mask: BERT's; pad: fills short samples; each None if the kind has none. additional_special_tokens_ids:
    sentinels such as T5's <extra_id_k>, in the order of k. special: names and ids of tokens that ordinary text cannot
    produce. special_ids: ids with a meaning of their own, except padding. chat_template: Jinja template of a
    conversation, or None; tool_chat_template: that of one with tools, if it is another. engine: a sentence on the library that encodes, and why it was chosen. replaces_each_byte:
    of bytes that are no character each is U+FFFD, and not only the first of a run that begins one. cleans_up_spaces:
    texts of ids lose spaces before punctuation. end_ids: of a generation_config.json, each ends a generated text as `eod`
    does. names_found_in_text: names of tokens that `tokenize_with_special_spans` finds; empty if the kind has no such
    method.
    """

    vocab_size: int
    eod: int
    pad: int | None = None
    bos: int | None = None
    eos: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    additional_special_tokens_ids: tuple[int, ...] = ()
    special: Mapping[str, int] = MappingProxyType({})
    special_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    tool_chat_template: str | None = None
    replaces_each_byte: bool = False
    cleans_up_spaces: bool = False
    end_ids: tuple[int, ...] = ()
    names_found_in_text: Collection[str] = frozenset()
    _tokens: Sequence[str] | Mapping[int, str] = ()

    @property
    def engine(self) -> str:
        """The library that encodes text, and why it was chosen."""

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """Everything that the ids depend on: equal for two tokenizers only if they give the same ids for every text."""

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without an end of document; names of special tokens in it are ordinary text.

        Raises `ValueError` for text that cannot be encoded, such as half of a surrogate pair.
        """

    def tokenize_with_special(self, text: str) -> list[int]:
        """Return the ids of a text from a trusted program, such as a filled chat template: names of special tokens
        become those tokens.

        Nothing is added around the text. Raises `ValueError` as `tokenize` does.
        """
        return tokenize_around_special(text, self.special, self.tokenize)

    def tokenize_with_special_spans(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return, for each text, the ids of `tokenize_with_special` and the range [start, end) of characters of each."""
        assert not texts, "a kind with names_found_in_text has its own"
        return []

    def tokenize_characters(self, text: str) -> list[int]:
        """Return the ids of a text in which no name of a token that was added to the vocabulary is that token."""
        return self.tokenize(text)

    def encode_texts_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts concatenated [t], in an integer type that fits every id, and the number of ids of
        each [texts], int64.

        The ids are those of `tokenize`. May use all processors. Raises `ValueError` as `tokenize` does.
        """

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids; incomplete characters become U+FFFD, ids without a token are skipped."""

    def piece_after(self, before: Sequence[int], token: int) -> str | bytes:
        """Return what an id adds to the text of the ids before it: whole characters, or bytes that may be a part of one.

        before: the last ids, back to one that `stands_for_text`, or all of them. `IncrementalDecoder` joins the pieces.
        """
        return self.detokenize([*before, token])[len(self.detokenize(before)) :]

    def stands_for_text(self, token: int) -> bool:
        """Return whether behind this id alone the next is decoded as it is behind any text: not as the first of a text."""
        return bool(self.detokenize([token]))

    def id_to_token(self, token: int) -> str:
        """Return how the vocabulary file writes an id."""
        return self._tokens[token]

    def token_byte_spans(self, text: str) -> list[tuple[int, int]]:
        """Return, for each id of `tokenize(text)`, the range [start, end) of its bytes in the text's UTF-8; ids that are added before
        or after the text have the empty range (0, 0).
        """


def flatten_ids(lists: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate lists of ids. Returns the ids, int32 [tokens], and the lengths of the lists, int64 [lists]."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    return np.fromiter(chain.from_iterable(lists), np.int32, int(lengths.sum())), lengths


def add_prefix_and_suffix_ids(
    prefix: Sequence[int], ids: np.ndarray, lengths: np.ndarray, suffix: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Insert `prefix` and `suffix` around each text of flat ids [t] with lengths [n]. Returns new ids and lengths."""
    if not prefix and not suffix:
        return ids, lengths
    ends = np.cumsum(lengths)
    places = np.concatenate(
        [np.repeat((ends - lengths)[:, None], len(prefix), 1), np.repeat(ends[:, None], len(suffix), 1)], 1
    )
    whole = np.insert(ids, places.ravel(), np.tile(np.asarray([*prefix, *suffix], ids.dtype), len(lengths)))
    return whole, lengths + len(prefix) + len(suffix)


def tokenize_around_special(
    text: str, special: Mapping[str, int], tokenize: Callable[[str], Sequence[int]]
) -> list[int]:
    """Encode a text in which names of special tokens (the longest match first) become their ids."""
    ids: list[int] = []
    if not special:
        return list(tokenize(text))
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    for number, part in enumerate(re.split(f"({names})", text)):
        ids += [special[part]] if number % 2 else tokenize(part) if part else []
    return ids


def character_to_byte_spans(text: str, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Convert ranges [start, end) of characters of `text` to ranges of its UTF-8 bytes."""
    places = np.cumsum([0, *(len(character.encode()) for character in text)]).tolist()
    return [(places[first], places[last]) for first, last in spans]


def tokenizer_fingerprint_fields(tokenizer: Tokenizer) -> dict[str, str | int]:
    """Return {"kind": class name, "hash": hex SHA-256, "vocab_size": ids, "eod": id}, to be stored with data made from
    the ids.

    The hash comes from the content, not from paths, and is equal only for tokenizers that give the same ids.
    """
    identity = {**tokenizer.unique_identifiers, "vocab_size": tokenizer.vocab_size, "eod": tokenizer.eod}
    return {
        "kind": type(tokenizer).__name__,
        "hash": hash_parts([json.dumps(identity, sort_keys=True).encode()]),
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }


def hash_parts(parts: Iterable[bytes]) -> str:
    """Return the hex SHA-256 of the parts including their boundaries."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def read_flag_file_bytes(path: str | Path, flag: str) -> bytes:
    """Return the content of the file given with `flag`; raises `ConfigError` if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error


def read_flag_file_text(path: str | Path, flag: str) -> str:
    """Return the text of the file given with `flag`; raises `ConfigError` if it cannot be read or is not UTF-8."""
    try:
        return read_flag_file_bytes(path, flag).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path} is not UTF-8 text: {error}") from error


def read_flag_file_json(path: str | Path, flag: str) -> object:
    """Return the value of the JSON file given with `flag`; raises `ConfigError` if it cannot be read or is not JSON."""
    try:
        return json.loads(read_flag_file_text(path, flag))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{flag} {path} is not JSON: {error}") from error
