"""Scans over a state in Triton, forward: a program walks along a sequence with a head's state in its registers, a chunk of tokens at a time.

    selective_scan     a program: a head and some of its channels
    delta_rule_scan    first the inverse of every chunk's triangular system, all chunks at once; then as above

Decays multiply along any way from a token to a later one, so that they are left out of the system and multiplied into its inverse. The kernels
write the state before every few chunks; from there the backward pass (`triton_scan_gradients`) has them write the states before all chunks of a span.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.triton import cdiv, round_up_to_power_of_2

_COLUMNS = 32  # channels of a program


@triton.jit
def load_masked_rows(
    values: tl.tensor, rows: tl.tensor, valid: tl.tensor, columns: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Load values[rows, columns] of a tensor [..., SIZE] in fp32, [rows, columns]; 0 for rows that are not valid and
    columns from SIZE on.
    """
    mask = valid[:, None] & (columns < SIZE)[None, :]
    return tl.load(values + rows[:, None] * SIZE + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_masked_rows(
    values: tl.tensor, rows: tl.tensor, valid: tl.tensor, columns: tl.tensor, given: tl.tensor, SIZE: tl.constexpr
) -> None:
    """Write `given` [rows, columns] to values[rows, columns] of a tensor [..., SIZE], in its dtype; rows that are not
    valid and columns from SIZE on are left out.
    """
    mask = valid[:, None] & (columns < SIZE)[None, :]
    tl.store(values + rows[:, None] * SIZE + columns[None, :], given.to(values.dtype.element_ty), mask=mask)


@triton.jit
def chunk_decays(
    logs: tl.tensor, segments: tl.tensor, row: tl.tensor, start: tl.tensor, length: tl.tensor, CHUNK: tl.constexpr
) -> tl.tensor:
    """Return the decays of the state within a chunk of q tokens that begins at `start`: from each token to each later
    one [q (later), q], from before the chunk to each token [q], from each token to the chunk's end [q], and over the
    whole chunk [].

    logs: [q], logarithm of each token's decay. segments: [b, length] or None, between which decays are 0; row: offset
    of this sequence in it.
    """
    places = tl.arange(0, CHUNK)
    sums = tl.cumsum(logs, 0)
    total = tl.sum(logs, 0)
    seen = places[:, None] >= places[None, :]
    from_start, to_end, across = sums, total - sums, total
    if segments is not None:
        last = tl.minimum(start + CHUNK, length) - 1
        own = tl.load(segments + row + tl.minimum(start + places, length - 1))
        before = tl.load(segments + row + tl.maximum(start - 1, 0))
        end = tl.load(segments + row + last)
        seen = seen & (own[:, None] == own[None, :])
        from_start = tl.where(own == before, from_start, float("-inf"))
        to_end = tl.where(own == end, to_end, float("-inf"))
        across = tl.where(before == end, across, float("-inf"))
    between = tl.exp(tl.where(seen, sums[:, None] - sums[None, :], float("-inf")))
    return between, tl.exp(from_start), tl.exp(to_end), tl.exp(across)


@triton.jit
def strictly_causal_segment_mask(
    segments: tl.tensor, row: tl.tensor, start: tl.tensor, length: tl.tensor, CHUNK: tl.constexpr
) -> tl.tensor:
    """Return whether a token reads what an earlier token of its chunk, of the same segment, wrote to the state: bool [q
    (later), q].
    """
    places = tl.arange(0, CHUNK)
    seen = places[:, None] > places[None, :]
    if segments is not None:
        own = tl.load(segments + row + tl.minimum(start + places, length - 1))
        seen = seen & (own[:, None] == own[None, :])
    return seen


@triton.jit
def _invert_chunk_systems_kernel(
    k: tl.tensor, beta: tl.tensor, segments: tl.tensor, inverse: tl.tensor, begin: tl.tensor, length: tl.tensor,
    batch: tl.tensor, heads: tl.tensor, per_group: tl.tensor,
    KEY: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: invert the delta rule's system of one chunk, the identity plus beta_i k_i k_j for earlier tokens j, by
    forward substitution. inverse: [batch, heads, chunks, CHUNK, CHUNK].
    """
    one, head, start = tl.program_id(0) // heads, tl.program_id(0) % heads, begin + tl.program_id(1) * CHUNK
    places, deep = tl.arange(0, CHUNK), tl.arange(0, WIDE)
    tokens, valid = (start + places).to(tl.int64) * batch + one, start + places < length
    keys = load_masked_rows(k, tokens * (heads // per_group) + head // per_group, valid, deep, KEY)
    rate = tl.load(beta + tokens * heads + head, mask=valid, other=0.0).to(tl.float32)
    system = rate[:, None] * tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    system = tl.where(strictly_causal_segment_mask(segments, one * length, start, length, CHUNK), system, 0.0)
    result = tl.where(places[:, None] == places[None, :], 1.0, 0.0)
    for row in range(1, CHUNK):
        at = (places == row)[:, None]
        given = tl.sum(tl.where(at, system, 0.0), 0)
        result -= tl.where(at, tl.sum(given[:, None] * result, 0)[None, :], 0.0)
    corner = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * CHUNK * CHUNK
    tl.store(inverse + corner + places[:, None] * CHUNK + places[None, :], result)


def invert_delta_rule_systems(
    k: Tensor, beta: Tensor, segments: Tensor | None, chunk: int, begin: int = 0, end: int | None = None
) -> Tensor:
    """Return the inverses of the delta rule's triangular systems for the chunks from token `begin` to `end` (None: the
    last): fp32 [b, n, chunks, chunk, chunk].

    k: [s, b, g, dk]; beta: [s, b, n]; segments: [b, s] or None; chunk: tokens of a chunk.
    """
    length, batch, heads = beta.shape
    chunks, deep = cdiv((length if end is None else end) - begin, chunk), k.shape[3]
    inverse = k.new_empty((batch, heads, chunks, chunk, chunk), dtype=torch.float32)
    _invert_chunk_systems_kernel[(batch * heads, chunks)](
        k, beta, segments, inverse, begin, length, batch, heads, heads // k.shape[2],
        KEY=deep, WIDE=padded_block_width(deep), CHUNK=chunk, PRECISION="ieee", num_warps=16,
    )  # fmt: skip
    return inverse


def padded_block_width(size: int) -> int:
    """Return `size` rounded up to a power of two of at least 16, as matrix products of Triton need it."""
    return round_up_to_power_of_2(max(16, size))


def dot_precision(x: Tensor) -> str:
    """Return the input precision of Triton's matrix products: "ieee" if x (any shape) is fp32, else "tf32"."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit
def _selective_scan_kernel(
    x: tl.tensor, dt: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, segments: tl.tensor, first: tl.tensor,
    y: tl.tensor, states: tl.tensor, begin: tl.tensor, end: tl.tensor, length: tl.tensor, batch: tl.tensor,
    heads: tl.tensor, per_group: tl.tensor,
    SIZE: tl.constexpr, STATE: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: Mamba-2's scan along tokens `begin` to `end` of one sequence for one head and COLUMNS of its channels.

    x, y: [length, batch, heads, SIZE]; y may be None. first: state before token `begin`, or None. states: [spans + 1,
    batch, heads, SIZE, STATE], receives the state before every SPAN chunks, and the last state.
    """
    one, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    columns, deep, places = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDE), tl.arange(0, CHUNK)
    square = tl.program_id(0).to(tl.int64) * SIZE * STATE + columns[None, :] * STATE + deep[:, None]
    held = (deep < STATE)[:, None] & (columns < SIZE)[None, :]
    step = tl.num_programs(0).to(tl.int64) * SIZE * STATE
    state = tl.zeros((WIDE, COLUMNS), dtype=tl.float32)
    if first is not None:
        state = tl.load(first + square, mask=held, other=0.0).to(tl.float32)
    decay = tl.load(a + head).to(tl.float32)
    for start in range(begin, end, CHUNK):
        if (start - begin) % (SPAN * CHUNK) == 0:
            tl.store(states + ((start - begin) // (SPAN * CHUNK)) * step + square, state, mask=held)
        tokens, valid = (start + places).to(tl.int64) * batch + one, start + places < length
        rows, grouped = tokens * heads + head, tokens * (heads // per_group) + head // per_group
        steps = tl.load(dt + rows, mask=valid, other=0.0).to(tl.float32)
        keys = load_masked_rows(b, grouped, valid, deep, STATE)
        values = load_masked_rows(x, rows, valid, columns, SIZE) * steps[:, None]
        between, from_start, to_end, across = chunk_decays(steps * decay, segments, one * length, start, length, CHUNK)
        if y is not None:
            queries = load_masked_rows(c, grouped, valid, deep, STATE)
            weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
            result = tl.dot(weights, values, input_precision=PRECISION)
            result += tl.dot(queries, state, input_precision=PRECISION) * from_start[:, None]
            store_masked_rows(y, rows, valid, columns, result, SIZE)
        made = tl.dot(tl.trans(keys * to_end[:, None]), values, input_precision=PRECISION)
        state = state * across + made
    tl.store(states + tl.cdiv(end - begin, SPAN * CHUNK) * step + square, state, mask=held)


@triton.jit
def _delta_rule_scan_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, g: tl.tensor, beta: tl.tensor, inverse: tl.tensor, segments: tl.tensor,
    first: tl.tensor, y: tl.tensor, states: tl.tensor, begin: tl.tensor, end: tl.tensor, length: tl.tensor,
    batch: tl.tensor, heads: tl.tensor, per_group: tl.tensor,
    KEY: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: the gated delta rule along tokens `begin` to `end` of one sequence for one head and COLUMNS of its channels.

    v, y: [length, batch, heads, SIZE]; y may be None. inverse: inverses of the chunks' systems. first: state before
    token `begin`, or None. states: [spans + 1, batch, heads, KEY, SIZE], receives the state before every SPAN chunks,
    and the last state.
    """
    one, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    columns, deep, places = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDE), tl.arange(0, CHUNK)
    square = tl.program_id(0).to(tl.int64) * SIZE * KEY + deep[:, None] * SIZE + columns[None, :]
    held = (deep < KEY)[:, None] & (columns < SIZE)[None, :]
    step = tl.num_programs(0).to(tl.int64) * SIZE * KEY
    state = tl.zeros((WIDE, COLUMNS), dtype=tl.float32)
    if first is not None:
        state = tl.load(first + square, mask=held, other=0.0).to(tl.float32)
    inverse += tl.program_id(0).to(tl.int64) * tl.cdiv(end - begin, CHUNK) * CHUNK * CHUNK
    for start in range(begin, end, CHUNK):
        if (start - begin) % (SPAN * CHUNK) == 0:
            tl.store(states + ((start - begin) // (SPAN * CHUNK)) * step + square, state, mask=held)
        tokens, valid = (start + places).to(tl.int64) * batch + one, start + places < length
        rows, grouped = tokens * heads + head, tokens * (heads // per_group) + head // per_group
        logs = tl.load(g + rows, mask=valid, other=0.0).to(tl.float32)
        rate = tl.load(beta + rows, mask=valid, other=0.0).to(tl.float32)[:, None]
        keys = load_masked_rows(k, grouped, valid, deep, KEY)
        values = load_masked_rows(v, rows, valid, columns, SIZE) * rate
        system = load_masked_rows(inverse, start - begin + places, places >= 0, places, CHUNK)
        between, from_start, to_end, across = chunk_decays(logs, segments, one * length, start, length, CHUNK)
        reads = tl.dot(system, keys * rate, input_precision=PRECISION) * from_start[:, None]
        written = tl.dot(system * between, values, input_precision=PRECISION)
        written -= tl.dot(reads, state, input_precision=PRECISION)
        if y is not None:
            queries = load_masked_rows(q, grouped, valid, deep, KEY)
            weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
            result = tl.dot(queries * from_start[:, None], state, input_precision=PRECISION)
            result += tl.dot(weights, written, input_precision=PRECISION)
            store_masked_rows(y, rows, valid, columns, result, SIZE)
        state = state * across + tl.dot(tl.trans(keys * to_end[:, None]), written, input_precision=PRECISION)
    tl.store(states + tl.cdiv(end - begin, SPAN * CHUNK) * step + square, state, mask=held)


def launch_selective_scan(
    inputs: Sequence[Tensor],
    a: Tensor,
    segments: Tensor | None,
    first: Tensor | None,
    *,
    chunk: int,
    span: int,
    tokens: range | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Run Mamba-2's scan. Return y [s, b, n, p], and the states before every `span` chunks and after the last token,
    [spans + 1, b, n, p, d].

    inputs: x, dt, b, c. first: state before the first token. chunk: tokens of a chunk. tokens: only these, for their
    states; y is then None.
    """
    x, dt, b, c = inputs
    (length, batch, heads, size), deep = x.shape, b.shape[3]
    y, tokens = (torch.empty_like(x), range(length)) if tokens is None else (None, tokens)
    states = x.new_empty((cdiv(len(tokens), span * chunk) + 1, batch, heads, size, deep), dtype=torch.float32)
    columns = min(_COLUMNS, padded_block_width(size))
    _selective_scan_kernel[(batch * heads, cdiv(size, columns))](
        x, dt, a, b, c, segments, first, y, states, tokens.start, tokens.stop, length, batch, heads, heads // b.shape[2],
        SIZE=size, STATE=deep, WIDE=padded_block_width(deep), CHUNK=chunk, SPAN=span, COLUMNS=columns,
        PRECISION=dot_precision(x), num_warps=4, num_stages=1,
    )  # fmt: skip
    return y, states


def launch_delta_rule_scan(
    inputs: Sequence[Tensor],
    inverse: Tensor | None,
    segments: Tensor | None,
    first: Tensor | None,
    *,
    chunk: int,
    span: int,
    tokens: range | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Run the delta rule's scan. Return y [s, b, n, dv], and the states before every `span` chunks and after the last
    token, [spans + 1, b, n, dk, dv].

    inputs: q, k, v, g, beta. inverse: of the chunks' systems; None: it is computed. Others as of
    `launch_selective_scan`.
    """
    q, k, v, g, beta = inputs
    (length, batch, heads, size), deep = v.shape, k.shape[3]
    inverse = invert_delta_rule_systems(k, beta, segments, chunk) if inverse is None else inverse
    y, tokens = (torch.empty_like(v), range(length)) if tokens is None else (None, tokens)
    states = v.new_empty((cdiv(len(tokens), span * chunk) + 1, batch, heads, deep, size), dtype=torch.float32)
    columns = min(_COLUMNS, padded_block_width(size))
    _delta_rule_scan_kernel[(batch * heads, cdiv(size, columns))](
        q, k, v, g, beta, inverse, segments, first, y, states, tokens.start, tokens.stop, length, batch, heads,
        heads // k.shape[2], KEY=deep, SIZE=size, WIDE=padded_block_width(deep), CHUNK=chunk, SPAN=span, COLUMNS=columns,
        PRECISION=dot_precision(v), num_warps=4, num_stages=1,
    )  # fmt: skip
    return y, states
