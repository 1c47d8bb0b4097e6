"""A bag of random parameters held under any layout, and what every rank must find in its memory after a load.

Values are functions of name and place alone, so that the expected content of any piece can be written down without the
code under test. Memory that belongs to no box (padding) holds a marker, and must still hold it after a load.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import SavedRunConfig, checkpoints_to_try
from megatron.core.dist_checkpointing.load import load_into_sharded_state, open_first_valid
from megatron.core.dist_checkpointing.saver import save
from megatron.core.dist_checkpointing.sharded_state import (
    Tree,
    add_sharded_tensor,
    sharded_optimizer_state,
    sharded_parameter,
)
from megatron.core.distributed.buffers import make_buckets
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import FusedWeightSegment, ParamSpec, ShardedDim, constant_initializer

MARKER = -7.0
SLOTS = ("exp_avg", "master")


@dataclass(frozen=True)
class Layout:
    """How the ranks hold the bag. sharded: slots are cut over data-parallel ranks."""

    tp: int
    pp: int
    sharded: bool


def specs(seed: int, tp: int) -> list[ParamSpec]:
    """Random parameters. Their shapes follow from the seed alone; how they are cut, from tp too."""
    choose = random.Random(seed)
    result = []
    for number in range(choose.randint(4, 7)):
        rest = tuple(choose.randint(1, 6) for _ in range(choose.randint(0, 2)))
        kind = choose.choice(("whole", "rows", "columns", "heads", "vocabulary"))
        name, shards = f"p{number}.{kind}", ()
        if kind == "whole":
            shape = (choose.randint(1, 9), *rest)
        elif kind == "heads":  # [q | k | v], with fewer key heads than ranks
            q, groups, width = 4 * choose.randint(1, 2), choose.choice((1, 2, 4)), choose.randint(1, 3)
            copies = max(1, tp // groups)
            shape = (q + 2 * groups * width, *rest)
            shards = (
                ShardedDim(
                    0,
                    "tp",
                    (
                        FusedWeightSegment(q),
                        FusedWeightSegment(groups * width, copies),
                        FusedWeightSegment(groups * width, copies),
                    ),
                ),
            )
        elif kind == "vocabulary":
            true = choose.randint(3, 21)
            padded = -(-true // (2 * tp)) * 2 * tp
            shape, shards = (true, *rest), (ShardedDim(0, "tp", (FusedWeightSegment(true, padded=padded),)),)
        elif kind == "rows":
            shape = (4 * choose.randint(1, 3), *rest)
            shards = (ShardedDim(0, "tp", (FusedWeightSegment(shape[0]),)),)
        else:
            shape = (choose.randint(1, 5), 4 * choose.randint(1, 3))
            shards = (ShardedDim(1, "tp", (FusedWeightSegment(shape[1]),)),)
        result.append(ParamSpec(shape, constant_initializer(0.0), "matrix", shards, name=name, tied=number == 0))
    return result


def whole_tensor(name: str, slot: str, shape: tuple[int, ...]) -> Tensor:
    """The global value of a tensor."""
    generator = torch.Generator().manual_seed(
        sum(ord(letter) * (place + 1) for place, letter in enumerate(name + slot))
    )
    return torch.rand(shape, generator=generator)


def local_tensor(spec: ParamSpec, slot: str, mesh: Mesh) -> Tensor:
    """What a rank holds of it: its share of each part, one after the other, by plain slicing of the whole."""
    value = whole_tensor(spec.name, slot, spec.shape)
    if not spec.shards:
        return value
    (cut,) = spec.shards
    shares, start = [], 0
    for part in cut.segments:
        mine = value.narrow(cut.dim, start, part.size)
        start += part.size
        missing = (part.padded or part.size) - part.size
        if missing:
            mine = torch.cat([mine, torch.full((missing, *mine.shape[1:]), MARKER)])
        shares.append(mine.chunk(mesh.tp.size // part.replicas, cut.dim)[mesh.tp.rank // part.replicas])
    return torch.cat(shares, cut.dim)


class Bag(nn.Module):
    """One pipeline stage: every pp-th parameter; the tied one at both ends."""

    def __init__(self, seed: int, mesh: Mesh) -> None:
        super().__init__()
        ends = {0, mesh.pp.size - 1}
        for number, spec in enumerate(specs(seed, mesh.tp.size)):
            if number % mesh.pp.size == mesh.pp.rank or (spec.tied and mesh.pp.rank in ends):
                made = nn.Parameter(local_tensor(spec, "weight", mesh))
                made.spec = spec  # type: ignore[attr-defined]
                self.register_parameter(f"n{number}", made)


def mesh_of(layout: Layout) -> Mesh:
    """The mesh of this process's world."""
    if not torch.distributed.is_initialized():
        return Mesh.single_process()
    return Mesh.build(
        ParallelConfig(tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp),
        torch.device("cpu"),
    )


def hold(seed: int, layout: Layout, mesh: Mesh) -> tuple[Tree, list[tuple[str, Tensor, Tensor]]]:
    """This rank's tree, and (what, memory, expected content) of all memory behind it."""
    bag, tree, memory = Bag(seed, mesh), Tree(), []
    buckets = make_buckets(bag, mesh, grad_dtype=torch.float32, sharded=layout.sharded, bucket_size=40)
    for param in bag.parameters():
        add_sharded_tensor(tree, f"model.{param.spec.name}", sharded_parameter(param, mesh))
        memory.append((f"weight {param.spec.name}", param.data, local_tensor(param.spec, "weight", mesh)))
    for segment in (segment for bucket in buckets for segment in bucket.owned_segments()):
        for slot in SLOTS:
            expected = local_tensor(segment.spec, slot, mesh).flatten()[segment.low : segment.high]
            tensor = expected.clone()
            add_sharded_tensor(tree, f"optimizer.{slot}.{segment.name}", sharded_optimizer_state(segment, tensor, mesh))
            memory.append((f"{slot} {segment.name} [{segment.low}, {segment.high})", tensor, expected))
    return tree, memory


def save_bag(seed: int, layout: Layout, folder: Path) -> None:
    """On every rank: save the bag."""
    mesh = mesh_of(layout)
    tree, _ = hold(seed, layout, mesh)
    save(tree | {"run.progress": {"iteration": 3}}, folder, 3, SavedRunConfig({}, mesh.world.size), mesh.world)


def load_bag(seed: int, layout: Layout, folder: Path) -> list[str]:
    """On every rank: load the bag into memory full of markers; returns what is not as expected."""
    mesh = mesh_of(layout)
    tree, memory = hold(seed, layout, mesh)
    for _, tensor, _ in memory:
        tensor.fill_(MARKER)
    source, _ = open_first_valid(checkpoints_to_try(folder), mesh.world)
    values = load_into_sharded_state(
        tree | {"run.progress": None}, source, mesh.world, complete=("model.", "optimizer.")
    )
    wrong = [what for what, tensor, expected in memory if not torch.equal(tensor, expected)]
    return wrong + ([] if values == {"run.progress": {"iteration": 3}} else [f"progress is {values}"])


def reshard(seed: int, before: Layout, after: list[Layout], folder: Path) -> list[str]:
    """On every rank: save under one layout and load under others."""
    save_bag(seed, before, folder)
    return [f"{layout}: {wrong}" for layout in after for wrong in load_bag(seed, layout, folder)]
