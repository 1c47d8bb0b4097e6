"""Every op against its formula, and every candidate against the reference, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron.core.kernels.choice.table import CANDIDATES, KernelRequirements
from megatron.core.kernels.ops import reference
from megatron.core.kernels.ops.mask import AttentionMaskSpec

S, B, N, D = 7, 2, 4, 6
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
MASKS = {
    "causal": AttentionMaskSpec(),
    "bidirectional": AttentionMaskSpec(causal=False),
    "documents": AttentionMaskSpec(documents=DOCUMENTS),
}
ATTENTIONS = [
    candidate
    for candidate in CANDIDATES
    if candidate.op == "attention" and not candidate.unsupported_reason(KernelRequirements())
]


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec) -> Tensor:
    """One query at a time."""
    queries, batch, heads, size = q.shape
    rows = []
    for i in range(queries):
        for b in range(batch):
            for head in range(heads):
                group = head * k.shape[2] // heads
                seen = [
                    j
                    for j in range(k.shape[0])
                    if (not mask.causal or j <= i)
                    and (mask.documents is None or mask.documents[b, i] == mask.documents[b, j])
                ]
                scores = torch.stack([(q[i, b, head] * k[j, b, group]).sum() for j in seen]) / math.sqrt(size)
                weights = scores.exp() / scores.exp().sum()
                rows.append(sum(w * v[j, b, group] for w, j in zip(weights, seen, strict=True)))
    return torch.stack(rows).view(queries, batch, heads * v.shape[-1])


def heads(groups: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(S, B, n, D, dtype=torch.float64).to(dtype).requires_grad_() for n in (N, groups, groups)]


def with_gradients(function, *inputs: Tensor) -> list[Tensor]:
    result = function(*inputs)
    weight = torch.arange(result.numel(), dtype=result.dtype).view_as(result).sin()
    return [result.detach(), *torch.autograd.grad((result * weight).sum(), inputs)]


def check(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype or tolerance > 1e-6
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_reference_attention_is_the_formula(mask: str, groups: int) -> None:
    inputs = heads(groups)
    check(
        with_gradients(lambda *qkv: reference.softmax_attention(*qkv, MASKS[mask]), *inputs),
        with_gradients(lambda *qkv: attention_by_hand(*qkv, MASKS[mask]), *inputs),
        1e-12,
    )


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("candidate", ATTENTIONS, ids=lambda candidate: candidate.name)
def test_every_attention_that_fits_equals_the_reference(candidate, mask: str, groups: int) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        if candidate.unsupported_reason(KernelRequirements(dtype=dtype, documents=MASKS[mask].documents is not None)):
            assert (candidate.name, mask) == ("flash", "documents")
            continue
        inputs = heads(groups, dtype)
        check(
            with_gradients(lambda *qkv: candidate.loaded_kernel(*qkv, MASKS[mask]), *inputs),
            with_gradients(lambda *qkv: reference.softmax_attention(*qkv, MASKS[mask]), *inputs),
            tolerance,
        )


def test_a_later_query_alone_sees_all_keys_before_it() -> None:
    q, k, v = heads(2)
    for candidate in ATTENTIONS:
        if candidate.name != "flash":
            last = candidate.loaded_kernel(q[-2:], k, v, AttentionMaskSpec())
            torch.testing.assert_close(
                last, reference.softmax_attention(q, k, v, AttentionMaskSpec())[-2:], rtol=1e-12, atol=1e-12
            )


@pytest.mark.parametrize(
    "candidate", [c for c in ATTENTIONS if c.name != "flash"], ids=lambda candidate: candidate.name
)
def test_attention_dropout_zeroes_weights_and_keeps_their_mean(candidate) -> None:
    torch.manual_seed(0)
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(4000, 1, 1, 4)
    v = torch.ones(4000, 1, 1, 1)
    kept = candidate.loaded_kernel(q, k, v.expand(4000, 1, 1, 4), AttentionMaskSpec(causal=False), 0.25)
    assert kept.mean() == pytest.approx(1.0, abs=0.05) and kept.mean() != 1.0


def test_a_mask_shows_a_query_what_it_may_see() -> None:
    seen = MASKS["documents"].as_bool_tensor(S, S, torch.device("cpu"))
    for b in range(B):
        for i in range(S):
            assert [bool(x) for x in seen[b, 0, i]] == [
                j <= i and bool(DOCUMENTS[b, i] == DOCUMENTS[b, j]) for j in range(S)
            ]
    assert AttentionMaskSpec().has_only_causality and not MASKS["documents"].has_only_causality


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_rms_norm_is_the_formula(name: str) -> None:
    call = next(
        candidate.loaded_kernel for candidate in CANDIDATES if (candidate.op, candidate.name) == ("rms_norm", name)
    )
    x, weight = (3 * torch.randn(5, 8)).double().requires_grad_(), torch.randn(8).double().requires_grad_()

    def formula(x: Tensor, weight: Tensor) -> Tensor:
        return x / ((x * x).sum(-1, keepdim=True) / 8 + 1e-3).sqrt() * weight

    check(with_gradients(lambda *t: call(*t, 1e-3), x, weight), with_gradients(formula, x, weight), 1e-12)
    small = x.detach().bfloat16()
    expected = formula(small.double(), weight.detach().bfloat16().double())
    torch.testing.assert_close(call(small, weight.detach().bfloat16(), 1e-3).double(), expected, rtol=2e-2, atol=1e-2)


def test_layer_norm_is_the_formula() -> None:
    x, weight, bias = (torch.randn(size).double().requires_grad_() for size in ((5, 8), (8,), (8,)))

    def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight + bias

    check(
        with_gradients(lambda *t: reference.layer_norm(*t, 1e-3), x, weight, bias),
        with_gradients(formula, x, weight, bias),
        1e-12,
    )


def test_activations_are_their_formulas() -> None:
    x = torch.linspace(-4, 4, 41, dtype=torch.float64)
    sigmoid = 1 / (1 + (-x).exp())
    formulas = {
        "gelu": x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        "gelu_tanh": 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "silu": x * sigmoid,
        "quick_gelu": x / (1 + (-1.702 * x).exp()),
        "squared_relu": torch.where(x > 0, x * x, 0.0),
    }
    for name, expected in formulas.items():
        torch.testing.assert_close(reference.activation(x, name), expected, rtol=1e-12, atol=1e-12)
    gate_and_up = torch.stack((x, x + 1), dim=-1).repeat_interleave(1, dim=-1)
    torch.testing.assert_close(
        reference.gated_activation(gate_and_up, "silu")[:, 0], x * sigmoid * (x + 1), rtol=1e-12, atol=1e-12
    )
    with pytest.raises(AssertionError, match="no activation is called swish"):
        reference.activation(x, "swish")


@pytest.mark.parametrize("turned", [6, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_pairs_as_complex_numbers(interleaved: bool, turned: int) -> None:
    x = torch.randn(S, B, N, D, dtype=torch.float64)
    angles = torch.randn(S, 1, 1, turned // 2, dtype=torch.float64)
    doubled = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    found = reference.rotary(x, doubled.cos(), doubled.sin(), interleaved)
    first = x[..., 0:turned:2] if interleaved else x[..., : turned // 2]
    second = x[..., 1:turned:2] if interleaved else x[..., turned // 2 : turned]
    rotated = torch.complex(first, second) * torch.exp(1j * angles)
    a, b = (found[..., 0:turned:2], found[..., 1:turned:2]) if interleaved else found[..., :turned].chunk(2, dim=-1)
    torch.testing.assert_close(torch.complex(a, b), rotated, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[..., turned:], x[..., turned:]), "the rest of a head is left alone"


def test_rotary_of_half_precision_is_taken_in_the_tables_format() -> None:
    x = torch.randn(S, B, N, D).bfloat16()
    angles = torch.randn(S, 1, 1, D)
    found = reference.rotary(x, angles.cos(), angles.sin(), False)
    wide = reference.rotary(x.float(), angles.cos(), angles.sin(), False)
    assert found.dtype == torch.bfloat16 and torch.equal(found, wide.bfloat16())
