from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import (
    FusedWeightSegment,
    ParamSpec,
    ShardedDim,
    constant_initializer,
    is_replicated_over_tensor,
    local_shape,
    local_shard_boxes,
    meta_parameter,
    normal_initializer,
    param_spec_of,
    set_global_param_names,
    xavier_uniform_initializer,
)


def mesh_of(tp: int, rank: int) -> Mesh:
    """The mesh of one tensor rank, without processes: enough for arithmetic."""
    return replace(Mesh.single_process(), tp=Axis("tp", tp, rank, tuple(range(tp))))


def qkv(tp: int, heads: int = 8, groups: int = 2, size: int = 3) -> ShardedDim:
    key = FusedWeightSegment(groups * size, max(1, tp // groups))
    return ShardedDim(0, "tp", (FusedWeightSegment(heads * size), key, key))


SPECS = {
    "row": lambda tp: ParamSpec(
        (5, 16), normal_initializer(1.0), "matrix", (ShardedDim(1, "tp", (FusedWeightSegment(16),)),)
    ),
    "gate-up": lambda tp: ParamSpec(
        (48, 5),
        normal_initializer(1.0),
        "matrix",
        (ShardedDim(0, "tp", (FusedWeightSegment(24), FusedWeightSegment(24))),),
    ),
    "qkv": lambda tp: ParamSpec((36, 5), normal_initializer(1.0), "matrix", (qkv(tp),)),
    "mqa-bias": lambda tp: ParamSpec((30,), normal_initializer(1.0), "vector", (qkv(tp, groups=1),)),
    "vocabulary": lambda tp: ParamSpec(
        (50, 5), normal_initializer(1.0), "embedding", (ShardedDim(0, "tp", (FusedWeightSegment(50, padded=64),)),)
    ),
    "mostly-padding": lambda tp: ParamSpec(
        (9, 2), normal_initializer(1.0), "embedding", (ShardedDim(0, "tp", (FusedWeightSegment(9, padded=80),)),)
    ),
    "whole": lambda tp: ParamSpec((7,), normal_initializer(1.0), "vector"),
}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", SPECS)
def test_boxes_of_all_ranks_cover_every_element_as_often_as_it_is_held(kind: str, tp: int) -> None:
    spec = SPECS[kind](tp)
    held, claimed, firsts = torch.zeros(spec.shape), torch.zeros(spec.shape), torch.zeros(spec.shape)
    for rank in range(tp):
        own = torch.zeros(local_shape(spec, mesh_of(tp, rank)))
        for piece in local_shard_boxes(spec, mesh_of(tp, rank)):
            held[piece.box.slices()] += 1
            claimed[piece.box.slices()] = piece.replicas if spec.shards else tp
            firsts[piece.box.slices()] += piece.is_first_replica
            own[piece.local.slices()] += 1
        assert own.max() <= 1, "pieces of one rank do not overlap"
        if not any(part.padded for cut in spec.shards for part in cut.segments):
            assert own.min() == 1, "without padding every local element is held"
    assert torch.equal(held, claimed)
    assert torch.equal(firsts, torch.ones_like(firsts) if spec.shards else held)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_piece_of_queries_stands_beside_the_keys_that_serve_it(tp: int) -> None:
    spec = SPECS["qkv"](tp)
    for rank in range(tp):
        q, k, v = local_shard_boxes(spec, mesh_of(tp, rank))
        query_heads = range(q.box.offset[0] // 3, (q.box.offset[0] + q.box.shape[0]) // 3)
        served = {head // 4 for head in query_heads}  # 8 query heads, 2 groups
        assert {(k.box.offset[0] - 24) // 3 + n for n in range(k.box.shape[0] // 3)} == served
        assert v.box.offset[0] - k.box.offset[0] == 6 and v.box.shape == k.box.shape


@pytest.mark.parametrize("kind", SPECS)
def test_initial_values_are_the_same_whole_tensor_under_every_cut(kind: str) -> None:
    def whole(tp: int) -> torch.Tensor:
        spec = replace(SPECS[kind](tp), name="some.weight")
        found = torch.full(spec.shape, float("nan"))
        for rank in range(tp):
            mesh, module = mesh_of(tp, rank), nn.Module()
            module.weight = meta_parameter(spec, mesh, torch.float32)
            materialize_parameters(module, mesh, seed=3)
            for piece in local_shard_boxes(spec, mesh):
                found[piece.box.slices()] = module.weight.detach()[piece.local.slices()]
            padding = torch.ones_like(module.weight, dtype=torch.bool)
            for piece in local_shard_boxes(spec, mesh):
                padding[piece.local.slices()] = False
            assert (module.weight[padding] == 0).all(), "padding starts at zero"
        return found

    first = whole(1)
    assert not first.isnan().any() and first.std() > 0.3
    for tp in (2, 4, 8):
        assert torch.equal(whole(tp), first)


def test_initial_values_follow_the_name_and_the_seed() -> None:
    def draw(name: str, seed: int) -> torch.Tensor:
        module = nn.Module()
        module.weight = meta_parameter(
            ParamSpec((50,), normal_initializer(1.0), "vector", name=name), Mesh.single_process(), torch.float32
        )
        materialize_parameters(module, Mesh.single_process(), seed)
        return module.weight.detach()

    assert torch.equal(draw("a", 1), draw("a", 1))
    assert not torch.equal(draw("a", 1), draw("b", 1))
    assert not torch.equal(draw("a", 1), draw("a", 2))


def test_initial_distributions_are_what_they_are_called() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = normal_initializer(0.02)((300, 200), generator)
    assert abs(drawn.std().item() - 0.02) < 3e-4 and abs(drawn.mean().item()) < 3e-4
    uniform = xavier_uniform_initializer()((300, 200), generator)
    assert uniform.abs().max() <= (6 / 500) ** 0.5 and abs(uniform.std().item() - (2 / 500) ** 0.5) < 1e-3
    assert torch.equal(constant_initializer(0.5)((2, 2), generator), torch.full((2, 2), 0.5))


def test_names_are_module_paths_and_a_given_name_stays() -> None:
    outer = nn.Module()
    outer.inner = nn.Module()
    outer.inner.weight = meta_parameter(SPECS["whole"](1), Mesh.single_process(), torch.float32)
    outer.tied = meta_parameter(replace(SPECS["whole"](1), name="embedding"), Mesh.single_process(), torch.float32)
    set_global_param_names(outer)
    assert param_spec_of(outer.inner.weight).name == "inner.weight" and param_spec_of(outer.tied).name == "embedding"
    assert is_replicated_over_tensor(SPECS["whole"](4)) and not is_replicated_over_tensor(SPECS["row"](4))
