"""Low-precision recipes: formats of the operands, which elements share a scale, and what multiplies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.kernels.low_precision import fp4, fp8, fp8_native
from megatron.core.kernels.low_precision.fp8 import E4M3, E5M2, FusedRounding, NumberFormat, Quantised

Operand = Literal["input", "weight", "gradient"]
OPERANDS: tuple[Operand, ...] = ("input", "weight", "gradient")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the operands of a linear layer are quantized.

    block: elements along the sum that share a scale; 0: the whole tensor. square: a weight's blocks are squares, the same for both directions. history: number of
    steps whose absolute maxima give the next scale; 0: current scaling. by_largest: by the largest of these maxima, not the last. wgrad: weight gradients
    are low-precision products, too. native: by the device's tensor cores. holds_weights: weights are kept quantized; their scales are then never delayed.
    kernels: those that round to 8 bits; None: torch's operations.
    """

    name: str
    forward: NumberFormat
    backward: NumberFormat
    block: int = 0
    square: bool = False
    history: int = 0
    by_largest: bool = False
    margin: int = 0
    wgrad: bool = True
    native: bool = False
    holds_weights: bool = False
    kernels: FusedRounding | None = None

    @property
    def one_scale(self) -> bool:
        """Whether a tensor has a single scale."""
        return self.block == 0

    @property
    def is_4_bit(self) -> bool:
        """Whether values have 4 bits: rotated for weight gradients, and gradients rounded stochastically."""
        return self.forward == fp4.E2M1

    @property
    def needs_largest(self) -> bool:
        """Whether a tensor's absolute maximum must be known before any of it is rounded."""
        return self.one_scale or self.is_4_bit

    @property
    def block_scale_dtype(self) -> torch.dtype:
        """The dtype of the scales of an input's blocks: kernels make those of 128 as the hardware wants them."""
        return torch.float32 if self.kernels is not None and self.block == 128 else torch.float8_e8m0fnu

    def serves_transposed(self, operand: Operand) -> bool:
        """Whether an operand quantized for sums over one dimension also serves sums over the other."""
        return self.one_scale or self.square and operand == "weight"

    def block_of(self, operand: Operand) -> tuple[int, int]:
        """Return (rows, columns) that share a scale, for recipes with blocks."""
        return self.block if self.square and operand == "weight" else 1, self.block

    def quantise(
        self,
        operand: Operand,
        x: Tensor,
        largest: Tensor | None = None,
        sizes: Tensor | None = None,
        block: tuple[int, int] | None = None,
    ) -> Quantised:
        """Quantize x [m, k] for a sum over k. largest: [], the absolute maximum that the tensor's scale is made for, if it has one.

        sizes: absolute maxima of blocks of which x holds only a part, [m / rows, k / columns]; None: of x. block: None: as `block_of` says. Stochastic rounding of 4-bit
        gradients draws from the device's random numbers.
        """
        number = self.backward if operand == "gradient" else self.forward
        if self.one_scale:
            assert largest is not None, "a scale of the whole tensor is made for its largest value"
            return fp8.quantize_per_tensor(x, number, fp8.tensor_scale(largest, number, self.margin))
        block = block or self.block_of(operand)
        if self.is_4_bit:
            assert largest is not None, "the scale of the blocks' scales is made for the largest value"
            noise = torch.rand(x.shape, device=x.device) if operand == "gradient" else None
            return fp4.quantize_nvfp4(x, largest, block, noise, sizes)
        return fp8.quantize_per_block(x, number, block, sizes)

    def quantise_with_transpose(
        self,
        operand: Operand,
        x: Tensor,
        largest: Tensor | None,
        *,
        rows: bool = True,
        turned: bool = True,
        seen: Tensor | None = None,
    ) -> tuple[Quantised | None, Quantised | None]:
        """Quantize x [m, k] for a sum over k, and its transposed [k, m] for a sum over m; None for what is not asked for.

        largest: as `largest_of` gives it. seen: [], raised by kernels to the absolute maximum of x. Not for 4 bits, whose transposed is rotated.
        """
        number = self.backward if operand == "gradient" else self.forward
        if self.kernels is not None:
            if self.one_scale:
                return self.kernels.quantize_per_tensor(
                    x, number, largest, margin=self.margin, seen=seen, rows=rows, turned=turned
                )
            return self.kernels.quantize_per_block(x, number, self.block_of(operand), rows=rows, turned=turned)
        if self.serves_transposed(operand):
            result = self.quantise(operand, x, largest)
            return (result if rows else None), (result.t() if turned else None)
        return (
            self.quantise(operand, x, largest) if rows else None,
            self.quantise(operand, x.t(), largest) if turned else None,
        )

    def largest_of(self, x: Tensor) -> Tensor:
        """Return the absolute maximum of x, [], or as kernels have it, of its parts, [parts]."""
        return fp8.largest_of(x) if self.kernels is None else self.kernels.largest_of(x)

    def weight_scales(self, largest: Tensor, sizes: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the inverse scales of a whole weight, [], and of its blocks, like `sizes`; None where the recipe has none."""
        if self.one_scale:
            return fp8.tensor_scale(largest, self.forward, self.margin).reciprocal(), None
        if self.is_4_bit:
            enlarge, blocks = fp4.nvfp4_scales(sizes, largest)
            return enlarge.reciprocal(), blocks
        return None, fp8.block_scales(sizes, self.forward)

    def product(self, a: Quantised, b: Quantised, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        """Return a b^T, [m, n], in `dtype`. a: [m, k]; b: [n, k]. fast: units may sum in fewer bits, as is usual in forward passes."""
        return fp8_native.product(a, b, dtype, fast=fast) if self.native else fp8.product(a, b, dtype)


def recipe_of(config: LowPrecisionConfig, device: torch.device, kernels: FusedRounding | None = None) -> Recipe | None:
    """Return the recipe that a run requests, as this device multiplies; None if it requests none. kernels: those that round to 8 bits."""
    native = device.type == "cuda" and not config.fp8_emulation
    if config.fp4_format is not None:
        return Recipe(
            "nvfp4",
            fp4.E2M1,
            fp4.E2M1,
            block=config.scale_block_size,
            square=True,
            wgrad=config.fp8_wgrad,
            native=native,
            holds_weights=config.has_quantized_weights,
        )
    if config.fp8_format is None:
        return None
    backward, name = E5M2 if config.fp8_format == "hybrid" else E4M3, config.fp8_recipe
    history, margin = (config.fp8_amax_history_len, config.fp8_margin) if name == "delayed" else (0, 0)
    return Recipe(
        name,
        E4M3,
        backward,
        block=config.scale_block_size,
        square=name == "blockwise",
        history=history,
        margin=margin,
        by_largest=config.fp8_amax_compute_algo == "max",
        wgrad=config.fp8_wgrad,
        native=native,
        holds_weights=config.has_quantized_weights,
        kernels=kernels if native else None,
    )


def unsupported_reason(config: LowPrecisionConfig, device: torch.device) -> str:
    """Return why a run cannot use its recipe on this device, and what to do; an empty string if it can."""
    if not config.recipe or config.fp8_emulation or device.type != "cuda":
        return ""
    flags = f"--fp4-recipe {config.recipe}" if config.fp4_format else f"--fp8-recipe {config.recipe}"
    reason = fp8_native.unsupported_reason(config.recipe, torch.cuda.get_device_capability(device))
    return (
        f"{flags} cannot be used on this GPU: {reason}; choose another recipe, or --fp8-emulation, which is slow"
        if reason
        else ""
    )
