"""Attention where a GPU is hard to please: queries without a key, block masks of FlexAttention, lengths for cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.ops import blockwise_attention, chunked_attention, flex, fused, reference
from megatron.core.kernels.ops.blockwise_attention import BlockwiseAttentionOptions
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from tests.helpers import flex_stand_in

B, N, G, D = 2, 4, 2, 8


def _padding(length: int, *hidden: slice) -> Tensor:
    """True where there is a token; hidden: places of the second row without one."""
    padding = torch.ones(B, length, dtype=torch.bool)
    for one in hidden:
        padding[1, one] = False
    return padding


# (tokens, mask, tokens of the second row whose query sees nothing)
MASKS: dict[str, tuple[int, AttentionMaskSpec, slice]] = {
    "padding before the first token": (12, AttentionMaskSpec(padding=_padding(12, slice(0, 5))), slice(0, 5)),
    "a row of padding": (12, AttentionMaskSpec(causal=False, padding=_padding(12, slice(0, 12))), slice(0, 12)),
    "a band whose last block is filled up": (340, AttentionMaskSpec(window=(37, 0)), slice(0, 0)),
    "a band with padding": (
        340,
        AttentionMaskSpec(window=(37, 0), padding=_padding(340, slice(100, 340))),
        slice(137, 340),
    ),
    "keys behind all queries": (
        12,
        AttentionMaskSpec(query_places=torch.arange(12), key_places=torch.arange(20, 32)),
        slice(0, 12),
    ),
}
ATTENTIONS: dict[str, tuple[Callable[..., Tensor], float, AttentionScoreModifiers]] = {
    "reference": (reference.softmax_attention, 0.0, AttentionScoreModifiers()),
    "fused": (fused.attention_by_sdpa, 0.0, AttentionScoreModifiers()),
    "fused, cap": (fused.attention_by_sdpa, 0.0, AttentionScoreModifiers(softcap=5.0)),
    "fused, bias": (fused.attention_by_sdpa, 0.0, AttentionScoreModifiers(bias=torch.zeros(1, N, 1, 1))),
    "chunked, dropout": (chunked_attention.attention_by_query_chunks, 0.1, AttentionScoreModifiers()),
    "flex": (flex.attention_by_flex, 0.0, AttentionScoreModifiers()),
}


def heads(length: int) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(length, B, groups, D, dtype=torch.float64).requires_grad_() for groups in (N, G, G)]


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_a_query_that_sees_no_key_gives_zero_and_no_nan(mask: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        flex, "compiled_flex_functions", lambda: (flex_stand_in.flex_attention, flex_stand_in.create_block_mask)
    )
    length, spec, blind = MASKS[mask]
    call, dropout, scores = ATTENTIONS[name]
    if scores.bias is not None:
        scores = AttentionScoreModifiers(bias=scores.bias.double().expand(1, N, length, length))
    inputs = heads(length)
    output = call(*inputs, spec, dropout, scores)
    gradients = torch.autograd.grad(output.square().sum() + output.sum(), inputs)
    assert all(bool(one.isfinite().all()) for one in (output, *gradients))
    assert not output[blind, 1].any() and not gradients[0][blind, 1].any()
    assert bool(output[:, 0].any()) == (spec.query_places is None), "the other row goes on"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", [False, True])
def test_no_query_comes_to_torchs_attention_without_a_key(
    mask: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, seen = F.scaled_dot_product_attention, list[bool]()

    def checked(*given: Any, attn_mask: Tensor | None = None, **how: Any) -> Tensor:
        assert attn_mask is not None, "the mask is not plain"
        visible = attn_mask if attn_mask.dtype == torch.bool else attn_mask.isfinite()
        seen.append(bool(visible.any(-1).all()))
        return attention(*given, attn_mask=attn_mask, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", checked)
    length, spec, _ = MASKS[mask]
    scores = (
        AttentionScoreModifiers(bias=torch.zeros(1, N, length, length, dtype=torch.float64))
        if bias
        else AttentionScoreModifiers()
    )
    inputs = heads(length)
    output = fused.attention_by_sdpa(*inputs, spec, 0.0, scores)
    assert seen == [True]
    torch.testing.assert_close(output, reference.softmax_attention(*inputs, spec, 0.0, scores), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_block_of_a_ring_in_which_some_queries_see_no_key_has_no_nan(softcap: float | None) -> None:
    q, k, v = (one.detach().permute(1, 2, 0, 3) for one in heads(6))
    seen = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    seen[:, :, 2:4] = False
    block = BlockwiseAttentionOptions(D**-0.5, softcap=softcap, seen=seen)
    output, lse = blockwise_attention.block_attention_forward(q, k, v, block)
    found = blockwise_attention.block_attention_backward(torch.ones_like(output), q, k, v, output, lse, block)
    assert all(bool(one.isfinite().all()) for one in (output, *found))
    assert not output[:, :, 2:4].any() and not found[0][:, :, 2:4].any()


def test_one_block_mask_serves_all_layers_of_a_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def build(*given: Any, **how: Any) -> Tensor:
        built.append(1)
        return flex_stand_in.create_block_mask(*given, **how)

    monkeypatch.setattr(flex, "compiled_flex_functions", lambda: (flex_stand_in.flex_attention, build))
    inputs = heads(12)
    for microbatch in range(1, 4):
        documents = (torch.arange(12)[None].expand(B, -1) // (microbatch + 2)).contiguous()
        mask = AttentionMaskSpec(documents=documents)
        for layer in range(4):
            own = mask.with_window((3, 0) if layer % 2 else None)  # every second layer has a window
            output = flex.attention_by_flex(*inputs, own)
            torch.testing.assert_close(output, reference.softmax_attention(*inputs, own), rtol=1e-10, atol=1e-10)
        assert len(built) == 2 * microbatch, "one for each kind of layer"
    documents.fill_(0)  # the same memory with other documents
    torch.testing.assert_close(
        flex.attention_by_flex(*inputs, mask), reference.softmax_attention(*inputs, mask), rtol=1e-10, atol=1e-10
    )
    assert len(built) == 7
    for _ in range(3):
        flex.attention_by_flex(*inputs, AttentionMaskSpec())
    assert len(built) == 8, "what depends on lengths alone is built once in all"


@pytest.mark.nightly
def test_block_masks_of_new_documents_are_compiled_once() -> None:
    pytest.importorskip("torch._inductor")
    torch._dynamo.reset()
    flex.compiled_flex_functions.cache_clear()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for microbatch in range(1, 5):
        documents = (torch.arange(256)[None].expand(B, -1) // (30 * microbatch)).contiguous()
        flex.cached_block_mask(AttentionMaskSpec(documents=documents), 256, 256, B, torch.device("cpu"))
    assert counters["stats"]["unique_graphs"] == 1, dict(counters["stats"])
    flex.compiled_flex_functions.cache_clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("length", [64, 70, 1, 130])
def test_cudnn_sees_lengths_that_are_multiples_of_64(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, lengths = F.scaled_dot_product_attention, set[int]()

    def noted(*given: Tensor, **how: Any) -> Tensor:
        lengths.update(one.shape[2] for one in given)
        return attention(*given, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(fused, "sdpa_kernel", lambda backend: nullcontext())
    inputs = heads(length)
    results = [call(*inputs, AttentionMaskSpec()) for call in (fused.cudnn_attention, reference.softmax_attention)]
    assert lengths == {-(-length // 64) * 64}
    for a, b in zip(*([one, *torch.autograd.grad(one.square().sum(), inputs)] for one in results), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
