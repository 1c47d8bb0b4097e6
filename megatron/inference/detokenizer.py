"""New ids as text, while they come: what is certain is said at once, and a stop word ends it.

Text is held back while it ends in the middle of a character, or with what may become a stop word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.incremental import REPLACEMENT, IncrementalDecoder


class Detokenizer:
    """Detokenizes one reply while it grows. keep_stop: with its stop word. ended: one was found. full_text: all text so
    far, up to a stop word.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop_words: Sequence[str] = (), *, keep_stop: bool = False
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._stops, self._keep_stop = [_StopWord(word) for word in stop_words], keep_stop
        self.full_text, self._said = "", 0
        self.ended = False

    def add(self, ids: Sequence[int]) -> str:
        """Add new ids; return the text that is now final. `ended` tells whether a stop word was found."""
        for token in ids:
            if not self.ended:
                self._append(self._decoder.add(token))
        return self._take_text_until(
            len(self.full_text) if self.ended else len(self.full_text) - self._possible_stop_length()
        )

    def finish(self) -> str:
        """End the text; return what was held back."""
        if not self.ended:
            self._append(self._decoder.finish())
        return self._take_text_until(len(self.full_text))

    def _append(self, text: str) -> None:
        """Append text; cut it at the first stop word, if one is in the new text, and set `ended`."""
        start = len(self.full_text)
        self.full_text += text
        matches = [
            (start + end - len(stop.word), len(stop.word))
            for stop in self._stops
            if (end := stop.read(text)) is not None
        ]
        if matches:
            place, length = min(matches)
            self.full_text = self.full_text[: place + length if self._keep_stop else place]
            self.ended = True

    def _possible_stop_length(self) -> int:
        """Number of characters at the end that may begin a stop word."""
        return max((stop.matched for stop in self._stops), default=0)

    def _take_text_until(self, end: int) -> str:
        """Return the text up to this index that was not returned before."""
        text = self.full_text[self._said : end] if end > self._said else ""
        self._said = max(self._said, end)
        return text


class _StopWord:
    """Looks for a word in a text that grows, in a time that does not depend on the word (Knuth, Morris and Pratt, 1977).
    matched: how many of its first characters the text ends with.
    """

    def __init__(self, word: str) -> None:
        self.word, self.matched = word, 0
        self._borders = _borders(word)

    def read(self, text: str) -> int | None:
        """Read on; return the index in `text` at which the word has just ended, or None."""
        for end, character in enumerate(text, start=1):
            while self.matched and self.word[self.matched] != character:
                self.matched = self._borders[self.matched - 1]
            self.matched += self.word[self.matched] == character
            if self.matched == len(self.word):
                return end
        return None


@lru_cache(1024)
def _borders(word: str) -> tuple[int, ...]:
    """Return for each beginning of a word the length of the longest proper beginning that it also ends with."""
    borders = [0]
    for character in word[1:]:
        length = borders[-1]
        while length and word[length] != character:
            length = borders[length - 1]
        borders.append(length + (word[length] == character))
    return tuple(borders)


@dataclass(frozen=True, slots=True)
class TokenText:
    """What a token wrote. text: empty if it ends in the middle of a character, and all of it if it completes one. content:
    its own bytes. others: names of tokens that were possible there (each another one), and their bytes.
    """

    text: str
    content: bytes
    others: tuple[tuple[str, bytes], ...] = ()


class IncrementalTokenTexts:
    """The text of each id of a growing text. ids: what precedes. An id that ends in the middle of a character has no
    text, and the one that completes the character has all of it.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._decoder = tokenizer, IncrementalDecoder(tokenizer, ids)

    @property
    def is_incomplete(self) -> bool:
        """Whether the last id ended in the middle of a character."""
        return self._decoder.is_incomplete

    def texts_of_next_ids(self, ids: Sequence[int], *, last: bool) -> list[str]:
        """Return the text of each next id. last: no more follow, so an incomplete character is given as it is."""
        pieces = [self._decoder.add(token) for token in ids]
        if pieces:
            pieces[-1] += self.finish() if last else ""
        return pieces

    def add(self, token: int, candidates: Sequence[int] = ()) -> TokenText:
        """Add an id; return its text. candidates: ids that might have come instead, or this one among them."""
        possible = {one: self._decoder.text_and_bytes_if_next(one) for one in dict.fromkeys((token, *candidates))}
        names = self._distinct_names({one: text for one, (text, _) in possible.items()})
        text = self._decoder.add(token)
        return TokenText(text, possible[token][1], tuple((names[one], possible[one][1]) for one in candidates))

    def finish(self) -> str:
        """Return what is left of the text when no more ids follow: it belongs to the last one."""
        return self._decoder.finish()

    def _distinct_names(self, texts: Mapping[int, str]) -> dict[int, str]:
        """Return a name for each id: its text, or how the vocabulary writes it if it has none by itself or another has the
        same; the first id keeps its text.
        """
        names: dict[int, str] = {}
        taken: set[str] = set()
        for token, text in texts.items():
            if names and (not text or REPLACEMENT in text or text in taken):
                text = self._name_in_vocabulary(token)
            names[token] = f"token_id:{token}" if text in taken else text
            taken.add(names[token])
        return names

    def _name_in_vocabulary(self, token: int) -> str:
        """Return how the vocabulary writes an id; networks may have more ids than their tokenizer has tokens."""
        try:
            return self._tokenizer.id_to_token(token)
        except (LookupError, ValueError):
            return f"token_id:{token}"
