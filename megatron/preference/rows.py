"""Lines of JSON to pairs of ids.

    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}                    text
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}       conversations; prompts may be left out, and are then what
    {"chosen": [messages], "rejected": [messages]}                             both answers begin with

Conversations are written by the tokenizer's chat template, as with --sft; the last answer is the one that is compared. Text is
written as it stands, with the end of document after each answer. Lines that cannot be compared are left out, counted and named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.datasets.conversations import Encoder
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.marks import frame
from megatron.core.tokenizers.base import Tokenizer


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, prompt included: int32 [tokens] each, ids of the prompt as ~id."""

    chosen: np.ndarray
    rejected: np.ndarray


class PairReader:
    """Turns lines into pairs. template: of conversations, as `Encoder` takes it."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self.tokenizer, self._template = tokenizer, template
        self._encoder: Encoder | None = None

    def read(self, line: bytes) -> Pair | None:
        """The pair of a line; None for a blank one. Raises `DataError` that says why a line cannot be compared."""
        if not line.strip():
            return None
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"not JSON: {error}") from error
        if not isinstance(row, dict) or not {"chosen", "rejected"} <= row.keys():
            raise DataError('no "chosen" and "rejected"')
        prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
        if chosen == rejected:
            raise DataError("both answers are the same")
        if isinstance(chosen, str) and isinstance(rejected, str):
            pair = self._of_text("" if prompt is None else prompt, chosen, rejected)
        elif isinstance(chosen, list) and isinstance(rejected, list):
            pair = self._of_messages(prompt or [], chosen, rejected)
        else:
            raise DataError('"chosen" and "rejected" are both text, or both lists of messages')
        for name, ids in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            if not (ids[1:] >= 0).any():
                raise DataError(f"the {name} answer has no tokens")
        if np.array_equal(pair.chosen, pair.rejected):
            raise DataError("both answers are the same ids")
        return pair

    def _of_text(self, prompt: Any, chosen: str, rejected: str) -> Pair:
        if not isinstance(prompt, str):
            raise DataError('"prompt" is text where the answers are')
        if not chosen or not rejected:
            raise DataError("an answer is empty")
        before, after = frame(self.tokenizer)  # what some tokenizers put around every text belongs around the whole
        ids = self.tokenizer.tokenize(prompt)
        start = np.array(ids[: len(ids) - after], np.int32)
        if len(start) == 0:
            start = np.array([self.tokenizer.eod], np.int32)

        def whole(answer: str) -> np.ndarray:
            ids = self.tokenizer.tokenize(answer)
            bare = np.array([*ids[before : len(ids) - after], self.tokenizer.eod], np.int32)
            return np.concatenate([~start, bare])

        return Pair(whole(chosen), whole(rejected))

    def _of_messages(self, prompt: Any, chosen: list[Any], rejected: list[Any]) -> Pair:
        if not isinstance(prompt, list):
            raise DataError('"prompt" is a list of messages where the answers are')
        if self._encoder is None:
            self._encoder = Encoder(self.tokenizer, self._template)
        both = [[*prompt, *answer] for answer in (chosen, rejected)]
        for messages in both:
            if any(not isinstance(one, dict) or not isinstance(one.get("role"), str) for one in messages):
                raise DataError('a message has no "role"')
            if not messages or messages[-1]["role"] != "assistant" or not messages[-1].get("content"):
                raise DataError("the last message is no answer of the assistant's")
        try:
            ids = self._encoder.encode([self._encoder.template.pieces(messages) for messages in both])
        except ValueError as error:
            raise DataError(f"text that the tokenizer does not take: {error}") from error
        return Pair(*map(_last_answer, ids))


def _last_answer(ids: np.ndarray) -> np.ndarray:
    """Keep only the last run of learnt ids, [tokens]; earlier answers belong to the prompt."""
    earlier = np.flatnonzero(ids < 0)
    learnt = np.flatnonzero(ids >= 0)
    if len(learnt) == 0:
        return ids
    start = int(earlier[earlier < learnt[-1]].max(initial=-1)) + 1
    return np.concatenate([np.where(ids[:start] < 0, ids[:start], ~ids[:start]), ids[start:]])


def read_pairs(
    lines: Sequence[bytes] | Iterator[bytes], reader: PairReader
) -> tuple[list[Pair], list[tuple[int, str]]]:
    """All pairs of a file, and (line, reason) of each line that is left out."""
    pairs, dropped = [], []
    for number, line in enumerate(lines, 1):
        try:
            pair = reader.read(line)
        except DataError as error:
            dropped.append((number, str(error)))
            continue
        if pair is not None:
            pairs.append(pair)
    return pairs, dropped
