"""The linear layers of each transformer layer: their names, which are those of their parameters, and their sizes, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron.core.config.mixers.mixer import LinearShape, Mixer
from megatron.core.config.settings.model import ModelConfig

EXPERTS = ".mlp.experts."  # in the names of all linear layers of experts


class LayerStructure(Protocol):
    """The fields of a layer's plan that determine which linear layers it has."""

    @property
    def index(self) -> int:
        """Number of the layer, from 0."""

    @property
    def mixers(self) -> Sequence[Mixer]:
        """Its one or two kinds of sequence mixers, of which the second runs in parallel to the first."""

    @property
    def has_cross_attention(self) -> bool:
        """Whether it has cross attention to an encoder."""

    @property
    def mlp(self) -> str:
        """Kind of MLP: dense, moe or none."""


def linear_shapes_of_layer(model: ModelConfig, plan: LayerStructure) -> dict[str, LinearShape]:
    """Return the shape of every linear layer of a transformer layer, by its path in the layer."""
    result = {
        f"{mixer.module}.{name}": shape for mixer in plan.mixers for name, shape in mixer.linear_shapes(model).items()
    }
    hidden = model.hidden_size
    if plan.has_cross_attention:
        result["cross_attention.linear_q"] = LinearShape(hidden, (("", model.query_projection_width),))
        result["cross_attention.linear_kv"] = LinearShape(
            hidden, (("k", model.key_projection_width), ("v", model.key_projection_width))
        )
        result["cross_attention.linear_proj"] = LinearShape(model.query_projection_width, (("", hidden),))
    widths = {} if plan.mlp == "none" else {"mlp": model.ffn_hidden_size}
    if plan.mlp == "moe":
        shared = model.moe.moe_shared_expert_intermediate_size
        widths = {"mlp.experts": model.moe.moe_ffn_hidden_size or model.ffn_hidden_size}
        widths |= {} if shared is None else {"mlp.shared_experts": shared}
    for path, width in widths.items():
        parts = (("gate", width), ("up", width)) if model.has_gated_mlp else (("", width),)
        result[f"{path}.linear_fc1"] = LinearShape(hidden, parts)
        result[f"{path}.linear_fc2"] = LinearShape(width, (("", hidden),))
    return result


def layer_module_path(model: ModelConfig, plan: LayerStructure) -> str:
    """Return the global name of a layer, such as `decoder.layers.3`."""
    return f"{model.architecture.layers[plan.has_cross_attention]}.{plan.index}"
