"""Saves beside training: snapshots, one at a time, failures that cost nothing, and what may be deleted."""

from __future__ import annotations

import errno
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import checkpoint_folders
from megatron.core.dist_checkpointing import saver as saver_module
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError, SavedRunConfig, checkpoints_to_try
from megatron.core.dist_checkpointing.files import DISK
from megatron.core.dist_checkpointing.load import load_into_sharded_state, open_first_valid
from megatron.core.dist_checkpointing.saver import CheckpointSaver, SaveOutcome, SavePolicy, save
from megatron.core.parallel import collectives
from tests.helpers.checkpoints import complete_iterations
from tests.helpers.world import Worlds
from tests.unit.dist_checkpointing.failing_files import BROKEN, FULL, READ_ONLY, Faulty
from tests.unit.dist_checkpointing.held import Layout, mesh_of

BACKGROUND = SavePolicy(asynchronous=True)
ABOUT = SavedRunConfig({}, 1)


def state_of(value: float) -> dict[str, Any]:
    return {
        "model.a": torch.full((64, 3), value),
        "model.b": torch.full((7,), value).bfloat16(),
        "run.progress": {"value": [value]},
    }


def loaded(folder: Path, step: int | None = None) -> float:
    """The one number that everything in a checkpoint is."""
    target: dict[str, Any] = {**state_of(-1.0), "run.progress": None}
    values = load_into_sharded_state(target, open_first_valid(checkpoints_to_try(folder, step))[0])
    (value,) = values["run.progress"]["value"]
    assert bool((target["model.a"] == value).all()) and bool((target["model.b"] == value).all())
    return value


def test_what_changes_right_after_the_start_of_a_save_does_not_leak_into_it(tmp_path: Path) -> None:
    gate, state = threading.Event(), state_of(1.0)
    saver = CheckpointSaver(tmp_path, rules=BACKGROUND, files=Faulty(gate=gate))
    saver.start(state, 10, ABOUT)
    assert saver.is_busy
    state["model.a"].fill_(5.0)
    state["model.b"].fill_(5.0)
    state["run.progress"]["value"][0] = 5.0
    assert saver.poll() is None and complete_iterations(tmp_path) == [], (
        "nothing waits for the disk, and nothing is promised yet"
    )
    gate.set()
    outcome = saver.finish()
    assert (
        outcome is not None
        and not outcome.problems
        and outcome.folder == tmp_path / "iter_0000010"
        and not saver.is_busy
    )
    assert outcome.size == checkpoint_folders.folder_num_bytes(outcome.folder)
    assert loaded(tmp_path) == 1.0


def test_polling_brings_a_save_to_its_end_without_waiting(tmp_path: Path) -> None:
    gate = threading.Event()
    saver = CheckpointSaver(tmp_path, rules=BACKGROUND, files=Faulty(gate=gate))
    saver.start(state_of(1.0), 10, ABOUT)
    assert [saver.poll() for _ in range(5)] == [None] * 5, "the disk does not go on, and nobody waits for it"
    gate.set()
    while (outcome := saver.poll()) is None:
        time.sleep(0.001)
    assert outcome.iteration == 10 and outcome.blocked < outcome.seconds
    assert saver.poll() is None and saver.finish() is None and loaded(tmp_path) == 1.0


def test_host_memory_is_taken_once_and_used_again(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, rules=BACKGROUND)
    saver.plan_and_allocate(state_of(0.0))
    memory = saver._snapshot._memory
    assert len(memory) == 64 * 3 * 4 + 7 * 2, "one copy of what is written, and no more"
    for iteration in range(1, 4):
        saver.start(state_of(float(iteration)), iteration, ABOUT)
        assert saver._snapshot._memory is memory
        assert saver.finish().problems == ()
    assert [loaded(tmp_path, iteration) for iteration in (1, 2, 3)] == [1.0, 2.0, 3.0]


def test_the_plan_is_made_anew_when_the_tensors_change(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, rules=BACKGROUND)
    for iteration, state in (
        (1, state_of(1.0)),
        (2, state_of(2.0) | {"model.c": torch.ones(1000)}),
        (3, state_of(3.0)),
    ):
        saver.start(state, iteration, ABOUT)
        assert saver.finish().problems == ()
        assert set(open_first_valid(checkpoints_to_try(tmp_path))[0].formats) == {
            name for name in state if name.startswith("model.")
        }


