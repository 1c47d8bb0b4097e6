"""Lines of JSON to answers as ids, in TRL's forms.

    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}                    dpo and reward: text
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}       conversations; prompts may be left out, and are then what
    {"chosen": [messages], "rejected": [messages], "margin": 0.5}              both answers begin with; margins are of reward models
    {"prompt": "2 + 2 =", "completion": " 4", "label": true}                   kto: text or conversations, one answer a line

Conversations are written by the tokenizer's chat template, as with --sft; the last answer is the one that is judged. Text is
written as it stands, with the end of document after each answer. Lines that cannot be used are left out, counted and named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron.core.datasets.conversations import ConversationEncoder
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.special_tokens import count_ids_around_text
from megatron.core.tokenizers.base import Tokenizer
from megatron.preference.settings import Task


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """A chosen and a rejected answer, each with its prompt: int32 [tokens], ids of the prompt as ~id. margin: by how
    much the chosen one is better (reward models). line: of its file, from 1.
    """

    chosen: np.ndarray
    rejected: np.ndarray
    margin: float = 0.0
    line: int = 0

    @property
    def answer_ids(self) -> tuple[np.ndarray, ...]:
        """Chosen and rejected, [tokens] each."""
        return (self.chosen, self.rejected)


@dataclass(frozen=True, slots=True)
class LabeledAnswer:
    """An answer with its prompt, and whether it is desirable (kto): int32 [tokens], ids of the prompt as ~id.
    line: of its file, from 1.
    """

    answer: np.ndarray
    desirable: bool
    line: int = 0

    @property
    def answer_ids(self) -> tuple[np.ndarray, ...]:
        """The answer alone, [tokens]."""
        return (self.answer,)


Row = PreferencePair | LabeledAnswer


class PreferenceRowParser:
    """Parses lines of JSON to rows. template: of conversations, as in `ConversationEncoder`. task: what the rows are
    for.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, task: Task = "dpo") -> None:
        self.tokenizer, self.task, self._template = tokenizer, task, template
        self._encoder: ConversationEncoder | None = None
        self._frame: tuple[int, int] | None = None

    def parse_row_line(self, line: bytes) -> Row | None:
        """Return the row of a line; None for a blank one. `DataError` if it is invalid."""
        if not line.strip():
            return None
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"not JSON: {error}") from error
        if self.task == "kto":
            return self._parse_labeled_answer(row)
        return self._parse_pair(row)

    def _parse_pair(self, row: Any) -> PreferencePair:
        """Return the pair of a JSON object. `DataError` if it is invalid."""
        if not isinstance(row, dict) or not {"chosen", "rejected"} <= row.keys():
            raise DataError('no "chosen" and "rejected"')
        chosen, rejected, margin = row["chosen"], row["rejected"], row.get("margin", 0.0)
        if chosen == rejected:
            raise DataError("both answers are the same")
        if not isinstance(margin, (int, float)) or isinstance(margin, bool):
            raise DataError('"margin" is no number')
        first, second = self._encode_answers(row.get("prompt"), {"chosen": chosen, "rejected": rejected})
        if np.array_equal(first, second):
            raise DataError("both answers are the same ids")
        return PreferencePair(first, second, float(margin))

    def _parse_labeled_answer(self, row: Any) -> LabeledAnswer:
        """Return the labeled answer of a JSON object. `DataError` if it is invalid."""
        if not isinstance(row, dict) or not {"prompt", "completion", "label"} <= row.keys():
            raise DataError('no "prompt", "completion" and "label"')
        if not isinstance(row["label"], bool):
            raise DataError('"label" is neither true nor false')
        (answer,) = self._encode_answers(row["prompt"], {"completion": row["completion"]})
        return LabeledAnswer(answer, row["label"])

    def _encode_answers(self, prompt: Any, answers: dict[str, Any]) -> list[np.ndarray]:
        """Return the ids of each answer with its prompt; all are text, or all are lists of messages."""
        kinds = {type(answer) for answer in answers.values()}
        if kinds == {str}:
            encoded = self._encode_text_answers(prompt, list(answers.values()))
        elif kinds == {list}:
            encoded = self._encode_conversations(prompt or [], list(answers.values()))
        else:
            raise DataError(
                f"{' and '.join(json.dumps(name) for name in answers)} are both text, or both lists of messages"
            )
        for name, ids in zip(answers, encoded, strict=True):
            if not (ids[1:] >= 0).any():
                raise DataError(f"the {name} answer has no tokens")
        return encoded

    def _encode_text_answers(self, prompt: Any, answers: list[str]) -> list[np.ndarray]:
        """Encode text answers, each with its prompt; without a prompt, for dpo what both begin with. `DataError` if
        invalid.
        """
        if prompt is None:
            prompt = _common_prefix_of_answers(answers) if self.task == "dpo" else ""
            answers = [answer[len(prompt) :] for answer in answers]
        if not isinstance(prompt, str):
            raise DataError('"prompt" is text where the answers are')
        if not all(answers):
            raise DataError("an answer is empty")
        try:
            return [self._encode_answer_behind_prompt(prompt, answer) for answer in answers]
        except ValueError as error:
            raise DataError(f"text that the tokenizer does not take: {error}") from error

    def _encode_answer_behind_prompt(self, prompt: str, answer: str) -> np.ndarray:
        """Encode prompt and answer as one text if that keeps the ids of the prompt, else each by itself; the prompt as
        ~id.
        """
        if self._frame is None:
            self._frame = count_ids_around_text(self.tokenizer)
        before, after = self._frame

        def ids_without_end_tokens(text: str) -> list[int]:
            ids = list(self.tokenizer.tokenize(text))
            return ids[: len(ids) - after]

        start, whole = ids_without_end_tokens(prompt), ids_without_end_tokens(prompt + answer)
        rest = whole[len(start) :] if whole[: len(start)] == start else ids_without_end_tokens(answer)[before:]
        if not start and self.task != "reward":  # something that the first id of the answer is predicted from
            start = [self.tokenizer.eod]
        return np.concatenate([~np.array(start, np.int32), np.array([*rest, self.tokenizer.eod], np.int32)])

    def _encode_conversations(self, prompt: Any, answers: list[list[Any]]) -> list[np.ndarray]:
        """Encode conversations by the chat template; only the last answer is learnt. `DataError` if invalid."""
        if not isinstance(prompt, list):
            raise DataError('"prompt" is a list of messages where the answers are')
        if self._encoder is None:
            self._encoder = ConversationEncoder(self.tokenizer, self._template)
        whole = [[*prompt, *answer] for answer in answers]
        for messages in whole:
            if any(not isinstance(one, dict) or not isinstance(one.get("role"), str) for one in messages):
                raise DataError('a message has no "role"')
            if not messages or messages[-1]["role"] != "assistant" or not messages[-1].get("content"):
                raise DataError("the last message is no answer of the assistant's")
        try:
            ids = self._encoder.encode_conversations(
                [self._encoder.template.render_segments(messages) for messages in whole]
            )
        except ValueError as error:
            raise DataError(f"text that the tokenizer does not take: {error}") from error
        return list(map(_keep_last_answer, ids))


