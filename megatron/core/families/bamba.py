"""Bamba and Falcon-H1: Mamba-2 and attention by turns or side by side, with gated MLPs behind them.

bamba        a layer there is two here, which have one residual sum each: a mixer (M or *) and an MLP (-); attention rotates half of a head
falcon_h1    every layer has both mixers, whose outputs are summed; factors of what parts make; Mamba-2's output may have no norm
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.core.config.foreign.mapping import ForeignMapping, short_value
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.config_json import PlainKeys, read_plain_keys, write_plain_keys
from megatron.core.families.llama import NO_BIAS, attention_mappings, mlp_mappings, read_llama_keys, write_llama_keys
from megatron.core.families.nemotron_h import mamba_mappings, mamba_time_step_limit_value, read_mamba_time_step_limits
from megatron.core.families.parameter_mapping import (
    Family,
    ParameterMapping,
    decoder_mappings_with_ends,
    module_mappings,
    rename_only_weight_mappings,
)
from megatron.core.families.qwen import write_head_dim_key
from megatron.core.families.qwen_next import (
    note_rotated_channels_problem,
    pop_partial_rotary_factor,
    write_partial_rotary_factor,
)

_SAYS_NOTHING = ("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")
# How first values were drawn, a size that mamba_d_ssm and intermediate_size say, and a switch that the class does not read.
_FALCON_SAYS_NOTHING = (
    *("time_step_floor", "time_step_max", "time_step_min", "time_step_rank"),
    *("mlp_expansion_factor", "mamba_use_mlp"),
)
_FACTORS = (
    "embedding_multiplier",
    "lm_head_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "key_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)
_FACTOR_LISTS = {"ssm_multipliers": 5, "mlp_multipliers": 2}  # and how many they are
_MAMBA_KEYS: PlainKeys = {"mamba_n_groups": ("mamba_num_groups", 1), "mamba_d_state": ("mamba_state_dim", 256)}
_PINNED = (*NO_BIAS, ("mlp_bias", False), ("mamba_d_conv", 4), ("mamba_conv_bias", True), ("mamba_proj_bias", False))
_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "pre_ff_layernorm"}
_SHARE = 0.5  # of a head that is rotated, where a config does not say


def _read_mamba_keys(keys: ForeignMapping, inner: int) -> dict[str, Any]:
    """Read the settings of the Mamba-2 mixers. inner: channels of all heads."""
    keys.pop_or_none("mamba_expand")
    heads, size = keys.positive_int("mamba_n_heads", 128), keys.pop_or_none("mamba_d_head")
    if size not in (None, "auto", inner / heads):
        keys.problems.append(f"mamba_d_head: {size} by {heads} heads is not the {inner} channels of all")
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads or 1,
        **read_plain_keys(keys, _MAMBA_KEYS),
        "mamba_time_step_limit": read_mamba_time_step_limits(keys),
    }


def _read_bamba_config(keys: ForeignMapping) -> dict[str, Any]:
    keys.pop_or_none("partial_rotary_factor")  # which the class passes over
    share = pop_partial_rotary_factor(keys, _SHARE)
    settings, attending = read_llama_keys(keys), keys.pop_or_none("attn_layer_indices") or []
    note_rotated_channels_problem(keys, share, settings["kv_channels"])
    rotated = int(settings["kv_channels"] * share)
    keys.one_of("attn_rotary_emb", (rotated,), rotated)  # another name of the same, in channels
    layers = range(settings["num_layers"])
    return {
        **settings,
        **_read_mamba_keys(keys, keys.positive_int("mamba_expand", 2) * settings["hidden_size"]),
        "num_layers": 2 * len(layers),
        "hybrid_layer_pattern": "".join("*-" if layer in attending else "M-" for layer in layers),
        "mamba_norm_epsilon": settings["norm_epsilon"],
        "rotary_percent": share,
    }


def _write_bamba_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    if model.rope.rotary_percent != _SHARE:  # for which the class has one word only
        like = {**like, "rope_parameters": like.get("rope_parameters") or {"rope_type": "default"}}
    hybrid, mixers = model.hybrid, [plan.mixer for plan in network_layer_plans(model)][::2]
    attending = [layer for layer, mixer in enumerate(mixers) if mixer == "attention"]
    inner = (hybrid.mamba_num_heads or 0) * hybrid.mamba_head_dim
    config = {
        **write_llama_keys(model, like),
        "num_hidden_layers": len(mixers),
        "attn_layer_indices": attending or like.get("attn_layer_indices"),
        **_mamba_config_keys(model, like),
        "mamba_expand": inner // model.hidden_size,
    }
    return config | write_partial_rotary_factor(config, model, like)


def _mamba_config_keys(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json for the sizes of the Mamba-2 mixers."""
    hybrid = model.hybrid
    limited = "time_step_limit" in like or hybrid.mamba_time_step_limit not in ((), (0.0, math.inf))
    return {
        "mamba_n_heads": hybrid.mamba_num_heads,
        "mamba_d_head": like.get("mamba_d_head") if like.get("mamba_d_head") == "auto" else hybrid.mamba_head_dim,
        **write_plain_keys(model, _MAMBA_KEYS),
        **({"time_step_limit": mamba_time_step_limit_value(model)} if limited else {}),
    }


