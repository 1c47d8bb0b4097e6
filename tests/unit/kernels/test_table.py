from __future__ import annotations

import pytest
import torch

from megatron.core.config.flags import ConfigError
from megatron.core.kernels import fused, reference
from megatron.core.kernels.table import CANDIDATES, Candidate, Need, select


def test_auto_takes_the_first_candidate_that_fits() -> None:
    kernels = select(Need())
    assert kernels.attention is fused.attention and kernels.rms_norm is fused.rms_norm
    assert dict((op, chosen) for op, chosen, _ in kernels.report) == {
        "attention": "fused",
        "layer_norm": "torch",
        "rms_norm": "torch",
        "gated_activation": "torch",
        "bias_activation": "apart",
        "rotary": "torch",
        "rotary_qkv": "torch",
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
    assert select(Need(), {"attention": "unfused"}).attention is reference.attention
    assert select(Need(), {"attention": "local"}).attention is reference.attention
    assert select(Need(), {"attention": "flash"}).attention is fused.flash_attention
    with pytest.raises(
        ConfigError, match="--attention-backend flash cannot be used: flash: documents are kept apart by a mask"
    ):
        select(Need(documents=True), {"attention": "flash"})
    with pytest.raises(ConfigError, match="on a GPU it needs fp16 or bf16"):
        select(Need(device="cuda", dtype=torch.float32), {"attention": "flash"})
    with pytest.raises(ConfigError, match="on a CPU it has no dropout"):
        select(Need(attention_dropout=0.1), {"attention": "flash"})
    with pytest.raises(ConfigError, match="it needs values of the size of keys"):
        select(Need(uneven_heads=True), {"attention": "flash"})
    with pytest.raises(
        ConfigError, match="--moe-flex-dispatcher-backend deepep cannot be used: deepep: DeepEP is for GPUs"
    ):
        select(Need(), {"moe_flex_dispatcher": "deepep"})
    with pytest.raises(ConfigError, match="no such kernel"):
        select(Need(), {"attention": "quick"})


def test_flash_fits_half_precision_on_a_gpu() -> None:
    unsupported_reason = next(candidate.unsupported_reason for candidate in CANDIDATES if candidate.name == "flash")
    assert unsupported_reason(Need(device="cuda", dtype=torch.bfloat16, attention_dropout=0.1)) == ""


def test_the_report_says_why_better_candidates_were_not_taken() -> None:
    def never(need: Need) -> str:
        return f"no {need.device} device"

    offers = (Candidate("attention", "fast", max, never), Candidate("attention", "slow", min, lambda need: ""))
    kernels = select(Need(), candidates=offers)
    assert kernels.attention is min and kernels.report == (("attention", "slow", "fast: no cpu device"),)
    with pytest.raises(ConfigError, match="--attention-backend auto cannot be used: fast: no cpu device"):
        select(Need(), candidates=offers[:1])
