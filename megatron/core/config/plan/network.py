"""Which network a config describes: the settings that make its function, without those that this network does not use.

    role network or adaptable  ->  used by this network?  ->  written in one way  ->  equal values are one function

Two configs are one network when `network_setting_differences` is empty: a resumed run, a published config.json and an export to another
format ask here, and none keeps a list of its own.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from megatron.core.config.flags.declare import config_to_flat_dict, field_resume_roles
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.settings.hybrid import HybridConfig
from megatron.core.config.settings.model import MLAConfig, ModelConfig, PositionConfig, RequestedModel
from megatron.core.config.settings.moe import MoEConfig
from megatron.core.config.settings.vision import VisionConfig


def _names_starting(config_class: type, prefix: str, *, without: str = "") -> tuple[str, ...]:
    return tuple(
        field.name for field in fields(config_class) if field.name.startswith(prefix) and field.name != without
    )


_ROTARY = (
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_type",
    "no_rope_freq",
)
_SCALING = _names_starting(PositionConfig, "rope_scaling_")
YARN = ("rotary_scaling_factor", *_names_starting(PositionConfig, "yarn_"), "mscale", "mscale_all_dim")
_RELATIVE = ("relative_attention_num_buckets", "relative_attention_max_distance")
_LATENT = _names_starting(MLAConfig, "", without="multi_latent_attention")
_EXPERTS = _names_starting(MoEConfig, "", without="num_experts")
_MAMBA = _names_starting(HybridConfig, "mamba_")
_DELTA_NET = _names_starting(HybridConfig, "linear_", without="linear_attention_freq")
_ATTENTION = ("num_attention_heads", "kv_channels", "num_query_groups", "qk_layernorm", "softmax_scale")
_VISION = tuple(name for name, role in field_resume_roles(VisionConfig).items() if role in ("network", "adaptable"))
_PROJECTION = tuple(
    name for name in _VISION if "projection" in name or "shuffle" in name or name == "disable_vision_class_token"
)
_ADAPTERS = ("lora_alpha", "lora_targets", "lora_rslora", "dora")


def network_fields() -> dict[str, str]:
    """Return field name -> role, `network` or `adaptable`, of every setting that affects what a network computes."""
    return {name: role for name, role in field_resume_roles(RequestedModel).items() if role in ("network", "adaptable")}


def unused_settings(model: ModelConfig) -> frozenset[str]:
    """Return the names of settings that have no effect in this network, given its other settings. model: resolved."""
    rope, moe, kinds = model.rope, model.moe, {plan.mlp for plan in network_layer_plans(model)}
    latent, mixers = (
        model.mla.multi_latent_attention,
        set[str]().union(*(plan.mixer_kinds for plan in network_layer_plans(model))),
    )
    without_effect: dict[tuple[str, ...], bool] = {
        _ROTARY: not model.uses_rotary,
        _SCALING: not (model.uses_rotary and rope.use_rope_scaling),
        YARN: not (model.uses_rotary and rope.is_yarn),
        _RELATIVE: rope.position_embedding_type != "relative",
        ("mrope_section",): rope.position_embedding_type != "mrope",
        ("max_position_embeddings",): rope.position_embedding_type != "learned_absolute",
        _LATENT: not latent,
        ("kv_channels", "num_query_groups", "rotary_interleaved"): latent,
        _ATTENTION: not mixers & {"attention", "mla"},
        ("moe_layer_freq", "num_layers"): model.is_hybrid,  # as the pattern says
        _MAMBA: "mamba" not in mixers,
        _DELTA_NET: "gated_delta_net" not in mixers,
        ("linear_attention_freq",): model.hybrid.experimental_attention_variant is None,
        _EXPERTS: not moe.num_experts,
        _ADAPTERS: not model.adapter.has_adapters,
        ("ffn_hidden_size",): "dense" not in kinds,
        ("moe_router_pre_softmax",): moe.moe_router_score_function != "softmax",
        ("moe_router_group_topk", "moe_router_group_score"): not moe.moe_router_num_groups,
        ("moe_shared_expert_gate",): not moe.moe_shared_expert_intermediate_size,
        ("activation_func_clamp_value", "glu_linear_offset"): not model.has_gated_mlp,
        ("window_attn_skip_freq",): model.window_size is None,
        ("mtp_use_repeated_layer",): (model.mtp.mtp_num_layers or 0) < 2,
        ("scale_tied_logits",): not model.ties_embeddings or model.reward_head,
        ("untie_embeddings_and_output_weights", "final_logit_softcap"): model.reward_head,
        ("bert_binary_head",): model.architecture != "bert",
        _VISION: not model.has_vision and model.architecture != "vit",
        _PROJECTION: not model.has_vision,
        ("num_classes",): model.architecture != "vit",
        ("pixel_shuffle_factor",): not model.vision.pixel_shuffle,
        ("encoder_num_layers", "decoder_num_layers"): model.architecture != "t5",
    }
    return frozenset(name for names, holds in without_effect.items() if holds for name in names)


def network_setting_differences(a: ModelConfig, b: ModelConfig) -> list[str]:
    """Return the settings by which two resolved networks compute different functions, without those neither uses."""
    idle, given, canonical = (
        unused_settings(a) & unused_settings(b),
        (config_to_flat_dict(a), config_to_flat_dict(b)),
        (canonical_values(a), canonical_values(b)),
    )
    # Equal words that mean two things do so because of another setting, which is named itself.
    return [
        name
        for name in network_fields()
        if name not in idle and canonical[0][name] != canonical[1][name] and given[0][name] != given[1][name]
    ]


def canonical_values(model: ModelConfig) -> dict[str, Any]:
    """Return all settings by field name, with different spellings of the same network made equal."""
    values, rows = config_to_flat_dict(model), network_layer_plans(model)
    values["moe_router_topk_scaling_factor"] = values["moe_router_topk_scaling_factor"] or 1.0
    values["mtp_num_layers"] = values["mtp_num_layers"] or None
    values["moe_layer_freq"] = [plan.mlp for plan in rows]
    values["linear_attention_freq"] = [plan.mixer for plan in rows]
    values["hybrid_layer_pattern"] = (model.hybrid.layer_symbols, model.hybrid.mtp_patterns)
    variant = values["experimental_attention_variant"]
    values["experimental_attention_variant"] = "gated_delta_net" if variant == "gdn" else variant
    values["mamba_time_step_limit"] = list(values["mamba_time_step_limit"]) or [0.0, math.inf]
    values["no_rope_freq"] = [plan.rope for plan in rows]
    values["window_attn_skip_freq"] = [plan.window is not None for plan in rows]
    window = model.parsed_window_size
    values["window_size"] = (
        (window[0], -1) if window and model.architecture == "gpt" else window
    )  # causality has the right side
    if model.rope.is_yarn and model.rope.position_embedding_type in (
        "rope",
        "yarn",
    ):  # there are two ways to say so, and stretched by one it is none
        values["position_embedding_type"] = "rope"
        values["rope_type"] = "yarn" if model.rope.rotary_scaling_factor > 1 else "rope"
    return values
