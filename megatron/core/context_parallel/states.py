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

from megatron.core.context_parallel.sequence import Zigzag
from megatron.core.kernels import scans
from megatron.core.kernels.reference import accumulation_dtype
from megatron.core.kernels.table import Kernels
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis


@dataclass(frozen=True, slots=True)
class SequenceShards:
    """Positions in zigzag order over the ranks of an axis; each rank has two chunks of neighbouring positions, one behind the other."""

    axis: Axis
    cut: Zigzag

    def wrap_kernels(self, kernels: Kernels) -> Kernels:
        """The kernels for a rank's shard [s/cp, b, ...] of a sequence. Segments are those of the whole sequence, [b, s]."""
        return replace(
            kernels,
            causal_conv=self._conv(kernels.causal_conv),
            selective_scan=self._selective_scan(kernels.selective_scan),
            delta_rule_scan=self._delta_rule_scan(kernels.delta_rule_scan),
        )

    def _conv(self, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def conv(
            x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None = None, before: Tensor | None = None
        ) -> Tensor:
            assert before is None, "a divided sequence begins with its first token"
            halos = self._last_inputs(x, weight.shape[1] - 1, segments)
            chunks = zip(self._split(x), self._segments(segments), halos, strict=True)
            return torch.cat([kernel(chunk, weight, bias, own, halo) for chunk, own, halo in chunks])

        return conv

    def _selective_scan(self, kernel: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def scan(
            x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, segments: Tensor | None, state: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            assert state is None, "a divided sequence begins with its first token"
            own = self._segments(segments)
            chunks = list(zip(*(self._split(each) for each in (x, dt, b, c)), own, strict=True))
            scanned = [kernel(x, dt, a, b, c, segments=each) for x, dt, b, c, each in chunks]
            across = [scans.decay_across(dt * a, each)[..., None, None] for _, dt, _, _, each in chunks]
            states = self._states_before([made for _, made in scanned], across, segments, torch.mul)
            outputs = [
                y + scans.read_initial_state(c, dt * a, before, each).to(y.dtype)
                for (y, _), before, (_, dt, _, c, each) in zip(scanned, states, chunks, strict=True)
            ]
            return torch.cat(outputs), scanned[-1][1]

        return scan

    def _delta_rule_scan(self, kernel: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def scan(
            q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, segments: Tensor | None, state: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            assert state is None, "a divided sequence begins with its first token"
            size = v.shape[3]
            wider = torch.cat((v, v.new_zeros((*v.shape[:3], k.shape[3]))), dim=3).to(accumulation_dtype(v.dtype))
            # Columns of the state do not see each other: of those that begin as the unit matrix, the end is `across`, and the outputs are what
            # each token reads of the state before.
            unit = torch.eye(k.shape[3], dtype=wider.dtype, device=v.device).expand(*v.shape[1:3], -1, -1)
            begin = torch.cat((unit.new_zeros((*unit.shape[:3], size)), unit), dim=3)
            chunks = list(zip(*(self._split(each) for each in (q, k, wider, g, beta)), strict=True))
            scanned = [
                kernel(*chunk, segments=own, state=begin)
                for chunk, own in zip(chunks, self._segments(segments), strict=True)
            ]
            ends = [end.split((size, k.shape[3]), dim=3) for _, end in scanned]
            states = self._states_before(
                [made for made, _ in ends], [across for _, across in ends], segments, torch.matmul
            )
            outputs = [
                o[..., :size] + torch.einsum("sbnk,bnkv->sbnv", o[..., size:], before)
                for (o, _), before in zip(scanned, states, strict=True)
            ]
            return torch.cat(outputs).to(v.dtype), ends[-1][0]

        return scan

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        """[s/cp, ...] to this rank's two chunks."""
        return x.split([len(chunk) for chunk in self.cut.chunks(self.axis.rank)])

    def _segments(self, segments: Tensor | None) -> list[Tensor | None]:
        """The segments [b, chunk] of this rank's two chunks."""
        chunks = self.cut.chunks(self.axis.rank)
        return [None if segments is None else segments[:, chunk.start : chunk.stop] for chunk in chunks]

    def _gather(self, pair: list[Tensor]) -> list[tuple[range, Tensor]]:
        """One tensor of each of this rank's chunks to those of all chunks with their positions, in true order."""
        held = [chunk for rank in range(self.axis.size) for chunk in self.cut.chunks(rank)]
        gathered = collectives.gather_then_scatter(torch.stack(pair), self.axis)
        return sorted(zip(held, gathered, strict=True), key=lambda one: one[0].start)

    def _last_inputs(self, x: Tensor, width: int, segments: Tensor | None) -> list[Tensor]:
        """The `width` inputs before each of this rank's chunks, [width, b, c]; zeros for those of another document, or before the first."""
        tails = [torch.cat((x.new_zeros((width, *x.shape[1:])), chunk))[-width:] for chunk in self._split(x)]
        gathered, result = self._gather(tails), []
        for own in self.cut.chunks(self.axis.rank):
            known = [tail[-min(width, len(chunk)) :] for chunk, tail in gathered if chunk.start < own.start]
            halo = torch.cat((x.new_zeros((width, *x.shape[1:])), *known))[-width:]
            if segments is not None and own.start:
                places = torch.arange(own.start - width, own.start, device=x.device).clamp(min=0)
                same = segments[:, places] == segments[:, own.start, None]
                halo = halo * same.t()[..., None].to(halo.dtype)
            result.append(halo)
        return result

    def _states_before(
        self,
        made: list[Tensor],
        across: list[Tensor],
        segments: Tensor | None,
        apply: Callable[[Tensor, Tensor], Tensor],
    ) -> list[Tensor]:
        """The state [b, n, ...] before each of this rank's chunks, from what each makes of an empty one and what it leaves of one before."""
        own, now, before = self.cut.chunks(self.axis.rank), torch.zeros_like(made[0]), dict[int, Tensor]()
        for (chunk, add), (_, keep) in zip(self._gather(made), self._gather(across), strict=True):
            if segments is not None and chunk.start:
                now = scans.carry_state_within_segment(now, segments[:, chunk.start :], segments[:, chunk.start - 1])
            before[chunk.start] = now
            now = apply(keep, now) + add
        return [before[chunk.start] for chunk in own]
