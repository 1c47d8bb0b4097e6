"""Compile every Triton kernel of ours to machine code for a GPU that need not be here.

python -m tests.helpers.triton_machine_code 90     for compute capability 9.0
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron.core.kernels.triton import conv as triton_conv
from megatron.core.kernels.triton import loss as triton_loss
from megatron.core.kernels.triton import norm as triton_norm
from megatron.core.kernels.triton import paged as triton_paged
from megatron.core.kernels.triton import permute as triton_permute
from megatron.core.kernels.triton import pointwise as triton_pointwise
from megatron.core.kernels.triton import scans as triton_scans

STATES, NUMBERS, PLACES, SIZE = "*bf16", "*fp32", "*i64", "i32"
GATE = {"NAME": "gelu_tanh", "CLAMP": 7.0, "OFFSET": 1.0, "BLOCK": 1024}
PAGED = {
    **dict.fromkeys(("q", "k", "v"), STATES),
    **dict.fromkeys(("tables", "lengths"), "*i32"),
    **dict.fromkeys(("parts", "sums"), NUMBERS),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
    **dict.fromkeys(("window", "queries", "width", "q_step", "k_step", "v_step"), SIZE),
}


def paged(size: int, values: int, repeats: int, queries: int = 1, **how: Any) -> dict[str, Any]:
    """What is known of attention over a paged cache when it is compiled."""
    plan = triton_paged.plan(size, values, repeats, queries, shared=size != values)
    return {**plan, "PAGE": 16, "CAPPED": False, "WINDOWED": False, "PRECISION": "tf32", "WIDENED": False, **how}


SIZES = dict.fromkeys(("length", "batch", "heads", "channels", "per_group"), SIZE)
CONV = {
    **dict.fromkeys(("x", "weight", "bias", "dy", "y", "dx"), STATES),
    "segments": PLACES,
    **dict.fromkeys(("sums", "dp"), NUMBERS),
}
SCAN = {
    **dict.fromkeys(("x", "b", "c", "q", "k", "v", "y"), STATES),
    **dict.fromkeys(("dt", "a", "g", "beta", "inverse", "first", "states"), NUMBERS),
    "segments": PLACES,
    **SIZES,
}
WALK = {"CHUNK": 64, "SPAN": 4, "COLUMNS": 32, "WIDE": 128, "SIZE": 64}


def _of(
    kernel: Any, types: Mapping[str, str], known: Mapping[str, Any]
) -> tuple[Any, Mapping[str, str], Mapping[str, Any]]:
    return kernel, {name: types[name] for name in kernel.arg_names if name not in known}, known


# Kernel, types of what it is given at work, and what is known when it is compiled.
KERNELS: tuple[tuple[Any, Mapping[str, str], Mapping[str, Any]], ...] = (
    (
        triton_norm._forward,
        {"x": STATES, "y": STATES, "weight": STATES, "bias": STATES, "stats": NUMBERS, "epsilon": "fp32"},
        {"update": None, "SIZE": 4096},
    ),
    (
        triton_norm._forward,
        {"x": STATES, "y": STATES, "stats": NUMBERS, "epsilon": "fp32"},
        {"update": None, "weight": None, "bias": None, "SIZE": 200},
    ),
    (
        triton_norm._forward,
        {"x": STATES, "update": STATES, "y": STATES, "weight": STATES, "stats": NUMBERS, "epsilon": "fp32"},
        {"bias": None, "SIZE": 4096},
    ),
    (
        triton_norm._backward,
        {"dy": STATES, "x": STATES, "weight": STATES, "stats": NUMBERS, "dx": STATES},
        {"more": None, "CENTRED": True, "SIZE": 4096},
    ),
    (
        triton_norm._backward,
        {"dy": STATES, "more": STATES, "x": STATES, "weight": STATES, "stats": NUMBERS, "dx": STATES},
        {"CENTRED": False, "SIZE": 4096},
    ),
    (
        triton_permute._gather,
        {"values": STATES, "places": PLACES, "y": STATES, "rows": SIZE, "size": SIZE},
        {"COUNT": 8, "BLOCK": 1024},
    ),
    (
        triton_norm._sums,
        {"dy": STATES, "x": STATES, "stats": NUMBERS, "sums": NUMBERS, "rows": SIZE, "size": SIZE},
        {"ROWS": 64, "COLUMNS": 128},
    ),
    (triton_pointwise._gate, {"x": STATES, "y": STATES, "size": SIZE}, GATE),
    (triton_pointwise._gate_backward, {"dy": STATES, "x": STATES, "dx": STATES, "size": SIZE}, GATE),
    (
        triton_pointwise._gate_backward,
        {"dy": STATES, "x": STATES, "dx": STATES, "size": SIZE},
        {**GATE, "NAME": "gelu", "CLAMP": float("inf")},
    ),
    (
        triton_pointwise._turn,
        {"x": STATES, "y": STATES, "cos": NUMBERS, "sin": NUMBERS, "times": SIZE},
        {"SIZE": 96, "INTERLEAVED": True, "BLOCK": 128},
    ),
    (
        triton_loss._statistics,
        {"logits": STATES, "rows": PLACES, "result": NUMBERS, "valid": SIZE, "size": SIZE},
        {"BLOCK": 4096},
    ),
    (
        triton_loss._gradient,
        {
            "logits": STATES,
            "rows": PLACES,
            "largest": NUMBERS,
            "factor": NUMBERS,
            "hit": NUMBERS,
            "valid": SIZE,
            "size": SIZE,
        },
        {"BLOCK": 4096},
    ),
    (triton_paged._part, PAGED, paged(128, 128, 4)),  # Llama 8B decodes
    (triton_paged._part, PAGED, paged(128, 128, 4, 512)),  # and reads a prompt
    (triton_paged._part, PAGED, paged(64, 64, 8, WINDOWED=True)),
    (triton_paged._part, PAGED, paged(96, 96, 1)),
    (triton_paged._part, PAGED, paged(256, 256, 2, CAPPED=True, WINDOWED=True)),
    (triton_paged._part, PAGED, paged(576, 512, 128)),  # latent attention
    (
        triton_paged._part,
        {name: NUMBERS if kind == STATES else kind for name, kind in PAGED.items()},
        paged(128, 128, 4, PRECISION="ieee"),
    ),
    _of(triton_scans._selective, SCAN, {**WALK, "STATE": 128, "PRECISION": "tf32"}),  # Nemotron-H 8B
    _of(triton_scans._inverse, SCAN, {"CHUNK": 64, "WIDE": 128, "KEY": 128, "PRECISION": "ieee"}),
    _of(triton_scans._delta, SCAN, {**WALK, "SIZE": 128, "KEY": 128, "PRECISION": "tf32"}),  # Qwen3-Next
    _of(
        triton_conv._sum_of_taps,
        CONV | SIZES | {"y": NUMBERS},
        {"bias": None, "segments": None, "WIDTH": 4, "TOKENS": 32, "CHANNELS": 64},
    ),
    _of(triton_conv._input_gradient, CONV | SIZES, {"WIDTH": 4, "TOKENS": 32, "CHANNELS": 64}),
    *(
        (
            triton_paged._join,
            {"parts": NUMBERS, "sums": NUMBERS, "sink": STATES, "y": STATES, "queries": SIZE, "splits": SIZE},
            {"REPEATS": 4, "VALUES": size, "WIDE": size, "M": 16, "SPLITS": 8},
        )
        for size in (128, 512)
    ),
)


def main() -> None:
    """A line a kernel: its name and the size of its machine code."""
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for kernel, types, known in KERNELS:
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        compiled = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=dict(known)), target=target)
        print(kernel.__name__, len(compiled.asm["cubin"]), "bytes")


if __name__ == "__main__":
    main()