def test_a_machine_without_the_memory_for_a_copy_saves_while_training_waits_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "_available_host_memory", lambda: 900)
    saver = CheckpointSaver(tmp_path, rules=BACKGROUND)
    saver.start(state_of(1.0), 10, ABOUT)
    assert len(saver._snapshot._memory) == 0
    (note,) = saver.finish().notes
    assert note.startswith("training waits for saves: a copy to write from takes 7.82e-07 GB of memory")
    assert loaded(tmp_path) == 1.0


def test_memory_that_is_free_is_known_on_this_machine() -> None:
    free = saver_module._available_host_memory()
    assert free is not None and free > 1_000_000


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a full disk at the first byte": ({"fault": FULL, "where": "rank_"}, "No space left"),
    "a full disk later on": ({"fault": FULL, "where": "rank_", "after": 2}, "No space left"),
    "a full disk at the manifest": ({"fault": FULL, "where": "manifest"}, "No space left"),
    "a full disk at the commit": ({"fault": FULL, "where": "commit"}, "No space left"),
    "a disk that fails to write": ({"fault": BROKEN, "where": "rank_"}, "Input/output error"),
    "a disk that fails to sync": ({"fault": BROKEN, "where": "rank_", "on": "sync"}, "Input/output error"),
    "a disk that fails to sync names": ({"fault": BROKEN, "where": ".tmp", "on": "sync_folder"}, "Input/output error"),
    "a disk that fails to rename": ({"fault": BROKEN, "where": ".tmp", "on": "rename"}, "Input/output error"),
    "a folder that became read-only": ({"fault": READ_ONLY, "on": "make_folder"}, "Read-only file system"),
    "a folder that became read-only midway": (
        {"fault": READ_ONLY, "where": "rank_", "on": "create"},
        "Read-only file system",
    ),
    "writes that take nothing": ({"at_once": 0, "where": ""}, "a write took no bytes"),
}


@pytest.mark.parametrize(
    "rules", [SavePolicy(keep_last=1), SavePolicy(True, keep_last=1)], ids=["waiting", "background"]
)
@pytest.mark.parametrize("name", FAULTS)
def test_a_save_that_fails_is_told_costs_no_older_one_and_the_next_one_succeeds(
    tmp_path: Path, name: str, rules: SavePolicy
) -> None:
    faults, words = FAULTS[name]
    saver = CheckpointSaver(tmp_path, rules=rules)
    assert ended(saver, 10, 1.0).problems == ()
    saver.files = Faulty(**faults)
    outcome = ended(saver, 20, 2.0)
    assert len(outcome.problems) == 1 and words in outcome.problems[0], outcome.problems
    assert loaded(tmp_path) == 1.0 and complete_iterations(tmp_path) == [10]
    saver.files = DISK
    assert ended(saver, 20, 3.0).problems == () and loaded(tmp_path) == 3.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000020", checkpoint_folders.TRACKER]


def ended(saver: CheckpointSaver, iteration: int, value: float) -> SaveOutcome:
    saver.start(state_of(value), iteration, ABOUT)
    outcome = saver.finish()
    assert outcome is not None
    return outcome


def test_a_full_disk_is_given_the_room_back_at_once(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, files=Faulty("rank_", fault=FULL, after=1))
    assert ended(saver, 10, 1.0).problems
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_short_writes_are_gone_on_with(tmp_path: Path, at_once: int) -> None:
    files = Faulty(at_once=at_once)
    save(state_of(1.0), tmp_path, 10, ABOUT, files=files)
    assert loaded(tmp_path) == 1.0 and files.written > 1000


def test_a_tracker_that_cannot_be_written_is_a_note_and_the_checkpoint_counts(tmp_path: Path) -> None:
    outcome = ended(
        CheckpointSaver(tmp_path, files=Faulty(checkpoint_folders.TRACKER.removesuffix(".txt"), fault=FULL)), 10, 1.0
    )
    assert outcome.problems == () and "is not up to date: [Errno 28]" in outcome.notes[0] and loaded(tmp_path) == 1.0


def test_a_checkpoint_that_cannot_be_deleted_is_a_note(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, rules=SavePolicy(keep_last=1))
    ended(saver, 10, 1.0)
    saver.files = Faulty("iter_0000010", fault=errno.EACCES, on="rename")
    outcome = ended(saver, 20, 2.0)
    assert outcome.problems == () and "iter_0000010 cannot be deleted" in outcome.notes[0]
    assert complete_iterations(tmp_path) == [10, 20]


