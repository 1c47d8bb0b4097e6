"""The mixer of Mamba-2 (Dao and Gu, 2024, arXiv 2405.21060).

    x -> in_proj -> z | x | B | C | dt        x, B, C -> causal convolution, SiLU -> scan over the state -> * SiLU(z) -> norm by group -> out_proj

z, x, B, C and dt are cut over the tensor ranks each by itself: a rank has whole groups with their heads, so that neither the scan nor the norm
talks. Over context ranks positions are traded for heads before the convolution and back after the scan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.settings.model import ModelConfig
from megatron.core.context_parallel.heads import ALONE, HeadExchange
from megatron.core.kernels import scans
from megatron.core.kernels.reference import accumulation_dtype
from megatron.core.parallel.spec import FusedSegment, ParamSpec, Shard, constant_initializer, meta_parameter
from megatron.core.tensor_parallel.linear import ColumnLinear, RowLinear
from megatron.core.transformer.build import BuildContext, scaled
from megatron.core.transformer.passing import ForwardContext
from megatron.core.transformer.state_space import (
    CausalConv,
    MixerState,
    document_segments,
    group_repeats,
    head_vector,
    log_uniform,
)


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """Sizes of the mixer. heads, head: number of heads and size of one. groups, state: B and C are shared by heads of a group; size of the state.

    step_limits: smallest and largest time step (Nemotron-H as published: 0.001 and infinity).
    """

    heads: int
    head: int = 64
    groups: int = 8
    state: int = 128
    conv_width: int = 4
    step_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def inner_size(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head

    @staticmethod
    def from_model(model: ModelConfig) -> MambaSizes:
        """The sizes that a network's settings give."""
        hybrid = model.hybrid
        low, high = hybrid.mamba_time_step_limit or (0.0, math.inf)
        return MambaSizes(
            hybrid.mamba_num_heads or 0,
            hybrid.mamba_head_dim,
            hybrid.mamba_num_groups,
            hybrid.mamba_state_dim,
            step_limits=(low, high),
        )


