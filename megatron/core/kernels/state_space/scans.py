"""What state-space layers compute along a sequence: a short causal convolution, and scans over a state, in chunks and token by token.

A scan over a sequence is a recurrence. In chunks of `chunk` tokens it becomes products of matrices: inside a chunk every token reads every
earlier one, and between chunks only the state passes. All sums are in fp32 for fp16 and bf16 inputs, and in fp64 for fp64 inputs.

    selective_scan     S_t = exp(dt_t a) S_t-1 + dt_t x_t b_t^T;            y_t = S_t c_t          (Mamba-2; Dao and Gu, 2024, arXiv 2405.21060)
    delta_rule_scan    S_t = exp(g_t) S_t-1, then += k_t beta_t (v_t - S^T k_t)^T;  o_t = S_t^T q_t   (Yang et al., 2024, arXiv 2412.06464)

The backward pass keeps the inputs and the state before every `_SPAN` chunks, and computes those chunks again: what is inside a chunk takes
chunk / state times the memory of the states.

Documents: `segments` [b, s] has one number for each run of tokens of a document. Neither the state nor the convolution passes from one to the
next. A state that is given belongs to the first segment. Logarithms of decays are masked before the exponential: a mask after it would
multiply infinities by zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.core.kernels.ops.reference import accumulation_dtype_of

Span = Callable[..., tuple[Tensor, Tensor]]
NEVER = float("-inf")
# Logarithms of decays that count as 0. Products of a few of them would be below the normal numbers, with which processors are many times slower.
_FAINT = {torch.float32: -30.0, torch.float64: -200.0}
_SPAN = 8  # chunks that are computed at a time, and again in the backward pass
CHUNK = 64  # tokens of a chunk


def segment_ids_from_document_ids(documents: Tensor) -> Tensor:
    """Number the runs of equal document numbers in each row, from 0 on: documents [b, s] -> int64 [b, s]."""
    starts = documents[:, 1:] != documents[:, :-1]
    return F.pad(starts.cumsum(dim=1), (1, 0))


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """Apply a depthwise causal convolution and SiLU: each channel of a token sees its own last `width` values.
    Returns [s, b, c].

    x: [s, b, c]; weight: [c, width], the token's own last; bias: [c] or None. segments: [b, s], number of each token's
    segment; values of other segments count as zero. before: [width - 1, b, c], inputs before the first token; None:
    zeros.
    """
    padded = _prepend_previous_inputs(x, weight.shape[1], before)
    # Compiled, autograd's backward pass of the formula is fused.
    convolve = _convolve if torch.compiler.is_compiling() else _DepthwiseConvolution.apply
    result = convolve(padded, weight, segments)
    return F.silu(result if bias is None else result + bias)


def _prepend_previous_inputs(x: Tensor, width: int, before: Tensor | None) -> Tensor:
    """x [s, b, c] with the inputs before the first, or zeros: [width - 1 + s, b, c]."""
    return F.pad(x, (0, 0, 0, 0, width - 1, 0)) if before is None else torch.cat((before.to(x.dtype), x))


def _convolve(padded: Tensor, weight: Tensor, segments: Tensor | None) -> Tensor:
    """padded: [width - 1 + s, b, c]; weight: [c, width]. Returns [s, b, c]."""
    width = weight.shape[1]
    length = len(padded) - (width - 1)
    result = padded[width - 1 :] * weight[:, -1]
    for back in range(1, width):
        first = width - 1 - back
        result = torch.addcmul(
            result, _zero_across_segments(padded[first : first + length], segments, back), weight[:, first]
        )
    return result


class _DepthwiseConvolution(torch.autograd.Function):
    """`_convolve`, whose backward pass keeps its inputs only. That of torch's own convolution takes three times the CPU time."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor, segments: Tensor | None) -> Tensor:
        """As `_convolve`."""
        ctx.save_for_backward(padded, weight, segments)
        return _convolve(padded, weight, segments)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """gradient: [s, b, c]. Returns those of padded and weight."""
        padded, weight, segments = ctx.saved_tensors
        width = weight.shape[1]
        of_inputs, of_weights = torch.zeros_like(padded), torch.empty_like(weight)
        for first in range(width):
            own, reached = (each[first : first + len(gradient)] for each in (padded, of_inputs))
            passed = _zero_across_segments(gradient, segments, width - 1 - first)
            reached.addcmul_(passed, weight[:, first])
            of_weights[:, first] = (passed * own).flatten(0, 1).sum(dim=0)
        return of_inputs, of_weights, None


