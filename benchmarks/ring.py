#!/usr/bin/env python3
"""Context parallelism: how much of the ring's transport hides behind its compute, and what every transport sends.

    python benchmarks/ring.py --ranks 4

Ranks are processes with gloo. Compute and transport are sleeps, so that the figure does not hang on how busy a machine is: a
step of the ring takes its share of the pairs to score (twice that in the backward pass), and a message counts as arrived only
some time after it was sent. Three times are compared in turn: without that delay, with every message waited for as soon as it
is sent, and as the ring does it. Best: what is longer of compute and transport in every step, and the last gradients' way home.

Bytes are counted where torch.distributed is called, one rank's share of one forward and one backward pass, and compared with
what the method must send: with n ranks, a piece of keys and values KV and one of all heads' queries or outputs Q,

    p2p         forward (n-1) KV, backward (n-1) KV and n gradients of KV in the format of wide sums
    a2a         forward and backward (n-1)/n (2 Q + KV), keys repeated to n heads where there are fewer
    allgather   forward and backward (n-1) KV
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.context_parallel import ring
from megatron.core.context_parallel.attention import context_parallel_attention
from megatron.core.kernels.ops.fused import attention_by_sdpa
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh
from tests.helpers.world import Worlds

HEADS, GROUPS, SIZE, ROUNDS, STEP = 8, 4, 64, 5, 0.08


class Late:
    """Works that are done only some seconds after they were started."""

    def __init__(self, works: list[Any], delay: float) -> None:
        self.works, self.ready = works, time.perf_counter() + delay

    def wait(self) -> None:
        """Wait for the works and for the time."""
        for work in self.works:
            work.wait()
        time.sleep(max(0.0, self.ready - time.perf_counter()))


def tensors(length: int, ranks: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v of one rank."""
    return [
        torch.randn(length // ranks, 1, heads, SIZE, dtype=dtype, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    ]


def mesh_here(inner: int = 1) -> Mesh:
    """All ranks of the pool share a sequence."""
    size = dist.get_world_size()
    return Mesh.build(
        ParallelConfig(context_parallel_size=size, hierarchical_context_parallel_sizes=(inner, size // inner)),
        torch.device("cpu"),
    )


def timed_here(length: int, step: float, delay: float) -> tuple[float, float, float]:
    """On every rank: seconds without delay, with every message waited for at once, and overlapped."""
    mesh = mesh_here()
    kernel, (q, k, v) = (
        context_parallel_attention(attention_by_sdpa, mesh, "p2p"),
        tensors(length, mesh.cp.size, torch.float32),
    )
    piece = length // mesh.cp.size

    def compute(q: Tensor, k: Tensor, causal: bool, factor: float) -> None:
        pairs = q.shape[2] * k.shape[2] / (2 if causal else 1)
        time.sleep(
            factor * step * pairs / (piece * piece / 2)
        )  # under causality, every step scores half of a piece's pairs

    def forward(q: Tensor, k: Tensor, v: Tensor, block: Any) -> tuple[Tensor, Tensor]:
        compute(q, k, block.causal, 1.0)
        return q.new_zeros((*q.shape[:3], v.shape[-1])), q.new_zeros(q.shape[:3])

    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, block: Any
    ) -> tuple[Tensor, ...]:
        compute(q, k, block.causal, 2.0)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def run(delay: float, at_once: bool) -> float:
        def start_shift(arriving: Tensor, tensor: Tensor, axis: Axis) -> list[Any]:
            late = Late(collectives.start_ring_shift(arriving, tensor, axis), delay)
            if at_once:
                late.wait()
                return []
            return [late]

        collectives.barrier(mesh.cp)
        began = time.perf_counter()
        with (
            patch.object(
                ring, "collectives", SimpleNamespace(**{**vars(collectives), "start_ring_shift": start_shift})
            ),
            patch.object(
                ring,
                "blockwise_attention",
                SimpleNamespace(
                    forward=forward, backward=backward, merge=ring.blockwise_attention.merge_attention_blocks
                ),
            ),
        ):
            kernel(q, k, v, AttentionMaskSpec(length=length)).sum().backward()
        collectives.barrier(mesh.cp)
        return time.perf_counter() - began

    run(0.0, False)
    samples = [[run(*settings) for settings in ((0.0, False), (delay, True), (delay, False))] for _ in range(ROUNDS)]
    return tuple(statistics.median(times) for times in zip(*samples, strict=True))


def bytes_here(length: int, kind: str, inner: int) -> tuple[int, int]:
    """On every rank: bytes that this rank sends to others in a forward and in a backward pass, in bf16."""
    mesh, sent = mesh_here(inner), [0]
    rank = dist.get_rank()
    kernel, (q, k, v) = (
        context_parallel_attention(attention_by_sdpa, mesh, kind),
        tensors(length, mesh.cp.size, torch.bfloat16),
    )
    shift, trade = dist.batch_isend_irecv, dist.all_to_all_single
    gather, scatter = collectives._gather_single, collectives._scatter_single

    def size(tensor: Tensor, share: float = 1.0) -> int:
        return int(tensor.numel() * tensor.element_size() * share)

    def counted(function: Any, amount: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            sent[0] += amount(*arguments, **keywords)
            return function(*arguments, **keywords)

        return call

    def traded(output: Tensor, tensor: Tensor, taken: list[int], given: list[int], group: Any = None, **_: Any) -> int:
        return size(tensor, 1 - given[dist.get_group_rank(group, rank)] / len(tensor))

    ranks = mesh.cp.size
    with (
        patch.object(
            dist,
            "batch_isend_irecv",
            counted(shift, lambda ops: sum(size(op.tensor) for op in ops if op.op is dist.isend)),
        ),
        patch.object(dist, "all_to_all_single", counted(trade, traded)),
        patch.object(collectives, "_gather_single", counted(gather, lambda output, piece, **_: size(piece, ranks - 1))),
        patch.object(
            collectives, "_scatter_single", counted(scatter, lambda output, whole, **_: size(whole, 1 - 1 / ranks))
        ),
    ):
        output = kernel(q, k, v, AttentionMaskSpec(length=length))
        forward = sent[0]
        output.sum().backward()
    return forward, sent[0] - forward


def theory(kind: str, ranks: int, inner: int, length: int) -> tuple[int, int]:
    """Bytes that one rank must send, forward and backward."""
    place = 2 * SIZE * length // ranks  # of one head, in bf16
    queries, keys = HEADS * place, 2 * GROUPS * place
    if kind == "allgather":
        return (ranks - 1) * keys, (ranks - 1) * keys
    outer = {"p2p": ranks, "a2a": 1}.get(kind, ranks // inner)
    inner = ranks // outer
    many = max(GROUPS, inner)  # both are powers of two here
    traded = (2 * queries + 2 * many * place) * (inner - 1) // inner
    round_trip = 2 * many * place  # of inner times as many places, of an inner-th of the heads
    going_home = 2 * round_trip * outer if outer > 1 else 0  # gradients are sums in fp32
    return traded + (outer - 1) * round_trip, traded + (outer - 1) * round_trip + going_home


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="delays of a message, in steps of the ring"
    )
    options = parser.parse_args()
    worlds = Worlds()
    try:
        print(
            f"ring of {options.ranks} ranks, a step of {1000 * STEP:g} ms forward and {2000 * STEP:g} ms backward, medians of {ROUNDS}"
        )
        for share in options.shares:
            delay, more = share * STEP, options.ranks - 1
            alone, at_once, overlapped = worlds(options.ranks).run(timed_here, options.length, STEP, delay)[0]
            best = alone + more * (max(0.0, delay - STEP) + max(0.0, delay - 2 * STEP)) + delay
            hidden, possible = ((at_once - time) / (at_once - alone) for time in (overlapped, best))
            print(
                f"  a message takes {1000 * delay:5.0f} ms: alone {1000 * alone:5.0f} ms, waited for at once {1000 * at_once:5.0f} ms, "
                f"overlapped {1000 * overlapped:5.0f} ms: {100 * hidden:3.0f}% of the transport is hidden, at best {100 * possible:.0f}%"
            )
        print(f"bytes that a rank sends, bf16, {options.ranks} ranks: measured (theory)")
        kinds = [("p2p", 1), ("a2a", 1), ("allgather", 1)] + [("a2a+p2p", 2)] * (options.ranks % 4 == 0)
        for kind, inner in kinds:
            measured, expected = (
                worlds(options.ranks).run(bytes_here, options.length, kind, inner)[0],
                theory(kind, options.ranks, inner, options.length),
            )
            print(
                f"  {kind:10} forward {measured[0]:>10,} ({expected[0]:>10,})   backward {measured[1]:>10,} ({expected[1]:>10,})"
            )
    finally:
        worlds.stop()


if __name__ == "__main__":
    main()
