"""fp8 quantization in Triton's interpreter, to the bit as the definition has it; and weights that are rounded once a step."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatron.core.kernels.low_precision import fp8
from megatron.core.kernels.low_precision.fp8 import E4M3, E5M2, NumberFormat, QuantizedMatrix
from megatron.core.tensor_parallel.low_precision import LowPrecisionScaling
from tests.helpers import tiny
from tests.helpers.training import train_on
from tests.helpers.triton_interpreter import interpreted, needs_triton

BLOCKS = ((1, 32), (1, 128), (128, 128))


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """The file, imported anew so that its kernels are interpreted."""
    with interpreted("triton.quantise") as modules, pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules["triton.quantise"], "_WHOLE_TILE", 64)  # several programs, as on a GPU
        yield modules["triton.quantise"]


def demand_same(found: QuantizedMatrix | None, expected: QuantizedMatrix) -> None:
    """Equal bits of values, and equal scales."""
    assert found is not None and found.block == expected.block
    assert found.values.is_contiguous()
    assert torch.equal(found.values.view(torch.uint8), expected.values.contiguous().view(torch.uint8))
    for mine, theirs in ((found.scale, expected.scale), (found.blocks, expected.blocks)):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert torch.equal(mine.float().nan_to_num(7e7), theirs.float().nan_to_num(7e7))


def matrix(rows: int, columns: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=generator) * torch.randn(rows, columns, generator=generator).exp()
    x = x.bfloat16()
    if kind == "zeros":
        x.zero_()
    elif kind != "plain":
        x[0, -1] = float(kind)
    return x


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("number", [E4M3, E5M2], ids=lambda number: number.name)
@pytest.mark.parametrize("kind", ["plain", "zeros", "nan", "inf"])
def test_a_matrix_and_its_transposed_are_rounded_as_defined(
    kernels: ModuleType, kind: str, number: NumberFormat
) -> None:
    for shape in ((130, 70), (1, 5)):
        x = matrix(*shape, kind)
        parts, expected = kernels.partial_amaxes(x), fp8.tensor_amax(x)
        assert torch.equal(parts.amax().nan_to_num(-1.0), expected.nan_to_num(-1.0))
        seen = torch.zeros(())
        rows, turned = kernels.quantize_per_tensor(x, number, parts, margin=1, seen=seen)
        one = fp8.quantize_per_tensor(x, number, fp8.quantization_scale(expected, number, 1))
        demand_same(rows, one)
        demand_same(turned, one.t())
        assert torch.equal(seen.nan_to_num(-1.0), expected.nan_to_num(-1.0))
        for block in BLOCKS:
            rows, turned = kernels.quantize_per_block(x, number, block)
            demand_same(rows, fp8.quantize_per_block(x, number, block))
            demand_same(turned, fp8.quantize_per_block(x.t(), number, block))
    none, turned = kernels.quantize_per_block(x, number, (1, 32), rows=False)
    assert none is None and turned is not None


@needs_triton
def test_matrices_without_rows_have_a_scale(kernels: ModuleType) -> None:
    x = torch.empty(0, 8)
    rows, turned = kernels.quantize_per_tensor(x, E4M3, kernels.partial_amaxes(x))
    assert rows.values.shape == (0, 8) and turned.values.shape == (8, 0) and float(rows.scale) == 1.0


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize("more", [{}, {"recompute_granularity": "full", "recompute_method": "uniform"}], ids=["", "rc"])
def test_weights_are_rounded_once_a_step(recipe: str, more: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    rounded: list[int] = []
    whole = LowPrecisionScaling.quantise_weight_and_transpose

    def counted(
        self: LowPrecisionScaling, weight: Tensor, largest: Tensor | None
    ) -> tuple[QuantizedMatrix, QuantizedMatrix]:
        rounded.append(id(weight))
        return whole(self, weight, largest)

    def losses() -> list[float]:
        config = tiny.config(
            fp8_format="hybrid", fp8_recipe=recipe, micro_batch_size=1, global_batch_size=4, train_iters=3, **more
        )
        trainer = tiny.trainer_of(tiny.run_of(config))
        found, _ = train_on(trainer, 3)
        scalings = [
            part for stage in trainer.stages for part in stage.modules() if isinstance(part, LowPrecisionScaling)
        ]
        assert scalings and not any(part.caches or part.cached for part in scalings), "nothing outlives its step"
        assert not rounded or len(rounded) == 3 * len(scalings)
        return found

    monkeypatch.setattr(LowPrecisionScaling, "quantise_weight_and_transpose", counted)
    once = losses()
    assert rounded
    rounded.clear()
    monkeypatch.setattr(LowPrecisionScaling, "cached_quantized_weight", lambda self, weight, number, largest=None: None)
    assert once == losses() and not rounded, "as if they were rounded for every product"
