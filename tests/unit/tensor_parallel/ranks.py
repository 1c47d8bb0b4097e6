"""What the ranks of a pool do in the tests of this package: small modules, run cut and brought home whole."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.kernels.choice.table import Kernels
from megatron.core.kernels.ops import linear_loss
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import (
    FusedWeightSegment,
    local_shard_boxes,
    normal_initializer,
    param_spec_of,
    set_global_param_names,
)
from megatron.core.tensor_parallel.cross_entropy import fused_linear_cross_entropy, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.embedding import (
    PositionEmbeddingTable,
    VocabParallelEmbedding,
    vocabulary_matrix_spec,
)
from megatron.core.tensor_parallel.entropy import fused_linear_entropy
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.norm import Norm
from megatron.core.tensor_parallel.overlapped_matmul import MatmulOverlapOptions
from megatron.core.tensor_parallel.region import TensorParallelRegion
from megatron.training.state.step import train_step
from tests.helpers import tiny

S, B, H, F_SIZE, V = 8, 3, 6, 16, 21


def here(tp: int) -> Mesh:
    """The mesh of this process: alone without torch.distributed, or one tensor group."""
    if not dist.is_initialized():
        return Mesh.single_process()
    return Mesh.build(ParallelConfig(tensor_model_parallel_size=tp), torch.device("cpu"))


def data(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers that every process knows."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(name))).to(dtype)


class TwoMatrices(nn.Module):
    """Column, activation, row, between regions; gated: two parts."""

    def __init__(self, mesh: Mesh, region: TensorParallelRegion, *, gated: bool, bias: bool) -> None:
        super().__init__()
        common = {"init": normal_initializer(0.5), "region": region, "mesh": mesh, "dtype": torch.float64, "bias": bias}
        self.up = ColumnParallelLinear(H, (FusedWeightSegment(F_SIZE),) * (2 if gated else 1), **common)
        self.down = RowParallelLinear(F_SIZE, H, **common)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        if self.gated:
            gate, up = wide.chunk(2, dim=-1)
            wide = F.silu(gate) * up
        else:
            wide = torch.tanh(wide)
        return self.down(wide)


class Embeddings(nn.Module):
    """Ids and positions to vectors, then a norm between regions."""

    def __init__(self, mesh: Mesh, region: TensorParallelRegion, *, normalization: str, one_plus: bool) -> None:
        super().__init__()
        padded = -(-V // (4 * region.axis.size)) * 4 * region.axis.size
        sizes = ModelConfig(true_vocab_size=V, padded_vocab_size=padded, hidden_size=H)
        spec = vocabulary_matrix_spec(sizes, normal_initializer(1.0), tied=False)
        self.words = VocabParallelEmbedding(spec, region=region, mesh=mesh, dtype=torch.float64)
        self.places = PositionEmbeddingTable(
            S + 2, H, init=normal_initializer(1.0), region=region, mesh=mesh, dtype=torch.float64
        )
        model = ModelConfig(normalization=normalization, apply_layernorm_1p=one_plus)
        self.norm = Norm(H, model, sum_over=region.gradient_sum_axes, kernels=Kernels(), mesh=mesh, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """x: not used; ids are fixed."""
        ids = (data("ids", B, S) * 10).long().remainder(V)
        positions = (torch.arange(S) + 2)[None].expand(B, S)
        return self.norm(self.words(ids) + self.places(positions))


MODULES = {
    "mlp": functools.partial(TwoMatrices, gated=False, bias=True),
    "gated": functools.partial(TwoMatrices, gated=True, bias=False),
    "layernorm": functools.partial(Embeddings, normalization="LayerNorm", one_plus=False),
    "rmsnorm": functools.partial(Embeddings, normalization="RMSNorm", one_plus=True),
}


def run_module(
    name: str, tp: int, sequence_parallel: bool, overlapped: MatmulOverlapOptions = MatmulOverlapOptions()
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Forward and backward of a module cut over tp ranks: whole output, whole input gradient, parameter gradients.

    A gradient has its whole shape, with nan where this rank holds nothing.
    """
    mesh = here(tp)
    region = TensorParallelRegion(mesh.tp, sequence_parallel, overlapped=overlapped)
    module = MODULES[name](mesh, region)
    set_global_param_names(module)
    materialize_parameters(module, mesh, seed=1)
    with torch.no_grad():  # biases at zero would hide how often they are added
        for path, param in module.named_parameters():
            if "bias" in path:
                for piece in local_shard_boxes(param_spec_of(param), mesh):
                    param[piece.local.slices()] = data(path, *param_spec_of(param).shape)[piece.box.slices()]
    whole = data("x", S, B, H)
    x = (collectives.local_chunk(whole, mesh.tp) if sequence_parallel else whole.clone()).requires_grad_()
    y = module(x)
    weight = data("weight of the loss", S, B, H)
    (y * (collectives.local_chunk(weight, mesh.tp) if sequence_parallel else weight)).sum().backward()
    outside = collectives.all_gather if sequence_parallel else lambda tensor, axis: tensor
    found = {}
    for path, param in module.named_parameters():
        spec = param_spec_of(param)
        gradient = collectives.all_reduce(param.grad, mesh.tp) if "tp" in spec.sum_over else param.grad
        found[path] = torch.full(spec.shape, float("nan"), dtype=gradient.dtype)
        for piece in local_shard_boxes(spec, mesh):
            found[path][piece.box.slices()] = gradient[piece.local.slices()]
    input_gradient = None if x.grad is None else outside(x.grad, mesh.tp)
    return outside(y.detach(), mesh.tp), input_gradient, found


