"""State of updates in other formats and in other memory: saved by one, resumed by another, or by itself to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.training.state import trainer
from tests.helpers.resuming import AFTER, BEFORE, resume_and_train, train_and_save
from tests.helpers.training import Held, outcome
from tests.helpers.world import Worlds
from tests.parity.table import MODELS, Changes, read_layout

PLAIN: Changes = {**MODELS["llama"], "bf16": True}
FP8: Changes = {**PLAIN, "use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}
HALF: Changes = {
    **PLAIN,
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "fp16",
    "main_params_dtype": "fp16",
    "main_grads_dtype": "bf16",
}


def assert_same_bits(
    resumed: list[tuple[list[float], list[float], Held]], through: list[tuple[list[float], list[float], Held]]
) -> None:
    for (losses, norms, held), (losses_through, norms_through, held_through) in zip(resumed, through, strict=True):
        # A parameter whose state is in two places adds its squares to the norm in another order.
        assert losses == losses_through[BEFORE:] and norms == pytest.approx(norms_through[BEFORE:], rel=1e-8)
        assert all(torch.equal(a, b) for (*_, a), (*_, b) in zip(held, held_through, strict=True))


@pytest.mark.parametrize(
    "layout, settings",
    [("mb4", HALF), ("tp2 sp dp2 zero mb2", FP8), pytest.param("tp2 dp2 zero mb2", HALF, marks=pytest.mark.nightly)],
    ids=["half", "fp8", "half, cut"],
)
def test_narrow_state_resumed_under_its_own_layout_gives_the_same_bits(
    world: Worlds, tmp_path: Path, layout: str, settings: Changes
) -> None:
    ranks, changes = read_layout(layout)
    mine = {**settings, **changes, "hidden_dropout": 0.1}
    through = world(ranks).run(train_and_save, mine, None, BEFORE + AFTER)
    world(ranks).run(train_and_save, mine, str(tmp_path), BEFORE)
    assert_same_bits(world(ranks).run(resume_and_train, mine, str(tmp_path), AFTER), through)


@pytest.mark.parametrize(
    "writer, reader",
    [
        (FP8, PLAIN),
        (PLAIN, FP8),
        pytest.param(FP8, HALF, marks=pytest.mark.nightly),
        pytest.param(FP8, MODELS["llama"], marks=pytest.mark.nightly),
    ],
    ids=["fp8-to-plain", "plain-to-fp8", "fp8-to-half", "fp8-to-fp32"],
)
def test_state_of_one_format_is_read_by_another_and_under_another_layout(
    world: Worlds, tmp_path: Path, writer: Changes, reader: Changes
) -> None:
    world(2).run(train_and_save, {**writer, "tensor_model_parallel_size": 2}, str(tmp_path), BEFORE)
    resumed = outcome(
        world(2).run(
            resume_and_train, {**reader, "use_distributed_optimizer": True, "micro_batch_size": 2}, str(tmp_path), AFTER
        )
    )
    losses, _, _ = train_and_save(PLAIN, None, BEFORE + AFTER)
    assert resumed.losses == pytest.approx(losses[BEFORE:], rel=1e-2)
    saved = open_native_checkpoint(next(tmp_path.glob("iter_*")))
    assert {format.dtype for name, format in saved.formats.items() if name.startswith("optimizer.")} == {torch.float32}


def test_masters_in_the_cpus_memory_are_saved_and_loaded_as_any_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away: dict[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.6, "clip_grad": 0.0}
    plain = {**PLAIN, "clip_grad": 0.0}
    through = train_and_save(plain, None, BEFORE + AFTER)
    monkeypatch.setattr(trainer, "has_separate_memory", lambda device: True)
    train_and_save({**PLAIN, **away}, str(tmp_path / "away"), BEFORE)
    monkeypatch.undo()
    assert_same_bits([resume_and_train(plain, str(tmp_path / "away"), AFTER)], [through])
    train_and_save(plain, str(tmp_path / "plain"), BEFORE)
    monkeypatch.setattr(trainer, "has_separate_memory", lambda device: True)
    assert_same_bits([resume_and_train({**PLAIN, **away}, str(tmp_path / "plain"), AFTER)], [through])
