from __future__ import annotations

import pytest
import torch

from megatron.core.config.flags.declare import ConfigError
from megatron.core.kernels.choice.table import CANDIDATES, KernelCandidate, KernelRequirements, select_kernels
from megatron.core.kernels.ops import fused, reference


def test_auto_takes_the_first_candidate_that_fits() -> None:
    kernels = select_kernels(KernelRequirements())
    assert kernels.attention is fused.attention_by_sdpa and kernels.rms_norm is fused.rms_norm
    assert dict((op, chosen) for op, chosen, _ in kernels.report) == {
        "attention": "fused",
        "layer_norm": "torch",
        "rms_norm": "torch",
        "gated_activation": "torch",
        "bias_activation": "apart",
        "rotary": "torch",
        "rotary_qkv": "torch",
        "split_qkv": "apart",
        "grouped_linear": "grouped",
        "permute": "torch",
        "residual_norm": "apart",
        "low_linear": "own",
        "causal_conv": "torch",
        "selective_scan": "torch",
        "delta_rule_scan": "torch",
        "cross_entropy": "linear",
        "moe_flex_dispatcher": "alltoall",
        "paged_attention": "gathered",
        "quantise": "torch",
        "adamw": "torch",
    }


def test_a_wish_is_met_or_refused_with_the_reason_and_never_replaced() -> None:
    assert select_kernels(KernelRequirements(), {"attention": "unfused"}).attention is reference.softmax_attention
    assert select_kernels(KernelRequirements(), {"attention": "local"}).attention is reference.softmax_attention
    assert select_kernels(KernelRequirements(), {"attention": "flash"}).attention is fused.attention_by_sdpa_flash
    with pytest.raises(
        ConfigError, match="--attention-backend flash cannot be used: flash: documents are kept apart by a mask"
    ):
        select_kernels(KernelRequirements(documents=True), {"attention": "flash"})
    with pytest.raises(ConfigError, match="on a GPU it needs fp16 or bf16"):
        select_kernels(KernelRequirements(device="cuda", dtype=torch.float32), {"attention": "flash"})
    with pytest.raises(ConfigError, match="on a CPU it has no dropout"):
        select_kernels(KernelRequirements(attention_dropout=0.1), {"attention": "flash"})
    with pytest.raises(ConfigError, match="it needs values of the size of keys"):
        select_kernels(KernelRequirements(uneven_heads=True), {"attention": "flash"})
    with pytest.raises(
        ConfigError, match="--moe-flex-dispatcher-backend deepep cannot be used: deepep: DeepEP is for GPUs"
    ):
        select_kernels(KernelRequirements(), {"moe_flex_dispatcher": "deepep"})
    with pytest.raises(ConfigError, match="no such kernel"):
        select_kernels(KernelRequirements(), {"attention": "quick"})


def test_flash_fits_half_precision_on_a_gpu() -> None:
    unsupported_reason = next(candidate.unsupported_reason for candidate in CANDIDATES if candidate.name == "flash")
    assert unsupported_reason(KernelRequirements(device="cuda", dtype=torch.bfloat16, attention_dropout=0.1)) == ""


def test_the_report_says_why_better_candidates_were_not_taken() -> None:
    def never(need: KernelRequirements) -> str:
        return f"no {need.device} device"

    offers = (
        KernelCandidate("attention", "fast", max, never),
        KernelCandidate("attention", "slow", min, lambda need: ""),
    )
    kernels = select_kernels(KernelRequirements(), candidates=offers)
    assert kernels.attention is min and kernels.report == (("attention", "slow", "fast: no cpu device"),)
    with pytest.raises(ConfigError, match="--attention-backend auto cannot be used: fast: no cpu device"):
        select_kernels(KernelRequirements(), candidates=offers[:1])
