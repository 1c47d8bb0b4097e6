"""Llama and those built like it: rotary positions, RMSNorm, gated MLP, grouped heads.

Llama 2 and 3 (scaled rotations included), SmolLM2 (tied), Mistral. Queries, keys and values, gate and up are matrices of
their own there, and parts of one here. Both turn the halves of a head, so no row changes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.config_json import (
    PlainKeys,
    read_plain_keys,
    read_rope_keys,
    rope_config_keys,
    settings_from_head_counts,
    sliding_window_to_settings,
    window_and_layers_of_model,
    write_plain_keys,
)
from megatron.core.families.parameter_mapping import (
    BIASED,
    Family,
    ParameterMapping,
    concat_conversion,
    decoder_mappings_with_ends,
    module_mappings,
    rename_only_weight_mappings,
)

Part = Callable[
    [ModelConfig, str, str], list[ParameterMapping]
]  # rows of a part of a layer: the network, our beginning, theirs

_MOST_LAYERS = 10_000
NO_BIAS = (("attention_bias", False),)


_KEYS: PlainKeys = {
    "vocab_size": ("true_vocab_size", None),
    "hidden_size": ("hidden_size", None),
    "intermediate_size": ("ffn_hidden_size", None),
    "num_hidden_layers": ("num_layers", None),
    "num_attention_heads": ("num_attention_heads", None),
    "max_position_embeddings": ("max_position_embeddings", 2048),  # it shapes no tensor
    "initializer_range": ("init_method_std", 0.02),
    "rms_norm_eps": ("norm_epsilon", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
}


def read_llama_keys(
    keys: ForeignMapping, *, tied: bool = False, base: float = 10000.0, latent: bool = False
) -> dict[str, Any]:
    """Read the settings that all Llama-like networks have. tied, base: defaults; latent: see `read_rope_keys`."""
    settings = read_plain_keys(keys, _KEYS)
    hidden, heads, layers = (settings[name] for name in ("hidden_size", "num_attention_heads", "num_layers"))
    keys.one_of("hidden_act", ("silu",), "silu")
    if layers > _MOST_LAYERS:  # which some kinds count one by one
        keys.problems.append(f"num_hidden_layers: {layers} are more than any network has")
        settings["num_layers"] = 1
    return {
        **settings,
        **settings_from_head_counts(heads, keys.positive_int("num_key_value_heads", heads)),
        "kv_channels": keys.positive_int("head_dim", hidden // heads or 1),
        "untie_embeddings_and_output_weights": not keys.boolean("tie_word_embeddings", tied),
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        **read_rope_keys(keys, base=base, latent=latent),
    }


def write_llama_keys(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that all Llama-like networks have. like: an earlier config.json."""
    return {
        **write_plain_keys(model, _KEYS),
        "num_key_value_heads": model.num_query_groups,
        "hidden_act": "silu",
        "tie_word_embeddings": model.ties_embeddings,
        **rope_config_keys(model, like),
    }


NORMS = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}  # ours -> transformers' names


def decoder_mappings(
    model: ModelConfig, attention: Part, mlps: Mapping[str, Part], norms: Mapping[str, str] = NORMS
) -> tuple[ParameterMapping, ...]:
    """Return the mappings of all parameters of a Llama-like network, in the order of transformers. attention, mlps:
    functions that give those of a sublayer, MLPs by kind (dense, moe). norms: our names -> those of transformers.
    """
    rows: list[ParameterMapping] = []
    for plan in network_layer_plans(model):
        ours, theirs = f"decoder.layers.{plan.index}.", f"model.layers.{plan.index}."
        rows += decoder_layer_mappings(model, ours, theirs, attention, mlps[plan.mlp], norms)
    return decoder_mappings_with_ends(model, rows)


def decoder_layer_mappings(
    model: ModelConfig, ours: str, theirs: str, attention: Part, mlp: Part, norms: Mapping[str, str] = NORMS
) -> list[ParameterMapping]:
    """Return the mappings of one layer. ours, theirs: prefixes of its names."""
    return [
        *attention(model, f"{ours}self_attention.", f"{theirs}self_attn."),
        *mlp(model, f"{ours}mlp.", f"{theirs}mlp."),
        *rename_only_weight_mappings(ours, theirs, norms),
    ]


