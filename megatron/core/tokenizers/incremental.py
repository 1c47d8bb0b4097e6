"""The text of ids that come one by one: joined, it is what `detokenize` makes of all of them.

    decoder = IncrementalDecoder(tokenizer, prompt)
    text = "".join(decoder.add(token) for token in new) + decoder.finish()

A token is whole characters (str), or bytes that may be a part of one (`Tokenizer.piece_after`). Bytes are held back while
they can still become a character, at most three; a byte that cannot is U+FFFD at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.tokenizers.base import Tokenizer

_CONTEXT = 8  # ids of what precedes that may matter: bytes of one character, and a space that the first token lacks
REPLACEMENT = "\ufffd"  # what bytes are that belong to no character
_CLEANED = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m", "'s", "'ve", "'re")),
)
_LONGEST_CLEANED = max(len(before) for before, _ in _CLEANED)


class IncrementalDecoder:
    """Decodes a growing text. preceding: ids before it, whose unfinished character belongs to the text that follows."""

    def __init__(self, tokenizer: Tokenizer, preceding: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []  # ids that the tokenizer needs to know to decode the next one
        self._has_text = False
        self._held = b""
        self._uncleaned = ""
        tail = min(_CONTEXT, len(preceding))
        while tail < len(preceding) and not any(map(tokenizer.stands_for_text, preceding[-tail:])):
            tail = min(2 * tail, len(preceding))
        for token in preceding[len(preceding) - tail :]:
            self.add(token)
        self._uncleaned = ""

    @property
    def is_incomplete(self) -> bool:
        """Whether something is held back: bytes that may become a character, or a space that may go."""
        return bool(self._held or self._uncleaned)

    def add(self, token: int) -> str:
        """Add an id; return the text that is now certain."""
        piece = self._tokenizer.piece_after(self._before, token)
        text, self._held = self._decode_piece(piece)
        if piece and self._tokenizer.stands_for_text(token):
            self._before = [token]
        elif piece or not self._has_text:
            self._before.append(token)
        self._has_text |= bool(piece)
        return self._clean(text, final=False) if self._tokenizer.cleans_up_spaces else text

    def text_and_bytes_if_next(self, token: int) -> tuple[str, bytes]:
        """Return what `add` would return for an id, and the bytes of that id alone, without adding it."""
        piece = self._tokenizer.piece_after(self._before, token)
        return self._decode_piece(piece)[0], piece.encode("utf-8", "replace") if isinstance(piece, str) else piece

    def finish(self) -> str:
        """Return the text of the bytes that were held back: no more ids follow."""
        text, self._held = _decode_bytes(self._held, self._tokenizer.replaces_each_byte, final=True)
        return self._clean(text, final=True) if self._tokenizer.cleans_up_spaces else text

    def _decode_piece(self, piece: str | bytes) -> tuple[str, bytes]:
        """Return the text of the bytes held back and a piece after them, and the bytes still to be held back."""
        each = self._tokenizer.replaces_each_byte
        if isinstance(piece, bytes):
            return _decode_bytes(self._held + piece, each, final=False)
        return _decode_bytes(self._held, each, final=True)[0] + piece, b""

    def _clean(self, text: str, *, final: bool) -> str:
        """Add text; return the cleaned text up to a place that no replaced text reaches across."""
        text = self._uncleaned + text
        cut = len(text)
        while not final and cut and (cut < _LONGEST_CLEANED or " " in text[cut - _LONGEST_CLEANED : cut]):
            cut -= 1
        self._uncleaned = text[cut:]
        return clean_up_spaces(text[:cut])


def clean_up_spaces(text: str) -> str:
    """Return a text without spaces before punctuation and English contractions, as `clean_up_tokenization_spaces` of
    transformers removes them.
    """
    for before, after in _CLEANED:
        text = text.replace(before, after)
    return text


def decode_certain(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of ids that more may follow: without a character that they only begin."""
    return tokenizer.detokenize(ids).removesuffix(IncrementalDecoder(tokenizer, ids).finish())


def decode_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of ids, decoded one by one."""
    decoder = IncrementalDecoder(tokenizer)
    return "".join([*(decoder.add(token) for token in ids), decoder.finish()])


def _decode_bytes(held: bytes, each: bool, *, final: bool) -> tuple[str, bytes]:
    """Return the text of bytes, and the beginning of a character at their end, unless `final`. each: every byte that
    belongs to no character is U+FFFD, and not every beginning of a character that is cut off.
    """
    text = ""
    while held:
        try:
            return text + held.decode(), b""
        except UnicodeDecodeError as error:
            text += held[: error.start].decode()
            if error.reason == "unexpected end of data" and not final:
                return text, held[error.start :]
            text += REPLACEMENT * (error.end - error.start if each else 1)
            held = held[error.end :]
    return text, b""
