"""The network under adapters: frozen, perhaps stored quantized (QLoRA, Dettmers et al., 2023), and able to compute alone.

    load or initial values -> boxes of whole blocks -> quantize -> this rank's rows and columns: codes, scales
    forward, and again backward: dense_weight(weight) -> matmul -> gone         (core/tensor_parallel/frozen_quantized.py)

A quantized parameter stays on the meta device and keeps its name, shape and spec. A rank reads all blocks that its shard touches, and
keeps of them what it holds: so values do not depend on the layout. The formats, in 4 bits (NF4) or 8 (int8):

    weight  [.., out, in]       64 inputs share a scale, the largest absolute value among them
    scales  [.., out, in / 64]  256 rows share a mean and a step: scale = mean + step * code, the code an integer of 8 bits

nf4: a weight over its block's scale is rounded to one of 16 quantiles of the normal distribution. int8: to a multiple of 1 / 127.
Blocks of scales go down the rows, and not along them as in the paper, so that each rank can quantize its shard by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.adapters import is_trained_parameter
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.parallel.box_hash import box_hash
from megatron.core.parallel.boxes import Box
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import derive_seed
from megatron.core.parallel.spec import LocalShardBox, local_shape, local_shard_boxes, param_spec_of
from megatron.core.transformer.adapters import GroupedLinearAdapter, LinearAdapter

BLOCK = 64  # inputs that share a scale
SCALES = 256  # rows whose scales share a mean and a step
_MOST = 127  # of a code of 8 bits
# The mean of the outermost quantiles of 16 and of 15 values, at which neither end is infinite.
_OUTERMOST = 1.0 - (1.0 / 30.0 + 1.0 / 32.0) / 2.0


def freeze_untrained(network: nn.Module, config: AdapterConfig, mesh: Mesh) -> None:
    """Freeze what the run does not train; with adapters, all but those and --lora-modules-to-save.

    Frozen matrices of layers are prepared for --lora-base-quantization, before they have values.
    """
    for param in network.parameters():
        name = param_spec_of(param).name
        if not is_trained_parameter(name, config):
            param.requires_grad_(False)
    if config.lora_base_quantization != "none":
        mark_frozen_for_quantization(network, mesh, config.lora_base_quantization)


@contextmanager
def without_adapters(*networks: nn.Module) -> Iterator[None]:
    """Disable all adapters inside, so that networks compute what their frozen base does; without gradients.

    networks: whole ones, pipeline stages, or stages inside of DDP or FSDP. Modules of --lora-modules-to-save stay as
    trained.
    """
    adapters = [
        one for each in networks for one in each.modules() if isinstance(one, LinearAdapter | GroupedLinearAdapter)
    ]
    before = [one.enabled for one in adapters]
    for one in adapters:
        one.enabled = False
    try:
        yield
    finally:
        for one, enabled in zip(adapters, before, strict=True):
            one.enabled = enabled


def mark_frozen_for_quantization(network: nn.Module, mesh: Mesh, format: str) -> None:
    """Make the frozen matrices of all modules that may have adapters be stored quantized (nf4 or int8).

    Call it before their values are drawn or loaded: these are quantized one by one, so that no rank ever has the whole
    network unquantized.
    """
    for module in network.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "adapter") and isinstance(weight, nn.Parameter) and not weight.requires_grad:
            weight.quantized = FrozenQuantizedWeight(weight, mesh, format)  # type: ignore[attr-defined]


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


@lru_cache(maxsize=1)
def nf4_values() -> tuple[float, ...]:
    """Return the 16 values of NF4, ascending, divided by the largest: 7 negative quantiles of the normal distribution,
    zero, and 8 positive ones.
    """

    def descending_normal_quantiles(count: int) -> list[float]:
        """Return `count` positive quantiles of the normal distribution, from the outermost inwards."""
        places = (_OUTERMOST - (_OUTERMOST - 0.5) * place / count for place in range(count))
        return [NormalDist().inv_cdf(place) for place in places]

    above, below = descending_normal_quantiles(8), descending_normal_quantiles(7)
    return tuple(value / above[0] for value in (*(-value for value in below), 0.0, *reversed(above)))


@dataclass(frozen=True, slots=True)
class BlockQuantizedWeight:
    """A weight matrix quantized by blocks, with quantized scales.

    codes: [.., out, in], uint8 (nf4) or int8. scales: int8 codes of the scales of the blocks, [.., out, blocks]. means,
    steps: fp32 [.., out / 256, blocks]; scale = mean + step * code.
    """

    codes: Tensor
    scales: Tensor
    means: Tensor
    steps: Tensor


def quantize_weight_blocks(weight: Tensor, format: str) -> BlockQuantizedWeight:
    """Quantize a weight matrix, or a shard of one that begins at block boundaries. weight: [.., out, in]; format: nf4
    or int8.
    """
    columns = weight.shape[-1]
    blocks = F.pad(weight.float(), (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    levels = blocks / largest.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    if format == "nf4":
        values = torch.tensor(nf4_values(), device=weight.device)
        codes = torch.bucketize(levels, (values[1:] + values[:-1]) / 2).to(torch.uint8)
    else:
        codes = (levels * _MOST).round().to(torch.int8)
    means, steps, scales = [], [], []
    for rows in largest.split(SCALES, dim=-2):
        mean = rows.double().mean(dim=-2, keepdim=True).float()
        step = (rows - mean).abs().amax(dim=-2, keepdim=True) / _MOST
        scales.append(((rows - mean) / step.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8))
        means.append(mean)
        steps.append(step)
    return BlockQuantizedWeight(
        codes.flatten(-2)[..., :columns], torch.cat(scales, -2), torch.cat(means, -2), torch.cat(steps, -2)
    )


def pack_4_bit_codes(codes: Tensor) -> Tensor:
    """Pack two 4-bit codes into each byte, the first in the low bits. codes: uint8 [.., in]; returns uint8 [.., in / 2
    rounded up].
    """
    pairs = F.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def nf4_value_pairs() -> Tensor:
    """Return a table for `unpack_nf4_values`: for each byte the two NF4 values of its codes, as the bits of one int64,
    [256].
    """
    codes, values = torch.arange(256), torch.tensor(nf4_values(), dtype=torch.float32)
    return torch.stack((values[codes & 15], values[codes >> 4]), dim=-1).view(torch.int64).flatten()


def unpack_nf4_values(packed: Tensor, columns: int, pairs: Tensor) -> Tensor:
    """Return the NF4 values of packed codes, fp32 [.., columns]. packed: uint8 [.., bytes]; columns: number of codes of
    a row; pairs: the table of `nf4_value_pairs`.
    """
    values = pairs.index_select(0, packed.flatten().int()).view(torch.float32)  # 8 bytes are looked up at once
    return values.view(*packed.shape[:-1], -1)[..., :columns]


def multiply_by_block_scales(levels: Tensor, scales: Tensor, *, first: int, dtype: torch.dtype) -> Tensor:
    """Multiply values by the scales of their blocks, in `dtype`. levels: [.., out, in], values divided by the scale;
    scales: fp32 [.., out, blocks]; first: position of column 0 within its block.
    """
    if first or levels.shape[-1] % BLOCK:
        return (levels * scales.repeat_interleave(BLOCK, -1)[..., first : first + levels.shape[-1]]).to(dtype)
    blocks = levels.unflatten(-1, (-1, BLOCK))
    return torch.mul(blocks, scales[..., None]).to(dtype).flatten(-2)


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
