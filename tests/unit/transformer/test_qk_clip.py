"""QK-clip against the rule written out: scores of every query and key, head by head, from what attention was given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.optimizer.optimizer import Optimizer
from megatron.training.state.evaluate import evaluate_loss
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny

LIMIT = 10.0
CLIP = {
    "qk_clip": True,
    "qk_clip_threshold": LIMIT,
    "num_layers": 2,
    "init_method_std": 0.3,
    "lr": 0.0,
    "min_lr": 0.0,
    "weight_decay": 0.0,
}
LATENT = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "kv_lora_rank": 12,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
}
Seen = list[tuple[Tensor, Tensor, Any]]


def listening(**changes: Any) -> tuple[Trainer, Seen]:
    """A trainer, and every query and key that its attention is given."""
    run, seen = tiny.run_of(tiny.config(**{**CLIP, **changes})), []
    kernel = run.kernels.attention

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, scores: Any) -> Tensor:
        seen.append((q.detach().double(), k.detach().double(), mask))
        return kernel(q, k, v, mask, dropout, scores)

    return tiny.trainer_of(replace(run, kernels=replace(run.kernels, attention=attention))), seen


def largest(seen: Seen, layer: int, groups: int, scale: float) -> list[float]:
    """The largest score of each group of heads in a layer, over all microbatches: one query and key at a time."""
    found = [float("-inf")] * groups
    order = (0, 1, 1, 0) if len(seen) == 32 else (0, 1)  # recomputation runs layers again, the last one first
    for q, k, mask in (one for place, one in enumerate(seen) if order[place % len(order)] == layer):
        window = mask.window[0] if mask.window else len(q)
        for i in range(len(q)):
            for j in range(max(0, i - window), i + 1):
                for head in range(q.shape[2]):
                    group = head * groups // q.shape[2]
                    own = (q[i, :, head] * k[j, :, head * k.shape[2] // q.shape[2]]).sum(-1).max().item() * scale
                    found[group] = max(found[group], own)
    return found


@pytest.mark.parametrize(
    "changes, groups",
    [
        ({}, 8),
        ({"group_query_attention": True, "num_query_groups": 2, "qk_clip_alpha": 0.2}, 2),
        (
            {
                "softmax_scale": 0.3,
                "window_size": "3,0",
                "attention_logit_softcap": 0.1,
                "position_embedding_type": "rope",
            },
            8,
        ),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, 8),
    ],
    ids=["heads", "groups", "window and cap", "recomputed"],
)
def test_rows_of_queries_and_keys_shrink_as_the_largest_score_says(changes: dict[str, Any], groups: int) -> None:
    trainer, seen = listening(fp64=True, **changes)
    before = {name: value.clone() for name, value in trainer.stages[0].state_dict().items()}
    train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    alpha, scale = changes.get("qk_clip_alpha", 0.5), changes.get("softmax_scale", 0.5)
    clipped = 0
    for name, value in trainer.stages[0].state_dict().items():
        if "linear_qkv" not in name:
            assert torch.equal(value, before[name]), name
            continue
        shares = [min(1.0, LIMIT / peak) for peak in largest(seen, int(name.split(".")[2]), groups, scale)]
        clipped += sum(share < 1 for share in shares)
        sizes = [4 * 8 // groups] * groups + [4] * groups + [4 * groups]
        for part, old, factor in zip(
            value.split(sizes),
            before[name].split(sizes),
            [s**alpha for s in shares] + [s ** (1 - alpha) for s in shares] + [1.0],
            strict=True,
        ):
            torch.testing.assert_close(part, old * factor, rtol=1e-12, atol=1e-14)
    assert 0 < clipped < 4 * groups, "some are clipped and some are not"


def test_after_a_step_the_same_tokens_score_no_more_than_the_threshold() -> None:
    trainer, seen = listening(fp64=True, num_layers=2)
    train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    before = largest(seen, 0, 8, 0.5)
    seen.clear()
    train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    for old, new in zip(before, largest(seen, 0, 8, 0.5), strict=True):
        assert new == pytest.approx(min(old, LIMIT), rel=1e-12)


@pytest.mark.parametrize("rank, deviation", [(None, 0.31), (10, 0.31)])
def test_heads_of_latent_attention_shrink_without_the_shared_key(rank: int | None, deviation: float) -> None:
    trainer, seen = listening(fp64=True, init_method_std=deviation, q_lora_rank=rank, qk_clip_alpha=0.3, **LATENT)
    before = {name: value.clone() for name, value in trainer.stages[0].state_dict().items()}
    train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    shares = torch.tensor([min(1.0, LIMIT / peak) for peak in largest(seen, 0, 8, 10**-0.5)], dtype=torch.float64)
    assert shares.min() < 1 and shares.max() == 1
    here = "decoder.layers.0.self_attention."
    expected = {
        f"{here}linear_q_{'proj' if rank is None else 'up_proj'}.weight": torch.stack(
            [shares**0.3] * 6 + [shares] * 4, dim=1
        ),
        f"{here}linear_kv_up_proj.weight": torch.stack([shares**0.7] * 6 + [torch.ones(8)] * 5, dim=1),
    }
    for name, value in trainer.stages[0].state_dict().items():
        if not name.startswith("decoder.layers.1.self_attention."):
            factor = expected[name].flatten()[:, None] if name in expected else 1.0
            torch.testing.assert_close(value, before[name] * factor, rtol=1e-12, atol=1e-14)
    seen.clear()
    train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    assert max(largest(seen, 0, 8, 10**-0.5)) == pytest.approx(LIMIT, rel=1e-12)


def test_masters_shrink_and_half_precision_weights_are_their_copies() -> None:
    trainer, _ = listening(bf16=True)
    before = [master.clone() for master in trainer.optimizer.main_weights]
    train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    for master, old, segment in zip(trainer.optimizer.main_weights, before, trainer.optimizer.segments, strict=True):
        changed = segment.name.endswith("linear_qkv.weight")
        assert torch.equal(master, old) != changed, segment.name
        assert torch.equal(segment.data, master.bfloat16())


def test_rows_are_scaled_wherever_a_piece_of_a_parameter_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = listening(fp64=True, use_distributed_optimizer=True)
    optimizer: Optimizer = trainer.optimizer
    place = next(i for i, segment in enumerate(optimizer.segments) if segment.name.endswith("linear_qkv.weight"))
    whole = optimizer.segments[place]
    rows = torch.rand(96, dtype=torch.float64)
    for low, high in ((0, 96 * 32), (5, 70), (40, 64), (33, 96 * 32 - 1), (64, 640)):
        piece = torch.ones(high - low, dtype=torch.float64)
        optimizer.segments[place] = replace(whole, low=low, high=high, data=piece)
        optimizer.main_weights[place] = piece
        optimizer._scale_weight_rows({whole.name: rows})
        assert torch.equal(piece, rows.repeat_interleave(32)[low:high])


def test_a_step_that_overflows_clips_nothing_and_its_scores_are_forgotten() -> None:
    trainer, _ = listening(fp16=True, initial_loss_scale=2.0**40, loss_scale_window=1000)
    before = [master.clone() for master in trainer.optimizer.main_weights]
    assert train_step(trainer, tiny.short_run_batches(trainer.run, 0)).skipped
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.optimizer.main_weights, strict=True))
    peaks = [module.peaks for module in trainer.stages[0].modules() if getattr(module, "peaks", None) is not None]
    assert len(peaks) == 2 and all(peak.pop(8, torch.device("cpu")).isinf().all() for peak in peaks)


def test_evaluation_leaves_no_scores_behind() -> None:
    trainer, seen = listening()
    evaluate_loss(trainer, tiny.short_run_batches(trainer.run, 0), 1)
    assert seen and all(
        module.peaks.pop(8, torch.device("cpu")).isinf().all()
        for module in trainer.stages[0].modules()
        if getattr(module, "peaks", None) is not None
    )
