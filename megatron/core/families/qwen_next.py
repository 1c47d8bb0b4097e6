"""Qwen3-Next and the language models of Qwen3.5 (with and without experts): gated delta nets with attention in every fourth layer, whose heads have a gate.

    layers      layer_types; left out, attention in every full_attention_interval-th
    norms       weights are stored minus one, but for those of the delta nets' heads
    q_proj      query and gate of every head by turns; ours is [q | gate | k | v]
    delta net   qwen3_next: q, k, v, z of every key head by turns in one matrix, b and a in another; qwen3_5: in_proj_qkv, _z, _b, _a
                ours is [q | k | v | z | b | a]

Layers of multi-token prediction, which transformers' classes pass over, are passed over here too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.plan import network_layer_plans
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.llama import COPIES, common_config_keys, mlp_mappings, read_common_keys
from megatron.core.families.qwen import FUSED, moe_config_keys, read_moe_keys, shared_expert_mappings
from megatron.core.families.rules import Family, ParameterMapping, TensorConversion, concat, same
from megatron.core.families.settings import ConfigReader, format_layer_pattern, preserved_keys

_SKIPPED = re.compile(r"mtp\..*|model\.rotary_emb\.inv_freq")
_SAYS_NOTHING = ("full_attention_interval", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
_SHARE = 0.25  # of a head that is rotated, where a config does not say
_EVERY = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": None}
USUAL = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
}


def read_delta_net_layers(keys: ConfigReader, layers: int) -> list[bool]:
    """Which layers have a delta net."""
    kinds, every = keys.pop("layer_types"), keys.positive_int("full_attention_interval", 4)
    if kinds is None:
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}:
        keys.problems.append(f"layer_types: {layers} times linear_attention or full_attention has a counterpart here")
        return [False] * layers
    return [kind == "linear_attention" for kind in kinds]


def split_partial_rotary_factor(config: Mapping[str, Any], usual: float = _SHARE) -> tuple[dict[str, Any], float]:
    """A config without the share of a head that is rotated, and that share. usual: where the config does not say."""
    config, rope = dict(config), dict(config.get("rope_parameters") or {})
    above, within = config.pop("partial_rotary_factor", None), rope.pop("partial_rotary_factor", None)
    if rope:
        config["rope_parameters"] = rope
    return config, float(within or above or usual)


def _read_common_keys(config: Mapping[str, Any]) -> tuple[ConfigReader, dict[str, Any]]:
    config, share = split_partial_rotary_factor(config)
    keys = ConfigReader({"intermediate_size": config.get("moe_intermediate_size"), **config})
    for name in _SAYS_NOTHING[1:]:
        keys.pop(name)
    keys.one_of("attention_bias", (False,), False)
    settings = read_common_keys(keys)
    linear = read_delta_net_layers(keys, settings["num_layers"])
    return keys, {
        **settings,
        **{name: keys.positive_int(name, usual) for name, usual in USUAL.items()},
        "rotary_percent": share,
        "qk_layernorm": True,
        "apply_layernorm_1p": True,
        "attention_output_gate": keys.boolean("attn_output_gate", True),
        "experimental_attention_variant": "gated_delta_net" if any(linear) else None,
        "linear_attention_freq": format_layer_pattern(linear) if any(linear) and not all(linear) else None,
    }


def _common_config_keys(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    linear = [plan.mixer == "gated_delta_net" for plan in network_layer_plans(model)]
    config = {
        **preserved_keys(like, *_SAYS_NOTHING),
        **common_config_keys(model, like),
        **{name: getattr(model.hybrid, name) for name in USUAL},
        "head_dim": model.kv_channels,
        "attention_bias": False,
    }
    if "layer_types" in like or linear != [(layer + 1) % 4 != 0 for layer in range(len(linear))]:
        config["layer_types"] = [("full_attention", "linear_attention")[one] for one in linear]
    config |= partial_rotary_factor_keys(config, model, like)
    if "attn_output_gate" in like or not model.attention_output_gate:
        config["attn_output_gate"] = model.attention_output_gate
    return config


def partial_rotary_factor_keys(config: dict[str, Any], model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json that say the share of a head that is rotated."""
    share, rope = model.rope.rotary_percent, config.get("rope_parameters")
    inside = {"rope_parameters": {**rope, "partial_rotary_factor": share}} if rope else {}
    return {**inside, **({"partial_rotary_factor": share} if "partial_rotary_factor" in like or not rope else {})}


