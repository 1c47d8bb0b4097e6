"""Attention over a paged cache: the definition against plain attention, and Triton's kernel, in its interpreter, against it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.kernels.ops import paged, reference
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.kernels.ops.paged import CacheBlockTables
from tests.helpers.triton_interpreter import needs_triton

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}
SINKS = AttentionScoreModifiers(sink=torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -2.0, 0.3, 0.1]))
# lengths, queries, heads, groups, head size, value size (latent: smaller than keys), block size, window, scores
CASES: dict[str, tuple[Any, ...]] = {
    "one query, groups of 4": ([5, 300, 0, 130], 1, 8, 2, 32, 32, 16, None, AttentionScoreModifiers()),
    "no groups, odd head, cap": ([5, 150, 17], 3, 4, 4, 24, 24, 3, None, AttentionScoreModifiers(softcap=3.0)),
    "a chunk of a prompt, window, sinks": ([70, 33], 10, 8, 1, 16, 16, 8, 13, SINKS),
    "window of one query, sinks": ([1, 64, 257, 0], 1, 8, 4, 16, 16, 32, 100, SINKS),
    "a window of the own key alone": ([9, 65], 2, 2, 1, 16, 16, 4, 0, AttentionScoreModifiers(scale=0.3)),
    "latent": ([70, 333, 1], 1, 6, 1, 24, 16, 4, None, AttentionScoreModifiers(scale=0.3)),
    "latent of no power of two": ([70, 33, 1], 1, 20, 1, 12, 8, 1, None, AttentionScoreModifiers()),
}


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    """The file, imported anew so that its kernels are interpreted."""
    name = "megatron.core.kernels.triton.paged"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        if type(import_module("triton.language").sum).__name__ != "InterpretedFunction":
            pytest.skip("triton was imported without its interpreter before; run this file with TRITON_INTERPRET=1")
        patch.delitem(sys.modules, name, raising=False)
        yield import_module(name)
        patch.delitem(sys.modules, name, raising=False)


def draw(
    name: str, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, CacheBlockTables, int | None, AttentionScoreModifiers]:
    """A case; what no text has written is no number."""
    lengths, queries, heads, groups, size, values, block, window, scores = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    width = -(-max(lengths) // block) + 1
    tables = (torch.randperm(len(lengths) * width, generator=generator) + 1).int().view(len(lengths), width)
    where = CacheBlockTables(tables, torch.tensor(lengths, dtype=torch.int32), block, max(lengths))
    q, k, v = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
        for shape in (
            (len(lengths), queries, heads, size),
            ((len(lengths) * width + 1) * block, groups, size),
            ((len(lengths) * width + 1) * block, groups, values),
        )
    )
    written = torch.zeros(len(k), dtype=torch.bool)
    for row, length in enumerate(lengths):
        written[where.slots_of_positions(torch.arange(length).expand(len(lengths), -1))[row]] = True
    k, v = (x.masked_fill(~written[:, None, None], float("nan")) for x in (k, v))
    return q, k, k[..., :values] if values < size else v, where, window, scores


@pytest.mark.parametrize("name", CASES)
def test_the_definition_is_plain_attention_over_each_rows_own_keys(name: str) -> None:
    q, k, v, where, window, scores = draw(name)
    found = paged.paged_attention(q, k, v, where, window=window, scores=scores)
    for row, length in enumerate(where.lengths.tolist()):
        if length == 0:
            assert not found[row].any()
            continue
        slots = where.slots_of_positions(torch.arange(length).expand(len(found), -1))[row]
        mask = AttentionMaskSpec(window=None if window is None else (window, 0))
        own = reference.softmax_attention(q[row][:, None], k[slots][:, None], v[slots][:, None], mask, 0.0, scores)
        torch.testing.assert_close(found[row], own[:, 0], rtol=1e-10, atol=1e-10)


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_tritons_kernel_is_the_definition(kernel: ModuleType, name: str, dtype: torch.dtype) -> None:
    q, k, v, where, window, scores = draw(name, dtype)
    found = kernel.paged_attention(q, k, v, where, window=window, scores=scores)
    expected = paged.paged_attention(q.double(), k.double(), v.double(), where, window=window, scores=scores)
    assert found.dtype == dtype and bool(found.isfinite().all())
    assert (found.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@needs_triton
def test_queries_may_lie_among_keys_and_values(kernel: ModuleType) -> None:
    q, k, v, where, *_ = draw("one query, groups of 4", torch.float32)
    whole = torch.cat((q, torch.full_like(q, float("nan"))), dim=2)[:, :, : q.shape[2]]
    assert not whole.is_contiguous() and torch.equal(
        kernel.paged_attention(whole, k, v, where), kernel.paged_attention(q, k, v, where)
    )


def bytes_read(kernel: ModuleType, patch: pytest.MonkeyPatch, name: str) -> tuple[int, int]:
    """(bytes of the pools that the kernel loads, bytes of the keys and values that there are)."""
    from triton.runtime.interpreter import interpreter_builder

    q, k, v, where, window, scores = draw(name, torch.bfloat16)
    load, read = interpreter_builder.create_masked_load, 0

    def counting(pointers: Any, mask: Any, *others: Any) -> Any:
        nonlocal read
        for pool in (k, v) if v.data_ptr() != k.data_ptr() else (k,):
            inside = (pointers.data >= pool.data_ptr()) & (pointers.data < pool.data_ptr() + pool.nbytes)
            read += 2 * int((inside & mask.data).sum())
        return load(pointers, mask, *others)

    patch.setattr(interpreter_builder, "create_masked_load", counting)
    kernel.paged_attention(q, k, v, where, window=window, scores=scores)
    values = 0 if v.data_ptr() == k.data_ptr() else v.shape[2]
    seen = where.lengths if window is None else where.lengths.clamp(max=window + q.shape[1])
    return read, int(seen.sum()) * k.shape[1] * (k.shape[2] + values) * 2


@needs_triton
@pytest.mark.parametrize("name", ["one query, groups of 4", "window of one query, sinks", "latent"])
def test_every_key_and_value_is_read_once_for_all_heads_of_its_group(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    read, stored = bytes_read(kernel, monkeypatch, name)
    assert read == stored


def test_a_kernel_that_is_wrong_is_told_apart() -> None:
    def blind(q: Tensor, k: Tensor, v: Tensor, where: CacheBlockTables, **how: Any) -> Tensor:
        return paged.paged_attention(q, k, v, where)  # without the window

    how: dict[str, Any] = {"heads": 4, "groups": 2, "size": 8}
    assert paged.paged_kernel_error(paged.paged_attention, torch.device("cpu"), torch.float64, **how) == 0.0
    assert paged.paged_kernel_error(blind, torch.device("cpu"), torch.float64, **how) > 0.01
