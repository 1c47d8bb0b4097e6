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
from pkgutil import resolve_name
from typing import Any

import torch

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.kernels import NAMED
from megatron.core.kernels.external import deep_ep, flash_attn, state_space_packages, torchao, transformer_engine
from megatron.core.kernels.low_precision.fp8 import QuantizeTransposeKernels
from megatron.core.kernels.ops import adamw, flex, fused, grouped, linear_loss, permute, reference
from megatron.core.kernels.ops.adamw import AdamKernel
from megatron.core.kernels.ops.requirements import (
    HALF_FORMATS,
    KernelRequirements,
    first_reason,
    package_unsupported_reason,
)
from megatron.core.kernels.state_space import scans

_FLAGS = {
    "attention": "attention-backend",
    "cross_entropy": "cross-entropy-fusion-impl",
    "moe_flex_dispatcher": "moe-flex-dispatcher-backend",
    "paged_attention": "inference-paged-attention",
}


@dataclass(frozen=True, slots=True)
class KernelCandidate:
    """One kernel that can compute an op.

    kernel: the function, or "module:function" below `megatron.core.kernels` if the module has optional dependencies;
    None: the layer computes the op itself. unsupported_reason: requirements -> why it cannot be used, "" if it can. unasked: requirements -> why it is
    usable but not chosen automatically, "" if it is. checked: it is chosen automatically only if it passed a trial on
    this device (`KernelRequirements.checks`).
    """

    op: str
    name: str
    kernel: Callable | str | None
    unsupported_reason: Callable[[KernelRequirements], str] = lambda _: ""
    unasked: Callable[[KernelRequirements], str] = lambda _: ""
    checked: bool = False

    def not_default_reason(self, need: KernelRequirements) -> str:
        """Return why this kernel is not chosen automatically, or ""."""
        return self.unasked(need) or (need.default_check_problem(self.op, self.name) if self.checked else "")

    @property
    def loaded_kernel(self) -> Any:
        """The kernel itself, imported now if it is lazy: inside a call, the import would stop torch's compiler. None:
        the layer computes the op.
        """
        return resolve_name(f"megatron.core.kernels.{self.kernel}") if isinstance(self.kernel, str) else self.kernel


@dataclass(frozen=True, slots=True)
class Kernels:
    """The chosen kernel of each op; None: the layer computes the op itself, by torch operations. report: (op, name of
    the chosen kernel, why the candidates before it were not chosen).
    """

    attention: Callable = fused.attention_by_sdpa
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
    quantise: QuantizeTransposeKernels | None = None
    adamw: AdamKernel = adamw.adamw
    cross_entropy: Callable | None = None
    moe_flex_dispatcher: Callable | None = None
    report: tuple[tuple[str, str, str], ...] = ()


def _torch_flash_unsupported_reason(need: KernelRequirements) -> str:
    """Return why torch's flash attention backend cannot be used; "" if it can."""
    return first_reason(
        {
            "documents are kept apart by a mask tensor, which torch's flash backend does not take": need.documents,
            "padding is left out by a mask tensor, which torch's flash backend does not take": need.padding,
            "windows are kept by a mask tensor, which torch's flash backend does not take": need.window,
            "it has no cap on scores": need.softcap,
            "it needs values of the size of keys; give --v-head-dim the sum of --qk-head-dim and "
            "--qk-pos-emb-head-dim": need.uneven_heads,
            "on a GPU it needs fp16 or bf16": need.device == "cuda" and need.dtype not in HALF_FORMATS,
            "on a CPU it has no dropout": need.device == "cpu" and need.attention_dropout > 0,
        }
    )


def _cudnn_unsupported_reason(need: KernelRequirements) -> str:
    """Return why torch's cuDNN attention backend cannot be used; "" if it can."""
    if need.device != "cuda":
        return "it needs a CUDA device"
    if max(need.head_sizes) > 128:
        return f"its heads have at most 128 sizes, not {max(need.head_sizes)}"
    return _torch_flash_unsupported_reason(need).replace("torch's flash backend", "torch's cuDNN backend")


