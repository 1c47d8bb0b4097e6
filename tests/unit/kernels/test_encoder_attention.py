"""Padding, biases, scales and a memory of another length: every attention against the formula, one query at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.config.flags.declare import ConfigError
from megatron.core.kernels.choice.table import CANDIDATES, KernelRequirements, select_kernels
from megatron.core.kernels.ops import reference
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers

B, N, D = 2, 4, 6
PADDING = torch.tensor([[True] * 5, [True, True, False, True, False]])
ATTENTIONS = [
    candidate
    for candidate in CANDIDATES
    if candidate.op == "attention" and not candidate.unsupported_reason(KernelRequirements())
]


def by_hand(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: AttentionMaskSpec, scale: float) -> Tensor:
    """Softmax over the keys that are there, written out."""
    rows = []
    for i in range(q.shape[0]):
        for b in range(B):
            for head in range(N):
                group = head * k.shape[2] // N
                seen = [
                    j
                    for j in range(k.shape[0])
                    if (not mask.causal or j <= i) and (mask.padding is None or mask.padding[b, j])
                ]
                scores = torch.stack(
                    [
                        (q[i, b, head] * k[j, b, group]).sum() * scale + (0 if bias is None else bias[0, head, i, j])
                        for j in seen
                    ]
                )
                rows.append(sum(w * v[j, b, group] for w, j in zip(scores.softmax(0), seen, strict=True)))
    return torch.stack(rows).view(q.shape[0], B, N * D)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("queries, causal, groups", [(5, False, 4), (5, True, 2), (3, False, 1)])
@pytest.mark.parametrize("candidate", ATTENTIONS, ids=lambda candidate: candidate.name)
def test_attention_is_the_formula_forward_and_backward(
    candidate, queries: int, causal: bool, groups: int, biased: bool, padded: bool
) -> None:
    if candidate.name == "flash" and (padded or biased):
        return
    torch.manual_seed(0)
    shapes = [(queries, B, N, D), (5, B, groups, D), (5, B, groups, D), (1, N, queries, 5)]
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes[: 4 if biased else 3]]
    mask, bias = AttentionMaskSpec(causal=causal, padding=PADDING if padded else None), inputs[3] if biased else None
    found = candidate.loaded_kernel(*inputs[:3], mask, 0.0, AttentionScoreModifiers(0.7, bias=bias))
    expected = by_hand(*inputs[:3], bias, mask, 0.7)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weight = torch.arange(found.numel(), dtype=found.dtype).view_as(found).sin()
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_padding_is_no_plain_mask_and_flash_says_that_it_cannot() -> None:
    assert not AttentionMaskSpec(padding=PADDING).has_only_causality
    assert (
        select_kernels(KernelRequirements(padding=True), {"attention": "auto"}).attention is ATTENTIONS[0].loaded_kernel
    )
    with pytest.raises(ConfigError, match="padding is left out by a mask tensor"):
        select_kernels(KernelRequirements(padding=True), {"attention": "flash"})


def test_relu_is_relu() -> None:
    x = torch.linspace(-2, 2, 9)
    assert torch.equal(reference.activation(x, "relu"), x.clamp(min=0))
