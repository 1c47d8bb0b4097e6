"""Low-precision formats for optimizer state: fp32 numbers stored in fewer bits, read and written in slices.

    UnscaledTensor       fp32, or bf16: the upper half of fp32's bits                                     4 or 2 bytes
    BlockScaledTensor    fp16 or fp8 (e4m3), with a power-of-two scale for each block of 128 numbers      2 or 1, and 1/32
    Bf16RemainderTensor  the lower half of an fp32 number whose upper half is the rounded bf16 weight     2

Rounding is stochastic, so that it is exact on average: with rounding to nearest, a moment that decays by a thousandth a
step would never change in bf16, nor one that decays by a twentieth in fp8. Numbers decoded from a format are encoded to
the same bits again, so a resumed run is bitwise equal.

Second moments in blocks are stored as square roots, which halves the range of their exponents, and none above zero is
rounded to zero, since an update divides by it. Micikevicius et al., 2022, arXiv 2209.05433 (e4m3); Zamirai et al.,
2020, arXiv 2010.06192 (stochastic rounding).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 128
# largest number, mantissa bits, exponent of the smallest normal number
_FORMATS = {"fp8": (448.0, 3, -6), "fp16": (32768.0, 10, -14)}
_TYPES = {"fp8": torch.float8_e4m3fn, "fp16": torch.float16}


class EncodedTensor(Protocol):
    """A flat tensor of fp32 numbers in some format; slices start at multiples of BLOCK, and end at one or the end."""

    def decode_slice(self, low: int, high: int) -> Tensor:
        """Decode the numbers [low, high): fp32 [high - low], possibly a view of the storage."""

    def encode_slice(self, low: int, values: Tensor, generator: torch.Generator) -> None:
        """Encode `values` [n] into the elements from `low` (a multiple of BLOCK) on.

        generator: random numbers for formats that round stochastically; others ignore it.
        """

    def storage_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors (any shape) that store the encoded numbers."""


