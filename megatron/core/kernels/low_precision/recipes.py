"""Recipes for matrices of few bits: formats of the operands, what shares a scale, and what multiplies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.kernels.low_precision import fp4, fp8, fp8_native
from megatron.core.kernels.low_precision.fp8 import E4M3, E5M2, Number, Quantised

Operand = Literal["input", "weight", "gradient"]
OPERANDS: tuple[Operand, ...] = ("input", "weight", "gradient")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the three operands of a linear layer are rounded.

    block: elements along the sum that share a scale; 0: all of the tensor. square: a weight's blocks are squares, the same in
    both directions. history: steps whose largest values scale the next one; 0: scales are a tensor's own. by_largest: by the
    largest of them, not the last. wgrad: gradients of weights are products of few bits, too. native: by the device's own units.
    holds_weights: weights are kept rounded; then their scales are never delayed.
    """

    name: str
    forward: Number
    backward: Number
    block: int = 0
    square: bool = False
    history: int = 0
    by_largest: bool = False
    margin: int = 0
    wgrad: bool = True
    native: bool = False
    holds_weights: bool = False

    @property
    def one_scale(self) -> bool:
        """Whether a tensor has one scale."""
        return self.block == 0

    @property
    def is_small(self) -> bool:
        """Whether values are of 4 bits: rotated for the weight's gradient, and gradients rounded by chance."""
        return self.forward == fp4.E2M1

    @property
    def needs_largest(self) -> bool:
        """Whether the largest value of a tensor must be known before any of it is rounded."""
        return self.one_scale or self.is_small

    def turns(self, operand: Operand) -> bool:
        """Whether what is rounded for sums over one dimension also serves sums over the other."""
        return self.one_scale or self.square and operand == "weight"

    def block_of(self, operand: Operand) -> tuple[int, int]:
        """Rows and columns that share a scale, where blocks do."""
        return self.block if self.square and operand == "weight" else 1, self.block

    def quantise(
        self,
        operand: Operand,
        x: Tensor,
        largest: Tensor | None = None,
        sizes: Tensor | None = None,
        block: tuple[int, int] | None = None,
    ) -> Quantised:
        """x [m, k] for a sum over k. largest: [], the value that the scale of a tensor is made for, if it has one.

        sizes: of blocks of which x may lack elements, [m / rows, k / columns]; None: of x. block: None: as `block_of` says. A
        gradient of 4 bits takes its chance from the device's random numbers.
        """
        number = self.backward if operand == "gradient" else self.forward
        if self.one_scale:
            assert largest is not None, "a scale of the whole tensor is made for its largest value"
            return fp8.by_tensor(x, number, fp8.tensor_scale(largest, number, self.margin))
        block = block or self.block_of(operand)
        if self.is_small:
            assert largest is not None, "the scale of the blocks' scales is made for the largest value"
            noise = torch.rand(x.shape, device=x.device) if operand == "gradient" else None
            return fp4.by_small_blocks(x, largest, block, noise, sizes)
        return fp8.by_blocks(x, number, block, sizes)

    def weight_scales(self, largest: Tensor, sizes: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What takes the scale of a whole weight back, [], and of its blocks, like `sizes`; None where there is none."""
        if self.one_scale:
            return fp8.tensor_scale(largest, self.forward, self.margin).reciprocal(), None
        if self.is_small:
            enlarge, blocks = fp4.small_scales(sizes, largest)
            return enlarge.reciprocal(), blocks
        return None, fp8.block_scales(sizes, self.forward)

    def product(self, a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
        """a b^T, [m, n], in `dtype`. a: [m, k]; b: [n, k]."""
        return (fp8_native if self.native else fp8).product(a, b, dtype)


def recipe_of(config: LowPrecisionConfig, device: torch.device) -> Recipe | None:
    """The recipe that a run asks for, as this device multiplies; None if it asks for none."""
    native = device.type == "cuda" and not config.fp8_emulation
    if config.fp4_format is not None:
        return Recipe(
            "nvfp4",
            fp4.E2M1,
            fp4.E2M1,
            block=config.block,
            square=True,
            wgrad=config.fp8_wgrad,
            native=native,
            holds_weights=config.holds_weights,
        )
    if config.fp8_format is None:
        return None
    backward, name = E5M2 if config.fp8_format == "hybrid" else E4M3, config.fp8_recipe
    kept, margin = (config.fp8_amax_history_len, config.fp8_margin) if name == "delayed" else (0, 0)
    return Recipe(
        name,
        E4M3,
        backward,
        block=config.block,
        square=name == "blockwise",
        history=kept,
        margin=margin,
        by_largest=config.fp8_amax_compute_algo == "max",
        wgrad=config.fp8_wgrad,
        native=native,
        holds_weights=config.holds_weights,
    )


def unfit(config: LowPrecisionConfig, device: torch.device) -> str:
    """Why a run cannot have its recipe on this device, and what to do; empty if it can."""
    if not config.recipe or config.fp8_emulation or device.type != "cuda":
        return ""
    asked = f"--fp4-recipe {config.recipe}" if config.fp4_format else f"--fp8-recipe {config.recipe}"
    reason = fp8_native.unfit(config.recipe, torch.cuda.get_device_capability(device))
    return (
        f"{asked} cannot be used on this GPU: {reason}; choose another recipe, or --fp8-emulation, which is slow"
        if reason
        else ""
    )
