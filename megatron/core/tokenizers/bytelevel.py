"""Byte-level BPE, independent of the file format: every text has ids, and decoding them restores the text.

The same vocabulary is published in three formats: vocab.json and merges.txt (GPT-2), a tokenizer.json (Hugging Face), a
rank file (tiktoken). The first two list the pairs to merge, the last one the tokens in order. They are equivalent, and
get the same fingerprint here, if merges are ordered like the tokens they produce, no token is produced by two merges,
and encoding the bytes of every token gives that token: then, before a merge is reached, its token's bytes appear as its
two parts between any two boundaries, so no other pair can produce that token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from megatron.core.tokenizers.base import hash_parts
from megatron.core.tokenizers.engines import (
    Engine,
    MergeRanks,
    choose_tokenizer_engine,
    gigatoken_engine_from_json,
    gigatoken_engine_from_ranks,
    tiktoken_engine,
    tokenizers_engine,
)


class ByteLevelBPE:
    """A byte-level BPE tokenizer without its special tokens.

    source: defines the ids. vocab: the bytes of every id. special: names and ids of tokens that ordinary text cannot produce.
    """

    def __init__(
        self, source: BPEFromMerges | BPEFromMergeRanks, vocab: Mapping[int, bytes], special: Mapping[str, int]
    ) -> None:
        self.source, self.vocab, self.special = source, vocab, special

    @cached_property
    def engine_and_reason(self) -> tuple[Engine, str]:
        """The fastest engine, and a sentence on why it was chosen."""
        return choose_tokenizer_engine(self.source.candidates, self.source.reference, self.source.name)

    @cached_property
    def vocabulary_hash(self) -> str:
        """Hash of everything that the ids depend on; the same for every file format of a vocabulary."""
        specials = json.dumps(self.special, sort_keys=True).encode()
        ranks = self.source.ranks
        if ranks is None:
            return hash_parts([b"merges", specials, self.source.content.encode()])
        return hash_parts(
            [b"ranks", specials, ranks.pattern.encode(), np.asarray(ranks.ids, "<i8").tobytes(), *ranks.tokens]
        )

    @property
    def engine(self) -> str:
        """The library that encodes text, and why it was chosen."""
        return self.engine_and_reason[1]

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """The hash of bytes, ids and order of all tokens."""
        return {"algorithm": "byte-level BPE", "content": self.vocabulary_hash}

    def encode_texts_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts, int32 [tokens], and how many each text has, int64 [texts]."""
        return self.engine_and_reason[0](texts)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of one text."""
        return self.source.reference([text])[0].tolist()

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return b"".join(self.vocab.get(int(token), b"") for token in ids).decode(errors="replace")

    def piece_after(self, before: Sequence[int], token: int) -> bytes:
        """Return the bytes of an id."""
        return self.vocab.get(token, b"")

    def token_byte_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the byte range of each token."""
        places = np.cumsum([0, *(len(self.vocab[token]) for token in self.tokenize(text))]).tolist()
        return list(zip(places, places[1:]))


class BPEFromMergeRanks:
    """Ids defined by merge ranks, through tiktoken. candidates: constructors of other engines that may give the same ids."""

    name = "tiktoken"
    content = ""

    def __init__(self, ranks: MergeRanks) -> None:
        self.ranks = ranks
        self.candidates: Mapping[str, Callable[[], Engine]] = {"gigatoken": lambda: gigatoken_engine_from_ranks(ranks)}

    @cached_property
    def reference(self) -> Engine:
        """The tiktoken engine, which defines the ids."""
        return tiktoken_engine(self.ranks)


class BPEFromMerges:
    """Ids defined by merges, through a tokenizer of the tokenizers library that ignores special tokens in text.

    pattern: the splitting pattern of the equivalent `MergeRanks`. whole_words: a word that is a token is encoded as
    that token, regardless of the merges.
    """

    name = "tokenizers"

    def __init__(
        self,
        tokenizer: Any,
        vocab: Mapping[str, int],
        merges: Sequence[tuple[str, str]],
        *,
        pattern: str,
        whole_words: bool = False,
    ) -> None:
        self._tokenizer, self._vocab, self._merges = tokenizer, vocab, merges
        self._pattern, self._whole_words = pattern, whole_words
        self.reference = tokenizers_engine(tokenizer)
        self.candidates: Mapping[str, Callable[[], Engine]] = {
            "gigatoken": lambda: gigatoken_engine_from_json(self.content),
            "tiktoken": self._tiktoken_engine,
        }

    @property
    def content(self) -> str:
        """The tokenizer.json that defines the ids."""
        return self._tokenizer.to_str()

    @cached_property
    def ranks(self) -> MergeRanks | None:
        """The equivalent merge ranks; None if the merges are not ordered like the tokens they produce, produce a token
        twice, or do not encode every token's bytes as that token.
        """
        import tokenizers

        letters = byte_of_character()
        made = dict.fromkeys(sorted(letters, key=letters.__getitem__))
        for left, right in self._merges:
            if left not in made or right not in made or left + right in made:
                return None
            made[left + right] = None
        if self._whole_words and any(token not in made and set(token) <= letters.keys() for token in self._vocab):
            return None
        bare = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict(self._vocab), merges=list(self._merges)))
        result = bare.encode_batch_fast(list(made), add_special_tokens=False)
        if any(len(encoding.ids) != 1 for encoding in result):
            return None
        return MergeRanks(
            tuple(map(vocab_token_to_bytes, made)), tuple(self._vocab[token] for token in made), self._pattern
        )

    def _tiktoken_engine(self) -> Engine:
        """Return the tiktoken engine of the equivalent merge ranks. Raises `ValueError` if there are none."""
        if self.ranks is None:
            raise ValueError("the merges cannot be written as ranks")
        return tiktoken_engine(self.ranks)


@lru_cache(None)
def byte_of_character() -> dict[str, int]:
    """Return the mapping from the printable characters of vocab.json and merges.txt to the bytes they stand for."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}


def vocab_token_to_bytes(token: str) -> bytes:
    """Return the bytes that a token of vocab.json stands for; its UTF-8 if it is not written in those characters."""
    letters = byte_of_character()
    try:
        return bytes([letters[letter] for letter in token])
    except KeyError:
        return token.encode()
