"""One rank of several raises, is killed, is stopped or sleeps: the others name it and its place, and end in bounded time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.ranks import HOWS, PHASES, Case, Outcome, finished, started

HANG = 6.0
BOUND = 10.0  # seconds from a failure, or from when a hang is noticed, to the end of all ranks
# A phase in the words of the run; of a rank that was killed or stopped, the others know the last pulse and the collective.
WORDS = {"start-up": "start-up", "data": "data of microbatch", "forward": "training, iteration 2, forward of stage",
         "backward": "training, iteration 2, backward of stage", "reduce": "training, iteration 2, reduce of stage",
         "optimizer": "training, iteration 2, optimizer", "save": "save, iteration 2", "evaluation": "evaluation, iteration 2"}
# Those of one row run at the same time, since they mostly wait.
SUITE = (Case("raise", "backward", rank=2, layout="tensor"), Case("kill", "optimizer"), Case("stop", "reduce", hang=HANG),
         Case("sleep", "data", rank=2, layout="pipeline", hang=HANG))


def check(case: Case, found: Outcome) -> None:
    """Who failed, where and how is said, in time."""
    survivors = "\n".join(text for rank, text in enumerate(found.output) if rank != case.rank)
    hangs = case.how in ("stop", "sleep")
    assert found.seconds < BOUND + (case.hang if hangs else 0.0) + 5.0 * hangs, f"{found.seconds:.1f} s: {found.all}"
    if case.how == "raise":
        assert f"ends, since this failed first: rank {case.rank} on node" in survivors, found.all
        assert "ValueError: the planted failure" in survivors and WORDS[case.phase] in survivors, found.all
        assert "faults/ranks.py:" in survivors and " in fault" in survivors, "the line is named"
        assert "the planted failure" in found.files and "last collectives" in found.files
    elif case.how == "kill":
        assert f"rank {case.rank} is gone, and the others cannot go on" in survivors, found.all
        assert f"rank {case.rank} was last seen on node" in survivors and f" noticed it in {WORDS[case.phase].partition(',')[0]}" in survivors, found.all
    else:
        assert f"the others wait for rank {case.rank}" in survivors, found.all
        assert ("DOES NOT ANSWER" in survivors) == (case.how == "stop"), found.all
        if case.how == "sleep":
            assert f"rank {case.rank} on node" in survivors and WORDS[case.phase] in survivors, found.all
            assert "time.sleep(3600)" in found.files, "its stack shows where it sleeps"


@pytest.mark.slow
def test_the_failing_rank_is_named_with_its_phase_and_all_end_in_time(tmp_path: Path) -> None:
    going = [started(case, tmp_path) for case in SUITE]
    for one in going:
        check(one.case, finished(one))


@pytest.mark.nightly
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("layout", ["data", "tensor", "pipeline"])
def test_every_way_to_fail_in_every_phase(tmp_path: Path, phase: str, layout: str) -> None:
    for how in HOWS if phase != "start-up" else ("raise", "kill"):  # whose hangs only the longest time-out ends
        hang = HANG if how in ("stop", "sleep") else 60.0
        case = Case(how, phase, rank=2 if phase == "backward" else 1, layout=layout, hang=hang)
        began = time.monotonic()
        check(case, finished(started(case, tmp_path)))
        assert time.monotonic() - began < 90.0
