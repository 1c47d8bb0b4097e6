"""Rows as samples: all answers of a row stand in one sample as documents of their own, and several short rows share it.

    ids           <prompt> chosen . | <prompt> rejected . | <prompt> ...     of the first pair and the second
    document_ids  0 0 0 0 0         | 1 1 1 1 1           | 2 ...            no attention from one to another
    preference    0 0 0 0 0         | 1 1 1 1 1           | 2 ...            number of the answer: 2 x pair, + 1 for the rejected one
    answer_mask   0 0 1 1 1         | 0 0 1 1 1           | 0 ...            labels that are an answer's; of a reward model the last token
    loss_mask     0 0 0 0 1         | 0 0 0 0 0           | 0 ...            once for each pair: what the loss is the mean over

For kto a row is one answer, and a sample has beside its rows the same prompts with answers to others, as kl_tokens, kl_labels, ...: what
the policy's divergence from the reference is estimated from. A row that does not fit into a sample is left out and counted.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron.core.datasets.dataset_protocols import Sample, SplitRequest, TokenSpan
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.packing import plan_sequence_packs, shuffle_epochs
from megatron.core.tokenizers.base import Tokenizer
from megatron.preference.rows import LabeledAnswer, PreferencePair, PreferenceRowParser, Row, parse_preference_rows
from megatron.preference.settings import PreferenceConfig, Task

FURTHEST = 100  # rows behind a row, among which one with another prompt is looked for
MOST_NAMED = 5  # lines that are left out, by number and reason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreferenceRowSource:
    """The rows of a JSONL file. prefix: its path.

    reference: the reference's log-probability of each answer of each row, if known: [rows, answers], mismatched ones
    last.
    """

    prefix: str
    rows: tuple[Row, ...]
    reference: np.ndarray | None = None


class PreferenceDataset:
    """The rows [start, stop) of a source, as shuffled samples of `length` tokens.

    num_samples: at least so many, in whole epochs; None: one epoch. packing: several rows may share a sample. A sample holds int64
    [length] each but loss_mask, reference and margin, which are floats; see the top of this file.
    """

    def __init__(
        self,
        source: PreferenceRowSource,
        part: range,
        *,
        length: int,
        num_samples: int | None,
        seed: int,
        split: str,
        task: Task = "dpo",
        packing: bool = True,
    ) -> None:
        self.prefix, self._length, self._task, self._source = source.prefix, length, task, source
        rows = source.rows[part.start : part.stop]
        self._documents = [_answer_documents_of_row(source.rows, place, task) for place in part]
        count = len(rows[0].answer_ids) if rows else 0  # the rest is mismatched, and stands beside
        sizes = np.array(
            [
                max(sum(len(ids) - 1 for ids in part) for part in (documents[:count], documents[count:]))
                for documents in self._documents
            ],
            np.int64,
        )
        fitting = np.flatnonzero(sizes <= length)
        if len(fitting) < len(rows):
            long = [f"line {row.line}" for row, size in zip(rows, sizes, strict=True) if size > length]
            logger.warning(
                "%s (%s): %d of %d rows are left out: their answers with their prompts do not fit into --seq-length %d: %s",
                self.prefix, split, len(long), len(rows), length, _join_first_names(long, ", "),
            )  # fmt: skip
        if len(fitting) == 0:
            raise DataError(
                f"the {split} split of {self.prefix} holds {len(rows)} rows, none of which fits into --seq-length {length}; give a larger one"
            )
        self._rows, self._first = rows, part.start
        order, last = plan_sequence_packs(sizes[fitting], length if packing else int(sizes.max()) + 1, seed)
        self._planned = fitting[order]
        self._packs = np.concatenate([[0], np.flatnonzero(last) + 1 if packing else np.arange(1, len(order) + 1)])
        packs = len(self._packs) - 1
        self._order = shuffle_epochs(packs, num_samples, seed)
        self.tokens_per_epoch, self.samples_per_epoch = int(sizes[fitting].sum()), float(packs)
        self.description = {
            "class": type(self).__name__,
            "prefix": self.prefix,
            "rows": [part.start, part.stop],
            "sizes": hashlib.sha256(sizes.tobytes()).hexdigest(),
            "seed": seed,
            "split": split,
            "sequence_length": length,
            "task": task,
            "packing": packing,
        }

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Sample:
        """The index-th sample in shuffled order, [length] each."""
        places = self._packed_rows(index)
        count = len(self._rows[places[0]].answer_ids)
        sample = _build_answer_sample([ids for place in places for ids in self._documents[place][:count]], self._length)
        values = {name: np.zeros(self._length) for name in ("reference", "margin", "desirable")}
        ends = np.flatnonzero(sample["loss_mask"])
        for number, place in enumerate(places):
            end, row = ends[number * count], self._rows[place]
            values["margin"][end] = row.margin if isinstance(row, PreferencePair) else 0.0
            values["desirable"][end] = isinstance(row, LabeledAnswer) and row.desirable
        self._write_known_reference_logprobs(values["reference"], ends, places, slice(0, count))
        sample["loss_mask"][:] = 0
        sample["loss_mask"][ends[::count]] = 1
        if self._task == "kto":
            other = _build_answer_sample([self._documents[place][1] for place in places], self._length)
            known = np.zeros(self._length)
            self._write_known_reference_logprobs(known, np.flatnonzero(other["loss_mask"]), places, slice(1, 2))
            # One longer, so that documents stay whole where context ranks cut what is as long as a sample.
            other["document_ids"] = np.append(other["document_ids"], 0)
            sample |= {f"kl_{name}": array for name, array in other.items()} | {"kl_reference": known}
        return {**sample, **values}

    def _write_known_reference_logprobs(
        self, values: np.ndarray, ends: np.ndarray, places: Sequence[int], which: slice
    ) -> None:
        """Set the known reference log-probabilities in `values` [length] at the last label of each answer.

        ends: positions of these labels. places: rows of the sample. which: slice of a row's answers.
        """
        if self._source.reference is not None:
            values[ends] = self._source.reference[self._first + np.array(places), which].flatten()

    def _packed_rows(self, index: int) -> list[int]:
        """Return the rows packed into sample `index`, as positions in this part. `IndexError` out of range."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        pack = self._order[index]
        return self._planned[self._packs[pack] : self._packs[pack + 1]].tolist()

    def token_sources(self, index: int) -> list[TokenSpan]:
        """Return which rows the index-th sample holds: a span for each answer."""
        spans, at = [], 0
        for place in self._packed_rows(index):
            for ids in self._documents[place][: len(self._rows[place].answer_ids)]:
                number = self._first + place
                spans.append(TokenSpan(self.prefix, number, number, 0, len(ids) - 1, at))
                at += len(ids) - 1
        return spans

    def answer_indices_in_sample(self, index: int) -> list[tuple[int, int]]:
        """Return (row, index of its answer) of each answer in the index-th sample."""
        return [
            (self._first + place, which)
            for place in self._packed_rows(index)
            for which in range(len(self._rows[place].answer_ids))
        ]

    def samples_with_document(self, document: int) -> np.ndarray:
        """The samples with this row, in rising order, int64 [samples]."""
        places = np.flatnonzero(self._first + self._planned == document)
        return np.flatnonzero(np.isin(self._order, np.searchsorted(self._packs, places, side="right") - 1))


