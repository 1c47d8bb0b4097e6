"""Windows, sinks and caps: every attention against the formula, one query at a time, forward and backward."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.core.config.flags.declare import ConfigError
from megatron.core.kernels.choice.table import CANDIDATES, KernelRequirements, select_kernels
from megatron.core.kernels.ops import fused, reference
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.kernels.ops.reference import GatedActivationOptions

S, B, N, D = 9, 2, 4, 6
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
ATTENTIONS = {
    candidate.name: candidate.loaded_kernel
    for candidate in CANDIDATES
    if candidate.op == "attention"
    and candidate.name != "flash"
    and not candidate.unsupported_reason(KernelRequirements())
}


def sees(mask: AttentionMaskSpec, b: int, i: int, j: int) -> bool:
    """Whether query i may look at key j, said in words."""
    left, right = (-1, -1) if mask.window is None else mask.window
    return (
        (not mask.causal or j <= i)
        and (left < 0 or j >= i - left)
        and (right < 0 or j <= i + right)
        and (mask.documents is None or bool(mask.documents[b, i] == mask.documents[b, j]))
    )


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, scores: AttentionScoreModifiers) -> Tensor:
    """One query at a time: exp(score) over the sum of exp(scores), the sink's included."""
    rows = []
    for i in range(q.shape[0]):
        for b in range(q.shape[1]):
            for head in range(q.shape[2]):
                group = head * k.shape[2] // q.shape[2]
                seen = [j for j in range(k.shape[0]) if sees(mask, b, i, j)]
                found = [
                    (q[i, b, head] * k[j, b, group]).sum() * (scores.scale or 1 / math.sqrt(q.shape[3])) for j in seen
                ]
                if scores.softcap:
                    found = [scores.softcap * torch.tanh(score / scores.softcap) for score in found]
                total = sum(score.exp() for score in found) + (0 if scores.sink is None else scores.sink[head].exp())
                rows.append(sum(score.exp() / total * v[j, b, group] for score, j in zip(found, seen, strict=True)))
    return torch.stack(rows).view(*q.shape[:2], -1)


