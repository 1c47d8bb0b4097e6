"""What state-space layers compute along a sequence: a short causal convolution, and scans over a state, in chunks and token by token.

A scan over a sequence is a recurrence. In chunks of `chunk` tokens it becomes products of matrices: inside a chunk every token reads every
earlier one, and between chunks only the state passes. All sums are in fp32 for fp16 and bf16 inputs, and in fp64 for fp64 inputs.

    selective_scan     S_t = exp(dt_t a) S_t-1 + dt_t x_t b_t^T;            y_t = S_t c_t          (Mamba-2; Dao and Gu, 2024, arXiv 2405.21060)
    delta_rule_scan    S_t = exp(g_t) S_t-1, then += k_t beta_t (v_t - S^T k_t)^T;  o_t = S_t^T q_t   (Yang et al., 2024, arXiv 2412.06464)

Documents: `segments` [b, s] has one number for each run of tokens of a document. Neither the state nor the convolution passes from one to the
next. A state that is given belongs to the first segment. Logarithms of decays are masked before the exponential: a mask after it would
multiply infinities by zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.reference import wide

NEVER = float("-inf")


def segments_of(documents: Tensor) -> Tensor:
    """Number the runs of equal document numbers: [b, s] to int64 [b, s], from 0 on."""
    starts = documents[:, 1:] != documents[:, :-1]
    return F.pad(starts.cumsum(dim=1), (1, 0))


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """SiLU of a depthwise causal convolution: each channel sees its own last `width` values.

    x: [s, b, c]; weight: [c, width]; bias: [c]. before: [width - 1, b, c], the inputs before the first; zeros if left out. Returns [s, b, c].
    """
    length, width = x.shape[0], weight.shape[1]
    padded = F.pad(x, (0, 0, 0, 0, width - 1, 0)) if before is None else torch.cat((before.to(x.dtype), x))
    result = padded[width - 1 :] * weight[:, -1]
    for back in range(1, width):
        earlier = padded[width - 1 - back : width - 1 - back + length]
        if segments is not None:
            earlier = earlier * _same_segment(segments, back).to(x.dtype)
        result = result + earlier * weight[:, width - 1 - back]
    return F.silu(result if bias is None else result + bias)


def _same_segment(segments: Tensor, back: int) -> Tensor:
    """Whether the token `back` places before is of the same segment: bool [s, b, 1]. What is before the first token is of its segment."""
    first = segments[:, :1].expand(-1, min(back, segments.shape[1]))
    earlier = torch.cat((first, segments[:, :-back]), dim=1)
    return (earlier == segments).t()[..., None]


def last_inputs(x: Tensor, width: int, before: Tensor | None = None) -> Tensor:
    """What a convolution of this width has to know of x [s, b, c] when it goes on behind it: [width - 1, b, c]."""
    padded = F.pad(x, (0, 0, 0, 0, width - 1, 0)) if before is None else torch.cat((before.to(x.dtype), x))
    return padded[len(padded) - (width - 1) :]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Decays and borders of a sequence in chunks of equal length, the last one filled up.

    logs: [b, m, heads, q], the sum of the logarithms of decays since the chunk's beginning, the token's own included. segments: [b, m, 1, q] or
    None. previous: [b, m, 1], the segment of the last token before the chunk.
    """

    logs: Tensor
    segments: Tensor | None
    previous: Tensor | None

    @staticmethod
    def of(logs: Tensor, segments: Tensor | None, chunk: int) -> Chunks:
        """logs: [s, b, heads], of each token's decay. segments: [b, s]."""
        sums = in_chunks(logs, chunk).cumsum(dim=2).transpose(2, 3)
        if segments is None:
            return Chunks(sums, None, None)
        missing = -segments.shape[1] % chunk
        filled = torch.cat((segments, segments[:, -1:].expand(-1, missing)), dim=1).unflatten(1, (-1, chunk))
        previous = torch.cat((filled[:, :1, 0], filled[:, :-1, -1]), dim=1)
        return Chunks(sums, filled[:, :, None], previous[:, :, None])

    def between(self) -> Tensor:
        """Decay from a token's state to a later one of its chunk: [b, m, heads, q (later), q], 0 where nothing passes."""
        size = self.logs.shape[-1]
        seen = torch.ones(size, size, dtype=torch.bool, device=self.logs.device).tril()
        if self.segments is not None:
            seen = seen & (self.segments[..., :, None] == self.segments[..., None, :])
        return (self.logs[..., :, None] - self.logs[..., None, :]).masked_fill(~seen, NEVER).exp()

    def from_start(self) -> Tensor:
        """Decay of the state before the chunk until a token: [b, m, heads, q]."""
        if self.segments is None or self.previous is None:
            return self.logs.exp()
        return self.logs.masked_fill(self.segments != self.previous[..., None], NEVER).exp()

    def to_end(self) -> Tensor:
        """Decay of a token's state until the end of the chunk: [b, m, heads, q]."""
        logs = self.logs[..., -1:] - self.logs
        return (
            logs if self.segments is None else logs.masked_fill(self.segments != self.segments[..., -1:], NEVER)
        ).exp()

    def across(self) -> Tensor:
        """Decay of the state over the whole chunk: [b, m, heads]."""
        return self.from_start()[..., -1]