def _varlen_unsupported_reason(need: KernelRequirements) -> str:
    """Return why torch's attention for sequences of different lengths cannot be used; "" if it can."""
    if need.device != "cuda":
        return "it needs a CUDA device"
    if find_spec("torch.nn.attention.varlen") is None:
        return "torch has it with windows and groups from 2.11 on"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8:
        return "it needs a GPU from Ampere on"
    keys, values = need.head_sizes
    return first_reason(
        {
            "it needs fp16 or bf16": need.dtype not in HALF_FORMATS,
            "it needs values of the size of keys": keys != values,
            f"its heads have at most 256 sizes, not {max(keys, values)}": max(keys, values) > 256,
            "it has no dropout": need.attention_dropout > 0,
            "padding is left out by a mask tensor": need.padding,
            "it has no cap on scores": need.softcap,
            "it adds nothing to scores": need.biased_scores,
            "it has no sinks": need.sinks,
            "sequences are cut over context ranks": need.pieces,
            "the number of documents changes, and that of a recorded layer's sequences does not": need.recorded
            and need.documents,
        }
    )


def _varlen_not_default_reason(need: KernelRequirements) -> str:
    """Return why `varlen` attention is no default: the run has neither documents nor windows; "" if it has."""
    return "" if need.documents or need.window else "there are neither documents nor windows"


def _flex_not_default_reason(need: KernelRequirements) -> str:
    """Return why FlexAttention is no default: the run has no soft cap; "" if it has one."""
    return "" if need.softcap else _unmeasured_not_default_reason(need)


def _unmeasured_not_default_reason(_: KernelRequirements) -> str:
    """Return why a kernel is no default that was never measured against the others, whatever the run."""
    return "not measured here against the ones before; it has to be asked for"


def _grouped_mm_unsupported_reason(need: KernelRequirements) -> str:
    """Return why torch's grouped matmul cannot be used; "" if it can."""
    if need.device != "cuda":
        return "torch's grouped matmul is for GPUs"
    return "" if need.dtype == torch.bfloat16 else "torch's grouped matmul needs bf16"


def _linear_loss_not_default_reason(need: KernelRequirements) -> str:
    """Return why the loss without a full matrix of logits is no default; "" if it is."""
    if need.device != "cpu":
        return "not measured against native on GPUs; asked for, it saves the memory of the logits"
    return "in fp16 it computes the logits twice" if need.dtype == torch.float16 else ""


def _interpreter_not_default_reason(_: KernelRequirements) -> str:
    """Return why a Triton kernel is no default: Triton runs in its interpreter; "" if it compiles."""
    interprets = import_module("triton").knobs.runtime.interpret
    return "Triton's interpreter takes minutes; it has to be asked for" if interprets else ""


def _fused_not_default_reason(need: KernelRequirements) -> str:
    """Return why a fused Triton kernel is no default: torch's compiler fuses the formula, or Triton runs in its
    interpreter; "" if neither.
    """
    return (
        "torch's compiler makes one kernel of the formula" if need.compiled else _interpreter_not_default_reason(need)
    )


def _quantise_unsupported_reason(need: KernelRequirements) -> str:
    """Return why the Triton kernels that quantize to fp8 cannot be used; "" if they can."""
    if reason := _TRITON_REASON(need):
        return reason
    if need.low.fp4_format is not None or not need.low.recipe_name:
        return "it rounds to 8 bits"
    return "products are emulated" if need.low.fp8_emulation else ""


_TRITON_REASON = partial(package_unsupported_reason, "triton")


def _triton_candidate(
    op: str,
    module: str,
    unasked: Callable[[KernelRequirements], str] = _unmeasured_not_default_reason,
    *,
    checked: bool = False,
) -> KernelCandidate:
    """Return the candidate for the Triton kernel of an op, the function of that name in `module`. unasked, checked: as
    in `KernelCandidate`.
    """
    return KernelCandidate(op, "triton", f"{module}:{op}", _TRITON_REASON, unasked, checked)


def _state_space_candidate(op: str, package: str, kernel: Callable) -> KernelCandidate:
    """Return the candidate for an op by a package of state-space kernels."""
    reason = partial(package_unsupported_reason, package)
    return KernelCandidate(op, package, kernel, reason, _unmeasured_not_default_reason)


