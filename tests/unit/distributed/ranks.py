"""What the ranks of a pool do in the tests of this package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.distributed.ddp import DataParallel
from megatron.core.distributed.finalize import finalize_gradients
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import (
    ParamSpec,
    local_shard_boxes,
    meta_parameter,
    normal_initializer,
    param_spec_of,
    set_global_param_names,
)
from tests.helpers import tiny
from tests.helpers.training import fill_gradients

SIZES = {"first": (5, 7), "second": (9, 5), "third": (130,), "fourth": (4, 33)}


class Affine(nn.Module):
    """One parameter; its gradient is what it is multiplied with."""

    def __init__(self, shape: tuple[int, ...], mesh: Mesh, dtype: torch.dtype, *, tied: bool) -> None:
        super().__init__()
        self.weight = meta_parameter(ParamSpec(shape, normal_initializer(1.0), "matrix", tied=tied), mesh, dtype)

    def forward(self, factor: Tensor) -> Tensor:
        return (self.weight * factor).sum()


def small_module(mesh: Mesh, dtype: torch.dtype = torch.float64, *, tied: str = "") -> nn.ModuleDict:
    """Four parameters under four modules, with values by name."""
    module = nn.ModuleDict({name: Affine(shape, mesh, dtype, tied=name == tied) for name, shape in SIZES.items()})
    set_global_param_names(module)
    materialize_parameters(module, mesh, seed=1)
    return module


def factor_of(name: str, rank: int, microbatch: int) -> Tensor:
    """What a parameter is multiplied with: its gradient on this rank for this microbatch."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * microbatch + list(SIZES).index(name))
    return torch.randn(SIZES[name], dtype=torch.float64, generator=generator)


def reduce_here(
    overlap: bool, sharded: bool, average: bool, bucket_size: int | None, microbatches: int
) -> dict[str, list[tuple[int, int, Tensor]]]:
    """Backward passes over some microbatches, then the reduction: (low, high, gradient) of what this rank owns."""
    mesh = Mesh.build(ParallelConfig(), torch.device("cpu"))
    module = small_module(mesh)
    parallel = DataParallel(
        module,
        mesh,
        grad_dtype=torch.float64,
        sharded=sharded,
        bucket_size=bucket_size,
        overlap_reduce=overlap,
        overlap_gather=False,
        average=average,
    )
    for _ in range(2):  # the second step begins from nothing again
        parallel.zero_gradients()
        for microbatch in range(microbatches):
            if microbatch == microbatches - 1:
                parallel.before_last_backward()
            sum(child(factor_of(name, dist.get_rank(), microbatch)) for name, child in module.items()).backward()
        parallel.start_reduction()
        parallel.finish_reduction()
    found: dict[str, list[tuple[int, int, Tensor]]] = {}
    for segment in parallel.owned_segments():
        found.setdefault(segment.name, []).append((segment.low, segment.high, segment.grad.clone()))
    return found


def finalize_here(changes: dict[str, Any]) -> tuple[int, int, dict[str, Tensor]]:
    """Fill the gradients with rank + 1 times a known gradient, finalize: (tp rank, pp rank, gradients with nan elsewhere)."""
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(dist.get_world_size(), **changes)))
    mesh = trainer.run.mesh
    fill_gradients(trainer, factor=dist.get_rank() + 1)
    finalize_gradients(trainer.optimizer.segments, mesh)
    found: dict[str, Tensor] = {}
    for parallel in trainer.parallels:
        for bucket in parallel.buckets:
            for param, view in zip(bucket.params, bucket.gradient_views(), strict=True):
                spec = param_spec_of(param)
                found[spec.name] = torch.full(spec.shape, float("nan"), dtype=view.dtype)
                for piece in local_shard_boxes(spec, mesh):
                    found[spec.name][piece.box.slices()] = view[piece.local.slices()]
    return mesh.tp.rank, mesh.pp.rank, found


def alone(ranks: int = 1, rank: int = 0) -> Mesh:
    """A mesh with this place on the data axis, without processes."""
    axis = replace(Mesh.single_process().dp_cp, size=ranks, rank=rank, ranks=tuple(range(ranks)))
    return replace(Mesh.single_process(), dp_cp=axis)
