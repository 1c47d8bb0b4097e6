"""Layers of 8 and 4 bits in one graph: the results, and the state outside of it, of the layer that is not compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.kernels.low_precision.fp8 import QuantizeTransposeKernels
from megatron.core.kernels.low_precision.recipes import low_precision_recipe_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.tensor_parallel import compiled_low_precision
from megatron.core.tensor_parallel.low_precision import (
    LowPrecisionLinearOptions,
    LowPrecisionScaling,
    LowPrecisionSetup,
    begin_low_precision_step,
    delayed_scalings_by_layer,
    low_precision_linear,
)
from megatron.training.accelerate.compile import LayerCompiler
from tests.helpers import tiny
from tests.helpers.training import train_on
from tests.helpers.triton_interpreter import interpreted, needs_triton

CPU = torch.device("cpu")
RECIPES: dict[str, dict[str, Any]] = {
    "tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "delayed": {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 3},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "blockwise": {"fp8_format": "hybrid", "fp8_recipe": "blockwise"},
    "nvfp4": {"fp4_format": "e2m1"},
    "bf16 weight gradients": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "fp8_wgrad": False},
}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What one test compiled is not the next one's."""
    yield
    torch._dynamo.reset()


class Matrix(nn.Module):
    """A weight and its scales, as layers have them."""

    def __init__(self, weight: Tensor, scaling: LowPrecisionScaling) -> None:
        super().__init__()
        self.weight, self.scaling = nn.Parameter(weight), scaling


class Two(nn.Module):
    """Two layers of low precision with a GELU between."""

    def __init__(self, kernels: QuantizeTransposeKernels | None = None, **settings: Any) -> None:
        super().__init__()
        draw, mesh = torch.Generator().manual_seed(0), Mesh.single_process(CPU)
        recipe = low_precision_recipe_of(LowPrecisionConfig(**settings), CPU)
        assert recipe is not None
        recipe = replace(recipe, kernels=kernels)
        low = LowPrecisionSetup(recipe, mesh, RandomStreams.build(mesh, 3))
        self.up, self.down = (
            Matrix(torch.randn(shape, generator=draw), LowPrecisionScaling(low, shared=mesh.tp_cp, cut=mesh.tp))
            for shape in ((64, 32), (32, 64))
        )
        self.bias = nn.Parameter(torch.randn(64, generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(multiply(x, self.up.weight, self.bias, self.up.scaling))
        return multiply(hidden, self.down.weight, None, self.down.scaling)

    @property
    def scalings(self) -> list[LowPrecisionScaling]:
        """Those of both layers."""
        return [self.up.scaling, self.down.scaling]


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Any) -> Tensor:
    """A layer's product, as it is called within a graph and outside of one."""
    if torch.compiler.is_compiling():
        return compiled_low_precision.compiled_low_precision_linear(x, weight, bias, scaling)
    return low_precision_linear(x, weight, bias, LowPrecisionLinearOptions(scaling))


def train(two: Two, call: Any, *, weights_stay: bool) -> list[Tensor]:
    """Two steps of two microbatches that are under way together: outputs, gradients, and what is known of scales."""
    draw, found = torch.Generator().manual_seed(1), []
    for _ in range(2):
        two.zero_grad()
        begin_low_precision_step([two], weights_stay=weights_stay, weights_wait=False)
        given = [torch.randn(6, 4, 32, generator=draw).requires_grad_() for _ in range(2)]
        outputs = [call(x) for x in given]
        for output in outputs:
            output.square().sum().backward()
        assert all(scaling.caches == weights_stay == bool(scaling.cached) for scaling in two.scalings)
        LowPrecisionScaling.after_step(two.scalings, stepped=True)
        with torch.no_grad():
            for one in two.parameters():
                one -= 1e-3 * one.grad
        found += [*(one.detach() for one in outputs), *(x.grad for x in given), *(one.grad for one in two.parameters())]
        found += [scaling.history.clone() for scaling in two.scalings]
    return found


@pytest.mark.parametrize("weights_stay", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_a_graph_has_the_results_and_leaves_the_scales_of_the_layer_without_a_compiler(
    name: str, weights_stay: bool
) -> None:
    plain, two = Two(**RECIPES[name]), Two(**RECIPES[name])
    for scaling in two.scalings:
        compiled_low_precision.register_scaling_for_compile(scaling)
    compiled = torch.compile(two, backend="aot_eager", fullgraph=True)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = train(two, compiled, weights_stay=weights_stay)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1, "later steps need no other graph"
    for mine, theirs in zip(found, train(plain, plain, weights_stay=weights_stay), strict=True):
        assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def demand_as_told(two: Two) -> None:
    """Compare the operations with what the compiler is told of them: shapes, dtypes and strides."""
    scaling, tests = two.scalings[0], ("test_faketensor",)
    assert isinstance(scaling, LowPrecisionScaling)
    compiled_low_precision.register_scaling_for_compile(scaling)
    x, weight = torch.randn(6, 4, 32), two.up.weight.detach()
    given = (x, weight, *compiled_low_precision.low_precision_op_arguments(scaling, x.dtype))
    torch.library.opcheck(torch.ops.megatron.low_multiply.default, given, test_utils=tests)
    _, kept, scales = torch.ops.megatron.low_multiply(*given)
    learned = (kept, scales) if kept.numel() else (x, None)
    given = (torch.randn(6, 4, 64), weight, *learned, scaling.handle)
    torch.library.opcheck(torch.ops.megatron.low_gradients.default, given, test_utils=tests)


@pytest.mark.parametrize("name", RECIPES)
def test_the_operations_return_what_the_compiler_is_told(name: str) -> None:
    demand_as_told(Two(**RECIPES[name]))


@needs_triton
@pytest.mark.parametrize("name", ["delayed", "mxfp8", "blockwise"])
def test_so_they_do_with_kernels_that_round(name: str) -> None:
    with interpreted("triton.quantise") as modules:
        demand_as_told(Two(modules["triton.quantise"].KERNELS, **RECIPES[name]))


def test_layers_of_a_network_share_one_graph() -> None:
    changes = {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 2, "num_layers": 3}
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(**changes, compile=True, compile_backend="aot_eager"), CPU))
    LayerCompiler(trainer)
    counters = torch._dynamo.utils.counters
    graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"].copy()
    losses, _ = train_on(trainer, 2)
    assert counters["graph_break"] == breaks and counters["stats"]["unique_graphs"] == graphs + 1
    plain = tiny.trainer_of(tiny.run_of(tiny.config(**changes), CPU))
    assert_close(losses, train_on(plain, 2)[0], rtol=1e-5, atol=1e-5)
    histories, expected = delayed_scalings_by_layer(trainer.stages), delayed_scalings_by_layer(plain.stages)
    assert list(histories) == list(expected) and len(histories) == 12
    for name, scaling in expected.items():
        assert_close(histories[name].history, scaling.history, rtol=1e-5, atol=1e-7)
