"""State of the optimizer in checkpoints that the real Megatron Core wrote: the same run saved in several formats is the same state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.parallel.boxes import whole_box
from megatron.megatron_lm.checkpoint.open import open_megatron_checkpoint
from tests.peers.make_fixtures import unpack

SLOTS = ("exp_avg", "exp_avg_sq")


def opened(case: str, folder: Path) -> CheckpointSource:
    """A fixture, unpacked."""
    return open_megatron_checkpoint(unpack(case, folder / case) / "checkpoints")


def states(source: CheckpointSource, slots: tuple[str, ...] = SLOTS) -> dict[str, Tensor]:
    """What the optimizer keeps, by names of a saved state."""
    return {
        name: source.read(name, whole_box(entry.shape)).clone()
        for name, entry in source.formats.items()
        if name.startswith("optimizer.") and name.split(".")[1] in slots
    }


def demand_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names, same bits."""
    assert expected and found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())[:5]
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong, wrong


@pytest.mark.parametrize("case", ["dense", "gqa", "latent", "mtp", "tp2", "experts", "experts-grouped", "deepseek"])
def test_state_of_a_plain_optimizer_is_the_same_in_both_formats(case: str, tmp_path: Path) -> None:
    sharded, ranks = opened(case, tmp_path), opened(f"{case}-torch", tmp_path)
    demand_equal(states(ranks), states(sharded))
    assert sharded.values["run.optimizer_steps"] == ranks.values["run.optimizer_steps"] == 3
    assert sharded.values["run.progress"] == ranks.values["run.progress"]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("gqa-distributed-torch", "gqa-reshardable"),
        *((f"{kind}-distributed", f"{kind}-reshardable") for kind in ("gqa", "tp2", "grouped", "deepseek", "ep2")),
    ],
)
def test_flat_buffers_are_the_state_that_is_saved_by_parameter(case: str, expected: str, tmp_path: Path) -> None:
    by_parameter, flat = opened(expected, tmp_path), opened(case, tmp_path)
    slots = (*SLOTS, "master")
    found = states(flat, slots)
    demand_equal(found, states(by_parameter, slots))
    assert flat.values["run.optimizer_steps"] == 3
    for name in (name for name in found if name.startswith("optimizer.master.")):
        weight = name.replace("optimizer.master.", "model.")
        assert torch.equal(found[name], flat.read(weight, whole_box(flat.formats[weight].shape))), name
