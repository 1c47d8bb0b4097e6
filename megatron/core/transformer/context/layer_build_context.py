"""What every layer constructor receives beside its own sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.plan.layers import LayerPlan
from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RecomputeConfig
from megatron.core.context_parallel.attention import context_parallel_attention
from megatron.core.context_parallel.zigzag import Zigzag
from megatron.core.kernels.choice.table import Kernels
from megatron.core.kernels.low_precision.recipes import low_precision_recipe_of
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.kernels.ops.packed_document_starts import cached_packed_document_starts
from megatron.core.kernels.ops.reference import GatedActivationOptions
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.recompute import apply_recomputing_input
from megatron.core.parallel.rng import RandomStreams
from megatron.core.parallel.spec import (
    FusedWeightSegment,
    Initial,
    Kind,
    normal_initializer,
    xavier_uniform_initializer,
)
from megatron.core.parallel.wgrad import WeightGradStore
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.core.tensor_parallel.low_precision import LowPrecisionSetup
from megatron.core.tensor_parallel.norm import Norm
from megatron.core.tensor_parallel.overlapped_matmul import MatmulOverlapOptions
from megatron.core.tensor_parallel.region import TensorParallelRegion


@dataclass(frozen=True, slots=True)
class LayerBuildContext:
    """What every layer's constructor receives: the configuration, mesh, kernels and random streams of a whole network.

    low: low-precision matmuls, only in a copy for one layer (`for_layer`).
    """

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
    low: LowPrecisionSetup | None = None
    overlapped: MatmulOverlapOptions = MatmulOverlapOptions()
    sums: bool = False

    @property
    def tp_region(self) -> TensorParallelRegion:
        """Return the tensor-parallel region that linear layers enter and leave, with sequence parallelism if it is on."""
        return TensorParallelRegion(
            self.mesh.tp,
            self.sequence_parallel and self.mesh.tp.size > 1,
            self.wgrad_store,
            self.low,
            self.overlapped,
            self.sums,
        )

    def for_layer(self, plan: LayerPlan) -> LayerBuildContext:
        """Return itself, or a copy with low-precision matmuls for a layer that is configured to have them."""
        recipe = low_precision_recipe_of(self.low_precision, self.mesh.device, self.kernels.quantise)
        if recipe is None or not self.low_precision.is_low_precision_layer(
            plan.index, self.model.encoder_or_decoder_depth(plan.has_cross_attention)
        ):
            return self
        return replace(self, low=LowPrecisionSetup(recipe, self.mesh, self.streams, self.kernels.low_linear))

    @property
    def residual_dtype(self) -> torch.dtype:
        """Dtype of the residual stream, and so of the hidden states that stages send to each other."""
        wide = self.model.fp32_residual_connection and self.dtype != torch.float64
        return torch.float32 if wide else self.dtype

    @property
    def has_fused_residual_norm(self) -> bool:
        """Whether one kernel adds attention's output to the residual stream and norms the sum for the MLP."""
        return self.kernels.residual_norm is not None and self.model.has_plain_pre_norm

    def with_context_parallel_attention(self, layer: int) -> LayerBuildContext:
        """Return a copy for a layer whose attention kernel takes this rank's shards of sequences that are cut over the context ranks,
        and attends to the whole sequences.

        layer: its number from 0, which chooses the entry of --cp-comm-type (they repeat); with one context rank the kernel stays as it is.
        """
        kind = self.cp_comm_type[layer % len(self.cp_comm_type)]
        return replace(
            self,
            kernels=replace(
                self.kernels, attention=context_parallel_attention(self.kernels.attention, self.mesh, kind)
            ),
        )

    def local_positions(self, held: int) -> Tensor:
        """Return the positions in the sequence of this context rank's `held` tokens, int64 [held] (zigzag order)."""
        cp = self.mesh.cp
        return Zigzag(held * cp.size, cp.size).positions_of_rank(cp.rank, self.mesh.device)

    def causal_mask(self, hidden: Tensor, documents: Tensor | None = None) -> AttentionMaskSpec:
        """Return the causal mask of a decoder, for this rank's shard of the sequence.

        hidden: this rank's hidden states outside of tensor-parallel regions, [s/cp or s/cp/tp, b, h]. documents: [b,
        s], document index of each position of the whole sequence, whose length tells over how many ranks it is cut;
        None: attention crosses documents.
        """
        held = self.tp_region.whole_sequence_length(hidden.shape[0])
        length = held * self.mesh.cp.size if documents is None else documents.shape[1]
        axis = self.mesh.context_axis_of_size(length // held)
        if axis.group is None:
            return AttentionMaskSpec(documents=documents, starts=cached_packed_document_starts(documents))
        places = Zigzag(length, axis.size).positions_of_rank(axis.rank, hidden.device)
        starts = cached_packed_document_starts(documents)
        return AttentionMaskSpec(documents=documents, query_places=places, length=length, starts=starts)

    def recomputes_module(self, module: str) -> bool:
        """Whether selective recomputation covers `module`."""
        return self.recompute.recompute_granularity == "selective" and module in (
            self.recompute.recompute_modules or ()
        )

    def init_method(self) -> Initial:
        """Initializer of an input matrix: normal with --init-method-std, or Xavier uniform."""
        if self.model.init_method_xavier_uniform:
            return xavier_uniform_initializer()
        return normal_initializer(self.model.init_method_std)

    def output_init_method(self) -> Initial:
        """Initializer of a matrix that writes to the residual stream: deviation divided by the root of the number of
        residual sums, two a layer (GPT-2; one in hybrids); with --init-method-xavier-uniform that, undivided.
        """
        if self.model.init_method_xavier_uniform:
            return xavier_uniform_initializer()
        return normal_initializer(
            self.model.init_method_std
            / math.sqrt((1.0 if self.model.hybrid.layer_symbols else 2.0) * self.model.num_layers)
        )

    def embedding_init_method(self) -> Initial:
        """Initializer of the embeddings: normal with --embedding-init-method-std, or left out, `init_method`."""
        deviation = self.model.embedding_init_method_std
        return self.init_method() if deviation is None else normal_initializer(deviation)

    @property
    def adds_bias_in_activation(self) -> bool:
        """Whether one kernel adds the bias of an MLP's first matrix and computes the activation."""
        return self.kernels.bias_activation is not None and self.model.can_fuse_mlp_bias

    def apply_activation(self, x: Tensor, bias: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
        """Apply the MLP's activation, gated or not. x: [..., f], gated [..., gate f | up f]; returns [..., f].

        bias: [f] or [2 f], if it was not added yet (`adds_bias_in_activation`); counts: rows of each expert [e], where
        the bias is [e, ...], one for each expert.
        """
        model, gating = self.model, None
        if model.has_gated_mlp:
            gating = GatedActivationOptions(model.activation_func_clamp_value, model.glu_linear_offset)
        if bias is not None:
            assert self.kernels.bias_activation is not None, "a bias waits only where there is a kernel for it"
            return self.kernels.bias_activation(x, bias, model.activation_name, gating, counts)
        if gating is None:
            return self.kernels.activation(x, model.activation_name)
        return self.kernels.gated_activation(x, model.activation_name, gating)

    def project(self, linear: Callable[[Tensor], Any], normed: Tensor) -> Any:
        """Return linear(normed), normed: [s, b, h]; the matmul does not keep its input if norms are recomputed."""
        if self.recomputes_module("layernorm"):
            return apply_recomputing_input(linear, normed)
        return linear(normed)

    def make_norm(
        self, size: int, *, sum_over: tuple[str, ...] | None = None, kind: Kind = "vector", before_matmul: bool = False
    ) -> Norm:
        """Create a norm of the configured kind over the last dimension.

        sum_over: axes over which its gradient is summed; left out, those of a norm outside of tensor-parallel regions.
        before_matmul: its output goes to `project`, so that --recompute-modules layernorm covers it.
        """
        return Norm(
            size,
            self.model,
            kernels=self.kernels,
            mesh=self.mesh,
            dtype=self.dtype,
            kind=kind,
            sum_over=self.tp_region.gradient_sum_axes if sum_over is None else sum_over,
            recomputed=before_matmul and self.recomputes_module("layernorm"),
        )

    def make_column_linear(
        self, input_size: int, parts: tuple[FusedWeightSegment, ...], *, bias: bool, kind: Kind = "matrix"
    ) -> ColumnParallelLinear:
        """Create a column-parallel linear layer that starts from `init_method`. parts: segments of its output."""
        region, init = self.tp_region, self.init_method()
        return ColumnParallelLinear(
            input_size, parts, bias=bias, init=init, region=region, mesh=self.mesh, dtype=self.dtype, kind=kind
        )

    def make_row_linear(self, input_size: int, *, bias: bool, init: Initial | None = None) -> RowParallelLinear:
        """Create a row-parallel linear layer to the hidden size. init: left out, `output_init_method`."""
        size, region, init = self.model.hidden_size, self.tp_region, init or self.output_init_method()
        return RowParallelLinear(
            input_size, size, bias=bias, init=init, region=region, mesh=self.mesh, dtype=self.dtype
        )

    def make_replicated_linear(
        self, input_size: int, output_size: int, *, sum_over: tuple[str, ...] = (), bias: bool = True
    ) -> ReplicatedLinear:
        """Create a linear layer that is whole on every rank and starts from `init_method`. sum_over: of its gradients."""
        init = self.init_method()
        return ReplicatedLinear(
            input_size, output_size, init=init, mesh=self.mesh, dtype=self.dtype, sum_over=sum_over, bias=bias
        )


def multiply_unless_one(x: Tensor, factor: float) -> Tensor:
    """Return x (any shape) times a fixed factor of the network, and x itself where that is one."""
    return x if factor == 1.0 else x * factor
