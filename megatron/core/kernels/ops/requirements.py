"""What a run requires of its kernels, and why a kernel does not fit: a text, "" if it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from megatron.core.config.settings.low_precision import LowPrecisionConfig

HALF_FORMATS = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class KernelRequirements:
    """What a run requires of its kernels.

    device: type, cpu or cuda. documents, padding: masks have them. window, softcap, sinks, biased_scores: some layers
    have a window, or a soft cap, sink or bias of scores. head_sizes: of keys and of values;
    uneven_heads: they differ. experts_cut: an expert is sharded over several ranks. overlapped_experts: computation
    runs while tokens are exchanged. pieces: attention gets shards of sequences. low: low-precision settings. alone: no
    other rank works on a rank's tokens. delays_wgrad: weight gradients are computed later.
    preferred: the library whose kernels are tried first. compiled: torch's compiler makes kernels of the layers'
    formulas. recorded: layers are CUDA graphs. checks: (op, kernel name, problem or "") of the defaults that were tried
    on this device (`startup_check.py`).
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    documents: bool = False
    padding: bool = False
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    biased_scores: bool = False
    attention_dropout: float = 0.0
    head_sizes: tuple[int, int] = (64, 64)
    uneven_heads: bool = False
    experts_cut: bool = False
    overlapped_experts: bool = False
    pieces: bool = False
    low: LowPrecisionConfig = LowPrecisionConfig()
    alone: bool = True
    delays_wgrad: bool = False
    preferred: str = ""
    compiled: bool = False
    recorded: bool = False
    checks: tuple[tuple[str, str, str], ...] = ()

    def has_tried_kernel(self, op: str, name: str) -> bool:
        """Whether this kernel of this op was tried on this device."""
        return any((op, name) == (checked_op, checked) for checked_op, checked, _ in self.checks)

    def default_check_problem(self, op: str, name: str) -> str:
        """Return why a kernel that must pass a trial is no default here: it failed, or was not tried. "" if it passed."""
        known = {(checked_op, checked): problem for checked_op, checked, problem in self.checks}
        return known.get((op, name), "it was not tried on this device; it has to be asked for")


def first_reason(reasons: Mapping[str, bool]) -> str:
    """Return the first reason that holds; "" if none does."""
    return next((reason for reason, holds in reasons.items() if holds), "")


def package_unsupported_reason(package: str, need: KernelRequirements) -> str:
    """Return why kernels of a package for GPUs, which compute in fp32, cannot be used; "" if they can."""
    if need.device != "cuda":
        return "it needs a CUDA device"
    if find_spec(package) is None:
        return f"the package {package} is not installed"
    return "it computes in fp32, not in fp64" if need.dtype == torch.float64 else ""
