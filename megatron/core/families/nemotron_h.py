"""Mamba-2 and Nemotron-H: layers of one residual sum each, of Mamba-2 alone, or of that, attention, MLPs and experts by turns.

    mamba2        all layers alike; time steps between the numbers of time_step_limit
    nemotron_h    layers_block_type, or the symbols of hybrid_override_pattern; time steps from time_step_min on, whatever time_step_limit says;
                  no positions; MLPs and experts with the square of ReLU, without a gate

Matrices are whole on both sides: z, x, B, C and dt stand in one in_proj, x, B and C in one convolution.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from megatron.core.config.foreign.mapping import ForeignMapping, short_value
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.config_json import PlainKeys, read_plain_keys, settings_from_head_counts, write_plain_keys
from megatron.core.families.deepseek import (
    note_sigmoid_routing_problems,
    read_group_limited_routing_keys,
    read_routed_scaling_factor,
    write_routing_keys,
)
from megatron.core.families.llama import NO_BIAS, attention_mappings
from megatron.core.families.parameter_mapping import (
    Family,
    ParameterMapping,
    decoder_mappings_with_ends,
    module_mappings,
    per_expert_conversion,
    rename_only_weight_mappings,
    same,
)

_INITIAL = ("time_step_floor", "time_step_max", "time_step_rank", "rescale_prenorm_residual")  # said once, at the start
_KERNELS = ("chunk_size", "residual_in_fp32", "use_mamba_kernels", "num_logits_to_keep", "mamba_ssm_cache_dtype")
_AHEAD = ("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
_SAYS_NOTHING = (
    *_INITIAL,
    *_KERNELS,
    *_AHEAD,
    "expand",
    "moe_shared_expert_overlap",
    "output_router_logits",
    "partial_rotary_factor",  # of no rotation: attention has no positions
    "rope_theta",
    "time_step_limit",
)
# What published Mamba-2 files hold beside: how first values were drawn, and two switches and a size that the class does not read.
_MAMBA2_SAYS_NOTHING = ("time_step_init_scheme", "time_step_scale", "norm_before_gate", "rms_norm", "intermediate_size")
_NORM_EPSILONS = ("norm_eps", "rms_norm_eps")  # other names of layer_norm_epsilon that published files hold beside it
_EXPERTS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "n_shared_experts",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "moe_latent_size",
)
_SYMBOLS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_FUSED = tuple(
    (rf"(backbone\.layers\.\d+\.mixer\.experts\.){part}", (rf"\1{{e}}.{part}.weight",))
    for part in ("up_proj", "down_proj")
)
_COPIES = (("lm_head.weight", "backbone.embeddings.weight"),)
_SKIPPED = re.compile(r"mtp\..*")
_MIXER = ("dt_bias", "A_log", "D", "conv1d.weight", "conv1d.bias", "in_proj.weight", "norm.weight", "out_proj.weight")
_MLP = {"linear_fc1": "up_proj", "linear_fc2": "down_proj"}
_PINNED = (("use_bias", False), ("use_conv_bias", True), ("conv_kernel", 4))
_ANY_LENGTH = 2**20  # of a network without positions, whose config.json has no length


_COMMON_KEYS: PlainKeys = {
    "hidden_size": ("hidden_size", None),
    "vocab_size": ("true_vocab_size", None),
    "n_groups": ("mamba_num_groups", 8),
    "layer_norm_epsilon": ("norm_epsilon", 1e-5),
    "initializer_range": ("init_method_std", 0.02),
}
_NEMOTRON_KEYS: PlainKeys = {
    "num_attention_heads": ("num_attention_heads", None),
    "intermediate_size": ("ffn_hidden_size", None),
    "mamba_num_heads": ("mamba_num_heads", None),
    "mamba_head_dim": ("mamba_head_dim", None),
    "ssm_state_size": ("mamba_state_dim", None),
    "max_position_embeddings": ("max_position_embeddings", 4096),
    "hidden_dropout": ("hidden_dropout", 0.0),
    "attention_dropout": ("attention_dropout", 0.0),
}
_EXPERT_KEYS: PlainKeys = {
    "n_routed_experts": ("num_experts", 8),
    "num_experts_per_tok": ("moe_router_topk", 2),
    "moe_intermediate_size": ("moe_ffn_hidden_size", None),
    "moe_shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size", None),
}


def _read_mamba_common_keys(keys: ForeignMapping) -> dict[str, Any]:
    """Read the settings that Mamba-2 and Nemotron-H have by the same keys."""
    keys.one_of("mamba_proj_bias", (False,), False)
    settings = read_plain_keys(keys, _COMMON_KEYS)
    return {
        **settings,
        "position_embedding_type": "none",
        "normalization": "RMSNorm",
        "mamba_norm_epsilon": settings["norm_epsilon"],
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not keys.boolean("tie_word_embeddings", False),
    }


def _mamba_common_config_keys(model: ModelConfig) -> dict[str, Any]:
    return {**write_plain_keys(model, _COMMON_KEYS), "tie_word_embeddings": model.ties_embeddings}


def _float_or_json_infinity(value: Any) -> float:
    """Return a number of a config.json, where infinity may be {"__float__": "Infinity"}."""
    return float(value["__float__"]) if isinstance(value, Mapping) and "__float__" in value else float(value)


def read_mamba_time_step_limits(keys: ForeignMapping) -> tuple[float, ...]:
    """Read `time_step_limit`: (smallest, largest) time step."""
    limits = keys.pop_or_none("time_step_limit") or (0.0, math.inf)
    try:
        smallest, largest = map(_float_or_json_infinity, limits)
    except (TypeError, ValueError):
        keys.problems.append(f"time_step_limit: {short_value(limits)} is not the smallest and the largest time step")
        return (0.0, math.inf)
    return smallest, largest


def mamba_time_step_limit_value(model: ModelConfig) -> list[Any]:
    """Return the value of `time_step_limit` for a config.json, with infinity as an object."""
    return [
        {"__float__": "Infinity"} if math.isinf(one) else one
        for one in model.hybrid.mamba_time_step_limit or (0.0, math.inf)
    ]


def _read_mamba2_config(keys: ForeignMapping) -> dict[str, Any]:
    settings = _read_mamba_common_keys(keys)
    heads, size, layers = (
        keys.positive_int("num_heads", 128),
        keys.positive_int("head_dim", 64),
        keys.positive_int("num_hidden_layers"),
    )
    if keys.positive_int("expand", 2) * settings["hidden_size"] != heads * size:
        keys.problems.append(f"expand: the {heads} heads of {size} channels are not so many times the hidden size")
    return {
        **settings,
        "num_layers": min(layers, 10_000),
        "hybrid_layer_pattern": "M" * min(layers, 10_000),
        "mamba_num_heads": heads,
        "mamba_head_dim": size,
        "mamba_state_dim": keys.positive_int("state_size", 128),
        "mamba_time_step_limit": read_mamba_time_step_limits(keys),
        "num_attention_heads": heads,
        "kv_channels": size,
        "max_position_embeddings": _ANY_LENGTH,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _write_mamba2_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    hybrid = model.hybrid
    heads = hybrid.mamba_num_heads or 0
    return {
        **_mamba_common_config_keys(model),
        "num_hidden_layers": sum(plan.mixer == "mamba" for plan in network_layer_plans(model)),
        "num_heads": heads,
        "head_dim": hybrid.mamba_head_dim,
        "state_size": hybrid.mamba_state_dim,
        "expand": heads * hybrid.mamba_head_dim // model.hidden_size,
        "time_step_limit": mamba_time_step_limit_value(model),
    }


def _read_layer_symbols(keys: ForeignMapping) -> str:
    """Return one symbol for each layer, from layers_block_type or hybrid_override_pattern."""
    kinds, symbols = keys.pop_or_none("layers_block_type"), keys.pop_or_none("hybrid_override_pattern")
    keys.pop_or_none("num_hidden_layers")
    if kinds is None:
        kinds = list(symbols or "")
    unknown = sorted({str(kind) for kind in kinds} - set(_SYMBOLS) - set(_KINDS))
    if unknown or not kinds:
        keys.problems.append(
            f"layers_block_type: {', '.join(unknown) or 'nothing'} is no layer here; {', '.join(_KINDS.values())} are"
        )
    return "".join(_SYMBOLS.get(kind, kind) for kind in kinds if str(kind) not in unknown) or "M"


def _read_head_dim(keys: ForeignMapping) -> int:
    """Read the size of a head: head_dim, or attention_head_dim as the first published files call it."""
    first = keys.positive_int("attention_head_dim", 128)
    size = keys.positive_int("head_dim", first)
    if "attention_head_dim" in keys.mapping and size != first:
        keys.problems.append(f"attention_head_dim: {first} with head_dim: {size}; they are two names of one size")
    return size


def _read_moe_keys(keys: ForeignMapping) -> dict[str, Any]:
    keys.one_of("norm_topk_prob", (True,), True)
    keys.one_of("moe_latent_size", (None,), None)
    keys.one_of("n_shared_experts", (1,), 1)
    settings = {
        **read_plain_keys(keys, _EXPERT_KEYS),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        **read_routed_scaling_factor(keys),
        **read_group_limited_routing_keys(keys, "sum", used=True),
    }
    note_sigmoid_routing_problems(keys, settings)
    return settings


def _read_nemotron_h_config(keys: ForeignMapping) -> dict[str, Any]:
    keys.one_of("sliding_window", (None,), None)
    settings = {**_read_mamba_common_keys(keys), **read_plain_keys(keys, _NEMOTRON_KEYS)}
    for name in _NORM_EPSILONS:
        keys.one_of(name, (settings["norm_epsilon"],), settings["norm_epsilon"])
    symbols, heads = _read_layer_symbols(keys), settings["num_attention_heads"]
    experts = _read_moe_keys(keys) if "E" in symbols else {}
    if not experts:
        keys.ignore_keys(*_EXPERTS)
    return {
        **settings,
        **experts,
        **settings_from_head_counts(heads, keys.positive_int("num_key_value_heads", heads)),
        "num_layers": len(symbols),
        "hybrid_layer_pattern": symbols,
        "kv_channels": _read_head_dim(keys),
        "squared_relu": True,
        "mamba_time_step_limit": (keys.non_negative_float("time_step_min", 0.001), math.inf),
    }


def _write_nemotron_h_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    symbols = "".join(_symbol_of_layer(plan.mixer, plan.mlp) for plan in network_layer_plans(model))
    old = "hybrid_override_pattern" in like
    words = itertools.chain(like.get("layers_block_type") or (), itertools.repeat(""))
    layers: Any = symbols if old else list(map(_layer_word, symbols, words))
    experts: dict[str, Any] = {name: like[name] for name in _EXPERTS if name in like}
    if model.moe.num_experts:
        experts |= {"n_shared_experts": 1, "norm_topk_prob": True}
        experts |= {**write_plain_keys(model, _EXPERT_KEYS), **write_routing_keys(model, like)}
    return {
        **_mamba_common_config_keys(model),
        **experts,
        "hybrid_override_pattern" if old else "layers_block_type": layers,
        **({"sliding_window": None} if "sliding_window" in like else {}),
        **({"num_hidden_layers": model.num_layers} if "num_hidden_layers" in like else {}),
        **write_plain_keys(model, _NEMOTRON_KEYS),
        "num_key_value_heads": model.num_query_groups,
        **_head_dim_keys(model, like),
        **{name: model.norm_epsilon for name in _NORM_EPSILONS if name in like},
        "mamba_proj_bias": False,
        "time_step_min": (model.hybrid.mamba_time_step_limit or (0.0, math.inf))[0],
    }


def _layer_word(symbol: str, earlier: str) -> str:
    """Return what layers_block_type calls a layer: as the earlier config.json did, if that was the same kind."""
    return earlier if _SYMBOLS.get(earlier) == symbol else _KINDS.get(symbol, symbol)


def _head_dim_keys(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size of a head by the names that the earlier config.json has."""
    names = [name for name in ("head_dim", "attention_head_dim") if name in like] or ["head_dim"]
    return dict.fromkeys(names, model.kv_channels)


