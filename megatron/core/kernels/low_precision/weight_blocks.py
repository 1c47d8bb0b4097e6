"""Weight matrices in 4 or 8 bits by blocks: NF4 with doubly quantized scales (QLoRA, Dettmers et al., 2023), and int8 with the same scales.

    weight  [.., out, in]       64 inputs share a scale, the largest absolute value among them
    scales  [.., out, in / 64]  256 rows share a mean and a step: scale = mean + step * code, the code an integer of 8 bits

nf4: a weight over its block's scale is rounded to one of 16 quantiles of the normal distribution. int8: to a multiple of 1 / 127.
Blocks of scales go down the rows, and not along them as in the paper, so that each rank can quantize its shard by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # inputs that share a scale
SCALES = 256  # rows whose scales share a mean and a step
_MOST = 127  # of a code of 8 bits
# The mean of the outermost quantiles of 16 and of 15 values, at which neither end is infinite.
_OUTERMOST = 1.0 - (1.0 / 30.0 + 1.0 / 32.0) / 2.0


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
