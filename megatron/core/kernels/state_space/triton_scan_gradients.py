"""Backward passes of the scans in Triton: a program takes a head and some of its channels through a span of chunks, from the last to the first.

The forward pass keeps the state before each span. From it the states before all chunks of a span are computed again, by the same kernel; then a program
walks back with the gradient of the state; inside a chunk the products of matrices of the forward pass are differentiated (Dao and Gu, 2024, arXiv 2405.21060,
section 6; Yang et al., 2024, arXiv 2412.06464, section 3). Each span is a launch of its own: gradients that are summed over heads and channels, those of
keys and queries, are kept apart for one span only.

Decays: with s the sums of logarithms since the beginning of a chunk, every weight between two of its tokens is exp(s_i - s_j) times what does not
depend on decays, so that its gradient times itself is added to that of s_i and taken from that of s_j. All sums are in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.state_space.triton_scan_forward import (
    chunk_decays,
    dot_precision,
    invert_delta_rule_systems,
    launch_delta_rule_scan,
    launch_selective_scan,
    load_masked_rows,
    padded_block_width,
    store_masked_rows,
    strictly_causal_segment_mask,
)
from megatron.core.kernels.triton import cdiv

_CHUNK, _COLUMNS, _WARPS = 16, 32, 8  # tokens of a chunk, for which registers are enough; channels of a program


@triton.jit
def _log_decay_gradient(between: tl.tensor, reads: tl.tensor, gives: tl.tensor, across: tl.tensor) -> tl.tensor:
    """Return the gradient of the logarithm of each token's decay in a chunk, [q].

    Each argument is a decay-weighted term times its own gradient: between [q (later), q]: from token to token; reads
    [q]: from the state before the chunk to a token; gives [q]: from a token to the chunk's end; across []: over the
    whole chunk.
    """
    sums = tl.sum(between, 1) - tl.sum(between, 0) + reads - gives
    return tl.cumsum(sums, 0, reverse=True) + tl.sum(gives, 0) + across


@triton.jit
def _selective_backward_kernel(
    x: tl.tensor, dt: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, dy: tl.tensor, segments: tl.tensor,
    states: tl.tensor, d_state: tl.tensor, dx: tl.tensor, d_dt: tl.tensor, d_logs: tl.tensor, d_b: tl.tensor,
    d_c: tl.tensor, begin: tl.tensor, chunks: tl.tensor, length: tl.tensor, batch: tl.tensor, heads: tl.tensor,
    per_group: tl.tensor,
    SIZE: tl.constexpr, STATE: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: backward pass of Mamba-2's scan over one span of chunks, last chunk first, for one head and COLUMNS of
    its channels.

    states: those before the `chunks` chunks. d_state: gradient of the state behind the span, replaced by that before
    it; [batch, heads, SIZE, STATE]. Receives dx like x; d_dt, d_logs (gradient of the log decays): [splits, length,
    batch, heads]; d_b, d_c: [splits, tokens of the span, batch, heads, STATE].
    """
    one, head, split = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1).to(tl.int64)
    columns, deep, places = split * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDE), tl.arange(0, CHUNK)
    square = tl.program_id(0).to(tl.int64) * SIZE * STATE + columns[None, :] * STATE + deep[:, None]
    held = (deep < STATE)[:, None] & (columns < SIZE)[None, :]
    decay = tl.load(a + head).to(tl.float32)
    after = tl.load(d_state + square, mask=held, other=0.0)
    for back in range(chunks):
        number = chunks - 1 - back
        start = begin + number * CHUNK
        tokens, valid = (start + places).to(tl.int64) * batch + one, start + places < length
        rows, grouped = tokens * heads + head, tokens * (heads // per_group) + head // per_group
        steps = tl.load(dt + rows, mask=valid, other=0.0).to(tl.float32)
        keys, queries = (
            load_masked_rows(b, grouped, valid, deep, STATE),
            load_masked_rows(c, grouped, valid, deep, STATE),
        )
        inputs, dys = load_masked_rows(x, rows, valid, columns, SIZE), load_masked_rows(dy, rows, valid, columns, SIZE)
        state = tl.load(states + number * tl.num_programs(0).to(tl.int64) * SIZE * STATE + square, mask=held, other=0.0)
        between, from_start, to_end, across = chunk_decays(steps * decay, segments, one * length, start, length, CHUNK)
        values = inputs * steps[:, None]
        weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
        d_weights = tl.dot(dys, tl.trans(values), input_precision=PRECISION)
        d_values = tl.dot(tl.trans(weights), dys, input_precision=PRECISION)
        d_values += tl.dot(keys, after, input_precision=PRECISION) * to_end[:, None]
        d_queries = tl.dot(dys, tl.trans(state), input_precision=PRECISION) * from_start[:, None]
        d_keys = tl.dot(values, tl.trans(after), input_precision=PRECISION) * to_end[:, None]
        reads, gives = tl.sum(queries * d_queries, 1), tl.sum(keys * d_keys, 1)
        logs = _log_decay_gradient(weights * d_weights, reads, gives, tl.sum(state * after) * across)
        d_weights *= between
        d_queries += tl.dot(d_weights, keys, input_precision=PRECISION)
        d_keys += tl.dot(tl.trans(d_weights), queries, input_precision=PRECISION)
        after *= across
        after += tl.dot(tl.trans(queries * from_start[:, None]), dys, input_precision=PRECISION)
        store_masked_rows(dx, rows, valid, columns, d_values * steps[:, None], SIZE)
        tl.store(d_dt + split * length * batch * heads + rows, tl.sum(inputs * d_values, 1), mask=valid)
        tl.store(d_logs + split * length * batch * heads + rows, logs, mask=valid)
        own = ((split * chunks + number) * CHUNK + places) * tl.num_programs(0) + tl.program_id(0)
        store_masked_rows(d_b, own, places >= 0, deep, d_keys, STATE)
        store_masked_rows(d_c, own, places >= 0, deep, d_queries, STATE)
    tl.store(d_state + square, after, mask=held)


@triton.jit
def _delta_rule_backward_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, g: tl.tensor, beta: tl.tensor, dy: tl.tensor, inverse: tl.tensor,
    segments: tl.tensor, states: tl.tensor, d_state: tl.tensor, dv: tl.tensor, d_g: tl.tensor, d_beta: tl.tensor,
    d_q: tl.tensor, d_k: tl.tensor, begin: tl.tensor, chunks: tl.tensor, length: tl.tensor, batch: tl.tensor,
    heads: tl.tensor, per_group: tl.tensor,
    KEY: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: backward pass of the delta rule's scan over one span of chunks, last chunk first, for one head and
    COLUMNS of its channels.

    states: those before the `chunks` chunks; inverse: [batch, heads, chunks, CHUNK, CHUNK]. d_state: gradient of the
    state behind the span, replaced by that before it; [batch, heads, KEY, SIZE]. Receives dv like v; d_g,
    d_beta: [splits, length, batch, heads]; d_q, d_k: [splits, tokens of the span, batch, heads, KEY].
    """
    one, head, split = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1).to(tl.int64)
    columns, deep, places = split * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDE), tl.arange(0, CHUNK)
    square = tl.program_id(0).to(tl.int64) * SIZE * KEY + deep[:, None] * SIZE + columns[None, :]
    held = (deep < KEY)[:, None] & (columns < SIZE)[None, :]
    inverse += tl.program_id(0).to(tl.int64) * chunks * CHUNK * CHUNK
    after = tl.load(d_state + square, mask=held, other=0.0)
    for back in range(chunks):
        number = chunks - 1 - back
        start = begin + number * CHUNK
        tokens, valid = (start + places).to(tl.int64) * batch + one, start + places < length
        rows, grouped = tokens * heads + head, tokens * (heads // per_group) + head // per_group
        logs = tl.load(g + rows, mask=valid, other=0.0).to(tl.float32)
        rate = tl.load(beta + rows, mask=valid, other=0.0).to(tl.float32)[:, None]
        keys, queries = load_masked_rows(k, grouped, valid, deep, KEY), load_masked_rows(q, grouped, valid, deep, KEY)
        inputs, dys = load_masked_rows(v, rows, valid, columns, SIZE), load_masked_rows(dy, rows, valid, columns, SIZE)
        system = load_masked_rows(inverse, number * CHUNK + places, places >= 0, places, CHUNK)
        state = tl.load(states + number * tl.num_programs(0).to(tl.int64) * SIZE * KEY + square, mask=held, other=0.0)
        between, from_start, to_end, across = chunk_decays(logs, segments, one * length, start, length, CHUNK)
        reads = tl.dot(system, keys * rate, input_precision=PRECISION) * from_start[:, None]
        written = tl.dot(system * between, inputs * rate, input_precision=PRECISION)
        written -= tl.dot(reads, state, input_precision=PRECISION)
        # The outputs and the state after the chunk, of what is written and of what is read.
        products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
        d_weights = tl.dot(dys, tl.trans(written), input_precision=PRECISION)
        d_written = tl.dot(tl.trans(weights), dys, input_precision=PRECISION)
        d_written += tl.dot(keys, after, input_precision=PRECISION) * to_end[:, None]
        d_queries = tl.dot(dys, tl.trans(state), input_precision=PRECISION) * from_start[:, None]
        d_keys = tl.dot(written, tl.trans(after), input_precision=PRECISION) * to_end[:, None]
        gives, requested = tl.sum(keys * d_keys, 1), tl.sum(queries * d_queries, 1)
        kept = tl.sum(state * after) * across
        after = after * across - tl.dot(tl.trans(reads), d_written, input_precision=PRECISION)
        after += tl.dot(tl.trans(queries * from_start[:, None]), dys, input_precision=PRECISION)
        # What is written, of the inverse, keys and values.
        d_reads = -tl.dot(d_written, tl.trans(state), input_precision=PRECISION)
        requested += tl.sum(reads * d_reads, 1)
        d_reads *= from_start[:, None]
        d_system = tl.dot(d_written, tl.trans(inputs * rate), input_precision=PRECISION) * between
        d_g_between = weights * d_weights + system * d_system
        d_weights *= between
        d_queries += tl.dot(d_weights, keys, input_precision=PRECISION)
        d_keys += tl.dot(tl.trans(d_weights), queries, input_precision=PRECISION)
        d_system += tl.dot(d_reads, tl.trans(keys * rate), input_precision=PRECISION)
        d_inputs = tl.dot(tl.trans(system * between), d_written, input_precision=PRECISION)
        d_reads = tl.dot(tl.trans(system), d_reads, input_precision=PRECISION)
        # The system N of the inverse: dN = -N^-T dN^-1 N^-T, below the diagonal.
        d_system = tl.dot(tl.trans(system), d_system, input_precision=PRECISION)
        d_system = -tl.dot(d_system, tl.trans(system), input_precision=PRECISION)
        d_system = tl.where(strictly_causal_segment_mask(segments, one * length, start, length, CHUNK), d_system, 0.0)
        d_rate = tl.sum(inputs * d_inputs, 1) + tl.sum(keys * d_reads, 1) + tl.sum(products * d_system, 1)
        d_system *= rate
        d_keys += d_reads * rate + tl.dot(d_system, keys, input_precision=PRECISION)
        d_keys += tl.dot(tl.trans(d_system), keys, input_precision=PRECISION)
        store_masked_rows(dv, rows, valid, columns, d_inputs * rate, SIZE)
        tl.store(d_beta + split * length * batch * heads + rows, d_rate, mask=valid)
        logs = _log_decay_gradient(d_g_between, requested, gives, kept)
        tl.store(d_g + split * length * batch * heads + rows, logs, mask=valid)
        own = ((split * chunks + number) * CHUNK + places) * tl.num_programs(0) + tl.program_id(0)
        store_masked_rows(d_q, own, places >= 0, deep, d_queries, KEY)
        store_masked_rows(d_k, own, places >= 0, deep, d_keys, KEY)
    tl.store(d_state + square, after, mask=held)


def selective_scan_gradients(
    inputs: Sequence[Tensor], a: Tensor, segments: Tensor | None, states: Tensor, span: int, dy: Tensor, d_state: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the gradients of the state before the first token, of a, and of the inputs (x, dt, b, c).

    states: [spans, b, n, p, d], before every `span` tokens; dy: [s, b, n, p], gradient of the output; d_state: [b, n,
    p, d], gradient of the last state.
    """
    x, dt, b, c = inputs
    length, batch, heads, size = x.shape
    deep, columns = b.shape[3], min(_COLUMNS, padded_block_width(size))
    splits, dx, d_b, d_c = cdiv(size, columns), torch.empty_like(x), torch.empty_like(b), torch.empty_like(c)
    d_dt, d_logs = states.new_empty((2, splits, length, batch, heads))
    d_state = d_state.float().contiguous().clone()
    for number in reversed(range(len(states))):
        begin, end = number * span, min((number + 1) * span, length)
        chunks = cdiv(end - begin, _CHUNK)
        tokens = range(begin, end)
        _, inside = launch_selective_scan(inputs, a, segments, states[number], chunk=_CHUNK, span=1, tokens=tokens)
        parts = states.new_empty((2, splits, chunks * _CHUNK, batch, heads, deep))
        _selective_backward_kernel[(batch * heads, splits)](
            x, dt, a, b, c, dy, segments, inside, d_state, dx, d_dt, d_logs, *parts,
            begin, chunks, length, batch, heads, heads // b.shape[2],
            SIZE=size, STATE=deep, WIDE=padded_block_width(deep), CHUNK=_CHUNK, COLUMNS=columns, PRECISION=dot_precision(x),
            num_warps=_WARPS, num_stages=1,
        )  # fmt: skip
        _sum_key_query_gradients(parts, (d_b, d_c), begin, end)
    d_log = d_logs.sum(0)
    return d_state, (d_log * dt).sum((0, 1)).to(a.dtype), (dx, (d_dt.sum(0) + d_log * a).to(dt.dtype), d_b, d_c)


def delta_rule_gradients(
    inputs: Sequence[Tensor], a: None, segments: Tensor | None, states: Tensor, span: int, dy: Tensor, d_state: Tensor
) -> tuple[Tensor, None, tuple[Tensor, ...]]:
    """Return the gradients of the state before the first token, None, and the gradients of the inputs (q, k, v, g,
    beta). a: None, as the delta rule has none.

    states: [spans, b, n, dk, dv], before every `span` tokens; dy: [s, b, n, dv], gradient of the output;
    d_state: [b, n, dk, dv], gradient of the last state.
    """
    q, k, v, g, beta = inputs
    length, batch, heads, size = v.shape
    deep, columns = k.shape[3], min(_COLUMNS, padded_block_width(size))
    splits, dv, d_q, d_k = cdiv(size, columns), torch.empty_like(v), torch.empty_like(q), torch.empty_like(k)
    d_g, d_beta = states.new_empty((2, splits, length, batch, heads))
    d_state = d_state.float().contiguous().clone()
    for number in reversed(range(len(states))):
        begin, end = number * span, min((number + 1) * span, length)
        chunks = cdiv(end - begin, _CHUNK)
        parts = states.new_empty((2, splits, chunks * _CHUNK, batch, heads, deep))
        inverse = invert_delta_rule_systems(k, beta, segments, _CHUNK, begin, end)
        _, inside = launch_delta_rule_scan(
            inputs, inverse, segments, states[number], chunk=_CHUNK, span=1, tokens=range(begin, end)
        )
        _delta_rule_backward_kernel[(batch * heads, splits)](
            q, k, v, g, beta, dy, inverse, segments, inside, d_state, dv, d_g, d_beta, *parts,
            begin, chunks, length, batch, heads, heads // k.shape[2],
            KEY=deep, SIZE=size, WIDE=padded_block_width(deep), CHUNK=_CHUNK, COLUMNS=columns, PRECISION=dot_precision(v),
            num_warps=_WARPS, num_stages=1,
        )  # fmt: skip
        _sum_key_query_gradients(parts, (d_q, d_k), begin, end)
    return d_state, None, (d_q, d_k, dv, d_g.sum(0).to(g.dtype), d_beta.sum(0).to(beta.dtype))


def _sum_key_query_gradients(parts: Tensor, totals: tuple[Tensor, Tensor], begin: int, end: int) -> None:
    """Sum the gradients of keys and queries, as programs computed them, over splits of channels and over the heads of a
    group, into tokens `begin` to `end` of the totals. parts: [2, splits, tokens, b, n, d]; totals: two of [s, b, g, d].
    """
    for part, total in zip(parts, totals, strict=True):
        total[begin:end] = part[:, : end - begin].unflatten(3, (total.shape[2], -1)).sum((0, 4))