def _common_prefix_of_answers(answers: Sequence[str]) -> str:
    """Return what all answers begin with, without a final blank, as TRL does."""
    common = os.path.commonprefix(list(answers))
    return common[:-1] if common.endswith(" ") else common


def _keep_last_answer(ids: np.ndarray) -> np.ndarray:
    """Return the ids with only the last run of learnt ids kept so, [tokens]; earlier answers become part of the prompt."""
    earlier = np.flatnonzero(ids < 0)
    learnt = np.flatnonzero(ids >= 0)
    if len(learnt) == 0:
        return ids
    start = int(earlier[earlier < learnt[-1]].max(initial=-1)) + 1
    return np.concatenate([np.where(ids[:start] < 0, ids[:start], ~ids[:start]), ids[start:]])


def parse_preference_rows(
    lines: Sequence[bytes] | Iterator[bytes], reader: PreferenceRowParser
) -> tuple[list[Row], list[tuple[int, str]]]:
    """Parse all lines of a file; return the rows, and (line, reason) of each line left out."""
    rows, dropped = [], []
    for number, line in enumerate(lines, 1):
        try:
            row = reader.parse_row_line(line)
        except DataError as error:
            dropped.append((number, str(error)))
            continue
        if row is not None:
            rows.append(replace(row, line=number))
    return rows, dropped
