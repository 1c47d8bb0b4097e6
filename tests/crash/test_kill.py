"""A trainer that is killed with SIGKILL, again and again, at random moments: it loses nothing that was saved, and arrives
at the same bits as one that was left alone.

Its saves are asynchronous and older checkpoints are deleted, so that a kill meets training, copying, writing, the commit,
the deletion, and the start of the next life, loading included.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.checkpoint_folders import iteration_folder
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.verify.compare.checkpoints import compare_sources
from megatron.verify.state_inventory import compare_training_states
from tests.conftest import NOTES
from tests.crash.lives import LAYOUTS, Lives


def killed_again_and_again(folder: Path, name: str, kills: int, seed: int) -> str:
    """Kill a run so often, let it finish, and compare it with one that was left alone. Returns what happened, in words."""
    layout = LAYOUTS[name]
    choose, alone = random.Random(seed), Lives(folder / "alone", layout)
    alone.live()
    expected = open_native_checkpoint(iteration_folder(alone.folder, layout.iterations))
    done, runs, total, lost = 0, 0, 0, 0
    while done < kills:
        lives, finished = Lives(folder / f"killed{runs}", layout, startup=3.0), False
        while done + len(lives.newest) < kills and not finished:
            finished = lives.live_and_die(choose)
        assert lives.newest == sorted(lives.newest), f"progress went back: {lives.newest}"
        lives.live()
        assert lives.look() == layout.iterations
        found = open_native_checkpoint(iteration_folder(lives.folder, layout.iterations))
        differences = [str(one) for one in compare_sources(found, expected)]
        assert not differences, f"after deaths at {lives.newest}:\n" + "\n".join(differences[:20])
        assert all(one.is_equal for one in compare_training_states(found, expected, world_size=layout.ranks))
        done, runs, total = done + len(lives.newest), runs + 1, total + (lives.newest or [0])[-1]
        lost += sum(a == b for a, b in zip([0, *lives.newest], lives.newest))
    return (
        f"{name}: {done} kills in {runs} runs of {layout.iterations} iterations, {lost} of them before anything new was saved; the last "
        f"deaths found {total} iterations done; every end is bit-equal to that of a run that was left alone"
    )


@pytest.mark.parametrize(
    "name, kills",
    [
        pytest.param(name, kills, marks=[pytest.mark.nightly] if place else [])
        for place, (name, kills) in enumerate(zip(LAYOUTS, (8, 4), strict=True))
    ],
)
def test_a_trainer_killed_at_random_moments_arrives_at_the_same_bits(name: str, kills: int, tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, name, kills, seed=kills)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_trainer_killed_a_hundred_times_arrives_at_the_same_bits(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.config.stash[NOTES].append(killed_again_and_again(tmp_path, name, 100, seed=1))
