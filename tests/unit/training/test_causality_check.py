"""The causality check: quiet on the kernels that we have, and not fooled by kernels that leak a little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.context_parallel import attention as over_ranks
from megatron.core.kernels.ops import fused, reference
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.training.health.causality_check import (
    attention_mask_variants,
    find_attention_leak,
    leak_probe_length,
    require_causal_attention,
)
from megatron.training.state.run import RunContext
from tests.helpers import tiny
from tests.helpers.world import Worlds

PACKED = {"reset_attention_mask": True, "reset_position_ids": True}
WINDOWS = {"window_size": "5,0", "window_attn_skip_freq": "2"}
LONG = {"seq_length": 600, "max_position_embeddings": 600}
MLA = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
    "kv_lora_rank": 8,
}


def run_with(kernel: Any = None, **changes: Any) -> RunContext:
    run = tiny.run_of(tiny.config(**changes))
    return run if kernel is None else replace(run, kernels=replace(run.kernels, attention=kernel))


@pytest.mark.parametrize("backend", ["fused", "unfused"])
@pytest.mark.parametrize(
    "changes",
    [
        PACKED,
        WINDOWS,
        {**PACKED, **WINDOWS},
        {**PACKED, **WINDOWS, **LONG, "softmax_type": "learnable"},
        {**PACKED, **WINDOWS, **MLA},
        {**PACKED, "bf16": True},
        {"architecture": "bert", "window_size": "3,2"},
    ],
    ids=["documents", "windows", "both", "a band with sinks", "latent", "bf16", "both sides"],
)
def test_no_kernel_of_ours_leaks(backend: str, changes: dict[str, Any]) -> None:
    require_causal_attention(run_with(attention_backend=backend, **changes))


def test_a_probe_is_long_enough_for_the_kernel_of_short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, banded = [], fused._banded_attention
    monkeypatch.setattr(fused, "_banded_attention", lambda *arguments: taken.append(1) or banded(*arguments))
    require_causal_attention(run_with(**WINDOWS, **LONG))
    assert taken


def forgets_documents(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, dropout: float, scores: AttentionScoreModifiers
) -> Tensor:
    return fused.attention_by_sdpa(q, k, v, replace(mask, documents=None), dropout, scores)


def forgets_windows(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, dropout: float, scores: AttentionScoreModifiers
) -> Tensor:
    return fused.attention_by_sdpa(q, k, v, replace(mask, window=None), dropout, scores)


def window_off_by_one(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, dropout: float, scores: AttentionScoreModifiers
) -> Tensor:
    return fused.attention_by_sdpa(
        q, k, v, mask if mask.window is None else replace(mask, window=(mask.window[0] + 1, 0)), dropout, scores
    )


def sees_the_future(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, dropout: float, scores: AttentionScoreModifiers
) -> Tensor:
    return fused.attention_by_sdpa(q, k, v, replace(mask, causal=False), dropout, scores)


def sees_one_ahead(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, dropout: float, scores: AttentionScoreModifiers
) -> Tensor:
    return fused.attention_by_sdpa(q, k, v, replace(mask, causal=False, window=(-1, 1)), dropout, scores)


def blurs_the_border(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, dropout: float, scores: AttentionScoreModifiers
) -> Tensor:
    moved = mask.documents if mask.documents is None else mask.documents.roll(1, dims=1)
    return fused.attention_by_sdpa(q, k, v, replace(mask, documents=moved), dropout, scores)


def a_little_of_everything(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, dropout: float, scores: AttentionScoreModifiers
) -> Tensor:
    """Masked scores are -10 and not minus infinity: a mask as some people wrote it."""
    seen = mask.as_bool_tensor(q.shape[0], k.shape[0], q.device)
    return reference.softmax_attention(
        q, k, v, AttentionMaskSpec(causal=False), dropout, replace(scores, bias=torch.where(seen, 0.0, -10.0))
    )


def sees_nothing(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, dropout: float, scores: AttentionScoreModifiers
) -> Tensor:
    return torch.zeros(*q.shape[:2], q.shape[2] * v.shape[3])


@pytest.mark.parametrize(
    "kernel, changes, words",
    [
        (forgets_documents, PACKED, "layers without a window, token"),
        (forgets_windows, WINDOWS, "layers with a window of 5,0"),
        (window_off_by_one, WINDOWS, "layers with a window of 5,0"),
        (sees_the_future, PACKED, "must not see it"),
        (sees_one_ahead, PACKED, "must not see it"),
        (blurs_the_border, PACKED, "must not see it"),
        (a_little_of_everything, PACKED, "must not see it"),
        (sees_nothing, PACKED, "does not even see itself"),
    ],
)
def test_a_kernel_that_leaks_is_refused_by_name(kernel: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_causal_attention(run_with(kernel, **changes))
    assert "the attention kernel fused lets tokens leak" in str(caught.value) and words in str(caught.value)


def test_a_run_that_hides_nothing_is_not_probed() -> None:
    require_causal_attention(run_with(sees_the_future))


def probe_here(changes: dict[str, Any], planted: bool) -> str:
    run, ring = tiny.run_of(tiny.config(torch.distributed.get_world_size(), **changes)), over_ranks.ring_attention

    def blind(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, plan: Any) -> Tensor:
        return ring(q, k, v, sink, replace(plan, mask=replace(plan.mask, documents=None)))

    if planted:
        run = replace(run, kernels=replace(run.kernels, attention=forgets_documents))
    with patch.object(over_ranks, "ring_attention", blind if planted else ring):
        try:
            require_causal_attention(run)
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("transport", ["p2p", "a2a", "allgather"])
def test_the_transport_over_context_ranks_is_probed_too(world: Worlds, transport: str) -> None:
    changes = {**PACKED, **WINDOWS, "context_parallel_size": 2, "cp_comm_type": (transport,)}
    assert world(2).run(probe_here, changes, False) == ["", ""]
    found = world(2).run(probe_here, changes, True)
    assert len(set(found)) == 1 and f"context transport {transport}" in found[0], (
        "all ranks refuse, with the same words"
    )


def test_every_kind_of_layer_is_probed_once() -> None:
    run = run_with(**WINDOWS, **LONG)
    found = attention_mask_variants(run.layer_build_context, network_layer_plans(run.config.model))
    assert [(kind.layer, kind.window) for kind in found] == [(0, (5, 0)), (1, None)]
    assert [leak_probe_length(run, kind) for kind in found] == [276, 256]
    assert find_attention_leak(run.layer_build_context, found[0], 276, separate=False) == ""
