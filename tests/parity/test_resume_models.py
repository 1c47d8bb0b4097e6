"""Networks of every kind, and every update rule: save under one layout, resume under another, and go on as if nothing had happened."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.helpers.resuming import AFTER, BEFORE, never_stopped_run, resume_and_train, train_and_save
from tests.helpers.training import Outcome, differences, outcome
from tests.helpers.world import Worlds
from tests.parity.table import MODELS, read_layout

ENCODERS = (
    ("bert", "", "tp2 sp pp2"),
    ("bert", "pp2 vpp2", "dp2 zero"),
    ("bert-published", "tp2 dp2 zero", "pp4"),
    ("t5", "pp2", "tp2 sp"),
    ("t5-v1.0", "pp2 vpp3", ""),
    ("t5-v1.0", "dp2 zero", "pp2 first-layers4"),
    ("t5-v1.1", "tp2 pp2 dp2 zero", "dp2"),
)
LATENT = (
    ("mla-q", "tp2 sp dp2 zero", "pp2 vpp2"),
    ("mtp2", "pp4 layout=E|ttt|tmm|L", "tp2 sp"),
    ("mtp2-tied-packed", "dp2 zero", "pp4 layout=Et|t|ttmm|L"),
    ("mla-mtp2", "cp2 tp2 sp", "pp2 dp2 zero"),
)
EXPERTS = (
    ("moe", "", "ep2 dp2 zero"),
    ("moe", "ep4 dp4 alltoall zero", "tp2 etp1"),
    ("moe-bias", "tp2", "ep2 dp2"),
    ("moe-bias", "etp2 ep2 dp4 zero overlap-reduce bucket900", ""),
    ("moe-bias", "dp2 zero", "tp2 sp ep2 etp2 dp2"),
    ("moe-shared-bias", "tp2 ep2 dp2 zero alltoall", "pp2 vpp2 ep2 dp2"),
    ("moe-no-aux", "pp2 ep2 dp2", "tp2 sp ep4 etp1 dp2"),
    ("moe-no-aux", "ep4 dp4 zero", ""),
)
# Histories of scales. Of one microbatch's experts, the first step scales by the tokens of a rank: it is the writer's, the serial run.
ROUNDED = (
    ("fp8-delayed", "tp2 sp", "pp2 dp2 zero"),
    ("fp8-delayed", "pp2 vpp2 dp2", ""),
    ("fp8-experts", "", "ep2 dp2 alltoall"),
    ("fp8-tensorwise", "dp2 fp8-gather", "tp2 sp"),
    ("fp8-tensorwise", "pp2", "tp2 dp2 fp8-gather"),
)
RULES = (
    ("muon", "", "tp2 muon-distributed dp2 zero mb2"),
    ("muon", "dp4 zero bucket600 mb2", "tp2 dp2 fsdp mb2"),
    ("muon-moe", "tp2 ep2 dp2 zero mb2", "pp2 ep2 dp2 mb2"),
    ("adafactor-moe", "tp2 ep2 dp2 zero mb2", "pp2 ep2 dp2 mb2"),
    ("adafactor-gqa", "dp2 fsdp mb2", "tp4 mb2"),
    ("soap", "dp4 zero bucket600 mb2", "tp2 dp2 fsdp mb2"),
    ("soap-moe", "tp2 ep2 dp2 zero mb2", "pp2 ep2 dp2 mb2"),
    pytest.param("muon-joined", "tp2 pp2 mb2", "", marks=pytest.mark.nightly),
    pytest.param("soap-plain", "", "tp2 dp2 zero mb2", marks=pytest.mark.nightly),
    pytest.param("lion", "tp2 dp2 zero mb2", "", marks=pytest.mark.nightly),
)
STATES = (
    ("hybrid-odd-tensor", "tp2 dp2 zero overlap-reduce bucket600", "dp2 fsdp"),
    pytest.param("hybrid", "dp2 zero", "tp4 sp", marks=pytest.mark.nightly),
    pytest.param("hybrid-mtp", "tp2 sp", "pp2 dp2 zero", marks=pytest.mark.nightly),
    pytest.param("delta", "dp2 fsdp", "tp2 cp2 dp2 zero", marks=pytest.mark.nightly),
    pytest.param("hybrid-moe", "ep2 dp2 zero", "", marks=pytest.mark.nightly),
)
VISION = (
    ("vlm", "tp2 sp", "pp2 dp2 zero"),
    pytest.param("vlm-frozen-vit", "dp2 fsdp", "tp2", marks=pytest.mark.nightly),
    pytest.param("vlm-projector", "dp2 zero", "pp2", marks=pytest.mark.nightly),
    pytest.param("vlm-odd", "tp2 sp dp2 zero", "", marks=pytest.mark.nightly),
)

ADAPTERS = (
    pytest.param("dora", "dp2 fsdp", "tp2 sp", marks=pytest.mark.nightly),
    pytest.param("lora-mla", "tp2 sp", "dp2 fsdp", marks=pytest.mark.nightly),
    pytest.param("lora-moe", "ep2 dp2 zero overlap-gather bucket200", "ep2 dp2 fsdp", marks=pytest.mark.nightly),
)


@cache
def never_stopped(model: str) -> Outcome:
    """The serial run that goes on."""
    return never_stopped_run({**MODELS[model], "fp64": True})


@pytest.mark.parametrize(
    "model, writer, reader", (*ENCODERS, *LATENT, *EXPERTS, *ROUNDED, *RULES, *STATES, *VISION, *ADAPTERS)
)
def test_a_run_resumed_under_another_layout_goes_on_as_if_it_had_not_stopped(
    world: Worlds, tmp_path: Path, model: str, writer: str, reader: str
) -> None:
    ranks, changes = read_layout(writer)
    world(ranks).run(train_and_save, {**MODELS[model], "fp64": True, **changes}, str(tmp_path), BEFORE)
    ranks, changes = read_layout(reader)
    resumed = outcome(
        world(ranks).run(resume_and_train, {**MODELS[model], "fp64": True, **changes}, str(tmp_path), AFTER)
    )
    problems = differences(resumed, never_stopped(model), 1e-10)
    assert not problems, "\n".join(problems)
