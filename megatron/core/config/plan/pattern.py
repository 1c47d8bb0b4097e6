"""The symbols of --hybrid-layer-pattern: what each means, what is wrong with a pattern, and which are close to it.

M*-E|M-/M has layers of Mamba-2, attention, an MLP and experts, two more in the next pipeline stage, and a depth of
multi-token prediction of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from megatron.core.config.mixers.table import MIXERS
from megatron.core.config.settings.hybrid import HybridConfig

MLPS: Mapping[str, str] = {"-": "dense", "E": "moe"}  # symbol -> kind of MLP


def layer_symbols() -> tuple[str, ...]:
    """Return every symbol that means a layer."""
    return (*(mixer.symbol for mixer in MIXERS.values()), *MLPS)


def mixer_and_mlp_of_symbol(symbol: str) -> tuple[str, str]:
    """Return the mixer and the MLP of a layer, one of which is none; both for what means no layer, which a rule refuses."""
    mixer = next((mixer.name for mixer in MIXERS.values() if mixer.symbol == symbol), "none")
    return mixer, MLPS.get(symbol, "none")


def pattern_problems(hybrid: HybridConfig) -> Iterator[str]:
    """Yield what is wrong with --hybrid-layer-pattern."""
    known = layer_symbols()
    mtp = "".join(hybrid.mtp_patterns)
    unknown = sorted(set(hybrid.layer_symbols + mtp) - set(known) - {"|"})
    if hybrid.hybrid_layer_pattern is not None and not hybrid.layer_symbols:
        yield f"--hybrid-layer-pattern {hybrid.hybrid_layer_pattern!r} has no layers; give symbols of {' '.join(known)}"
    if len(set(hybrid.mtp_patterns)) > 1 or "" in hybrid.mtp_patterns:
        yield "--hybrid-layer-pattern: each / begins the layers of one depth of multi-token prediction, which are the same for all; repeat them"
    if "|" in mtp:
        yield "--hybrid-layer-pattern: layers of multi-token prediction are in the last pipeline stage; write no | behind /"
    if "D" in unknown:
        yield "--hybrid-layer-pattern: D is sparse attention, which is not built; choose * or +"
    elif unknown:
        yield (
            f"--hybrid-layer-pattern: {', '.join(map(repr, unknown))} means no layer; write layers as {' '.join(known)}, | where the next pipeline "
            "stage begins, and / where multi-token prediction begins"
        )
    if {"*", "+"} <= set(hybrid.layer_symbols + "".join(hybrid.mtp_patterns)):
        yield "--hybrid-layer-pattern: * and + are two kinds of attention; keep one"


def suggested_hybrid_patterns(pattern: str, stages: int) -> tuple[str, ...]:
    """Return valid hybrid patterns close to a refused one: without unknown symbols and with equal MTP depths; the same
    without |; and split by | into `stages` stages of about equal length. () if no layer is left.
    """
    known = "".join(one for one in pattern.upper().replace("D", "*") if one in {*layer_symbols(), "|", "/"})
    main, *depths = known.split("/")
    layers, depth = main.replace("|", ""), next(filter(None, depths), "").replace("|", "")
    ends = [round(len(layers) * stage / stages) for stage in range(stages + 1)]
    cut = "|".join(layers[start:end] for start, end in pairwise(ends))
    return tuple(one + f"/{depth}" * bool(depth) * len(depths) for one in (main, layers, cut) if layers)
