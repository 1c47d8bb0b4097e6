"""A checkpoint of two ranks, saved step by step in one process, on any file system; and what it must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import checkpoint_folders, rank_file, save_plan
from megatron.core.dist_checkpointing.checkpoint_folders import CommittedCheckpoint, SavedRunConfig
from megatron.core.dist_checkpointing.files import DISK, FileSystem
from megatron.core.dist_checkpointing.load import load_into_sharded_state, open_first_valid
from megatron.core.dist_checkpointing.manifest import Manifest, data_file_name
from megatron.core.dist_checkpointing.saved import NativeCheckpoint
from megatron.core.dist_checkpointing.sharded_state import ShardedTensor, Tree
from megatron.core.parallel.boxes import Box

SHAPES = {"model.cut": (4, 3), "model.whole": (5,), "optimizer.step": ()}


def content(version: int) -> dict[str, Tensor]:
    """The global tensors of a version."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}


def states(version: int) -> list[Tree]:
    """What two ranks hold of it: one tensor is cut, the others are there twice."""
    whole = content(version)
    cut = whole["model.cut"]
    return [
        {
            **whole,
            "model.cut": ShardedTensor((4, 3), torch.float32, [(Box((row, 0), (2, 3)), cut[row : row + 2])]),
            "run.version": version,
        }
        for row in (0, 2)
    ]


def save_as_two(
    folder: Path,
    iteration: int,
    version: int,
    *,
    keep_last: int | None = None,
    best: int | None = None,
    files: FileSystem = DISK,
) -> CommittedCheckpoint:
    """What `CheckpointSaver` does on two ranks, one rank after the other."""
    ranks = [save_plan.sharded_tensors_of_state(state) for state in states(version)]
    shares = save_plan.assign_writers([save_plan.local_boxes_to_write(tensors) for tensors in ranks])
    identity = f"{version:08x}" * 4
    checkpoint_folders.remove_interrupted_saves(folder, save=identity, files=files)
    made = checkpoint_folders.begin_save(folder, iteration, identity, files=files)
    hashes = []
    for rank, (tensors, share) in enumerate(zip(ranks, shares, strict=True)):
        header = save_plan.rank_file_header(rank, share, save=identity, iteration=iteration)
        memory = [
            memoryview(save_plan.local_tensor_of_box(offer, tensors).contiguous().view(-1).view(torch.uint8).numpy())
            for offer in share
        ]
        hashes.append(rank_file.write_rank_file(files, made / data_file_name(rank), header, memory))
    facts, tensors = save_plan.manifest_entries(shares, hashes, save=identity, iteration=iteration)
    text = Manifest(identity, iteration, facts, tensors, {"run.version": version}).json_bytes()
    step, note = checkpoint_folders.commit_save(
        folder,
        iteration,
        save=identity,
        manifest=text,
        sizes={name: one.size for name, one in facts.items()},
        description=SavedRunConfig({"version": version}, 2),
        files=files,
    )
    assert note == "", note
    assert best is None or checkpoint_folders.link_best_checkpoint(folder, best, files=files) == ""
    doomed = checkpoint_folders.expired_checkpoints(
        folder, saved=iteration, interval=None, keep_last=keep_last, best=best, files=files
    )
    assert checkpoint_folders.delete_checkpoints(doomed, files=files) == ""
    return step


def version_in(folder: Path, *, files: FileSystem = DISK, step: int | None = None) -> tuple[int, int] | None:
    """(iteration, version) of the newest checkpoint that is sound, if every bit of it is right; None in an empty folder."""
    steps = checkpoint_folders.checkpoints_to_try(folder, step, files=files)
    if not steps:
        return None
    saved, _ = open_first_valid(steps, files=files)
    return saved.commit.iteration, checked(saved)


def checked(saved: NativeCheckpoint) -> int:
    """The version that a checkpoint holds, if it holds all of it."""
    result: dict[str, Any] = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    version = load_into_sharded_state({**result, "run.version": None}, saved, complete=("",))["run.version"]
    assert saved.settings == {"version": version}, "the config is of the same save"
    for name, expected in content(version).items():
        assert torch.equal(result[name], expected), f"{name} is not that of version {version}"
    return version
