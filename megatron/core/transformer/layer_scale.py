"""LayerScale: what a sublayer adds to the residual stream, multiplied by a learned factor a channel (Touvron et al., 2021)."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.parallel.spec import ParamSpec, constant_initializer, meta_parameter
from megatron.core.transformer.build import BuildContext


class LayerScale(nn.Module):
    """x times a vector of the width of the residual stream. initial: value of all its elements."""

    def __init__(self, build: BuildContext, initial: float) -> None:
        super().__init__()
        spec = ParamSpec(
            (build.model.hidden_size,), constant_initializer(initial), "vector", sum_over=build.region.gradient_sum_axes
        )
        self.weight = meta_parameter(spec, build.mesh, build.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x: [s or s/tp, b, h]. Returns the same shape."""
        return x * self.weight
