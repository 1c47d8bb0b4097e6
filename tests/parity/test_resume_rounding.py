"""Delayed scales: histories are saved with the weights, or begin where there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.training.checkpoint.checkpointing import Checkpoint
from tests.helpers import tiny
from tests.helpers.resuming import AFTER, BEFORE, resume_and_train, train_and_save
from tests.helpers.training import outcome, train_on
from tests.parity.table import MODELS


def test_delayed_scales_resume_to_the_last_bit(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        **MODELS["fp8-delayed"],
        "bf16": True,
        "use_distributed_optimizer": True,
        "fp8_param_gather": True,
    }
    whole = outcome([train_and_save(changes, None, BEFORE + AFTER)])
    train_and_save(changes, str(tmp_path), BEFORE)
    resumed = outcome([resume_and_train(changes, str(tmp_path), AFTER)])
    assert (resumed.losses, resumed.norms) == (whole.losses[BEFORE:], whole.norms[BEFORE:])
    afresh = tiny.trainer_of(tiny.run_of(tiny.config(**changes, load=str(tmp_path))))
    assert Checkpoint(afresh).resume()
    for scaling in (module for module in afresh.stages[0].modules() if hasattr(module, "history")):
        scaling.load(scaling.history * 0.0)
    assert train_on(afresh, AFTER)[0] != resumed.losses, "a history that is lost would show"


def test_a_run_can_begin_to_round_at_a_checkpoint_without_histories(tmp_path: Path) -> None:
    train_and_save({"bf16": True}, str(tmp_path), BEFORE)
    losses, _, _ = resume_and_train({**MODELS["fp8-delayed"], "bf16": True}, str(tmp_path), AFTER)
    plain, _, _ = resume_and_train({"bf16": True}, str(tmp_path), AFTER)
    assert losses == pytest.approx(plain, rel=0.02) and losses != plain
