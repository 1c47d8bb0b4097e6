"""Which kernel computes which op: chosen once at start, with reasons.

A candidate returns why it does not fit a need, or "". `auto` takes the first that fits; a kernel that is requested by name and cannot be used is an error
with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from megatron.core.config.flags import ConfigError
from megatron.core.config.settings.kernels import NAMED
from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.kernels import adamw, flex, fused, grouped, linear_loss, permute, reference, scans
from megatron.core.kernels.adamw import AdamKernel
from megatron.core.kernels.external import deep_ep, flash_attn, state_space, torchao, transformer_engine
from megatron.core.kernels.low_precision.fp8 import FusedRounding

_FLAGS = {
    "attention": "attention-backend",
    "cross_entropy": "cross-entropy-fusion-impl",
    "moe_flex_dispatcher": "moe-flex-dispatcher-backend",
    "paged_attention": "inference-paged-attention",
}


@dataclass(frozen=True, slots=True)
class KernelRequirements:
    """What the run requires of its kernels.

    window, softcap, sinks, biased_scores: some layers have a window, some scores a cap, a sink or a bias. head_sizes: of keys and of values; uneven_heads: they
    differ. experts_cut: an expert is sharded over several ranks. overlapped_experts: computation runs while tokens are exchanged. pieces: attention gets shards of
    sequences. low: what is multiplied in low precision, and how; alone: no other rank works on a rank's tokens; delays_wgrad: weight gradients are computed
    later. preferred: the library whose kernels are tried first. compiled: torch's compiler makes kernels of the layers' formulas. recorded: layers are CUDA graphs.
    checks: (op, name, problem) of the defaults that were tried on this device (`startup_check.py`); no problem: "".
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

    def has_tried(self, op: str, name: str) -> bool:
        """Whether a kernel was tried on this device."""
        return any((op, name) == (checked_op, checked) for checked_op, checked, _ in self.checks)

    def check_problem(self, op: str, name: str) -> str:
        """Return why a kernel that is to be tried on the device is not taken by default, or ""."""
        known = {(checked_op, checked): problem for checked_op, checked, problem in self.checks}
        return known.get((op, name), "it was not tried on this device; it has to be asked for")


@dataclass(frozen=True, slots=True)
class LazyImport:
    """A function, or several of one op, in a module of this package that is imported only when it is needed."""

    module: str
    name: str

    def load(self) -> Any:
        """Import it."""
        return getattr(import_module(f"megatron.core.kernels.{self.module}"), self.name)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to compute an op. unsupported_reason: returns why it cannot serve a need, or "".

    kernel: a function, or where it is, for a module with optional dependencies; None: the layer computes the op itself. unasked: why it can but is not chosen
    automatically. checked: it is chosen automatically only once it was tried on the device (`Need.checks`).
    """

    op: str
    name: str
    kernel: Callable | LazyImport | None
    unsupported_reason: Callable[[KernelRequirements], str]
    unasked: Callable[[KernelRequirements], str] = lambda _: ""
    checked: bool = False

    def not_by_default(self, need: KernelRequirements) -> str:
        """Return why it is not chosen automatically, or ""."""
        return self.unasked(need) or (need.check_problem(self.op, self.name) if self.checked else "")

    @property
    def function(self) -> Any:
        """The function itself: what is imported is so now, and not in every call, where torch's compiler would stop."""
        return self.kernel.load() if isinstance(self.kernel, LazyImport) else self.kernel


@dataclass(frozen=True, slots=True)
class Kernels:
    """One callable for each op; None: no kernel, the layer computes it itself. `report`: (op, chosen kernel, why better ones were not chosen)."""

    attention: Callable = fused.attention
    layer_norm: Callable = reference.layer_norm
    rms_norm: Callable = fused.rms_norm
    activation: Callable = reference.activation
    gated_activation: Callable = reference.gated_activation
    rotary: Callable = reference.rotary
    rotary_qkv: Callable = reference.rotary_qkv
    grouped_linear: Callable = reference.grouped_linear
    permute: Callable = permute.permute
    causal_conv: Callable = scans.causal_conv
    selective_scan: Callable = scans.selective_scan
    delta_rule_scan: Callable = scans.delta_rule_scan
    residual_norm: Callable | None = None
    bias_activation: Callable | None = None
    split_qkv: Callable | None = None
    paged_attention: Callable | None = None
    low_linear: Callable | None = None
    quantise: FusedRounding | None = None
    adamw: AdamKernel = adamw.adamw
    cross_entropy: Callable | None = None
    moe_flex_dispatcher: Callable | None = None
    report: tuple[tuple[str, str, str], ...] = ()


