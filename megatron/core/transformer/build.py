"""What every layer constructor receives beside its own sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.config.plan import LayerPlan
from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RecomputeConfig
from megatron.core.context_parallel.attention import context_parallel_kernel
from megatron.core.context_parallel.sequence import Zigzag
from megatron.core.kernels.documents import remembered_starts
from megatron.core.kernels.low_precision.recipes import recipe_of
from megatron.core.kernels.mask import MaskSpec
from megatron.core.kernels.reference import GatingOptions
from megatron.core.kernels.table import Kernels
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.recompute import discard_intermediate
from megatron.core.parallel.rng import RandomStreams
from megatron.core.parallel.spec import Initial, Kind, normal_initializer, xavier_uniform
from megatron.core.parallel.wgrad import WeightGradStore
from megatron.core.tensor_parallel.low_precision import LowPrecision
from megatron.core.tensor_parallel.norm import Norm
from megatron.core.tensor_parallel.overlapped_matmul import OverlappedMatmuls
from megatron.core.tensor_parallel.region import Region


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The choices that hold for a whole network. low: those of one layer, if it multiplies in low precision (`for_layer`)."""

    model: ModelConfig
    mesh: Mesh
    kernels: Kernels
    streams: RandomStreams
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    recompute: RecomputeConfig = RecomputeConfig()
    cp_comm_type: tuple[str, ...] = ("p2p",)
    state_comm_type: str = "auto"
    wgrad_store: WeightGradStore | None = None
    low_precision: LowPrecisionConfig = LowPrecisionConfig()
    low: LowPrecision | None = None
    overlapped: OverlappedMatmuls = OverlappedMatmuls()
    sums: bool = False

    @property
    def region(self) -> Region:
        """How tensor-parallel regions are entered and left."""
        return Region(
            self.mesh.tp,
            self.sequence_parallel and self.mesh.tp.size > 1,
            self.wgrad_store,
            self.low,
            self.overlapped,
            self.sums,
        )

    def for_layer(self, plan: LayerPlan) -> BuildContext:
        """The choices for one transformer layer: whether its matrices are multiplied in 8 or 4 bits."""
        recipe = recipe_of(self.low_precision, self.mesh.device, self.kernels.quantise)
        if recipe is None or not self.low_precision.is_low_precision_layer(
            plan.index, self.model.num_layers_of(plan.cross)
        ):
            return self
        return replace(self, low=LowPrecision(recipe, self.mesh, self.streams, self.kernels.low_linear))

    @property
    def residual_dtype(self) -> torch.dtype:
        """Format of the residual stream, and so of the messages between stages."""
        wide = self.model.fp32_residual_connection and self.dtype != torch.float64
        return torch.float32 if wide else self.dtype

    @property
    def has_fused_residual_norm(self) -> bool:
        """Whether one kernel sums what attention adds, and norms the sum for the MLP."""
        return self.kernels.residual_norm is not None and self.model.has_plain_pre_norm

    def with_context_parallel_attention(self, layer: int) -> BuildContext:
        """Return a copy for a layer whose attention kernel takes this rank's shards of sequences that are cut over the context ranks,
        and attends to the whole sequences.

        layer: its number from 0, which chooses the entry of --cp-comm-type (they repeat); with one context rank the kernel stays as it is.
        """
        kind = self.cp_comm_type[layer % len(self.cp_comm_type)]
        return replace(
            self,
            kernels=replace(self.kernels, attention=context_parallel_kernel(self.kernels.attention, self.mesh, kind)),
        )

    def positions(self, held: int) -> Tensor:
        """Where in the whole sequence the places stand of which this rank holds so many, int64 [held]."""
        cp = self.mesh.cp
        return Zigzag(held * cp.size, cp.size).positions_of_rank(cp.rank, self.mesh.device)

    def causal_mask(self, hidden: Tensor, documents: Tensor | None = None) -> MaskSpec:
        """The mask of a decoder. hidden: what this rank holds between regions, [s/cp or s/cp/tp, b, h].

        documents: [b, s], of the whole sequence: by their number it is known over how many ranks that is cut.
        """
        held = self.region.whole_length(hidden.shape[0])
        length = held * self.mesh.cp.size if documents is None else documents.shape[1]
        axis = self.mesh.sequence_axis(length // held)
        if axis.group is None:
            return MaskSpec(documents=documents, starts=remembered_starts(documents))
        places = Zigzag(length, axis.size).positions_of_rank(axis.rank, hidden.device)
        starts = remembered_starts(documents)
        return MaskSpec(documents=documents, query_places=places, length=length, starts=starts)

    def recomputes(self, module: str) -> bool:
        """Whether selective recomputation covers `module`."""
        return self.recompute.recompute_granularity == "selective" and module in (
            self.recompute.recompute_modules or ()
        )

    def init_method(self) -> Initial:
        """Initial values of an input matrix."""
        return (
            xavier_uniform()
            if self.model.init_method_xavier_uniform
            else normal_initializer(self.model.init_method_std)
        )

    def output_init_method(self) -> Initial:
        """Initial values of a matrix that writes to the residual stream: smaller by the root of the number of residual sums, two a layer (GPT-2)."""
        if self.model.init_method_xavier_uniform:
            return xavier_uniform()
        return normal_initializer(
            self.model.init_method_std / math.sqrt((1.0 if self.model.hybrid.symbols else 2.0) * self.model.num_layers)
        )

    def embedding_init_method(self) -> Initial:
        """Initial values of the embeddings."""
        deviation = self.model.embedding_init_method_std
        return self.init_method() if deviation is None else normal_initializer(deviation)

    @property
    def adds_bias_in_activation(self) -> bool:
        """Whether one kernel adds the bias of an MLP's first matrix and computes the activation."""
        return self.kernels.bias_activation is not None and self.model.fuses_bias

    def activation(self, x: Tensor, bias: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
        """What the MLP does between its matrices. x: [..., f], gated [..., gate f | up f]; returns [..., f].

        bias: [f] or [2 f], where it was not added yet (`adds_bias_in_activation`); counts: [e], where it is one of each expert, [e, ..].
        """
        model = self.model
        gating = GatingOptions(model.activation_func_clamp_value, model.glu_linear_offset) if model.gated else None
        if bias is not None:
            assert self.kernels.bias_activation is not None, "a bias waits only where there is a kernel for it"
            return self.kernels.bias_activation(x, bias, model.activation, gating, counts)
        if gating is None:
            return self.kernels.activation(x, model.activation)
        return self.kernels.gated_activation(x, model.activation, gating)

    def normed_linear(self, norm: nn.Module | None, linear: Callable[[Tensor], Any], x: Tensor) -> tuple[Any, Tensor]:
        """Return linear(norm(x)) and norm(x) for x [s, b, h]; norm None: no norm.

        If norms are recomputed, the linear layer does not save norm(x).
        """
        if norm is not None and self.recomputes("layernorm"):
            return discard_intermediate(norm, linear, x)
        normed = x if norm is None else norm(x)
        return linear(normed), normed

    def norm(self, size: int, *, sum_over: tuple[str, ...] | None = None, kind: Kind = "vector") -> Norm:
        """A norm of the configured kind; left out, sum_over is that of a norm between tensor-parallel regions."""
        return Norm(
            size,
            self.model,
            kernels=self.kernels,
            mesh=self.mesh,
            dtype=self.dtype,
            kind=kind,
            sum_over=self.region.gradient_sum_axes if sum_over is None else sum_over,
        )


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x (any shape) times a fixed factor of the network, and x itself where that is one."""
    return x if factor == 1.0 else x * factor
