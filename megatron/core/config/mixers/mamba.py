"""Mamba-2, a selective state space (Dao and Gu, 2024, arXiv 2405.21060)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.mixers.recurrent import RecurrentCounts, RecurrentMixer
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RunConfig


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
        limits = hybrid.mamba_time_step_limit or (0.0, math.inf)  # a rule refuses other numbers of them than two
        return MambaSizes(
            hybrid.mamba_num_heads or 0,
            hybrid.mamba_head_dim,
            hybrid.mamba_num_groups,
            hybrid.mamba_state_dim,
            step_limits=(limits[0], limits[-1]),
        )


class Mamba(RecurrentMixer):
    """Mamba-2, alone in a layer or in parallel with attention."""

    name, symbol, title, module = "mamba", "M", "Mamba-2", "mixer"
    kernel_ops = frozenset({"causal_conv", "selective_scan"})
    heads_flag, groups_flag = "--mamba-num-heads", "--mamba-num-groups"

    def is_requested(self, model: ModelConfig) -> bool:
        """Whether the settings ask for it."""
        return super().is_requested(model) or model.hybrid.parallel_mamba

    def counts(self, model: ModelConfig) -> RecurrentCounts:
        """Return its sizes in a network."""
        sizes = MambaSizes.from_model(model)
        inner, shared, heads = sizes.inner_size, sizes.groups * sizes.state, sizes.heads
        return RecurrentCounts(
            heads=heads,
            groups=sizes.groups,
            parts=(("z", inner), ("x", inner), ("B", shared), ("C", shared), ("dt", heads)),
            inner_size=inner,
            conv_width=sizes.conv_width,
            conv_channels=inner + 2 * shared,
            state_elements=inner * sizes.state,
            widened=(4 * inner + 2 * heads, 6 * inner + 2 * heads),
        )

    def problems(self, run: RunConfig) -> Iterator[str]:
        """Yield problems of heads and groups, of limits and of the norm."""
        yield from super().problems(run)
        limits, epsilon = run.model.hybrid.mamba_time_step_limit, run.model.hybrid.mamba_norm_epsilon
        if limits and (len(limits) != 2 or not 0.0 <= limits[0] < limits[1]):
            given = " ".join(map(str, limits))
            yield f"--mamba-time-step-limit {given}: give the smallest and the largest, such as 0.001 inf"
        if epsilon <= 0:
            yield f"--mamba-norm-epsilon {epsilon:g} is no positive number; choose one such as 1e-5, or leave it out"