def _flash_unfit(need: KernelRequirements) -> str:
    if need.documents:
        return "documents are kept apart by a mask tensor, which torch's flash backend does not take"
    if need.padding:
        return "padding is left out by a mask tensor, which torch's flash backend does not take"
    if need.window:
        return "windows are kept by a mask tensor, which torch's flash backend does not take"
    if need.softcap:
        return "it has no cap on scores"
    if need.uneven_heads:
        return (
            "it needs values of the size of keys; give --v-head-dim the sum of --qk-head-dim and --qk-pos-emb-head-dim"
        )
    if need.device == "cuda" and need.dtype not in (torch.float16, torch.bfloat16):
        return "on a GPU it needs fp16 or bf16"
    if need.device == "cpu" and need.attention_dropout > 0:
        return "on a CPU it has no dropout"
    return ""


def _cudnn_unfit(need: KernelRequirements) -> str:
    if need.device != "cuda":
        return "it needs a CUDA device"
    if max(need.head_sizes) > 128:
        return f"its heads have at most 128 sizes, not {max(need.head_sizes)}"
    return _flash_unfit(need).replace("torch's flash backend", "torch's cuDNN backend")


def _package_unfit(version: int) -> Callable[[KernelRequirements], str]:
    def unsupported_reason(need: KernelRequirements) -> str:
        lacking = {
            "padding is left out by a mask tensor": need.padding,
            "it has no sinks": need.sinks,
            "it adds nothing to scores": need.biased_scores,
        }
        return flash_attn.unsupported_reason(
            version,
            device=need.device,
            dtype=need.dtype,
            head_sizes=need.head_sizes,
            dropout=need.attention_dropout,
            lacks=next((reason for reason, is_needed in lacking.items() if is_needed), ""),
        )

    return unsupported_reason


def _transformer_engine_unfit(need: KernelRequirements) -> str:
    lacking = {
        "padding is left out by a mask tensor": need.padding,
        "it has no cap on scores": need.softcap,
        "it adds nothing to scores": need.biased_scores,
        "its sinks are its own": need.sinks,
        "sequences are cut over context ranks": need.pieces,
    }
    return transformer_engine.unsupported_reason(
        device=need.device,
        dtype=need.dtype,
        lacks=next((reason for reason, is_needed in lacking.items() if is_needed), ""),
    )


def _torchao_unfit(need: KernelRequirements) -> str:
    lacking = {
        "weights are kept rounded; leave out --fp8-param-gather": need.low.has_quantized_weights,
        "gradients of weights are products of 8 bits there; leave out --no-fp8-wgrad": not need.low.fp8_wgrad,
        "gradients of weights wait; choose --pipeline-schedule 1f1b or gpipe, without --delay-wgrad-compute": need.delays_wgrad,
    }
    return torchao.unsupported_reason(
        recipe=need.low.recipe,
        alone=need.alone,
        lacks=next((reason for reason, is_needed in lacking.items() if is_needed), ""),
    )


def _flex_unfit(need: KernelRequirements) -> str:
    return flex.unsupported_reason(device=need.device, dtype=need.dtype, dropout=need.attention_dropout)