CANDIDATES = (
    # Not `_unmeasured_not_default_reason`: with documents or windows `fused` makes a mask of s x s, and repeats keys and values.
    KernelCandidate(
        "attention",
        "varlen",
        "ops.varlen:attention_by_varlen",
        _varlen_unsupported_reason,
        _varlen_not_default_reason,
        checked=True,
    ),
    # Taken unasked for capped scores, which `fused` computes by the formula, a block of queries at a time.
    KernelCandidate(
        "attention",
        "flex",
        flex.attention_by_flex,
        flex.flex_unsupported_reason,
        _flex_not_default_reason,
        checked=True,
    ),
    KernelCandidate("attention", "fused", fused.attention_by_sdpa),
    KernelCandidate("attention", "flash", fused.attention_by_sdpa_flash, _torch_flash_unsupported_reason),
    KernelCandidate(
        "attention", "cudnn", fused.cudnn_attention, _cudnn_unsupported_reason, _unmeasured_not_default_reason
    ),
    *(
        KernelCandidate(
            "attention",
            f"flash_attn_{version}",
            partial(flash_attn.attention_by_flash_attn, version=version),
            partial(flash_attn.flash_attn_unsupported_reason, version),
            _unmeasured_not_default_reason,
        )
        for version in (2, 3)
    ),
    KernelCandidate(
        "attention",
        "transformer_engine",
        transformer_engine.attention_by_te,
        transformer_engine.te_unsupported_reason,
        _unmeasured_not_default_reason,
    ),
    KernelCandidate("attention", "unfused", reference.softmax_attention),
    KernelCandidate("attention", "local", reference.softmax_attention),
    KernelCandidate("layer_norm", "torch", reference.layer_norm),
    _triton_candidate("layer_norm", "triton.norm"),
    KernelCandidate("rms_norm", "torch", fused.rms_norm),
    _triton_candidate("rms_norm", "triton.norm"),
    KernelCandidate("rms_norm", "reference", reference.rms_norm),
    # Not `_unmeasured_not_default_reason`: formulas of several operations, each of which reads and writes all that one kernel reads and writes once.
    _triton_candidate("gated_activation", "triton.pointwise", _fused_not_default_reason, checked=True),
    KernelCandidate("gated_activation", "torch", reference.gated_activation),
    # Its backward pass sums the bias's gradient as it writes that of x, which is read once more otherwise.
    _triton_candidate("bias_activation", "triton.pointwise", _fused_not_default_reason, checked=True),
    KernelCandidate("bias_activation", "apart", None),
    _triton_candidate("rotary", "triton.rotary", _fused_not_default_reason, checked=True),
    KernelCandidate("rotary", "torch", reference.rotary),
    _triton_candidate("rotary_qkv", "triton.rotary", _fused_not_default_reason, checked=True),
    KernelCandidate("rotary_qkv", "torch", reference.rotary_qkv),
    # Its backward pass sums the bias's gradient as it joins those of queries, keys and values; apart, the joined one is read once more.
    _triton_candidate("split_qkv", "triton.split_qkv", _fused_not_default_reason, checked=True),
    KernelCandidate("split_qkv", "apart", None),
    KernelCandidate("grouped_linear", "torch", grouped.grouped_linear_by_grouped_mm, _grouped_mm_unsupported_reason),
    KernelCandidate("grouped_linear", "grouped", grouped.grouped_linear),
    KernelCandidate("grouped_linear", "loop", reference.grouped_linear),
    KernelCandidate("permute", "torch", permute.permute),
    _triton_candidate("permute", "triton.permute"),
    KernelCandidate("causal_conv", "torch", scans.causal_conv),
    _triton_candidate("causal_conv", "state_space.triton_conv"),
    _state_space_candidate("causal_conv", "causal_conv1d", state_space_packages.causal_conv),
    KernelCandidate("selective_scan", "torch", scans.selective_scan),
    _triton_candidate("selective_scan", "state_space.triton_scans"),
    _state_space_candidate("selective_scan", "mamba_ssm", state_space_packages.selective_scan),
    KernelCandidate("delta_rule_scan", "torch", scans.delta_rule_scan),
    _triton_candidate("delta_rule_scan", "state_space.triton_scans"),
    _state_space_candidate("delta_rule_scan", "fla", state_space_packages.delta_rule_scan),
    KernelCandidate("residual_norm", "apart", None),
    _triton_candidate("residual_norm", "triton.norm"),
    KernelCandidate("low_linear", "own", None),
    KernelCandidate(
        "low_linear",
        "torchao",
        torchao.torchao_fp8_linear,
        torchao.torchao_unsupported_reason,
        _unmeasured_not_default_reason,
    ),
    # Not `_unmeasured_not_default_reason`: torch's operations go over the matrix some ten times.
    KernelCandidate(
        "quantise",
        "triton",
        "triton.quantise:KERNELS",
        _quantise_unsupported_reason,
        _interpreter_not_default_reason,
        checked=True,
    ),
    KernelCandidate("quantise", "torch", None),
    # It moves 30 bytes an element, torch's kernel and the copy into bf16 weights 38.
    _triton_candidate("adamw", "triton.adamw", _interpreter_not_default_reason, checked=True),
    KernelCandidate("adamw", "torch", adamw.adamw),
    KernelCandidate(
        "cross_entropy", "linear", linear_loss.blockwise_linear_cross_entropy, unasked=_linear_loss_not_default_reason
    ),
    KernelCandidate("cross_entropy", "native", None),
    KernelCandidate(
        "cross_entropy",
        "triton",
        partial(linear_loss.blockwise_linear_cross_entropy, fused=True),
        _TRITON_REASON,
        _unmeasured_not_default_reason,
    ),
    KernelCandidate("moe_flex_dispatcher", "deepep", deep_ep.DeepEP, deep_ep.deep_ep_unsupported_reason),
    KernelCandidate("moe_flex_dispatcher", "alltoall", None),
    # Not `_unmeasured_not_default_reason`: what it is measured against copies all keys in every layer of every step.
    KernelCandidate("paged_attention", "triton", "triton.paged:paged_attention", _TRITON_REASON),
    KernelCandidate("paged_attention", "gathered", None),
)


