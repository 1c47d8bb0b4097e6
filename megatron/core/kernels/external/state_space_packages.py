"""Scans and the causal convolution of the packages mamba-ssm (Dao and Gu, 2024), causal-conv1d and flash-linear-attention, where they are installed.

    mamba_ssm        --kernel selective_scan=mamba_ssm
    causal_conv1d    --kernel causal_conv=causal_conv1d
    fla              --kernel delta_rule_scan=fla

They lay sequences out as [b, s, ...]. What a package does not have (a state beside documents) is left to torch.
"""

from __future__ import annotations

from pkgutil import resolve_name

from torch import Tensor

from megatron.core.kernels.state_space import scans


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    segments: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.scans.selective_scan` by mamba-ssm, or by torch if both segments and a state are given. Same
    arguments and results.

    x: [s, b, n, p]; dt: [s, b, n]; b, c: [s, b, g, d].
    """
    if segments is not None and state is not None:
        return scans.selective_scan(x, dt, a, b, c, segments=segments, state=state, chunk=chunk)
    scan = resolve_name("mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined")
    y, last = scan(
        *(each.transpose(0, 1) for each in (x, dt)),
        a,
        *(each.transpose(0, 1) for each in (b, c)),
        chunk,
        initial_states=state,
        seq_idx=None if segments is None else segments.int(),
        return_final_states=True,
    )
    return y.transpose(0, 1), last


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """Compute `kernels.scans.causal_conv` by causal-conv1d, or by torch if both segments and earlier inputs are given.
    Same arguments and results.

    x: [s, b, c]; weight: [c, width].
    """
    if segments is not None and before is not None:
        return scans.causal_conv(x, weight, bias, segments, before)
    convolve = resolve_name("causal_conv1d:causal_conv1d_fn")
    y = convolve(
        x.permute(1, 2, 0) if segments is None else x.transpose(0, 1).contiguous().transpose(1, 2),
        weight,
        bias,
        seq_idx=None if segments is None else segments.int().contiguous(),
        initial_states=None if before is None else before.to(x.dtype).transpose(0, 1).contiguous().transpose(1, 2),
        activation="silu",
    )
    return y.permute(2, 0, 1)


def delta_rule_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    segments: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.scans.delta_rule_scan` by flash-linear-attention, or by torch if segments are given. Same
    arguments and results.

    q, k: [s, b, g, dk]; v: [s, b, n, dv].
    """
    if segments is not None:
        return scans.delta_rule_scan(q, k, v, g, beta, segments=segments, state=state, chunk=chunk)
    scan, repeats = resolve_name("fla.ops.gated_delta_rule:chunk_gated_delta_rule"), v.shape[2] // k.shape[2]
    query, key = (each.repeat_interleave(repeats, dim=2).transpose(0, 1).to(v.dtype) for each in (q, k))
    o, last = scan(
        query,
        key,
        *(each.transpose(0, 1) for each in (v, g, beta)),
        scale=1.0,
        initial_state=state,
        output_final_state=True,
    )
    return o.transpose(0, 1), last