def _zero_across_segments(x: Tensor, segments: Tensor | None, back: int) -> Tensor:
    """x [s, b, c], zero for tokens of which the one `back` places before is of another segment."""
    return x if segments is None or not back else x * _same_segment(segments, back).to(x.dtype)


def _same_segment(segments: Tensor, back: int) -> Tensor:
    """Return whether the token `back` positions earlier is of the same segment: bool [s, b, 1]. Positions before the
    first token count as its segment.
    """
    first = segments[:, :1].expand(-1, min(back, segments.shape[1]))
    earlier = torch.cat((first, segments[:, :-back]), dim=1)
    return (earlier == segments).t()[..., None]


def last_conv_inputs(x: Tensor, width: int, before: Tensor | None = None) -> Tensor:
    """Return the last inputs that a causal convolution of this width needs when it continues after x [s, b, c]: [width
    - 1, b, c]. before: the inputs before x; None: zeros.
    """
    return _prepend_previous_inputs(x, width, before)[len(x) :]


@dataclass(frozen=True, slots=True)
class ChunkedScanDecays:
    """Cumulative decays and segments of a sequence that is cut into m chunks of q tokens; the last chunk is padded.

    logs: fp64 [b, m, heads, q], sum of the logarithms of decays from the chunk's beginning up to and including the
    token; in fp64, since small differences of large sums are needed. format: dtype of the decays. segments: [b, m, 1,
    q], segment of each token, or None. previous: [b, m, 1], segment of the last token before the chunk, or None.
    """

    logs: Tensor
    format: torch.dtype
    segments: Tensor | None
    previous: Tensor | None

    @staticmethod
    def from_log_decays(logs: Tensor, segments: Tensor | None, chunk: int) -> ChunkedScanDecays:
        """Cut a sequence into chunks. logs: [s, b, heads], logarithm of each token's decay; segments: [b, s] or None;
        chunk: tokens of a chunk.
        """
        sums = reshape_into_chunks(logs, chunk).cumsum(dim=2, dtype=torch.float64).transpose(2, 3)
        if segments is None:
            return ChunkedScanDecays(sums, logs.dtype, None, None)
        missing = -segments.shape[1] % chunk
        filled = torch.cat((segments, segments[:, -1:].expand(-1, missing)), dim=1).unflatten(1, (-1, chunk))
        previous = torch.cat((filled[:, :1, 0], filled[:, :-1, -1]), dim=1)
        return ChunkedScanDecays(sums, logs.dtype, filled[:, :, None], previous[:, :, None])

    def causal_segment_mask(self) -> Tensor:
        """Return whether the contribution of a token to the state reaches a later token of its chunk (or itself): bool
        [q (later), q], or [b, m, 1, q, q] with segments.
        """
        size = self.logs.shape[-1]
        seen = torch.ones(size, size, dtype=torch.bool, device=self.logs.device).tril()
        return seen if self.segments is None else seen & (self.segments[..., :, None] == self.segments[..., None, :])

    def decay_between(self) -> Tensor:
        """Return the decay of the state from a token to each later one of its chunk: [b, m, heads, q (later), q]; 0 for
        earlier tokens and other segments.
        """
        return _exp_of_log_decay(
            (self.logs[..., :, None] - self.logs[..., None, :])
            .to(self.format)
            .masked_fill(~self.causal_segment_mask(), NEVER)
        )

    def decay_from_start(self) -> Tensor:
        """Return the decay of the state from before the chunk to each token: [b, m, heads, q]; 0 across segments."""
        logs = self.logs.to(self.format)
        if self.segments is not None and self.previous is not None:
            logs = logs.masked_fill(self.segments != self.previous[..., None], NEVER)
        return _exp_of_log_decay(logs)

    def decay_to_end(self) -> Tensor:
        """Return the decay of the state from each token to the end of the chunk: [b, m, heads, q]; 0 across segments."""
        logs = (self.logs[..., -1:] - self.logs).to(self.format)
        if self.segments is not None:
            logs = logs.masked_fill(self.segments != self.segments[..., -1:], NEVER)
        return _exp_of_log_decay(logs)

    def chunk_decay(self) -> Tensor:
        """Return the decay of the state over each whole chunk: [b, m, heads]."""
        return self.decay_from_start()[..., -1]


