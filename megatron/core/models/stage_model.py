"""What the networks have in common: a pipeline stage is built on the meta device, then its parameters get values."""

from __future__ import annotations

from typing import Self

import torch
from torch import nn

from megatron.core.parallel.rng import materialize_parameters
from megatron.core.transformer.context.layer_build_context import LayerBuildContext


class StageModel(nn.Module):
    """One pipeline stage of a network."""

    build: LayerBuildContext

    def materialize(self, seed: int, *, draw_on: torch.device | None = None) -> Self:
        """Allocate the parameters and draw their initial values from `seed`; return the model itself.

        draw_on: device on which random numbers are drawn; None: that of the mesh.
        """
        materialize_parameters(self, self.build.mesh, seed, draw_on=draw_on)
        return self