def inputs_of(length: int = S, groups: int = 2, value_size: int = D) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((length, B, N, D), (length, B, groups, D), (length, B, groups, value_size), (N,))
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def compare(
    call,
    expected,
    mask: AttentionMaskSpec,
    scores: AttentionScoreModifiers,
    inputs: list[Tensor],
    tolerance: float = 1e-11,
) -> None:
    """Outputs and gradients of two attentions; the last input is the sink, if there is one."""
    results = []
    for function in (call, expected):
        if function is by_hand:
            output = by_hand(*inputs[:3], mask, scores)
        else:
            output = function(*inputs[:3], mask, 0.0, scores)
        weight = torch.arange(output.numel(), dtype=output.dtype).view_as(output).sin()
        used = inputs[:3] + ([scores.sink] if scores.sink is not None else [])
        results.append([output, *torch.autograd.grad((output * weight).sum(), used)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


MASKS = {
    "causal": AttentionMaskSpec(),
    "window": AttentionMaskSpec(window=(2, 0)),
    "alone": AttentionMaskSpec(window=(0, 0)),
    "both sides": AttentionMaskSpec(causal=False, window=(3, 1)),
    "open to the right": AttentionMaskSpec(window=(3, -1)),
    "open to the left": AttentionMaskSpec(causal=False, window=(-1, 2)),
    "documents": AttentionMaskSpec(documents=DOCUMENTS),
    "window in documents": AttentionMaskSpec(window=(2, 0), documents=DOCUMENTS),
}


@pytest.mark.parametrize("kind", ["plain", "sink", "softcap", "softcap and sink"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_with_windows_sinks_and_caps_is_the_formula(name: str, mask: str, kind: str) -> None:
    inputs = inputs_of(value_size=4)
    scores = AttentionScoreModifiers(
        0.7, softcap=1.5 if "softcap" in kind else None, sink=inputs[3] if "sink" in kind else None
    )
    compare(ATTENTIONS[name], by_hand, MASKS[mask], scores, inputs)


@pytest.mark.parametrize("kind", ["plain", "sink"])
@pytest.mark.parametrize("mask", ["window", "alone", "both sides", "open to the right", "window in documents"])
def test_a_band_of_blocks_is_the_whole_matrix_at_any_length(
    monkeypatch: pytest.MonkeyPatch, mask: str, kind: str
) -> None:
    taken, whole = [], fused._banded_attention
    monkeypatch.setattr(fused, "_BLOCK", 4)
    monkeypatch.setattr(fused, "_banded_attention", lambda *arguments: taken.append(1) or whole(*arguments))
    for length in (16, 17, 23, 32):
        inputs, spec = inputs_of(length), MASKS[mask]
        if spec.documents is not None:
            spec = replace(
                spec,
                documents=(torch.arange(length) // 5)[None] + torch.tensor([[0], [1]]) * (torch.arange(length) > 7),
            )
        padded = replace(spec, padding=torch.arange(length)[None] < torch.tensor([[length], [length - 3]]))
        scores = AttentionScoreModifiers(sink=inputs[3] if kind == "sink" else None)
        compare(fused.attention_by_sdpa, reference.softmax_attention, spec, scores, inputs)
        compare(fused.attention_by_sdpa, reference.softmax_attention, padded, scores, inputs)
    assert len(taken) == 8


def test_a_query_that_sees_nothing_gets_zero_with_a_sink_too() -> None:
    q, k, v, sink = inputs_of()
    mask = AttentionMaskSpec(query_places=torch.arange(S), key_places=torch.arange(S) + 4)
    for call in ATTENTIONS.values():
        for scores in (AttentionScoreModifiers(), AttentionScoreModifiers(sink=sink)):
            found = call(q, k, v, mask, 0.0, scores)
            assert found[:4].abs().max() == 0 and found[4:].abs().min() > 0
            assert all(bool(gradient.isfinite().all()) for gradient in torch.autograd.grad(found.sum(), (q, k, v)))


def test_places_of_queries_and_keys_say_what_a_window_hides() -> None:
    q, k, v, sink = inputs_of()
    scores, mask = AttentionScoreModifiers(sink=sink), AttentionMaskSpec(window=(2, 0), documents=DOCUMENTS)
    order, rows = torch.tensor([4, 1, 8, 0, 3, 2, 7, 5, 6]), torch.tensor([5, 0, 7])
    moved = AttentionMaskSpec(
        window=(2, 0),
        documents=DOCUMENTS[:, order],
        query_documents=DOCUMENTS[:, rows],
        query_places=rows,
        key_places=order,
    )
    for call in ATTENTIONS.values():
        torch.testing.assert_close(
            call(q[rows], k[order], v[order], moved, 0.0, scores),
            by_hand(q, k, v, mask, scores)[rows],
            rtol=1e-11,
            atol=1e-11,
        )


def test_a_sink_keeps_its_value_in_the_fused_kernel_of_half_precision() -> None:
    sink = torch.tensor([5.1155, 5.64, 4.67, 6.2])
    q, k, v = (torch.full((S, B, n, D), value, dtype=torch.bfloat16) for n, value in ((N, 0.0), (2, 1.0), (2, 1.0)))
    found = (
        fused.attention_by_sdpa(q, k, v, AttentionMaskSpec(causal=False), 0.0, AttentionScoreModifiers(sink=sink))
        .float()
        .view(S * B, N, D)
    )
    expected = (S / (S + sink.exp()))[None, :, None].expand_as(found)  # all scores are zero, and all values one
    torch.testing.assert_close(found, expected, rtol=6e-3, atol=0.0)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("block", [1, 4, 100])
def test_the_largest_scores_are_those_of_the_whole_matrix(mask: str, block: int) -> None:
    q, k, _, _ = (x.detach() for x in inputs_of())
    for rows in (slice(None), slice(5, None)):  # all queries, or the last ones of a longer text
        expected = [
            max(
                (q[rows][i, b, head] @ k[j, b, head // 2]).item() * 0.3
                for b in range(B)
                for i in range(q[rows].shape[0])
                for j in range(S)
                if sees(MASKS[mask], b, i + (rows.start or 0), j)
            )
            for head in range(N)
        ]
        found = reference.max_attention_scores(q[rows], k, MASKS[mask], 0.3, block)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0.0)
    nothing = AttentionMaskSpec(query_places=torch.arange(S), key_places=torch.arange(S) + S)
    assert reference.max_attention_scores(q, k, nothing).tolist() == [-math.inf] * N


def test_kernels_say_which_variant_they_do_not_have() -> None:
    assert select_kernels(KernelRequirements(softcap=True)).attention is fused.attention_by_sdpa
    assert select_kernels(KernelRequirements(window=True)).attention is fused.attention_by_sdpa
    with pytest.raises(ConfigError, match="flash: windows are kept by a mask tensor"):
        select_kernels(KernelRequirements(window=True), {"attention": "flash"})
    with pytest.raises(ConfigError, match="flash: it has no cap on scores"):
        select_kernels(KernelRequirements(softcap=True), {"attention": "flash"})


@pytest.mark.parametrize("mask", ["causal", "window in documents"])
def test_scores_with_a_cap_are_held_for_a_block_of_queries_only(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_CAPPED", 4)
    inputs, scores = inputs_of(value_size=4), AttentionScoreModifiers(0.7, softcap=1.5)
    held: list[int] = []

    def packed(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        fused.attention_by_sdpa(*inputs[:3], MASKS[mask], 0.0, scores)
    assert all(size < S * S * N for size in held), "no matrix of scores waits for the backward pass"
    compare(fused.attention_by_sdpa, by_hand, MASKS[mask], scores, inputs)


def test_flash_takes_sinks() -> None:
    inputs = inputs_of()
    compare(
        fused.attention_by_sdpa_flash,
        reference.softmax_attention,
        AttentionMaskSpec(),
        AttentionScoreModifiers(sink=inputs[3]),
        inputs,
    )


def test_a_clamped_gate_is_that_of_gpt_oss() -> None:
    x = torch.linspace(-4, 4, 40, dtype=torch.float64).view(2, 20).requires_grad_()
    found = reference.gated_activation(x, "quick_gelu", GatedActivationOptions(clamp=1.5, offset=1.0))
    gate, up = (
        torch.where(x[:, :10] > 1.5, 1.5, x[:, :10]),
        torch.where(x[:, 10:].abs() > 1.5, x[:, 10:].sign() * 1.5, x[:, 10:]),
    )
    expected = (up + 1) * gate / (1 + (-1.702 * gate).exp())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        *(torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (found, expected)), rtol=1e-12, atol=1e-12
    )