def attention_mappings(model: ModelConfig, ours: str, theirs: str) -> list[ParameterMapping]:
    """Return the mappings of an attention block: q, k and v are three matrices there and one here."""
    heads, kinds = (
        concat_conversion(model.query_projection_width, model.key_projection_width, model.key_projection_width),
        _linear_parameter_names(model.add_bias_linear),
    )
    names = [f"{theirs}{part}_proj" for part in "qkv"]
    qkv_kinds = BIASED if model.add_qkv_bias else kinds
    norms = {f"{part}_layernorm": f"{part}_norm" for part in "qk"} if model.qk_layernorm else {}
    return [
        *module_mappings(f"{ours}linear_qkv", *names, op=heads, kinds=qkv_kinds),
        *module_mappings(f"{ours}linear_proj", f"{theirs}o_proj", kinds=kinds),
        *rename_only_weight_mappings(ours, theirs, norms),
    ]


def mlp_mappings(model: ModelConfig, ours: str, theirs: str) -> list[ParameterMapping]:
    """Return the mappings of a gated MLP: gate and up are two matrices there and one here."""
    return gated_mlp_mappings(ours, theirs, model.ffn_hidden_size, bias=model.add_bias_linear)


def gated_mlp_mappings(ours: str, theirs: str, width: int, *, bias: bool = False) -> list[ParameterMapping]:
    """Return the mappings of a gated MLP of this width. ours, theirs: prefixes of its names."""
    names, both = (f"{theirs}gate_proj", f"{theirs}up_proj"), concat_conversion(width, width)
    return [
        *module_mappings(f"{ours}linear_fc1", *names, op=both, kinds=_linear_parameter_names(bias)),
        *module_mappings(f"{ours}linear_fc2", f"{theirs}down_proj", kinds=_linear_parameter_names(bias)),
    ]


def _linear_parameter_names(bias: bool) -> tuple[str, ...]:
    """Return the kinds of parameters of a linear layer: weight, and bias if it has one."""
    return BIASED if bias else ("weight",)


def parameter_mappings(model: ModelConfig, norms: Mapping[str, str] = NORMS) -> tuple[ParameterMapping, ...]:
    """Return the mappings of all parameters of a network whose layers are all alike. norms: see `decoder_mappings`."""
    return decoder_mappings(model, attention_mappings, {"dense": mlp_mappings}, norms)


def _read_llama_config(keys: ForeignMapping) -> dict[str, Any]:
    attention, mlp = keys.boolean("attention_bias", False), keys.boolean("mlp_bias", False)
    if attention != mlp:
        keys.problems.append(
            f"attention_bias: {attention} with mlp_bias: {mlp}; here all linear layers have a bias or none"
        )
    return {**read_llama_keys(keys), "add_bias_linear": attention}


def _write_llama_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **write_llama_keys(model, like),
        "head_dim": model.kv_channels,
        "attention_bias": model.add_bias_linear,
        "mlp_bias": model.add_bias_linear,
    }


def read_sliding_window_settings(keys: ForeignMapping, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read `sliding_window` as settings for all layers; {} if it covers every position."""
    window = keys.positive_int("sliding_window", settings["max_position_embeddings"])
    return sliding_window_to_settings(window, [window < settings["max_position_embeddings"]] * settings["num_layers"])


def write_sliding_window_key(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return `sliding_window` for a config.json; an earlier one that covers every position is kept."""
    window, _ = window_and_layers_of_model(model)
    earlier = like.get("sliding_window")
    return {
        "sliding_window": earlier if window is None and earlier and earlier >= model.max_position_embeddings else window
    }


def _read_mistral_config(keys: ForeignMapping) -> dict[str, Any]:
    settings = read_llama_keys(keys)
    return {**settings, **read_sliding_window_settings(keys, settings)}


def _write_mistral_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {**write_llama_keys(model, like), "head_dim": model.kv_channels, **write_sliding_window_key(model, like)}


LLAMA = Family("llama", "LlamaForCausalLM", "llama", _read_llama_config, _write_llama_config, parameter_mappings)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    "mistral",
    _read_mistral_config,
    _write_mistral_config,
    parameter_mappings,
    usual=(("max_position_embeddings", 131072), ("num_key_value_heads", 8), ("sliding_window", 4096)),
)
