"""Saving and loading trees: resharding, single writers, and errors that name everything."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.dist_checkpointing import save_plan
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError, SavedRunConfig, checkpoints_to_try
from megatron.core.dist_checkpointing.load import load_into_sharded_state, open_first_valid
from megatron.core.dist_checkpointing.save_plan import BoxToWrite
from megatron.core.dist_checkpointing.saved import NativeCheckpoint, migrate_saved_settings, open_native_checkpoint
from megatron.core.dist_checkpointing.saver import save
from megatron.core.dist_checkpointing.sharded_state import ShardedTensor, Tree
from megatron.core.dist_checkpointing.source import ShapeAndDtype
from megatron.core.parallel.boxes import Box, intersect
from tests.helpers.world import RankFailed, Worlds
from tests.unit.dist_checkpointing.failing_files import BROKEN, Faulty
from tests.unit.dist_checkpointing.held import Layout, hold, load_bag, mesh_of, reshard, save_bag, specs

ALONE = Layout(1, 1, False)
FOUR = [
    Layout(1, 1, False),
    Layout(1, 1, True),
    Layout(2, 1, True),
    Layout(2, 2, False),
    Layout(4, 1, False),
    Layout(1, 4, False),
]


def saved(state: Tree, folder: Path) -> NativeCheckpoint:
    """A tree, saved and opened."""
    return open_native_checkpoint(save(state, folder, 1, SavedRunConfig({}, 1)))


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
    result = open_native_checkpoint(checkpoints_to_try(tmp_path)[0].folder)
    names = {
        f"{start}{spec.name}" for spec in specs(3, 1) for start in ("model.", "optimizer.exp_avg.", "optimizer.master.")
    }
    assert set(result.formats) == names
    for name, whole in result.manifest.tensors.items():
        boxes = [piece.box for piece in whole.pieces]
        assert sum(box.num_elements for box in boxes) == math.prod(whole.shape), name
        assert not any(intersect(a, b) for place, a in enumerate(boxes) for b in boxes[:place]), name
    stored = sum(facts.size - facts.header_length for facts in result.manifest.files.values())
    assert stored == sum(4 * math.prod(whole.shape) for whole in result.manifest.tensors.values())


def save_large(folder: Path) -> None:
    state = {f"t{number}": torch.ones(10_000 * (1 + number % 3)) for number in range(24)}
    save(state, folder, 1, SavedRunConfig({}, 4), mesh_of(ALONE).world)


def test_replicas_are_shared_out_evenly(world: Worlds, tmp_path: Path) -> None:
    world(4).run(save_large, tmp_path)
    sizes = [path.stat().st_size for path in (tmp_path / "iter_0000001").glob("*.safetensors")]
    assert len(sizes) == 4 and max(sizes) < 1.05 * min(sizes), sizes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 50), st.sets(st.integers(0, 3), min_size=1)), min_size=1, max_size=20))
def test_a_plan_gives_each_box_to_one_holder_and_loads_differ_by_no_more_than_a_box(
    tensors: list[tuple[int, set[int]]],
) -> None:
    ranks: list[list[BoxToWrite]] = [[] for _ in range(4)]
    for number, (size, holders) in enumerate(tensors):
        for rank in holders:
            ranks[rank].append(BoxToWrite(f"t{number}", Box((0,), (size,)), "F32", (size,)))
    shares = save_plan.assign_writers(ranks)
    given_out = [(offer.name, rank) for rank, share in enumerate(shares) for offer in share]
    assert sorted(name for name, _ in given_out) == sorted(f"t{number}" for number in range(len(tensors)))
    assert all(rank in tensors[int(name[1:])][1] for name, rank in given_out)
    if all(len(holders) == 4 for _, holders in tensors):
        loads = [sum(offer.num_bytes for offer in share) for share in shares]
        assert max(loads) - min(loads) <= 4 * max(size for size, _ in tensors)


DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=6))
def test_tensors_of_every_dtype_and_shape_come_back_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, list[int]]]
) -> None:
    state = {f"t{number}": torch.randint(0, 2, shape).to(dtype) for number, (dtype, shape) in enumerate(kinds)}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load_into_sharded_state(target, saved(state, tmp_path_factory.mktemp("any")), complete=("",))
    for name, tensor in state.items():
        assert torch.equal(target[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def test_values_come_back_as_json_says_them(tmp_path: Path) -> None:
    assert load_into_sharded_state({"values": None}, saved({"values": {"a": [1, 2.5, None, "b"]}}, tmp_path)) == {
        "values": {"a": [1, 2.5, None, "b"]}
    }


def test_latent_attention_saved_with_norms_of_its_own_is_todays_network_or_refused() -> None:
    before = {"multi_latent_attention": True, "qk_layernorm": False, "rotary_interleaved": True}
    norms = ["model.decoder.layers.0.self_attention.kv_layernorm.weight"]
    assert migrate_saved_settings(before, norms, "x") == {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "rotary_interleaved": False,
    }
    assert migrate_saved_settings(before, [], "x") == before, "without norms it is of today"
    with pytest.raises(CheckpointError, match="rotated the halves of a head"):
        migrate_saved_settings({**before, "rotary_interleaved": False}, norms, "x")


def test_formats_are_converted_and_other_names_can_be_read_instead(tmp_path: Path) -> None:
    value = torch.rand(4, 4)
    source = saved({"model.w": value.bfloat16(), "optimizer.master.w": value}, tmp_path)
    half, wide, exact = (
        torch.zeros(4, 4, dtype=torch.float16),
        torch.zeros(4, 4),
        torch.zeros(4, 4, dtype=torch.float64),
    )
    load_into_sharded_state(
        {"model.w": ShardedTensor((4, 4), torch.float16, [(Box((0, 0), (4, 4)), half), (Box((0, 0), (4, 4)), wide)])},
        source,
    )
    assert torch.equal(half, value.bfloat16().half()) and torch.equal(wide, value.bfloat16().float())
    load_into_sharded_state({"model.w": exact}, source, complete=("model.",), instead={"model.w": "optimizer.master.w"})
    assert torch.equal(exact, value.double())


def test_everything_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    source = saved(
        {"model.a": torch.ones(2, 3), "model.b": torch.ones(4), "model.c": torch.ones(1), "other": [1]}, tmp_path
    )
    retained = torch.zeros(4)
    requested = {"model.a": torch.zeros(3, 2), "model.b": retained, "model.d": torch.zeros(1), "other": torch.zeros(1)}
    with pytest.raises(CheckpointError) as caught:
        load_into_sharded_state(requested, source, complete=("model.",))
    assert caught.value.problems == (
        "model.a: shape (2, 3) in the checkpoint, (3, 2) expected",
        "model.d: missing in the checkpoint",
        "other: the checkpoint holds a value, not a tensor",
        "model.c: unexpected, the checkpoint has it and this run does not",
    )
    assert torch.equal(retained, torch.zeros(4)), "nothing is loaded when something does not fit"


def load_with_one_odd_rank(folder: Path) -> str:
    mesh = mesh_of(ALONE)
    names = ["a", "odd"] if mesh.world.rank == 2 else ["a"]
    try:
        load_into_sharded_state(
            {name: torch.zeros(2) for name in names}, open_native_checkpoint(folder), mesh.world, complete=("",)
        )
    except CheckpointError as error:
        return str(error)
    return ""


def test_all_ranks_hear_what_one_rank_misses(world: Worlds, tmp_path: Path) -> None:
    folder = saved({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path).folder
    message = world(4).run(load_with_one_odd_rank, folder)
    assert (
        message
        == [
            "2 names of the checkpoint do not fit this run\n  odd: missing in the checkpoint\n"
            "  b: unexpected, the checkpoint has it and this run does not"
        ]
        * 4
    )


def open_here(folder: Path) -> tuple[int, list[str]] | str:
    """On every rank: the iteration that is found sound and what was refused, or the error."""
    try:
        result, refused = open_first_valid(checkpoints_to_try(folder), mesh_of(ALONE).world)
    except CheckpointError as error:
        return str(error)
    return result.commit.iteration, refused


@pytest.mark.parametrize("rank", range(4))
def test_all_ranks_go_back_together_whichever_file_is_damaged(world: Worlds, tmp_path: Path, rank: int) -> None:
    for iteration in (1, 2):
        world(4).run(save_at, tmp_path, iteration)
    path = tmp_path / "iter_0000002" / f"rank_0000{rank}.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)
    message = world(4).run(open_here, tmp_path)
    assert all(result == message[0] for result in message)
    iteration, refused = message[0]
    assert (
        iteration == 1
        and refused[0] == "the checkpoint of iteration 2 is refused:"
        and str(path) in refused[1]
        and len(refused) == 2
    )


def save_at(folder: Path, iteration: int) -> None:
    mesh = mesh_of(ALONE)
    state = {f"t{number}": torch.full((100,), float(iteration)) for number in range(8)}
    save(state, folder, iteration, SavedRunConfig({}, 4), mesh.world)


def open_own_folder(folder: Path) -> str:
    """On every rank: a folder of its own, as where a disk is not shared."""
    mesh = mesh_of(ALONE)
    try:
        open_first_valid(checkpoints_to_try(folder / str(mesh.world.rank % 2)), mesh.world)
    except CheckpointError as error:
        return str(error)
    return ""


def test_ranks_that_see_different_files_are_told_so(world: Worlds, tmp_path: Path) -> None:
    for name in ("0", "1"):
        saved({"a": torch.ones(2)}, tmp_path / name)
    assert all("the ranks see different checkpoints" in message for message in world(2).run(open_own_folder, tmp_path))


def test_what_one_rank_cannot_open_is_refused_by_all(world: Worlds, tmp_path: Path) -> None:
    saved({"a": torch.ones(2)}, tmp_path / "0")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    (tmp_path / "1" / "iter_0000001" / "rank_00000.safetensors").unlink()
    assert all(
        "1/iter_0000001/rank_00000.safetensors is missing" in message
        for message in world(2).run(open_own_folder, tmp_path)
    )


class Broken:
    """A source of another format, one of whose tensors cannot be read on one rank."""

    where, formats, values, settings = "elsewhere", {"a": ShapeAndDtype((2,), torch.float32)}, {}, {}

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def read(self, name: str, box: Box) -> Tensor:
        if self.fails:
            raise RuntimeError("no such shard")
        return torch.ones(2)


def load_broken() -> str:
    axis = mesh_of(ALONE).world
    try:
        load_into_sharded_state({"a": torch.zeros(2)}, Broken(axis.rank == 1), axis)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_tensor_that_cannot_be_read_on_one_rank_is_an_error_on_all(world: Worlds) -> None:
    assert world(2).run(load_broken) == ["elsewhere cannot be read\n  RuntimeError: no such shard"] * 2


@pytest.mark.parametrize("on", ["map", "prefault_range"])
def test_a_disk_that_cannot_read_is_told_and_not_the_end_of_the_process(tmp_path: Path, on: str) -> None:
    for iteration in (1, 2):
        save_at(tmp_path, iteration)
    files = Faulty("" if on == "prefault_range" else "iter_0000002/rank", fault=BROKEN, on=on)
    with pytest.raises(CheckpointError, match="rank_00000.safetensors cannot be read: Input/output error"):
        open_first_valid(checkpoints_to_try(tmp_path, 2), files=files)


def test_a_box_that_one_piece_holds_is_read_without_a_copy(tmp_path: Path) -> None:
    source = saved({"a": torch.arange(12.0).view(4, 3)}, tmp_path)
    once, again = source.read("a", Box((1, 0), (2, 3))), source.read("a", Box((1, 0), (2, 3)))
    assert torch.equal(once, torch.arange(3.0, 9.0).view(2, 3)) and once.data_ptr() == again.data_ptr()


def save_with_a_hole(folder: Path) -> None:
    save(
        {"a": ShardedTensor((4,), torch.float32, [(Box((0,), (2,)), torch.ones(2))])},
        folder,
        1,
        SavedRunConfig({}, 1),
        mesh_of(ALONE).world,
    )


def test_a_tree_with_a_hole_is_not_saved(world: Worlds, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="a: the ranks' boxes hold 2 elements, the tensor has 4"):
        save_with_a_hole(tmp_path)
    with pytest.raises(RankFailed, match="a: the ranks' boxes hold 2 elements, the tensor has 4"):
        world(2).run(save_with_a_hole, tmp_path)
    assert checkpoints_to_try(tmp_path) == []


def test_what_safetensors_has_no_word_for_is_not_saved(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.ones(2, dtype=torch.complex64)}
    with pytest.raises(AssertionError, match="a: torch.complex64 is none of the dtypes of a checkpoint"):
        saved(state, tmp_path)


def test_pieces_of_a_layout_are_what_hold_says(tmp_path: Path) -> None:
    tree, memory = hold(5, ALONE, mesh_of(ALONE))
    source = saved(tree, tmp_path)
    assert {name: source.formats[name].shape for name in tree} == {name: placed.shape for name, placed in tree.items()}
    assert len(memory) == len(tree)