def _answer_documents_of_row(rows: Sequence[Row], place: int, task: Task) -> list[np.ndarray]:
    """Return the documents of a row: its answers; for kto also its prompt with another row's answer.

    For a reward model only the last token, one appended label, is learnt.
    """
    answers = list(rows[place].answer_ids)
    if task == "reward":  # a text is read to its end, where its score is: one more label, and the only one that counts
        return [np.append(np.where(ids < 0, ids, ~ids), np.int32(0)) for ids in answers]
    return [*answers, _prompt_with_other_rows_answer(rows, place)] if task == "kto" else answers


def _prompt_with_other_rows_answer(rows: Sequence[Row], place: int) -> np.ndarray:
    """Return the prompt of a row with the answer of the next row that has another prompt, or of the next row if none
    has.

    It does not depend on --split, so that a reference's log-probabilities of it can be cached.
    """
    prompt, _ = _split_prompt_answer(rows[place].answer_ids[0])
    others = [(place + step) % len(rows) for step in range(1, min(len(rows), FURTHEST))] or [place]
    for other in others:
        theirs, answer = _split_prompt_answer(rows[other].answer_ids[0])
        if not np.array_equal(theirs, prompt):
            return np.concatenate([prompt, answer])
    return np.concatenate([prompt, _split_prompt_answer(rows[others[0]].answer_ids[0])[1]])


