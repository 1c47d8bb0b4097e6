"""Attention with dropout on CPUs, some rows of scores at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.kernels.ops import chunked_attention, fused, reference
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers

S, B, N, D = 150, 2, 4, 8  # three parts, the last of them short
NONE = 1e-9  # of dropout: less than a step of it
PLACES = torch.randperm(S, generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.arange(S).div(40, rounding_mode="floor").expand(B, -1) + torch.tensor([[0], [5]])
PADDING = torch.rand(B, S, generator=torch.Generator().manual_seed(2)) > 0.3
MASKS = {
    "causal": AttentionMaskSpec(),
    "everything": AttentionMaskSpec(causal=False),
    "window": AttentionMaskSpec(window=(20, 0)),
    "no window": AttentionMaskSpec(window=(-1, 0)),
    "window both ways": AttentionMaskSpec(causal=False, window=(7, 90)),
    "documents": AttentionMaskSpec(documents=DOCUMENTS),
    "padding": AttentionMaskSpec(causal=False, padding=PADDING),
    "a piece": AttentionMaskSpec(query_places=PLACES, key_places=PLACES.flip(0)),
    "blind": AttentionMaskSpec(padding=torch.arange(S).expand(B, -1) > 70, window=(30, 0)),
}
SCORES = {
    "plain": AttentionScoreModifiers(),
    "all": AttentionScoreModifiers(
        scale=0.3, bias=torch.randn(1, N, S, S, dtype=torch.float64), sink=torch.randn(N, dtype=torch.float64)
    ),
}


def inputs(groups: int = 2, queries: int = S, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((queries, B, N, D), (S, B, groups, D), (S, B, groups, 6))
    ]


def with_gradients(output: Tensor, given: list[Tensor]) -> list[Tensor]:
    weight = torch.arange(output.numel(), dtype=torch.float64).view_as(output).sin().to(output.dtype)
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), given)]


def near(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("mask", MASKS)
def test_rows_are_the_definition(mask: str, scores: str, groups: int) -> None:
    given, how = inputs(groups), SCORES[scores]
    more = [tensor.requires_grad_() for tensor in (how.bias, how.sink) if tensor is not None]
    near(
        with_gradients(chunked_attention.attention_by_query_chunks(*given, MASKS[mask], NONE, how), given + more),
        with_gradients(reference.softmax_attention(*given, MASKS[mask], 0.0, how), given + more),
        1e-12,
    )


@pytest.mark.parametrize(
    "mask",
    [AttentionMaskSpec(), AttentionMaskSpec(causal=False), AttentionMaskSpec(window=(20, 0))],
    ids=["causal", "everything", "window"],
)
def test_queries_are_the_last_of_the_keys(mask: AttentionMaskSpec) -> None:
    given = inputs(queries=70)
    near(
        with_gradients(chunked_attention.attention_by_query_chunks(*given, mask, NONE), given),
        with_gradients(reference.softmax_attention(*given, mask), given),
        1e-12,
    )


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_narrow_formats_are_near_the_definition(dtype: torch.dtype, tolerance: float) -> None:
    narrow, exact = inputs(dtype=dtype), inputs()
    found = with_gradients(chunked_attention.attention_by_query_chunks(*narrow, AttentionMaskSpec(), NONE), narrow)
    expected = with_gradients(reference.softmax_attention(*exact, AttentionMaskSpec()), exact)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype and (a.double() - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("mask", ["causal", "window both ways", "documents"])
def test_dropout_multiplies_shares_by_what_it_keeps_forward_and_backward(
    mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draws of the forward pass are noted; the definition, with them, gives the same output and gradients."""
    given, drawn, draw = (
        inputs(),
        torch.zeros(B, N, S, S, dtype=torch.float64),
        chunked_attention._ChunkedAttentionCall.draw_dropout_mask,
    )

    def noted(work: chunked_attention._ChunkedAttentionCall, part: chunked_attention._QueryChunk) -> Tensor:
        kept = draw(work, part)
        drawn[:, :, part.queries, part.keys] = kept.view(B, N, *part.num_queries_and_keys).to(drawn)
        return kept

    with monkeypatch.context() as patch:
        patch.setattr(chunked_attention._ChunkedAttentionCall, "draw_dropout_mask", noted)
        output = chunked_attention.attention_by_query_chunks(*given, MASKS[mask], 0.25)
    seen = MASKS[mask].as_bool_tensor(S, S, torch.device("cpu")).expand(B, N, -1, -1)
    assert drawn[seen].mean() == pytest.approx(0.75, abs=0.01)
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda shares, share: shares * drawn / 0.75)
    found = with_gradients(output, given)
    near(found, with_gradients(reference.softmax_attention(*given, MASKS[mask], 0.25), given), 1e-12)


def test_draws_follow_the_seed_and_the_backward_pass_takes_none() -> None:
    given = inputs()
    one, two, three = (
        fused.attention_by_sdpa(*given, AttentionMaskSpec(), 0.1) for _ in range(3) if torch.manual_seed(3)
    )
    assert torch.equal(one, two) and torch.equal(two, three)
    other = fused.attention_by_sdpa(*given, AttentionMaskSpec(), 0.1)
    assert not torch.equal(one, other)
    state = torch.get_rng_state()
    other.sum().backward()
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dropout, kept", [(0.1, 1 - 6554 / 65536), (0.5, 0.5), (0.999999, 1 / 65536)])
def test_what_is_kept_is_made_larger_by_as_much_as_is_dropped(dropout: float, kept: float) -> None:
    q, k = torch.zeros(64, 64, 4, D), torch.zeros(64, 64, 4, D)
    values = chunked_attention.attention_by_query_chunks(
        q, k, torch.ones(64, 64, 4, 1), AttentionMaskSpec(causal=False), dropout
    )
    draws = 64**3 * 4
    spread = (1 / kept - 1) ** 0.5 / draws**0.5  # of the mean of numbers that are 0 or 1 / kept
    assert abs(values.mean().item() - 1) < 5 * spread
    counts = values * 64 * kept
    assert (counts - counts.round()).abs().max() < 1e-3, "each is 0 or 1 / kept"
