from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.wgrad import WeightGradStore
from megatron.core.tensor_parallel.linear import local_linear
from megatron.core.tensor_parallel.region import TensorParallelRegion


def network(*, bias: bool) -> tuple[Tensor, list[Tensor]]:
    random = torch.Generator().manual_seed(3)
    x, *parameters = (
        torch.randn(*shape, dtype=torch.float64, generator=random).requires_grad_()
        for shape in ((4, 3, 5), (7, 5), (7,), (2, 7), (2,))
    )
    return x, parameters if bias else parameters[::2]


def output(x: Tensor, parameters: list[Tensor], region: TensorParallelRegion) -> Tensor:
    first, second = (
        (parameters[:2], parameters[2:]) if len(parameters) == 4 else ((parameters[0], None), (parameters[1], None))
    )
    return local_linear(torch.tanh(local_linear(x, *first, region)), *second, region).square().sum()


@pytest.mark.parametrize("bias", [False, True])
def test_a_backward_pass_and_its_weights_together_give_what_one_pass_gives(bias: bool) -> None:
    x, parameters = network(bias=bias)
    output(x, parameters, TensorParallelRegion(Axis("tp"))).backward()
    mine, own = network(bias=bias)
    heard: list[Tensor] = []
    for parameter in own:
        parameter.register_post_accumulate_grad_hook(heard.append)
    wgrad_store = WeightGradStore()
    for microbatch in (0, 1):  # two passes wait, and are worked off in order
        loss = output(mine, own, TensorParallelRegion(Axis("tp"), wgrad_store=wgrad_store))
        with wgrad_store.delaying((0, microbatch)):
            loss.backward()
    torch.testing.assert_close(mine.grad, 2 * x.grad)
    assert all(parameter.grad is None for parameter in own), "weights wait"
    heard.clear()
    for microbatch in (0, 1):
        wgrad_store.pop((0, microbatch))
        for parameter, true in zip(own, parameters, strict=True):
            torch.testing.assert_close(parameter.grad, (microbatch + 1) * true.grad)
    assert len(heard) == 2 * len(own), "hooks hear of them as of any gradient"


def test_a_weight_that_was_saved_under_hooks_gets_its_gradient_when_its_graph_is_gone() -> None:
    x, parameters = network(bias=True)
    output(x, parameters, TensorParallelRegion(Axis("tp"))).backward()
    mine, own = network(bias=True)
    wgrad_store = WeightGradStore()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor, lambda tensor: tensor
    ):  # as recomputation of parts has them
        loss = output(mine, own, TensorParallelRegion(Axis("tp"), wgrad_store=wgrad_store))
    with wgrad_store.delaying((0, 0)):
        loss.backward()
    del loss
    wgrad_store.pop((0, 0))
    for parameter, true in zip(own, parameters, strict=True):
        torch.testing.assert_close(parameter.grad, true.grad)


def test_outside_of_a_collecting_pass_and_for_frozen_weights_nothing_waits() -> None:
    x, parameters = network(bias=True)
    output(x, parameters, TensorParallelRegion(Axis("tp"))).backward()
    mine, own = network(bias=True)
    wgrad_store = WeightGradStore()
    output(mine, own, TensorParallelRegion(Axis("tp"), wgrad_store=wgrad_store)).backward()
    for parameter, true in zip((mine, *own), (x, *parameters), strict=True):
        torch.testing.assert_close(parameter.grad, true.grad)
    own = [parameter.detach() for parameter in own]
    with wgrad_store.delaying((0, 0)):
        output(mine, own, TensorParallelRegion(Axis("tp"), wgrad_store=wgrad_store)).backward()
    wgrad_store.pop((0, 0))
    assert all(parameter.grad is None for parameter in own)
