"""Frozen weights that a rank holds quantized, and nothing else of them: the base of adapters (QLoRA, Dettmers et al., 2023).

    load or initial values -> boxes of whole blocks -> quantize -> this rank's rows and columns: codes, scales
    forward, and again backward: dense(weight) -> matmul -> gone

The parameter stays on the meta device and keeps its name, shape and spec. A rank reads all blocks that its shard touches, and keeps of
them what it holds: so values do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron.core.kernels.low_precision.weight_blocks import (
    BLOCK,
    SCALES,
    BlockQuantizedWeight,
    multiply_by_block_scales,
    nf4_value_pairs,
    nf4_values,
    pack_4_bit_codes,
    quantize_weight_blocks,
    unpack_nf4_values,
)
from megatron.core.parallel.box_hash import box_hash
from megatron.core.parallel.boxes import Box
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import derive_seed
from megatron.core.parallel.spec import (
    LocalShardBox,
    local_shape,
    local_shard_boxes,
    param_spec_of,
    quantized_storage_of,
)


class FrozenQuantizedWeight:
    """The values of one frozen parameter, [out, in] or of experts [e, out, in], in nf4 or int8.

    boxes: what of the global tensor must be given to `quantize_box`, one by one. unquantized_hashes: of the values given, of each local shard.
    """

    def __init__(self, param: nn.Parameter, mesh: Mesh, format: str) -> None:
        self.spec, self.dtype, self.format, self.device = param_spec_of(param), param.dtype, format, mesh.device
        self.shards = local_shard_boxes(self.spec, mesh)
        self.boxes = tuple(_enclosing_whole_blocks(shard.box, self.spec.shape) for shard in self.shards)
        self.unquantized_hashes: list[Tensor | None] = [None] * len(self.shards)
        *stacked, rows, self._columns = local_shape(self.spec, mesh)
        self._first = self.shards[0].box.offset[-1] - self.boxes[0].offset[-1]
        blocks = -(-(self._first + self._columns) // BLOCK)
        self._means_of = [-(-box.shape[-2] // SCALES) for box in self.boxes]
        width = -(-self._columns // 2) if format == "nf4" else self._columns
        self._sizes = (
            ((*stacked, rows, width), torch.uint8 if format == "nf4" else torch.int8),
            ((*stacked, rows, blocks), torch.int8),
            ((*stacked, sum(self._means_of), blocks), torch.float32),
            ((*stacked, sum(self._means_of), blocks), torch.float32),
            ((rows,), torch.int32),
        )
        self._pairs = nf4_value_pairs().to(mesh.device) if format == "nf4" else torch.empty(0)
        self._tensors: tuple[Tensor, ...] = ()

    def storage_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors (any shape) that hold this rank's shard, allocated at first use: codes, codes of scales,
        means and steps of scales, and for each row the index of its means.
        """
        if not self._tensors:
            self._tensors = tuple(torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in self._sizes)
        return self._tensors

    def quantize_box(self, index: int, values: Tensor) -> None:
        """Quantize the values (any shape, that of boxes[index]), and store the part that this rank holds."""
        shard, box, values = self.shards[index], self.boxes[index], values.to(self.device)
        own = values[shard.box.shifted(tuple(-start for start in box.offset)).slices()]
        self.unquantized_hashes[index] = box_hash(own, shard.box, self.spec.shape, derive_seed("base", self.spec.name))
        blocks = quantize_weight_blocks(values, self.format)
        (*stacked, rows, _), codes = shard.local.slices(), _slice_shard_blocks(blocks, shard, box)
        packed, scales, means, steps, means_of_row = self.storage_tensors()
        packed[(*stacked, rows)] = pack_4_bit_codes(codes.codes) if self.format == "nf4" else codes.codes
        scales[(*stacked, rows)] = codes.scales
        before = sum(self._means_of[:index])
        here = slice(before, before + self._means_of[index])
        means[(*stacked, here)], steps[(*stacked, here)] = codes.means, codes.steps
        places = torch.arange(rows.stop - rows.start, device=self.device) + (shard.box.offset[-2] - box.offset[-2])
        means_of_row[rows] = (before + places // SCALES).int()

    def dequantized(self) -> Tensor:
        """Return this rank's shard dequantized, newly allocated, [..., rows, columns], in the parameter's dtype."""
        packed, scales, means, steps, of_row = self.storage_tensors()
        levels = unpack_nf4_values(packed, self._columns, self._pairs) if self.format == "nf4" else packed.float() / 127
        wide = torch.addcmul(means.index_select(-2, of_row), steps.index_select(-2, of_row), scales.float())
        return multiply_by_block_scales(levels, wide.clamp_min(0.0), first=self._first, dtype=self.dtype)


def _enclosing_whole_blocks(box: Box, shape: tuple[int, ...]) -> Box:
    """Return the smallest box of whole quantization blocks that contains `box`. shape: of the global tensor."""
    offset, size = list(box.offset), list(box.shape)
    for dim, block in ((-2, SCALES), (-1, BLOCK)):
        stop = min(-(-(offset[dim] + size[dim]) // block) * block, shape[dim])
        offset[dim] = offset[dim] // block * block
        size[dim] = stop - offset[dim]
    return Box(tuple(offset), tuple(size))


def _slice_shard_blocks(blocks: BlockQuantizedWeight, shard: LocalShardBox, box: Box) -> BlockQuantizedWeight:
    """Return a local shard's rows and columns of its box's quantized blocks; means and steps of all rows."""
    rows, columns = shard.box.shifted(tuple(-start for start in box.offset)).slices()[-2:]
    return BlockQuantizedWeight(
        blocks.codes[..., rows, columns], blocks.scales[..., rows, :], blocks.means, blocks.steps
    )


def mark_frozen_for_quantization(network: nn.Module, mesh: Mesh, format: str) -> None:
    """Make the frozen matrices of all modules that may have adapters be stored quantized (nf4 or int8).

    Call it before their values are drawn or loaded: these are quantized one by one, so that no rank ever has the whole
    network unquantized.
    """
    for module in network.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "adapter") and isinstance(weight, nn.Parameter) and not weight.requires_grad:
            weight.quantized = FrozenQuantizedWeight(weight, mesh, format)  # type: ignore[attr-defined]


def quantize_dequantize_box(read: Callable[[Box], Tensor], box: Box, shape: tuple[int, ...], format: str) -> Tensor:
    """Return the values of a box of a matrix as they would be after quantization, fp32.

    read: returns the matrix's values in a box; shape: of the whole matrix, [out, in]; format: nf4 or int8.
    """
    outer = _enclosing_whole_blocks(box, shape)
    blocks = quantize_weight_blocks(read(outer), format)
    scales = blocks.means.repeat_interleave(SCALES, -2)[: outer.shape[0]]
    scales = scales + blocks.steps.repeat_interleave(SCALES, -2)[: outer.shape[0]] * blocks.scales
    levels = torch.tensor(nf4_values())[blocks.codes.int()] if format == "nf4" else blocks.codes.float() / 127
    values = multiply_by_block_scales(levels, scales.clamp_min(0.0), first=0, dtype=torch.float32)
    return values[box.shifted(tuple(-start for start in outer.offset)).slices()]


def dense_weight(weight: Tensor) -> Tensor:
    """Return a weight as it is multiplied (any shape): itself, or dequantized if it is stored quantized."""
    quantized = quantized_storage_of(weight)
    return weight if quantized is None else cast(FrozenQuantizedWeight, quantized).dequantized()


class _FrozenQuantizedProduct(Function):
    """Autograd function: product(x, W), with W dequantized in forward and again in backward; no weight gradient.

    product: x W^T, of each row's expert if there are several; the gradient of x is the same product with W transposed.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, weight: nn.Parameter, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        context.weight, context.product = weight, product
        return product(x, dense_weight(weight))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return context.product(gradient, dense_weight(context.weight).transpose(-2, -1)), None, None


def frozen_quantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [.., in] W^T + b, [.., out], W [out, in] quantized; saves neither x nor the dequantized W."""
    product = _FrozenQuantizedProduct.apply(x, weight, F.linear)
    return product if bias is None else product + bias


def frozen_quantized_grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, kernel: Callable[..., Tensor]) -> Tensor:
    """Return x W^T of each row's expert, [n, out], with quantized experts. kernel: as `reference.grouped_linear`.

    x: [n, in], sorted by expert; weight: [e, out, in]; counts: [e].
    """
    return _FrozenQuantizedProduct.apply(x, weight, lambda x, matrices: kernel(x, matrices, counts, None))
