"""The position-wise MLP: up, activation (gated or not), down."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.parallel.spec import Part
from megatron.core.tensor_parallel.linear import ColumnLinear, RowLinear
from megatron.core.transformer.build import Build
from megatron.core.transformer.passing import Pass


class MLP(nn.Module):
    """linear_fc2(activation(linear_fc1(x))); gated: linear_fc1 is [gate | up]."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        model = build.model
        self.build = build
        part = Part(model.ffn_hidden_size)
        self.linear_fc1 = ColumnLinear(
            model.hidden_size, (part, part) if model.gated else (part,), bias=model.add_bias_linear,
            init=build.initial(), region=build.region, mesh=build.mesh, dtype=build.dtype)
        self.linear_fc2 = RowLinear(
            model.ffn_hidden_size, model.hidden_size, bias=model.add_bias_linear, init=build.initial_output(),
            region=build.region, mesh=build.mesh, dtype=build.dtype)
        self.act = build.kernels.gated_activation if model.gated else build.kernels.activation

    def forward(self, x: Tensor, norm: nn.Module | None, one: Pass) -> tuple[Tensor, Tensor]:
        """x: [s or s/tp, b, h], before its norm. Returns the MLP's output and the normed input, both like x."""
        wide, normed = self.build.normed_linear(norm, self.linear_fc1, x)
        return self.linear_fc2(self.act(wide, self.build.model.activation)), normed
