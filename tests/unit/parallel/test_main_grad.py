"""Gradients that layers add to their sum themselves, against those that autograd collects."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed.ddp import DataParallel
from megatron.core.parallel.main_grad import MainGrad, active_main_grad
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import ParamSpec, meta_parameter, normal_initializer, set_global_param_names
from megatron.core.parallel.wgrad import WeightGradStore
from megatron.core.tensor_parallel.linear import local_linear
from megatron.core.tensor_parallel.region import TensorParallelRegion


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "narrow, wide",
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
    ],
)
def test_products_and_scaled_gradients_are_added_in_every_format(narrow: torch.dtype, wide: torch.dtype) -> None:
    left, right, whole = drawn(5, 7).to(narrow), drawn(7, 3, seed=2).to(narrow), drawn(5, 3, seed=3).to(wide)
    one, factor = MainGrad(torch.full((5, 3), 0.5, dtype=wide)), torch.tensor(-1.5)
    one.add_product(left, right)
    one.add(whole, factor)
    one.add(whole)
    expected = 0.5 + left.double() @ right.double() - 0.5 * whole.double()
    torch.testing.assert_close(
        one.total.double(),
        expected,
        rtol=0,
        atol={torch.bfloat16: 0.03, torch.float32: 2e-6, torch.float64: 1e-12}[narrow],
    )
    assert one.has_uncounted


class Twice(nn.Module):
    """Two matrices, of which the first is multiplied twice."""

    def __init__(self, region: TensorParallelRegion) -> None:
        super().__init__()
        self.region = region
        self.first, self.second = (
            meta_parameter(ParamSpec(shape, normal_initializer(1.0), "matrix"), Mesh.single_process(), torch.float64)
            for shape in ((4, 4), (2, 4))
        )
        self.bias = meta_parameter(
            ParamSpec((2,), normal_initializer(1.0), "vector"), Mesh.single_process(), torch.float64
        )
        set_global_param_names(self)
        materialize_parameters(self, Mesh.single_process(), seed=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(local_linear(x, self.first, None, self.region))
        return (
            local_linear(local_linear(x, self.first, None, self.region).square(), self.second, self.bias, self.region)
            .square()
            .sum()
        )


def whole_step(region: TensorParallelRegion, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Tensor], list[str]]:
    """Two microbatches: the sums by name, and the parameters in the order in which they were counted in the second."""
    module, counted = Twice(region), []
    parallel = DataParallel(
        module,
        Mesh.single_process(),
        grad_dtype=torch.float64,
        sharded=False,
        bucket_size=None,
        overlap_reduce=True,
        overlap_gather=False,
        average=False,
    )
    names = {id(param): name for name, param in module.named_parameters()}
    arrived = parallel.gradient_arrived
    parallel.zero_gradients()
    module(drawn(3, 4)).backward()
    monkeypatch.setattr(parallel, "gradient_arrived", lambda param: (counted.append(names[id(param)]), arrived(param)))
    parallel.before_last_backward()
    if region.wgrad_store is None:
        module(drawn(3, 4, seed=4)).backward()
    else:
        loss = module(drawn(3, 4, seed=4))
        with region.wgrad_store.delaying((0, 0)):
            loss.backward()
        assert not counted
        region.wgrad_store.pop((0, 0))
    parallel.start_reduction()
    assert all(param.grad is None for param in module.parameters()), "what was added is not held twice"
    assert all(active_main_grad(param) is None for param in module.parameters()), "the step is over"
    return {segment.name: segment.grad.clone() for segment in parallel.owned_segments()}, counted


@pytest.mark.parametrize("waits", [False, True])
def test_layers_that_add_for_themselves_leave_what_autograd_leaves(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, order = whole_step(TensorParallelRegion(Axis("tp")), monkeypatch)
    found, counted = whole_step(
        TensorParallelRegion(Axis("tp"), wgrad_store=WeightGradStore() if waits else None, sums=True), monkeypatch
    )
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-13, atol=1e-13)
    # A weight that is used twice counts once, behind its last use; where it waits, once for each piece of work.
    assert sorted(order) == ["bias", "first", "second"]
    assert sorted(counted) == (["bias", "first", "first", "second"] if waits else sorted(order))


def test_outside_of_a_step_a_gradient_belongs_to_whoever_asks() -> None:
    module = Twice(TensorParallelRegion(Axis("tp"), sums=True))
    parallel = DataParallel(
        module,
        Mesh.single_process(),
        grad_dtype=torch.float64,
        sharded=False,
        bucket_size=None,
        overlap_reduce=False,
        overlap_gather=False,
        average=False,
    )
    gradients = torch.autograd.grad(module(drawn(3, 4)), [module.first, module.second])
    assert all(gradient.abs().sum() > 0 for gradient in gradients) and all(
        not segment.grad.any() for segment in parallel.owned_segments()
    )
    parallel.zero_gradients()
    module(drawn(3, 4)).backward()
    sums = {segment.name: segment.grad.view(segment.local_shape) for segment in parallel.owned_segments()}
    torch.testing.assert_close(sums["first"], gradients[0], rtol=1e-13, atol=1e-13)


def test_a_frozen_weight_says_nothing() -> None:
    x = drawn(3, 4).requires_grad_()
    weight = drawn(2, 4, seed=5)
    local_linear(
        x, weight, None, TensorParallelRegion(Axis("tp"), wgrad_store=WeightGradStore(), sums=True)
    ).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 4))
