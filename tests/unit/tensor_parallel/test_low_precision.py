"""Linear layers of rounded operands: their three products, delayed scales, and which layers have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.kernels.low_precision import fp4, fp8
from megatron.core.kernels.low_precision.recipes import LowPrecisionRecipe, low_precision_recipe_of
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.parallel.wgrad import WeightGradStore
from megatron.core.tensor_parallel.low_precision import (
    LowPrecisionLinearOptions,
    LowPrecisionScaling,
    LowPrecisionSetup,
    begin_low_precision_step,
    delayed_scalings_by_layer,
    low_precision_grouped_linear,
    low_precision_linear,
)
from tests.helpers import tiny
from tests.helpers.world import Worlds
from tests.unit.tensor_parallel import ranks

CPU = torch.device("cpu")
Rounds = Callable[[str, Tensor], Tensor]
RECIPES: dict[str, dict[str, Any]] = {
    "tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "blockwise": {"fp8_format": "hybrid", "fp8_recipe": "blockwise"},
    "nvfp4": {"fp4_format": "e2m1"},
}


def made(**settings: Any) -> tuple[LowPrecisionRecipe, LowPrecisionScaling]:
    """A recipe, with blocks of 16 instead of 128, and the scales of a layer of this process alone."""
    recipe = low_precision_recipe_of(LowPrecisionConfig(**settings), CPU)
    assert recipe is not None
    recipe = replace(recipe, block=min(recipe.block, 16))
    mesh = Mesh.single_process(CPU)
    low = LowPrecisionSetup(recipe, mesh, RandomStreams.build(mesh, 3))
    return recipe, LowPrecisionScaling(low, shared=mesh.tp_cp, cut=mesh.tp)


def rounding(name: str) -> Rounds:
    """What a recipe makes of a matrix [m, k] for a sum over k, of kernels that have tests of their own."""

    def by_tensor(operand: str, x: Tensor) -> Tensor:
        number = fp8.E5M2 if operand == "gradient" else fp8.E4M3
        return fp8.quantize_per_tensor(x, number, fp8.quantization_scale(x.abs().max(), number)).dequantize(x.dtype)

    def by_blocks(operand: str, x: Tensor) -> Tensor:
        number = fp8.E5M2 if operand == "gradient" and name == "blockwise" else fp8.E4M3
        return fp8.quantize_per_block(
            x, number, (16 if operand == "weight" and name == "blockwise" else 1, 16)
        ).dequantize(x.dtype)

    def in_four_bits(operand: str, x: Tensor) -> Tensor:
        return fp4.quantize_nvfp4(x, x.abs().max(), (16 if operand == "weight" else 1, 16)).dequantize(x.dtype)

    return {"tensorwise": by_tensor, "nvfp4": in_four_bits}.get(name, by_blocks)


def operands(seed: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An input [6, 3, 32], a weight [48, 32], a bias and a gradient, of uneven sizes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((6, 3, 32), (48, 32), (48,), (6, 3, 48))
    x, weight, bias, gradient = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    x[..., 3] *= 30.0
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), gradient


def nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round to the nearest what would be rounded by chance."""
    monkeypatch.setattr(torch, "rand", lambda *_, **__: None)


