"""Delayed scales: save under one layout, resume under another, and what is rounded is rounded as if nothing had happened."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.training.checkpointing import Checkpoint
from tests.helpers import tiny
from tests.helpers.training import Outcome, differences, outcome, train_on
from tests.helpers.world import Worlds
from tests.parity.table import MODELS, read_layout
from tests.parity.test_resume import AFTER, BEFORE, resume_and_train, train_and_save

# Of one microbatch's experts, the first step scales by the tokens of a rank: it is the writer's, which is the serial run.
PAIRS = (("fp8-delayed", "tp2 sp", "pp2 dp2 zero"), ("fp8-delayed", "pp2 vpp2 dp2", ""), ("fp8-experts", "", "ep2 dp2 alltoall"),
         ("fp8-tensorwise", "dp2 fp8-gather", "tp2 sp"), ("fp8-tensorwise", "pp2", "tp2 dp2 fp8-gather"))


@cache
def never_stopped(model: str) -> Outcome:
    """The serial run that goes on; its losses and norms after the save."""
    losses, norms, held = train_and_save({**MODELS[model], "fp64": True}, None, BEFORE + AFTER)
    return outcome([(losses[BEFORE:], norms[BEFORE:], held)])


@pytest.mark.parametrize("model, writer, reader", PAIRS)
def test_a_run_with_delayed_scales_resumed_under_another_layout_goes_on_as_if_it_had_not_stopped(
        world: Worlds, tmp_path: Path, model: str, writer: str, reader: str) -> None:
    ranks, changes = read_layout(writer)
    world(ranks).run(train_and_save, {**MODELS[model], "fp64": True, **changes}, str(tmp_path), BEFORE)
    ranks, changes = read_layout(reader)
    resumed = outcome(world(ranks).run(resume_and_train, {**MODELS[model], "fp64": True, **changes}, str(tmp_path), AFTER))
    problems = differences(resumed, never_stopped(model), 1e-10)
    assert not problems, "\n".join(problems)


def test_delayed_scales_resume_to_the_last_bit(tmp_path: Path) -> None:
    changes: dict[str, Any] = {**MODELS["fp8-delayed"], "bf16": True, "use_distributed_optimizer": True, "fp8_param_gather": True}
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
