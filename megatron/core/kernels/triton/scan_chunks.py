"""What both passes of a Triton scan compute inside one chunk of tokens: rows of a tensor, decays, and the inverse of the delta rule's system."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.triton import cdiv, round_up_to_power_of_2


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
