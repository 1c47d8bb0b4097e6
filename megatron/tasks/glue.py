"""The sentence and sentence-pair tasks of GLUE (Wang et al., 2018), read from the tables in which they are published.

A row of `TASKS` says which columns hold the texts and the label, which labels there are, and what is measured. Columns are
found by the names in the header, so that files with and without labels, and with further columns, are read alike. A label is
a class, or, in a task with a scale in the place of classes, a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from megatron.core.datasets.indexed import DataError

Pairs = Sequence[tuple[float, float]]  # (predicted, true) class, or number, of each sample


@dataclass(frozen=True, slots=True)
class GlueSample:
    """One sample as text.

    label: number of its class (int), or the number it has on the task's scale (float); None in a file without labels. place:
    file and line, for messages.
    """

    uid: str
    first: str
    second: str | None
    label: int | float | None
    place: str


def accuracy(pairs: Pairs) -> float:
    """Share of right predictions."""
    return sum(predicted == true for predicted, true in pairs) / len(pairs)


def f1(pairs: Pairs) -> float:
    """Return the F1 score of class 1."""
    right = sum(predicted == true == 1 for predicted, true in pairs)
    named = sum((predicted == 1) + (true == 1) for predicted, true in pairs)
    return 2 * right / named if named else 0.0


def matthews(pairs: Pairs) -> float:
    """Return Matthews' correlation of two binary variables, which is Pearson's; 0 if one of them is constant."""
    return pearson(pairs)


def pearson(pairs: Pairs) -> float:
    """Return Pearson's correlation; 0 if one of the two is constant."""
    predicted, true = (np.array(side, np.float64) - np.mean(side, dtype=np.float64) for side in zip(*pairs))
    spread = float(np.sqrt((predicted @ predicted) * (true @ true)))
    return float(predicted @ true) / spread if spread else 0.0


def spearman(pairs: Pairs) -> float:
    """Return Spearman's rank correlation; equal numbers share the mean of their ranks."""
    predicted, true = (_rankdata_average(side) for side in zip(*pairs))
    return pearson(list(zip(predicted.tolist(), true.tolist())))


