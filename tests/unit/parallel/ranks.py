"""What the ranks of a pool do in the tests of this package."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh

CPU = torch.device("cpu")


def mesh_of(**sizes: Any) -> Mesh:
    """The mesh of these parallel settings on this pool."""
    return Mesh.build(ParallelConfig(**sizes), CPU)


def places(sizes: dict[str, Any]) -> dict[str, tuple[str, int, int, tuple[int, ...], bool]]:
    """Every axis of this rank's mesh, in plain words."""
    mesh = mesh_of(**sizes)
    axes = {
        name: mesh.axis(name) for name in ("tp", "dp", "pp", "pp_backward", "embed", "model", "world", "dp_cp", "edp")
    }
    assert mesh.pp.group is None or mesh.pp.group is not mesh.pp_backward.group, "the pipeline has two groups"
    return {name: (axis.name, axis.size, axis.rank, axis.ranks, axis.group is None) for name, axis in axes.items()}


def raw_flag_value(rank: int, *shape: int) -> Tensor:
    """A tensor that every process can compute for every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + rank))


def differentiate(
    pair: str, shape: tuple[int, ...], replicated: bool, out: tuple[int, ...], same_weight: bool
) -> tuple[Tensor, Tensor]:
    """Forward, and the gradient of this rank's input under a loss that is linear in the outputs of all tensor ranks."""
    axis = mesh_of(tensor_model_parallel_size=2).tp
    x = raw_flag_value(0 if replicated else axis.rank, *shape).requires_grad_()
    y = getattr(collectives, pair)(x, axis)
    weight = raw_flag_value(50 if same_weight else 50 + axis.rank, *out)
    (y * weight).sum().backward()
    return y.detach(), x.grad


def plain(name: str) -> Any:
    """One collective outside autograd, over the data axis of a 2 x 2 mesh (ranks 0 2 and 1 3)."""
    axis = mesh_of(tensor_model_parallel_size=2).dp
    rank = axis.ranks[axis.rank]
    mine = raw_flag_value(rank, 4, 3)
    if name in ("sum", "max", "min", "avg"):
        return collectives.all_reduce(mine, axis, name)
    if name == "all_gather":
        return collectives.all_gather(mine.t(), axis)  # not contiguous on purpose
    if name == "reduce_scatter":
        return collectives.reduce_scatter(mine, axis)
    if name == "cut":
        return collectives.local_chunk(raw_flag_value(9, 4, 3), axis)
    if name == "broadcast":
        return collectives.broadcast(mine, axis, 1)
    if name == "broadcast_object":
        return collectives.broadcast_object({"rank": rank}, axis, 1)
    if name == "in place":
        whole = torch.zeros(4, 3, dtype=torch.float64)
        piece = whole[2 * axis.rank : 2 * axis.rank + 2]
        piece.copy_(mine[:2])
        collectives.wait(collectives.start_all_gather(whole, piece, axis))
        gathered = whole.clone()
        collectives.wait(collectives.start_reduce_scatter(piece, whole, axis))
        return gathered, piece.clone()
    assert name == "gather_objects", f"no collective is called {name}"
    return collectives.gather_objects(("rank", rank), axis)


def exchange_pieces(sizes: dict[int, list[int]]) -> tuple[Tensor, Tensor]:
    """Send pieces of these sizes; what came, and the gradient of what went under a loss that is linear in what came."""
    axis = mesh_of(expert_model_parallel_size=4).ep
    x = raw_flag_value(axis.rank, sum(sizes[axis.rank]), 3).requires_grad_()
    coming = collectives.all_to_all(x, sizes[axis.rank], [sizes[sender][axis.rank] for sender in range(4)], axis)
    (coming * raw_flag_value(50 + axis.rank, *coming.shape)).sum().backward()
    return coming.detach(), x.grad


def watch_an_exchange() -> list[str]:
    """The order of starts and waits when something is computed while rows travel, forward and backward."""
    axis, events = mesh_of(expert_model_parallel_size=2).ep, []
    start, wait = collectives.start_all_to_all, collectives.wait

    def said(name: str, call: Any) -> Any:
        def heard(*arguments: Any) -> Any:
            events.append(name)
            return call(*arguments)

        return heard

    with (
        patch.object(collectives, "start_all_to_all", said("start", start)),
        patch.object(collectives, "wait", said("wait", wait)),
    ):
        x = raw_flag_value(axis.rank, 4, 3).requires_grad_()
        exchange = collectives.AsyncAllToAll([2, 2], [2, 2], axis)
        coming = collectives.start_autograd_all_to_all(x, exchange)
        other = x * 2.0
        events.append("other")
        other.register_hook(lambda gradient: events.append("other backward"))
        (collectives.finish_autograd_all_to_all(coming, exchange).sum() + other.sum()).backward()
    return events


def uneven(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A gather of uneven pieces and its gradient, a scatter into them and its gradient."""
    axis = mesh_of(expert_model_parallel_size=4).ep
    x = raw_flag_value(axis.rank, sizes[axis.rank], 3).requires_grad_()
    whole = collectives.uneven_gather_with_scatter_backward(x, sizes, axis)
    (whole * raw_flag_value(50 + axis.rank, *whole.shape)).sum().backward()
    y = raw_flag_value(axis.rank, sum(sizes), 3).requires_grad_()
    piece = collectives.uneven_scatter_with_gather_backward(y, sizes, axis)
    (piece * raw_flag_value(70 + axis.rank, *piece.shape)).sum().backward()
    return whole.detach(), x.grad, piece.detach(), y.grad