def test_nothing_is_deleted_for_a_checkpoint_that_does_not_read_back(tmp_path: Path) -> None:
    class Lying(Faulty):
        """Takes bytes and keeps others."""

        def create(self, path: Path) -> Any:
            file = super().create(path)
            if path.suffix == ".safetensors":
                write = file.write
                file.write = lambda content: write(memoryview(bytes(content[:-1]) + bytes([content[-1] ^ 1])))
            return file

    for rules in (SavePolicy(keep_last=1), SavePolicy(interval=100)):
        folder = tmp_path / str(rules.interval)
        saver = CheckpointSaver(folder, rules=rules)
        ended(saver, 10, 1.0)
        saver.files = Lying()
        (problem,) = ended(saver, 20, 2.0).problems
        assert "does not read back" in problem and "iter_0000020." in problem
        assert complete_iterations(folder) == [10] and loaded(folder) == 1.0


def test_what_cannot_be_saved_at_once_is_an_error_for_those_who_wait(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="the checkpoint of iteration 10 cannot be written to .*\n.*No space left"
    ):
        save(state_of(1.0), tmp_path, 10, ABOUT, files=Faulty("rank_", fault=FULL))


def save_with_one_bad_rank(folder: Path, asynchronous: bool) -> list[Any]:
    """On four ranks: rank 2's disk is full in the second save; each rank's outcomes."""
    mesh = mesh_of(Layout(1, 1, False))
    saver = CheckpointSaver(folder, mesh.world, rules=SavePolicy(asynchronous, keep_last=1))
    result = []
    for iteration in (1, 2, 3):
        saver.files = Faulty("rank_00002", fault=FULL) if iteration == 2 else DISK
        state = {f"t{number}": torch.full((100,), float(iteration)) for number in range(8)}
        saver.start(state, iteration, SavedRunConfig({}, 4))
        outcome = None
        while outcome is None:  # as a loop of training does
            outcome = saver.poll()
        result.append((outcome.iteration, outcome.problems, complete_iterations(folder)))
    return result


def poll_to_the_end(folder: Path) -> list[int]:
    """On every rank: two saves in which no poll may wait for the others; iterations that were saved."""
    mesh, result = mesh_of(Layout(1, 1, False)), []
    saver = CheckpointSaver(folder, mesh.world, rules=BACKGROUND)
    for iteration in (1, 2):
        saver.start(state_of(float(iteration)), iteration, SavedRunConfig({}, 4))
        outcome = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "all_reduce", None)  # whose answer is waited for
            while outcome is None:
                outcome = saver.poll()
        assert not outcome.problems and complete_iterations(folder)[-1] == iteration, "it has been committed"
        result.append(outcome.iteration)
    return result


def test_no_poll_waits_for_other_ranks_and_none_takes_an_answer_for_that_of_another_save(
    world: Worlds, tmp_path: Path
) -> None:
    assert world(4).run(poll_to_the_end, tmp_path) == [[1, 2]] * 4


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "background"])
def test_all_ranks_hear_of_the_one_that_failed_and_save_together_again(
    world: Worlds, tmp_path: Path, asynchronous: bool
) -> None:
    results = world(4).run(save_with_one_bad_rank, tmp_path, asynchronous)
    assert all(result == results[0] for result in results)
    (_, good, _), (_, (failure,), left), last = results[0]
    assert good == () and left == [1] and last == (3, (), [3])
    assert re.fullmatch(
        r"rank 2: \[Errno 28\] No space left on device: '.*/iter_0000002\.\w{8}\.tmp/rank_00002.safetensors'", failure
    )


def die_in_a_save(folder: Path) -> None:
    saver = CheckpointSaver(folder, rules=BACKGROUND, files=Faulty(gate=threading.Event()))
    saver.start(state_of(2.0), 20, ABOUT)
    while not list(folder.glob("*.tmp/rank_*")):
        time.sleep(0.01)
    raise SystemExit(3)


def test_a_process_that_ends_in_the_middle_of_a_save_does_not_hang_and_leaves_only_remains(tmp_path: Path) -> None:
    import multiprocessing

    save(state_of(1.0), tmp_path, 10, ABOUT)
    process = multiprocessing.get_context("spawn").Process(target=die_in_a_save, args=(tmp_path,))
    process.start()
    process.join(600)
    assert process.exitcode == 3
    (remains,) = tmp_path.glob("iter_0000020.*.tmp")
    assert remains.is_dir() and loaded(tmp_path) == 1.0
    save(state_of(3.0), tmp_path, 30, ABOUT)
    assert not remains.exists() and complete_iterations(tmp_path) == [10, 30]