@pytest.mark.parametrize("wgrad", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_each_of_the_three_products_has_its_operands_rounded_along_its_sum(
    name: str, wgrad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearest(monkeypatch)
    _, scaling = made(**RECIPES[name], fp8_wgrad=wgrad)
    x, weight, bias, gradient = operands()
    output = low_precision_linear(x, weight, bias, LowPrecisionLinearOptions(scaling))
    output.backward(gradient)
    rounds, tokens, g = rounding(name), x.detach().flatten(0, 1), gradient.flatten(0, 1)
    turned = fp4.hadamard_transform if name == "nvfp4" else lambda matrix: matrix
    expected = rounds("input", tokens) @ rounds("weight", weight.detach()).t()
    assert torch.allclose(output, expected.view(6, 3, 48) + bias, rtol=1e-12)
    assert torch.allclose(
        x.grad.flatten(0, 1), rounds("gradient", g) @ rounds("weight", weight.detach().t()).t(), rtol=1e-11, atol=1e-11
    )
    left, right = rounds("gradient", turned(g.t())), rounds("input", turned(tokens.t()))
    assert torch.allclose(weight.grad, left @ right.t() if wgrad else g.t() @ tokens, rtol=1e-11, atol=1e-11)
    assert torch.allclose(bias.grad, g.sum(0))
    assert not torch.allclose(expected, tokens @ weight.detach().t(), rtol=1e-4), "something was rounded"


def test_gradients_of_one_scale_are_autograds_through_the_rounded_operands() -> None:
    _, scaling = made(**RECIPES["tensorwise"])
    x, weight, bias, gradient = operands()
    low_precision_linear(x, weight, bias, LowPrecisionLinearOptions(scaling)).backward(gradient)
    rounds = rounding("tensorwise")
    near = [
        rounds("input", x.detach().flatten(0, 1)).view(x.shape).requires_grad_(),
        rounds("weight", weight.detach()).requires_grad_(),
    ]
    expected = torch.autograd.grad(
        F.linear(*near), near, rounds("gradient", gradient.flatten(0, 1)).view(gradient.shape)
    )
    for found, wanted in zip((x.grad, weight.grad), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", RECIPES)
def test_a_weights_gradient_that_waits_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nearest(monkeypatch)
    _, scaling = made(**RECIPES[name])
    wgrad_store, found = WeightGradStore(), []
    for way in (LowPrecisionLinearOptions(scaling), LowPrecisionLinearOptions(scaling, wgrad_store=wgrad_store)):
        x, weight, bias, gradient = operands()
        output = low_precision_linear(x, weight, bias, way)
        if way.wgrad_store is None:
            output.backward(gradient)
        else:
            with wgrad_store.delaying((0, 0)):
                output.backward(gradient)
            assert weight.grad is None
            wgrad_store.pop((0, 0))
        found.append((x.grad, weight.grad, bias.grad))
    assert all(torch.equal(now, then) for now, then in zip(*found, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_experts_are_multiplied_each_by_itself_and_some_have_no_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearest(monkeypatch)
    _, scaling = made(**RECIPES[name])
    generator = torch.Generator().manual_seed(6)
    x, weight = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((9, 16), (3, 32, 16)))
    counts, gradient = torch.tensor([5, 0, 4]), torch.randn(9, 32, generator=generator)
    low_precision_grouped_linear(x, weight, counts, None, scaling).backward(gradient)
    for expert, rows in ((0, slice(0, 5)), (2, slice(5, 9))):
        own, matrix = x.detach()[rows].requires_grad_(), weight.detach()[expert].requires_grad_()
        low_precision_linear(own, matrix, None, LowPrecisionLinearOptions(scaling)).backward(gradient[rows])
        assert torch.equal(x.grad[rows], own.grad) and torch.equal(weight.grad[expert], matrix.grad)
    assert not weight.grad[1].any()


def test_gradients_of_four_bits_are_rounded_by_chance_and_right_on_average() -> None:
    _, scaling = made(**RECIPES["nvfp4"], fp8_wgrad=False)
    x, weight, bias, gradient = operands()
    draws, state = [], torch.get_rng_state()
    for _ in range(400):
        x.grad = None
        low_precision_linear(x, weight, bias, LowPrecisionLinearOptions(scaling)).backward(gradient)
        draws.append(x.grad.flatten())
    assert torch.equal(torch.get_rng_state(), state), (
        "chance has a random stream that tensor ranks need not have in common"
    )
    found = torch.stack(draws)
    expected = (gradient.flatten(0, 1) @ rounding("nvfp4")("weight", weight.detach())).flatten()
    error = found.std(0) / len(draws) ** 0.5
    assert bool((found.std(0) > 0).any())
    # A block's largest value may saturate a little, where its scale was rounded down.
    assert float(((found.mean(0) - expected).abs() / error.clamp(min=1e-9)).mean()) < 1.5


def test_delayed_scales_come_from_the_largest_values_of_earlier_steps() -> None:
    recipe, scaling = made(fp8_format="e4m3", fp8_recipe="delayed", fp8_amax_history_len=2)
    seen: list[float] = []
    for size in (2.0, 8.0, 1.0, 0.0):
        x = torch.full((4, 16), size)
        known = scaling.global_amax("input", x)
        assert float(known) == (seen[-1] if seen else size), "the first step scales by itself"
        scaling.global_amax("input", x / 2)  # another microbatch
        LowPrecisionScaling.after_step([scaling], stepped=True)
        seen.append(size or seen[-1])  # a step that says nothing is as the one before
        assert scaling.history[0].tolist() == [*reversed(seen[-2:]), 0.0][:2]
    scaling.recipe = replace(recipe, by_largest=True)
    scaling.load_amax_history(torch.tensor([[1.0, 5.0, 9.0]] * 3))
    assert float(scaling.global_amax("input", torch.ones(1, 16))) == 5.0, "of the two steps that are kept"
    scaling.global_amax("gradient", torch.full((1, 16), float("inf")))
    LowPrecisionScaling.after_step([scaling], stepped=True)
    assert scaling.history[2].tolist() == [1.0, 1.0], "what is not finite is no largest value"
    before = scaling.history.clone()
    scaling.global_amax("gradient", torch.full((1, 16), 1e30))
    LowPrecisionScaling.after_step([scaling], stepped=False)
    assert torch.equal(scaling.history, before) and not scaling.seen.any(), "a step that is not used leaves no trace"
    too_large = recipe.quantise("input", torch.full((1, 16), 100.0), torch.tensor(5.0))
    assert too_large.dequantize(torch.float32).unique().tolist() == pytest.approx([5.0]), (
        "what outgrows a delayed scale saturates"
    )


def test_evaluation_leaves_no_trace_in_delayed_scales() -> None:
    _, scaling = made(fp8_format="e4m3", fp8_recipe="delayed")
    scaling.eval()
    scaling.global_amax("input", torch.ones(1, 16))
    assert not scaling.seen.any()


def trainer_of(**changes: Any) -> Any:
    return tiny.trainer_of(tiny.run_of(tiny.config(**changes)))


def test_the_first_and_last_layers_can_stay_wide_and_what_is_no_layer_does() -> None:
    trainer = trainer_of(
        fp8_format="hybrid",
        fp8_recipe="delayed",
        first_last_layers_bf16=True,
        num_layers_at_end_in_bf16=2,
        num_experts=2,
        moe_layer_freq="2",
        moe_ffn_hidden_size=16,
        mtp_num_layers=1,
    )
    names = {
        name
        for stage in trainer.stages
        for name, module in stage.named_modules()
        if isinstance(module, LowPrecisionScaling)
    }
    layer = "decoder.layers.1"
    ahead = "mtp.layers.0.mtp_model_layer"
    parts = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    assert names == {f"{owner}.{part}.scaling" for owner in (layer, ahead) for part in parts}
    assert {f"{name}.scaling" for name in delayed_scalings_by_layer(trainer.stages)} == names


@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
@pytest.mark.parametrize("context_ranks", [1, 2])
@pytest.mark.parametrize("here", [True, False])
def test_weights_are_asked_about_together_before_a_step_or_each_beside_its_input(
    recipe: str, context_ranks: int, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that arrive later go with their inputs; with context ranks an input is shared by more ranks than the weight, and there are two collectives."""
    sent: list[tuple[int, ...]] = []

    def largest_anywhere(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
        if axis.group is not None:
            sent.append(tuple(x.shape))
        return x

    monkeypatch.setattr("megatron.core.parallel.collectives.all_reduce", largest_anywhere)
    made_of, alone = made(**RECIPES[recipe])[0], Mesh.single_process(CPU)
    tensor = Axis("tp", 2, ranks=(0, 1), group=object())  # type: ignore[arg-type] - only asked whether there is one
    shared = Axis("tp_cp", 2 * context_ranks, ranks=tuple(range(2 * context_ranks)), group=object())  # type: ignore[arg-type]
    x, layers = torch.randn(32, 32), torch.nn.ModuleList(torch.nn.Linear(32, 32, bias=False) for _ in range(3))
    for layer in layers:
        low = LowPrecisionSetup(made_of, alone, RandomStreams.build(alone, 3))
        layer.scaling = LowPrecisionScaling(low, shared=shared, cut=tensor)
    expected = [
        low_precision_linear(x, layer.weight, None, LowPrecisionLinearOptions(made(**RECIPES[recipe])[1]))
        for layer in layers
    ]
    begin_low_precision_step([layers], weights_stay=True, weights_wait=not here)
    found = [len(sent)]
    for _ in range(2):
        sent.clear()
        for layer, output in zip(layers, expected, strict=True):
            assert_close(
                low_precision_linear(x, layer.weight, None, LowPrecisionLinearOptions(layer.scaling)),
                output,
                rtol=0.0,
                atol=0.0,
            )
        found.append(len(sent))
    assert found == ([1, 3, 3] if here else [0, 3 * context_ranks, 3])


def test_a_weight_that_changes_within_a_step_is_asked_about_again() -> None:
    _, scaling = made(**RECIPES["tensorwise"])
    layer, x = torch.nn.Linear(32, 32, bias=False), torch.randn(4, 32)
    layer.scaling = scaling
    begin_low_precision_step([layer], weights_stay=True, weights_wait=False)
    with torch.no_grad():
        layer.weight *= 3.0
    found = low_precision_linear(x, layer.weight, None, LowPrecisionLinearOptions(scaling))
    assert_close(
        found,
        low_precision_linear(x, layer.weight, None, LowPrecisionLinearOptions(made(**RECIPES["tensorwise"])[1])),
        rtol=0.0,
        atol=0.0,
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "nvfp4", "held"])
def test_collectives_of_a_step_for_scales_are_counted(recipe: str, world: Worlds) -> None:
    """Beside those of a step in bf16, on two tensor x two data ranks, of two layers of four matrices and four microbatches."""
    settings: dict[str, Any] = {"tensor_model_parallel_size": 2, "num_layers": 2, "bf16": True}
    low: dict[str, Any] = {
        "delayed": {"fp8_format": "hybrid", "fp8_recipe": "delayed"},
        "held": {**RECIPES["tensorwise"], "fp8_param_gather": True},
    }.get(recipe) or RECIPES[recipe]
    settings |= {"use_distributed_optimizer": True, "ddp_bucket_size": 4000} if recipe == "held" else {}
    plain, found = (world(4).run(ranks.collectives_of_a_step, {**settings, **changes})[0] for changes in ({}, low))
    each = (
        8 * 4
    )  # matrices of microbatches: an input and a gradient each, of 4 bits also both for the weight's gradient
    assert (
        found - plain == {"tensorwise": 1 + 2 * each, "delayed": 1, "nvfp4": 1 + 3 * each, "held": 2 + 2 * each}[recipe]
    )
