"""Compiled layers add the gradients of their weights to the main gradients in one graph, in place, as layers do that are not compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.testing import assert_close

from megatron.core.parallel.device import missing_compiler_reason
from megatron.core.parallel.main_grad import MainGrad
from megatron.core.tensor_parallel import compiled_linear
from megatron.training.accelerate.compile import LayerCompiler
from tests.helpers import tiny
from tests.helpers.training import train_on
from tests.parity.table import MODELS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What one test compiled is not the next one's."""
    yield
    torch._dynamo.reset()


class Two(nn.Module):
    """Two matrices with a GELU between, whose gradients go to main gradients in a format of their own."""

    def __init__(self, dtype: torch.dtype, sums: torch.dtype) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        shapes = ((10, 6), (10,), (4, 10))
        self.up, self.bias, self.down = (
            nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)) for shape in shapes
        )
        self.sums = [MainGrad(torch.ones(one.shape, dtype=sums)) for one in (self.up, self.down)]

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(compiled_linear.linear_into_main_grad(x, self.up, self.bias, self.sums[0]))
        return compiled_linear.linear_into_main_grad(hidden, self.down, None, self.sums[1])

    def by_autograd(self, x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.gelu(nn.functional.linear(x, self.up, self.bias)), self.down)


@pytest.mark.parametrize(
    "dtype, sums, error", [(torch.float64, torch.float64, 1e-12), (torch.bfloat16, torch.float32, 2e-2)], ids=str
)
def test_gradients_of_several_microbatches_under_way_are_autograds_in_one_graph(
    dtype: torch.dtype, sums: torch.dtype, error: float
) -> None:
    two, plain = Two(dtype, sums), Two(dtype, sums)
    compiled = torch.compile(two, backend="aot_eager", fullgraph=True)
    draw = torch.Generator().manual_seed(1)
    given = [torch.randn(3, 2, 6, generator=draw, dtype=torch.float64).to(dtype) for _ in range(3)]
    mine, theirs = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    outputs = []
    for x in mine:
        for one in two.sums:
            one.renew_version_counter()
        outputs.append(compiled(x))
    for output in outputs:
        output.square().sum().backward()
    for x in theirs:
        plain.by_autograd(x).square().sum().backward()
    for total, weight in zip(two.sums, (plain.up, plain.down), strict=True):
        assert weight.grad is not None
        assert_close(total.total - 1.0, weight.grad.to(sums), rtol=error, atol=error * 10)
    assert two.up.grad is None and two.down.grad is None and all(one.added_in_graph for one in two.sums)
    assert_close(two.bias.grad, plain.bias.grad, rtol=error, atol=error * 10)
    for x, other in zip(mine, theirs, strict=True):
        assert_close(x.grad, other.grad, rtol=error, atol=error * 10)


def test_the_operations_are_what_they_say() -> None:
    x, weight = torch.randn(3, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    total = torch.zeros(4, 6, dtype=torch.float64)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.megatron.multiply.default, (x, weight, None, total, False), test_utils=tests)
    given = (total, torch.randn(4, 3, dtype=torch.float64), x, False)
    torch.library.opcheck(torch.ops.megatron.add_product.default, given, test_utils=tests)


def test_every_matrix_of_a_compiled_layer_adds_its_own_gradient() -> None:
    changes = {**MODELS["llama"], "compile": True, "compile_backend": "aot_eager", "num_layers": 2}
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(**changes), CPU))
    LayerCompiler(trainer)
    breaks = torch._dynamo.utils.counters["graph_break"].copy()
    train_on(trainer, 1)
    assert torch._dynamo.utils.counters["graph_break"] == breaks
    matrices = {
        name: param.main_grad.added_in_graph
        for name, param in trainer.stages[0].named_parameters()
        if ".layers." in name and param.dim() == 2
    }
    assert len(matrices) == 8 and all(matrices.values()), matrices


@pytest.mark.nightly
@pytest.mark.skipif(bool(missing_compiler_reason(CPU)), reason="inductor needs a compiler")
def test_inductors_code_copies_no_main_gradient() -> None:
    two = Two(torch.float32, torch.float32)
    compiled = torch.compile(two, fullgraph=True)
    x = torch.randn(3, 2, 6, requires_grad=True)
    for one in two.sums:
        one.renew_version_counter()
    _, codes = run_and_get_code(lambda: compiled(x).sum().backward())
    (code,) = [code for code in codes if "megatron.add_product.default(primals" in code]
    assert code.count("megatron.add_product.default(primals") == 2 and "copy_(" not in code
