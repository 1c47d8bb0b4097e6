"""The two halves of a layer: which module is a mixer or an MLP of a plan, and the same with fixed factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron.core.config.mixers.attention import Attention
from megatron.core.config.mixers.gated_delta_net import DeltaNet, DeltaNetSizes
from megatron.core.config.mixers.mamba import Mamba, MambaSizes
from megatron.core.config.mixers.mla import LatentAttention
from megatron.core.config.plan.layers import LayerPlan
from megatron.core.config.settings.multipliers import MultiplierConfig
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext, multiply_unless_one
from megatron.core.transformer.context.rope import RotaryTable
from megatron.core.transformer.mixers.attention import SelfAttention
from megatron.core.transformer.mixers.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.mixers.mamba import MambaMixer
from megatron.core.transformer.mixers.mla import MultiLatentAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import MoELayer


class MultipliedAttention(SelfAttention):
    """Attention of which input, keys and output are multiplied by fixed factors (muP; Falcon-H1)."""

    def split_heads(self, qkv: Tensor, rotation: RotaryTable | None) -> Sequence[Tensor]:
        """Split. See `SelfAttention.split_heads`; a rotation is linear, so keys may be multiplied before it or behind it."""
        factors = self.build.model.multipliers
        *parts, k, v = super().split_heads(multiply_unless_one(qkv, factors.attention_in_multiplier), rotation)
        return *parts, multiply_unless_one(k, factors.key_multiplier), v

    def forward(self, normed: Tensor, context: ForwardContext, bias: Tensor | None = None) -> Tensor:
        """Attend as `SelfAttention.forward`. normed: [s or s/tp, b, h]; returns like it."""
        output = super().forward(normed, context, bias)
        return multiply_unless_one(output, self.build.model.multipliers.attention_out_multiplier)


class MultipliedMamba(MambaMixer):
    """Mamba-2 of which z, x, B, C, dt and the output are multiplied by fixed factors (Falcon-H1)."""

    def _split_projection(self, projected: Tensor) -> tuple[Tensor, ...]:
        parts, factors = super()._split_projection(projected), self.build.model.multipliers.mamba_factors
        return tuple(part * factor for part, factor in zip(parts, factors, strict=True)) if factors else parts

    def forward(self, normed: Tensor, context: ForwardContext, bias: Tensor | None = None) -> Tensor:
        """Run the mixer as `MambaMixer.forward`. normed: [s or s/tp, b, h]; returns like it."""
        output = super().forward(normed, context, bias)
        return multiply_unless_one(output, self.build.model.multipliers.ssm_out_multiplier)


class MultipliedMLP(MLP):
    """A gated MLP without biases of which gate and output are multiplied by fixed factors (Falcon-H1)."""

    def forward(self, normed: Tensor, context: ForwardContext) -> Tensor:
        """Return the MLP's output. normed: [s or s/tp, b, h]; returns like it."""
        gate_factor, output_factor = self.build.model.multipliers.mlp_factors
        wide = self.build.project(self.linear_fc1, normed)
        if gate_factor != 1.0:
            gate, up = wide.chunk(2, dim=-1)
            wide = torch.cat((gate * gate_factor, up), dim=-1)
        return multiply_unless_one(self.linear_fc2(self.build.apply_activation(wide)), output_factor)


# The rows of `config.mixers.table.MIXERS`, and those of them that can be multiplied by fixed factors.
MIXER_MODULES: dict[str, Callable[[LayerBuildContext, LayerPlan], nn.Module]] = {
    Attention.name: SelfAttention,
    LatentAttention.name: MultiLatentAttention,
    Mamba.name: lambda build, plan: MambaMixer(build, MambaSizes.from_model(build.model)),
    DeltaNet.name: lambda build, plan: GatedDeltaNet(build, DeltaNetSizes.from_model(build.model)),
}
MULTIPLIED: Mapping[str, Callable[[LayerBuildContext, LayerPlan], nn.Module]] = {
    Attention.name: MultipliedAttention,
    Mamba.name: lambda build, plan: MultipliedMamba(build, MambaSizes.from_model(build.model)),
}


def make_mixers(plan: LayerPlan, build: LayerBuildContext) -> tuple[nn.Module | None, nn.Module | None]:
    """Create a layer's mixers by Megatron's names in it: `mixer`, which is Mamba-2, and `self_attention`, every other one."""
    table = MIXER_MODULES if build.model.multipliers == MultiplierConfig() else {**MIXER_MODULES, **MULTIPLIED}
    # Of two in parallel one is Mamba-2, so that no name is given twice.
    modules = {mixer.module: table[mixer.name](build, plan) for mixer in plan.mixers}
    return modules.get("mixer"), modules.get("self_attention")


def make_mlp(plan: LayerPlan, build: LayerBuildContext) -> MoELayer | MLP | None:
    """Create the MLP or the experts of a plan, or None."""
    if plan.mlp != "dense":
        return MoELayer(build, plan) if plan.mlp == "moe" else None
    return MLP(build) if build.model.multipliers == MultiplierConfig() else MultipliedMLP(build)
