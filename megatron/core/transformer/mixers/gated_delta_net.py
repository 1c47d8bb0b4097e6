"""The gated delta net (Yang et al., 2024, arXiv 2412.06464), as in Qwen3-Next.

    x -> in_proj -> q | k | v | z | b | a     q, k, v -> causal convolution, SiLU; q, k -> unit length -> delta rule -> norm -> * SiLU(z) -> out_proj

A head's state maps keys to values: each token takes out what its key finds there, and puts its own value in, in part (beta) and after everything
has faded (g). q, k, v, z, b and a are cut over the tensor ranks each by itself. Over context ranks positions are traded for heads before the
convolution and back after the scan.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.mixers.gated_delta_net import DeltaNetSizes
from megatron.core.context_parallel.head_exchange import ALONE, HeadExchange
from megatron.core.kernels.ops.reference import accumulation_dtype_of
from megatron.core.kernels.state_space import scans
from megatron.core.parallel.spec import FusedWeightSegment, ParamSpec, constant_initializer, meta_parameter
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


class GatedDeltaNet(nn.Module):
    """The gated delta rule as the mixer of a layer."""

    def __init__(self, build: LayerBuildContext, sizes: DeltaNetSizes) -> None:
        super().__init__()
        model, tp = build.model, build.mesh.tp.size
        self.build, self.sizes = build, sizes
        self.key_heads, self.value_heads = sizes.key_heads // tp, sizes.value_heads // tp
        keys = FusedWeightSegment(sizes.key_heads * sizes.key_size)
        values, heads = FusedWeightSegment(sizes.value_heads * sizes.value_size), FusedWeightSegment(sizes.value_heads)
        self.in_proj = build.make_column_linear(
            model.hidden_size, (keys, keys, values, values, heads, heads), bias=False, kind="in_proj"
        )
        self.conv1d = CausalConvParameters((keys, keys, values), sizes.conv_width, build, bias=False)
        self.dt_bias = per_head_parameter(build, sizes.value_heads, constant_initializer(1.0))
        self.A_log = per_head_parameter(build, sizes.value_heads, log_of_uniform_initializer(1.0, 16.0))
        self.out_norm = GatedHeadNorm(build, sizes.value_size)
        self.out_proj = build.make_row_linear(values.size, bias=False)

    def forward(self, normed: Tensor, context: ForwardContext, bias: Tensor | None = None) -> Tensor:
        """Run the mixer, with a cache on new tokens. normed: [s or s/tp, b, h]; returns like it."""
        projected = self.build.project(self.in_proj, normed)
        exchange = HeadExchange.from_mask(
            self.build.mesh,
            context.mask,
            len(projected),
            heads=self.value_heads,
            groups=self.key_heads,
            state_comm_type=self.build.state_comm_type,
        )
        parts, z = self._split_projection(projected)
        if context.cache is not None:
            mixed = context.cache.run_from_states(self, parts, self._conv_and_scan_from)
        else:
            mixed, _ = self._conv_and_scan(parts, exchange, document_segment_ids(context.mask), None)
        return self.out_proj(self.out_norm(exchange.to_position_shards(mixed), z).flatten(2))

    def initial_state(self, batch: int) -> MixerState:
        """Return zero states for `batch` sequences of which no token has been processed."""
        sizes, weight = self.sizes, self.conv1d.weight
        # Not weight.new_zeros: the weights that FSDP2 divides make a DTensor of it.
        scan = torch.zeros(
            (batch, self.value_heads, sizes.key_size, sizes.value_size),
            dtype=accumulation_dtype_of(weight.dtype),
            device=weight.device,
        )
        conv = torch.zeros((sizes.conv_width - 1, batch, len(weight)), dtype=weight.dtype, device=weight.device)
        return MixerState(conv, scan)

    def _conv_and_scan_from(self, parts: list[Tensor], state: MixerState) -> tuple[Tensor, MixerState]:
        """Run convolution and scan on the next tokens' parts from a state. Returns as `_conv_and_scan`."""
        return self._conv_and_scan(parts, ALONE, None, state)

    def _split_projection(self, projected: Tensor) -> tuple[list[Tensor], Tensor]:
        """Split [s, b, out/tp] into [q, k, v, b, a] and z.

        q, k: [s, b, nk/tp, dk]; v, z: [s, b, nv/tp, dv]; b, a: [s, b, nv/tp, 1].
        """
        heads, sizes = (self.key_heads, self.value_heads), self.sizes
        keys, values = heads[0] * sizes.key_size, heads[1] * sizes.value_size
        q, k, v, z, b, a = projected.split((keys, keys, values, values, heads[1], heads[1]), dim=-1)
        q, k = (each.unflatten(2, (heads[0], -1)) for each in (q, k))
        v, z = (each.unflatten(2, (heads[1], -1)) for each in (v, z))
        return [q, k, v, b[..., None], a[..., None]], z

    def _conv_and_scan(
        self, parts: list[Tensor], exchange: HeadExchange, segments: Tensor | None, state: MixerState | None
    ) -> tuple[Tensor, MixerState]:
        """Run convolution and delta-rule scan.

        parts: q, k, v, b, a as split. segments: of documents [b, s], or None. state: None for zeros. Returns [s, b,
        nv/tp/cp, dv] of all positions, and the state after the last.
        """
        copies, format_ = num_group_repeats_for_cp(self.key_heads, exchange), accumulation_dtype_of(self.build.dtype)
        q, k, v, b, a = parts
        if copies > 1:
            q, k = q.repeat_interleave(copies, dim=2), k.repeat_interleave(copies, dim=2)
        q, k, v, b, a = exchange.to_head_shards(q, k, v, b, a)
        kernels = exchange.wrap_kernels(self.build.kernels)
        before, times = None if state is None else state.conv, (copies, copies, 1)
        (q, k, v), joined = self.conv1d.convolve((q, k, v), times, exchange, kernels, segments, before)
        q, k = (_l2_normalize(each.to(format_)) for each in (q, k))
        q = q * self.sizes.key_size**-0.5
        dt_bias, a_log = (
            exchange.shard_parameter(each, self.value_heads).to(format_) for each in (self.dt_bias, self.A_log)
        )
        rate = b[..., 0].to(format_).sigmoid() * self.sizes.largest_rate
        fading = -a_log.exp() * F.softplus(a[..., 0].to(format_) + dt_bias)
        scan = None if state is None else state.scan
        if scan is not None and len(v) == 1:
            o, scan = scans.delta_rule_step(q[0], k[0], v[0], fading[0], rate[0], scan)
            o = o[None]
        else:
            o, scan = kernels.delta_rule_scan(q, k, v, fading, rate, segments=segments, state=scan)
        return o, MixerState(scans.last_conv_inputs(joined, self.sizes.conv_width, before).detach(), scan)


class GatedHeadNorm(nn.Module):
    """RMSNorm of each head, with one weight for all heads, times SiLU(z)."""

    def __init__(self, build: LayerBuildContext, size: int) -> None:
        super().__init__()
        epsilon = build.model.hybrid.linear_norm_epsilon
        self.epsilon = build.model.norm_epsilon if epsilon is None else epsilon
        # A rank sees its own heads only, so the gradient is a share of a sum, with and without sequence parallelism.
        self.weight = meta_parameter(
            ParamSpec((size,), constant_initializer(1.0), "vector", sum_over=("tp",)), build.mesh, build.dtype
        )

    def forward(self, o: Tensor, z: Tensor) -> Tensor:
        """Return norm(o) * SiLU(z). o, z: [s, b, n/tp, dv]; returns the same shape."""
        format_ = accumulation_dtype_of(o.dtype)
        own = o.to(format_)
        normed = own * torch.rsqrt(own.square().mean(-1, keepdim=True) + self.epsilon) * self.weight.to(format_)
        return (normed * F.silu(z.to(format_))).to(o.dtype)


def _l2_normalize(x: Tensor) -> Tensor:
    """Return x divided by its L2 norm along the last dimension, with 1e-6 added inside the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
