from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.optimizer.clip import global_norm
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import ParamSpec, constant_initializer
from tests.helpers import tiny
from tests.helpers.training import whole_gradient
from tests.helpers.world import Worlds
from tests.parity.table import MODELS, read_layout
from tests.unit.optimizer import ranks

LAYOUTS = [
    ("", "gpt"),
    ("tp2", "gpt"),
    ("tp2 sp", "qk-norm"),
    ("tp4", "mqa"),
    ("tp4 sp", "gqa2"),
    ("pp2", "gpt"),
    ("pp2 vpp2", "untied"),
    ("dp2", "llama"),
    ("dp2 zero", "llama"),
    ("dp4 zero buckets3", "gpt"),
    ("tp2 dp2 zero", "mqa"),
    ("tp2 pp2", "llama-tied"),
    ("pp2 dp2 zero", "gpt"),
    ("pp4 layout=E|tt|tt|L", "gpt"),
    ("pp4 layout=E|ttt|t|L", "untied"),
    ("tp4 zero bucket300", "qk-norm"),
    ("ep2 dp4", "moe"),
    ("tp2 etp1 ep2 dp2", "moe-bias"),
    ("tp2 ep2 dp2 zero", "moe-shared-bias"),
    ("etp2 dp4 zero", "moe-bias"),
    ("tp2 sp etp1 dp2", "moe-shared"),
    ("tp2 etp1 fsdp", "moe-bias"),  # one data-parallel rank, two that hold the same experts
    ("pp2 ep2 dp4 zero pp-before-dp", "moe"),
]


def by_hand(model: str) -> tuple[float, int, float]:
    """The same three numbers from whole tensors: no layout, no buckets."""
    run = tiny.run_of(tiny.config(**{**MODELS[model], "fp64": True}))
    stage = tiny.trainer_of(run).stages[0]
    squares, zeros, weights = 0.0, 0, 0.0
    for param in stage.parameters():
        gradient = whole_gradient(param.spec.name, param.spec.shape)
        squares, zeros = squares + float(gradient.square().sum()), zeros + int((gradient == 0).sum())
        weights += float(param.detach().square().sum())
    return squares**0.5, zeros, weights**0.5


@pytest.mark.parametrize("layout, model", LAYOUTS, ids=[" / ".join(row) for row in LAYOUTS])
def test_norms_and_zeros_count_every_element_once_in_every_layout(world: Worlds, layout: str, model: str) -> None:
    size, cut = read_layout(layout)
    changes: dict[str, Any] = {**MODELS[model], "fp64": True, **cut}
    results = [ranks.measure_here(changes)] if size == 1 else world(size).run(ranks.measure_here, changes)
    norm, zeros, weights = by_hand(model)
    assert zeros > 1000
    for found_norm, found_zeros, found_weights in results:
        assert found_norm == pytest.approx(norm, rel=1e-12) and found_weights == pytest.approx(weights, rel=1e-12)
        assert found_zeros == zeros


def test_fp32_weights_that_fsdp2_leaves_whole_count_once(world: Worlds) -> None:
    changes: dict[str, Any] = {**MODELS["hybrid"], "bf16": True}
    expected = ranks.weights_norm_here(changes)
    found = world(2).run(ranks.weights_norm_here, {**changes, "use_torch_fsdp2": True})
    assert found == pytest.approx([expected] * 2, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norms_are_exact_to_fp32_whatever_the_format_and_the_size(dtype: torch.dtype) -> None:
    mesh, size = Mesh.single_process(), 3_000_000
    random = torch.Generator().manual_seed(0)
    gradient = (30000 * (1 + torch.rand(size, generator=random))).to(
        dtype
    )  # alike in size: the hardest sum; its norm is above any fp16 number
    spec = ParamSpec((size,), constant_initializer(0.0), "vector")
    segment = OwnedSegment(spec, (size,), 0, size, gradient, gradient, sharded=False)
    expected = float(gradient.double().square().sum().sqrt())
    assert float(global_norm([segment], mesh)) == pytest.approx(expected, rel=3e-5 if dtype != torch.float32 else 2e-6)