def kernel_request_flag(op: str, name: str) -> str:
    """Return the command-line flag that requests this kernel of an op."""
    return f"--kernel {op}={name}" if op in NAMED else f"--{_FLAGS[op]} {name}"


def supported_kernel_requests(
    need: KernelRequirements, wish: dict[str, str], candidates: tuple[KernelCandidate, ...] = CANDIDATES
) -> dict[str, str]:
    """Return the requests (op -> kernel name) without those for kernels that cannot be used under `need`, for whatever
    reason. "auto" and "" stay.

    For simulations: `select_kernels` then chooses another kernel instead of raising.
    """
    fits = {(candidate.op, candidate.name) for candidate in candidates if not candidate.unsupported_reason(need)}
    return {op: name for op, name in wish.items() if name in ("", "auto") or (op, name) in fits}


def select_kernels(
    need: KernelRequirements, wish: dict[str, str] | None = None, candidates: tuple[KernelCandidate, ...] = CANDIDATES
) -> Kernels:
    """Choose the kernel of every op. wish: op -> kernel name, "auto", or "" for ops that the run does not need;
    ops not named: "auto". Raises `ConfigError` with reasons if a requested kernel cannot be used.
    """
    kernels: dict[str, Any] = {}
    report = []
    for op in dict.fromkeys(candidate.op for candidate in candidates):
        requested = (wish or {}).get(op, "auto")
        if requested:
            chosen, refusals = _choose_candidate(need, [one for one in candidates if one.op == op], requested)
            kernels[op] = chosen.loaded_kernel
            report.append((op, chosen.name, "; ".join(refusals)))
    return Kernels(**kernels, report=tuple(report))


def _choose_candidate(
    need: KernelRequirements, candidates: list[KernelCandidate], requested: str
) -> tuple[KernelCandidate, list[str]]:
    """Return the best candidate of an op, and the reasons why those before it were not taken. requested: a kernel name,
    or "auto".

    Candidates that must pass a trial but were not tried on this machine are left out of the reasons. Raises
    `ConfigError` if none can be used.
    """
    refusals, reasons = list[str](), list[str]()
    for candidate in sorted(candidates, key=lambda one: one.name != need.preferred):
        if requested not in ("auto", candidate.name):
            continue
        is_default = requested == "auto" and candidate.name != need.preferred
        reason = candidate.unsupported_reason(need) or (candidate.not_default_reason(need) if is_default else "")
        if not reason:
            return candidate, reasons
        refusals.append(f"{candidate.name}: {reason}")
        if not candidate.checked or need.has_tried_kernel(candidate.op, candidate.name):
            reasons.append(refusals[-1])
    raise ConfigError(
        f"{kernel_request_flag(candidates[0].op, requested)} cannot be used: {'; '.join(refusals) or 'no such kernel'}; choose another of "
        f"{', '.join(candidate.name for candidate in candidates)}, or leave it out"
    )
