"""One rank of several raises, is killed, is stopped or sleeps, or holds a wrong number: it is named with its place, and all end.

How soon after the failure is measured by benchmarks/failure.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.ranks import HOWS, PHASES, SHARED, Case, Outcome, finished, started

HANG = 6.0
# A phase in the words of the run; of a rank that was killed or stopped, the others know the last pulse and the collective.
WORDS = {
    "start-up": "start-up",
    "data": "training, iteration 2, data of microbatch",
    "forward": "training, iteration 2, forward of stage",
    "backward": "training, iteration 2, backward of stage",
    "reduce": "training, iteration 2, reduce of stage",
    "optimizer": "training, iteration 2, optimizer",
    "save": "save, iteration 2",
    "evaluation": "evaluation, iteration 2",
}
DIFFERS = {
    "data": "rank 1 over dp_cp differs from ranks 0, 2",
    "tensor": "rank 1 over tp differs from ranks 0, 2",
    "pipeline": "ranks 0, 2 over embed disagree, and there is no majority",
}
# Those of one row run at the same time, since they mostly wait.
SUITE = (
    Case("raise", "backward", rank=2, layout="tensor"),
    Case("kill", "optimizer"),
    Case("stop", "reduce", hang=HANG),
    Case("sleep", "data", rank=2, layout="pipeline", hang=HANG),
)


def check(case: Case, found: Outcome) -> None:
    """Who failed, where and how is said. (`finished` has seen all ranks end.)"""
    survivors = "\n".join(text for rank, text in enumerate(found.output) if rank != case.rank)
    if case.how == "raise":
        assert f"ends, since this failed first: rank {case.rank} on node" in survivors, found.all
        assert "ValueError: the planted failure" in survivors and WORDS[case.phase] in survivors, found.all
        assert "faults/ranks.py:" in survivors and " in fault" in survivors, "the line is named"
        assert "the planted failure" in found.files and "last collectives" in found.files
    elif case.how == "kill":
        assert f"rank {case.rank} is gone, and the others cannot go on" in survivors, found.all
        assert (
            f"rank {case.rank} was last seen on node" in survivors
            and f" noticed it in {WORDS[case.phase].partition(',')[0]}" in survivors
        ), found.all
    elif case.how == "nan":
        step = {"start-up": 1, "reduce": 3, "optimizer": 3, "save": 3, "evaluation": 3}.get(
            case.phase, 2
        )  # in which it is computed with
        assert f"BadStepError: iteration {step} is bad" in found.all and "is nan" in found.all, found.all
        culprits = found.all.partition("first not finite in the ")[2].partition("; ")[0]
        assert f"rank {case.rank} on node" in culprits, found.all
        assert case.layout != "data" or culprits.count(" on node ") == 1, (
            f"the others see it only in the sum: {culprits}"
        )
    elif case.how == "flip":
        step = {"start-up": 1, "save": 3, "evaluation": 3}.get(case.phase, 2)  # after which it is looked for
        assert (
            f"ReplicaMismatchError: ranks differ in what they must hold alike after iteration {step};" in found.all
        ), found.all
        assert f"{SHARED[case.layout]}: {DIFFERS[case.layout]}" in found.all, found.all
    else:
        assert f"the others wait for rank {case.rank}" in survivors, found.all
        assert ("DOES NOT ANSWER" in survivors) == (case.how == "stop"), found.all
        if case.how == "sleep":
            assert f"rank {case.rank} on node" in survivors and WORDS[case.phase] in survivors, found.all
            assert "time.sleep(3600)" in found.files, "its stack shows where it sleeps"


@pytest.mark.slow
def test_the_failing_rank_is_named_with_its_phase_and_all_end(tmp_path: Path) -> None:
    for case, found in zip(SUITE, finished(*[started(case, tmp_path) for case in SUITE]), strict=True):
        check(case, found)


def of_the_night(how: str, phase: str, layout: str) -> Case:
    """A case on the last rank or on the one before."""
    last = layout == "pipeline" if how == "flip" else phase == "backward"  # the last stage holds the embedding too
    short = how in ("stop", "sleep")
    return Case(
        how,
        phase,
        rank=2 if last else 1,
        layout=layout,
        hang=HANG if short else 60.0,
        longest=30.0 if short and phase == "start-up" else 120.0,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("layout", ["data", "tensor", "pipeline"])
@pytest.mark.parametrize("hows", [HOWS[:2], HOWS[2:4], HOWS[4:]], ids="-".join)
def test_every_way_to_fail_in_every_phase(tmp_path: Path, phase: str, layout: str, hows: tuple[str, ...]) -> None:
    cases = [of_the_night(how, phase, layout) for how in hows]
    for case, found in zip(cases, finished(*[started(case, tmp_path) for case in cases]), strict=True):
        check(case, found)
