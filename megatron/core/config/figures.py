"""Names of the figures that a run reports, and the words by which a user means them."""

from __future__ import annotations

from collections.abc import Sequence


def find_metric(word: str, names: Sequence[str]) -> str | None:
    """The figure of that name, with spaces or hyphens, or the first whose name ends in the word; None where there is none."""
    word = word.replace("-", " ")
    return word if word in names else next((name for name in names if name.endswith(f" {word}")), None)