def _exp_of_log_decay(logs: Tensor) -> Tensor:
    """Exponentials of logarithms of decays, faint ones exactly 0. The exponential sees finite numbers only: of an infinite one it takes six times as long."""
    faint = _FAINT[logs.dtype]
    return F.threshold(F.threshold(logs, faint, faint - 1).exp(), math.exp(faint - 0.5), 0.0)


def reshape_into_chunks(x: Tensor, chunk: int) -> Tensor:
    """Split a sequence [s, b, ...] into chunks, padded with zeros: [b, m, chunk, ...]."""
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
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Compute Mamba-2's scan over a sequence, chunk by chunk. Group j of g serves heads j n/g ... (j + 1) n/g - 1.

    x: [s, b, n, p]; dt: [s, b, n], positive; a: [n], negative; b, c: [s, b, g, d]; segments: [b, s], between which no
    state passes; state: [b, n, p, d], before the first token; None: zeros. Returns y [s, b, n, p] in the dtype of x,
    and the state after the last token, [b, n, p, d], in fp32 or wider.
    """
    return _checkpointed_scan(partial(selective_chunk_scan, a=a), (x, dt, b, c), segments, state, min(chunk, len(x)))


def selective_chunk_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, segments: Tensor | None, state: Tensor | None, *, a: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Compute `selective_scan` of a span of tokens without checkpointing: inside chunks for all chunks at once, then
    the states from chunk to chunk. Shapes and results as of `selective_scan`. x: [s, b, n, p].
    """
    length, batch, heads, size = x.shape
    groups, format_ = b.shape[2], accumulation_dtype_of(x.dtype)
    per_group, dt = heads // groups, dt.to(format_)
    chunks = ChunkedScanDecays.from_log_decays(dt * a.to(format_), segments, chunk)
    # [b, m, g, r, q, p] is what heads see; a group's b and c are multiplied once for all its heads.
    inputs = reshape_into_chunks((x.to(format_) * dt[..., None]).unflatten(2, (groups, per_group)), chunk).permute(
        0, 1, 3, 4, 2, 5
    )
    keys, queries = (reshape_into_chunks(t.to(format_), chunk).transpose(2, 3) for t in (b, c))  # [b, m, g, q, d]
    grouped = (groups, per_group)
    weights = (queries @ keys.transpose(-1, -2))[:, :, :, None] * chunks.decay_between().unflatten(2, grouped)
    inside = weights @ inputs
    fading = inputs * chunks.decay_to_end().unflatten(2, grouped)[..., None]
    made = keys[:, :, :, None].transpose(-1, -2) @ fading  # [b, m, g, r, d, p]: what each chunk adds to the state
    carried = _states_before_each_chunk(
        made, chunks.chunk_decay().unflatten(2, grouped)[..., None, None], _group_state_heads(state, grouped, format_)
    )
    reading = (queries[:, :, :, None] @ carried[:, :-1]) * chunks.decay_from_start().unflatten(2, grouped)[..., None]
    y = _flatten_scan_chunks(inside + reading)[:length]
    last = carried[:, -1].flatten(1, 2).transpose(-1, -2).contiguous()  # a view would keep the states before all chunks
    return y.reshape(length, batch, heads, size).to(x.dtype), last


def selective_scan_from_chunk_scan(span: Span) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `selective_scan` computed by `span`, a compiled `selective_chunk_scan`. x: [s, b, n, p]."""

    def scan(
        x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, segments: Tensor | None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `selective_scan`."""
        return _checkpointed_scan(partial(span, a=a), (x, dt, b, c), segments, state, min(CHUNK, len(x)))

    return scan


def delta_rule_scan_from_chunk_scan(span: Span) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `delta_rule_scan` computed by `span`, a compiled `delta_rule_chunk_scan`. v: [s, b, n, dv]."""

    def scan(*inputs: Tensor, segments: Tensor | None, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `delta_rule_scan`; inputs: q, k, v, g, beta."""
        return _checkpointed_scan(span, inputs, segments, state, min(CHUNK, len(inputs[0])))

    return scan


