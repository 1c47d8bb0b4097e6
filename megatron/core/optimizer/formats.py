"""State of the optimizer in fewer bits: fp32 numbers that are kept in a narrower format, and read and written in slices.

    Wide        as it is                                                                          4 bytes
    Half        bf16: the upper half of fp32's bits                                               2
    Blocks      fp16 or fp8 (e4m3), a block of 128 numbers under one power of two                 2 or 1, and 1/32
    Remainder   the lower half of an fp32 number whose upper half is a bf16 weight, rounded       2

What does not fit is rounded up or down by chance, so that on average nothing is lost: to the nearest, a moment that decays
by a thousandth a step would never change in bf16, nor one that decays by a twentieth in fp8. Numbers that come out of a
format go back into it unchanged, which makes a resumed run go on with the same bits.

Second moments in blocks are kept as their roots, whose exponents are half as far apart, and none above zero becomes zero, since
an update divides by it. Micikevicius et al., 2022, arXiv 2209.05433 (e4m3); Zamirai et al., 2020, arXiv 2010.06192 (rounding).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 128
# largest number, bits behind the point, exponent of the smallest normal number
_FORMATS = {"fp8": (448.0, 3, -6), "fp16": (32768.0, 10, -14)}
_TYPES = {"fp8": torch.float8_e4m3fn, "fp16": torch.float16}


class Kept(Protocol):
    """fp32 numbers in some format. low and high are multiples of BLOCK, or the end."""

    def read(self, low: int, high: int) -> Tensor:
        """Numbers [low, high), fp32; may be a view of what is kept."""

    def write(self, low: int, values: Tensor, chance: torch.Generator) -> None:
        """Keep these from `low` on."""

    def memory(self) -> tuple[Tensor, ...]:
        """The tensors that hold it."""


@dataclass(frozen=True, slots=True)
class Wide:
    """As it is."""

    tensor: Tensor

    def read(self, low: int, high: int) -> Tensor:
        """As `Kept` says."""
        return self.tensor[low:high]

    def write(self, low: int, values: Tensor, chance: torch.Generator) -> None:
        """As `Kept` says."""
        self.tensor[low : low + len(values)].copy_(values)

    def memory(self) -> tuple[Tensor, ...]:
        """As `Kept` says."""
        return (self.tensor,)


@dataclass(frozen=True, slots=True)
class Half:
    """bf16. The 16 bits that go are added to, by chance, before they go."""

    tensor: Tensor

    def read(self, low: int, high: int) -> Tensor:
        """As `Kept` says."""
        return self.tensor[low:high].float()

    def write(self, low: int, values: Tensor, chance: torch.Generator) -> None:
        """As `Kept` says."""
        bits = values.float().contiguous().view(torch.int32)
        more = torch.randint(0, 2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=chance)
        rounded = ((bits + more) & -(2**16)).view(torch.float32)
        self.tensor[low : low + len(values)].copy_(torch.where(values.isfinite(), rounded, values))

    def memory(self) -> tuple[Tensor, ...]:
        """As `Kept` says."""
        return (self.tensor,)


@dataclass(frozen=True, slots=True)
class Blocks:
    """fp16 or fp8, under a power of two a block. as_root: what is kept are the roots, of numbers that are not negative."""

    kind: str
    values: Tensor
    scales: Tensor
    as_root: bool = False

    def read(self, low: int, high: int) -> Tensor:
        """As `Kept` says."""
        scales = self.scales[low // BLOCK : -(-high // BLOCK)].repeat_interleave(BLOCK)[: high - low]
        values = self.values[low:high].float() * scales
        return values.square_() if self.as_root else values

    def write(self, low: int, values: Tensor, chance: torch.Generator) -> None:
        """As `Kept` says."""
        count, places = len(values), slice(low // BLOCK, -(-(low + len(values)) // BLOCK))
        rows = torch.nn.functional.pad(values.sqrt() if self.as_root else values, (0, -count % BLOCK)).view(-1, BLOCK)
        largest, bits, smallest = _FORMATS[self.kind]
        exponent = torch.frexp(rows.abs().amax(1, keepdim=True) / largest)
        # The smallest power of two that brings the largest of a block within the format: m 2^e with m of 1/2 up to 1.
        power = torch.where(exponent.mantissa > 0.5, exponent.exponent, exponent.exponent - 1)
        scales = torch.ldexp(torch.ones_like(rows[:, :1]), power).clamp(min=2.0**-126)
        scaled = rows / scales
        step = torch.ldexp(torch.ones_like(scaled), (torch.frexp(scaled).exponent - 1).clamp(min=smallest) - bits)
        rounded = torch.floor(scaled / step + torch.rand(scaled.shape, generator=chance, device=scaled.device)) * step
        if self.as_root:
            rounded = torch.where(scaled > 0, torch.maximum(rounded, step), rounded)
        self.values[low : low + count].copy_(rounded.view(-1)[:count])
        self.scales[places].copy_(scales.view(-1))

    def memory(self) -> tuple[Tensor, ...]:
        """As `Kept` says."""
        return self.values, self.scales


@dataclass(frozen=True, slots=True)
class Remainder:
    """What a bf16 weight lacks of its fp32 main weight, int16, so that both together are the main weight to the last bit.

    The weight is the main weight's nearest bf16 number, and of two as near the one farther from zero.
    """

    weight: Tensor
    rest: Tensor

    def read(self, low: int, high: int) -> Tensor:
        """As `Kept` says."""
        upper = self.weight[low:high].view(torch.int16).int() << 16
        return (upper + self.rest[low:high].int()).view(torch.float32)

    def write(self, low: int, values: Tensor, chance: torch.Generator) -> None:
        """As `Kept` says. Moves the weight along."""
        bits = values.float().contiguous().view(torch.int32)
        upper = (bits + 2**15) & -(2**16)
        self.weight[low : low + len(values)].view(torch.int16).copy_((upper >> 16).to(torch.int16))
        self.rest[low : low + len(values)].copy_((bits - upper).to(torch.int16))

    def complete(self, low: int, values: Tensor) -> None:
        """Keep main weights whose weights are there already, and stay. A main weight halfway between two is moved by its last bit."""
        upper = self.weight[low : low + len(values)].view(torch.int16).int() << 16
        rest = (values.float().contiguous().view(torch.int32) - upper).clamp(-(2**15), 2**15 - 1)
        self.rest[low : low + len(values)].copy_(rest.to(torch.int16))

    def memory(self) -> tuple[Tensor, ...]:
        """As `Kept` says. The weight is the network's."""
        return (self.rest,)


def kept_as(kind: str, like: Tensor, *, as_root: bool = False) -> Kept:
    """Zeros for each of these elements. kind: fp32, bf16, fp16 or fp8. as_root: in blocks, as `Blocks` says."""
    size = like.numel()
    if kind == "fp32":
        return Wide(torch.zeros(size, dtype=torch.float32, device=like.device))
    if kind == "bf16":
        return Half(torch.zeros(size, dtype=torch.bfloat16, device=like.device))
    values = torch.zeros(size, dtype=_TYPES[kind], device=like.device)
    return Blocks(kind, values, torch.ones(-(-size // BLOCK), device=like.device), as_root)
