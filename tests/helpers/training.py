"""Train a tiny model under any layout and bring home what must not depend on it: losses, norms and whole weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.sharded_state import ShardedTensor
from megatron.core.parallel import collectives
from megatron.core.parallel.boxes import Box
from megatron.core.parallel.rng import derive_seed
from megatron.core.parallel.spec import local_shard_boxes, param_spec_of
from megatron.training.checkpoint import run_state
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.lazy_collectives import Completion, run_lazily
from tests.helpers.world import Worlds


@dataclass(frozen=True)
class Outcome:
    """losses, norms: one a step. weights: global name -> whole tensor."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


Held = list[tuple[str, tuple[int, ...], Box, Tensor]]


def train_here(changes: dict[str, Any], steps: int) -> tuple[list[float], list[float], Held]:
    """On every rank: train, and return this rank's pieces of the weights."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(world_size, **changes)))
    losses, norms = train_on(trainer, steps)
    return losses, norms, held_weights(trainer)


def train_on(trainer: Trainer, steps: int) -> tuple[list[float], list[float]]:
    """Train a trainer for some more steps; losses over all tokens, and gradient norms. A loss of tokens ahead is added."""
    losses, norms = [], []
    for _ in range(steps):
        step = train_step(trainer, tiny.short_run_batches(trainer.run, trainer.progress.iteration))
        pairs = [
            collectives.all_reduce(pair.double(), trainer.run.mesh.world).tolist()
            for name, pair in step.losses.items()
            if name == "lm loss" or name.startswith("mtp_")
        ]
        losses.append(sum(total / count for total, count in pairs))
        norms.append(float(step.grad_norm))
    return losses, norms


def held_weights(trainer: Trainer) -> Held:
    """The rectangles of every parameter that this rank holds."""
    return [
        (name, placed.shape, box, value.detach().to("cpu", copy=True))
        for name, placed in weights_of(trainer).items()
        for box, value in placed.pieces
    ]


def weights_of(trainer: Trainer) -> dict[str, ShardedTensor]:
    """The weights that this rank holds, by name; all are views."""
    return {name.removeprefix("model."): placed for name, placed in run_state.weights_of(trainer).items()}


def whole_gradient(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """A made-up gradient of a whole parameter, the same in every process; about a fifth of it is zero."""
    generator = torch.Generator().manual_seed(derive_seed("gradient", name))
    value = torch.randn(shape, dtype=torch.float64, generator=generator)
    return value.masked_fill(torch.rand(shape, generator=generator) < 0.2, 0.0).to(dtype)


def fill_gradients(trainer: Trainer, factor: float = 1.0) -> None:
    """Write `factor` times the made-up gradients where a backward pass would leave the true ones; padding is zero."""
    for parallel in trainer.parallels:
        for bucket in parallel.buckets:
            for param, view in zip(bucket.params, bucket.gradient_views(), strict=True):
                spec = param_spec_of(param)
                whole = factor * whole_gradient(spec.name, spec.shape)
                view.zero_()
                for piece in local_shard_boxes(spec, trainer.run.mesh):
                    view[piece.local.slices()] = whole[piece.box.slices()].to(view.dtype)


def assemble(held: list[Held]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' pieces; replicas must agree to the last bit, and nothing may be missing."""
    whole: dict[str, Tensor] = {}
    for name, shape, box, value in (entry for rank in held for entry in rank):
        target = whole.setdefault(name, torch.full(shape, float("nan"), dtype=value.dtype))
        there = target[box.slices()]
        known = ~there.isnan()
        assert torch.equal(there[known], value[known]), f"replicas of {name} differ at {box}"
        target[box.slices()] = value
    for name, value in whole.items():
        assert not value.isnan().any(), f"{name} has elements that no rank holds"
    return whole


def train(
    world: Worlds, ranks: int, changes: dict[str, Any], steps: int = 3, *, completion: Completion | None = None
) -> Outcome:
    """Train on `ranks` ranks of a pool. completion: of collectives, over a lazy transport."""
    if completion is None:
        return outcome(world(ranks).run(train_here, changes, steps))
    return outcome(world(ranks).run(run_lazily, completion, train_here, changes, steps))


def train_alone(changes: dict[str, Any], steps: int = 3) -> Outcome:
    """Train in this process, without torch.distributed: the serial run."""
    return outcome([train_here(changes, steps)])


def outcome(results: list[tuple[list[float], list[float], Held]]) -> Outcome:
    """One outcome from all ranks' results; ranks must agree on losses and norms."""
    for losses, norms, _ in results:
        assert losses == results[0][0], f"ranks disagree about the loss: {losses} and {results[0][0]}"
        assert norms == results[0][1], f"ranks disagree about the norm: {norms} and {results[0][1]}"
    return Outcome(results[0][0], results[0][1], assemble([held for _, _, held in results]))


def differences(found: Outcome, expected: Outcome, tolerance: float, *, weights: float | None = None) -> list[str]:
    """Where two outcomes differ by more than `tolerance`, relative to the largest value of each tensor.

    weights: tolerance of the weights, if another.
    """
    problems = []
    for what in ("losses", "norms"):
        for step, (a, b) in enumerate(zip(getattr(found, what), getattr(expected, what), strict=True)):
            if not abs(a - b) <= tolerance * abs(b):
                problems.append(f"{what} of step {step}: {a!r}, serial {b!r}")
    weights = tolerance if weights is None else weights
    if found.weights.keys() != expected.weights.keys():
        problems.append(f"names differ: {sorted(found.weights.keys() ^ expected.weights.keys())}")
    for name in sorted(found.weights.keys() & expected.weights.keys()):
        a, b = found.weights[name].double(), expected.weights[name].double()
        gap = (a - b).abs().max().item()
        if not gap <= weights * max(1e-3, b.abs().max().item()):
            problems.append(f"{name}: differs by {gap:.3g} of {b.abs().max().item():.3g}")
    return problems
