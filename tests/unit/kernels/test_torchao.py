"""Matrices of 8 and 4 bits against torchao's, where that is installed: pip install --no-deps torchao. It computes on a CPU, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.low_precision import LowPrecisionConfig
from megatron.core.kernels import fp4, fp8_native
from megatron.core.kernels.recipes import recipe_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.tensor_parallel.low_precision import LowPrecision, Scaling, Way, low_linear

CPU = torch.device("cpu")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows, inputs, outputs", [(40, 64, 32), (16, 48, 80)])
def test_a_layer_of_8_bits_with_one_scale_a_tensor_is_that_of_torchao(rows: int, inputs: int, outputs: int) -> None:
    float8 = pytest.importorskip("torchao.float8")
    weight, x, pull = drawn(outputs, inputs), 3 * drawn(rows, inputs), drawn(rows, outputs)
    mesh = Mesh.single(CPU)
    recipe = recipe_of(LowPrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise"), CPU)
    scaling = Scaling(LowPrecision(recipe, mesh, RandomStreams.build(mesh, 1)), shared=mesh.tp, cut=mesh.tp)
    ours = [weight.clone().requires_grad_(), x.clone().requires_grad_()]
    output = low_linear(ours[1][:, None], ours[0], None, Way(scaling))[:, 0]
    theirs = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
    theirs[0].weight.data.copy_(weight)
    theirs = float8.convert_to_float8_training(theirs, config=float8.Float8LinearConfig(emulate=True))
    given = x.clone().requires_grad_()
    expected = theirs(given)
    for found in (output, expected):
        found.backward(pull)
    for mine, other in ((output, expected), (ours[1].grad, given.grad), (ours[0].grad, theirs[0].weight.grad)):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5 * float(other.detach().abs().max()))


def test_values_of_4_bits_and_both_levels_of_scales_are_those_of_torchao() -> None:
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = drawn(40, 96) * torch.logspace(-2, 2, 96)
    scales, packed = nvfp4.nvfp4_quantize(x, 16, nvfp4.per_tensor_amax_to_scale(x.abs().max()))
    ours = fp4.by_small_blocks(x, x.abs().max(), (1, 16))
    torch.testing.assert_close(ours.scale, nvfp4.per_tensor_amax_to_scale(x.abs().max()))
    assert torch.equal(ours.blocks.view(torch.uint8), scales.view(torch.uint8))
    same = fp8_native.packed(ours.values).view(torch.uint8) == packed
    assert same.float().mean() > 0.995, "but for values between two numbers, which another order of products may round the other way"
