"""OLMo 2, built like Llama, with norms behind each sublayer instead of before it, and norms over the queries and keys of all heads; and OLMo-hybrid.

    olmo_hybrid     most layers have a gated delta net, and their norms before mixer and MLP; its rates go up to two, so that a state may change
                    its sign; the norm of its heads has an epsilon of its own. No rotations where rope_theta is null

Files have a convolution each for q, k and v of a delta net; here it is one. transformers 5.23 saves three equal parts of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.config_json import format_layer_freq
from megatron.core.families.llama import (
    NO_BIAS,
    attention_mappings,
    mlp_mappings,
    parameter_mappings,
    read_llama_keys,
    write_llama_keys,
)
from megatron.core.families.parameter_mapping import (
    Family,
    ParameterMapping,
    concat_conversion,
    decoder_mappings_with_ends,
    module_mappings,
    rename_only_weight_mappings,
    same,
)
from megatron.core.families.qwen_next import USUAL, read_delta_net_layers

_NORMS = {"post_attention_layernorm": "post_attention_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"}
_HYBRID_NORMS = {
    "attention": {
        "post_attention_layernorm": "feedforward_layer_norm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    "gated_delta_net": {"input_layernorm": "attention_layer_norm", "pre_mlp_layernorm": "feedforward_layer_norm"},
}
_INITIAL = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
_EPSILON = 1e-5  # of the norms of a delta net's heads


_NORM_SETTINGS = {"norm_after_sublayer": True, "qk_layernorm": True, "qk_layernorm_across_heads": True}


def _read_olmo_config(keys: ForeignMapping) -> dict[str, Any]:
    return {**read_llama_keys(keys), **_NORM_SETTINGS}


OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    "olmo2",
    _read_olmo_config,
    write_llama_keys,
    partial(parameter_mappings, norms=_NORMS),
    pinned=NO_BIAS,
    usual=(("rms_norm_eps", 1e-5),),
)


def _read_olmo_hybrid_config(keys: ForeignMapping) -> dict[str, Any]:
    rope = keys.mapping.get("rope_parameters") or {}
    rotates = (rope if "rope_theta" in rope else keys.mapping).get("rope_theta", 1.0) is not None
    settings = read_llama_keys(keys)
    heads, linear = settings["num_attention_heads"], read_delta_net_layers(keys, settings["num_layers"])
    key_heads = keys.positive_int("linear_num_key_heads", heads)
    key_size = keys.positive_int("linear_key_head_dim", 3 * settings["hidden_size"] // (4 * key_heads) or 1)
    return {
        **settings,
        **({} if rotates else {"position_embedding_type": "none"}),
        **_NORM_SETTINGS,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": format_layer_freq(linear),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": keys.positive_int("linear_num_value_heads", heads),
        "linear_key_head_dim": key_size,
        "linear_value_head_dim": keys.positive_int("linear_value_head_dim", 2 * key_size),
        "linear_conv_kernel_dim": keys.positive_int("linear_conv_kernel_dim", 4),
        "linear_allow_neg_eigval": keys.boolean("linear_allow_neg_eigval", True),
        "linear_norm_epsilon": _EPSILON,
        "linear_norm_before_sublayer": True,
    }


def _write_olmo_hybrid_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    config = {
        **write_llama_keys(model, like),
        **{name: getattr(model.hybrid, name) for name in USUAL},
        "linear_allow_neg_eigval": model.hybrid.linear_allow_neg_eigval,
        "layer_types": [
            "linear_attention" if plan.mixer == "gated_delta_net" else "full_attention"
            for plan in network_layer_plans(model)
        ],
    }
    if not model.uses_rotary:
        return config | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
    return config


def olmo_hybrid_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """Return the mappings of all parameters of OLMo-hybrid, in the order of transformers."""
    rows: list[ParameterMapping] = []
    for plan in network_layer_plans(model):
        ours, theirs = f"decoder.layers.{plan.index}.", f"model.layers.{plan.index}."
        if plan.mixer == "gated_delta_net":
            mixer = _delta_net_mappings(model, f"{ours}self_attention.", f"{theirs}linear_attn.")
        else:
            mixer = attention_mappings(model, f"{ours}self_attention.", f"{theirs}self_attn.")
        norms = rename_only_weight_mappings(ours, theirs, _HYBRID_NORMS.get(plan.mixer, {}))
        rows += [*mlp_mappings(model, f"{ours}mlp.", f"{theirs}mlp."), *norms, *mixer]
    return decoder_mappings_with_ends(model, rows)


def _delta_net_mappings(model: ModelConfig, ours: str, theirs: str) -> list[ParameterMapping]:
    hybrid, heads = model.hybrid, model.hybrid.linear_num_value_heads
    keys, values = hybrid.linear_num_key_heads * hybrid.linear_key_head_dim, heads * hybrid.linear_value_head_dim
    sizes, conv = (
        concat_conversion(keys, keys, values, values, heads, heads),
        replace(concat_conversion(keys, keys, values), joined=True),
    )
    return [
        *(ParameterMapping(f"{ours}{name}", (f"{theirs}{name}",), same) for name in ("A_log", "dt_bias")),
        *rename_only_weight_mappings(ours, theirs, {"out_proj": "o_proj", "out_norm": "o_norm"}),
        *module_mappings(f"{ours}in_proj", *(f"{theirs}{part}_proj" for part in "qkvgba"), op=sizes),
        *module_mappings(f"{ours}conv1d", *(f"{theirs}{part}_conv1d" for part in "qkv"), op=conv),
    ]


OLMO_HYBRID = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    "olmo_hybrid",
    _read_olmo_hybrid_config,
    _write_olmo_hybrid_config,
    olmo_hybrid_mappings,
    silent=_INITIAL,
    pinned=NO_BIAS,
    usual=(("max_position_embeddings", 65536),),
    fallbacks=(("pad_token_id", None),),  # of the class: 100277
    respelled=(
        (r"\.input_layernorm\.", ".attention_layer_norm."),
        (r"\.post_attention_layernorm\.", ".feedforward_layer_norm."),
    ),
)
