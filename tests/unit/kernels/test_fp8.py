"""Matrices in 8 bits against formulas that share nothing with them: ml_dtypes' roundings, exact fractions, loops."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.kernels.low_precision import fp8, fp8_native
from megatron.core.kernels.low_precision.fp8 import E4M3, E5M2, NumberFormat, QuantizedMatrix
from megatron.core.kernels.low_precision.recipes import low_precision_recipe_of
from tests.helpers.low_precision import operands

THEIRS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def rounded(x: np.ndarray, number: NumberFormat) -> np.ndarray:
    """The nearest numbers of the format, by ml_dtypes; what is too large is the largest."""
    return np.clip(x, -number.largest, number.largest).astype(THEIRS[number.name]).astype(np.float64)


def awkward(number: NumberFormat) -> Tensor:
    """Every number of the format, the middles between neighbours and what is just beside them, and what is too large."""
    every = np.arange(256, dtype=np.uint8).view(THEIRS[number.name]).astype(np.float64)
    every = np.unique(every[np.isfinite(every)])
    middles = (every[1:] + every[:-1]) / 2
    values = np.concatenate(
        [every, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), [number.largest * 1.01, -1e30, 1e-30, 0.0, -0.0]]
    )
    return torch.from_numpy(values).float()[None]


def smallest_power(values: np.ndarray, largest: float) -> int:
    """The smallest n with all |values| <= largest * 2^n, by exact arithmetic."""
    top = max((abs(Fraction(float(value))) for value in values.flat), default=Fraction(0))
    if not top:
        return 0
    n = math.ceil(math.log2(top / Fraction(largest))) + 2
    while top <= Fraction(largest) * Fraction(2) ** (n - 1):
        n -= 1
    return max(-127, min(127, n))


def by_hand(x: Tensor, number: NumberFormat, block: tuple[int, int]) -> np.ndarray:
    """x with every block rounded by itself."""
    values, found = x.double().numpy(), np.zeros(x.shape)
    for row in range(0, x.shape[0], block[0]):
        for column in range(0, x.shape[1], block[1]):
            place = np.s_[row : row + block[0], column : column + block[1]]
            scale = 2.0 ** smallest_power(values[place], number.largest)
            found[place] = rounded(values[place] / scale, number) * scale
    return found


@pytest.mark.parametrize("number", [E4M3, E5M2], ids=lambda number: number.name)
def test_values_are_rounded_to_the_nearest_and_ties_to_even(number: NumberFormat) -> None:
    x = awkward(number)
    found = fp8.quantize_per_tensor(x, number, torch.tensor(1.0)).values.double().numpy()
    assert np.array_equal(found, rounded(x.double().numpy(), number))


def test_a_tensors_largest_value_becomes_the_largest_number() -> None:
    x = torch.tensor([[0.1, -3.0], [0.02, 0.0]])
    for margin in (0, 2):
        scale = fp8.quantization_scale(fp8.tensor_amax(x), E4M3, margin)
        assert float(scale) == pytest.approx(448 / 3 / 2**margin, rel=1e-6)
        found = fp8.quantize_per_tensor(x, E4M3, scale)
        assert np.array_equal(found.values.double().numpy(), rounded((x * scale).double().numpy(), E4M3))
        assert float(found.scale) == pytest.approx(1 / float(scale), rel=1e-6)


@pytest.mark.parametrize(
    "largest, expected", [(0.0, 1.0), (1e-45, torch.finfo(torch.float32).max), (448.0, 1.0), (3.0e38, 448 / 3.0e38)]
)
def test_scales_are_finite_whatever_a_finite_tensor_holds(largest: float, expected: float) -> None:
    assert float(fp8.quantization_scale(torch.tensor(largest), E4M3)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("number", [E4M3, E5M2], ids=lambda number: number.name)
@pytest.mark.parametrize("block", [(1, 4), (1, 32), (4, 4), (3, 5)])
def test_every_block_is_scaled_by_the_smallest_power_that_lets_nothing_saturate(
    number: NumberFormat, block: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(10, 37, generator=generator) * torch.exp2(
        torch.randint(-30, 30, (10, 37), generator=generator).float()
    )
    x[0, :5], x[3] = (
        number.largest * 2.0**-9,
        0.0,
    )  # a block whose largest value is just the largest number, and blocks of zeros
    x[1, 0] = float(np.nextafter(np.float32(number.largest * 8), np.float32(np.inf)))
    found = fp8.quantize_per_block(x, number, block)
    assert found.blocks.dtype == torch.float8_e8m0fnu and found.values.dtype == number.dtype
    assert tuple(found.blocks.shape) == (-(-10 // block[0]), -(-37 // block[1]))
    assert np.array_equal(found.dequantize(torch.float64).numpy(), by_hand(x, number, block))
    for row, powers in enumerate(found.blocks.double().tolist()):
        for column, power in enumerate(powers):
            tile = x.double().numpy()[
                row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]
            ]
            assert not tile.any() or power == 2.0 ** smallest_power(tile, number.largest)


def test_powers_of_blocks_stay_in_their_format() -> None:
    x = torch.tensor([[1e-44, 0.0], [3e38, 1.0]])
    found = fp8.quantize_per_block(x, E4M3, (1, 2))
    theirs = np.array([2.0**-127, 2.0**120]).astype(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert found.blocks.double().flatten().tolist() == theirs.tolist()


def test_what_is_not_finite_spoils_its_block_and_no_other() -> None:
    x = torch.ones(2, 8)
    x[0, 1], x[1, 6] = float("nan"), float("inf")
    spoilt = fp8.quantize_per_block(x, E4M3, (1, 4)).dequantize(torch.float32).isnan()
    assert spoilt.tolist() == [[True] * 4 + [False] * 4, [False] * 4 + [True] * 4]
    for bad in (float("nan"), float("inf")):
        y = torch.tensor([[1.0, bad]])
        found = fp8.quantize_per_tensor(y, E4M3, fp8.quantization_scale(fp8.tensor_amax(y), E4M3)).dequantize(
            torch.float32
        )
        assert not found.isfinite().any()


def test_the_product_is_that_of_the_rounded_values_to_the_last_bit() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randint(-15, 16, (rows, 8), generator=generator).float() for rows in (3, 5))
    a[:, 4:], b[:, 4:] = a[:, 4:] / 64, b[:, 4:] * 4  # blocks of other powers, sums that fp32 still holds
    left, right = fp8.quantize_per_block(a, E4M3, (1, 4)), fp8.quantize_per_block(b, E4M3, (5, 4))
    exact = [
        [
            sum(Fraction(p) * Fraction(q) for p, q in zip(row, other, strict=True))
            for other in right.dequantize(torch.float64).tolist()
        ]
        for row in left.dequantize(torch.float64).tolist()
    ]
    assert fp8.emulated_quantized_matmul(left, right, torch.float32).tolist() == [
        [float(value) for value in row] for row in exact
    ]
    scaled_a, scaled_b = (
        QuantizedMatrix(left.values, torch.tensor(0.3)),
        QuantizedMatrix(right.values, torch.tensor(0.7)),
    )
    whole = np.array(
        [
            [
                sum(Fraction(p) * Fraction(q) for p, q in zip(row, other, strict=True))
                for other in right.values.double().tolist()
            ]
            for row in left.values.double().tolist()
        ],
        dtype=np.float32,
    )
    expected = whole * (np.float32(0.3) * np.float32(0.7))
    assert np.array_equal(fp8.emulated_quantized_matmul(scaled_a, scaled_b, torch.float32).numpy(), expected)


def test_a_transposed_matrix_keeps_its_blocks() -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(3))
    for found in (fp8.quantize_per_block(x, E4M3, (2, 4)), fp8.quantize_per_tensor(x, E4M3, torch.tensor(7.0))):
        assert torch.equal(found.t().dequantize(torch.float32), found.dequantize(torch.float32).t())


@pytest.mark.parametrize("rows, others, along", [(5, 16, 32), (16, 32, 21), (5, 9, 32), (0, 16, 16), (4, 16, 0)])
def test_the_native_product_of_scaled_tensors_is_the_emulated_one(rows: int, others: int, along: int) -> None:
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(size, along, generator=generator) for size in (rows, others))
    left = fp8.quantize_per_tensor(a, E4M3, torch.tensor(30.0))
    right = fp8.quantize_per_tensor(b, E4M3, torch.tensor(20.0))
    found = fp8_native.native_quantized_matmul(left, right, torch.float32)
    expected = fp8.emulated_quantized_matmul(left, right, torch.float32)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_hopper_gets_the_scales_of_blocks_as_it_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS: of 1 x 128 [rows, k / 128], of 128 x 128 [k / 128 up to a multiple of 4, rows / 128], both column by column."""
    seen, whole = [], []

    def unit(
        a: Tensor, b: Tensor, scale_a: Tensor, kind_a: object, scale_b: Tensor, kind_b: object, **others: object
    ) -> Tensor:
        assert (
            a.stride() == (a.shape[1], 1) and b.stride() == (1, b.shape[0]) and a.shape[1] % 128 == b.shape[1] % 16 == 0
        )
        for scales, kind, rows in ((scale_a, kind_a, a.shape[0]), (scale_b, kind_b, b.shape[1])):
            blocks = a.shape[1] // 128
            shape = (rows, blocks) if kind == F.ScalingType.BlockWise1x128 else (-(-blocks // 4) * 4, rows // 128)
            assert (
                scales.shape == shape
                and scales.stride() in ((1, shape[0]), (1, 1) if shape[1] == 1 else ())
                and scales.dtype == torch.float32
            )
            assert rows % (4 if kind == F.ScalingType.BlockWise1x128 else 128) == 0
            whole.append(
                scales.repeat_interleave(128, 1)[:rows]
                if kind == F.ScalingType.BlockWise1x128
                else scales.t()[:, :blocks].repeat_interleave(128, 0).repeat_interleave(128, 1)
            )
            seen.append(kind)
        return ((a.float() * whole[-2]) @ (b.t().float() * whole[-1]).t()).bfloat16()

    monkeypatch.setattr(F, "scaled_mm", unit)
    recipe = low_precision_recipe_of(
        LowPrecisionConfig(fp8_format="hybrid", fp8_recipe="blockwise"), torch.device("cuda")
    )
    assert recipe is not None and recipe.native
    generator = torch.Generator().manual_seed(5)
    for tokens, out in ((300, 384), (300, 512), (37, 200)):
        x, weight, gradient = (
            torch.randn(shape, generator=generator) for shape in ((tokens, 512), (out, 512), (tokens, out))
        )
        for a, b in operands(recipe, x, weight, gradient).values():
            torch.testing.assert_close(
                recipe.quantized_matmul(a, b, torch.bfloat16), fp8.emulated_quantized_matmul(a, b, torch.bfloat16)
            )
    assert {kind.name for kind in seen} == {"BlockWise1x128", "BlockWise128x128"} and len(seen) == 18


def test_scales_lie_in_tiles_as_blackwell_reads_them() -> None:
    scales = torch.exp2(torch.arange(-64, 136).remainder(100).float() - 50).view(200, 1) * torch.ones(1, 6)
    scales = (scales * torch.exp2(torch.arange(6).float())).to(torch.float8_e8m0fnu)
    found = fp8_native.swizzle_scales(scales).view(torch.uint8)
    assert found.numel() == 256 * 8
    for row in range(200):
        for column in range(6):
            place = (row // 128 * 2 + column // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert found[place] == scales.view(torch.uint8)[row, column]


@pytest.mark.parametrize(
    "recipe, capability, words",
    [
        ("tensorwise", (8, 0), "Ada"),
        ("delayed", (8, 9), ""),
        ("tensorwise", (9, 0), ""),
        ("blockwise", (9, 0), ""),
        ("blockwise", (8, 9), "Hopper"),
        ("blockwise", (10, 0), "Hopper"),
        ("mxfp8", (9, 0), "Blackwell"),
        ("mxfp8", (10, 0), ""),
        ("nvfp4", (9, 0), "4 bits need Blackwell"),
        ("nvfp4", (12, 0), ""),
    ],
)
def test_a_gpu_says_which_recipes_it_has_no_units_for(recipe: str, capability: tuple[int, int], words: str) -> None:
    found = fp8_native.scaled_mm_unsupported_reason(recipe, capability)
    assert words in found and bool(words) == bool(found)


def test_a_gpu_multiplies_by_itself_unless_it_is_told_to_emulate() -> None:
    for device, emulation, native in (("cuda", False, True), ("cuda", True, False), ("cpu", False, False)):
        recipe = low_precision_recipe_of(
            LowPrecisionConfig(fp8_format="e4m3", fp8_emulation=emulation), torch.device(device)
        )
        assert recipe is not None and recipe.native == native
    assert low_precision_recipe_of(LowPrecisionConfig(), torch.device("cpu")) is None
