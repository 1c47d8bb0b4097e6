"""Lines of JSON to answers as ids, in TRL's forms, with TRL's ids.

    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}                    dpo and reward: text
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}       conversations; prompts may be left out, and are then what
    {"chosen": [messages], "rejected": [messages], "margin": 0.5}              both answers begin with; margins are of reward models
    {"prompt": "2 + 2 =", "completion": " 4", "label": true}                   kto: text or conversations, one answer a line

Text is tokenized as one, prompt and answer, with the end of document after the answer, once; names of special tokens in it are those tokens.
Conversations are written by the tokenizer's chat template, with "tools" and "chat_template_kwargs" of the row. What is judged begins where
the ids of the prompt (with the invitation to answer) and those of the whole part, for both answers of a pair. Lines that cannot be used
are left out, counted and named.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.datasets.conversation_rows import tools_and_variables
from megatron.core.datasets.conversations import ConversationEncoder
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.special_tokens import tokenize_marked_text
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


# Columns that TRL reads and that have no counterpart here -> what to do instead. It passes over all that it does not know, and so does this.
_ANSWERS_WITHOUT_TEXT = "are ids already; give the answers as text or as messages"
_REFUSED_COLUMNS = {
    **dict.fromkeys(("image", "images"), "are not read by a network of text"),
    **dict.fromkeys(
        ("prompt_ids", "chosen_ids", "rejected_ids", "completion_ids", "chosen_input_ids", "rejected_input_ids"),
        _ANSWERS_WITHOUT_TEXT,
    ),
    **dict.fromkeys(
        ("ref_chosen_logps", "ref_rejected_logps", "ref_logps"),
        "are a reference's; --preference-reference-cache computes and keeps them",
    ),
}


class PreferenceRowParser:
    """Parses lines of JSON to rows. template: of conversations, as in `ConversationEncoder`. task: what the rows are
    for. unread_columns: names of columns that were passed over, as TRL does.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, task: Task = "dpo") -> None:
        self.tokenizer, self.task, self._template = tokenizer, task, template
        self.unread_columns: dict[str, None] = {}
        self._encoder: ConversationEncoder | None = None

    def parse_row_line(self, line: bytes) -> Row | None:
        """Return the row of a line; None for a blank one. `DataError` if it is invalid."""
        if not line.strip():
            return None
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"not JSON: {error}") from error
        columns = ForeignMapping(row if isinstance(row, dict) else {})
        names = ("completion",) if self.task == "kto" else ("chosen", "rejected")
        answers = {name: columns.pop_or_none(name) for name in names}
        if missing := _missing_columns_message(columns, answers, self.task):
            raise DataError(missing)
        if self.task != "kto" and answers["chosen"] == answers["rejected"]:
            raise DataError("both answers are the same")
        label, margin = self._take_label_and_margin(columns)
        encoded = self._encode_answers(columns, answers)
        for name in columns.keys_left():
            if name in _REFUSED_COLUMNS:
                raise DataError(f'"{name}" {_REFUSED_COLUMNS[name]}')
            self.unread_columns[name] = None
        if self.task == "kto":
            return LabeledAnswer(encoded[0], label)
        if np.array_equal(encoded[0], encoded[1]):
            raise DataError("both answers are the same ids")
        return PreferencePair(encoded[0], encoded[1], margin)

    def _take_label_and_margin(self, columns: ForeignMapping) -> tuple[bool, float]:
        """Return the label (kto) and the margin (reward) of a row; `DataError` if it is none."""
        label = columns.pop_or_none("label") if self.task == "kto" else False
        if not isinstance(label, bool):
            raise DataError('"label" is neither true nor false')
        margin = columns.pop_or_none("margin") if self.task == "reward" else None
        margin = 0.0 if margin is None else margin
        if not isinstance(margin, (int, float)) or isinstance(margin, bool) or not math.isfinite(margin):
            raise DataError('"margin" is no number')
        return label, float(margin)

    def _encode_answers(self, columns: ForeignMapping, answers: Mapping[str, Any]) -> list[np.ndarray]:
        """Return the ids of each answer with its prompt; all are text, or all are lists of messages."""
        prompt, kinds = columns.pop_or_none("prompt"), {type(answer) for answer in answers.values()}
        if kinds not in ({str}, {list}):
            raise DataError(
                f"{' and '.join(json.dumps(name) for name in answers)} are both text, or both lists of messages"
            )
        try:
            if kinds == {str}:
                encoded = self._encode_text_answers(prompt, list(answers.values()))
            else:
                options = tools_and_variables(columns)
                encoded = self._encode_conversations(prompt, list(answers.values()), *options)
        except ValueError as error:
            raise DataError(f"text that the tokenizer does not take: {error}") from error
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
        return _mark_prompts(
            tokenize_marked_text(self.tokenizer, prompt),
            [tokenize_marked_text(self.tokenizer, prompt + answer, ends=True) for answer in answers],
        )

    def _encode_conversations(
        self, prompt: Any, answers: list[list[Any]], tools: Any, variables: Mapping[str, Any]
    ) -> list[np.ndarray]:
        """Encode conversations by the chat template. tools, variables: of the template. `DataError` if invalid."""
        prompt, answers = _explicit_prompt(prompt, answers, self.task)
        _check_messages(prompt, answers)
        if self._encoder is None:
            self._encoder = ConversationEncoder(self.tokenizer, self._template)
        template = self._encoder.template
        begin = [template.render_with_generation_prompt(prompt, tools, variables)] if prompt else []
        whole = [[*prompt, *messages] for messages in answers]
        rendered = [template.render_unlearnt(messages, tools, variables) for messages in whole]
        ids = [(one ^ (one >> 31)).tolist() for one in self._encoder.encode_conversations([*begin, *rendered])]
        return _mark_prompts(ids[0] if prompt else [], ids[len(begin) :])


