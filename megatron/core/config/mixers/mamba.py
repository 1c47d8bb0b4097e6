"""Mamba-2, a selective state space (Dao and Gu, 2024, arXiv 2405.21060): its sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.core.config.settings.model import ModelConfig


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """Sizes of the mixer. heads, head: number of heads and size of one. groups, state: B and C are shared by heads of a group; size of the state.

    step_limits: smallest and largest time step (Nemotron-H as published: 0.001 and infinity).
    """

    heads: int
    head: int = 64
    groups: int = 8
    state: int = 128
    conv_width: int = 4
    step_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def inner_size(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head

    @staticmethod
    def from_model(model: ModelConfig) -> MambaSizes:
        """Return the sizes from the --mamba-* settings of a network."""
        hybrid = model.hybrid
        low, high = hybrid.mamba_time_step_limit or (0.0, math.inf)
        return MambaSizes(
            hybrid.mamba_num_heads or 0,
            hybrid.mamba_head_dim,
            hybrid.mamba_num_groups,
            hybrid.mamba_state_dim,
            step_limits=(low, high),
        )