def run_loss(tp: int, padded: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cross entropy of fixed logits [S, B, padded], cut over tp ranks: losses [S, B] and this rank's gradient."""
    mesh = here(tp)
    whole = 4 * data("logits", S, B, padded, dtype=torch.float64)
    logits = whole.chunk(tp, dim=-1)[mesh.tp.rank].to(dtype).contiguous().requires_grad_()
    targets = (data("targets", S, B) * 10).long().remainder(V)
    losses = vocab_parallel_cross_entropy(logits * 1.0, targets, mesh.tp, V)
    (losses * data("weights", S, B)).sum().backward()
    return losses.detach(), logits.grad


def run_linear_loss(
    tp: int, padded: int, sequence_parallel: bool, ignored: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses [S, B] of fixed states, and the gradients: of all states, whole; of this rank's words and biases. Tokens weigh alike
    first, and each its own the second time; the gradients are the sum of both.
    """
    mesh = here(tp)
    region = TensorParallelRegion(mesh.tp, sequence_parallel)
    states = region.scatter_to_sequence(data("states", S, B, H)).clone().requires_grad_()
    weight, bias = (
        data(name, padded, *shape).chunk(tp)[mesh.tp.rank].clone().requires_grad_()
        for name, shape in (("words", (H,)), ("biases", ()))
    )
    targets = (data("targets", S, B) * 10).long().remainder(V)
    if ignored:
        targets[::2] = -1
    for weights in (1.5, data("weights", S, B)):
        losses = fused_linear_cross_entropy(
            linear_loss.blockwise_linear_cross_entropy, states, weight, bias, targets, region=region, true_vocab_size=V
        )
        (losses * weights).sum().backward()
    whole = collectives.all_gather(states.grad, mesh.tp) if sequence_parallel else states.grad
    return losses.detach(), whole, weight.grad, bias.grad


def run_entropy(
    tp: int, padded: int, sequence_parallel: bool, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Entropies [S, B] of fixed states, and the gradients of their weighed sum: of all states, whole; of this rank's words and biases."""
    mesh = here(tp)
    region = TensorParallelRegion(mesh.tp, sequence_parallel)
    states = region.scatter_to_sequence(data("states", S, B, H)).clone().requires_grad_()
    weight, bias = (
        data(name, padded, *shape).chunk(tp)[mesh.tp.rank].clone().requires_grad_()
        for name, shape in (("words", (H,)), ("biases", ()))
    )
    found = fused_linear_entropy(
        states, weight, bias, region=region, true_vocab_size=V, softcap=softcap, factor=1 / 0.7
    )
    (found * data("weights", S, B)).sum().backward()
    assert states.grad is not None and weight.grad is not None and bias.grad is not None
    whole = collectives.all_gather(states.grad, mesh.tp) if sequence_parallel else states.grad
    return found.detach(), whole, weight.grad, bias.grad


def collectives_of_a_step(changes: dict[str, Any]) -> int:
    """How many collectives this rank begins in the second step of a tiny run."""
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(dist.get_world_size(), **changes)))
    train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    before = sum(trainer.run.mesh.flight_recorder.counts.values())
    train_step(trainer, tiny.short_run_batches(trainer.run, 1))
    return sum(trainer.run.mesh.flight_recorder.counts.values()) - before
