"""The linear layers of each transformer layer: their names, which are those of their parameters, and their sizes, without torch."""

from __future__ import annotations

from megatron.core.config.mixers.mixer import LinearShape
from megatron.core.config.plan.layers import LayerPlan
from megatron.core.config.settings.model import ModelConfig

EXPERTS = ".mlp.experts."  # in the names of all linear layers of experts


def linear_shapes_of_layer(model: ModelConfig, plan: LayerPlan) -> dict[str, LinearShape]:
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


def layer_module_path(model: ModelConfig, plan: LayerPlan) -> str:
    """Return the global name of a layer, such as `decoder.layers.3`."""
    return f"{model.architecture.layers[plan.has_cross_attention]}.{plan.index}"
