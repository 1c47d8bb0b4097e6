"""Made-up premises and hypotheses in MNLI's table, whose label one word of the hypothesis gives away."""

from __future__ import annotations

from pathlib import Path

import numpy as np

HEADER = "index\tpromptID\tpairID\tgenre\tp1\tp2\tp3\tp4\tsentence1\tsentence2\tlabel1\tgold_label"
SIGNS = {"contradiction": "never", "entailment": "always", "neutral": "perhaps"}
_WORDS = "the state of union people war peace whale ship sea men country government great nation year time".split()


def write_mnli(path: Path, count: int, seed: int, *, labels: bool = True) -> Path:
    """A table of `count` rows."""
    random = np.random.default_rng(seed)
    lines = [HEADER if labels else HEADER.rsplit("\t", 2)[0]]
    for number in range(count):
        label = list(SIGNS)[int(random.integers(3))]
        premise, hypothesis = (list(random.choice(_WORDS, int(random.integers(4, 9)))) for _ in range(2))
        hypothesis[int(random.integers(len(hypothesis)))] = SIGNS[label]
        row = [str(number), "a", "b", "c", "d", "e", "f", "g", " ".join(premise), " ".join(hypothesis)]
        lines.append("\t".join([*row, "-", label] if labels else row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
