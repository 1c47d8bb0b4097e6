"""Matrices of 8 bits by a GPU's own units, against the emulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.kernels.low_precision import fp8, fp8_native, recipes
from megatron.core.kernels.low_precision.recipes import low_precision_recipe_of
from tests.helpers import tiny
from tests.helpers.low_precision import operands
from tests.helpers.training import train_on

pytestmark = pytest.mark.gpu

RECIPES: dict[str, dict[str, Any]] = {
    name: {"fp8_format": "hybrid", "fp8_recipe": name} for name in ("tensorwise", "delayed", "blockwise", "mxfp8")
}
RECIPES["nvfp4"] = {"fp4_format": "e2m1"}


def fitting(name: str) -> dict[str, Any]:
    """The settings of a recipe that this GPU has units for."""
    config, device = LowPrecisionConfig(**RECIPES[name]), torch.device("cuda")
    if reason := recipes.recipe_unsupported_reason(config, device):
        pytest.skip(reason)
    return RECIPES[name]


@pytest.mark.parametrize("name", RECIPES)
def test_native_products_are_the_emulated_ones(name: str) -> None:
    recipe = low_precision_recipe_of(LowPrecisionConfig(**fitting(name)), torch.device("cuda"))
    assert recipe is not None and recipe.native
    generator = torch.Generator("cuda").manual_seed(1)
    x, weight, gradient = (
        torch.randn(shape, device="cuda", generator=generator).bfloat16()
        for shape in ((300, 512), (384, 512), (300, 384))
    )
    for what, (a, b) in operands(recipe, x, weight, gradient).items():
        found, expected = (
            fp8_native.native_quantized_matmul(a, b, torch.bfloat16).float(),
            fp8.emulated_quantized_matmul(a, b, torch.float32),
        )
        assert torch.allclose(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max())), what


@pytest.mark.parametrize("name", RECIPES)
def test_native_training_stays_near_the_emulated_one(name: str) -> None:
    settings = {
        **fitting(name),
        "bf16": True,
        "use_cpu_initialization": True,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
    }
    losses = [
        train_on(
            tiny.trainer_of(tiny.run_of(tiny.config(**settings, fp8_emulation=emulated), torch.device("cuda"))), 4
        )[0]
        for emulated in (False, True)
    ]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-3)
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
def test_weights_that_are_kept_in_8_bits_are_multiplied_as_those_rounded_when_they_are_used(name: str) -> None:
    settings = {
        **fitting(name),
        "use_cpu_initialization": True,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "use_distributed_optimizer": True,
    }
    losses = [
        train_on(
            tiny.trainer_of(
                tiny.run_of(tiny.config(**settings, bf16=True, fp8_param_gather=kept), torch.device("cuda"))
            ),
            4,
        )[0]
        for kept in (True, False)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_torchao_trains_as_ours() -> None:
    pytest.importorskip("torchao")
    # In narrow layers few values lie so near the middle of two of 8 bits that another order of sums rounds them the other way.
    settings = {**fitting("tensorwise"), "use_cpu_initialization": True}
    losses = [
        train_on(tiny.trainer_of(tiny.run_of(tiny.config(**settings, kernel=words), torch.device("cuda"))), 4)[0]
        for words in (("low_linear=torchao",), ())
    ]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-3)
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
