"""The position-wise MLP: up, activation (gated or not), down."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.parallel.spec import FusedWeightSegment, ParamSpec, meta_parameter
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext


class MLP(nn.Module):
    """linear_fc2(activation(linear_fc1(x))); gated: linear_fc1 is [gate | up]."""

    def __init__(self, build: LayerBuildContext, *, width: int | None = None, weighs: bool = False) -> None:
        """width: left out, that of the network's MLPs. weighs: the output is multiplied by a sigmoid of the token."""
        super().__init__()
        model = build.model
        self.build = build
        part = FusedWeightSegment(model.ffn_hidden_size if width is None else width)
        parts = (part, part) if model.has_gated_mlp else (part,)
        self.linear_fc1 = build.make_column_linear(model.hidden_size, parts, bias=model.add_bias_linear)
        self.linear_fc2 = build.make_row_linear(part.size, bias=model.add_bias_linear)
        gate = ParamSpec(
            (1, model.hidden_size), build.init_method(), "matrix", sum_over=build.tp_region.gradient_sum_axes
        )
        self.gate_weight = meta_parameter(gate, build.mesh, build.dtype) if weighs else None

    def forward(self, normed: Tensor, context: ForwardContext) -> Tensor:
        """Return the MLP's output. normed: [s or s/tp, b, h]; returns like it."""
        # A kernel may add the bias together with the activation.
        skips = self.build.adds_bias_in_activation
        wide = self.build.project(partial(self.linear_fc1, skip_bias_add=skips), normed)  # [s, b, f/tp], gated 2 f/tp
        output = self.linear_fc2(self.build.apply_activation(wide, self.linear_fc1.bias if skips else None))
        if self.gate_weight is not None:
            output = output * self.build.project(partial(F.linear, weight=self.gate_weight), normed).sigmoid()
        return output