def _varlen_unfit(need: KernelRequirements) -> str:
    lacking = {
        "padding is left out by a mask tensor": need.padding,
        "it has no cap on scores": need.softcap,
        "it adds nothing to scores": need.biased_scores,
        "it has no sinks": need.sinks,
        "sequences are cut over context ranks": need.pieces,
        "the number of documents changes, and that of a recorded layer's sequences does not": need.recorded
        and need.documents,
    }
    if need.device != "cuda":
        return "it needs a CUDA device"
    if find_spec("torch.nn.attention.varlen") is None:
        return "torch has it with windows and groups from 2.11 on"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8:
        return "it needs a GPU from Ampere on"
    if need.dtype not in (torch.float16, torch.bfloat16):
        return "it needs fp16 or bf16"
    if need.head_sizes[0] != need.head_sizes[1]:
        return "it needs values of the size of keys"
    if max(need.head_sizes) > 256:
        return f"its heads have at most 256 sizes, not {max(need.head_sizes)}"
    missing = next((reason for reason, is_needed in lacking.items() if is_needed), "")
    return "it has no dropout" if need.attention_dropout > 0 else missing


def _no_documents_or_windows(need: KernelRequirements) -> str:
    return "" if need.documents or need.window else "there are neither documents nor windows"


def _no_softcap(need: KernelRequirements) -> str:
    return "" if need.softcap else _not_measured(need)


def _not_measured(_: KernelRequirements) -> str:
    return "not measured here against the ones before; it has to be asked for"


def _grouped_mm_unfit(need: KernelRequirements) -> str:
    if need.device != "cuda":
        return "torch's grouped matmul is for GPUs"
    return "" if need.dtype == torch.bfloat16 else "torch's grouped matmul needs bf16"


def _deep_ep_unfit(need: KernelRequirements) -> str:
    return deep_ep.unsupported_reason(
        device=need.device, dtype=need.dtype, cut=need.experts_cut, overlaps=need.overlapped_experts
    )


def _linear_loss_not_default(need: KernelRequirements) -> str:
    if need.device != "cpu":
        return "not measured against native on GPUs; asked for, it saves the memory of the logits"
    return "in fp16 it computes the logits twice" if need.dtype == torch.float16 else ""


def _triton_unfit(need: KernelRequirements) -> str:
    if need.device != "cuda":
        return "it needs a CUDA device"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    return "it computes in fp32, not in fp64" if need.dtype == torch.float64 else ""


def _state_space_unfit(package: str) -> Callable[[KernelRequirements], str]:
    return lambda need: state_space.unsupported_reason(package, device=need.device, dtype=need.dtype)


def _interpreted(_: KernelRequirements) -> str:
    interprets = import_module("triton").knobs.runtime.interpret
    return "Triton's interpreter takes minutes; it has to be asked for" if interprets else ""


def _compiled_or_interpreted(need: KernelRequirements) -> str:
    return "torch's compiler makes one kernel of the formula" if need.compiled else _interpreted(need)


def _quantise_unfit(need: KernelRequirements) -> str:
    if reason := _triton_unfit(need):
        return reason
    if need.low.fp4_format is not None or not need.low.recipe:
        return "it rounds to 8 bits"
    return "products are emulated" if need.low.fp8_emulation else ""


def _always_fits(_: KernelRequirements) -> str:
    return ""


def _checked_triton_candidate(op: str, module: str, unasked: Callable[[KernelRequirements], str]) -> Candidate:
    """Return the Triton kernel of an op, the function of that name in `module`: the default on a GPU where it computes the op."""
    return Candidate(op, "triton", LazyImport(module, op), _triton_unfit, unasked, checked=True)