@dataclass(frozen=True, slots=True)
class UnscaledTensor:
    """fp32 numbers as they are, or bf16 with stochastic rounding: a random number is added to the 16 bits that are then
    dropped, so that the expected value is the number itself.
    """

    tensor: Tensor

    def decode_slice(self, low: int, high: int) -> Tensor:
        """Return the numbers [low, high): fp32 [high - low]; a view if they are stored so."""
        return self.tensor[low:high].float()

    def encode_slice(self, low: int, values: Tensor, generator: torch.Generator) -> None:
        """Store `values` [n] in positions low to low + n; bf16 is rounded stochastically."""
        if self.tensor.dtype == torch.bfloat16:
            bits = values.float().contiguous().view(torch.int32)
            more = torch.randint(0, 2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
            rounded = ((bits + more) & -(2**16)).view(torch.float32)
            values = torch.where(values.isfinite(), rounded, values)
        self.tensor[low : low + len(values)].copy_(values)

    def storage_tensors(self) -> tuple[Tensor, ...]:
        """Return the one tensor that stores the numbers, [elements]."""
        return (self.tensor,)


@dataclass(frozen=True, slots=True)
class BlockScaledTensor:
    """fp16 or fp8 with a power-of-two scale for each block.

    values: [size]; scales: [blocks]. as_root: stores the square roots of nonnegative numbers.
    """

    kind: str
    values: Tensor
    scales: Tensor
    as_root: bool = False

    def decode_slice(self, low: int, high: int) -> Tensor:
        """Decode the numbers [low, high) to fp32, [high - low]; low: a multiple of BLOCK."""
        scales = self.scales[low // BLOCK : -(-high // BLOCK)].repeat_interleave(BLOCK)[: high - low]
        values = self.values[low:high].float() * scales
        return values.square_() if self.as_root else values

    def encode_slice(self, low: int, values: Tensor, generator: torch.Generator) -> None:
        """Encode `values` [n] into the elements from `low` (a multiple of BLOCK) on, rounded stochastically.

        Each block gets its own scale. With `as_root`, square roots are stored; none above 0 rounds to 0.
        """
        count, places = len(values), slice(low // BLOCK, -(-(low + len(values)) // BLOCK))
        rows = torch.nn.functional.pad(values.sqrt() if self.as_root else values, (0, -count % BLOCK)).view(-1, BLOCK)
        largest, bits, smallest = _FORMATS[self.kind]
        exponent = torch.frexp(rows.abs().amax(1, keepdim=True) / largest)
        # The smallest power of two that scales a block's maximum into the format's range; frexp gives m 2^e, 1/2 <= m < 1.
        power = torch.where(exponent.mantissa > 0.5, exponent.exponent, exponent.exponent - 1)
        scales = torch.ldexp(torch.ones_like(rows[:, :1]), power).clamp(min=2.0**-126)
        scaled = rows / scales
        step = torch.ldexp(torch.ones_like(scaled), (torch.frexp(scaled).exponent - 1).clamp(min=smallest) - bits)
        rounded = (
            torch.floor(scaled / step + torch.rand(scaled.shape, generator=generator, device=scaled.device)) * step
        )
        if self.as_root:
            rounded = torch.where(scaled > 0, torch.maximum(rounded, step), rounded)
        self.values[low : low + count].copy_(rounded.view(-1)[:count])
        self.scales[places].copy_(scales.view(-1))

    def storage_tensors(self) -> tuple[Tensor, ...]:
        """Return the stored values [elements] and the scales of their blocks [blocks]."""
        return self.values, self.scales


@dataclass(frozen=True, slots=True)
class Bf16RemainderTensor:
    """The int16 difference between an fp32 main weight and its bf16 weight: together the main weight, bit for bit.

    The weight is the bf16 number nearest to the main weight; of two equally near ones, the one farther from zero.
    """

    weight: Tensor
    remainder: Tensor

    def decode_slice(self, low: int, high: int) -> Tensor:
        """Return the fp32 main weights [low, high): bf16 weights with the remainders as lower 16 bits."""
        upper = self.weight[low:high].view(torch.int16).int() << 16
        return (upper + self.remainder[low:high].int()).view(torch.float32)

    def encode_slice(self, low: int, values: Tensor, generator: torch.Generator) -> None:
        """Split `values` [n] into bf16 weights (rounded to nearest, in the network) and 16-bit remainders."""
        bits = values.float().contiguous().view(torch.int32)
        upper = (bits + 2**15) & -(2**16)
        self.weight[low : low + len(values)].view(torch.int16).copy_((upper >> 16).to(torch.int16))
        self.remainder[low : low + len(values)].copy_((bits - upper).to(torch.int16))

    def set_remainders(self, low: int, values: Tensor) -> None:
        """Set the remainders of main weights `values` [n] whose bf16 weights are set already.

        A main weight halfway between two bf16 numbers changes in its last bit.
        """
        upper = self.weight[low : low + len(values)].view(torch.int16).int() << 16
        remainder = (values.float().contiguous().view(torch.int32) - upper).clamp(-(2**15), 2**15 - 1)
        self.remainder[low : low + len(values)].copy_(remainder.to(torch.int16))

    def storage_tensors(self) -> tuple[Tensor, ...]:
        """Return the remainders, int16, [elements]; the bf16 weight belongs to the network."""
        return (self.remainder,)


def encoded_zeros(kind: str, like: Tensor, *, as_root: bool = False) -> EncodedTensor:
    """Return an encoded tensor of zeros, flat, with one element for each of `like` (any shape), on its device.

    kind: fp32, bf16, fp16 or fp8. as_root: see `BlockScaledTensor`.
    """
    size = like.numel()
    if kind in ("fp32", "bf16"):
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        return UnscaledTensor(torch.zeros(size, dtype=dtype, device=like.device))
    values = torch.zeros(size, dtype=_TYPES[kind], device=like.device)
    return BlockScaledTensor(kind, values, torch.ones(-(-size // BLOCK), device=like.device), as_root)
