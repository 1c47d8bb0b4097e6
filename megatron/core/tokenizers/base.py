"""What every tokenizer offers to the data, the training and the text generation, whatever its kind."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from megatron.core.config.flags import ConfigError


class Tokenizer(Protocol):
    """Text to ids and back.

    vocab_size: number of ids, before padding. eod: the id that ends a document. bos, eos: begin and end of a text that
    a model reads; cls, sep, mask: BERT's; pad: fills short samples; each None where the kind has none.
    additional_special_tokens_ids: sentinels, as T5's <extra_id_k>, in the order of k. special: names and ids of tokens
    that text cannot reach. special_ids: ids with a meaning of their own, other than as padding. chat_template: Jinja
    text of a conversation, or None. engine: a sentence on what turns text to ids, and why that was chosen.
    """

    vocab_size: int
    eod: int
    pad: int | None
    bos: int | None
    eos: int | None
    cls: int | None
    sep: int | None
    mask: int | None
    additional_special_tokens_ids: tuple[int, ...]
    special: Mapping[str, int]
    special_ids: tuple[int, ...]
    chat_template: str | None

    @property
    def engine(self) -> str:
        """What turns text to ids, and why."""

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """What the ids depend on: equal for two tokenizers only when they give the same ids to every text."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, without an end of document; names of special tokens in it are ordinary text.

        Raises `ValueError` for text it cannot read, as half of a surrogate pair.
        """

    def tokenize_marked(self, text: str) -> list[int]:
        """The ids of a text that a programme wrote, as a filled chat template: the names of special tokens are those tokens.

        Nothing is put around the text. Raises `ValueError` as `tokenize`.
        """

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """All ids end to end [t], of an integer type that holds every id, and the number of ids of each text [len(texts)], int64.

        The ids are those of `tokenize`. May use all processors. Raises `ValueError` as `tokenize`.
        """

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of some ids; bytes that are not whole characters become U+FFFD. Ids of no token are left out."""

    def id_to_token(self, token: int) -> str:
        """How the vocabulary writes an id."""

    def spans(self, text: str) -> list[tuple[int, int]]:
        """For each id of `tokenize(text)`, where the bytes it stands for begin and end in the text's UTF-8."""


class SpecialTokens:
    """The special tokens of a tokenizer that has none: what `Tokenizer` asks for, where a kind says nothing else."""

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


def flat(lists: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """`encode_flat` of a kind whose library answers with lists: their ids end to end, int32, and their lengths, int64."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    return np.fromiter(chain.from_iterable(lists), np.int32, int(lengths.sum())), lengths


def around(
    prefix: Sequence[int], ids: np.ndarray, lengths: np.ndarray, suffix: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Flat ids [t] and their lengths [n] with the same few ids before and after each text."""
    if not prefix and not suffix:
        return ids, lengths
    ends = np.cumsum(lengths)
    places = np.concatenate(
        [np.repeat((ends - lengths)[:, None], len(prefix), 1), np.repeat(ends[:, None], len(suffix), 1)], 1
    )
    whole = np.insert(ids, places.ravel(), np.tile(np.asarray([*prefix, *suffix], ids.dtype), len(lengths)))
    return whole, lengths + len(prefix) + len(suffix)


def marked(text: str, special: Mapping[str, int], tokenize: Callable[[str], Sequence[int]]) -> list[int]:
    """Ids of a text in which the names of special tokens, the longest first, stand for their ids."""
    ids: list[int] = []
    if not special:
        return list(tokenize(text))
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    for number, part in enumerate(re.split(f"({names})", text)):
        ids += [special[part]] if number % 2 else tokenize(part) if part else []
    return ids


def byte_spans(text: str, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of characters as spans of UTF-8 bytes."""
    places = np.cumsum([0, *(len(character.encode()) for character in text)]).tolist()
    return [(places[first], places[last]) for first, last in spans]


def fingerprint(tokenizer: Tokenizer) -> dict[str, str | int]:
    """{"kind": class name, "hash": hex SHA-256, "vocab_size": ids, "eod": id}, to be kept with what was made of the ids.

    The hash comes from the content, not from the paths, and is equal only for tokenizers that give the same ids.
    """
    identity = {**tokenizer.unique_identifiers, "vocab_size": tokenizer.vocab_size, "eod": tokenizer.eod}
    return {
        "kind": type(tokenizer).__name__,
        "hash": digest([json.dumps(identity, sort_keys=True).encode()]),
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }


def digest(parts: Iterable[bytes]) -> str:
    """Hex SHA-256 of the parts and of where one ends and the next begins."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def read_bytes(path: str | Path, flag: str) -> bytes:
    """The content of a file that `flag` names; `ConfigError` when it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error


def read_text(path: str | Path, flag: str) -> str:
    """The text of a file that `flag` names; `ConfigError` when it cannot be read or is not UTF-8."""
    try:
        return read_bytes(path, flag).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path} is not UTF-8 text: {error}") from error


def read_json(path: str | Path, flag: str) -> object:
    """The value of a JSON file that `flag` names; `ConfigError` when it cannot be read or is not JSON."""
    try:
        return json.loads(read_text(path, flag))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{flag} {path} is not JSON: {error}") from error
