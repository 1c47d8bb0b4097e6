"""Parameters, matrices and activations of a layer's experts, from the config alone; part of `flops.py`.

e experts of width f, of which a token uses k; a shared one of width w. Letters as in flops.py; u expert-tensor ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.model import ModelConfig
from megatron.core.config.parallel import ParallelConfig


@dataclass(frozen=True, slots=True)
class Split:
    """How many ranks share a matrix (tensor), the experts of a layer (experts), and each expert's matrices (widths)."""

    tensor: int = 1
    experts: int = 1
    widths: int = 1

    @staticmethod
    def of(parallel: ParallelConfig) -> Split:
        """The division that a layout makes."""
        return Split(parallel.tp, parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or parallel.tp)


def _mlp(model: ModelConfig, width: int) -> int:
    """Elements of the matrices of an MLP."""
    return model.hidden_size * width * (3 if model.gated else 2)


def _mlp_with_biases(model: ModelConfig, width: int) -> int:
    biases = width * (2 if model.gated else 1) + model.hidden_size if model.add_bias_linear else 0
    return _mlp(model, width) + biases


def expert_parameters(model: ModelConfig, split: Split = Split()) -> int:
    """Those of a layer's experts on each rank: what is averaged over the expert-data ranks."""
    moe = model.moe
    return moe.num_experts // split.experts * _mlp_with_biases(model, moe.moe_ffn_hidden_size // split.widths)


def common_parameters(model: ModelConfig, split: Split = Split()) -> int:
    """Those of router and shared expert on each rank. Biases that move without a gradient count."""
    moe, h = model.moe, model.hidden_size
    router = moe.num_experts * (h + model.add_bias_linear + moe.moe_router_enable_expert_bias)
    if moe.moe_shared_expert_intermediate_size is None:
        return router
    shared = _mlp_with_biases(model, moe.moe_shared_expert_intermediate_size // split.tensor)
    return router + shared + (h if moe.moe_shared_expert_gate else 0)


def idle_parameters(model: ModelConfig) -> int:
    """Those of the experts of a layer that a token does not use."""
    return expert_parameters(model) // model.moe.num_experts * (model.moe.num_experts - model.moe.moe_router_topk)


def used_matrices(model: ModelConfig) -> int:
    """Elements of the matrices that a token meets: its experts', the shared one's and the router's."""
    moe, h = model.moe, model.hidden_size
    shared = _mlp(model, moe.moe_shared_expert_intermediate_size or 0) + (h if moe.moe_shared_expert_gate else 0)
    return moe.moe_router_topk * _mlp(model, moe.moe_ffn_hidden_size) + shared + h * moe.num_experts


def kept_numbers(model: ModelConfig, split: Split, again: frozenset[str]) -> float:
    """Numbers per token that the backward pass of router and experts keeps on a rank when loads are even.

    again: what is recomputed. A row of an expert keeps its input, what the first matrix makes of it (2f if gated), and
    what stands between that and the input of the second, that included.
    """
    moe = model.moe
    if "moe" in again:
        return 0.0
    made, between = (2, 3) if model.gated else (1, 2)
    width = moe.moe_ffn_hidden_size / split.widths
    row = model.hidden_size + width * (made + (0 if "moe_act" in again else between))
    shared = (moe.moe_shared_expert_intermediate_size or 0) / split.tensor * (made + between - 1)
    return moe.moe_router_topk * split.widths / split.tensor * row + (0.0 if "shared_experts" in again else shared)
