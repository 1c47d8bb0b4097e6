"""Parts of a text, encoded and decoded as what they are: the continuation of what precedes, and not texts of their own.

SentencePiece and its kind put a space before every text, so that "iden" + "tity" would become "iden tity". A part is encoded
behind an anchor, a text whose ids stay as they are whatever follows, and the anchor's ids are cut off, as Code Llama does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.special_tokens import encode_without_special_tokens
from megatron.core.tokenizers.base import Tokenizer

_ANCHORS = ("\u263a", "\n", ")", "0", "x")


@dataclass(frozen=True, slots=True)
class ContinuedText:
    """Encodes parts of a text. frame: how many ids the tokenizer puts before and after every text. anchors: texts and their
    ids; none for a tokenizer that puts no space before a text, whose parts are encoded as they are.
    """

    tokenizer: Tokenizer
    frame: tuple[int, int]
    anchors: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, frame: tuple[int, int]) -> ContinuedText:
        """Find out what a tokenizer needs. frame: how many ids it puts before and after every text."""
        ids = [tuple(part.tolist()) for part in encode_without_special_tokens(tokenizer, _ANCHORS, frame)]
        anchors = tuple(pair for pair in zip(_ANCHORS, ids, strict=True) if tokenizer.detokenize(pair[1]) == pair[0])
        (word,) = encode_without_special_tokens(tokenizer, ["a"], frame)
        without = cls(tokenizer, frame, anchors)
        return without if anchors and without.decode(word) != "a" else cls(tokenizer, frame)

    @property
    def space_before(self) -> str:
        """What the tokenizer puts before a text."""
        return " " if self.anchors else ""

    def ids_before_text(self, ids: np.ndarray) -> list[int]:
        """Return the ids at the beginning of [t] that the tokenizer puts before a text, or [] if there are none."""
        begin = self.tokenizer.tokenize("")[: self.frame[0]]
        return begin if ids[: len(begin)].tolist() == begin else []

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, [t] each, without those that the tokenizer puts around it or before it."""
        if not self.anchors:
            return encode_without_special_tokens(self.tokenizer, texts, self.frame)
        return [self._encode_behind_anchor(text) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids [t] as it is behind other text, with the space that a first piece would lose."""
        if not self.anchors:
            return self.tokenizer.detokenize(ids.tolist())
        text, before = self.anchors[0]
        return self.tokenizer.detokenize([*before, *ids.tolist()])[len(text) :]

    def _encode_behind_anchor(self, text: str) -> np.ndarray:
        """Return the ids of a text behind the first anchor whose ids it leaves as they are; else those of the text alone."""
        if not text:
            return np.zeros(0, np.int64)
        for anchor, before in self.anchors:
            (ids,) = encode_without_special_tokens(self.tokenizer, [anchor + text], self.frame)
            if tuple(ids[: len(before)].tolist()) == before and self.decode(ids[len(before) :]) == text:
                return ids[len(before) :]
        return encode_without_special_tokens(self.tokenizer, [text], self.frame)[0]
