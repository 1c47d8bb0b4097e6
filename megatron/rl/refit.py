"""Refit: copy the weights in training into a network of another layout, for generation on the same ranks or on others.

    training  TP 2 x PP 2 x CP 2        ->  who holds which box of which parameter, on both sides; their intersections are what is sent
    generation  TP 1 x DP 8             ->  once a round, in groups of parameters, so that only a group is held twice

The plan is made once. It follows from the boxes alone, so that any two layouts fit; replicas are read from the rank itself where it has
them, and else from ranks in turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.run import RunConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.sharded_state import ShardedTensor, Tree, add_sharded_tensor, sharded_parameter
from megatron.core.models.decoders import build_decoder
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.parallel.box_hash import box_hash
from megatron.core.parallel.boxes import Box, intersect
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.rng import derive_seed
from megatron.core.parallel.spec import param_spec_of
from megatron.training.checkpoint.run_state import weights_of
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import Trainer

GROUP_BYTES = 1 << 28  # of parameters that are sent together

Boxes = dict[str, list[Box]]  # parameter -> what a rank holds of it


@dataclass(frozen=True, slots=True)
class BoxTransfer:
    """A box that rank `target` reads from rank `source`. source_box, target_box: index of the piece that contains it on
    either side. dtype: of the target.
    """

    name: str
    source: int
    target: int
    source_box: int
    target_box: int
    box: Box
    dtype: torch.dtype


class WeightRefit:
    """Copies weights between layouts over an axis whose ranks hold them, are to get them, or both. verify: compare
    hashes each time.
    """

    def __init__(self, axis: Axis, device: torch.device, *, verify: bool) -> None:
        self.axis, self.device, self._verify = axis, device, verify
        self._transfers: list[list[BoxTransfer]] | None = None

    def copy_weights(self, source: Tree, target: Tree) -> None:
        """Copy the weights. source, target: what this rank has and what it is to get; either may be empty. Collective
        over the axis.

        Raises `CheckpointError` if the two networks differ in parameters, or with verify if their weights differ
        afterwards.
        """
        if self._transfers is None:
            self._transfers = _plan_weight_transfers(source, target, self.axis)
        with torch.no_grad():
            for group in self._transfers:
                _exchange_transfers(group, source, target, self.axis, self.device)
        if self._verify:
            mine, theirs = layout_independent_hash(source, self.axis), layout_independent_hash(target, self.axis)
            if mine != theirs:
                raise CheckpointError(
                    f"the weights for generation have hash {theirs}, those in training {mine}: the refit did not copy all of them"
                )


def policy_weights_tree(trainer: Trainer) -> Tree:
    """Return the policy's weights, as rounded for its passes, without those of a critic."""
    return {
        name.removeprefix("model."): placed
        for name, placed in weights_of(trainer, rounded=True).items()
        if not name.startswith("model.critic.")
    }


def build_generation_stages(run: RunContext) -> list[GPTModel]:
    """Build this rank's stages of a network that only generates."""
    specs = [spec for spec in stage_specs_of_run(run.config) if spec.rank == run.mesh.pp.rank]
    stages = [build_decoder(spec, run.layer_build_context).materialize(run.config.train.seed).eval() for spec in specs]
    for stage in stages:
        stage.requires_grad_(requires_grad=False)
    return stages


def refit_target_tree(stages: Sequence[GPTModel], mesh: Mesh) -> Tree:
    """Return the tree that a refit fills, with the storage of released weights allocated again."""
    target: Tree = {}
    for stage in stages:
        for param in stage.parameters():
            param.untyped_storage().resize_(max(param.untyped_storage().nbytes(), param.nbytes))
            add_sharded_tensor(target, param_spec_of(param).name, sharded_parameter(param, mesh))
    return target


class GenerationNetworkCopy:
    """A separate network for generation, on the training ranks. stages: this rank's, in evaluation mode."""

    def __init__(self, trainer: Trainer, config: RunConfig, *, verify: bool) -> None:
        """config: as `settings.generation_config` gives it. verify: compare a hash of all weights after each refit."""
        self.trainer = trainer
        mesh = (
            Mesh.build(config.parallel, trainer.run.mesh.device)
            if trainer.run.mesh.world.size > 1
            else trainer.run.mesh
        )
        self.stages = build_generation_stages(replace(trainer.run, config=config, mesh=mesh))
        self.mesh = mesh
        self._refit = WeightRefit(trainer.run.mesh.world, mesh.device, verify=verify)

    def release_weights(self) -> None:
        """Free the memory of the weights until the next refit."""
        for stage in self.stages:
            for param in stage.parameters():
                param.untyped_storage().resize_(0)

    def refit(self) -> None:
        """Copy the weights in training, which must be gathered; see `WeightRefit.copy_weights`. Collective."""
        self._refit.copy_weights(policy_weights_tree(self.trainer), refit_target_tree(self.stages, self.mesh))


