"""Layers with a state over a sequence whose positions are divided: states are gathered, and not positions (as in LASP-2, arXiv 2502.07563).

Each rank scans its two chunks of the zigzag order from an empty state. What a chunk makes of the state before it is linear, so that its end is

    state after = across * state before + made      Mamba-2: across is a number a head; delta rule: a matrix [dk, dk]

All ranks gather `made` and `across` of all chunks, compute the states before their own, and add what outputs read of these. The convolution
gets the last inputs of the chunk before. Documents are those of the whole sequence: one may begin on another rank than it ends.

This is the way of --state-comm-type states, and where context ranks do not divide the heads. It sends what does not depend on the length; the delta rule scans wider values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.context_parallel.zigzag import Zigzag
from megatron.core.kernels.choice.table import Kernels
from megatron.core.kernels.ops.reference import accumulation_dtype_of
from megatron.core.kernels.state_space import scans
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis


@dataclass(frozen=True, slots=True)
class SequenceShardedKernels:
    """Convolution and scans over a sequence divided in zigzag order over an axis; each rank has two chunks."""

    axis: Axis
    cut: Zigzag

    def wrap_kernels(self, kernels: Kernels) -> Kernels:
        """Return kernels for a rank's shard [s/cp, b, ...]; their `segments` are the whole sequence's, [b, s]."""
        return replace(
            kernels,
            causal_conv=self._wrap_causal_conv(kernels.causal_conv),
            selective_scan=self._wrap_selective_scan(kernels.selective_scan),
            delta_rule_scan=self._wrap_delta_rule_scan(kernels.delta_rule_scan),
        )

    def _wrap_causal_conv(self, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the causal convolution of this rank's shard: each chunk gets the inputs before it from other ranks."""

        def conv(
            x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None = None, before: Tensor | None = None
        ) -> Tensor:
            assert before is None, "a divided sequence begins with its first token"
            halos = self._halo_inputs(x, weight.shape[1] - 1, segments)
            chunks = zip(self.cut.split(x, self.axis.rank), self._chunk_segments(segments), halos, strict=True)
            return torch.cat([kernel(chunk, weight, bias, own, halo) for chunk, own, halo in chunks])

        return conv

    def _wrap_selective_scan(
        self, kernel: Callable[..., tuple[Tensor, Tensor]]
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the selective scan of this rank's shard: chunks are scanned from an empty state, then what the true
        state before them adds to the outputs is added. The state that it returns is of the last chunk alone, from an
        empty one.
        """

        def scan(
            x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, segments: Tensor | None, state: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            assert state is None, "a divided sequence begins with its first token"
            own = self._chunk_segments(segments)
            chunks = list(zip(*(self.cut.split(each, self.axis.rank) for each in (x, dt, b, c)), own, strict=True))
            scanned = [kernel(x, dt, a, b, c, segments=each) for x, dt, b, c, each in chunks]
            across = [scans.total_decay(dt * a, each)[..., None, None] for _, dt, _, _, each in chunks]
            states = self._states_before_chunks([made for _, made in scanned], across, segments, torch.mul)
            outputs = [
                y + scans.initial_state_output(c, dt * a, before, each).to(y.dtype)
                for (y, _), before, (_, dt, _, c, each) in zip(scanned, states, chunks, strict=True)
            ]
            return torch.cat(outputs), scanned[-1][1]

        return scan

    def _wrap_delta_rule_scan(
        self, kernel: Callable[..., tuple[Tensor, Tensor]]
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the delta-rule scan of this rank's shard, in the same way, also of the state that it returns."""

        def scan(
            q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, segments: Tensor | None, state: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            assert state is None, "a divided sequence begins with its first token"
            size = v.shape[3]
            wider = torch.cat((v, v.new_zeros((*v.shape[:3], k.shape[3]))), dim=3).to(accumulation_dtype_of(v.dtype))
            # Columns of the state do not see each other: of those that begin as the unit matrix, the end is `across`, and the outputs are what
            # each token reads of the state before.
            unit = torch.eye(k.shape[3], dtype=wider.dtype, device=v.device).expand(*v.shape[1:3], -1, -1)
            begin = torch.cat((unit.new_zeros((*unit.shape[:3], size)), unit), dim=3)
            chunks = list(zip(*(self.cut.split(each, self.axis.rank) for each in (q, k, wider, g, beta)), strict=True))
            scanned = [
                kernel(*chunk, segments=own, state=begin)
                for chunk, own in zip(chunks, self._chunk_segments(segments), strict=True)
            ]
            ends = [end.split((size, k.shape[3]), dim=3) for _, end in scanned]
            states = self._states_before_chunks(
                [made for made, _ in ends], [across for _, across in ends], segments, torch.matmul
            )
            outputs = [
                o[..., :size] + torch.einsum("sbnk,bnkv->sbnv", o[..., size:], before)
                for (o, _), before in zip(scanned, states, strict=True)
            ]
            return torch.cat(outputs).to(v.dtype), ends[-1][0]

        return scan

    def _chunk_segments(self, segments: Tensor | None) -> list[Tensor | None]:
        """The segments [b, chunk] of this rank's two chunks."""
        chunks = self.cut.chunk_ranges(self.axis.rank)
        return [None if segments is None else segments[:, chunk.start : chunk.stop] for chunk in chunks]

    def _gather_chunk_tensors(self, pair: list[Tensor]) -> list[tuple[range, Tensor]]:
        """Gather a tensor for each chunk of all ranks; return (positions of the chunk, tensor) in order of position.

        pair: one for each of this rank's chunks, of equal shape.
        """
        held = [chunk for rank in range(self.axis.size) for chunk in self.cut.chunk_ranges(rank)]
        gathered = collectives.gather_with_scatter_backward(torch.stack(pair), self.axis)
        return sorted(zip(held, gathered, strict=True), key=lambda one: one[0].start)

    def _halo_inputs(self, x: Tensor, width: int, segments: Tensor | None) -> list[Tensor]:
        """Return the `width` inputs before each local chunk, [width, b, c]; zeros at the start, for other documents."""
        tails = [
            torch.cat((x.new_zeros((width, *x.shape[1:])), chunk))[-width:]
            for chunk in self.cut.split(x, self.axis.rank)
        ]
        gathered, result = self._gather_chunk_tensors(tails), []
        for own in self.cut.chunk_ranges(self.axis.rank):
            known = [tail[-min(width, len(chunk)) :] for chunk, tail in gathered if chunk.start < own.start]
            halo = torch.cat((x.new_zeros((width, *x.shape[1:])), *known))[-width:]
            if segments is not None and own.start:
                places = torch.arange(own.start - width, own.start, device=x.device).clamp(min=0)
                same = segments[:, places] == segments[:, own.start, None]
                halo = halo * same.t()[..., None].to(halo.dtype)
            result.append(halo)
        return result

    def _states_before_chunks(
        self,
        made: list[Tensor],
        across: list[Tensor],
        segments: Tensor | None,
        apply: Callable[[Tensor, Tensor], Tensor],
    ) -> list[Tensor]:
        """Return the state [b, n, ...] before each of this rank's chunks.

        made: the state at each chunk's end from an empty one. across: what a state before the chunk is multiplied by,
        by `apply`.
        """
        own, now, before = self.cut.chunk_ranges(self.axis.rank), torch.zeros_like(made[0]), dict[int, Tensor]()
        for (chunk, add), (_, keep) in zip(
            self._gather_chunk_tensors(made), self._gather_chunk_tensors(across), strict=True
        ):
            if segments is not None and chunk.start:
                now = scans.zero_state_of_new_segments(now, segments[:, chunk.start :], segments[:, chunk.start - 1])
            before[chunk.start] = now
            now = apply(keep, now) + add
        return [before[chunk.start] for chunk in own]
