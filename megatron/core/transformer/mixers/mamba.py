"""The mixer of Mamba-2 (Dao and Gu, 2024, arXiv 2405.21060).

    x -> in_proj -> z | x | B | C | dt        x, B, C -> causal convolution, SiLU -> scan over the state -> * SiLU(z) -> norm by group -> out_proj

z, x, B, C and dt are cut over the tensor ranks each by itself: a rank has whole groups with their heads, so that neither the scan nor the norm
talks. Over context ranks positions are traded for heads before the convolution and back after the scan.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.mixers.mamba import MambaSizes
from megatron.core.context_parallel.head_exchange import ALONE, HeadExchange
from megatron.core.kernels.ops.reference import accumulation_dtype_of
from megatron.core.kernels.state_space import scans
from megatron.core.parallel.spec import FusedWeightSegment, ParamSpec, ShardedDim, constant_initializer, meta_parameter
from megatron.core.transformer.context.cache import MixerState
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.mixers.state_space import (
    CausalConvParameters,
    document_segment_ids,
    log_of_uniform_initializer,
    num_group_repeats_for_cp,
    per_head_parameter,
)


class MambaMixer(nn.Module):
    """Mamba-2's selective state space as the mixer of a layer."""

    def __init__(self, build: LayerBuildContext, sizes: MambaSizes) -> None:
        super().__init__()
        model, tp = build.model, build.mesh.tp.size
        self.build, self.sizes = build, sizes
        self.heads, self.groups = sizes.heads // tp, sizes.groups // tp
        inner, shared = FusedWeightSegment(sizes.inner_size), FusedWeightSegment(sizes.groups * sizes.state)
        parts = (inner, inner, shared, shared, FusedWeightSegment(sizes.heads))
        self.in_proj = build.make_column_linear(model.hidden_size, parts, bias=False, kind="in_proj")
        self.conv1d = CausalConvParameters((inner, shared, shared), sizes.conv_width, build, bias=True)
        self.dt_bias = per_head_parameter(build, sizes.heads, _initial_dt_bias)
        self.A_log = per_head_parameter(build, sizes.heads, log_of_uniform_initializer(1.0, 16.0))
        self.D = per_head_parameter(build, sizes.heads, constant_initializer(1.0))
        self.norm = GatedNorm(build, sizes.inner_size, self.groups, place=model.hybrid.mamba_output_norm)
        self.out_proj = build.make_row_linear(sizes.inner_size, bias=False)

    def forward(self, normed: Tensor, context: ForwardContext, bias: Tensor | None = None) -> Tensor:
        """Run the mixer, with a cache on new tokens. normed: [s or s/tp, b, h]; returns like it."""
        projected = self.build.project(self.in_proj, normed)
        exchange = HeadExchange.from_mask(
            self.build.mesh,
            context.mask,
            len(projected),
            heads=self.heads,
            groups=self.groups,
            state_comm_type=self.build.state_comm_type,
        )
        z, *parts = self._split_projection(projected)
        if context.cache is not None:
            mixed = context.cache.run_from_states(self, parts, self._conv_and_scan_from)
        else:
            mixed, _ = self._conv_and_scan(parts, exchange, document_segment_ids(context.mask), None)
        return self.out_proj(self.norm(exchange.to_position_shards(mixed).flatten(2), z))

    def initial_state(self, batch: int) -> MixerState:
        """Return zero states for `batch` sequences of which no token has been processed."""
        sizes, weight = self.sizes, self.conv1d.weight
        # Not weight.new_zeros: the weights that FSDP2 divides make a DTensor of it.
        scan = torch.zeros(
            (batch, self.heads, sizes.head, sizes.state),
            dtype=accumulation_dtype_of(weight.dtype),
            device=weight.device,
        )
        conv = torch.zeros((sizes.conv_width - 1, batch, len(weight)), dtype=weight.dtype, device=weight.device)
        return MixerState(conv, scan)

    def _conv_and_scan_from(self, parts: list[Tensor], state: MixerState) -> tuple[Tensor, MixerState]:
        """Run convolution and scan on the next tokens' parts from a state. Returns as `_conv_and_scan`."""
        return self._conv_and_scan(parts, ALONE, None, state)

    def _split_projection(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Split [s, b, out/tp] into z [s, b, d/tp], x [s, b, n/tp, p], B, C [s, b, g/tp, N], dt [s, b, n/tp, 1]."""
        inner, shared = self.heads * self.sizes.head, self.groups * self.sizes.state
        z, x, b, c, dt = projected.split((inner, inner, shared, shared, self.heads), dim=-1)
        groups = (self.groups, self.sizes.state)
        return z, x.unflatten(2, (self.heads, -1)), b.unflatten(2, groups), c.unflatten(2, groups), dt[..., None]

    def _conv_and_scan(
        self, parts: list[Tensor], exchange: HeadExchange, segments: Tensor | None, state: MixerState | None
    ) -> tuple[Tensor, MixerState]:
        """Run convolution and selective scan.

        parts: x, B, C, dt as split. segments: of documents [b, s], or None. state: None for zeros. Returns [s, b,
        n/tp/cp, p] of all positions, and the state after the last.
        """
        copies, format_ = num_group_repeats_for_cp(self.groups, exchange), accumulation_dtype_of(self.build.dtype)
        x, b, c, dt = parts
        if copies > 1:
            b, c = b.repeat_interleave(copies, dim=2), c.repeat_interleave(copies, dim=2)
        x, b, c, dt = exchange.to_head_shards(x, b, c, dt)
        kernels = exchange.wrap_kernels(self.build.kernels)
        before, times = None if state is None else state.conv, (1, copies, copies)
        (x, b, c), joined = self.conv1d.convolve((x, b, c), times, exchange, kernels, segments, before)
        dt_bias, a_log, skip = (
            exchange.shard_parameter(each, self.heads) for each in (self.dt_bias, self.A_log, self.D)
        )
        low, high = self.sizes.step_limits
        steps = F.softplus(dt[..., 0].to(format_) + dt_bias.to(format_))
        if (low, high) != (0.0, math.inf):
            steps = steps.clamp(low, high)
        decay, scan = -a_log.to(format_).exp(), None if state is None else state.scan
        if scan is not None and len(x) == 1:
            y, scan = scans.selective_scan_step(x[0], steps[0], decay, b[0], c[0], scan)
            y = y[None]
        else:
            y, scan = kernels.selective_scan(x, steps, decay, b, c, segments=segments, state=scan)
        y = (y.to(format_) + skip.to(format_)[:, None] * x.to(format_)).to(y.dtype)
        return y, MixerState(scans.last_conv_inputs(joined, self.sizes.conv_width, before).detach(), scan)


class GatedNorm(nn.Module):
    """RMSNorm of y * SiLU(z) over each group of channels by itself. groups: of this rank.

    place: after_gate; before_gate, RMSNorm(y) * SiLU(z); or none, y * SiLU(z).
    """

    def __init__(self, build: LayerBuildContext, size: int, groups: int, *, place: str = "after_gate") -> None:
        super().__init__()
        self.place = place
        self.groups, self.epsilon = groups, build.model.hybrid.mamba_norm_epsilon
        spec = ParamSpec(
            (size,), constant_initializer(1.0), "vector", (ShardedDim(0, "tp", (FusedWeightSegment(size),)),)
        )
        self.weight = None if place == "none" else meta_parameter(spec, build.mesh, build.dtype)

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Norm and gate as `place` says. y, z: [s, b, d/tp]; returns the same shape."""
        format_ = accumulation_dtype_of(y.dtype)
        own, gate = y.to(format_), F.silu(z.to(format_))
        if self.place == "before_gate":
            return (self._rms_norm_groups(own) * gate).to(y.dtype)
        return self._rms_norm_groups(own * gate).to(y.dtype)

    def _rms_norm_groups(self, x: Tensor) -> Tensor:
        """RMSNorm of each group of channels; x itself without a weight. x, result: [s, b, d/tp] in fp32 or wider."""
        if self.weight is None:
            return x
        groups = x.unflatten(-1, (self.groups, -1))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.epsilon)
        return normed.flatten(-2) * self.weight.to(x.dtype)


def _initial_dt_bias(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw biases whose softplus is log-uniform between 0.001 and 0.1 (the time step dt of Mamba-2)."""
    logs = torch.empty(shape, device=generator.device).uniform_(math.log(1e-3), math.log(0.1), generator=generator)
    steps = logs.exp().clamp(min=1e-4)
    return steps + torch.log(-torch.expm1(-steps))