class MambaMixer(nn.Module):
    """Mamba-2's selective state space as the mixer of a layer."""

    def __init__(self, build: BuildContext, sizes: MambaSizes) -> None:
        super().__init__()
        model, tp = build.model, build.mesh.tp.size
        self.build, self.sizes = build, sizes
        self.heads, self.groups = sizes.heads // tp, sizes.groups // tp
        inner, shared = FusedSegment(sizes.inner_size), FusedSegment(sizes.groups * sizes.state)
        self.in_proj = ColumnLinear(
            model.hidden_size,
            (inner, inner, shared, shared, FusedSegment(sizes.heads)),
            bias=False,
            init=build.init_method(),
            region=build.region,
            mesh=build.mesh,
            dtype=build.dtype,
            kind="in_proj",
        )
        self.conv1d = CausalConv((inner, shared, shared), sizes.conv_width, build, bias=True)
        self.dt_bias = head_vector(build, sizes.heads, _initial_dt_bias)
        self.A_log = head_vector(build, sizes.heads, log_uniform(1.0, 16.0))
        self.D = head_vector(build, sizes.heads, constant_initializer(1.0))
        self.norm = GatedNorm(build, sizes.inner_size, self.groups, place=model.hybrid.mamba_output_norm)
        self.factors, self.output_factor = model.multipliers.mixer, model.multipliers.ssm_out_multiplier
        self.out_proj = RowLinear(
            sizes.inner_size,
            model.hidden_size,
            bias=False,
            init=build.output_init_method(),
            region=build.region,
            mesh=build.mesh,
            dtype=build.dtype,
        )

    def forward(
        self, x: Tensor, norm: nn.Module | None, context: ForwardContext, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x: [s or s/tp, b, h], before its norm. Returns the mixer's output and the normed input, both like x."""
        projected, normed = self.build.normed_linear(norm, self.in_proj, x)
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
            mixed = context.cache.scan(self, parts, self._go_on)
        else:
            mixed, _ = self._conv_and_scan(parts, exchange, document_segments(context.mask), None)
        return self._project_out(exchange.to_positions(mixed).flatten(2), z), normed

    def initial_state(self, batch: int) -> MixerState:
        """The state before a text."""
        sizes, weight = self.sizes, self.conv1d.weight
        scan = weight.new_zeros((batch, self.heads, sizes.head, sizes.state), dtype=accumulation_dtype(weight.dtype))
        return MixerState(weight.new_zeros((sizes.conv_width - 1, batch, len(weight))), scan)

    def decode(self, normed: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        """Go on from a state by any number of tokens. normed: [s, b, h]; returns the mixer's output, like it, and the new state."""
        z, *parts = self._split_projection(self.in_proj(normed))
        mixed, state = self._go_on(parts, state)
        return self._project_out(mixed.flatten(2), z), state

    def _project_out(self, y: Tensor, z: Tensor) -> Tensor:
        """The mixer's output [s or s/tp, b, h] of what the scan makes and the gate, [s, b, d/tp]."""
        return scaled(self.out_proj(self.norm(y, z)), self.output_factor)

    def _go_on(self, parts: list[Tensor], state: MixerState) -> tuple[Tensor, MixerState]:
        """Convolution and scan of split tokens [s, b, ...] behind a state."""
        return self._conv_and_scan(parts, ALONE, None, state)

    def _split_projection(self, projected: Tensor) -> tuple[Tensor, ...]:
        """[s, b, (2 d + 2 g N + n)/tp] to z [s, b, d/tp], x [s, b, n/tp, p], B and C [s, b, g/tp, N], dt [s, b, n/tp, 1]."""
        inner, shared = self.heads * self.sizes.head, self.groups * self.sizes.state
        z, x, b, c, dt = projected.split((inner, inner, shared, shared, self.heads), dim=-1)
        if self.factors:
            z, x, b, c, dt = (part * factor for part, factor in zip((z, x, b, c, dt), self.factors, strict=True))
        groups = (self.groups, self.sizes.state)
        return z, x.unflatten(2, (self.heads, -1)), b.unflatten(2, groups), c.unflatten(2, groups), dt[..., None]

    def _conv_and_scan(
        self, parts: list[Tensor], exchange: HeadExchange, segments: Tensor | None, state: MixerState | None
    ) -> tuple[Tensor, MixerState]:
        """Convolution and scan. parts: x, B, C, dt as split. Returns [s, b, n/tp/cp, p] of all positions, and the state behind them."""
        copies, format_ = group_repeats(self.groups, exchange), accumulation_dtype(self.build.dtype)
        x, b, c, dt = parts
        if copies > 1:
            b, c = b.repeat_interleave(copies, dim=2), c.repeat_interleave(copies, dim=2)
        x, b, c, dt = exchange.to_heads(x, b, c, dt)
        kernels = exchange.wrap_kernels(self.build.kernels)
        joined = torch.cat([part.flatten(2) for part in (x, b, c)], dim=-1)
        before = None if state is None else state.conv
        made = kernels.causal_conv(joined, *self._conv_of(exchange, copies), segments, before)
        widths = [part.shape[2] * part.shape[3] for part in (x, b, c)]
        x, b, c = (
            one.unflatten(2, part.shape[2:]) for one, part in zip(made.split(widths, dim=-1), (x, b, c), strict=True)
        )
        dt_bias, a_log, skip = (
            exchange.shard_parameter(each, self.heads) for each in (self.dt_bias, self.A_log, self.D)
        )
        low, high = self.sizes.step_limits
        steps = F.softplus(dt[..., 0].to(format_) + dt_bias.to(format_))
        if (low, high) != (0.0, math.inf):
            steps = steps.clamp(low, high)
        decay, scan = -a_log.to(format_).exp(), None if state is None else state.scan
        if scan is not None and len(x) == 1:
            y, scan = scans.selective_step(x[0], steps[0], decay, b[0], c[0], scan)
            y = y[None]
        else:
            y, scan = kernels.selective_scan(x, steps, decay, b, c, segments=segments, state=scan)
        y = (y.to(format_) + skip.to(format_)[:, None] * x.to(format_)).to(y.dtype)
        return y, MixerState(scans.last_inputs(joined, self.sizes.conv_width, before).detach(), scan)

    def _conv_of(self, exchange: HeadExchange, copies: int) -> tuple[Tensor, Tensor]:
        """Weight [c, width] and bias [c] of the channels that this rank sees: those of its heads, and of the groups beside them."""
        inner, shared = self.heads * self.sizes.head, self.groups * self.sizes.state
        assert self.conv1d.bias is not None, "the convolution of Mamba-2 has a bias"
        weight, bias = (
            torch.cat(
                [
                    exchange.shard_parameter(part, count, times)
                    for part, count, times in zip(
                        each.split((inner, shared, shared)),
                        (self.heads, self.groups, self.groups),
                        (1, copies, copies),
                        strict=True,
                    )
                ]
            )
            for each in (self.conv1d.weight[:, 0], self.conv1d.bias)
        )
        return weight, bias


class GatedNorm(nn.Module):
    """RMSNorm of y * SiLU(z) over each group of channels by itself. groups: of this rank.

    place: after_gate; before_gate, RMSNorm(y) * SiLU(z); or none, y * SiLU(z).
    """

    def __init__(self, build: BuildContext, size: int, groups: int, *, place: str = "after_gate") -> None:
        super().__init__()
        self.place = place
        self.groups, self.epsilon = groups, build.model.hybrid.mamba_norm_epsilon
        spec = ParamSpec((size,), constant_initializer(1.0), "vector", (Shard(0, "tp", (FusedSegment(size),)),))
        self.weight = None if place == "none" else meta_parameter(spec, build.mesh, build.dtype)

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """y, z: [s, b, d/tp]. Returns the same shape."""
        format_ = accumulation_dtype(y.dtype)
        own, gate = y.to(format_), F.silu(z.to(format_))
        if self.place == "before_gate":
            return (self._normalize(own) * gate).to(y.dtype)
        return self._normalize(own * gate).to(y.dtype)

    def _normalize(self, x: Tensor) -> Tensor:
        """x: [s, b, d/tp], wide. Returns the same shape."""
        if self.weight is None:
            return x
        groups = x.unflatten(-1, (self.groups, -1))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.epsilon)
        return normed.flatten(-2) * self.weight.to(x.dtype)


def _initial_dt_bias(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Biases whose softplus is a time step drawn between 0.001 and 0.1, evenly by its logarithm."""
    logs = torch.empty(shape, device=generator.device).uniform_(math.log(1e-3), math.log(0.1), generator=generator)
    steps = logs.exp().clamp(min=1e-4)
    return steps + torch.log(-torch.expm1(-steps))
