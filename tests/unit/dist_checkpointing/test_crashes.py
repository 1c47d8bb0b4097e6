"""A crash after every single operation of a save, of the process or of the machine: the old checkpoint or the new one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import checkpoint_folders
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.load import open_first_valid
from tests.unit.dist_checkpointing.model_files import Crash, ModelFiles
from tests.unit.dist_checkpointing.two_ranks import save_as_two, version_in

SAVE = Path("/save")
Found = tuple[int, int] | None  # iteration and version of what is loaded


@dataclass(frozen=True)
class Story:
    """What lies on the disk before, what is done then, and what may be loaded: before the end, and after it."""

    before: Callable[[ModelFiles], object]
    act: Callable[[ModelFiles], object]
    old: Found
    new: Found


def nothing(files: ModelFiles) -> None:
    """An empty disk."""


def save(
    iteration: int, version: int, keep_last: int | None = None, best: int | None = None
) -> Callable[[ModelFiles], object]:
    return lambda files: save_as_two(SAVE, iteration, version, keep_last=keep_last, best=best, files=files)


def after(*acts: Callable[[ModelFiles], object]) -> Callable[[ModelFiles], object]:
    return lambda files: [act(files) for act in acts]


def dying(act: Callable[[ModelFiles], object], operation: str) -> Callable[[ModelFiles], object]:
    """Kill an act before its first operation that begins so."""

    def run(files: ModelFiles) -> None:
        trial = files.killed()
        act(trial)
        files.log, files.crash_at = (
            [],
            next(number for number, what in enumerate(trial.log) if what.startswith(operation)),
        )
        with pytest.raises(Crash):
            act(files)
        files.crash_at = None

    return run


STORIES = {
    "the first save": Story(nothing, save(10, 1), None, (10, 1)),
    "the next save": Story(save(10, 1), save(20, 2), (10, 1), (20, 2)),
    "a save that deletes older ones": Story(
        after(save(10, 1), save(20, 2)), save(30, 3, keep_last=1), (20, 2), (30, 3)
    ),
    "the same iteration again": Story(save(10, 1), save(10, 2), (10, 1), (10, 2)),
    "an earlier iteration, after going back": Story(after(save(10, 1), save(20, 2)), save(15, 3), (20, 2), (15, 3)),
    "over the remains of a save that died": Story(
        after(save(10, 1), dying(save(20, 2), "rename")), save(20, 3), (10, 1), (20, 3)
    ),
    "over a replacement that died between two names": Story(
        after(save(10, 1), dying(save(10, 2), f"rename {SAVE}/iter_0000010.00000002.tmp")),
        save(20, 3),
        (10, 1),
        (20, 3),
    ),
    "over a deletion that died": Story(
        after(save(10, 1), save(20, 2), dying(save(30, 3, keep_last=1), "rmdir")),
        save(40, 4, keep_last=2),
        (30, 3),
        (40, 4),
    ),
}


def violations(story: Story, *, samples: int = 2, **weaknesses: bool) -> list[str]:
    """Crash before and after every operation of the act; what the next process finds and may not, in words."""
    start = ModelFiles(**weaknesses)
    story.before(start)
    start.settle()
    assert seen(start) == story.old
    trial = start.killed()
    story.act(trial)
    random_, wrong = random.Random(7), []
    known: dict[object, tuple[Found | str, str]] = {}  # many crashes leave the same behind
    for crash_at in range(len(trial.log) + 1):
        files = start.killed()
        files.crash_at = crash_at
        try:
            story.act(files)
            allowed = {story.new}  # it returned: from here on the new state is a promise
        except Crash:
            allowed = {story.old, story.new}
        where = f"before {trial.log[crash_at]}" if crash_at < len(trial.log) else "at the end"
        for what, survivor in (
            ("killed", files.killed()),
            *(("power lost", other) for other in files.without_power(random_, samples)),
        ):
            formatted = survivor.shown()
            if formatted not in known:
                known[formatted] = seen(survivor), unfit_for_more(survivor)
            result, problem = known[formatted]
            if result not in allowed or problem:
                wrong.append(f"{what} {where}: {problem or result}")
    return wrong


def test_the_best_checkpoint_is_there_after_a_crash_at_any_moment() -> None:
    start = ModelFiles()
    after(save(10, 1, 1, 10), save(20, 2, 1, 10))(start)
    start.settle()
    assert (
        checkpoint_folders.iteration_of_best_link(SAVE, files=start) == 10
        and checkpoint_folders.scan_checkpoint_folder(SAVE, files=start).steps[1].iteration == 10
    )
    trial = start.killed()
    save(30, 3, 1, 30)(trial)
    assert [step.iteration for step in checkpoint_folders.scan_checkpoint_folder(SAVE, files=trial).steps] == [30]
    random_ = random.Random(7)
    for crash_at in range(len(trial.log)):
        files = start.killed()
        files.crash_at = crash_at
        with pytest.raises(Crash):
            save(30, 3, 1, 30)(files)
        for survivor in (files.killed(), *files.without_power(random_, 2)):
            best = checkpoint_folders.iteration_of_best_link(SAVE, files=survivor)
            assert best in (10, 30), trial.log[crash_at]
            open_first_valid(
                [
                    one
                    for one in checkpoint_folders.scan_checkpoint_folder(SAVE, files=survivor).steps
                    if one.iteration == best
                ],
                files=survivor,
            )


def seen(files: ModelFiles) -> Found | str:
    """What the next process loads; the text of an error it meets instead."""
    try:
        return version_in(SAVE, files=files)
    except CheckpointError as error:
        return str(error)


def unfit_for_more(files: ModelFiles) -> str:
    """Whether all that is named like a checkpoint is sound, older ones too; and whether the next process can save, load that,
    and leave no remains behind. What is wrong otherwise."""
    try:
        there = checkpoint_folders.scan_checkpoint_folder(SAVE, files=files)
        for step in there.steps:
            open_first_valid([step], files=files)
        if there.damaged:
            return str(there.damaged)
        save_as_two(SAVE, 50, 9, files=files)
    except CheckpointError as error:
        return str(error)
    result = seen(files)
    remains = [
        entry.name
        for entry in files.list_entries(SAVE)
        if entry.name.endswith((".tmp", ".old", ".gone")) and entry.is_folder
    ]
    return f"a further save leaves {remains} and loads {result}" if remains or result != (50, 9) else ""


@pytest.mark.parametrize("name", STORIES)
def test_whenever_a_save_dies_the_old_checkpoint_or_the_new_one_is_loaded(name: str) -> None:
    wrong = violations(STORIES[name])
    assert not wrong, f"{len(wrong)} of the crashes end badly:\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("weakness", ["syncs_files", "syncs_folders"])
def test_a_disk_that_does_not_sync_is_found_out_so_that_this_test_bites(weakness: str) -> None:
    assert violations(STORIES["the next save"], **{weakness: False})


def test_a_crash_is_raised_through_every_handler_of_errors() -> None:
    files = ModelFiles()
    files.crash_at = 3
    with pytest.raises(Crash):
        save_as_two(SAVE, 10, 1, files=files)
    assert files.log == ["mkdir /save", "sync folder above /save", "mkdir /save/iter_0000010.00000001.tmp"]


def test_a_checkpoint_is_only_ever_named_when_all_of_it_is_durable() -> None:
    files = ModelFiles()
    save_as_two(SAVE, 10, 1, files=files)
    named = files.log.index("rename /save/iter_0000010.00000001.tmp iter_0000010")
    synced = [
        what.removeprefix("sync /save/iter_0000010.00000001.tmp/")
        for what in files.log[:named]
        if what.startswith("sync /save/iter")
    ]
    assert synced == [
        "rank_00000.safetensors",
        "rank_00001.safetensors",
        checkpoint_folders.MANIFEST,
        checkpoint_folders.CONFIG,
        checkpoint_folders.COMMIT,
    ]
    assert (
        files.log[named - 1] == "sync folder /save/iter_0000010.00000001.tmp"
        and files.log[named + 1] == "sync folder /save"
    )
