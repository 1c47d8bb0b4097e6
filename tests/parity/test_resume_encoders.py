"""BERT, T5, latents and tokens ahead: save under one layout, resume under another, and go on as if nothing had happened."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.helpers.training import Outcome, differences, outcome
from tests.helpers.world import Worlds
from tests.parity.table import MODELS, read_layout
from tests.parity.test_resume import AFTER, BEFORE, resume_and_train, train_and_save

PAIRS = (("bert", "", "tp2 sp pp2"), ("bert", "pp2 vpp2", "dp2 zero"), ("bert-published", "tp2 dp2 zero", "pp4"),
         ("t5", "pp2", "tp2 sp"), ("t5-v1.0", "pp2 vpp3", ""), ("t5-v1.0", "dp2 zero", "pp2 first-layers4"),
         ("t5-v1.1", "tp2 pp2 dp2 zero", "dp2"), ("mla-q", "tp2 sp dp2 zero", "pp2 vpp2"), ("mtp2", "pp4 layout=E|ttt|tmm|L", "tp2 sp"),
         ("mtp2-tied-packed", "dp2 zero", "pp4 layout=Et|t|ttmm|L"), ("mla-mtp2", "cp2 tp2 sp", "pp2 dp2 zero"))


@cache
def never_stopped(model: str) -> Outcome:
    """The serial run that goes on; its losses and norms after the save."""
    losses, norms, held = train_and_save({**MODELS[model], "fp64": True}, None, BEFORE + AFTER)
    return outcome([(losses[BEFORE:], norms[BEFORE:], held)])


@pytest.mark.parametrize("model, writer, reader", PAIRS)
def test_a_run_resumed_under_another_layout_goes_on_as_if_it_had_not_stopped(
        world: Worlds, tmp_path: Path, model: str, writer: str, reader: str) -> None:
    ranks, changes = read_layout(writer)
    world(ranks).run(train_and_save, {**MODELS[model], "fp64": True, **changes}, str(tmp_path), BEFORE)
    ranks, changes = read_layout(reader)
    resumed = outcome(world(ranks).run(resume_and_train, {**MODELS[model], "fp64": True, **changes}, str(tmp_path), AFTER))
    problems = differences(resumed, never_stopped(model), 1e-10)
    assert not problems, "\n".join(problems)
