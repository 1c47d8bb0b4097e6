"""Which kernel serves which op: chosen once at start, with reasons.

A candidate says why it does not fit a need, or nothing. `auto` takes the first that fits; a wish that cannot be met is
an error with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.core.config.flags import ConfigError
from megatron.core.kernels import deep_ep, fused, grouped, reference


@dataclass(frozen=True, slots=True)
class Need:
    """What the run asks of its kernels. window, softcap: some layers see a window, and some scores are capped.
    uneven_heads: values are of another size than keys. experts_cut: an expert lies on several ranks. overlapped_experts:
    shared experts compute while tokens travel.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    documents: bool = False
    padding: bool = False
    window: bool = False
    softcap: bool = False
    attention_dropout: float = 0.0
    uneven_heads: bool = False
    experts_cut: bool = False
    overlapped_experts: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to compute an op; `unfit` returns the reason why it cannot serve a need, or an empty string."""

    op: str
    name: str
    call: Callable | None
    unfit: Callable[[Need], str]


@dataclass(frozen=True, slots=True)
class Kernels:
    """One callable an op; None: without a library. `report`: (op, chosen, why the better ones were not)."""

    attention: Callable = fused.attention
    layer_norm: Callable = reference.layer_norm
    rms_norm: Callable = fused.rms_norm
    activation: Callable = reference.activation
    gated_activation: Callable = reference.gated_activation
    rotary: Callable = reference.rotary
    grouped_linear: Callable = reference.grouped_linear
    moe_flex_dispatcher: Callable | None = None
    report: tuple[tuple[str, str, str], ...] = ()


def _flash_unfit(need: Need) -> str:
    if need.documents:
        return "documents are kept apart by a mask tensor, which torch's flash backend does not take"
    if need.padding:
        return "padding is left out by a mask tensor, which torch's flash backend does not take"
    if need.window:
        return "windows are kept by a mask tensor, which torch's flash backend does not take"
    if need.softcap:
        return "it has no cap on scores"
    if need.uneven_heads:
        return "it needs values of the size of keys; give --v-head-dim the sum of --qk-head-dim and --qk-pos-emb-head-dim"
    if need.device == "cuda" and need.dtype not in (torch.float16, torch.bfloat16):
        return "on a GPU it needs fp16 or bf16"
    if need.device == "cpu" and need.attention_dropout > 0:
        return "on a CPU it has no dropout"
    return ""


def _fused_unfit(need: Need) -> str:
    return "it has no cap on scores" if need.softcap else ""


def _grouped_mm_unfit(need: Need) -> str:
    if need.device != "cuda":
        return "torch's grouped matmul is for GPUs"
    return "" if need.dtype == torch.bfloat16 else "torch's grouped matmul needs bf16"


def _deep_ep_unfit(need: Need) -> str:
    return deep_ep.unfit(device=need.device, dtype=need.dtype, cut=need.experts_cut, overlaps=need.overlapped_experts)


def _always_fits(_: Need) -> str:
    return ""


CANDIDATES = (
    Candidate("attention", "fused", fused.attention, _fused_unfit),
    Candidate("attention", "flash", fused.flash_attention, _flash_unfit),
    Candidate("attention", "unfused", reference.attention, _always_fits),
    Candidate("attention", "local", reference.attention, _always_fits),
    Candidate("rms_norm", "torch", fused.rms_norm, _always_fits),
    Candidate("rms_norm", "reference", reference.rms_norm, _always_fits),
    Candidate("grouped_linear", "torch", grouped.grouped_mm, _grouped_mm_unfit),
    Candidate("grouped_linear", "grouped", grouped.grouped_linear, _always_fits),
    Candidate("grouped_linear", "loop", reference.grouped_linear, _always_fits),
    Candidate("moe_flex_dispatcher", "deepep", deep_ep.DeepEP, _deep_ep_unfit),
    Candidate("moe_flex_dispatcher", "alltoall", None, _always_fits),
)


def select(need: Need, wish: dict[str, str] | None = None, candidates: tuple[Candidate, ...] = CANDIDATES) -> Kernels:
    """The kernels of a run. wish: op -> candidate name, auto, or "" if there is no such op."""
    chosen, report = {}, []
    for op in dict.fromkeys(candidate.op for candidate in candidates):
        offers = [candidate for candidate in candidates if candidate.op == op]
        wanted = (wish or {}).get(op, "auto")
        if not wanted:
            continue
        if wanted != "auto":
            offers = [candidate for candidate in offers if candidate.name == wanted]
        refusals = []
        for candidate in offers:  # the best first; what is worse than the one chosen needs no reason
            if reason := candidate.unfit(need):
                refusals.append(f"{candidate.name}: {reason}")
                continue
            chosen[op] = candidate.call
            report.append((op, candidate.name, "; ".join(refusals)))
            break
        else:
            raise ConfigError(f"--{op.replace('_', '-')}-backend {wanted} cannot be used: {'; '.join(refusals) or 'no such kernel'}; "
                              f"choose another or auto")
    return Kernels(**chosen, report=tuple(report))
