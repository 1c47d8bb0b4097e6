"""What a run asks of the machine it is on: its kernels, its compiler, its GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.settings.run import RunConfig
from megatron.core.kernels.choice.table import KernelRequirements, select_kernels
from megatron.core.kernels.low_precision import recipes
from megatron.core.parallel.device import missing_compiler_reason, pick_device

# Kernels of torch itself, of which is known on any machine what they can do on a GPU.
_TORCH: Mapping[str, tuple[str, ...]] = {"attention": ("fused", "flash", "cudnn")}


def device_type() -> str:
    """cpu or cuda: the device of this process."""
    return pick_device().type


def unsupported_by_machine(config: RunConfig, device: str = "") -> list[str]:
    """Return a message for what cannot run here, or on `device` of another machine (software unchecked)."""
    here = device in ("", device_type())
    lines = _kernel_problems(config, torch.device(device) if device else pick_device(), here=here)
    return lines + (_missing_device_features(config, pick_device()) if here else [])


def _kernel_problems(config: RunConfig, device: torch.device, *, here: bool) -> list[str]:
    """Return a message for each requested kernel that cannot do what is needed; only torch's unless `here`."""
    problems = []
    for op, name in config.model.all_requested_kernels.items():
        if name in ("", "auto") or not (here or name in _TORCH.get(op, ())):
            continue
        try:
            select_kernels(kernel_requirements(config, device), {op: name})
        except ConfigError as error:
            problems.append(str(error))
    return problems


def _missing_device_features(config: RunConfig, device: torch.device) -> list[str]:
    """Return messages for what this machine lacks: a GPU for CUDA graphs, a compiler, low-precision support."""
    problems = []
    if device.type == "cpu" and config.graphs.cuda_graph_impl != "none":
        problems.append("--cuda-graph-impl local: there is no GPU to record for; leave it out")
    if (
        config.compilation.compile
        and config.compilation.compile_backend == "inductor"
        and (lack := missing_compiler_reason(device))
    ):
        problems.append(f"--compile: {lack}, or leave --compile out")
    return [*problems, *filter(None, [recipes.recipe_unsupported_reason(config.precision.low, device)])]


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
