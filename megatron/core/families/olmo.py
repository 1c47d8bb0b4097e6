"""OLMo 2, built like Llama, with norms behind each sublayer instead of before it, and norms over the queries and keys of all heads; and OLMo-hybrid.

    olmo_hybrid     most layers have a gated delta net, and their norms before mixer and MLP; its rates go up to two, so that a state may change
                    its sign; the norm of its heads has an epsilon of its own. No rotations where rope_theta is null

Files have a convolution each for q, k and v of a delta net; here it is one. transformers 5.23 saves three equal parts of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.core.config.plan import network_layer_plans
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.llama import (
    COPIES,
    SKIPPED,
    attention_mappings,
    common_config_keys,
    decoder_mappings,
    mlp_mappings,
    read_common_keys,
)
from megatron.core.families.qwen_next import USUAL, read_delta_net_layers
from megatron.core.families.rules import Family, ParameterMapping, concat, same
from megatron.core.families.settings import ConfigReader, format_layer_pattern, preserved_keys

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


def _from_olmo_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys = ConfigReader({"rms_norm_eps": 1e-5, **config})
    keys.one_of("attention_bias", (False,), False)
    settings = read_common_keys(keys)
    return {
        **settings,
        "norm_after_sublayer": True,
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
    }, keys.all_problems()


def _to_olmo_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {**preserved_keys(like), **common_config_keys(model, like), "attention_bias": False}


def _parameter_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """All parameters, in the order in which transformers has them."""
    return tuple(decoder_mappings(model, attention_mappings, {"dense": mlp_mappings}, _NORMS))


OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    "olmo2",
    _from_olmo_config,
    _to_olmo_config,
    _parameter_mappings,
    base="model.",
    skipped=SKIPPED,
    copies=COPIES,
)


def _from_olmo_hybrid_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    rope = config.get("rope_parameters") or {}
    rotates = (rope if "rope_theta" in rope else config).get("rope_theta", 1.0) is not None
    keys = ConfigReader(config)
    for name in _INITIAL:
        keys.pop(name)
    keys.one_of("attention_bias", (False,), False)
    settings = read_common_keys(keys)
    heads, linear = settings["num_attention_heads"], read_delta_net_layers(keys, settings["num_layers"])
    key_heads = keys.positive_int("linear_num_key_heads", heads)
    key_size = keys.positive_int("linear_key_head_dim", 3 * settings["hidden_size"] // (4 * key_heads) or 1)
    return {
        **settings,
        **({} if rotates else {"position_embedding_type": "none"}),
        "norm_after_sublayer": True,
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": format_layer_pattern(linear),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": keys.positive_int("linear_num_value_heads", heads),
        "linear_key_head_dim": key_size,
        "linear_value_head_dim": keys.positive_int("linear_value_head_dim", 2 * key_size),
        "linear_conv_kernel_dim": keys.positive_int("linear_conv_kernel_dim", 4),
        "linear_allow_neg_eigval": keys.boolean("linear_allow_neg_eigval", True),
        "linear_norm_epsilon": _EPSILON,
        "linear_norm_before_sublayer": True,
    }, keys.all_problems()


def _to_olmo_hybrid_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    config = {
        **preserved_keys(like, *_INITIAL),
        **common_config_keys(model, like),
        **{name: getattr(model.hybrid, name) for name in USUAL},
        "attention_bias": False,
        "linear_allow_neg_eigval": model.hybrid.linear_allow_neg_eigval,
        "layer_types": [
            "linear_attention" if plan.mixer == "gated_delta_net" else "full_attention"
            for plan in network_layer_plans(model)
        ],
    }
    if not model.uses_rotary:
        return config | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
    return config


def hybrid_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """All parameters of OLMo-hybrid, in the order in which transformers has them."""
    rows = [ParameterMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), same)]
    for plan in network_layer_plans(model):
        ours, theirs = f"decoder.layers.{plan.index}.", f"model.layers.{plan.index}."
        if plan.mixer == "gated_delta_net":
            mixer = _delta_net_mappings(model, f"{ours}self_attention.", f"{theirs}linear_attn.")
        else:
            mixer = attention_mappings(model, f"{ours}self_attention.", f"{theirs}self_attn.")
        norms = _HYBRID_NORMS.get(plan.mixer, {})
        rows += [
            *mlp_mappings(model, f"{ours}mlp.", f"{theirs}mlp."),
            *(
                ParameterMapping(f"{ours}{mine}.weight", (f"{theirs}{there}.weight",), same)
                for mine, there in norms.items()
            ),
            *mixer,
        ]
    rows.append(ParameterMapping("decoder.final_layernorm.weight", ("model.norm.weight",), same))
    return (
        *rows,
        *(() if model.ties_embeddings else (ParameterMapping("output_layer.weight", ("lm_head.weight",), same),)),
    )


def _delta_net_mappings(model: ModelConfig, ours: str, theirs: str) -> list[ParameterMapping]:
    hybrid, heads = model.hybrid, model.hybrid.linear_num_value_heads
    keys, values = hybrid.linear_num_key_heads * hybrid.linear_key_head_dim, heads * hybrid.linear_value_head_dim
    names = {
        "A_log": "A_log",
        "dt_bias": "dt_bias",
        "out_proj.weight": "o_proj.weight",
        "out_norm.weight": "o_norm.weight",
    }
    return [
        *(ParameterMapping(f"{ours}{mine}", (f"{theirs}{there}",), same) for mine, there in names.items()),
        ParameterMapping(
            f"{ours}in_proj.weight",
            tuple(f"{theirs}{part}_proj.weight" for part in "qkvgba"),
            concat(keys, keys, values, values, heads, heads),
        ),
        ParameterMapping(
            f"{ours}conv1d.weight",
            tuple(f"{theirs}{part}_conv1d.weight" for part in "qkv"),
            replace(concat(keys, keys, values), joined=True),
        ),
    ]


OLMO_HYBRID = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    "olmo_hybrid",
    _from_olmo_hybrid_config,
    _to_olmo_hybrid_config,
    hybrid_mappings,
    base="model.",
    skipped=SKIPPED,
    copies=COPIES,
    fallbacks=(("pad_token_id", None),),  # of the class: 100277
    respelled=(
        (r"\.input_layernorm\.", ".attention_layer_norm."),
        (r"\.post_attention_layernorm\.", ".feedforward_layer_norm."),
    ),
)
