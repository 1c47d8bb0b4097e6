"""Tensors that files hold in another way than rows name them, seen as those that rows name.

    NAME_blocks, NAME_scales          NAME, from 4-bit numbers with a scale for every 32 (MXFP4, gpt-oss)
    NAME, NAME_scale_inv              NAME, from 8-bit numbers with a scale for every square (DeepSeek-V3)
    experts.gate_up_proj [e, 2f, h]   experts.0.gate_proj.weight [f, h], ... (as transformers 5 has them in memory)

Nothing is read until a tensor is asked for, and then only what it is made of. What is written is never packed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.source import ShapeAndDtype

# Values of the 16 codes of 4 bits: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats, 2023).
_HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FOUR_BITS = (*_HALVES, *(-value for value in _HALVES))
_GROUP, _SQUARE = 32, (128, 128)
_BIAS = 127  # of the exponents that scales are


class LazyCheckpointTensor(Protocol):
    """A tensor that is read when it is asked for, with its format known before."""

    @property
    def format(self) -> ShapeAndDtype:
        """Shape and dtype."""

    def read(self) -> Tensor:
        """Return the tensor (any shape); it must not be written to."""


@dataclass(frozen=True, slots=True)
class ComputedTensor:
    """A tensor that `make` computes from others when it is read."""

    format: ShapeAndDtype
    parts: tuple[LazyCheckpointTensor, ...]
    make: Callable[[Sequence[Tensor]], Tensor]

    def read(self) -> Tensor:
        """Read the parts and compute the tensor (any shape) from them."""
        return self.make([part.read() for part in self.parts])


def unreadable_quantization_problem(quantised: Any) -> str:
    """Return why weights with this `quantization_config` cannot be read; "" if they can."""
    method = quantised.get("quant_method", quantised) if isinstance(quantised, Mapping) else quantised
    return (
        ""
        if method in (None, "mxfp4", "fp8")
        else (
            f"quantization_config: the weights are quantised ({method}); mxfp4 and fp8 are read here; save others as float32, "
            "bfloat16 or float16 first"
        )
    )


def with_dequantized_tensors(
    files: Mapping[str, LazyCheckpointTensor], quantised: Any, fused: Sequence[tuple[str, tuple[str, ...]]]
) -> dict[str, LazyCheckpointTensor]:
    """Return the tensors under the names that mappings use: quantized ones dequantized, fused experts split, when they
    are read. quantised: `quantization_config`; fused: see `Family`.
    """
    block = quantised.get("weight_block_size") if isinstance(quantised, Mapping) else None
    tensors = dict(files)
    for name in files:
        if name.endswith("_blocks"):
            whole = name.removesuffix("_blocks")
            _replace_packed_tensor(tensors, name, f"{whole}_scales", whole, _lazy_mxfp4_tensor)
        elif name.endswith("_scale_inv"):
            whole = name.removesuffix("_scale_inv")
            _replace_packed_tensor(
                tensors, whole, name, whole, partial(_lazy_fp8_block_tensor, block=tuple(block or _SQUARE))
            )
    for pattern, names in fused:
        for name in [name for name in tensors if re.fullmatch(pattern, name)]:
            _split_fused_experts(tensors, name, [re.sub(pattern, one, name) for one in names])
    return tensors


def _replace_packed_tensor(
    tensors: dict[str, LazyCheckpointTensor],
    packed: str,
    scales: str,
    whole: str,
    one: Callable[[LazyCheckpointTensor, LazyCheckpointTensor], ComputedTensor | None],
) -> None:
    """Replace a quantized tensor and its scales by the dequantized one; if they do not fit together, leave them to be
    rejected later. one: makes the tensor from both, or returns None.
    """
    made = one(tensors[packed], tensors[scales]) if packed in tensors and scales in tensors else None
    if made is not None:
        del tensors[packed], tensors[scales]
        tensors[whole] = made


def _lazy_mxfp4_tensor(blocks: LazyCheckpointTensor, scales: LazyCheckpointTensor) -> ComputedTensor | None:
    """Return the tensor that MXFP4 codes stand for, computed when it is read; None if the shapes do not fit.

    blocks: bytes [e, rows, groups, 16] of two codes each, the lower bits first; scales: [e, rows, groups].
    """
    shape = blocks.format.shape
    if (
        len(shape) != 4
        or shape[3] * 2 != _GROUP
        or scales.format.shape != shape[:3]
        or blocks.format.dtype != torch.uint8
    ):
        return None
    return ComputedTensor(
        ShapeAndDtype((shape[0], shape[2] * _GROUP, shape[1]), torch.bfloat16), (blocks, scales), _dequantize_mxfp4
    )


def _dequantize_mxfp4(parts: Sequence[Tensor]) -> Tensor:
    """Dequantize (blocks, scales) to [e, groups * 32, rows] in bf16, which holds every value exactly."""
    blocks, scales = parts
    pairs = torch.tensor([(_FOUR_BITS[byte % 16], _FOUR_BITS[byte // 16]) for byte in range(256)])
    made = torch.empty(blocks.shape[0], blocks.shape[2] * _GROUP, blocks.shape[1], dtype=torch.bfloat16)
    for expert, (bytes_, exponents) in enumerate(
        zip(blocks, scales, strict=True)
    ):  # one at a time: codes take much more room
        values = pairs[bytes_.int()].flatten(2)
        made[expert] = torch.ldexp(values, exponents.int()[..., None] - _BIAS).flatten(1).t()
    return made


def _lazy_fp8_block_tensor(
    weight: LazyCheckpointTensor, scales: LazyCheckpointTensor, block: tuple[int, int]
) -> ComputedTensor | None:
    """Return the tensor that 8-bit values with block scales stand for, computed when it is read; None if the shapes do
    not fit. weight: 8-bit [rows, columns]; scales: fp32, one for each block of this size.
    """
    shape = weight.format.shape
    squares = tuple(-(-size // step) for size, step in zip(shape, block))
    if weight.format.dtype != torch.float8_e4m3fn or len(shape) != 2 or scales.format.shape != squares:
        return None
    return ComputedTensor(
        ShapeAndDtype(shape, torch.bfloat16), (weight, scales), partial(_dequantize_fp8_blocks, block=block)
    )


def _dequantize_fp8_blocks(parts: Sequence[Tensor], block: tuple[int, int]) -> Tensor:
    """Dequantize (weight, scales) to bf16 [rows, columns]."""
    weight, scales = parts
    wide = (
        scales.float()
        .repeat_interleave(block[0], 0)[: weight.shape[0]]
        .repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    )
    return (weight.float() * wide).bfloat16()


def _split_fused_experts(tensors: dict[str, LazyCheckpointTensor], name: str, names: Sequence[str]) -> None:
    """Replace a fused tensor [e, rows, columns] by slices of it, each expert's parts. names: of the parts, with {e}."""
    shape = tensors[name].format.shape
    if len(shape) != 3 or shape[1] % len(names):
        return
    whole, rows = tensors.pop(name), shape[1] // len(names)
    for expert in range(shape[0]):
        for place, one in enumerate(names):
            cut = partial(_rows_of_one_expert, expert=expert, start=place * rows, rows=rows)
            tensors[one.replace("{e}", str(expert))] = ComputedTensor(
                ShapeAndDtype((rows, shape[2]), whole.format.dtype), (whole,), cut
            )


def _rows_of_one_expert(parts: Sequence[Tensor], expert: int, start: int, rows: int) -> Tensor:
    return parts[0][expert, start : start + rows]
