"""Attention over a paged KV cache in Triton: keys and values are read where they lie, once for all heads of a group.

A decoding step has few queries and many keys, so the keys of a row are split over several programs (flash-decoding; Dao et al.,
2023). Each keeps an online softmax of its part; a second kernel joins the parts.

    row 0   keys |--- split 0 ---|--- split 1 ---|     q tile: all heads of one group, of one or more queries
    row 1   keys |- split 0 -|- split 1 -|             how long a part is follows from the row's own length

This file needs the package triton, and is imported when the kernel is first called. Forward only: nothing is trained here.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.ops.mask import AttentionScoreModifiers
from megatron.core.kernels.ops.paged import CacheBlockTables

_KEYS = 64  # that a program reads at a time
_FEWEST = 128  # keys of a part
_PROGRAMS = 528  # four for each multiprocessor of a Hopper
_MOST_SPLITS = 32


@triton.jit
def _matmul_fp32(a: tl.tensor, b: tl.tensor, PRECISION: tl.constexpr, WIDENED: tl.constexpr) -> tl.tensor:
    """Return a b, summed in fp32. WIDENED: convert both to fp32 first, since Triton's interpreter multiplies bf16
    numbers as integers.
    """
    if WIDENED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _unscaled_scores_and_keys(
    q: tl.tensor, k: tl.tensor, slots: tl.tensor, inside: tl.tensor,
    SIZE: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, PRECISION: tl.constexpr, WIDENED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return q k^T of a tile [M, N] of queries and keys, and the first MAIN elements of its keys [N, MAIN]. q: pointers
    [M, 1]; k: base pointer; slots: [N], offsets of the keys from it; inside: [N], whether the key exists.
    """
    main = tl.arange(0, MAIN)
    if MAIN > SIZE:
        keys = tl.load(k + slots[:, None] + main[None, :], mask=inside[:, None] & (main[None, :] < SIZE), other=0.0)
        own = tl.load(q + main[None, :], mask=main[None, :] < SIZE, other=0.0)
    else:
        keys = tl.load(k + slots[:, None] + main[None, :], mask=inside[:, None], other=0.0)
        own = tl.load(q + main[None, :])
    result = _matmul_fp32(own, tl.trans(keys), PRECISION, WIDENED)
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)
        more = tl.load(q + rest[None, :], mask=rest[None, :] < SIZE, other=0.0)
        rest_keys = tl.load(
            k + slots[:, None] + rest[None, :], mask=inside[:, None] & (rest[None, :] < SIZE), other=0.0
        )
        result += _matmul_fp32(more, tl.trans(rest_keys), PRECISION, WIDENED)
    return result, keys