def in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[s, b, ...] to [b, m, chunk, ...], filled up with zeros."""
    missing = -x.shape[0] % chunk
    filled = torch.cat((x, x.new_zeros((missing, *x.shape[1:])))) if missing else x
    return filled.transpose(0, 1).unflatten(1, (-1, chunk))


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    segments: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = 128,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's scan over a sequence, in chunks. Group j of g serves heads j n/g ... (j + 1) n/g - 1.

    x: [s, b, n, p]; dt: [s, b, n], positive; a: [n], negative; b, c: [s, b, g, d]; state: [b, n, p, d], zeros if left out. Returns y [s, b, n, p]
    in the format of x, and the state after the last token, [b, n, p, d], in fp32 or wider.
    """
    length, batch, heads, size = x.shape
    groups, format_ = b.shape[2], wide(x.dtype)
    chunk, per_group = min(chunk, length), heads // groups
    dt = dt.to(format_)
    chunks = Chunks.of(dt * a.to(format_), segments, chunk)
    # [b, m, g, r, q, p] is what heads see; a group's b and c are multiplied once for all its heads.
    inputs = in_chunks((x.to(format_) * dt[..., None]).unflatten(2, (groups, per_group)), chunk).permute(
        0, 1, 3, 4, 2, 5
    )
    keys, queries = (in_chunks(t.to(format_), chunk).transpose(2, 3) for t in (b, c))  # [b, m, g, q, d]
    grouped = (groups, per_group)
    weights = (queries @ keys.transpose(-1, -2))[:, :, :, None] * chunks.between().unflatten(2, grouped)
    inside = weights @ inputs
    fading = inputs * chunks.to_end().unflatten(2, grouped)[..., None]
    made = keys[:, :, :, None].transpose(-1, -2) @ fading  # [b, m, g, r, d, p]: what each chunk adds to the state
    carried = _carry(made, chunks.across().unflatten(2, grouped)[..., None, None], _grouped(state, grouped, format_))
    reading = (queries[:, :, :, None] @ carried[:, :-1]) * chunks.from_start().unflatten(2, grouped)[..., None]
    y = _in_order(inside + reading)[:length]
    return y.reshape(length, batch, heads, size).to(x.dtype), carried[:, -1].flatten(1, 2).transpose(-1, -2)


def _in_order(chunks: Tensor) -> Tensor:
    """[b, m, g, r, q, p] to [m q, b, g, r, p]."""
    return chunks.permute(1, 4, 0, 2, 3, 5).flatten(0, 1)


def _grouped(state: Tensor | None, grouped: tuple[int, int], format_: torch.dtype) -> Tensor | None:
    """[b, n, p, d] to [b, g, r, d, p]."""
    return None if state is None else state.to(format_).unflatten(1, grouped).transpose(-1, -2)


