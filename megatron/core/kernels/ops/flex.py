"""Attention by torch's FlexAttention (Dong et al., 2024): mask and score changes are functions, which torch compiles.

    score of query i and key j   ->  score_mod: cap, bias          ->  softmax over the keys j that mask_mod allows for i
    blocks of 128 x 128          ->  fully masked ones are skipped

An attention sink of score z is applied afterwards: it multiplies the output by exp(lse) / (exp(lse) + exp(z)) = sigmoid(lse - z), where lse is the log-sum-exp
of the other scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from megatron.core.kernels.ops.host_read_permission import host_may_read
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.kernels.ops.requirements import KernelRequirements, first_reason


@cache
def compiled_flex_functions() -> tuple[Callable[..., Any], Callable[..., BlockMask]]:
    """Return torch's `flex_attention` and `create_block_mask`, both compiled. Uncompiled, FlexAttention holds all
    scores and is slower than the plain formula.
    """
    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)


def attention_by_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMaskSpec,
    dropout: float = 0.0,
    scores: AttentionScoreModifiers = AttentionScoreModifiers(),
) -> Tensor:
    """Compute `reference.softmax_attention` by torch's FlexAttention. q: [queries, b, n, d]; k: [keys, b, g, d]; v: [keys, b,
    g, dv]. dropout must be 0. Returns [queries, b, n * dv].
    """
    assert not dropout, "the table offers it without dropout only"
    attend, _ = compiled_flex_functions()
    plain = mask.has_only_causality and not mask.causal
    seen = None if plain else cached_block_mask(mask, len(q), len(k), q.shape[1], q.device)
    heads = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    attended = attend(
        *heads,
        score_mod=_make_score_mod(scores),
        block_mask=seen,
        scale=scores.scale,
        enable_gqa=q.shape[2] > k.shape[2],
        return_aux=None if scores.sink is None else AuxRequest(lse=True),
    )
    if scores.sink is None:
        output = attended
    else:
        output, aux = attended
        output = output * torch.sigmoid(aux.lse - scores.sink.to(aux.lse.dtype)[:, None])[..., None].to(output.dtype)
    return output.permute(2, 0, 1, 3).flatten(2)


def cached_block_mask(mask: AttentionMaskSpec, queries: int, keys: int, batch: int, device: torch.device) -> BlockMask:
    """Return a mask as FlexAttention's BlockMask, [b or 1, 1, queries, keys] in blocks. It is taken from the cache if
    it was built from the same tensors, unchanged since, except while compiling or capturing a CUDA graph.
    """
    _, build = compiled_flex_functions()
    tensors = (mask.documents, mask.padding, mask.query_places, mask.key_places, mask.query_documents)
    given = [one for one in tensors if one is not None]
    sizes = (batch if mask.documents is not None or mask.padding is not None else None, queries, keys)
    # A graph that is repeated has to build its own; a tensor of inference counts no changes.
    if torch.compiler.is_compiling() or _is_capturing_cuda_graph(device) or any(one.is_inference() for one in given):
        return _build_block_mask.__wrapped__(build, mask, sizes, device, ())
    return _build_block_mask(build, mask, sizes, device, tuple(one._version for one in given))


@lru_cache(maxsize=8)  # layers with the same mask in a microbatch share one; tensors are equal only to themselves
def _build_block_mask(
    build: Callable[..., BlockMask],
    mask: AttentionMaskSpec,
    sizes: tuple[int | None, int, int],
    device: torch.device,
    versions: tuple[int, ...],
) -> BlockMask:
    """Build the block mask of `cached_block_mask`. sizes: rows of the batch (None: all have the same mask), queries and
    keys. versions: torch's counters of in-place changes of the mask's tensors.
    """
    rows, queries, keys = sizes
    return build(make_mask_mod(mask, queries, keys, device), rows, None, queries, keys, device=device)


def _is_capturing_cuda_graph(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, or the host may not read the device for another reason."""
    return not host_may_read() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def make_mask_mod(
    mask: AttentionMaskSpec, queries: int, keys: int, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask as FlexAttention's mask function: (batch row b, head h, query i, key j), scalar tensors, -> bool.
    It agrees with `AttentionMaskSpec.as_bool_tensor`.
    """
    places, key_places = mask.query_and_key_places(queries, keys, device)
    # The compiler looks into what `seen` holds: tensors and numbers are the same to it in every microbatch, an object is not.
    causal, (left, right), documents, padding = mask.causal, mask.window or (-1, -1), mask.documents, mask.padding
    own = mask.documents_of_queries(queries)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return whether query i of batch row b attends to key j."""
        ahead = key_places[j] - places[i]
        allowed = ahead <= 0 if causal else ahead == ahead
        if left >= 0:
            allowed = allowed & (ahead >= -left)
        if right >= 0:
            allowed = allowed & (ahead <= right)
        if own is not None and documents is not None:
            allowed = allowed & (own[b, i] == documents[b, j])
        if padding is not None:
            allowed = allowed & padding[b, j]
        return allowed

    return mask_mod


def flex_unsupported_reason(need: KernelRequirements) -> str:
    """Return why FlexAttention cannot compute attention here; "" if it can."""
    return first_reason(
        {
            "compiled for a CPU it has no backward pass": need.device != "cuda",
            "it has no fp64": need.dtype == torch.float64,
            "it has no dropout": need.attention_dropout > 0,
        }
    )


def _make_score_mod(scores: AttentionScoreModifiers) -> Callable[..., Tensor] | None:
    """Return FlexAttention's score function, which applies soft cap and bias to a score; None if there is neither."""
    cap, bias = scores.softcap, scores.bias
    if cap is None and bias is None:
        return None

    def modify_score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if bias is None else score + bias[0, h, i, j]

    return modify_score
