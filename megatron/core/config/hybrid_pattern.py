"""The pattern that Megatron's old ratios of attention and MLPs stand for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise


def hybrid_pattern_from_ratios(layers: int, attention: float, mlp: float) -> str:
    """Return the layer pattern of a hybrid network, one symbol for each layer.

    round(layers * attention) layers of attention (*) are spread evenly, then round(layers * mlp) MLPs (-) evenly over
    the others; the rest is Mamba-2 (M).
    """
    symbols, attending, dense = ["M"] * layers, round(layers * attention), round(layers * mlp)
    if attending:
        step = (layers - attending) / (attending + 1)
        _place_symbol_evenly(symbols, "*", step, step)
    states = symbols.count("M")
    if dense and states:
        step = (states - dense) / dense
        _place_symbol_evenly(symbols, "-", step, step)
    return "".join(symbols)


def _place_symbol_evenly(symbols: list[str], symbol: str, first: float, step: float) -> None:
    """Replace some M by `symbol`, in place: the first after about `first` remaining M, each further one after about
    `step` more.
    """
    left = first
    for index in range(len(symbols)):
        if symbols[index] != "M":
            continue
        if left < 0.5:
            symbols[index] = symbol
            left += step
        else:
            left -= 1


def suggested_hybrid_patterns(pattern: str, symbols: Iterable[str], stages: int) -> tuple[str, ...]:
    """Return valid hybrid patterns close to a refused one: without unknown symbols and with equal MTP depths; the same
    without |; and split by | into `stages` stages of about equal length. () if no layer is left.
    """
    known = "".join(one for one in pattern.upper().replace("D", "*") if one in {*symbols, "|", "/"})
    main, *depths = known.split("/")
    layers, depth = main.replace("|", ""), next(filter(None, depths), "").replace("|", "")
    ends = [round(len(layers) * stage / stages) for stage in range(stages + 1)]
    cut = "|".join(layers[start:end] for start, end in pairwise(ends))
    return tuple(one + f"/{depth}" * bool(depth) * len(depths) for one in (main, layers, cut) if layers)
