"""AdamW in Triton: one launch for all parameters of a group, in which every tensor is read once and written once.

A program updates one block of one parameter. Where the parameter's tensors are is read from a table of addresses, since main weights
and moments are tensors of their own, and a rank owns other parts of buckets than whole parameters. This file needs the package triton, and is
imported when its kernel is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.ops.adamw import AdamStepSettings, AdamTensors

_BLOCK = 2048
_ALIGNMENT = 16  # bytes that a thread loads at once
_FORMATS: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _adamw_kernel(
    table: tl.tensor, blocks: tl.tensor, factor: tl.tensor, shrink: tl.tensor, rate: tl.tensor, rest1: tl.tensor,
    beta2: tl.tensor, rest2: tl.tensor, root: tl.tensor, epsilon: tl.tensor,
    WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: update one block of one parameter.

    table: int64 [parameters, 7]: addresses of main weight, gradient, first and second moment and model weight (0:
    none), number of elements, and whether all addresses are multiples of 16 bytes. blocks: [programs, 2]: row of the
    table, and number of the block. The scalars are those of `_update_adamw_block`. WEIGHT: Triton dtype of the model
    weight; None:
    there is none.
    """
    program = tl.program_id(0)
    row = table + tl.load(blocks + 2 * program) * 7
    start = tl.load(blocks + 2 * program + 1) * BLOCK
    size, is_aligned = tl.load(row + 5), tl.load(row + 6)
    if (is_aligned != 0) & (start + BLOCK <= size):
        _update_adamw_block(
            row, start, size, factor, shrink, rate, rest1, beta2, rest2, root, epsilon, WEIGHT, False, BLOCK
        )
    else:
        _update_adamw_block(
            row, start, size, factor, shrink, rate, rest1, beta2, rest2, root, epsilon, WEIGHT, True, BLOCK
        )


@triton.jit
def _update_adamw_block(
    row: tl.tensor, start: tl.tensor, size: tl.tensor, factor: tl.tensor, shrink: tl.tensor, rate: tl.tensor,
    rest1: tl.tensor, beta2: tl.tensor, rest2: tl.tensor, root: tl.tensor, epsilon: tl.tensor,
    WEIGHT: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Update a block of a parameter from element `start` on, in place. row: pointer to the parameter's row of the
    table; size: its number of elements.

    shrink: lr * weight decay; rate: lr / (1 - beta1^t); rest1, rest2: 1 - beta1, 1 - beta2; root: sqrt(1 - beta2^t).
    MASKED: the block reaches beyond the end, or addresses are not aligned.
    """
    at = start + tl.arange(0, BLOCK)
    main = _load_tensor_pointer(row, 0, tl.float32, MASKED) + at
    gradient = _load_tensor_pointer(row, 1, tl.float32, MASKED) + at
    first = _load_tensor_pointer(row, 2, tl.float32, MASKED) + at
    second = _load_tensor_pointer(row, 3, tl.float32, MASKED) + at
    inside = at < size if MASKED else None
    g = tl.load(gradient, mask=inside) * tl.load(factor).to(tl.float32)
    w, m, v = tl.load(main, mask=inside), tl.load(first, mask=inside), tl.load(second, mask=inside)
    w -= shrink * w
    m += (g - m) * rest1
    v = beta2 * v + rest2 * g * g
    w -= rate * m / (tl.sqrt_rn(v) / root + epsilon)
    tl.store(main, w, mask=inside)
    tl.store(first, m, mask=inside)
    tl.store(second, v, mask=inside)
    if WEIGHT is not None:
        tl.store(_load_tensor_pointer(row, 4, WEIGHT, MASKED) + at, w.to(WEIGHT), mask=inside)


@triton.jit
def _load_tensor_pointer(row: tl.tensor, column: tl.constexpr, TYPE: tl.constexpr, MASKED: tl.constexpr) -> tl.tensor:
    """Load the address in a column of the table row as a pointer to the dtype TYPE; not MASKED: it is promised to be a
    multiple of 16 bytes.
    """
    address = tl.load(row + column).to(tl.pointer_type(TYPE))
    return address if MASKED else tl.multiple_of(address, 16)


def adamw(parameters: Sequence[AdamTensors], factor: float | Tensor, rates: AdamStepSettings) -> None:
    """Compute `kernels.adamw.adamw` for parameters whose main weights, gradients and moments are fp32: update them in
    place. factor: a number or a tensor [], by which gradients are multiplied.
    """
    by_format: dict[torch.dtype | None, list[AdamTensors]] = {}
    for one in parameters:
        assert one.main.dtype == one.gradient.dtype == torch.float32, "this kernel computes in fp32"
        by_format.setdefault(None if one.weight is None else one.weight.dtype, []).append(one)
    for dtype, group in by_format.items():
        device = group[0].main.device
        table, blocks = _parameter_and_block_tables(tuple(_adamw_pointer_table_row(one) for one in group), device)
        _adamw_kernel[(len(blocks),)](
            table, blocks, factor if isinstance(factor, Tensor) else torch.full((), factor, device=device),
            rates.lr * rates.decay, rates.lr / (1.0 - rates.beta1**rates.step), 1.0 - rates.beta1, rates.beta2,
            1.0 - rates.beta2, (1.0 - rates.beta2**rates.step) ** 0.5, rates.epsilon,
            WEIGHT=None if dtype is None else _FORMATS[dtype], BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip


def _adamw_pointer_table_row(one: AdamTensors) -> tuple[int, ...]:
    """Return a parameter's row of the table of `_adamw_kernel`."""
    tensors = (one.main, one.gradient, one.first, one.second, *(() if one.weight is None else (one.weight,)))
    assert all(tensor.is_contiguous() for tensor in tensors), "the tensors of a parameter are flat"
    addresses = [tensor.data_ptr() for tensor in tensors]
    is_aligned = all(address % _ALIGNMENT == 0 for address in addresses)
    return (*addresses, *(0 for _ in range(5 - len(addresses))), one.main.numel(), int(is_aligned))


@lru_cache(maxsize=64)
def _parameter_and_block_tables(rows: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the table of parameters [parameters, 7] and the table of blocks [programs, 2] of `_adamw_kernel`, on the
    device; cached for the same addresses.
    """
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    counts = (table[:, 5] + _BLOCK - 1) // _BLOCK
    parameter = torch.arange(len(rows), device="cpu").repeat_interleave(counts)
    block = torch.arange(len(parameter), device="cpu") - (counts.cumsum(0) - counts)[parameter]
    return table.to(device), torch.stack((parameter, block), dim=1).to(device)
