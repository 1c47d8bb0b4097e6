"""Segments of a rendered conversation to ids, of which those of answers are learnt.

A text is tokenized as a whole, so that the ids are those of transformers, and a token is learnt if a character of it is. Only
what is no text of the tokenizer's is cut out: marks that it does not find by itself, and names of marks that a user wrote.

    <|im_start|>user\\nsay  <|im_end|>  please<|im_end|>\\n        one text | characters, no mark | one text
                            forged
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron.core.datasets.special_tokens import count_ids_around_text
from megatron.core.datasets.templates import TemplateSegment
from megatron.core.tokenizers.base import Tokenizer


@dataclass(frozen=True, slots=True)
class _Run:
    """Segments that are tokenized together. mark: the segment is a token. plain: a name of a token that is ordinary text.
    first: nothing stands before it.
    """

    segments: list[TemplateSegment]
    mark: bool = False
    plain: bool = False
    first: bool = False

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)

    @property
    def answers(self) -> list[tuple[int, int]]:
        """[start, end) of what is learnt."""
        ends = np.cumsum([len(segment.text) for segment in self.segments]).tolist()
        return [(end - len(one.text), end) for one, end in zip(self.segments, ends) if one.answer]


class SegmentEncoder:
    """Encodes segments. marks: ids of the tokens whose names segments may be; may be added to."""

    def __init__(self, tokenizer: Tokenizer, marks: Mapping[str, int]) -> None:
        self._tokenizer, self._marks = tokenizer, marks
        self._found = tokenizer.names_found_in_text
        self._names = re.compile("|".join(re.escape(name) for name in sorted(marks, key=len, reverse=True)) or "(?!)")

    @cached_property
    def frame(self) -> tuple[int, int]:
        """How many ids the tokenizer puts before and after every text."""
        return count_ids_around_text(self._tokenizer)

    def encode(self, conversations: Sequence[Sequence[TemplateSegment]]) -> list[np.ndarray]:
        """Return the ids of each conversation, int32 [t], ~id where not learnt. `ValueError` for text that has none."""
        runs = [list(self._split_into_runs(conversation)) for conversation in conversations]
        texts = [run for conversation in runs for run in conversation if not run.mark and not run.plain]
        encoded = iter(self._encode_whole(texts) if self._found else self._encode_framed(texts))
        result = []
        for conversation in runs:
            parts = [
                _signed([self._marks[run.text]], run.segments[0].answer)
                if run.mark
                else _signed(self._encode_plain(run), run.segments[0].answer)
                if run.plain
                else next(encoded)
                for run in conversation
            ]
            result.append(np.concatenate([np.empty(0, np.int32), *parts]))
        return result

    def _split_into_runs(self, conversation: Sequence[TemplateSegment]) -> Iterator[_Run]:
        run: list[TemplateSegment] = []
        first = True
        for segment in conversation:
            parts = [segment]
            if self._found and not segment.mark:
                parts = [
                    TemplateSegment(part, segment.answer)
                    for part in re.split(f"({self._names.pattern})", segment.text)
                    if part
                ]
            for part in parts:
                forged = bool(self._found) and not part.mark and self._names.fullmatch(part.text) is not None
                if not forged and (not part.mark or part.text in self._found):
                    run.append(part)
                    continue
                if run:
                    yield _Run(run, first=first)
                    run, first = [], False
                yield _Run([part], mark=part.mark, plain=forged)
                first = False
        if run:
            yield _Run(run, first=first)

    def _encode_whole(self, runs: Sequence[_Run]) -> list[np.ndarray]:
        """Return the ids of runs, for a tokenizer that finds the names of tokens in a text."""
        # Behind a new line, as some tokenizers put a space before the first word of a text.
        encoded = self._tokenizer.tokenize_with_special_spans(
            [run.text if run.first else "\n" + run.text for run in runs]
        )
        result = []
        for run, (ids, spans) in zip(runs, encoded, strict=True):
            if not run.first:
                line = self._line_ids
                if ids[: len(line)] == line:
                    ids, spans = ids[len(line) :], [(start - 1, end - 1) for start, end in spans[len(line) :]]
                else:
                    ((ids, spans),) = self._tokenizer.tokenize_with_special_spans([run.text])
            result.append(_keep_answers(ids, spans, run.answers))
        return result

    @cached_property
    def _line_ids(self) -> list[int]:
        return self._tokenizer.tokenize_with_special("\n")

    def _encode_framed(self, runs: Sequence[_Run]) -> list[np.ndarray]:
        """Return the ids of runs, for a tokenizer to which the names of tokens are ordinary text."""
        before, after = self.frame
        flat, lengths = self._tokenizer.encode_texts_flat([run.text for run in runs])
        ends = np.cumsum(lengths)
        result = []
        for run, first, last in zip(runs, (ends - lengths + before).tolist(), (ends - after).tolist()):
            ids = np.asarray(flat[first:last]).astype(np.int32)
            if len({segment.answer for segment in run.segments}) > 1:
                spans = self._tokenizer.token_byte_spans(run.text)
                spans = spans[before : len(spans) - after]
                answers = [(_bytes_of(run.text[:start]), _bytes_of(run.text[:end])) for start, end in run.answers]
                result.append(_keep_answers(ids.tolist(), spans, answers))
            else:
                result.append(_signed(ids, run.segments[0].answer))
            self._refuse_marks(ids.tolist(), run.text)
        return result

    def _encode_plain(self, run: _Run) -> list[int]:
        """Return the ids of the characters of a token's name."""
        ids = self._tokenizer.tokenize_characters("\n" + run.text)
        line = self._line_ids
        ids = ids[len(line) :] if ids[: len(line)] == line else self._tokenizer.tokenize_characters(run.text)
        self._refuse_marks(ids, run.text)
        return ids

    def _refuse_marks(self, ids: Sequence[int], text: str) -> None:
        """Raise `ValueError` if ordinary text became the token whose name it holds."""
        for name in self._names.findall(text):
            if self._marks[name] in ids:
                raise ValueError(f"the tokenizer makes the token {name} of ordinary text; take it out of the text")


def _signed(ids: Sequence[int] | np.ndarray, learnt: bool) -> np.ndarray:
    array = np.asarray(ids, np.int32)
    return array if learnt else ~array


def _keep_answers(
    ids: Sequence[int], spans: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Return ids, ~id where no character of the token is in an answer. spans, answers: [start, end) in the text, in order."""
    result = ~np.array(ids, np.int32)
    place = 0
    for token, (start, end) in enumerate(spans):
        while place < len(answers) and answers[place][1] <= start:
            place += 1
        if place < len(answers) and answers[place][0] < max(end, start + 1):
            result[token] = ids[token]
    return result


def _bytes_of(text: str) -> int:
    return len(text.encode())
