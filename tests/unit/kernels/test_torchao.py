"""Matrices of 8 and 4 bits against torchao's, which computes on a CPU, too; and torchao in the place of ours."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.kernels.choice.table import KernelRequirements, select_kernels
from megatron.core.kernels.external import torchao
from megatron.core.kernels.low_precision import fp4, fp8_native
from megatron.core.kernels.low_precision.fp8 import E4M3, E5M2, NumberFormat
from megatron.core.kernels.low_precision.recipes import low_precision_recipe_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.tensor_parallel.low_precision import (
    LowPrecisionLinearOptions,
    LowPrecisionScaling,
    LowPrecisionSetup,
    low_precision_linear,
)
from tests.helpers import tiny
from tests.helpers.training import train_on

CPU = torch.device("cpu")
TENSORWISE = LowPrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows, inputs, outputs", [(40, 64, 32), (16, 48, 80)])
def test_a_layer_of_8_bits_with_one_scale_a_tensor_is_that_of_torchao(rows: int, inputs: int, outputs: int) -> None:
    float8 = pytest.importorskip("torchao.float8")
    weight, x, pull = drawn(outputs, inputs), 3 * drawn(rows, inputs), drawn(rows, outputs)
    mesh = Mesh.single_process(CPU)
    recipe = low_precision_recipe_of(LowPrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise"), CPU)
    scaling = LowPrecisionScaling(
        LowPrecisionSetup(recipe, mesh, RandomStreams.build(mesh, 1)), shared=mesh.tp, cut=mesh.tp
    )
    ours = [weight.clone().requires_grad_(), x.clone().requires_grad_()]
    output = low_precision_linear(ours[1][:, None], ours[0], None, LowPrecisionLinearOptions(scaling))[:, 0]
    theirs = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
    theirs[0].weight.data.copy_(weight)
    theirs = float8.convert_to_float8_training(theirs, config=float8.Float8LinearConfig(emulate=True))
    given = x.clone().requires_grad_()
    expected = theirs(given)
    for found in (output, expected):
        found.backward(pull)
    for mine, other in ((output, expected), (ours[1].grad, given.grad), (ours[0].grad, theirs[0].weight.grad)):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5 * float(other.detach().abs().max()))


@pytest.mark.parametrize("number", [E4M3, E5M2], ids=lambda number: number.name)
def test_a_layer_by_torchao_is_that_of_the_formula(number: NumberFormat) -> None:
    weight, x, shift, pull = drawn(32, 64), 3 * drawn(5, 7, 64), drawn(32), drawn(5, 7, 32)
    given = [one.clone().requires_grad_() for one in (x, weight, shift)]
    found = torchao.torchao_fp8_linear(*given, number, emulated=True)
    gradients = torch.autograd.grad(found, given, pull)

    def rounded(values: Tensor, kind: NumberFormat) -> Tensor:
        scale = kind.largest / values.abs().max().double()
        return (values * scale.float()).to(kind.dtype).double() / scale

    flat, flat_pull = rounded(x, E4M3).view(35, 64), rounded(pull, number).view(35, 32)
    expected = (
        (flat @ rounded(weight, E4M3).t()).view(5, 7, 32) + shift,
        (flat_pull @ rounded(weight, E4M3)).view(5, 7, 64),
        flat_pull.t() @ flat,
    )
    for mine, true in zip((found, *gradients), (*expected, pull.sum((0, 1)).double()), strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-5 * float(true.abs().max()))


@pytest.mark.parametrize(
    "network", [{}, {"num_experts": 4, "moe_router_topk": 1, "moe_ffn_hidden_size": 32}], ids=["dense", "experts"]
)
def test_a_network_trains_by_torchao_as_by_ours(network: dict[str, Any]) -> None:
    changes = {**network, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
    own, theirs = (
        tiny.trainer_of(tiny.run_of(tiny.config(**changes, kernel=words))) for words in ((), ("low_linear=torchao",))
    )
    called: list[LowPrecisionScaling] = []
    for part in (part for part in theirs.stages[0].modules() if isinstance(part, LowPrecisionScaling)):
        part.kernel = partial(
            lambda part, kernel, *given, **how: (called.append(part), kernel(*given, **how))[1], part, part.kernel
        )
    assert train_on(theirs, 3)[0] == pytest.approx(train_on(own, 3)[0], rel=1e-4)
    assert set(called) == {part for part in theirs.stages[0].modules() if isinstance(part, LowPrecisionScaling)}, (
        "every layer asks torchao"
    )


@pytest.mark.parametrize(
    "need, reason",
    [
        (KernelRequirements(), "nothing is multiplied in 8 bits; give --fp8-format"),
        (
            KernelRequirements(low=LowPrecisionConfig(fp8_format="e4m3", fp8_recipe="blockwise")),
            "of the recipes it has tensorwise, not blockwise",
        ),
        (
            KernelRequirements(low=TENSORWISE, alone=False),
            "others see the rest; leave out --tensor-model-parallel-size and --context-parallel-size",
        ),
        (KernelRequirements(low=replace(TENSORWISE, fp8_param_gather=True)), "weights are kept rounded"),
        (KernelRequirements(low=replace(TENSORWISE, fp8_wgrad=False)), "leave out --no-fp8-wgrad"),
        (KernelRequirements(low=TENSORWISE, delays_wgrad=True), "gradients of weights wait"),
    ],
)
def test_why_torchao_cannot_serve(need: KernelRequirements, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        select_kernels(need, {"low_linear": "torchao"})
    assert (
        select_kernels(need).low_linear is None
        and select_kernels(KernelRequirements(low=TENSORWISE)).low_linear is None
    ), "unasked it is ours"


def test_values_of_4_bits_and_both_levels_of_scales_are_those_of_torchao() -> None:
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = drawn(40, 96) * torch.logspace(-2, 2, 96)
    scales, packed = nvfp4.nvfp4_quantize(x, 16, nvfp4.per_tensor_amax_to_scale(x.abs().max()))
    ours = fp4.quantize_nvfp4(x, x.abs().max(), (1, 16))
    torch.testing.assert_close(ours.scale, nvfp4.per_tensor_amax_to_scale(x.abs().max()))
    assert torch.equal(ours.blocks.view(torch.uint8), scales.view(torch.uint8))
    same = fp8_native.pack_e2m1(ours.values).view(torch.uint8) == packed
    assert same.float().mean() > 0.995, (
        "but for values between two numbers, which another order of products may round the other way"
    )