def _symbol_of_layer(mixer: str, mlp: str) -> str:
    """Return the symbol of a layer; for kinds without one the kind itself, which readers reject."""
    return {"mamba": "M", "attention": "*", "none": {"dense": "-", "moe": "E"}.get(mlp, mlp)}.get(mixer, mixer)


def parameter_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """Return the mappings of all parameters between our names and those of transformers, in its order."""
    result: list[ParameterMapping] = []
    for plan in network_layer_plans(model):
        ours, theirs = f"decoder.layers.{plan.index}.", f"backbone.layers.{plan.index}."
        norm = "pre_mlp_layernorm" if plan.mixer == "none" else "input_layernorm"
        result += module_mappings(f"{ours}{norm}", f"{theirs}norm")
        if plan.mixer == "mamba":
            result += mamba_mappings(f"{ours}mixer.", f"{theirs}mixer.")
        elif plan.mixer == "attention":
            result += attention_mappings(model, f"{ours}self_attention.", f"{theirs}mixer.")
        if plan.mlp == "dense":
            result += rename_only_weight_mappings(f"{ours}mlp.", f"{theirs}mixer.", _MLP)
        elif plan.mlp == "moe":
            result += _expert_mappings(model, f"{ours}mlp.", f"{theirs}mixer.")
    return decoder_mappings_with_ends(model, result, "embeddings", "norm_f", base="backbone.")


