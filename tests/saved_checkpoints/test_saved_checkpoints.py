"""Checkpoints written by earlier versions of this code load, and training goes on with the losses that followed then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.world import Worlds
from tests.saved_checkpoints.cases import CASES, go_on, unpack


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_an_earlier_version_goes_on_with_its_losses(name: str, world: Worlds, tmp_path: Path) -> None:
    settings, recorded = unpack(name, tmp_path)
    assert list(recorded) == list(CASES[name].readers)
    for reader, steps in recorded.items():
        found = go_on(name, reader, settings, tmp_path, world)
        for what in ("losses", "norms"):
            assert found[what] == pytest.approx(steps[what], rel=1e-10), f"{what} under {reader or 'one rank'}"