_ANSWER_KEYS = ("content", "tool_calls", "reasoning_content", "thinking")


def _check_messages(prompt: Sequence[Any], answers: Sequence[Sequence[Any]]) -> None:
    """Raise `DataError` for a message without a role, and for an answer that is not the assistant's or says nothing."""
    for message in (*prompt, *chain.from_iterable(answers)):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError('a message has no "role"')
    for messages in answers:
        if not messages or messages[-1]["role"] != "assistant" or not any(map(messages[-1].get, _ANSWER_KEYS)):
            raise DataError("the last message is no answer of the assistant's")


def _missing_columns_message(columns: ForeignMapping, answers: Mapping[str, Any], task: Task) -> str:
    """Return what a row lacks for its task, with the way out; "" if nothing. answers: None where there is none."""
    given = columns.mapping
    if task != "kto":
        way_out = "; rows of one answer each are read by --finetune-task kto" if "completion" in given else ""
        return f'no "chosen" and "rejected"{way_out}' if None in answers.values() else ""
    if None not in answers.values() and {"prompt", "label"} <= given.keys():
        return ""
    way_out = "; write each answer of a pair as a row of its own" if "chosen" in given else ""
    return f'no "prompt", "completion" and "label"{way_out}'


def _explicit_prompt(prompt: Any, answers: list[list[Any]], task: Task) -> tuple[list[Any], list[list[Any]]]:
    """Return the messages of the prompt, and of each answer without them: without a prompt, those that all answers begin
    with, as TRL's `extract_prompt`. `DataError` if there are none.
    """
    if isinstance(prompt, str) and all(one and one[0] == {"role": "user", "content": prompt} for one in answers):
        prompt = None  # as in UltraFeedback: a copy of the first message, which both answers have
    if prompt is not None and not isinstance(prompt, list):
        raise DataError('"prompt" is a list of messages where the answers are; leave it out where they begin with it')
    if prompt or task == "reward":
        return prompt or [], answers
    shortest = min(map(len, answers))
    differing = (place for place in range(shortest) if any(one[place] != answers[0][place] for one in answers))
    common = next(differing, shortest - 1)
    if common < 1:
        raise DataError('the answers have no message in common; give it as "prompt"')
    return answers[0][:common], [one[common:] for one in answers]


def _common_prefix_of_answers(answers: Sequence[str]) -> str:
    """Return what all answers begin with, without a final blank, as TRL does."""
    common = os.path.commonprefix(list(answers))
    return common[:-1] if common.endswith(" ") else common


def _mark_prompts(prompt: Sequence[int], whole: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return all ids as int32, those of the prompt as ~id: as many as all sequences have in common with it, as in TRL.

    Fewer than it has where its last token and an answer's first are one in the whole.
    """
    common = len(os.path.commonprefix([list(prompt), *map(list, whole)]))
    return [np.concatenate([~np.array(ids[:common], np.int32), np.array(ids[common:], np.int32)]) for ids in whole]


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
