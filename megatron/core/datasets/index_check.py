"""What is wrong between the arrays of an index, and between a pair and its sidecar.

Every pair is checked so when it is opened: one pass over the index, 0.9 s for 100 million sequences. Lengths and offsets
tell each other; what the document array alone says (where documents of several sequences end) only a checksum can confirm.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron.core.datasets.sidecar import CHECKSUM, DatasetSidecar, sidecar_path

AT_ONCE = 2**16  # what is computed on the way stays in the processor's cache


class WrongEntryCounter:
    """How many entries are wrong, and which is the first."""

    def __init__(self) -> None:
        self.count, self.first = 0, 0

    def add_mask(self, wrong: np.ndarray, at: int) -> None:
        """Count the entries that are wrong, and keep the number of the first.

        wrong: bool [n], one for each entry from number `at` on.
        """
        result = int(np.count_nonzero(wrong))
        if result and not self.count:
            self.first = at + int(wrong.argmax())
        self.count += result


def index_problems(
    path: str, lengths: np.ndarray, offsets: np.ndarray, documents: np.ndarray, *, itemsize: int
) -> list[str]:
    """Return a sentence for each inconsistency between the arrays of an index (`IndexedDataset` describes them).

    path: the name of the index in the sentences. lengths, offsets: [sequences]; documents: [documents + 1]. itemsize:
    bytes of an id. The caller checks the ends of the arrays.
    """
    problems: list[str] = []
    misplaced, falling, end = WrongEntryCounter(), WrongEntryCounter(), 0
    for first in range(0, len(lengths), AT_ONCE):
        ends = end + np.cumsum(lengths[first : first + AT_ONCE], dtype=np.int64) * itemsize
        starts = offsets[first : first + AT_ONCE]
        misplaced.add_mask(np.append(starts[:1] != end, starts[1:] != ends[:-1]), first)
        end = int(ends[-1])
    if misplaced.count:
        problems.append(
            f"{path}: {misplaced.count} sequences do not begin where the lengths before them end, first "
            f"sequence {misplaced.first}"
        )
    for first in range(0, len(documents) - 1, AT_ONCE):
        starts = documents[first : first + AT_ONCE + 1]
        falling.add_mask(starts[1:] < starts[:-1], first)
    if falling.count:
        problems.append(f"{path}: {falling.count} documents end before they begin, first document {falling.first}")
    return problems


def sidecar_mismatches(
    prefix: str, facts: DatasetSidecar, measured: Mapping[str, object], checksums: Mapping[str, str]
) -> list[str]:
    """Return a sentence for each fact of a sidecar that the pair contradicts; empty if they agree.

    measured: documents, sequences, tokens and dtype of the pair. checksums: hex xxh3_128 of its files, by "bin" and
    "idx".
    """
    path = sidecar_path(prefix)
    problems = [
        f"{path} says {name} {getattr(facts, name)}, but the pair has {value}"
        for name, value in measured.items()
        if getattr(facts, name) != value
    ]
    for ending, value in checksums.items():
        recorded = facts.checksums.get(ending)
        if recorded is not None and recorded.startswith(f"{CHECKSUM}:") and recorded != f"{CHECKSUM}:{value}":
            problems.append(f"{prefix}.{ending} has the checksum {CHECKSUM}:{value}, but was written with {recorded}")
    return problems
