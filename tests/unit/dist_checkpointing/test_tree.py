"""Which boxes of a global tensor a rank holds, against plain indexing of numbered elements."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.sharded_state import (
    ShardedTensor,
    Tree,
    add_sharded_tensor,
    replicated_tensor,
    sharded_optimizer_state,
    sharded_parameter,
)
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.spec import FusedWeightSegment, ParamSpec, ShardedDim, constant_initializer
from tests.unit.dist_checkpointing.held import MARKER, local_tensor, specs, whole_tensor


@dataclass(frozen=True)
class Flat:
    """The least that a segment is."""

    spec: ParamSpec
    local_shape: tuple[int, ...]
    low: int
    high: int


def mesh_at(tp: int, rank: int) -> Mesh:
    return replace(Mesh.single_process(), tp=Axis("tp", tp, rank, tuple(range(tp))))


def spread(placed: ShardedTensor) -> Tensor:
    """The global tensor as far as it is held, NaN elsewhere."""
    result = torch.full(placed.shape, float("nan"))
    for box, tensor in placed.pieces:
        assert tensor.shape == box.shape
        assert result[box.slices()].isnan().all(), f"{box} is held twice"
        result[box.slices()] = tensor
    return result


def with_nan(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(nan=-1.0)


def test_flat_ranges_of_cut_parameters_land_on_their_global_elements() -> None:
    choose, result = random.Random(0), 0
    for seed in range(60):
        tp = choose.choice((1, 2, 4))
        mesh = mesh_at(tp, choose.randrange(tp))
        for spec in specs(seed, tp):
            local = local_tensor(spec, "weight", mesh)
            low, high = sorted((choose.randint(0, local.numel()), choose.randint(0, local.numel())))
            placed = sharded_optimizer_state(Flat(spec, tuple(local.shape), low, high), local.flatten()[low:high], mesh)
            # Global values are distinct, so an element of the range is found again by its value.
            whole = whole_tensor(spec.name, "weight", spec.shape)
            mine = torch.isin(whole, local.flatten()[low:high])
            expected = torch.where(mine, whole, torch.full_like(whole, float("nan")))
            assert torch.equal(with_nan(spread(placed)), with_nan(expected)), (
                f"{spec.name} [{low}, {high}) on {mesh.tp}"
            )
            assert len(placed.pieces) <= (2 * len(local.shape) - 1) * 3
            result += len(placed.pieces)
    assert result > 300


def test_parameters_are_placed_without_their_padding() -> None:
    spec = ParamSpec(
        (5, 2),
        constant_initializer(0.0),
        "embedding",
        (ShardedDim(0, "tp", (FusedWeightSegment(5, padded=8),)),),
        name="v",
    )
    held = []
    for rank in range(4):
        mesh = mesh_at(4, rank)
        param = nn.Parameter(local_tensor(spec, "weight", mesh))
        param.spec = spec  # type: ignore[attr-defined]
        placed = sharded_parameter(param, mesh)
        assert placed.shape == (5, 2)
        assert not any((tensor == MARKER).any() for _, tensor in placed.pieces)
        held.append([(box.offset, box.shape) for box, _ in placed.pieces])
    assert held == [[((0, 0), (2, 2))], [((2, 0), (2, 2))], [((4, 0), (1, 2))], []]


def test_pieces_are_views_that_a_load_can_write_into() -> None:
    spec = specs(0, 1)[0]
    tensor = torch.zeros(math.prod(spec.shape))
    for _, view in sharded_optimizer_state(
        Flat(spec, spec.shape, 0, tensor.numel()), tensor, Mesh.single_process()
    ).pieces:
        view.fill_(2.0)
    assert torch.equal(tensor, torch.full_like(tensor, 2.0))
    scalar = torch.tensor(1.0)
    replicated_tensor(scalar).pieces[0][1].fill_(5.0)
    assert scalar == 5.0


def test_a_name_held_twice_keeps_both_pieces() -> None:
    tree, first, second = Tree(), torch.zeros(3), torch.zeros(3)
    add_sharded_tensor(tree, "a", replicated_tensor(first))
    add_sharded_tensor(tree, "a", replicated_tensor(second))
    assert [tensor.data_ptr() for _, tensor in tree["a"].pieces] == [first.data_ptr(), second.data_ptr()]
