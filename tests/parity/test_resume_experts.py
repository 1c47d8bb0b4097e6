"""Networks with experts: save under one layout of experts, resume under another, and go on as if nothing had happened."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.helpers.training import Outcome, differences, outcome
from tests.helpers.world import Worlds
from tests.parity.table import MODELS, read_layout
from tests.parity.test_resume import AFTER, BEFORE, resume_and_train, train_and_save

PAIRS = (("moe", "", "ep2 dp2 zero"), ("moe", "ep4 dp4 alltoall zero", "tp2 etp1"), ("moe-bias", "tp2", "ep2 dp2"),
         ("moe-bias", "etp2 ep2 dp4 zero overlap-reduce bucket900", ""), ("moe-bias", "dp2 zero", "tp2 sp ep2 etp2 dp2"),
         ("moe-shared-bias", "tp2 ep2 dp2 zero alltoall", "pp2 vpp2 ep2 dp2"), ("moe-no-aux", "pp2 ep2 dp2", "tp2 sp ep4 etp1 dp2"),
         ("moe-no-aux", "ep4 dp4 zero", ""))


@cache
def never_stopped(model: str) -> Outcome:
    """The serial run that goes on; its losses and norms after the save."""
    losses, norms, held = train_and_save({**MODELS[model], "fp64": True}, None, BEFORE + AFTER)
    return outcome([(losses[BEFORE:], norms[BEFORE:], held)])


@pytest.mark.parametrize("model, writer, reader", PAIRS)
def test_a_run_with_experts_resumed_under_another_layout_goes_on_as_if_it_had_not_stopped(
        world: Worlds, tmp_path: Path, model: str, writer: str, reader: str) -> None:
    ranks, changes = read_layout(writer)
    world(ranks).run(train_and_save, {**MODELS[model], "fp64": True, **changes}, str(tmp_path), BEFORE)
    ranks, changes = read_layout(reader)
    resumed = outcome(world(ranks).run(resume_and_train, {**MODELS[model], "fp64": True, **changes}, str(tmp_path), AFTER))
    problems = differences(resumed, never_stopped(model), 1e-10)
    assert not problems, "\n".join(problems)
