"""What both passes of a Triton scan compute inside one chunk of tokens: rows of a tensor, decays, and the inverse of the delta rule's system."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.triton import cdiv, power_of_2_above


@triton.jit
def load_rows(
    values: tl.tensor, rows: tl.tensor, valid: tl.tensor, columns: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """values[rows, columns] of a tensor [..., SIZE] in fp32: [q, columns]; 0 for rows that are not valid and columns from SIZE on."""
    mask = valid[:, None] & (columns < SIZE)[None, :]
    return tl.load(values + rows[:, None] * SIZE + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(
    values: tl.tensor, rows: tl.tensor, valid: tl.tensor, columns: tl.tensor, given: tl.tensor, SIZE: tl.constexpr
) -> None:
    """Write `given` [q, columns] to values[rows, columns] of a tensor [..., SIZE], in its format."""
    mask = valid[:, None] & (columns < SIZE)[None, :]
    tl.store(values + rows[:, None] * SIZE + columns[None, :], given.to(values.dtype.element_ty), mask=mask)


@triton.jit
def chunk_decays(
    logs: tl.tensor, segments: tl.tensor, row: tl.tensor, start: tl.tensor, length: tl.tensor, CHUNK: tl.constexpr
) -> tl.tensor:
    """Of a chunk: decays between tokens [q, q], of the state before it until each token [q], of each token until its end [q], of it all.

    logs: [q], of each token's decay. segments: [b, length] or None; row: b's start in it.
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
def connected(
    segments: tl.tensor, row: tl.tensor, start: tl.tensor, length: tl.tensor, CHUNK: tl.constexpr
) -> tl.tensor:
    """Whether a token reads what an earlier one of its chunk wrote: [q (later), q]."""
    places = tl.arange(0, CHUNK)
    seen = places[:, None] > places[None, :]
    if segments is not None:
        own = tl.load(segments + row + tl.minimum(start + places, length - 1))
        seen = seen & (own[:, None] == own[None, :])
    return seen


@triton.jit
def _invert_chunk_systems(
    k: tl.tensor,
    beta: tl.tensor,
    segments: tl.tensor,
    inverse: tl.tensor,
    begin: tl.tensor,
    length: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    per_group: tl.tensor,
    KEY: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """(1 + the part below the diagonal of beta_i k_i k_j)^-1 of each chunk, by forward substitution. inverse: [batch, heads, chunks, CHUNK, CHUNK]."""
    one, head, start = tl.program_id(0) // heads, tl.program_id(0) % heads, begin + tl.program_id(1) * CHUNK
    places, deep = tl.arange(0, CHUNK), tl.arange(0, WIDE)
    tokens, valid = (start + places).to(tl.int64) * batch + one, start + places < length
    keys = load_rows(k, tokens * (heads // per_group) + head // per_group, valid, deep, KEY)
    rate = tl.load(beta + tokens * heads + head, mask=valid, other=0.0).to(tl.float32)
    system = rate[:, None] * tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    system = tl.where(connected(segments, one * length, start, length, CHUNK), system, 0.0)
    result = tl.where(places[:, None] == places[None, :], 1.0, 0.0)
    for row in range(1, CHUNK):
        at = (places == row)[:, None]
        given = tl.sum(tl.where(at, system, 0.0), 0)
        result -= tl.where(at, tl.sum(given[:, None] * result, 0)[None, :], 0.0)
    corner = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * CHUNK * CHUNK
    tl.store(inverse + corner + places[:, None] * CHUNK + places[None, :], result)


def invert_systems(
    k: Tensor, beta: Tensor, segments: Tensor | None, chunk: int, begin: int = 0, end: int | None = None
) -> Tensor:
    """The inverses of the delta rule's systems for the chunks from token `begin` to `end`: [b, n, chunks, chunk, chunk] in fp32.

    k: [s, b, g, dk]; beta: [s, b, n].
    """
    length, batch, heads = beta.shape
    chunks, deep = cdiv((length if end is None else end) - begin, chunk), k.shape[3]
    inverse = k.new_empty((batch, heads, chunks, chunk, chunk), dtype=torch.float32)
    _invert_chunk_systems[(batch * heads, chunks)](
        k, beta, segments, inverse, begin, length, batch, heads, heads // k.shape[2],
        KEY=deep, WIDE=state_width(deep), CHUNK=chunk, PRECISION="ieee", num_warps=16,
    )  # fmt: skip
    return inverse


def state_width(size: int) -> int:
    """Elements that a block has for so many: a power of two from 16 on, as products of matrices need it."""
    return power_of_2_above(max(16, size))


def dot_precision(x: Tensor) -> str:
    """How products of fp32 numbers are made: in full where x (any shape) is fp32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