def _from_qwen3_next_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys, settings = _read_common_keys(config)
    return {**settings, **_read_moe_keys(keys, settings["num_layers"])}, keys.all_problems()


def _read_moe_keys(keys: ConfigReader, layers: int) -> dict[str, Any]:
    return {
        **read_moe_keys(keys, layers),
        "moe_shared_expert_gate": True,
        "moe_shared_expert_intermediate_size": keys.positive_int("shared_expert_intermediate_size"),
    }


def _to_qwen3_next_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {**_common_config_keys(model, like), **_moe_config_keys(model, like)}


def _moe_config_keys(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **moe_config_keys(model, like),
        "shared_expert_intermediate_size": model.moe.moe_shared_expert_intermediate_size,
    }


def _from_text_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys, settings = _read_common_keys(_without_mrope_keys(config))
    return settings, keys.all_problems()


def _from_text_moe_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Chosen experts weigh one together, and every layer has experts, whatever a config says."""
    keys, settings = _read_common_keys({**_without_mrope_keys(config), **_EVERY})
    return {**settings, **_read_moe_keys(keys, settings["num_layers"])}, keys.all_problems()


def _without_mrope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without rotations by time, height and width, which of text are all by its one position."""
    rope = {
        name: value
        for name, value in (config.get("rope_parameters") or {}).items()
        if name not in ("mrope_section", "mrope_interleaved")
    }
    return {**config, **({"rope_parameters": rope} if rope else {})}


def _to_text_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    config, earlier = _common_config_keys(model, like), like.get("rope_parameters") or {}
    for name in ("mrope_section", "mrope_interleaved"):
        if name in earlier:
            config["rope_parameters"][name] = earlier[name]
    return config


def _to_text_moe_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    experts = {name: value for name, value in _moe_config_keys(model, like).items() if name not in _EVERY}
    width = {name: like[name] for name in ("intermediate_size",) if name in like}  # of no layer
    config = {name: value for name, value in _to_text_config(model, like).items() if name != "intermediate_size"}
    return {**config, **width, **experts, **{name: like[name] for name in _EVERY if name in like}}


def _interleaved_query_gates(heads: int, groups: int, size: int) -> TensorConversion:
    """Query and gate of each head by turns, keys, values; ours is [q | gate | k | v]."""

    def ours(parts: Sequence[Tensor]) -> Tensor:
        query, gate = parts[0].unflatten(0, (heads, 2, size)).unbind(1)
        return torch.cat((query.flatten(0, 1), gate.flatten(0, 1), *parts[1:]))

    def theirs(whole: Tensor) -> Sequence[Tensor]:
        query, gate, key, value = whole.split([heads * size, heads * size, groups * size, groups * size])
        turns = torch.stack([part.unflatten(0, (heads, size)) for part in (query, gate)], dim=1)
        return turns.flatten(0, 2), key, value

    return TensorConversion(ours, theirs)


def _interleaved_by_key_head(model: ModelConfig) -> TensorConversion:
    """q, k, v, z of each key head by turns, then b, a of each; ours is [q | k | v | z | b | a]."""
    hybrid = model.hybrid
    groups, per_group = hybrid.linear_num_key_heads, hybrid.linear_num_value_heads // hybrid.linear_num_key_heads
    values = per_group * hybrid.linear_value_head_dim
    wide = [hybrid.linear_key_head_dim, hybrid.linear_key_head_dim, values, values]
    sizes = [size * groups for size in (*wide, per_group, per_group)]

    def ours(parts: Sequence[Tensor]) -> Tensor:
        split = [
            part
            for whole, each in zip(parts, (wide, [per_group] * 2), strict=True)
            for part in whole.unflatten(0, (groups, -1)).split(each, dim=1)
        ]
        return torch.cat([part.flatten(0, 1) for part in split])

    def theirs(whole: Tensor) -> Sequence[Tensor]:
        parts = [part.unflatten(0, (groups, -1)) for part in whole.split(sizes)]
        return tuple(torch.cat(some, dim=1).flatten(0, 1) for some in (parts[:4], parts[4:]))

    return TensorConversion(ours, theirs)


