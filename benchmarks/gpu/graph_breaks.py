"""Whether torch's compiler traces every Triton kernel of layers, and attention by varlen, into one graph, forward and backward; no GPU is needed.

    python benchmarks/gpu/graph_breaks.py

A line an op; it exits with 1 if any breaks. Nothing is run: the compiler stops where it would call the kernels.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.utils._triton

from megatron.core.kernels.choice.table import CANDIDATES
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.kernels.ops.packed_document_starts import PackedDocumentStarts

OTHERS = {"attention": "varlen"}  # kernels that are not Triton's


class Traced(Exception):
    """A graph is there; it is not run."""


def inputs() -> dict[str, tuple[Any, ...]]:
    """What each op is called with."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)

    x, weight, bias = random(4, 2, 64), random(64), random(64)
    cos, sin = torch.randn(4, 1, 1, 64), torch.randn(4, 1, 1, 64)
    places, back = torch.arange(8).view(8, 1), torch.arange(8).view(8, 1)
    documents = torch.zeros(2, 4, dtype=torch.long)
    packed = AttentionMaskSpec(
        documents=documents, starts=PackedDocumentStarts(torch.tensor([0, 4, 8], dtype=torch.int32), 4, 8)
    )
    return {
        "rms_norm": (x, weight, 1e-5),
        "layer_norm": (x, weight, bias, 1e-5),
        "residual_norm": (x, random(4, 2, 64), weight, bias, 1e-5),
        "gated_activation": (x, "silu"),
        "bias_activation": (x, bias, "gelu"),
        "rotary": (random(4, 2, 3, 64), cos, sin, False),
        "rotary_qkv": (random(4, 2, 5, 64), (3, 1, 1), cos, sin, False),
        "split_qkv": (random(4, 2, 5, 64), (3, 1, 1), random(5 * 64)),
        "permute": (random(8, 64), places, back, False, False),
        "causal_conv": (random(4, 2, 64), random(64, 4), random(64), torch.zeros(2, 4, dtype=torch.long)),
        "attention": (random(4, 2, 4, 64), random(4, 2, 2, 64), random(4, 2, 2, 64), packed),
    }


def problem(call: Callable[..., Any], given: tuple[Any, ...]) -> str:
    """Why the call is no graph, in a line; "" if it is one."""
    torch._dynamo.reset()

    def stop(graph: Any, example: Any) -> Any:
        raise Traced

    try:
        torch.compile(lambda: call(*given), fullgraph=True, backend=stop)()
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if "Traced" in f"{type(cause).__name__} {error}":
            return ""
        return str(error).splitlines()[0]
    return "it ran without a graph"


def main() -> None:
    """A line an op."""
    # The compiler asks whether there is a GPU before it knows Triton's kernels.
    setattr(torch.utils._triton, "has_triton", lambda: True)  # noqa: B010 - a function that is replaced
    failed = False
    for op, given in inputs().items():
        call = next(one.loaded_kernel for one in CANDIDATES if (one.op, one.name) == (op, OTHERS.get(op, "triton")))
        assert call is not None, "there is a kernel for it"
        why = problem(call, given)
        failed = failed or bool(why)
        print(f"{op:18} {why or 'one graph'}", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