def _rankdata_average(numbers: Sequence[float]) -> np.ndarray:
    """The rank of each number, from 1. float64 [n]"""
    _, places, counts = np.unique(np.array(numbers, np.float64), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


@dataclass(frozen=True, slots=True)
class GlueTask:
    """A task's columns, labels and metrics. texts, label, uid: names of columns. classes: empty if labels are numbers
    on `scale`, (lowest, highest). header: of a file that is published without one.
    """

    texts: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    uid: str = "index"
    metrics: tuple[Callable[[Pairs], float], ...] = (accuracy,)
    header: tuple[str, ...] | None = None
    scale: tuple[float, float] | None = None

    def read_label(self, word: str) -> int | float:
        """Return the number of a class, or a number on the scale. `ValueError` with what was expected."""
        if self.scale is None:
            if word not in self.classes:
                raise ValueError(f"label {word!r}, expected one of {', '.join(self.classes)}")
            return self.classes.index(word)
        low, high = self.scale
        try:
            number = float(word)
        except ValueError:
            number = float("nan")
        if not low <= number <= high:
            raise ValueError(f"label {word!r}, expected a number from {low:g} to {high:g}")
        return number


_ENTAILMENT = ("entailment", "not_entailment")

TASKS: Mapping[str, GlueTask] = MappingProxyType(
    {
        "MNLI": GlueTask(("sentence1", "sentence2"), "gold_label", ("contradiction", "entailment", "neutral")),
        "QQP": GlueTask(("question1", "question2"), "is_duplicate", ("0", "1"), uid="id", metrics=(accuracy, f1)),
        "QNLI": GlueTask(("question", "sentence"), "label", _ENTAILMENT),
        "RTE": GlueTask(("sentence1", "sentence2"), "label", _ENTAILMENT),
        "WNLI": GlueTask(("sentence1", "sentence2"), "label", ("0", "1")),
        "MRPC": GlueTask(("#1 String", "#2 String"), "Quality", ("0", "1"), metrics=(accuracy, f1)),
        "SST-2": GlueTask(("sentence",), "label", ("0", "1")),
        "CoLA": GlueTask(
            ("sentence",),
            "label",
            ("0", "1"),
            metrics=(matthews, accuracy),
            header=("source", "label", "mark", "sentence"),
        ),
        "STS-B": GlueTask(("sentence1", "sentence2"), "score", (), metrics=(pearson, spearman), scale=(0.0, 5.0)),
    }
)
_SHOWN = 20  # bad lines that an error lists


def read_glue_samples(name: str, path: str | Path) -> list[GlueSample]:
    """The samples of one file of a task. `DataError` names every line that cannot be used, and what was expected."""
    task = TASKS[name]
    lines = read_utf8_text(path).split("\n")
    header, first_line = _read_column_names(task, lines)
    places = _column_positions(name, task, header, path)
    samples, problems = [], []
    for number, line in enumerate(lines[first_line - 1 :], first_line):
        if not line.strip():
            continue
        try:
            samples.append(_parse_glue_line(task, header, places, line, f"{path}:{number}"))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        raise DataError(bad_lines_message(f"{len(problems)} lines of {path} are no samples of {name}", problems))
    if not samples:
        raise DataError(f"{path} holds no sample of {name}")
    return samples


def read_utf8_text(path: str | Path) -> str:
    """Return the text of a UTF-8 file, without a byte order mark. `DataError` if it cannot be read."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from None


def bad_lines_message(summary: str, problems: Sequence[str]) -> str:
    """Return a message with a summary and the first of the problems, a line each."""
    rest = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return "\n  ".join([summary, *problems[:_SHOWN], *rest])


def _read_column_names(task: GlueTask, lines: Sequence[str]) -> tuple[list[str], int]:
    """The names of the columns, and the number of the first line after them."""
    first = lines[0].rstrip("\r").split("\t") if lines else []
    if task.header is not None and len(first) == len(task.header) and not set(task.header) & set(first):
        return list(task.header), 1
    return first, 2


def _column_positions(name: str, task: GlueTask, header: Sequence[str], path: str | Path) -> dict[str, int]:
    """Return the position of each needed column: text0, text1, and label and uid if the file has them.

    name, path: for messages. `DataError` if a text's column is missing.
    """
    missing = [word for word in task.texts if word not in header]
    if missing:
        raise DataError(
            f"{path}:1: {name} needs the columns {', '.join(missing)}, and the header has: {', '.join(header)}"
        )
    named = [
        *((f"text{number}", word) for number, word in enumerate(task.texts)),
        ("label", task.label),
        ("uid", task.uid),
    ]
    return {key: header.index(word) for key, word in named if word in header}


def _parse_glue_line(
    task: GlueTask, header: Sequence[str], places: Mapping[str, int], line: str, place: str
) -> GlueSample:
    """Parse a line of the table. `ValueError` if it does not fit. place: file and line."""
    cells = line.rstrip("\r").split("\t")
    if len(cells) != len(header):
        raise ValueError(f"{len(cells)} columns, expected {len(header)} as in the header")
    texts = [cells[places[f"text{number}"]].strip() for number in range(len(task.texts))]
    for text, column in zip(texts, task.texts):
        if not text:
            raise ValueError(f"the column {column} is empty")
    label = task.read_label(cells[places["label"]].strip()) if "label" in places else None
    uid = cells[places["uid"]] if "uid" in places else place.rpartition(":")[2]
    return GlueSample(uid, texts[0], texts[1] if len(texts) > 1 else None, label, place)


def glue_metrics(task: GlueTask, pairs: Pairs) -> dict[str, float]:
    """Return the task's metrics of (predicted, true) pairs, by name."""
    return {metric.__name__: metric(pairs) for metric in task.metrics}
