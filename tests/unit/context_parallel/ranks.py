"""What the ranks of a pool do in the tests of this package: attention of pieces, against attention of the whole."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.context_parallel.attention import context_parallel_attention
from megatron.core.context_parallel.zigzag import Zigzag
from megatron.core.kernels.ops import fused, reference
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh

CPU = torch.device("cpu")
KERNELS = {"fused": fused.attention_by_sdpa, "reference": reference.softmax_attention}


@dataclass(frozen=True)
class Case:
    """One attention. inner: ranks of the inner axis of a2a+p2p. documents, padding: there are such, drawn at random.

    hidden: keys at the places of this rank of four are padding.
    """

    length: int = 16
    batch: int = 2
    heads: int = 4
    groups: int = 4
    size: int = 6
    value_size: int = 6
    causal: bool = True
    window: tuple[int, int] | None = None
    documents: bool = False
    padding: bool = False
    sink: bool = False
    softcap: float | None = None
    scale: float | None = None
    inner: int = 1
    kernel: str = "fused"
    seed: int = 0
    hidden: int | None = None
    dtype: torch.dtype = torch.float64


def mesh_of(cp: int, inner: int = 1) -> Mesh:
    """A pool of context ranks."""
    return Mesh.build(
        ParallelConfig(context_parallel_size=cp, hierarchical_context_parallel_sizes=(inner, cp // inner)), CPU
    )


def inputs(case: Case) -> tuple[list[Tensor], AttentionMaskSpec, Tensor]:
    """q, k, v and the sink; the mask; and what the output is weighed with. The same in every process."""
    random = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=random)

    q = draw(case.length, case.batch, case.heads, case.size)
    k, v = (
        draw(case.length, case.batch, case.groups, case.size),
        draw(case.length, case.batch, case.groups, case.value_size),
    )
    documents = (torch.rand((case.batch, case.length), generator=random) < 0.25).cumsum(1)
    padding = torch.rand((case.batch, case.length), generator=random) < 0.7
    if case.hidden is not None:
        padding[:, Zigzag(case.length, 4).positions_of_rank(case.hidden, CPU)] = False
    mask = AttentionMaskSpec(
        causal=case.causal,
        window=case.window,
        documents=documents if case.documents else None,
        padding=padding if case.padding else None,
    )
    tensors = [x.to(case.dtype) for x in (q, k, v, draw(case.heads))]
    return tensors, mask, draw(case.length, case.batch, case.heads * case.value_size).to(case.dtype)


def scores_of(case: Case, sink: Tensor) -> AttentionScoreModifiers:
    """How the case makes scores."""
    return AttentionScoreModifiers(scale=case.scale, softcap=case.softcap, sink=sink if case.sink else None)


def whole(case: Case) -> list[Tensor]:
    """The output, and the gradients of q, k, v and the sink, by the reference on one rank."""
    tensors, mask, weight = inputs(case)
    q, k, v, sink = (x.requires_grad_() for x in tensors)
    output = reference.softmax_attention(q, k, v, mask, 0.0, scores_of(case, sink))
    (output * weight).sum().backward()
    return [output.detach(), q.grad, k.grad, v.grad, gradient_of(sink)]


def in_pieces(case: Case, kind: str, dropout: float = 0.0) -> list[Tensor]:
    """The same over the pool: every rank computes its piece, and they are put together again."""
    axis = (mesh := mesh_of(torch.distributed.get_world_size(), case.inner)).cp
    tensors, mask, weight = inputs(case)
    cut = Zigzag(case.length, axis.size)
    q, k, v = (cut.shard(x, axis.rank).clone().requires_grad_() for x in tensors[:3])
    sink = tensors[3].requires_grad_()
    attention = context_parallel_attention(KERNELS[case.kernel], mesh, kind)
    output = attention(q, k, v, replace(mask, length=case.length), dropout, scores_of(case, sink))
    (output * cut.shard(weight, axis.rank)).sum().backward()
    gradients = [joined(gradient_of(x), cut, axis) for x in (q, k, v)]
    return [joined(output.detach(), cut, axis), *gradients, collectives.all_reduce(gradient_of(sink).clone(), axis)]


def gradient_of(x: Tensor) -> Tensor:
    """Zero for what was not used."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def joined(piece: Tensor, cut: Zigzag, axis: Axis) -> Tensor:
    """The whole of every rank's piece, put in place by the places alone."""
    found = torch.full((cut.length, *piece.shape[1:]), float("nan"), dtype=piece.dtype)
    for rank, part in enumerate(collectives.gather_objects(piece, axis)):
        found[cut.positions_of_rank(rank, CPU)] = part
    return found


def dropout_gap(case: Case, kind: str, share: float) -> tuple[float, float, float, float]:
    """Along a random direction of k: the slope that the backward pass gives, and that of the output itself with the same draws.

    Then how far one output, and the mean of many, is from the output without dropout, as a share of that.
    """
    axis = (mesh := mesh_of(torch.distributed.get_world_size(), case.inner)).cp
    tensors, mask, weight = inputs(case)
    cut = Zigzag(case.length, axis.size)
    q, k, v, own = (cut.shard(x, axis.rank) for x in (*tensors[:3], weight))
    mask, attention = replace(mask, length=case.length), context_parallel_attention(KERNELS[case.kernel], mesh, kind)
    way = torch.randn(k.shape, dtype=k.dtype, generator=torch.Generator().manual_seed(axis.rank))

    def value(keys: Tensor, dropout: float, seed: int) -> Tensor:
        torch.manual_seed(1000 * seed + axis.rank)
        return attention(q, keys, v, mask, dropout)

    leaf = k.clone().requires_grad_()
    (value(leaf, share, 1) * own).sum().backward()
    slope = collectives.all_reduce((leaf.grad * way).sum(), axis)
    ends = [collectives.all_reduce((value(k + step * way, share, 1) * own).sum(), axis) for step in (1e-5, -1e-5)]
    many = torch.stack([value(k, share, seed) for seed in range(400)])
    plain = value(k, 0.0, 0)
    gaps = [((found - plain).abs().mean() / plain.abs().mean()).item() for found in (many[0], many.mean(0))]
    return slope.item(), ((ends[0] - ends[1]) / 2e-5).item(), *gaps
