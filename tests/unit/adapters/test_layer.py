"""One linear layer and its adapter: the paper's formulas, the matrix that they merge to, and the dropout of what enters A."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.parallel import collectives
from megatron.core.parallel.rng import RandomStreams
from megatron.core.tensor_parallel.linear import AdaptableLinear
from megatron.core.transformer.adapters import LinearAdapter, LoRAFactors
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.world import Worlds
from tests.parity.table import MODELS


def build(**changes: Any) -> Trainer:
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return tiny.trainer_of(tiny.run_of(tiny.config(world_size, **{**MODELS["llama"], "fp64": True, **changes})))


def layers_of(trainer: Trainer) -> dict[str, AdaptableLinear]:
    """The adapted linear layers of the first layer, with factors that are not zero."""
    torch.manual_seed(3)
    layer = trainer.stages[0].decoder.layers["0"]
    for param in layer.parameters():
        if param.requires_grad:
            param.data.add_(torch.rand_like(param), alpha=0.2)
    found = {name: module for name, module in layer.named_modules() if isinstance(module, AdaptableLinear)}
    return {name: module for name, module in found.items() if module.adapter is not None}


def formula(weight: Tensor, pair: LoRAFactors, x: Tensor, scale: float) -> Tensor:
    """Hu et al. (2021), and of Liu et al. (2024) the same with lengths of rows. x: [n, in]. Returns [n, out]."""
    matrix = weight + scale * pair.lora_B @ pair.lora_A
    if pair.magnitude is None:
        return x @ matrix.t()
    return x @ matrix.t() * (pair.magnitude / matrix.detach().norm(dim=1))


KINDS: dict[str, tuple[dict[str, Any], Callable[[float, int], float]]] = {
    "lora": ({"lora_alpha": 6.0}, lambda alpha, rank: alpha / rank),
    "rslora": ({"lora_alpha": 6.0, "lora_rslora": True}, lambda alpha, rank: alpha / rank**0.5),
    "dora": ({"lora_alpha": 6.0, "dora": True}, lambda alpha, rank: alpha / rank),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_and_its_gradients_are_those_of_the_formula(kind: str) -> None:
    flags, scale = KINDS[kind]
    for name, linear in layers_of(build(lora_rank=4, **flags)).items():
        assert linear.adapter is not None
        x = torch.randn(5, 1, linear.weight.shape[1], dtype=torch.float64, requires_grad=True)
        pairs = list(linear.adapter.pairs.values())
        rows = linear.weight.detach().split(linear.adapter.sizes)
        expected = torch.cat(
            [formula(part, pair, x[:, 0], scale(6.0, 4)) for part, pair in zip(rows, pairs, strict=True)], dim=1
        )
        parameters = [param for pair in pairs for param in pair.parameters()]
        found = linear(x)[:, 0]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=name)
        direction = torch.randn_like(expected)
        gradients = [torch.autograd.grad(result, [x, *parameters], direction) for result in (found, expected)]
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def merge_error(changes: dict[str, Any]) -> float:
    """The largest difference between what layers give and what their merged matrices give, on this rank."""
    worst = 0.0
    for linear in layers_of(build(lora_rank=4, lora_alpha=6.0, **changes)).values():
        torch.manual_seed(5)
        x = torch.randn(4, 1, linear.weight.shape[1], dtype=torch.float64)
        with torch.no_grad():
            found, adapter = linear(x), linear.adapter
            expected = F.linear(x, linear.merged_weight())
            if adapter is not None and adapter.dim == 1:
                expected = collectives.all_reduce(expected, adapter.axis)
        worst = max(worst, float((found - expected).abs().max()))
    return worst


@pytest.mark.parametrize("changes", [{}, {"dora": True}, {"lora_targets": ("linear_qkv", "linear_proj")}])
def test_a_merged_matrix_does_what_the_layer_does(changes: dict[str, Any], world: Worlds) -> None:
    for layout in ({}, {"tensor_model_parallel_size": 2}):
        assert max(world(2 if layout else 1).run(merge_error, {**changes, **layout})) < 1e-12


def test_a_merge_that_scales_twice_is_noticed() -> None:
    rows = LinearAdapter.join_part_rows

    def scaled(self: LinearAdapter, parts: dict[str, Tensor], like: Tensor, other: float = 0.0) -> Tensor:
        again = {name: value * self.pairs[name].scale for name, value in parts.items()} if other == 0.0 else parts
        return rows(self, again, like, other)

    with patch.object(LinearAdapter, "join_part_rows", scaled):
        assert merge_error({}) > 1e-3


def masks(layout: dict[str, Any], defect: bool) -> dict[str, list[list[bool]]]:
    """Which elements of the input of each kind of layer are dropped on each rank; defect: all ranks draw from one stream."""
    use = RandomStreams.fork

    def shared(self: RandomStreams, stream: str) -> Any:
        return use(self, "default")

    result = {}
    trainer = build(lora_rank=4, lora_dropout=0.5, **layout)
    with patch.object(RandomStreams, "fork", shared if defect else use):
        for name, linear in layers_of(trainer).items():
            assert isinstance(linear, nn.Module) and linear.adapter is not None
            kept = linear.adapter._apply_dropout(torch.ones(64, dtype=torch.float64)) != 0.0
            every = collectives.all_gather(kept.to(torch.int32), trainer.run.mesh.tp).view(-1, 64)
            result[name.rpartition(".")[2]] = [row.bool().tolist() for row in every]
    return result


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_differs_between_ranks_where_their_inputs_do(sequence_parallel: bool, world: Worlds) -> None:
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    cut = {"linear_proj", "linear_fc2"} | ({"linear_qkv", "linear_fc1"} if sequence_parallel else set())
    for found in world(2).run(masks, layout, False):
        assert {name for name, (first, second) in found.items() if first != second} == cut
        assert all(0.2 < sum(row) / 64 < 0.8 for rows in found.values() for row in rows)
    for found in world(2).run(masks, layout, True):
        assert not any(first != second for first, second in found.values()), "the defect was not planted"


def test_adapters_of_experts_as_a_whole_and_of_their_parts_add_up() -> None:
    changes = {**MODELS["lora-moe"], "lora_targets": ("*.experts.linear_fc1", "*.experts.linear_fc1.up=2")}
    trainer = build(**changes)
    layer = trainer.stages[0].decoder.layers["0"].mlp.experts.linear_fc1
    pairs, counts = layer.adapter.pairs, torch.tensor([2, 0, 3, 1])
    for param in layer.adapter.parameters():
        param.data.uniform_(-1.0, 1.0)
    x = torch.randn(6, layer.weight.shape[2], dtype=torch.float64)
    expert = torch.arange(4).repeat_interleave(counts)
    deltas = {name: pair.scale * pair.lora_B @ pair.lora_A for name, pair in pairs.items()}
    total = deltas["whole"].clone()
    total[:, total.shape[1] // 2 :] += deltas["up"]  # gate | up
    expected = torch.einsum("toi,ti->to", total[expert], x)
    trainer.parallels[0].zero_gradients()
    found = layer.adapter(x, counts)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    found.sum().backward()
    assert all(param.main_grad.total.any() for param in layer.adapter.parameters())