def _split_prompt_answer(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(prompt, answer) of a document."""
    first = int(np.flatnonzero(ids >= 0)[0])
    return ids[:first], ids[first:]


def _build_answer_sample(documents: Sequence[np.ndarray], size: int) -> Sample:
    """Concatenate documents to a sample of `size` tokens; loss_mask is 1 at the last label of each answer."""
    names = ("tokens", "labels", "position_ids", "document_ids", "preference", "answer_mask", "padding_mask")
    sample: Sample = {name: np.zeros(size, np.int64) for name in names}
    sample["loss_mask"], at = np.zeros(size, np.float32), 0
    for document, ids in enumerate(documents):
        end = at + len(ids) - 1
        sample["tokens"][at:end], sample["labels"][at:end] = ids[:-1], ids[1:]
        sample["position_ids"][at:end] = np.arange(len(ids) - 1)
        sample["document_ids"][at:end] = sample["preference"][at:end] = document
        sample["answer_mask"][at:end] = ids[1:] >= 0
        sample["loss_mask"][at + np.flatnonzero(ids[1:] >= 0)[-1]] = 1
        at = end
    sample["padding_mask"][:at] = 1
    sample["position_ids"][at:] = np.arange(size - at)
    sample["document_ids"][at:] = len(documents)
    for name in ("tokens", "labels"):  # an id of a prompt is kept as ~id
        sample[name] = sample[name] ^ (sample[name] >> 63)
    return sample


def _join_first_names(names: Sequence[str], separator: str) -> str:
    """Return the first MOST_NAMED names joined, and how many more there are."""
    more = [f"and {len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return separator.join([*names[:MOST_NAMED], *more])


@dataclass(frozen=True, slots=True)
class PreferenceDatasetKind:
    """Rows of answers; --split counts rows. opened: files that were read before, by their paths."""

    tokenizer: Tokenizer
    template: str
    sequence_length: int
    seed: int
    config: PreferenceConfig = PreferenceConfig()
    name: str = PreferenceDataset.__name__
    opened: dict[str, PreferenceRowSource] = field(default_factory=dict)

    def open(self, prefix: str) -> PreferenceRowSource:
        """Return the rows of a JSONL file, read once. Invalid lines are logged and left out; `DataError` if none is
        left.
        """
        if prefix not in self.opened:
            self.opened[prefix] = self._read_rows_file(prefix)
        return self.opened[prefix]

    def _read_rows_file(self, prefix: str) -> PreferenceRowSource:
        parser = PreferenceRowParser(self.tokenizer, self.template, self.config.finetune_task)
        try:
            with Path(prefix).open("rb") as lines:
                rows, dropped = parse_preference_rows(lines, parser)
        except OSError as error:
            raise DataError(
                f"{prefix} cannot be read: {error.strerror}; give JSONL files by their whole names"
            ) from error
        if dropped:
            named = _join_first_names([f"line {number}: {reason}" for number, reason in dropped], "; ")
            logger.warning("%s: %d lines are left out: %s", prefix, len(dropped), named)
        if parser.unread_columns:
            logger.warning("%s: columns that are not read: %s", prefix, ", ".join(parser.unread_columns))
        if not rows:
            raise DataError(f"{prefix} holds no row of answers")
        return PreferenceRowSource(prefix, tuple(rows))

    def num_split_units(self, source: PreferenceRowSource) -> int:
        """The number of rows."""
        return len(source.rows)

    def split_has_any_sample(self, source: PreferenceRowSource, part: range) -> bool:
        """Whether there is a row."""
        return len(part) > 0

    def build_one_split(self, source: PreferenceRowSource, request: SplitRequest) -> PreferenceDataset:
        """Samples of these rows."""
        return PreferenceDataset(
            source,
            request.part,
            length=self.sequence_length,
            num_samples=request.num_samples,
            seed=self.seed,
            split=request.name,
            task=self.config.finetune_task,
            packing=self.config.finetune_packing,
        )
