"""Delayed scales: histories are saved with the weights, or begin where there are none. And numbers that stay in fp32 beside weights in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.checkpoint.checkpointing import Checkpointer
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
    assert Checkpointer(afresh).resume()
    for scaling in (module for module in afresh.stages[0].modules() if hasattr(module, "history")):
        scaling.load_amax_history(scaling.history * 0.0)
    assert train_on(afresh, AFTER)[0] != resumed.losses, "a history that is lost would show"


def test_a_run_can_begin_to_round_at_a_checkpoint_without_histories(tmp_path: Path) -> None:
    train_and_save({"bf16": True}, str(tmp_path), BEFORE)
    losses, _, _ = resume_and_train({**MODELS["fp8-delayed"], "bf16": True}, str(tmp_path), AFTER)
    plain, _, _ = resume_and_train({"bf16": True}, str(tmp_path), AFTER)
    assert losses == pytest.approx(plain, rel=0.02) and losses != plain


def test_what_heads_of_states_keep_in_fp32_resumes_to_the_last_bit_in_a_run_in_bf16(tmp_path: Path) -> None:
    """Flat buckets of two formats: A_log, D and dt_bias have no copy of their own among the fp32 weights."""
    changes: dict[str, Any] = {**MODELS["hybrid-odd-tensor"], "bf16": True, "use_distributed_optimizer": True}
    whole = outcome([train_and_save(changes, None, BEFORE + AFTER)])
    train_and_save(changes, str(tmp_path), BEFORE)
    resumed = outcome([resume_and_train(changes, str(tmp_path), AFTER)])
    assert (resumed.losses, resumed.norms) == (whole.losses[BEFORE:], whole.norms[BEFORE:])
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(**changes)))
    formats = {name.rpartition(".")[2]: one.dtype for name, one in trainer.stages[0].named_parameters()}
    assert {formats[name] for name in ("A_log", "D", "dt_bias")} == {torch.float32} != {formats["weight"]}
