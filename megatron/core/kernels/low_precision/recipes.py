"""Low-precision recipes: formats of the operands, which elements share a scale, and what multiplies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.kernels.low_precision import fp4, fp8, fp8_native
from megatron.core.kernels.low_precision.fp8 import E4M3, E5M2, NumberFormat, QuantizedMatrix, QuantizeTransposeKernels

Operand = Literal["input", "weight", "gradient"]
OPERANDS: tuple[Operand, ...] = ("input", "weight", "gradient")


@dataclass(frozen=True, slots=True)
class LowPrecisionRecipe:
    """How the operands of linear layers are quantized and multiplied.

    forward, backward: number formats of inputs and weights, and of gradients. block: elements along the summed
    dimension that share a scale; 0: the whole tensor shares one. square: blocks of weights are squares, so that they
    serve both directions. history: number of steps whose absolute maxima determine the next scale; 0: current scaling.
    by_largest: it is determined by the largest of these maxima, not by the last. margin: powers of two left above the
    largest value. wgrad: weight gradients are low-precision products, too. native: tensor cores multiply; else
    emulated. holds_weights: weights are stored quantized; their scales are then never delayed. kernels: kernels that
    quantize to fp8; None: torch operations do.
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
    kernels: QuantizeTransposeKernels | None = None

    @property
    def has_single_tensor_scale(self) -> bool:
        """Whether a tensor has a single scale and no block scales."""
        return self.block == 0

    @property
    def is_4_bit(self) -> bool:
        """Whether values have 4 bits (NVFP4); operands of weight gradients are then rotated, and gradients rounded
        stochastically.
        """
        return self.forward == fp4.E2M1

    @property
    def needs_tensor_amax(self) -> bool:
        """Whether the absolute maximum of a whole tensor must be known before any of it can be quantized."""
        return self.has_single_tensor_scale or self.is_4_bit

    @property
    def block_scale_dtype(self) -> torch.dtype:
        """Dtype of the block scales of an input: fp32 where kernels make blocks of 128, as tensor cores take them, else
        e8m0.
        """
        return torch.float32 if self.kernels is not None and self.block == 128 else torch.float8_e8m0fnu

    def transpose_reuses_quantized(self, operand: Operand) -> bool:
        """Whether an operand quantized for products that sum over one dimension also serves, transposed, for those that
        sum over the other.
        """
        return self.has_single_tensor_scale or self.square and operand == "weight"

    def block_shape_of(self, operand: Operand) -> tuple[int, int]:
        """Return the (rows, columns) of an operand that share a scale, for recipes with blocks."""
        return self.block if self.square and operand == "weight" else 1, self.block

    def quantise(
        self,
        operand: Operand,
        x: Tensor,
        largest: Tensor | None = None,
        sizes: Tensor | None = None,
        block: tuple[int, int] | None = None,
    ) -> QuantizedMatrix:
        """Quantize x [m, k] for a product that sums over k.

        largest: [], absolute maximum from which the scale of the tensor is computed; needed if `needs_tensor_amax`.
        sizes: absolute maxima of blocks of which x holds only a part, [m / rows, k / columns]; None: computed from x.
        block: (rows, columns); None: as `block_shape_of` says. Gradients of 4 bits are rounded stochastically, by the
        random numbers of the device.
        """
        number = self.backward if operand == "gradient" else self.forward
        if self.has_single_tensor_scale:
            assert largest is not None, "a scale of the whole tensor is made for its largest value"
            return fp8.quantize_per_tensor(x, number, fp8.quantization_scale(largest, number, self.margin))
        block = block or self.block_shape_of(operand)
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
    ) -> tuple[QuantizedMatrix | None, QuantizedMatrix | None]:
        """Quantize x [m, k] for products that sum over k, and its transpose [k, m] for products that sum over m.
        Return both; None for the first unless `rows`, for the second unless `turned`.

        largest: what `largest_of` returns; None for recipes that need none. seen: [], which kernels raise to the
        absolute maximum of x. Not for 4 bits, where the transpose is rotated first.
        """
        number = self.backward if operand == "gradient" else self.forward
        if self.kernels is not None:
            if self.has_single_tensor_scale:
                return self.kernels.quantize_per_tensor(
                    x, number, largest, margin=self.margin, seen=seen, rows=rows, turned=turned
                )
            return self.kernels.quantize_per_block(x, number, self.block_shape_of(operand), rows=rows, turned=turned)
        if self.transpose_reuses_quantized(operand):
            result = self.quantise(operand, x, largest)
            return (result if rows else None), (result.t() if turned else None)
        return (
            self.quantise(operand, x, largest) if rows else None,
            self.quantise(operand, x.t(), largest) if turned else None,
        )

    def amax_or_partial_amaxes(self, x: Tensor) -> Tensor:
        """Return the absolute maximum of x, []; where kernels compute it, the maxima of parts of x, [parts]."""
        return fp8.tensor_amax(x) if self.kernels is None else self.kernels.largest_of(x)

    def inverse_weight_scales(self, largest: Tensor, sizes: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the scales by which a quantized weight is multiplied when dequantized: that of the tensor, [], and
        those of the blocks, like `sizes`; None where the recipe has none. largest: absolute maximum of the weight, [];
        sizes: of its blocks.
        """
        if self.has_single_tensor_scale:
            return fp8.quantization_scale(largest, self.forward, self.margin).reciprocal(), None
        if self.is_4_bit:
            enlarge, blocks = fp4.nvfp4_scales(sizes, largest)
            return enlarge.reciprocal(), blocks
        return None, fp8.e8m0_block_scales(sizes, self.forward)

    def quantized_matmul(
        self, a: QuantizedMatrix, b: QuantizedMatrix, dtype: torch.dtype, *, fast: bool = False
    ) -> Tensor:
        """Return a b^T, [m, n], in `dtype`, by tensor cores or emulated. a: [m, k]; b: [n, k]. fast: tensor cores may
        accumulate at lower precision, as is usual in forward passes.
        """
        return (
            fp8_native.native_quantized_matmul(a, b, dtype, fast=fast)
            if self.native
            else fp8.emulated_quantized_matmul(a, b, dtype)
        )


def low_precision_recipe_of(
    config: LowPrecisionConfig, device: torch.device, kernels: QuantizeTransposeKernels | None = None
) -> LowPrecisionRecipe | None:
    """Return the low-precision recipe of a run, for products on this device; None if the config has none. kernels:
    kernels that quantize to fp8, used where products are native.
    """
    native = device.type == "cuda" and not config.fp8_emulation
    if config.fp4_format is not None:
        return LowPrecisionRecipe(
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
    return LowPrecisionRecipe(
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


def recipe_unsupported_reason(config: LowPrecisionConfig, device: torch.device) -> str:
    """Return why this device cannot multiply by the recipe of a config, with a way out; "" if it can, or if products
    are emulated.
    """
    if not config.recipe_name or config.fp8_emulation or device.type != "cuda":
        return ""
    flags = f"--fp4-recipe {config.recipe_name}" if config.fp4_format else f"--fp8-recipe {config.recipe_name}"
    reason = fp8_native.scaled_mm_unsupported_reason(config.recipe_name, torch.cuda.get_device_capability(device))
    return (
        f"{flags} cannot be used on this GPU: {reason}; choose another recipe, or --fp8-emulation, which is slow"
        if reason
        else ""
    )
