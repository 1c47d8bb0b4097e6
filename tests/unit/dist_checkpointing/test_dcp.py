"""Saving and loading trees: resharding, single writers, and errors that name everything."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from megatron.core.dist_checkpointing import dcp
from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.core.dist_checkpointing.tree import Placed
from megatron.core.parallel.boxes import Box, intersect
from tests.helpers.world import RankFailed, Worlds
from tests.unit.dist_checkpointing.held import Layout, hold, load_bag, mesh_of, reshard, save_bag, specs

ALONE = Layout(1, 1, False)
FOUR = [Layout(1, 1, False), Layout(1, 1, True), Layout(2, 1, True), Layout(2, 2, False), Layout(4, 1, False),
        Layout(1, 4, False)]


@pytest.mark.parametrize("before", FOUR, ids=str)
def test_every_layout_loads_what_any_layout_saved_bit_by_bit(world: Worlds, tmp_path: Path, before: Layout) -> None:
    seed = FOUR.index(before)
    for wrong in world(4).run(reshard, seed, before, FOUR, tmp_path):
        assert wrong == []
    assert load_bag(seed, ALONE, tmp_path) == [], "one process, without torch.distributed"
    assert [w for wrong in world(2).run(load_bag, seed, Layout(2, 1, True), tmp_path) for w in wrong] == []


def test_four_ranks_load_what_one_process_saved(world: Worlds, tmp_path: Path) -> None:
    for seed in range(10, 16):
        save_bag(seed, ALONE, tmp_path / str(seed))
        layout = FOUR[seed % len(FOUR)]
        for wrong in world(4).run(load_bag, seed, layout, tmp_path / str(seed)):
            assert wrong == [], f"{layout}, seed {seed}"


@pytest.mark.parametrize("layout", FOUR, ids=str)
def test_every_byte_is_written_once(world: Worlds, tmp_path: Path, layout: Layout) -> None:
    world(4).run(save_bag, 3, layout, tmp_path)
    found = dcp.read_metadata(tmp_path)
    names = {f"{start}{spec.name}" for spec in specs(3, 1) for start in ("model.", "optimizer.exp_avg.", "optimizer.master.")}
    assert set(dcp.formats(found)) == names
    for name, entry in found.state_dict_metadata.items():
        if name in names:
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            assert sum(box.size for box in boxes) == math.prod(entry.size), name
            assert not any(intersect(a, b) for place, a in enumerate(boxes) for b in boxes[:place]), name
    stored = sum(info.length for info in found.storage_data.values())
    assert stored == sum(path.stat().st_size for path in tmp_path.glob("*.distcp")), "nothing is in the files but what is listed"


def save_large(folder: Path) -> None:
    state = {f"t{number}": torch.ones(10_000 * (1 + number % 3)) for number in range(24)}
    dcp.save(state, folder, mesh_of(ALONE).world)


def test_replicas_are_shared_out_evenly_and_the_same_way_each_time(world: Worlds, tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        world(4).run(save_large, tmp_path / name)
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    sizes = [len(content) for name, content in contents[0].items() if name.endswith(".distcp")]
    assert len(sizes) == 4 and max(sizes) < 1.05 * min(sizes), sizes
    assert contents[0] == contents[1], "equal states make equal files"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_values_are_stored_as_json_and_tensors_so_that_plain_dcp_reads_them(tmp_path: Path) -> None:
    tensor = torch.rand(5, 3)
    dcp.save({"values": {"a": [1, 2.5, None, "b"]}, "tensor": tensor, "scalar": torch.tensor(2.0)}, tmp_path)
    assert dcp.load({"values": None}, tmp_path) == {"values": {"a": [1, 2.5, None, "b"]}}
    assert b'{"a": [1, 2.5, null, "b"]}' in (tmp_path / "__0_0.distcp").read_bytes()
    target = {"tensor": torch.zeros(5, 3), "scalar": torch.zeros(())}
    torch_dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(target["tensor"], tensor) and target["scalar"] == 2.0


def test_formats_are_converted_and_other_names_can_be_read_instead(tmp_path: Path) -> None:
    value = torch.rand(4, 4)
    dcp.save({"model.w": value.bfloat16(), "optimizer.master.w": value}, tmp_path)
    half, wide, exact = torch.zeros(4, 4, dtype=torch.float16), torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.float64)
    dcp.load({"model.w": Placed((4, 4), torch.float16, [(Box((0, 0), (4, 4)), half), (Box((0, 0), (4, 4)), wide)])}, tmp_path)
    assert torch.equal(half, value.bfloat16().half()) and torch.equal(wide, value.bfloat16().float())
    dcp.load({"model.w": exact}, tmp_path, complete=("model.",), instead={"model.w": "optimizer.master.w"})
    assert torch.equal(exact, value.double())


def test_everything_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    dcp.save({"model.a": torch.ones(2, 3), "model.b": torch.ones(4), "model.c": torch.ones(1), "other": [1]}, tmp_path)
    kept = torch.zeros(4)
    asked = {"model.a": torch.zeros(3, 2), "model.b": kept, "model.d": torch.zeros(1), "other": torch.zeros(1)}
    with pytest.raises(CheckpointError) as caught:
        dcp.load(asked, tmp_path, complete=("model.",))
    assert caught.value.problems == (
        "model.a: shape (2, 3) in the checkpoint, (3, 2) expected",
        "model.d: missing in the checkpoint",
        "other: the checkpoint holds a value, not a tensor",
        "model.c: unexpected, the checkpoint has it and this run does not",
    )
    assert torch.equal(kept, torch.zeros(4)), "nothing is loaded when something does not fit"


def load_with_one_odd_rank(folder: Path) -> str:
    mesh = mesh_of(ALONE)
    names = ["a", "odd"] if mesh.world.rank == 2 else ["a"]
    try:
        dcp.load({name: torch.zeros(2) for name in names}, folder, mesh.world, complete=("",))
    except CheckpointError as error:
        return str(error)
    return ""


def test_all_ranks_hear_what_one_rank_misses(world: Worlds, tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path)
    said = world(4).run(load_with_one_odd_rank, tmp_path)
    assert said == ["2 names of the checkpoint do not fit this run\n  odd: missing in the checkpoint\n"
                    "  b: unexpected, the checkpoint has it and this run does not"] * 4


def damage_and_load(layout: Layout, folder: Path) -> str:
    mesh = mesh_of(layout)
    tree, _ = hold(5, layout, mesh)
    try:
        dcp.load(tree, folder, mesh.world)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_truncated_file_is_named_on_all_ranks(world: Worlds, tmp_path: Path) -> None:
    layout = Layout(2, 1, True)
    world(4).run(save_bag, 5, layout, tmp_path)
    path = tmp_path / "__2_0.distcp"
    os.truncate(path, path.stat().st_size // 2)
    said = world(4).run(damage_and_load, layout, tmp_path)
    assert len(set(said)) == 1 and str(path) in said[0] and "truncated" in said[0]
    path.unlink()
    said = world(4).run(damage_and_load, layout, tmp_path)
    assert len(set(said)) == 1 and str(path) in said[0] and "missing" in said[0]


def test_a_missing_or_damaged_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: it is missing"):
        dcp.load({}, tmp_path)
    dcp.save({"a": torch.ones(2)}, tmp_path)
    os.truncate(tmp_path / ".metadata", 100)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: it is damaged"):
        dcp.load({"a": torch.ones(2)}, tmp_path)


class Trap:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_an_index_that_wants_to_run_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(CheckpointError, match="mkdir"):
        dcp.read_metadata(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_an_index_that_leaves_its_folder_is_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, tmp_path)
    found = dcp.read_metadata(tmp_path)
    for info in found.storage_data.values():
        info.relative_path = "../" + info.relative_path
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match="outside its folder"):
        dcp.load({"a": torch.ones(2)}, tmp_path)


def test_a_checkpoint_with_a_hole_is_refused(tmp_path: Path) -> None:
    dcp.save({"a": Placed((4,), torch.float32, [(Box((0,), (2,)), torch.ones(2)), (Box((2,), (2,)), torch.ones(2))])}, tmp_path)
    found = dcp.read_metadata(tmp_path)
    del found.state_dict_metadata["a"].chunks[1]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match="a: incomplete"):
        dcp.load({"a": torch.ones(4)}, tmp_path)


def save_with_a_hole(folder: Path) -> None:
    dcp.save({"a": Placed((4,), torch.float32, [(Box((0,), (2,)), torch.ones(2))])}, folder, mesh_of(ALONE).world)


def test_a_tree_with_a_hole_is_not_saved(world: Worlds, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a: the ranks' boxes hold 2 elements, the tensor has 4"):
        save_with_a_hole(tmp_path)
    with pytest.raises(RankFailed, match="CheckpointError.*\n.*a: the ranks' boxes hold 2 elements, the tensor has 4"):
        world(2).run(save_with_a_hole, tmp_path)
    assert not (tmp_path / ".metadata").exists()