def _read_falcon_h1_config(keys: ForeignMapping) -> dict[str, Any]:
    normed, before = keys.boolean("mamba_rms_norm", False), keys.boolean("mamba_norm_before_gate", True)
    settings = read_llama_keys(keys)
    inner = keys.positive_int("mamba_d_ssm", keys.positive_int("mamba_expand", 2) * settings["hidden_size"])
    factors = {name: keys.non_negative_float(name, 1.0, positive=True) for name in _FACTORS}
    lists = {name: _read_factors(keys, name, count) for name, count in _FACTOR_LISTS.items()}
    return {
        **settings,
        **_read_mamba_keys(keys, inner),
        **factors,
        **{name: values if set(values) != {1.0} else () for name, values in lists.items()},
        "parallel_mamba": True,
        "mamba_output_norm": ("before_gate" if before else "after_gate") if normed else "none",
        "mamba_norm_epsilon": settings["norm_epsilon"],
    }


def _read_factors(keys: ForeignMapping, name: str, count: int) -> tuple[float, ...]:
    """Take a list of so many factors; () if it is missing or null, and with a problem noted if it is anything else."""
    values = keys.pop_or_none(name) or ()
    if isinstance(values, (list, tuple)) and len(values) in (0, count):
        if all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
            return tuple(map(float, values))
    keys.problems.append(f"{name}: {short_value(values)} is not a list of {count} numbers")
    return ()


def _write_falcon_h1_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    hybrid, factors = model.hybrid, model.multipliers
    inner, kind = (hybrid.mamba_num_heads or 0) * hybrid.mamba_head_dim, hybrid.mamba_output_norm
    before = like.get("mamba_norm_before_gate", True) if kind == "none" else kind == "before_gate"
    return {
        **({"mamba_expand": like["mamba_expand"]} if "mamba_expand" in like else {}),
        **write_llama_keys(model, like),
        **_mamba_config_keys(model, like),
        **write_head_dim_key(model, like),
        **{name: getattr(factors, name) for name in _FACTORS},
        "ssm_multipliers": list(factors.ssm_multipliers or (1.0,) * 5),
        "mlp_multipliers": list(factors.mlp_multipliers or (1.0, 1.0)),
        "mamba_d_ssm": inner,
        "mamba_rms_norm": kind != "none",
        "mamba_norm_before_gate": before,
    }


def falcon_h1_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """Return the mappings of all parameters of Falcon-H1, in the order of transformers."""
    result: list[ParameterMapping] = []
    for plan in network_layer_plans(model):
        ours, theirs = f"decoder.layers.{plan.index}.", f"model.layers.{plan.index}."
        normed = model.hybrid.mamba_output_norm != "none"
        mixer = [row for row in mamba_mappings(f"{ours}mixer.", f"{theirs}mamba.") if normed or "norm" not in row.ours]
        result += [
            *mlp_mappings(model, f"{ours}mlp.", f"{theirs}feed_forward."),
            *(mixer if plan.parallel_mixer == "mamba" else ()),
            *attention_mappings(model, f"{ours}self_attention.", f"{theirs}self_attn."),
            *rename_only_weight_mappings(ours, theirs, _NORMS),
        ]
    return decoder_mappings_with_ends(model, result, final_norm="final_layernorm")


def parameter_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """Return the mappings of all parameters between our names and those of transformers, in its order."""
    result: list[ParameterMapping] = []
    for plan in network_layer_plans(model):
        ours, theirs = f"decoder.layers.{plan.index}.", f"model.layers.{plan.index // 2}."
        if plan.mixer == "mamba":
            result += mamba_mappings(f"{ours}mixer.", f"{theirs}mamba.")
        elif plan.mixer == "attention":
            result += attention_mappings(model, f"{ours}self_attention.", f"{theirs}self_attn.")
        else:
            result += mlp_mappings(model, f"{ours}mlp.", f"{theirs}feed_forward.")
        norm = "pre_mlp_layernorm" if plan.mixer == "none" else "input_layernorm"
        result += module_mappings(f"{ours}{norm}", f"{theirs}{_NORMS[norm]}")
    return decoder_mappings_with_ends(model, result, final_norm="final_layernorm")


BAMBA = Family(
    "bamba",
    "BambaForCausalLM",
    "bamba",
    _read_bamba_config,
    _write_bamba_config,
    parameter_mappings,
    silent=_SAYS_NOTHING,
    pinned=_PINNED,
    usual=(("max_position_embeddings", 262144), ("rms_norm_eps", 1e-5), ("num_key_value_heads", 8)),
)
FALCON_H1 = Family(
    "falcon_h1",
    "FalconH1ForCausalLM",
    "falcon_h1",
    _read_falcon_h1_config,
    _write_falcon_h1_config,
    falcon_h1_mappings,
    silent=(*_SAYS_NOTHING, *_FALCON_SAYS_NOTHING),
    pinned=(*_PINNED, ("projectors_bias", False)),
    usual=(("max_position_embeddings", 8192), ("rms_norm_eps", 1e-5), ("num_key_value_heads", 8)),
)