CANDIDATES = (
    # Not `_not_measured`: with documents or windows `fused` makes a mask of s x s, and repeats keys and values.
    Candidate(
        "attention", "varlen", LazyImport("varlen", "attention"), _varlen_unfit, _no_documents_or_windows, checked=True
    ),
    # Taken unasked for capped scores, which `fused` computes by the formula, a block of queries at a time.
    Candidate("attention", "flex", flex.attention, _flex_unfit, _no_softcap, checked=True),
    Candidate("attention", "fused", fused.attention, _always_fits),
    Candidate("attention", "flash", fused.flash_attention, _flash_unfit),
    Candidate("attention", "cudnn", fused.cudnn_attention, _cudnn_unfit, _not_measured),
    Candidate("attention", "flash_attn_2", flash_attn.version_2, _package_unfit(2), _not_measured),
    Candidate("attention", "flash_attn_3", flash_attn.version_3, _package_unfit(3), _not_measured),
    Candidate(
        "attention", "transformer_engine", transformer_engine.attention, _transformer_engine_unfit, _not_measured
    ),
    Candidate("attention", "unfused", reference.attention, _always_fits),
    Candidate("attention", "local", reference.attention, _always_fits),
    Candidate("layer_norm", "torch", reference.layer_norm, _always_fits),
    Candidate("layer_norm", "triton", LazyImport("triton.norm", "layer_norm"), _triton_unfit, _not_measured),
    Candidate("rms_norm", "torch", fused.rms_norm, _always_fits),
    Candidate("rms_norm", "triton", LazyImport("triton.norm", "rms_norm"), _triton_unfit, _not_measured),
    Candidate("rms_norm", "reference", reference.rms_norm, _always_fits),
    # Not `_not_measured`: formulas of several operations, each of which reads and writes all that one kernel reads and writes once.
    _checked_triton_candidate("gated_activation", "triton.pointwise", _compiled_or_interpreted),
    Candidate("gated_activation", "torch", reference.gated_activation, _always_fits),
    # Its backward pass sums the bias's gradient as it writes that of x, which is read once more otherwise.
    _checked_triton_candidate("bias_activation", "triton.pointwise", _compiled_or_interpreted),
    Candidate("bias_activation", "apart", None, _always_fits),
    _checked_triton_candidate("rotary", "triton.rotary", _compiled_or_interpreted),
    Candidate("rotary", "torch", reference.rotary, _always_fits),
    _checked_triton_candidate("rotary_qkv", "triton.rotary", _compiled_or_interpreted),
    Candidate("rotary_qkv", "torch", reference.rotary_qkv, _always_fits),
    # Its backward pass sums the bias's gradient as it joins those of queries, keys and values; apart, the joined one is read once more.
    _checked_triton_candidate("split_qkv", "triton.split_qkv", _compiled_or_interpreted),
    Candidate("split_qkv", "apart", None, _always_fits),
    Candidate("grouped_linear", "torch", grouped.grouped_mm, _grouped_mm_unfit),
    Candidate("grouped_linear", "grouped", grouped.grouped_linear, _always_fits),
    Candidate("grouped_linear", "loop", reference.grouped_linear, _always_fits),
    Candidate("permute", "torch", permute.permute, _always_fits),
    Candidate("permute", "triton", LazyImport("triton.permute", "permute"), _triton_unfit, _not_measured),
    Candidate("causal_conv", "torch", scans.causal_conv, _always_fits),
    Candidate("causal_conv", "triton", LazyImport("triton.conv", "causal_conv"), _triton_unfit, _not_measured),
    Candidate(
        "causal_conv", "causal_conv1d", state_space.causal_conv, _state_space_unfit("causal_conv1d"), _not_measured
    ),
    Candidate("selective_scan", "torch", scans.selective_scan, _always_fits),
    Candidate("selective_scan", "triton", LazyImport("triton.scans", "selective_scan"), _triton_unfit, _not_measured),
    Candidate(
        "selective_scan", "mamba_ssm", state_space.selective_scan, _state_space_unfit("mamba_ssm"), _not_measured
    ),
    Candidate("delta_rule_scan", "torch", scans.delta_rule_scan, _always_fits),
    Candidate("delta_rule_scan", "triton", LazyImport("triton.scans", "delta_rule_scan"), _triton_unfit, _not_measured),
    Candidate("delta_rule_scan", "fla", state_space.delta_rule_scan, _state_space_unfit("fla"), _not_measured),
    Candidate("residual_norm", "apart", None, _always_fits),
    Candidate("residual_norm", "triton", LazyImport("triton.norm", "residual_norm"), _triton_unfit, _not_measured),
    Candidate("low_linear", "own", None, _always_fits),
    Candidate("low_linear", "torchao", torchao.linear, _torchao_unfit, _not_measured),
    # Not `_not_measured`: torch's operations go over the matrix some ten times.
    Candidate(
        "quantise", "triton", LazyImport("triton.quantise", "KERNELS"), _quantise_unfit, _interpreted, checked=True
    ),
    Candidate("quantise", "torch", None, _always_fits),
    # It moves 30 bytes an element, torch's kernel and the copy into bf16 weights 38.
    Candidate("adamw", "triton", LazyImport("triton.adamw", "adamw"), _triton_unfit, _interpreted, checked=True),
    Candidate("adamw", "torch", adamw.adamw, _always_fits),
    Candidate("cross_entropy", "linear", linear_loss.linear_cross_entropy, _always_fits, _linear_loss_not_default),
    Candidate("cross_entropy", "native", None, _always_fits),
    Candidate(
        "cross_entropy", "triton", partial(linear_loss.linear_cross_entropy, fused=True), _triton_unfit, _not_measured
    ),
    Candidate("moe_flex_dispatcher", "deepep", deep_ep.DeepEP, _deep_ep_unfit),
    Candidate("moe_flex_dispatcher", "alltoall", None, _always_fits),
    # Not `_not_measured`: what it is measured against copies all keys in every layer of every step.
    Candidate("paged_attention", "triton", LazyImport("triton.paged", "attention"), _triton_unfit),
    Candidate("paged_attention", "gathered", None, _always_fits),
)