def _delta_net_mappings(model: ModelConfig, ours: str, theirs: str, *, fused: bool) -> list[ParameterMapping]:
    hybrid = model.hybrid
    values, heads = hybrid.linear_num_value_heads * hybrid.linear_value_head_dim, hybrid.linear_num_value_heads
    keys = hybrid.linear_num_key_heads * hybrid.linear_key_head_dim
    names = ("qkvz", "ba") if fused else ("qkv", "z", "b", "a")
    op = _interleaved_by_key_head(model) if fused else concat(2 * keys + values, values, heads, heads)
    whole = {"dt_bias": "dt_bias", "A_log": "A_log", "conv1d.weight": "conv1d.weight", "out_norm.weight": "norm.weight"}
    return [
        *(ParameterMapping(f"{ours}{mine}", (f"{theirs}{there}",), same) for mine, there in whole.items()),
        ParameterMapping(f"{ours}out_proj.weight", (f"{theirs}out_proj.weight",), same),
        ParameterMapping(f"{ours}in_proj.weight", tuple(f"{theirs}in_proj_{name}.weight" for name in names), op),
    ]


def _attention_mappings(model: ModelConfig, ours: str, theirs: str) -> list[ParameterMapping]:
    heads, groups, size = model.num_attention_heads, model.num_query_groups, model.kv_channels
    op = (
        _interleaved_query_gates(heads, groups, size)
        if model.attention_output_gate
        else concat(heads * size, groups * size, groups * size)
    )
    return [
        ParameterMapping(f"{ours}linear_qkv.weight", tuple(f"{theirs}{part}_proj.weight" for part in "qkv"), op),
        ParameterMapping(f"{ours}linear_proj.weight", (f"{theirs}o_proj.weight",), same),
        *(ParameterMapping(f"{ours}{part}_layernorm.weight", (f"{theirs}{part}_norm.weight",), same) for part in "qk"),
    ]


def _parameter_mappings(model: ModelConfig, *, fused: bool) -> tuple[ParameterMapping, ...]:
    """All parameters, in the order in which transformers has them."""
    rows = [ParameterMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), same)]
    for plan in network_layer_plans(model):
        ours, theirs = f"decoder.layers.{plan.index}.", f"model.layers.{plan.index}."
        if plan.mixer == "gated_delta_net":
            rows += _delta_net_mappings(model, f"{ours}self_attention.", f"{theirs}linear_attn.", fused=fused)
        else:
            rows += _attention_mappings(model, f"{ours}self_attention.", f"{theirs}self_attn.")
        mlp = shared_expert_mappings if plan.mlp == "moe" else mlp_mappings
        rows += mlp(model, f"{ours}mlp.", f"{theirs}mlp.")
        rows += [
            ParameterMapping(f"{ours}{mine}.weight", (f"{theirs}{there}.weight",), same)
            for mine, there in _NORMS.items()
        ]
    rows.append(ParameterMapping("decoder.final_layernorm.weight", ("model.norm.weight",), same))
    return (
        *rows,
        *(() if model.ties_embeddings else (ParameterMapping("output_layer.weight", ("lm_head.weight",), same),)),
    )


def qwen3_next_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """All parameters of Qwen3-Next."""
    return _parameter_mappings(model, fused=True)


def text_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """All parameters of a language model of Qwen3.5."""
    return _parameter_mappings(model, fused=False)


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    "qwen3_next",
    _from_qwen3_next_config,
    _to_qwen3_next_config,
    qwen3_next_mappings,
    base="model.",
    skipped=_SKIPPED,
    copies=COPIES,
    fused=FUSED,
)
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    _from_text_config,
    _to_text_config,
    text_mappings,
    base="model.",
    skipped=_SKIPPED,
    copies=COPIES,
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    _from_text_moe_config,
    _to_text_moe_config,
    text_mappings,
    base="model.",
    skipped=_SKIPPED,
    copies=COPIES,
    fused=FUSED,
)
