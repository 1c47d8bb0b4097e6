"""Byte-level BPE, whatever file it came from: any text has ids, and the ids give the same text back.

The same vocabulary is published in three ways: vocab.json and merges.txt (GPT-2), a tokenizer.json (Hugging Face), a
rank file (tiktoken). The first two say which pairs are joined, the last one which tokens there are and in what order.
They agree, and so have one identity here, when merges come in the order of what they are made of, no token is made in
two ways, and every token, spelled out in bytes, is found again: before a merge is reached, the bytes of its token then
stand as its two parts wherever they stand between two borders, so no other pair can spell that token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np

from megatron.core.tokenizers.base import digest, marked
from megatron.core.tokenizers.engines import (
    Engine,
    MergeRanks,
    fastest,
    gigatoken_engine,
    gigatoken_json_engine,
    tiktoken_engine,
    tokenizers_engine,
)


class BPESource(Protocol):
    """Where the ids come from: what defines them, what else may give them, and the ranks that stand for them if any do."""

    name: str
    candidates: Mapping[str, Callable[[], Engine]]

    @property
    def ranks(self) -> MergeRanks | None:
        """The merge ranks that give the same ids, if any do."""

    @property
    def reference(self) -> Engine:
        """What defines the ids."""

    @property
    def content(self) -> str:
        """The text of the file that defines them, if one does."""


class ByteLevelBPE:
    """Text to ids and back: all of a tokenizer but its special tokens.

    vocab: the bytes of every id. special: names of tokens that text does not reach, and their ids.
    """

    def __init__(self, source: BPESource, vocab: Mapping[int, bytes], special: Mapping[str, int]) -> None:
        self.source = source
        self.vocab = vocab
        self.special = special

    @cached_property
    def choice(self) -> tuple[Engine, str]:
        """The fastest engine, and a sentence on why it was chosen."""
        return fastest(self.source.candidates, self.source.reference, self.source.name)

    @cached_property
    def identity(self) -> str:
        """Hash of all that the ids depend on; the same for every way of writing one vocabulary."""
        specials = json.dumps(self.special, sort_keys=True).encode()
        ranks = self.source.ranks
        if ranks is None:
            return digest([b"merges", specials, self.source.content.encode()])
        return digest(
            [b"ranks", specials, ranks.pattern.encode(), np.asarray(ranks.ids, "<i8").tobytes(), *ranks.tokens]
        )

    @property
    def engine(self) -> str:
        """What turns text to ids, and why."""
        return self.choice[1]

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """The bytes, the ids and the order of all tokens."""
        return {"algorithm": "byte-level BPE", "content": self.identity}

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts, and how many each has."""
        return self.choice[0](texts)

    def tokenize(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.source.reference([text])[0].tolist()

    def tokenize_marked(self, text: str) -> list[int]:
        """The ids of one text, names of special tokens being those tokens."""
        return marked(text, self.special, self.tokenize)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of some ids."""
        return b"".join(self.vocab.get(int(token), b"") for token in ids).decode(errors="replace")

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where the bytes of each token begin and end."""
        places = np.cumsum([0, *(len(self.vocab[token]) for token in self.tokenize(text))]).tolist()
        return list(zip(places, places[1:]))


class RanksSource:
    """Ids that ranks define, through tiktoken."""

    name = "tiktoken"
    content = ""

    def __init__(self, ranks: MergeRanks) -> None:
        self.ranks = ranks
        self.candidates: Mapping[str, Callable[[], Engine]] = {"gigatoken": lambda: gigatoken_engine(ranks)}

    @cached_property
    def reference(self) -> Engine:
        """tiktoken, which defines them."""
        return tiktoken_engine(self.ranks)


class MergesSource:
    """Ids that merges define, through a tokenizer of the package tokenizers that knows no special tokens in text.

    pattern: what the ranks that stand for it would have, as `MergeRanks`. whole_words: a word that is a token is that token,
    whatever the merges say.
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
            "gigatoken": lambda: gigatoken_json_engine(self.content),
            "tiktoken": self._tiktoken,
        }

    @property
    def content(self) -> str:
        """The tokenizer.json that defines the ids."""
        return self._tokenizer.to_str()

    @cached_property
    def ranks(self) -> MergeRanks | None:
        """The ranks that give the same ids; None when the merges are not those of a trained vocabulary (see above)."""
        import tokenizers

        letters = byte_of_letter()
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
        return MergeRanks(tuple(map(bytes_of, made)), tuple(self._vocab[token] for token in made), self._pattern)

    def _tiktoken(self) -> Engine:
        if self.ranks is None:
            raise ValueError("the merges cannot be written as ranks")
        return tiktoken_engine(self.ranks)


@lru_cache(None)
def byte_of_letter() -> dict[str, int]:
    """The printable letter that stands for each byte in vocab.json and merges.txt, and the byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}


def bytes_of(token: str) -> bytes:
    """The bytes that a token of vocab.json stands for; its own UTF-8 where it is not written in letters of bytes."""
    letters = byte_of_letter()
    try:
        return bytes([letters[letter] for letter in token])
    except KeyError:
        return token.encode()