def kernel_flag(op: str, name: str) -> str:
    """Return the flag that requests a kernel."""
    return f"--kernel {op}={name}" if op in NAMED else f"--{_FLAGS[op]} {name}"


def available_kernels(
    need: KernelRequirements, wish: dict[str, str], candidates: tuple[Candidate, ...] = CANDIDATES
) -> dict[str, str]:
    """Return the requested kernels (op -> name) without those that cannot serve `need`, be it for this device or for any other reason,
    so that `select_kernels` chooses another instead of refusing; for simulations. The wishes auto and "" stay.
    """
    fits = {(candidate.op, candidate.name) for candidate in candidates if not candidate.unsupported_reason(need)}
    return {op: name for op, name in wish.items() if name in ("", "auto") or (op, name) in fits}


def select_kernels(
    need: KernelRequirements, wish: dict[str, str] | None = None, candidates: tuple[Candidate, ...] = CANDIDATES
) -> Kernels:
    """Choose the kernels of a run. wish: op -> candidate name, auto, or an empty string for ops that the run does not need. Raises `ConfigError` with reasons."""
    kernels: dict[str, Any] = {}
    report = []
    for op in dict.fromkeys(candidate.op for candidate in candidates):
        requested = (wish or {}).get(op, "auto")
        if requested:
            chosen, refusals = _choose_candidate(need, [one for one in candidates if one.op == op], requested)
            kernels[op] = chosen.function
            report.append((op, chosen.name, "; ".join(refusals)))
    return Kernels(**kernels, report=tuple(report))


def _choose_candidate(
    need: KernelRequirements, candidates: list[Candidate], requested: str
) -> tuple[Candidate, list[str]]:
    """Return the best candidate of an op, and why those before it cannot serve, but for defaults of machines that are not this one. requested: a name, or auto.
    Raises `ConfigError`.
    """
    refusals, reasons = list[str](), list[str]()
    for candidate in sorted(candidates, key=lambda one: one.name != need.preferred):
        if requested not in ("auto", candidate.name):
            continue
        is_default = requested == "auto" and candidate.name != need.preferred
        reason = candidate.unsupported_reason(need) or (candidate.not_by_default(need) if is_default else "")
        if not reason:
            return candidate, reasons
        refusals.append(f"{candidate.name}: {reason}")
        if not candidate.checked or need.has_tried(candidate.op, candidate.name):
            reasons.append(refusals[-1])
    raise ConfigError(
        f"{kernel_flag(candidates[0].op, requested)} cannot be used: {'; '.join(refusals) or 'no such kernel'}; choose another of "
        f"{', '.join(candidate.name for candidate in candidates)}, or leave it out"
    )
