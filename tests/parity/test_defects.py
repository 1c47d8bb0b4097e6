"""The table can see: every planted mistake makes a row that should notice it differ from the serial run; nightly, all of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from tests.conftest import NOTES
from tests.helpers.training import Outcome, differences, outcome, train, train_alone
from tests.helpers.world import Worlds
from tests.parity.defects import DEFECTS, Defect, train_planted_here
from tests.parity.table import MODELS, PRECISIONS, ROWS, Changes, read_layout

STEPS, TOLERANCE = 2, 1e-10


@cache
def serial(model: str) -> Outcome:
    """The run that rows of this network are compared with."""
    return train_alone({**MODELS[model], **PRECISIONS["fp64"]}, STEPS)


@pytest.fixture(scope="module")
def caught(request: pytest.FixtureRequest) -> Iterator[dict[str, bool]]:
    """Which defects were noticed; the count is said at the end of the whole test run."""
    found: dict[str, bool] = {}
    yield found
    share = 100 * sum(found.values()) / max(1, len(found))
    request.config.stash[NOTES].append(f"planted defects: {len(found)}, caught: {sum(found.values())} ({share:.0f}%)")


def notices(world: Worlds, layout: str, model: str, defect: Defect) -> bool:
    """Whether a row differs from the serial run, or its ranks from each other, when the defect is planted."""
    ranks, cut = read_layout(layout)
    changes: Changes = {**MODELS[model], **PRECISIONS["fp64"], **cut}
    if ranks == 1:
        results = [train_planted_here(defect.name, changes, STEPS)]
    else:
        results = world(ranks).run(train_planted_here, defect.name, changes, STEPS)
    try:
        return bool(differences(outcome(results), serial(model), TOLERANCE))
    except AssertionError:  # ranks disagree
        return True


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_planted_defect_is_caught(world: Worlds, caught: dict[str, bool], defect: Defect) -> None:
    row = defect.rows[0]
    serial(row[1])
    caught[defect.name] = notices(world, *row, defect)
    assert caught[defect.name], f"{row} did not notice that {defect.name}"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "defect", [defect for defect in DEFECTS if len(defect.rows) > 1], ids=lambda defect: defect.name
)
def test_every_other_row_that_should_catch_a_defect_does(world: Worlds, defect: Defect) -> None:
    blind = [row for row in defect.rows[1:] if serial(row[1]) and not notices(world, *row, defect)]
    assert not blind, f"{blind} did not notice that {defect.name}"


def test_defects_are_taken_back(world: Worlds) -> None:
    for layout in ("tp2 sp", "pp2"):
        ranks, cut = read_layout(layout)
        assert differences(train(world, ranks, {**PRECISIONS["fp64"], **cut}, STEPS), serial("gpt"), TOLERANCE) == []


def test_every_row_that_must_notice_a_defect_is_in_the_table() -> None:
    assert {row for defect in DEFECTS for row in defect.rows} <= set(ROWS)
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)