def total_decay(logs: Tensor, segments: Tensor | None) -> Tensor:
    """Return the decay of a state over a whole sequence: [b, n]; 0 if the sequence ends in another segment than it
    begins. logs: [s, b, n], logarithm of each token's decay; segments: [b, s] or None.
    """
    decay = _exp_of_log_decay(logs.sum(dim=0, dtype=torch.float64).to(logs.dtype))
    return decay if segments is None else decay * (segments[:, 0] == segments[:, -1]).to(decay.dtype)[:, None]


def initial_state_output(c: Tensor, logs: Tensor, state: Tensor, segments: Tensor | None) -> Tensor:
    """Return the part of the output of Mamba-2's scan that comes from the state before the first token: [s, b, n, p],
    in the dtype of the state.

    c: [s, b, g, d]; logs: [s, b, n], logarithm of each token's decay; state: [b, n, p, d], which reaches only the first
    segment of segments [b, s].
    """
    sums = logs.cumsum(dim=0, dtype=torch.float64).to(state.dtype)
    if segments is not None:
        sums = sums.masked_fill((segments != segments[:, :1]).t()[..., None], NEVER)
    grouped = state.unflatten(1, (c.shape[2], -1))
    read = torch.einsum("sbgd,bgrpd->sbgrp", c.to(state.dtype), grouped).flatten(2, 3)
    return read * _exp_of_log_decay(sums)[..., None]


def checkpoint_span_tokens(chunk: int = CHUNK) -> int:
    """Return the number of tokens between two states that the backward pass keeps. chunk: tokens of a chunk."""
    return _SPAN * chunk


