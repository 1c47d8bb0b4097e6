"""Every cut layer equals itself on one rank: output, input gradient and parameter gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.settings.model import ModelConfig
from megatron.core.kernels.choice.table import Kernels
from megatron.core.parallel.mesh import Axis
from megatron.core.tensor_parallel.norm import Norm
from megatron.core.tensor_parallel.overlapped_matmul import MatmulOverlapOptions
from megatron.core.tensor_parallel.region import TensorParallelRegion
from tests.helpers.world import Worlds
from tests.unit.tensor_parallel import ranks
from tests.unit.tensor_parallel.ranks import H, S, V, data


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tp, sequence_parallel", [(2, False), (2, True), (4, True)])
@pytest.mark.parametrize("name", ranks.MODULES)
def test_a_cut_module_equals_the_module_on_one_rank(world: Worlds, name: str, tp: int, sequence_parallel: bool) -> None:
    compare_with_one_rank(world, name, tp, sequence_parallel)


@pytest.mark.parametrize(
    "tp, overlapped",
    [
        (2, MatmulOverlapOptions(gathers=True)),
        (2, MatmulOverlapOptions(sums=True)),
        (4, MatmulOverlapOptions(gathers=True, sums=True)),
        (4, MatmulOverlapOptions(gathers=True, sums=True, gradients=True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["mlp", "gated"])
def test_pieces_that_travel_while_others_are_multiplied_give_the_same(
    world: Worlds, name: str, tp: int, overlapped: MatmulOverlapOptions
) -> None:
    compare_with_one_rank(world, name, tp, True, overlapped)


def compare_with_one_rank(world: Worlds, name: str, tp: int, *settings: bool | MatmulOverlapOptions) -> None:
    """A module that is cut over tp ranks, and the same on one."""
    output, input_gradient, whole = ranks.run_module(name, 1, False)
    covered = {path: torch.zeros(gradient.shape, dtype=torch.bool) for path, gradient in whole.items()}
    for found, found_input, gradients in world(tp).run(ranks.run_module, name, tp, *settings):
        close(found, output)
        if input_gradient is not None:
            close(found_input, input_gradient)
        for path, gradient in gradients.items():
            held = ~gradient.isnan()
            close(gradient[held], whole[path][held])
            covered[path] |= held
    assert all(held.all() for held in covered.values())


def test_on_one_rank_the_layers_are_torchs_linear() -> None:
    output, input_gradient, gradients = ranks.run_module("mlp", 1, False)
    weights = {}
    module = ranks.MODULES["mlp"](ranks.here(1), TensorParallelRegion(Axis("tp")))
    ranks.set_global_param_names(module)
    ranks.materialize_parameters(module, ranks.here(1), seed=1)
    for path, param in module.named_parameters():
        weights[path] = (data(path, *param.shape) if "bias" in path else param.detach()).clone().requires_grad_()
    x = data("x", S, ranks.B, H).requires_grad_()
    y = F.linear(
        torch.tanh(F.linear(x, weights["up.weight"], weights["up.bias"])), weights["down.weight"], weights["down.bias"]
    )
    (y * data("weight of the loss", S, ranks.B, H)).sum().backward()
    close(output, y.detach())
    close(input_gradient, x.grad)
    for path, weight in weights.items():
        close(gradients[path], weight.grad)


def test_a_norm_of_one_plus_starts_as_the_norm_itself() -> None:
    output, _, _ = ranks.run_module("rmsnorm", 1, False)
    module = ranks.MODULES["rmsnorm"](ranks.here(1), TensorParallelRegion(Axis("tp")))
    ranks.set_global_param_names(module)
    ranks.materialize_parameters(module, ranks.here(1), seed=1)
    assert torch.equal(module.norm.weight, torch.zeros(H, dtype=torch.float64))
    ids = (data("ids", ranks.B, S) * 10).long().remainder(V)
    before = module.words.weight[ids.t()] + module.places.weight[2:, None]
    close(output, before.detach() / (before.detach().square().mean(-1, keepdim=True) + 1e-5).sqrt())


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_one_is_added_to_the_weight_of_a_norm_in_fp32(normalization: str) -> None:
    norm = Norm(
        H,
        ModelConfig(normalization=normalization, apply_layernorm_1p=True),
        sum_over=(),
        kernels=Kernels(),
        mesh=ranks.here(1),
        dtype=torch.bfloat16,
    )
    ranks.set_global_param_names(norm)
    ranks.materialize_parameters(norm, ranks.here(1), seed=1)
    with torch.no_grad():
        norm.weight.fill_(0.0029)  # in bf16, 1.0029 would be 1
    x = data("x", S, ranks.B, H).bfloat16().requires_grad_()
    own, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    centred = own - own.mean(-1, keepdim=True) if normalization == "LayerNorm" else own
    expected = centred / (centred.square().mean(-1, keepdim=True) + norm.epsilon).sqrt() * (1 + weight)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    assert (y == expected.bfloat16()).double().mean() > 0.99
    gradient = data("weight of the loss", S, ranks.B, H).bfloat16()
    y.backward(gradient)
    expected.backward(gradient.double())
    for found, right in ((x.grad, own.grad), (norm.weight.grad, weight.grad)):
        assert found is not None and right is not None and found.dtype == torch.bfloat16
        assert (found.double() - right).norm() < 4e-3 * right.norm()


def test_a_region_says_what_lies_outside_it() -> None:
    axis = Axis("tp", 4, 1, (0, 1, 2, 3))
    plain, cut = TensorParallelRegion(axis), TensorParallelRegion(axis, sequence_parallel=True)
    assert (plain.local_sequence_length(8), cut.local_sequence_length(8)) == (8, 2)
    assert (plain.gradient_sum_axes, cut.gradient_sum_axes) == ((), ("tp",))
    assert (plain.dropout_stream, cut.dropout_stream) == ("default", "cut")
