"""What every tokenizer offers to the data, the training and the text generation, whatever its kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to ids and back.

    vocab_size: number of ids, before padding. eod: the id that ends a document. pad: the id that fills short samples,
    or None. special_ids: ids with a meaning of their own, other than as padding.
    """

    vocab_size: int
    eod: int
    pad: int | None
    special_ids: tuple[int, ...]

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """What tells this tokenizer from others: equal for two tokenizers only when they give the same ids."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, without an end of document. Raises `ValueError` for text it cannot read."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text; may use all processors."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of some ids; bytes that are not whole characters become U+FFFD."""
