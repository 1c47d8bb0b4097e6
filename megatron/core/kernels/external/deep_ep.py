"""Exchange of tokens between experts' ranks by DeepEP (github.com/deepseek-ai/DeepEP), where it is installed.

A token is sent once to each rank that has any of its experts; a plain all-to-all sends it once for each choice. On the way back the results are summed. The gradient
of each direction is the other.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megatron.core.kernels.external import import_problem
from megatron.core.kernels.ops.requirements import KernelRequirements, first_reason


def is_deep_ep_installed() -> bool:
    """Whether the package deep_ep is installed."""
    return find_spec("deep_ep") is not None


@cache
def _deep_ep_group_buffer(group: dist.ProcessGroup, row_bytes: int) -> Any:
    """Return DeepEP's communication buffer of a process group, which all layers share, large enough for its tuned
    dispatch and combine configurations. row_bytes: bytes of a token.
    """
    library = import_module("deep_ep").Buffer
    tuned = library.get_dispatch_config(group.size()), library.get_combine_config(group.size())
    near = max(config.get_nvl_buffer_size_hint(row_bytes, group.size()) for config in tuned)
    far = max(config.get_rdma_buffer_size_hint(row_bytes, group.size()) for config in tuned)
    return library(group, near, far)


class _DeepEPDispatchFunction(Function):
    """The autograd function of `DeepEP.dispatch`; its gradient is a combine."""

    @staticmethod
    def forward(
        context: Any, tokens: Tensor, weights: Tensor, experts: Tensor, num_experts: int, buffer: Any
    ) -> tuple[Any, ...]:
        by_rank, by_node, by_expert, goes, _ = buffer.get_dispatch_layout(experts, num_experts)
        arrived, own, shares, _, handle, _ = buffer.dispatch(
            tokens.contiguous(),
            topk_idx=experts,
            topk_weights=weights.float(),
            num_tokens_per_rank=by_rank,
            num_tokens_per_rdma_rank=by_node,
            is_token_in_rank=goes,
            num_tokens_per_expert=by_expert,
        )
        context.buffer, context.handle, context.weights_dtype = buffer, handle, weights.dtype
        context.mark_non_differentiable(own)
        context.set_materialize_grads(True)
        return arrived, shares, own, handle

    @staticmethod
    def backward(context: Any, gradient: Tensor, of_weights: Tensor, *_: Any) -> tuple[Any, ...]:
        tokens, weights, _ = context.buffer.combine(
            gradient.contiguous(), context.handle, topk_weights=of_weights.float().contiguous()
        )
        return tokens, weights.to(context.weights_dtype), None, None, None


class _DeepEPCombineFunction(Function):
    """The autograd function of `DeepEP.combine`; its gradient is a dispatch."""

    @staticmethod
    def forward(context: Any, shares: Tensor, handle: Any, buffer: Any) -> Tensor:
        context.buffer, context.handle = buffer, handle
        return buffer.combine(shares.contiguous(), handle)[0]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        return context.buffer.dispatch(gradient.contiguous(), handle=context.handle)[0], None, None


class DeepEP:
    """Exchange of tokens between the ranks of a process group that hold different experts, by the package DeepEP."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def dispatch(
        self, tokens: Tensor, weights: Tensor, experts: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Send each token once to every rank that holds any of its experts. tokens: [t, h]; weights, experts: [t, k],
        an expert of -1 means none; num_experts: over all ranks.

        Returns the [n, h] tokens that arrived at this rank; their weights [n, k]; their experts [n, k], counted from
        this rank's first expert, -1 where another rank holds the expert; and the handle that `combine` needs.
        """
        buffer = _deep_ep_group_buffer(self.group, tokens.shape[1] * max(tokens.element_size(), 2))
        arrived, shares, own, handle = _DeepEPDispatchFunction.apply(tokens, weights, experts, num_experts, buffer)
        return arrived, shares, own, handle

    def combine(self, shares: Tensor, handle: Any) -> Tensor:
        """Send results back to the ranks that the tokens came from, and sum them over ranks. shares: [n, h], for each
        token that arrived the sum over this rank's experts; handle: from `dispatch`. Returns [t, h].
        """
        return _DeepEPCombineFunction.apply(
            shares, handle, _deep_ep_group_buffer(self.group, shares.shape[1] * max(shares.element_size(), 2))
        )


def deep_ep_unsupported_reason(need: KernelRequirements) -> str:
    """Return why DeepEP cannot be used; "" if it can."""
    lack = first_reason(
        {
            "DeepEP is for GPUs": need.device != "cuda",
            "DeepEP is not installed (github.com/deepseek-ai/DeepEP)": not is_deep_ep_installed(),
            "it sends bf16 only": need.dtype != torch.bfloat16,
            "its ranks hold whole experts; give --expert-tensor-parallel-size 1": need.experts_cut,
            "nothing runs beside it; leave out --moe-shared-expert-overlap and --overlap-moe-expert-parallel-comm": need.overlapped_experts,
        }
    )
    return lack or import_problem("deep_ep")