def mamba_mappings(ours: str, theirs: str) -> list[ParameterMapping]:
    """Return the mappings of a Mamba-2 mixer, whose parameters are the same on both sides."""
    return [ParameterMapping(f"{ours}{name}", (f"{theirs}{name}",), same) for name in _MIXER]


def _expert_mappings(model: ModelConfig, ours: str, theirs: str) -> list[ParameterMapping]:
    each = [f"{theirs}experts.{expert}." for expert in range(model.moe.num_experts_or_zero)]
    experts = [
        row
        for mine, there in _MLP.items()
        for row in module_mappings(
            f"{ours}experts.{mine}", *(f"{one}{there}" for one in each), op=per_expert_conversion(same, 1)
        )
    ]
    return [
        *module_mappings(f"{ours}router", f"{theirs}gate"),
        ParameterMapping(f"{ours}router.expert_bias", (f"{theirs}gate.e_score_correction_bias",), same),
        *experts,
        *rename_only_weight_mappings(f"{ours}shared_experts.", f"{theirs}shared_experts.", _MLP),
    ]


MAMBA2 = Family(
    "mamba2",
    "Mamba2ForCausalLM",
    "mamba2",
    _read_mamba2_config,
    _write_mamba2_config,
    parameter_mappings,
    silent=(*_INITIAL, *_KERNELS, *_MAMBA2_SAYS_NOTHING, "time_step_min"),
    usual=(("initializer_range", 0.1),),
    pinned=(*_PINNED, ("hidden_act", "silu")),
    base="backbone.",
    skipped=_SKIPPED,
    copies=_COPIES,
)
NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    "nemotron_h",
    _read_nemotron_h_config,
    _write_nemotron_h_config,
    parameter_mappings,
    silent=_SAYS_NOTHING,
    usual=(("num_key_value_heads", 8),),
    pinned=(*_PINNED, *NO_BIAS, ("mlp_bias", False), ("mamba_hidden_act", "silu"), ("mlp_hidden_act", "relu2")),
    base="backbone.",
    skipped=_SKIPPED,
    copies=_COPIES,
    fused=_FUSED,
    respelled=((r"^(backbone\.)?model\.", "backbone."),),
)
