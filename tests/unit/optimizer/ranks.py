"""What the ranks of a pool do in the tests of this package."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron.core.optimizer.clip import count_zeros, global_norm
from tests.helpers import tiny
from tests.helpers.training import fill_gradients


def weights_norm_here(changes: dict[str, Any]) -> float:
    """Norm of the initial weights, as this rank's optimizer finds it."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return float(tiny.trainer_of(tiny.run_of(tiny.config(ranks, **changes))).optimizer.weights_norm())


def measure_here(changes: dict[str, Any]) -> tuple[float, int, float]:
    """Norm and zeros of a known gradient, and norm of the weights, as this rank's optimizer finds them."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(ranks, **changes)))
    fill_gradients(trainer)
    optimizer = trainer.optimizer
    norm = global_norm(optimizer.segments, trainer.run.mesh)
    zeros = count_zeros(optimizer.segments, trainer.run.mesh)
    assert norm.dtype == torch.float64
    return float(norm), int(zeros), float(optimizer.weights_norm())
