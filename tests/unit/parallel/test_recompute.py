from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.parallel.recompute import (
    apply_recomputing_input,
    recomputable,
    recompute,
    run_recomputing_intermediates,
)
from megatron.core.parallel.rng import RandomStreams


def block() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)).double()


def gradients(function, module: nn.Module, *tensors: Tensor) -> list[Tensor]:
    """The result, and the gradients of a fixed sum over it for inputs and parameters."""
    inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    module.zero_grad()
    result = function(*inputs)
    (result * torch.arange(result.numel()).view_as(result)).sum().backward()
    return [
        result.detach(),
        *(tensor.grad for tensor in inputs),
        *(param.grad.clone() for param in module.parameters()),
    ]


def streams() -> RandomStreams:
    return RandomStreams(torch.device("cpu"), {"default": 1, "cut": 2})


def test_recomputation_gives_the_same_result_and_gradients() -> None:
    module, x, y = block(), torch.randn(4, 6).double(), torch.randn(4, 6).double()
    own = streams()

    def function(a: Tensor, b: Tensor) -> Tensor:
        return module(a) * b + a

    plain, again = (
        gradients(function, module, x, y),
        gradients(lambda a, b: recompute(function, own, a, b), module, x, y),
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_recomputation_keeps_no_activation_between_the_passes() -> None:
    module, calls, x = block(), [], torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def function(a: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return module(a)

    result = recompute(function, streams(), x)
    assert calls == [False], "the first run builds no graph"
    result.sum().backward()
    assert calls == [False, True]


def test_recomputation_replays_dropout_of_every_stream_and_disturbs_no_later_draw() -> None:
    module, x = block(), torch.randn(40, 6).double()

    def twice(wrap) -> tuple[list[Tensor], Tensor]:
        own = streams()

        def function(a: Tensor) -> Tensor:
            with own.fork("cut"):
                inside = F.dropout(a, 0.5)
            return F.dropout(module(inside), 0.3)

        def two(a: Tensor) -> Tensor:
            return wrap(function, own)(wrap(function, own)(a))

        found = gradients(two, module, x)
        with own.fork("cut"):
            return found, torch.cat((torch.rand(3), torch.rand(3)))

    plain, after_plain = twice(lambda function, own: function)
    again, after_again = twice(lambda function, own: lambda a: recompute(function, own, a))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert torch.equal(after_plain, after_again)


def test_an_input_that_wants_no_gradient_gets_none() -> None:
    x, scale = torch.randn(3, requires_grad=True), torch.tensor(2.0)
    recompute(lambda a, b: a * b, streams(), x, scale).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0)) and scale.grad is None


@pytest.mark.parametrize("shape", [(5, 3, 6), (7, 6)])
def test_a_dropped_output_is_computed_again_and_changes_no_gradient(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm, linear, calls = nn.LayerNorm(6).double(), nn.Linear(6, 9).double(), []
    both, x = nn.ModuleList((norm, linear)), torch.randn(shape).double()

    def first(a: Tensor) -> Tensor:
        calls.append(1)
        return norm(a)

    plain = gradients(lambda a: linear(first(a)), both, x)
    assert len(calls) == 1
    dropped = gradients(lambda a: apply_recomputing_input(linear, recomputable(first, a)), both, x)
    assert len(calls) == 3, "once forward, once more backward"
    assert all(torch.equal(a, b) for a, b in zip(plain, dropped, strict=True))


def test_the_dropped_output_is_handed_back_and_still_takes_gradients() -> None:
    norm, linear = nn.LayerNorm(6).double(), nn.Linear(6, 6).double()
    both, x = nn.ModuleList((norm, linear)), torch.randn(4, 6).double()

    def with_residual(a: Tensor) -> Tensor:
        middle = recomputable(norm, a)
        return apply_recomputing_input(linear, middle) + middle

    plain = gradients(lambda a: linear(norm(a)) + norm(a), both, x)
    for a, b in zip(plain, gradients(with_residual, both, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def heads_of(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Two things made of x, one of them a view of what a matrix gave."""
    made = module(x)
    return torch.cat((made, x), dim=-1)[..., :6], made


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a * b) @ b.t()


def test_what_is_made_again_for_the_backward_pass_gives_the_same_gradients() -> None:
    module, x = block(), torch.randn(4, 6).double()
    plain = gradients(lambda a: product(*heads_of(module, a)), module, x)
    again = gradients(lambda a: run_recomputing_intermediates(lambda one: heads_of(module, one), product, a), module, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_what_can_be_made_again_is_not_kept() -> None:
    factor, calls = [1.0], []

    def make(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(factor[0])
        return (x * factor[0], x + factor[0])

    x = torch.tensor([2.0], requires_grad=True)
    result = run_recomputing_intermediates(make, lambda a, b: a * b, x)
    factor[0] = 3.0  # what was kept would not know
    result.backward()
    assert calls == [1.0, 3.0], "made again once for both"
    assert result.item() == 2.0 * 3.0 and x.grad.item() == (2.0 + 3.0) * 1.0 + 2.0 * 3.0


def test_nothing_is_made_again_when_nothing_is_to_be_trained() -> None:
    calls = []
    with torch.no_grad():
        run_recomputing_intermediates(lambda x: calls.append(1) or (x,), torch.exp, torch.ones(2))
    assert calls == [1]
