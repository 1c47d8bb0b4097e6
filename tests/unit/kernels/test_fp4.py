"""Matrices in 4 bits against ml_dtypes' roundings, loops, and statistics."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron.core.kernels.low_precision import fp4, fp8, fp8_native


def to_e4m3(x: float) -> float:
    return float(np.float64(min(x, 448.0)).astype(ml_dtypes.float8_e4m3fn))


def by_hand(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """x with two levels of scales, a block at a time, in fp64."""
    found = np.zeros_like(x)
    enlarge = 6.0 * 448.0 / np.abs(x).max()
    for row in range(0, x.shape[0], block[0]):
        for column in range(0, x.shape[1], block[1]):
            place = np.s_[row : row + block[0], column : column + block[1]]
            scale = to_e4m3(np.abs(x[place]).max() * enlarge / 6.0)
            if scale:
                values = np.clip(x[place] * enlarge / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
                found[place] = values * scale / enlarge
    return found


def test_values_are_rounded_to_the_nearest_of_e2m1_and_ties_to_even() -> None:
    x = torch.cat(
        [
            torch.linspace(-7, 7, 4001),
            torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5, -5.0, 0.0, -0.0]),
        ]
    )
    expected = np.clip(x.numpy(), -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    found = fp4.round_to_e2m1(x).numpy()
    assert np.array_equal(found, expected) and np.array_equal(np.signbit(found), np.signbit(expected))
    assert bool(fp4.round_to_e2m1(torch.tensor(float("nan"))).isnan())


def test_rounding_by_chance_takes_a_neighbour_and_keeps_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.tensor([0.1, 0.3, 0.5, 1.9, 2.2, 3.9, 4.5, 5.9, -1.1, -5.0, 6.0, 0.0], dtype=torch.float64)
    draws = 20_000
    found = fp4.round_to_e2m1(x.expand(draws, -1), torch.rand(draws, len(x), generator=generator, dtype=torch.float64))
    for value, column in zip(x.tolist(), found.t(), strict=True):
        seen = set(column.abs().tolist())
        grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        assert seen <= {grid[grid <= abs(value)].max(), grid[grid >= abs(value)].min()}, value
    error = found.std(0, correction=1) / draws**0.5
    assert bool(((found.mean(0) - x).abs() <= 4 * error + 1e-12).all())


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_every_block_has_a_scale_in_e4m3_and_the_tensor_one_more(block: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 40, dtype=torch.float64, generator=generator) * torch.exp2(
        torch.randint(-6, 6, (20, 1), generator=generator).double()
    )
    x[16:, 16:32] = 1e-9  # too small for a scale beside the others
    found = fp4.quantize_nvfp4(x, fp8.tensor_amax(x), block)
    assert found.blocks.dtype == torch.float8_e4m3fn
    assert np.allclose(found.dequantize(torch.float64).numpy(), by_hand(x.numpy(), block), rtol=1e-12, atol=0)


def test_a_tensor_of_zeros_stays_so_and_what_is_not_finite_is_seen() -> None:
    zeros = torch.zeros(3, 16)
    assert torch.equal(fp4.quantize_nvfp4(zeros, fp8.tensor_amax(zeros), (1, 16)).dequantize(torch.float32), zeros)
    for bad in (float("nan"), float("inf")):
        x = torch.ones(1, 16)
        x[0, 3] = bad
        assert not fp4.quantize_nvfp4(x, fp8.tensor_amax(x), (1, 16)).dequantize(torch.float32)[0, 3].isfinite()


def test_the_rotation_is_orthogonal_and_cancels_in_a_product() -> None:
    whole = (fp4.hadamard_matrix(torch.float64, torch.device("cpu")) * 4).to(torch.int64)
    assert set(whole.abs().flatten().tolist()) == {1}
    assert torch.equal(whole @ whole.t(), 16 * torch.eye(16, dtype=torch.int64))
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randint(-8, 8, (rows, 21), generator=generator).double() for rows in (3, 5))
    assert fp4.hadamard_transform(a).shape == (3, 32)
    assert torch.equal(
        fp4.hadamard_transform(a) @ fp4.hadamard_transform(b).t(), a @ b.t()
    )  # quarters of whole numbers: nothing is rounded
    # All of an outlier's weight in one place is spread over sixteen.
    assert torch.equal(fp4.hadamard_transform(16.0 * torch.eye(1, 16)).abs(), torch.full((1, 16), 4.0))


def by_units(
    a: torch.Tensor, b: torch.Tensor, *how: list, output_dtype: torch.dtype, **orders_of: list
) -> torch.Tensor:
    """torch.nn.functional.scaled_mm of two levels of scales, as its documentation and torch's own tests have it, in numpy."""
    scale_a, recipe_a, scale_b, recipe_b = how
    types, orders = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    assert recipe_a == recipe_b == [types.BlockWise1x16, types.TensorWise]
    assert orders_of["swizzle_a"] == orders_of["swizzle_b"] == [orders.SWIZZLE_32_4_4, orders.NO_SWIZZLE]
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])

    def whole(packed: torch.Tensor, scales: list[torch.Tensor]) -> np.ndarray:
        assert packed.dtype == torch.float4_e2m1fn_x2 and packed.is_contiguous() and packed.shape[1] % 16 == 0
        assert scales[0].dtype == torch.float8_e4m3fn and scales[1].dtype == torch.float32
        held = packed.view(torch.uint8).numpy()
        matrix = values[np.stack((held & 15, held >> 4), -1).reshape(len(held), -1)]
        tiles = (
            scales[0].double().numpy().reshape(-1, -(-matrix.shape[1] // 64), 32, 4, 4)
        )  # of 128 rows, of 4 scales; rows 32 apart beside each other
        table = tiles.transpose(0, 3, 2, 1, 4).reshape(tiles.shape[0] * 128, -1)[: len(matrix), : matrix.shape[1] // 16]
        return matrix * table.repeat(16, 1) * float(scales[1])

    return torch.from_numpy(whole(a, scale_a) @ whole(b.t(), scale_b).T).to(output_dtype)


@pytest.mark.parametrize("rows, others, along", [(200, 48, 96), (16, 33, 300), (5, 16, 16)])
def test_units_of_4_bits_are_given_what_the_emulation_multiplies(
    monkeypatch: pytest.MonkeyPatch, rows: int, others: int, along: int
) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", by_units)
    generator = torch.Generator().manual_seed(5)
    x, weight = (
        torch.randn(size, along, generator=generator).mul_(spread) for size, spread in ((rows, 3.0), (others, 0.01))
    )
    for block, turned in (((16, 16), False), ((16, 16), True), ((1, 16), False)):
        left = fp4.quantize_nvfp4(x, x.abs().max(), (1, 16))
        right = fp4.quantize_nvfp4(weight.t() if turned else weight, weight.abs().max(), block)
        right = right.t() if turned else right
        found = fp8_native.native_quantized_matmul(left, right, torch.float32)
        expected = fp8.emulated_quantized_matmul(left, right, torch.float32)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_every_number_of_4_bits_is_packed_as_it_is() -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    held = fp8_native.pack_e2m1(torch.stack((values, -values)).to(torch.float8_e4m3fn).contiguous()).view(torch.uint8)
    assert held.tolist() == [[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]]