def _checkpointed_scan(
    scan: Callable[..., tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, ...],
    segments: Tensor | None,
    state: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Compute a scan over a sequence span by span, with activation checkpointing: the backward pass keeps the inputs
    and the state before each span. Returns output [s, ...] and the last state.

    scan: (*inputs of the span, segments, state, chunk=) -> (output, state after it). inputs: [s, b, ...] each.
    state: before the first token; None: zeros.
    """
    if torch.is_grad_enabled():
        scan = partial(checkpoint, scan, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
    outputs, span = [], checkpoint_span_tokens(chunk)
    # Cut all at once: the gradients of slices, each of which is as long as the whole, would be summed.
    for start, parts in zip(range(0, len(inputs[0]), span), zip(*(each.split(span) for each in inputs), strict=True)):
        own = None if segments is None else segments[:, start : start + span]
        if start and own is not None and segments is not None and state is not None:
            state = zero_state_of_new_segments(state, own, segments[:, start - 1])
        output, state = scan(*parts, own, state, chunk=chunk)
        outputs.append(output)
    assert state is not None, "a sequence has a token"
    return torch.cat(outputs), state


def zero_state_of_new_segments(state: Tensor, segments: Tensor, before: Tensor) -> Tensor:
    """Return the state [b, ...] where the sequence continues the segment before it, else zeros. segments: [b, s] of the
    sequence; before: [b], segment of the token before it.
    """
    return state * (segments[:, 0] == before).to(state.dtype)[:, None, None, None]


def _flatten_scan_chunks(chunks: Tensor) -> Tensor:
    """Undo the split into chunks: [b, m, g, r, q, p] to [m * q, b, g, r, p]."""
    return chunks.permute(1, 4, 0, 2, 3, 5).flatten(0, 1)


def _group_state_heads(state: Tensor | None, grouped: tuple[int, int], format_: torch.dtype) -> Tensor | None:
    """Reshape a state [b, n, p, d] to [b, g, r, d, p] in this dtype; None stays None. grouped: (g, r)."""
    return None if state is None else state.to(format_).unflatten(1, grouped).transpose(-1, -2)


def _states_before_each_chunk(made: Tensor, across: Tensor, state: Tensor | None) -> Tensor:
    """Return the state before each chunk, and after the last: [b, m + 1, ...]. made: [b, m, ...], what each chunk adds;
    across: decay over each chunk; state: before the first chunk; None: zeros.
    """
    now = torch.zeros_like(made[:, 0]) if state is None else state
    states = [now]
    for own, decay in zip(made.unbind(1), across.unbind(1), strict=True):
        now = now * decay + own
        states.append(now)
    return torch.stack(states, dim=1)


def selective_scan_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one token of Mamba-2's scan. x: [b, n, p]; dt: [b, n]; a: [n]; b, c: [b, g, d]; state: [b, n, p, d], not
    changed.

    Returns y [b, n, p] in the dtype of x, and the new state.
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
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule over a sequence, chunk by chunk. Key head j of g serves value heads j n/g ... (j +
    1) n/g - 1.

    q, k: [s, b, g, dk], q already scaled; v: [s, b, n, dv]; g: [s, b, n], logarithms of decays; beta: [s, b, n];
    segments: [b, s], between which no state passes; state: [b, n, dk, dv], before the first token; None: zeros. Returns
    o [s, b, n, dv] in the dtype of v, and the state after the last token, in fp32 or wider.
    """
    return _checkpointed_scan(delta_rule_chunk_scan, (q, k, v, g, beta), segments, state, min(chunk, len(v)))


def delta_rule_chunk_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Tensor | None,
    state: Tensor | None,
    *,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule_scan` of a span of tokens without checkpointing: inside chunks for all chunks at once, then
    the states from chunk to chunk. Shapes and results as of `delta_rule_scan`. v: [s, b, n, dv].
    """
    length, batch, heads, size = v.shape
    groups, format_, key_size = k.shape[2], accumulation_dtype_of(v.dtype), k.shape[3]
    grouped = (groups, heads // groups)
    chunks = ChunkedScanDecays.from_log_decays(g.to(format_), segments, chunk)
    # queries, keys: [b, m, g, 1, q, dk]; values: [b, m, g, r, q, dv]
    queries, keys = (reshape_into_chunks(t.to(format_), chunk).transpose(2, 3)[:, :, :, None] for t in (q, k))
    values, rate = (
        reshape_into_chunks(t.to(format_).unflatten(2, grouped), chunk).permute(0, 1, 3, 4, 2, 5)
        for t in (v, beta[..., None])
    )
    rate = rate.contiguous()  # products take the order in memory of their first factor; the solver would copy any other
    between = chunks.decay_between().unflatten(2, grouped)
    from_start = chunks.decay_from_start().unflatten(2, grouped)[..., None]
    # What a token writes depends on what the earlier ones of its chunk wrote: a triangular system. Decays multiply along any way from a token to a
    # later one, so that they are left out of the system and multiplied into its inverse.
    system = rate * (keys @ keys.transpose(-1, -2))  # of which only what is below the diagonal is read
    if segments is not None:
        system = system.masked_fill(~chunks.causal_segment_mask()[:, :, :, None], 0)
    one = torch.eye(system.shape[-1], dtype=format_, device=v.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
    reads, writes = from_start * (inverse @ (rate * keys)), (inverse * between) @ (rate * values)
    inside = (queries @ keys.transpose(-1, -2)) * between
    requested = queries * from_start
    fading = (keys * chunks.decay_to_end().unflatten(2, grouped)[..., None]).transpose(-1, -2)
    across = chunks.chunk_decay().unflatten(2, grouped)[..., None, None]
    now = values.new_zeros((batch, heads, key_size, size)) if state is None else state.to(format_)
    now = now.unflatten(1, grouped)
    outputs = []
    chunked = (each.unbind(1) for each in (writes, reads, requested, inside, across, fading))
    for write, read, request, within, decay, fade in zip(*chunked, strict=True):
        written = write - read @ now
        outputs.append(request @ now + within @ written)
        now = now * decay + fade @ written
    o = _flatten_scan_chunks(torch.stack(outputs, dim=1))[:length]
    return o.reshape(length, batch, heads, size).to(v.dtype), now.flatten(1, 2)


def delta_rule_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one token of the gated delta rule. q, k: [b, g, dk]; v: [b, n, dv]; g, beta: [b, n]; state: [b, n, dk,
    dv], not changed.

    Returns o [b, n, dv] in the dtype of v, and the new state.
    """
    format_, repeats = state.dtype, v.shape[1] // k.shape[1]
    query, key = (t.to(format_).repeat_interleave(repeats, dim=1) for t in (q, k))
    state = state * g.to(format_).exp()[..., None, None]
    written = beta.to(format_)[..., None] * (v.to(format_) - (key[:, :, None] @ state)[:, :, 0])
    state = state + key[..., None] * written[:, :, None]
    return (query[:, :, None] @ state)[:, :, 0].to(v.dtype), state
