"""What the networks have in common: a pipeline stage is built on the meta device, then its parameters get values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.settings.run import TrainConfig
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.transformer.context.layer_build_context import LayerBuildContext

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.state_hooks import StateHooks


class StageModel(nn.Module, ABC):
    """One pipeline stage of a network. state_hooks: what the network changes in checkpoints, the same on all stages."""

    stage: StageSpec
    build: LayerBuildContext
    state_hooks: Sequence[StateHooks] = ()

    @abstractmethod
    def received_tensor_specs(self, train: TrainConfig) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return (shape, dtype) of each tensor that a pipeline stage receives from the previous one."""

    def materialize(self, seed: int, *, draw_on: torch.device | None = None) -> Self:
        """Allocate the parameters and draw their initial values from `seed`; return the model itself.

        draw_on: device on which random numbers are drawn; None: that of the mesh.
        """
        materialize_parameters(self, self.build.mesh, seed, draw_on=draw_on)
        return self
