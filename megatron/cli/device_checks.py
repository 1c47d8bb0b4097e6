"""What a run asks of the machine it is on: its kernels, its compiler, its GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.run import RunConfig
from megatron.core.kernels.choice.run_requirements import kernel_requirements
from megatron.core.kernels.choice.table import select_kernels
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