@triton.jit
def _paged_attention_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, tables: tl.tensor, lengths: tl.tensor, parts: tl.tensor,
    sums: tl.tensor, scale: tl.tensor, softcap: tl.tensor, window: tl.tensor, queries: tl.tensor, width: tl.tensor,
    q_step: tl.tensor, k_step: tl.tensor, v_step: tl.tensor,
    REPEATS: tl.constexpr, SIZE: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
    WIDE: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr, WIDENED: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: attention of one tile of M queries (heads of one key head) over one part of their sequence's keys.

    q: [rows, queries, n, SIZE]; k, v: pools [slots, g, SIZE or VALUES]; tables: block numbers [rows, width];
    lengths: [rows], keys of each row. q_step, k_step, v_step: elements from one query or slot to the next.
    parts: receives the outputs [rows * tiles, groups, splits, M, VALUES]; sums: base-2 log-sum-exp of the scores,
    without VALUES. SHARED: values are the first elements of keys.
    """
    tiles = tl.cdiv(queries * REPEATS, M)
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    group, split = tl.program_id(1), tl.program_id(2)
    groups, splits = tl.num_programs(1), tl.num_programs(2)
    length = tl.load(lengths + row)
    lines = tile * M + tl.arange(0, M)
    lines = tl.minimum(lines, queries * REPEATS - 1)  # what is too many repeats the last one
    query = lines // REPEATS
    at = length - queries + query
    head = group * REPEATS + lines % REPEATS
    q += (row.to(tl.int64) * queries + query)[:, None] * q_step + head[:, None] * SIZE
    first_at = length - queries + tile * M // REPEATS
    last_at = length - queries + tl.minimum((tile * M + M - 1) // REPEATS, queries - 1)
    first = 0
    if WINDOWED:
        first = tl.maximum(first_at - window, 0)
    end = tl.maximum(last_at + 1, first)
    each = tl.cdiv(tl.cdiv(end - first, splits), N) * N
    start = first + split * each
    stop = tl.minimum(start + each, end)

    largest = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    mixed = tl.zeros((M, WIDE), tl.float32)
    columns = tl.arange(0, WIDE)
    for begin in range(start, stop, N):
        keys = begin + tl.arange(0, N)
        inside = keys < stop
        block = tl.load(tables + row.to(tl.int64) * width + keys // PAGE, mask=inside, other=0)
        slots = block.to(tl.int64) * PAGE + keys % PAGE
        scored, tile_k = _unscaled_scores_and_keys(
            q, k + group * SIZE, slots * k_step, inside, SIZE, MAIN, REST, PRECISION, WIDENED
        )
        scored *= scale
        if CAPPED:
            scored = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scored / softcap) + 1.0))
        seen = inside[None, :] & (keys[None, :] <= at[:, None])
        if WINDOWED:
            seen &= keys[None, :] >= at[:, None] - window
        scored = tl.where(seen, scored * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(largest, tl.max(scored, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # of a query that has seen nothing yet
        shares = tl.exp2(scored - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(shares, 1)
        if SHARED:
            tile_v = tile_k
        else:
            place = v + (slots * v_step)[:, None] + group * VALUES + columns[None, :]
            tile_v = tl.load(place, mask=inside[:, None] & (columns[None, :] < VALUES), other=0.0)
        mixed = mixed * shrink[:, None] + _matmul_fp32(shares.to(tile_v.dtype), tile_v, PRECISION, WIDENED)
        largest = higher

    line = ((tl.program_id(0).to(tl.int64) * groups + group) * splits + split) * M + tl.arange(0, M)
    tl.store(sums + line, tl.where(total > 0, largest + tl.log2(tl.maximum(total, 1e-38)), float("-inf")))
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(parts + line[:, None] * VALUES + columns[None, :], mixed, mask=columns[None, :] < VALUES)


@triton.jit
def _merge_key_splits_kernel(
    parts: tl.tensor, sums: tl.tensor, sink: tl.tensor, y: tl.tensor, queries: tl.tensor, splits: tl.tensor,
    REPEATS: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: merge the outputs over all parts of the keys for one head of one query, each weighted by its part of the
    softmax's sum. sink: [n] or None; y: [rows, queries, n, VALUES].
    """
    token, head = tl.program_id(0), tl.program_id(1)
    row, query = token // queries, token % queries
    groups = tl.num_programs(1) // REPEATS
    tiles = tl.cdiv(queries * REPEATS, M)
    line = query * REPEATS + head % REPEATS
    tile = row.to(tl.int64) * tiles + line // M
    numbers = tl.arange(0, SPLITS)
    places = ((tile * groups + head // REPEATS) * splits + numbers) * M + line % M
    logs = tl.load(sums + places, mask=numbers < splits, other=float("-inf"))
    largest = tl.max(logs, 0)
    extra = 0.0
    if sink is not None:
        # Where nothing is seen the result is zero, with a sink as without.
        score = tl.load(sink + head).to(tl.float32) * 1.4426950408889634
        largest = tl.maximum(largest, score)
        extra = tl.exp2(score - largest)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(logs - base)
    total = tl.sum(weights, 0) + extra
    columns = tl.arange(0, WIDE)
    inside = (numbers[:, None] < splits) & (columns[None, :] < VALUES)
    values = tl.load(parts + places[:, None] * VALUES + columns[None, :], mask=inside, other=0.0)
    mixed = tl.sum(values * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    place = y + (token.to(tl.int64) * tl.num_programs(1) + head) * VALUES + columns
    tl.store(place, mixed.to(y.dtype.element_ty), mask=columns < VALUES)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    where: CacheBlockTables,
    *,
    window: int | None = None,
    scores: AttentionScoreModifiers = AttentionScoreModifiers(),
) -> Tensor:
    """Compute `paged.attention` by Triton; forward only. q: [b, queries, n, d]; k: [slots, g, d]; v: [slots, g, dv].
    Returns [b, queries, n * dv].
    """
    rows, queries, heads, size = q.shape
    groups, values = k.shape[1], v.shape[2]
    assert scores.bias is None, "nothing is added to the scores of decoding"
    if q.stride(3) != 1 or q.stride(2) != size or q.stride(0) != queries * q.stride(1):
        q = q.contiguous()
    known = paged_attention_tile_sizes(size, values, heads // groups, queries, shared=k.data_ptr() == v.data_ptr())
    tiles = triton.cdiv(queries * (heads // groups), known["M"])
    splits = num_key_splits(
        rows * tiles * groups, where.longest if window is None else min(where.longest, window + queries)
    )
    parts = torch.empty((rows * tiles, groups, splits, known["M"], values), dtype=torch.float32, device=q.device)
    sums = torch.empty(parts.shape[:-1], dtype=torch.float32, device=q.device)
    y = torch.empty((rows, queries, heads * values), dtype=q.dtype, device=q.device)
    _paged_attention_kernel[(rows * tiles, groups, splits)](
        q, k, v, where.tables, where.lengths, parts, sums,
        size**-0.5 if scores.scale is None else scores.scale,
        1.0 if scores.softcap is None else scores.softcap,
        0 if window is None else window,
        queries, where.tables.shape[1], q.stride(1), k.stride(0), v.stride(0),
        PAGE=where.size,
        CAPPED=scores.softcap is not None,
        WINDOWED=window is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        WIDENED=not isinstance(_paged_attention_kernel, triton.JITFunction),
        **known,
    )  # fmt: skip
    _merge_key_splits_kernel[(rows * queries, heads)](
        parts, sums, scores.sink, y, queries, splits,
        REPEATS=known["REPEATS"], VALUES=values, WIDE=known["WIDE"], M=known["M"], SPLITS=triton.next_power_of_2(splits),
    )  # fmt: skip
    return y


def paged_attention_tile_sizes(size: int, values: int, repeats: int, queries: int, *, shared: bool) -> dict[str, Any]:
    """Return the compile-time sizes of `_paged_attention_kernel`. size, values: of heads of keys and of values;
    repeats: query heads for each key head; shared: values are the first elements of keys.
    """
    main = max(16, 1 << (size.bit_length() - 1))
    rest = max(16, triton.next_power_of_2(size - main)) if size > main else 0
    wide = max(16, triton.next_power_of_2(values))
    most = 16 if max(main, wide) > 256 else 32 if max(main, wide) > 128 else 64
    return {
        "REPEATS": repeats,
        "SIZE": size,
        "MAIN": main,
        "REST": rest,
        "VALUES": values,
        "WIDE": wide,
        "M": min(most, max(16, triton.next_power_of_2(queries * repeats))),
        "N": _KEYS if max(main, wide) <= 256 else _KEYS // 2,
        "SHARED": shared and main == wide == values,
    }


def num_key_splits(programs: int, keys: int) -> int:
    """Return into how many parts the keys of each row are split. programs: number of programs with one part each;
    keys: of the longest row.
    """
    return max(1, min(_PROGRAMS // programs, keys // _FEWEST, _MOST_SPLITS))
