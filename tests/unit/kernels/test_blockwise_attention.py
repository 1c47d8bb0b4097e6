"""Blocks of keys, merged, are attention over all keys, by torch's kernel and by plain torch; backward too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.kernels.ops import blockwise_attention, reference
from megatron.core.kernels.ops.blockwise_attention import BlockwiseAttentionOptions
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers

B, N, Q, K, D = 2, 4, 5, 9, 6
CUTS = ((0, 9), (0, 4, 9), (0, 1, 2, 9), (0, 3, 3, 9))


def drawn(groups: int, value_size: int, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = ((B, N, Q, D), (B, groups, K, D), (B, groups, K, value_size), (B, N, Q, value_size))
    return [torch.randn(shape, dtype=torch.float64, generator=random).to(dtype) for shape in shapes]


def whole(
    q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, seen: Tensor | None, softcap: float | None
) -> list[Tensor]:
    """The reference on the same heads: output and gradients, in fp64. seen: [b, queries, keys]."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scores = AttentionScoreModifiers(
        scale=0.4,
        softcap=softcap,
        bias=None if seen is None else torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, float("-inf")),
    )
    output = reference.softmax_attention(
        *(x.permute(2, 0, 1, 3) for x in leaves), AttentionMaskSpec(causal=False), 0.0, scores
    )
    output = output.unflatten(-1, (N, -1)).permute(1, 2, 0, 3)
    output.backward(gradient.double())
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("groups, value_size", [(4, 6), (2, 3), (1, 5), (2, 9)])
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("softcap, hidden", [(None, False), (1.5, False), (None, True)])
def test_blocks_merge_to_the_whole(
    fused: bool, groups: int, value_size: int, cut: tuple[int, ...], softcap: float | None, hidden: bool
) -> None:
    q, k, v, gradient = drawn(groups, value_size, torch.float64)
    seen = torch.rand((1, 1, Q, K), generator=torch.Generator().manual_seed(1)) < 0.6 if hidden else None
    output, lse = torch.zeros_like(gradient), q.new_full((B, N, Q), float("-inf"))
    pieces = [slice(first, last) for first, last in zip(cut, cut[1:]) if last > first]
    made = [
        BlockwiseAttentionOptions(0.4, softcap, seen=None if seen is None else seen[..., piece], fused=fused)
        for piece in pieces
    ]
    for piece, block in zip(pieces, made, strict=True):
        output, lse = blockwise_attention.merge_attention_blocks(
            output, lse, *blockwise_attention.block_attention_forward(q, k[:, :, piece], v[:, :, piece], block)
        )
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for piece, block in zip(pieces, made, strict=True):
        dq, dk, dv = blockwise_attention.block_attention_backward(
            gradient, q, k[:, :, piece], v[:, :, piece], output, lse, block
        )
        found[0] += dq
        found[1][:, :, piece] += dk
        found[2][:, :, piece] += dv
    for name, a, b in zip(
        ("output", "dq", "dk", "dv"), (output, *found), whole(q, k, v, gradient, seen, softcap), strict=True
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_torchs_kernel_and_plain_torch_agree_on_a_causal_block(dtype: torch.dtype) -> None:
    q, k, v, gradient = drawn(4, 6, dtype)
    k, v = k[:, :, :Q], v[:, :, :Q]
    results = []
    for fused in (True, False):
        block = BlockwiseAttentionOptions(0.4, causal=True, fused=fused)
        assert block.fits_cpu_flash_kernel(q) == fused
        output, lse = blockwise_attention.block_attention_forward(q, k, v, block)
        results.append(
            (
                output,
                lse,
                *blockwise_attention.block_attention_backward(gradient, q, k, v, output.to(dtype), lse, block),
            )
        )
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 5e-2)
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype == reference.accumulation_dtype_of(dtype) and torch.allclose(
            a, b, rtol=0, atol=tolerance
        )


def test_a_query_that_sees_nothing_has_no_weight_in_a_merge() -> None:
    q, k, v, gradient = drawn(2, 6, torch.float64)
    nothing = BlockwiseAttentionOptions(0.4, seen=torch.zeros((1, 1, Q, K), dtype=torch.bool))
    empty, blind = blockwise_attention.block_attention_forward(q, k, v, nothing)
    assert not empty.any() and (blind == float("-inf")).all()
    output, lse = blockwise_attention.block_attention_forward(q, k, v, BlockwiseAttentionOptions(0.4))
    for merged in (
        blockwise_attention.merge_attention_blocks(output, lse, empty, blind),
        blockwise_attention.merge_attention_blocks(empty, blind, output, lse),
    ):
        assert torch.equal(merged[0], output) and torch.equal(merged[1], lse)
    assert not blockwise_attention.merge_attention_blocks(empty, blind, empty, blind)[0].any(), (
        "nothing and nothing is nothing, not a wrong number"
    )
    assert not any(
        x.any() for x in blockwise_attention.block_attention_backward(gradient, q, k, v, empty, blind, nothing)
    )
