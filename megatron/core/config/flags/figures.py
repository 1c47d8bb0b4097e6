"""Names of the figures that a run reports, and the words by which a user means them."""

from __future__ import annotations

from collections.abc import Sequence


def match_metric_name(word: str, names: Sequence[str]) -> str | None:
    """Return the metric of this name (hyphens are spaces), else the first whose name ends in this word, else None."""
    word = word.replace("-", " ")
    return word if word in names else next((name for name in names if name.endswith(f" {word}")), None)
