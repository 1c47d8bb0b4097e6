#!/usr/bin/env python3
"""What windows, sinks and dropout cost in the fused kernel, forward and backward: `benchmarks/attention.py [--length N] [--window N]`.

Each row is a way to compute it, in milliseconds and as a multiple of plain causal attention in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.kernels.ops import fused, reference  # noqa: E402
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers  # noqa: E402


def milliseconds(call: Callable[..., Tensor], inputs: list[Tensor], repeats: int) -> float:
    """The median time of a forward and a backward pass, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        output = call(*inputs)
        torch.autograd.grad(output.sum(), inputs, allow_unused=True)
        if output.device.type == "cuda":
            float(output.sum())
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times[1:])


def by_torch(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, dropout: float, _: AttentionScoreModifiers
) -> Tensor:
    """Causal attention as torch has it for this device: on a CPU with dropout it keeps all scores."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return (
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=mask.causal, enable_gqa=True)
        .permute(2, 0, 1, 3)
        .flatten(2)
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--window", type=int, default=127)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = ((args.length, 1, 8, 64), (args.length, 1, 2, 64), (args.length, 1, 2, 64), (8,))
    inputs = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    plain, window = AttentionMaskSpec(), AttentionMaskSpec(window=(args.window, 0))

    def run(
        attention: Callable[..., Tensor], mask: AttentionMaskSpec, sink: bool, dropout: float = 0.0
    ) -> Callable[..., Tensor]:
        return lambda q, k, v, z: attention(q, k, v, mask, dropout, AttentionScoreModifiers(sink=z if sink else None))

    rows = {
        "causal, fused": run(fused.attention_by_sdpa, plain, False),
        "causal, formula": run(reference.softmax_attention, plain, False),
        "sinks, fused": run(fused.attention_by_sdpa, plain, True),
        "sinks, formula": run(reference.softmax_attention, plain, True),
        "window, in blocks": run(fused.attention_by_sdpa, window, False),
        "window and sinks, in blocks": run(fused.attention_by_sdpa, window, True),
        "window, formula": run(reference.softmax_attention, window, False),
        "dropout, fused": run(fused.attention_by_sdpa, plain, False, 0.1),
        "dropout, formula": run(reference.softmax_attention, plain, False, 0.1),
        "dropout, torch's alone": run(by_torch, plain, False, 0.1),
    }
    times = {name: milliseconds(call, inputs, args.repeats) for name, call in rows.items()}
    with patch.object(fused, "_band_of_short_window", lambda *_: None):
        times["window, as a mask"] = milliseconds(rows["window, in blocks"], inputs, args.repeats)
    base = times["causal, fused"]
    print(f"{args.length} tokens, 8 heads of 64, 2 groups, window {args.window}, {dtype} on {device}")
    for name, value in times.items():
        print(f"  {name:28s} {value:9.1f} ms  {value / base:6.2f}")


if __name__ == "__main__":
    main()
