"""What a run's kernels must support: a config, as the table of kernels asks for it."""

from __future__ import annotations

import torch

from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.settings.run import RunConfig
from megatron.core.kernels.choice.table import KernelRequirements


def kernel_requirements(config: RunConfig, device: torch.device) -> KernelRequirements:
    """Return what the run's kernels must support on this device."""
    return KernelRequirements(
        device=device.type,
        dtype=getattr(torch, config.precision.param_dtype_name),
        documents=config.data.separates_documents,
        padding=config.model.architecture.pads,
        window=any(plan.window for plan in network_layer_plans(config.model)),
        softcap=config.model.attention_logit_softcap is not None,
        sinks=config.model.softmax_type != "vanilla",
        biased_scores=config.model.rope.position_embedding_type == "relative",
        attention_dropout=config.model.attention_dropout,
        head_sizes=config.model.key_and_value_head_sizes,
        uneven_heads=config.model.has_uneven_head_sizes,
        experts_cut=(config.parallel.expert_tensor_parallel_size or config.parallel.tp) > 1,
        overlapped_experts=config.model.moe.moe_shared_expert_overlap
        or config.parallel.overlap_moe_expert_parallel_comm,
        pieces=config.parallel.context_parallel_size > 1 and set(config.parallel.cp_comm_type) != {"a2a"},
        low=config.precision.low,
        alone=config.parallel.tp
        * config.parallel.context_parallel_size
        * (config.parallel.expert_tensor_parallel_size or 1)
        == 1,
        delays_wgrad=config.parallel.defers_weight_gradients,
        preferred=config.model.kernels.preferred_library,
        compiled=config.compilation.compile,
        recorded=config.graphs.cuda_graph_impl != "none",
    )
