"""Numbers as people say them."""

from __future__ import annotations

GIB = 2**30


def bytes_text(size: float) -> str:
    """Format bytes with a binary unit: "1.50 GiB"."""
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """Format seconds as s, ms or us."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}" if seconds < 1000 * unit else f"{seconds / unit:,.0f} {name}"
    return f"{seconds * 1e6:.3g} us"


def count_text(count: float) -> str:
    """Format a large number with three digits and a unit: "1.5 B"."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.3g}"
