"""New ids as text, while they come: what is certain is said at once, and a stop word ends it.

Text is held back while it ends in the middle of a character, or with what may become a stop word.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.tokenizers.base import Tokenizer

_CONTEXT = 8  # ids decoded before the new ones: some tokenizers join tokens with a space, or drop the first space
_UNFINISHED = "\ufffd"  # what an incomplete character is decoded to
_PATIENCE = 64  # ids without a complete character after which waiting for one ends


class Detokenizer:
    """Detokenizes one reply while it grows. keep_stop: with its stop word. ended: one was found. full_text: all text so
    far, up to a stop word.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop_words: Sequence[str] = (), *, keep_stop: bool = False
    ) -> None:
        self._tokenizer, self._stop_words, self._keep_stop = tokenizer, tuple(stop_words), keep_stop
        self._ids = list(prompt[-_CONTEXT:])
        # Ids before _settled have their text; from _first on they are context.
        self._first, self._settled = 0, len(self._ids)
        self._before = ""  # the text of the new ones among the settled
        self.full_text, self._said, self._searched = "", 0, 0
        self.ended = False

    def add(self, ids: Sequence[int]) -> str:
        """Add new ids; return the text that is now final. `ended` tells whether a stop word was found."""
        self._ids += ids
        self._decode_complete(finishing=False)
        self._cut_at_stop_word()
        return self._take_text_until(
            len(self.full_text) if self.ended else len(self.full_text) - self._possible_stop_length()
        )

    def finish(self) -> str:
        """End the text; return what was held back."""
        if not self.ended:
            self._decode_complete(finishing=True)
            self._cut_at_stop_word()
        return self._take_text_until(len(self.full_text))

    def _decode_complete(self, *, finishing: bool) -> None:
        """Decode all ids. finishing: also an incomplete character at the end, which is left out otherwise."""
        context = self._tokenizer.detokenize(self._ids[self._first : self._settled])
        text = self._tokenizer.detokenize(self._ids[self._first :])[len(context) :]
        whole = finishing or not text.endswith(_UNFINISHED)
        self.full_text = self._before + (text if whole else text[:-1])
        if whole or len(self._ids) - self._settled > _PATIENCE:
            self._before, self._settled = self._before + text, len(self._ids)
            self._first = max(self._first, self._settled - _CONTEXT)

    def _cut_at_stop_word(self) -> None:
        """Cut the text at the first stop word, if one is in the new text, and set `ended`."""
        longest = max(map(len, self._stop_words), default=0)
        first = max(0, self._searched - longest + 1)
        matches = [(place, len(word)) for word in self._stop_words if (place := self.full_text.find(word, first)) >= 0]
        self._searched = len(self.full_text)
        if matches:
            place, length = min(matches)
            self.full_text = self.full_text[: place + length if self._keep_stop else place]
            self.ended = True

    def _possible_stop_length(self) -> int:
        """Number of characters at the end that may begin a stop word."""
        return max(
            (size for word in self._stop_words for size in range(1, len(word)) if self.full_text.endswith(word[:size])),
            default=0,
        )

    def _take_text_until(self, end: int) -> str:
        """Return the text up to this index that was not returned before."""
        text = self.full_text[self._said : end] if end > self._said else ""
        self._said = max(self._said, end)
        return text


class IncrementalTokenTexts:
    """The text of each id of a growing text. ids: what precedes. An id that ends in the middle of a character has no
    text, and the one that completes the character has all of it.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._ids = tokenizer, list(ids[-_CONTEXT:])
        self._said = len(tokenizer.detokenize(self._ids))

    def texts_of_next_ids(self, ids: Sequence[int], *, last: bool) -> list[str]:
        """Return the text of each next id. last: no more follow, so an incomplete character is given as it is."""
        pieces = []
        for place, token in enumerate(ids, start=1):
            self._ids.append(token)
            text = self._tokenizer.detokenize(self._ids)
            whole = not text.endswith(_UNFINISHED) or last and place == len(ids)
            pieces.append(text[self._said :] if whole else text[self._said : -1])
            self._said += len(pieces[-1])
            if whole and len(self._ids) > 2 * _CONTEXT:
                self._ids = self._ids[-_CONTEXT:]
                self._said = len(self._tokenizer.detokenize(self._ids))
        return pieces
