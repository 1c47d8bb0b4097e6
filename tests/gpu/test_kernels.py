"""Every kernel that this GPU can use, forward and backward, against the definition of its op in fp64 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.kernels.choice.kernel_check import TOLERANCE, try_usable_kernels
from megatron.core.kernels.choice.run_requirements import kernel_requirements
from megatron.core.kernels.choice.startup_check import select_kernels_with_trials
from megatron.core.kernels.choice.table import CANDIDATES
from megatron.core.kernels.ops import linear_loss, reference
from megatron.core.kernels.ops.linear_loss import VocabularyShard
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.training.health.causality_check import require_causal_attention
from tests.gpu.test_training import losses_on
from tests.helpers import tiny

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
HEADS: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 256,
    "max_position_embeddings": 256,
}
NETWORKS: dict[str, dict[str, Any]] = {
    "gpt": HEADS,
    "llama": {
        **HEADS,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "group_query_attention": True,
        "num_query_groups": 2,
        "num_experts": 4,
    },
    "packed": {**HEADS, "reset_attention_mask": True, "position_embedding_type": "rope", "rotary_interleaved": True},
    "windows": {**HEADS, "window_size": "37,0", "normalization": "RMSNorm", "geglu": True},
    "packed windows": {**HEADS, "window_size": "37,0", "reset_attention_mask": True},
    "caps": {**HEADS, "attention_logit_softcap": 2.0, "final_logit_softcap": 3.0},
    "wide heads": {**HEADS, "kv_channels": 192},
    "bert": {**HEADS, "architecture": "bert"},
}
PACKAGES = ("cudnn", "varlen", "flash", "flash_attn_2", "flash_attn_3", "transformer_engine", "flex")


@pytest.mark.parametrize("numbers", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_kernel_that_fits_computes_its_op(name: str, numbers: str) -> None:
    config = tiny.config(**NETWORKS[name], **({} if numbers == "fp32" else {numbers: True}))
    need = kernel_requirements(config, CUDA)
    wrong = {
        key: error
        for key, error in try_usable_kernels(config, need, CUDA).items()
        if isinstance(error, str) or error > TOLERANCE[need.dtype]
    }
    assert not wrong


@pytest.mark.parametrize("name", NETWORKS)
def test_the_defaults_of_a_run_pass_their_trial(name: str) -> None:
    config = tiny.config(**NETWORKS[name], bf16=True)
    chosen = select_kernels_with_trials(config, kernel_requirements(config, CUDA), CUDA)
    taken = {op: kernel for op, kernel, _ in chosen.kernels.report}
    assert not chosen.failures
    assert taken["attention"] == {
        "packed": "varlen",
        "windows": "varlen",
        "packed windows": "varlen",
        "caps": "flex",
    }.get(name, "fused")


@pytest.mark.parametrize("backend", PACKAGES)
@pytest.mark.parametrize(
    "changes", [{}, {"reset_attention_mask": True, "reset_position_ids": True}, {"window_size": "5,0"}], ids=str
)
def test_no_attention_lets_a_token_leak(backend: str, changes: dict[str, Any]) -> None:
    config = tiny.config(bf16=True, **HEADS, **changes)
    candidate = next(one for one in CANDIDATES if (one.op, one.name) == ("attention", backend))
    if reason := candidate.unsupported_reason(kernel_requirements(config, CUDA)):
        pytest.skip(reason)
    settings = tiny.config(bf16=True, attention_backend=backend, **HEADS, **changes)
    require_causal_attention(tiny.run_of(settings, CUDA))


@pytest.mark.parametrize("backend", PACKAGES)
def test_a_later_query_alone_sees_all_keys_before_it(backend: str) -> None:
    need = kernel_requirements(tiny.config(bf16=True), CUDA)
    candidate = next(one for one in CANDIDATES if (one.op, one.name) == ("attention", backend))
    if backend in ("flash", "cudnn") or candidate.unsupported_reason(need):
        pytest.skip("it is not asked for that")
    q, k, v = (torch.randn(length, 2, 4, 64, device=CUDA, dtype=torch.bfloat16) for length in (3, 11, 11))
    torch.testing.assert_close(
        candidate.loaded_kernel(q, k, v, AttentionMaskSpec()).float(),
        reference.softmax_attention(q, k, v, AttentionMaskSpec()).float(),
        rtol=3e-2,
        atol=3e-2,
    )


@pytest.mark.parametrize("impl", ["linear", "triton"])
def test_training_goes_as_with_all_logits(impl: str) -> None:
    found = losses_on("cuda", cross_entropy_fusion_impl=impl)
    assert found == pytest.approx(losses_on("cuda", cross_entropy_fusion_impl="native"), rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_the_loss_of_blocks_takes_far_less_memory_than_the_logits(fused: bool) -> None:
    tokens, words, width = 8192, 32768, 256
    x = torch.randn(tokens, width, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(words, width, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    losses = linear_loss.blockwise_linear_cross_entropy(
        x,
        weight,
        None,
        torch.zeros(tokens, dtype=torch.long, device=CUDA),
        VocabularyShard(0, words, None, lambda stated: stated),
        fused=fused,
    )
    losses.mean().backward()
    # A block is an eighth: once in bf16, and with torch's softmax once more in fp32; the words' gradients are in fp32 and bf16.
    block, gradients = tokens * words // 8, 6 * words * width
    assert torch.cuda.max_memory_allocated() - before < 1.3 * (block * (2 if fused else 10) + 2 * gradients)


def test_triton_kernels_train_as_torch_does() -> None:
    changes: dict[str, Any] = {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "ffn_hidden_size": 64,
    }
    words = ("rms_norm=triton", "gated_activation=triton", "rotary_qkv=triton", "residual_norm=triton")
    assert losses_on("cuda", kernel=words, **changes) == pytest.approx(losses_on("cuda", **changes), rel=1e-4)
    biased = ("bias_activation=triton", "split_qkv=triton")
    assert losses_on("cuda", kernel=biased) == pytest.approx(losses_on("cuda"), rel=1e-4)
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 32}
    assert losses_on("cuda", kernel=("permute=triton",), **experts) == pytest.approx(
        losses_on("cuda", **experts), rel=1e-4
    )