def layout_independent_hash(tree: Tree, world: Axis) -> str:
    """Return a hash of weights that is equal under every layout. Collective.

    A sum over elements modulo 2**64; a box that several ranks hold counts once.
    """
    earlier: set[tuple[str, Box]] = set()
    for boxes in collectives.gather_objects(_held_boxes(tree), world)[: world.rank]:
        earlier |= {(name, box) for name, held in boxes.items() for box in held}
    total = torch.zeros((), dtype=torch.int64)
    for name, placed in tree.items():
        for box, values in placed.pieces:
            if (name, box) not in earlier:
                earlier.add((name, box))
                total += box_hash(values, box, placed.shape, derive_seed("refit", name)).to(total.device)
    return f"{sum(collectives.gather_objects(int(total), world)) % 2**64:016x}"


def _plan_weight_transfers(source: Tree, target: Tree, world: Axis) -> list[list[BoxTransfer]]:
    """Return the transfers of all ranks, in groups of about GROUP_BYTES; the same on every rank."""
    facts = {name: (placed.shape, placed.dtype) for name, placed in target.items()}
    gathered = collectives.gather_objects((_held_boxes(source), _held_boxes(target), facts), world)
    sources, targets = [each[0] for each in gathered], [each[1] for each in gathered]
    formats: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for *_, known in gathered:
        formats |= known
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in formats.items()}
    lacking = sorted(sizes.keys() ^ {name for boxes in sources for name in boxes})
    if lacking:
        raise CheckpointError(
            f"networks of training and generation differ in {len(lacking)} parameters: {', '.join(lacking[:5])}"
        )
    groups: list[list[BoxTransfer]] = [[]]
    held = 0
    for name in sorted(sizes):
        if held and held + sizes[name] > GROUP_BYTES:
            groups.append([])
            held = 0
        held += sizes[name]
        for rank, boxes in enumerate(targets):
            groups[-1] += _transfers_for_boxes(name, rank, boxes.get(name, []), sources, formats[name][1])
    return groups


def _transfers_for_boxes(
    name: str, rank: int, boxes: Sequence[Box], sources: Sequence[Boxes], dtype: torch.dtype
) -> Iterator[BoxTransfer]:
    """Yield the transfers by which a rank gets its boxes of a parameter: from itself first, then from the ranks after
    it.
    """
    for index, box in enumerate(boxes):
        missing = [box]
        for distance in range(len(sources)):
            other = (rank + distance) % len(sources)
            for place, held in enumerate(sources[other].get(name, [])):
                for part in [common for rest in missing if (common := intersect(rest, held)) is not None]:
                    yield BoxTransfer(name, other, rank, place, index, part, dtype)
                    missing = [piece for rest in missing for piece in subtract_box(rest, part)]
            if not missing:
                break
        if missing:
            raise CheckpointError(f"no rank holds {missing[0]} of {name}")


def subtract_box(box: Box, part: Box) -> list[Box]:
    """Return box without part, as boxes that do not overlap."""
    common = intersect(box, part)
    if common is None:
        return [box]
    rest = []
    for dim in range(len(box.shape)):
        start, stop = box.offset[dim], box.offset[dim] + box.shape[dim]
        low, high = common.offset[dim], common.offset[dim] + common.shape[dim]
        rest += [_box_with_range(box, dim, a, b) for a, b in ((start, low), (high, stop)) if b > a]
        box = _box_with_range(box, dim, low, high)
    return rest


def _box_with_range(box: Box, dim: int, start: int, stop: int) -> Box:
    """Return the box with the range [start, stop) in one dimension."""
    offset, shape = list(box.offset), list(box.shape)
    offset[dim], shape[dim] = start, stop - start
    return Box(tuple(offset), tuple(shape))


def _exchange_transfers(
    transfers: Sequence[BoxTransfer], source: Tree, target: Tree, world: Axis, device: torch.device
) -> None:
    """Carry out a group of transfers by one all-to-all of bytes."""
    outgoing: list[list[Tensor]] = [[] for _ in range(world.size)]
    incoming: list[list[Tensor]] = [[] for _ in range(world.size)]
    for transfer in transfers:
        if transfer.source == world.rank:
            values = _box_view(source[transfer.name], transfer.source_box, transfer.box).to(transfer.dtype)
            outgoing[transfer.target].append(values.contiguous().flatten().view(torch.uint8))
        if transfer.target == world.rank:
            incoming[transfer.source].append(_box_view(target[transfer.name], transfer.target_box, transfer.box))
    sent = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *itertools.chain(*outgoing)])
    sizes = [[tensor.numel() for tensor in tensors] for tensors in outgoing]
    received = collectives.all_to_all(
        sent, [sum(each) for each in sizes], [sum(view.nbytes for view in views) for views in incoming], world
    )
    start = 0
    for view in itertools.chain(*incoming):
        view.copy_(received[start : start + view.nbytes].view(view.dtype).view(view.shape))
        start += view.nbytes


def _box_view(placed: ShardedTensor, index: int, box: Box) -> Tensor:
    """Return a view of a box within piece `index` of a sharded tensor. box: in coordinates of the whole tensor."""
    outer, values = placed.pieces[index]
    return values[box.shifted(tuple(-start for start in outer.offset)).slices()]


def _held_boxes(tree: Tree) -> Boxes:
    """Return the boxes of each parameter that a tree holds."""
    return {name: [box for box, _ in placed.pieces] for name, placed in tree.items()}