def _carry(made: Tensor, across: Tensor, state: Tensor | None) -> Tensor:
    """The state before each chunk, and after the last: [b, m + 1, ...]. made: [b, m, ...]; across: decay of each chunk; state: before the first."""
    now = torch.zeros_like(made[:, 0]) if state is None else state
    states = [now]
    for own, decay in zip(made.unbind(1), across.unbind(1), strict=True):
        now = now * decay + own
        states.append(now)
    return torch.stack(states, dim=1)


def selective_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of Mamba-2's scan. x: [b, n, p]; dt: [b, n]; a: [n]; b, c: [b, g, d]; state: [b, n, p, d], not changed.

    Returns y [b, n, p] in the format of x, and the new state.
    """
    format_ = state.dtype
    dt, repeats = dt.to(format_), x.shape[1] // b.shape[1]
    keys, queries = (t.to(format_).repeat_interleave(repeats, dim=1) for t in (b, c))
    inputs = x.to(format_) * dt[..., None]
    state = state * (dt * a.to(format_)).exp()[..., None, None] + inputs[..., None] * keys[:, :, None]
    return (state @ queries[..., None])[..., 0].to(x.dtype), state


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
    """The gated delta rule over a sequence, in chunks. Key head j of g serves value heads j n/g ... (j + 1) n/g - 1.

    q, k: [s, b, g, dk], q scaled already; v: [s, b, n, dv]; g: [s, b, n], logarithms of decays; beta: [s, b, n]; state: [b, n, dk, dv], zeros if
    left out. Returns o [s, b, n, dv] in the format of v, and the state after the last token, in fp32 or wider.
    """
    length, batch, heads, size = v.shape
    groups, format_, key_size = k.shape[2], wide(v.dtype), k.shape[3]
    chunk, grouped = min(chunk, length), (groups, heads // groups)
    chunks = Chunks.of(g.to(format_), segments, chunk)
    queries, keys = (
        in_chunks(t.to(format_), chunk).transpose(2, 3)[:, :, :, None] for t in (q, k)
    )  # [b, m, g, 1, q, dk]
    values = in_chunks(v.to(format_).unflatten(2, grouped), chunk).permute(0, 1, 3, 4, 2, 5)  # [b, m, g, r, q, dv]
    rate = in_chunks(beta.to(format_).unflatten(2, grouped), chunk).permute(0, 1, 3, 4, 2)[..., None]
    between, from_start = chunks.between().unflatten(2, grouped), chunks.from_start().unflatten(2, grouped)[..., None]
    # What a token writes depends on what the earlier ones of its chunk wrote: a triangular system.
    system = (rate * (keys @ keys.transpose(-1, -2)) * between).tril(-1)
    known = torch.cat((rate * keys * from_start, rate * values), dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    reads, writes = solved.split((key_size, size), dim=-1)
    inside = (queries @ keys.transpose(-1, -2)) * between
    requested, fading = (
        queries * from_start,
        (keys * chunks.to_end().unflatten(2, grouped)[..., None]).transpose(-1, -2),
    )
    across = chunks.across().unflatten(2, grouped)[..., None, None]
    now = (
        values.new_zeros((batch, *grouped, key_size, size))
        if state is None
        else state.to(format_).unflatten(1, grouped)
    )
    outputs = []
    for one in range(values.shape[1]):
        written = writes[:, one] - reads[:, one] @ now
        outputs.append(requested[:, one] @ now + inside[:, one] @ written)
        now = now * across[:, one] + fading[:, one] @ written
    o = _in_order(torch.stack(outputs, dim=1))[:length]
    return o.reshape(length, batch, heads, size).to(v.dtype), now.flatten(1, 2)


def delta_rule_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule. q, k: [b, g, dk]; v: [b, n, dv]; g, beta: [b, n]; state: [b, n, dk, dv], not changed.

    Returns o [b, n, dv] in the format of v, and the new state.
    """
    format_, repeats = state.dtype, v.shape[1] // k.shape[1]
    query, key = (t.to(format_).repeat_interleave(repeats, dim=1) for t in (q, k))
    state = state * g.to(format_).exp()[..., None, None]
    written = beta.to(format_)[..., None] * (v.to(format_) - (key[:, :, None] @ state)[:, :, 0])
    state = state + key[..., None] * written[:, :, None]
    return (query[:, :, None] @ state)[:, :, 0].to(v.dtype), state
