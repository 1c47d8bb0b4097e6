"""LayerScale: what a sublayer adds to the residual stream, multiplied by a learned factor a channel (Touvron et al., 2021)."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.parallel.spec import ParamSpec, constant_initializer, meta_parameter
from megatron.core.transformer.layer_build_context import LayerBuildContext


class LayerScale(nn.Module):
    """x times a vector of the width of the residual stream. initial: value of all its elements."""

    def __init__(self, build: LayerBuildContext, initial: float) -> None:
        super().__init__()
        spec = ParamSpec(
            (build.model.hidden_size,),
            constant_initializer(initial),
            "vector",
            sum_over=build.tp_region.gradient_sum_axes,
        )
        self.weight = meta_parameter(spec, build.mesh, build.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the learned factor of each channel. x: [s or s/tp, b, h]."""
        return x * self.weight
