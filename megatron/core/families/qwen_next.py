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
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.config_json import BALANCE, format_layer_freq
from megatron.core.families.llama import NO_BIAS, NORMS, mlp_mappings, read_llama_keys, write_llama_keys
from megatron.core.families.parameter_mapping import (
    Family,
    ParameterMapping,
    ReversibleTensorConversion,
    concat_conversion,
    decoder_mappings_with_ends,
    module_mappings,
    rename_only_weight_mappings,
    same,
)
from megatron.core.families.qwen import (
    FUSED,
    USUAL_LENGTH,
    moe_mappings_with_shared_expert,
    read_shared_expert_moe_keys,
    write_shared_expert_moe_keys,
)

_SKIPPED = re.compile(r"mtp\..*|model\.rotary_emb\.inv_freq")
_SAYS_NOTHING = ("full_attention_interval", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
_MROPE = ("mrope_section", "mrope_interleaved")
_SHARE = 0.25  # of a head that is rotated, where a config does not say
_EVERY = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": None}
USUAL = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
}


def read_delta_net_layers(keys: ForeignMapping, layers: int) -> list[bool]:
    """Return for each layer whether it has a gated delta net."""
    kinds, every = keys.pop_or_none("layer_types"), keys.positive_int("full_attention_interval", 4)
    if kinds is None:
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}:
        keys.problems.append(f"layer_types: {layers} times linear_attention or full_attention has a counterpart here")
        return [False] * layers
    return [kind == "linear_attention" for kind in kinds]


def pop_partial_rotary_factor(keys: ForeignMapping, usual: float = _SHARE) -> float:
    """Take partial_rotary_factor out of the keys, wherever it is, and return it. usual: value if the config has none."""
    given = keys.pop_or_none("rope_parameters")
    rope = dict(given) if isinstance(given, Mapping) else {}
    inner = ForeignMapping({"partial_rotary_factor": rope.pop("partial_rotary_factor", None)})
    above = keys.non_negative_float("partial_rotary_factor", usual, positive=True)
    share = inner.non_negative_float("partial_rotary_factor", above, positive=True)
    keys.problems += inner.problems
    keys.set_key_defaults(rope_parameters=rope or given)
    return share


def note_rotated_channels_problem(keys: ForeignMapping, share: float, channels: int) -> None:
    """Note a share of a head's channels that are no pairs: it would be rounded otherwise there."""
    rotated = int(share * channels)
    if share > 1 or rotated < 2 or rotated % 2:
        keys.problems.append(
            f"partial_rotary_factor: {share:g} of heads of {channels} channels are {rotated}; pairs of channels are rotated"
        )


def _read_qwen_next_keys(keys: ForeignMapping) -> dict[str, Any]:
    """Read the settings that Qwen3-Next and Qwen3.5 have in common."""
    share = pop_partial_rotary_factor(keys)
    keys.set_key_defaults(intermediate_size=keys.mapping.get("moe_intermediate_size"))
    settings = read_llama_keys(keys)
    note_rotated_channels_problem(keys, share, settings["kv_channels"])
    linear = read_delta_net_layers(keys, settings["num_layers"])
    return {
        **settings,
        **{name: keys.positive_int(name, usual) for name, usual in USUAL.items()},
        "rotary_percent": share,
        "qk_layernorm": True,
        "apply_layernorm_1p": True,
        "attention_output_gate": keys.boolean("attn_output_gate", True),
        "experimental_attention_variant": "gated_delta_net" if any(linear) else None,
        "linear_attention_freq": format_layer_freq(linear) if any(linear) and not all(linear) else None,
    }


def _qwen_next_config_keys(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that Qwen3-Next and Qwen3.5 have in common."""
    linear = [plan.mixer == "gated_delta_net" for plan in network_layer_plans(model)]
    config = {
        **write_llama_keys(model, like),
        **{name: getattr(model.hybrid, name) for name in USUAL},
        "head_dim": model.kv_channels,
    }
    if "layer_types" in like or linear != [(layer + 1) % 4 != 0 for layer in range(len(linear))]:
        config["layer_types"] = [("full_attention", "linear_attention")[one] for one in linear]
    config |= write_partial_rotary_factor(config, model, like)
    if "attn_output_gate" in like or not model.attention_output_gate:
        config["attn_output_gate"] = model.attention_output_gate
    return config


def write_partial_rotary_factor(config: dict[str, Any], model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json for the share of a head that is rotated. config: the other keys."""
    share, rope = model.rope.rotary_percent, config.get("rope_parameters")
    inside = {"rope_parameters": {**rope, "partial_rotary_factor": share}} if rope else {}
    return {**inside, **({"partial_rotary_factor": share} if "partial_rotary_factor" in like or not rope else {})}


def _read_qwen3_next_config(keys: ForeignMapping) -> dict[str, Any]:
    settings = _read_qwen_next_keys(keys)
    return {**settings, **read_shared_expert_moe_keys(keys, settings["num_layers"])}


def _write_qwen3_next_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {**_qwen_next_config_keys(model, like), **write_shared_expert_moe_keys(model, like)}


def _read_qwen3_5_config(keys: ForeignMapping) -> dict[str, Any]:
    """Read the settings of a language model of Qwen3.5; M-RoPE, which is plain RoPE for text, is read as that."""
    keys.one_of("output_gate_type", ("swish",), "swish")  # of the delta nets, as the class computes it
    given = keys.pop_or_none("rope_parameters")
    keys.set_key_defaults(rope_parameters={name: given[name] for name in given or () if name not in _MROPE} or given)
    return _read_qwen_next_keys(keys)


def _read_qwen3_5_moe_config(keys: ForeignMapping) -> dict[str, Any]:
    """Read a Qwen3.5 with experts: in every layer, weights normalized, whatever its keys say, as the class does."""
    keys.ignore_keys(*_EVERY)
    keys.set_key_defaults(**_EVERY)
    settings = _read_qwen3_5_config(keys)
    return {**settings, **read_shared_expert_moe_keys(keys, settings["num_layers"])}


def _write_qwen3_5_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a language model of Qwen3.5; an earlier one's keys of M-RoPE are kept."""
    config, earlier = _qwen_next_config_keys(model, like), like.get("rope_parameters") or {}
    config |= {name: like[name] for name in ("output_gate_type",) if name in like}
    for name in _MROPE:
        if name in earlier:
            config["rope_parameters"][name] = earlier[name]
    return config


def _write_qwen3_5_moe_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a Qwen3.5 with experts; keys that the class ignores are kept from an earlier one."""
    experts = {name: value for name, value in write_shared_expert_moe_keys(model, like).items() if name not in _EVERY}
    width = {name: like[name] for name in ("intermediate_size",) if name in like}  # of no layer
    config = {name: value for name, value in _write_qwen3_5_config(model, like).items() if name != "intermediate_size"}
    return {**config, **width, **experts, **{name: like[name] for name in _EVERY if name in like}}


def _query_gate_conversion(heads: int, groups: int, size: int) -> ReversibleTensorConversion:
    """Return the conversion of q_proj (query, gate of each head by turns), k_proj, v_proj to [q | gate | k | v]."""

    def to_our_tensor(parts: Sequence[Tensor]) -> Tensor:
        query, gate = parts[0].unflatten(0, (heads, 2, size)).unbind(1)
        return torch.cat((query.flatten(0, 1), gate.flatten(0, 1), *parts[1:]))

    def to_their_tensors(whole: Tensor) -> Sequence[Tensor]:
        query, gate, key, value = whole.split([heads * size, heads * size, groups * size, groups * size])
        turns = torch.stack([part.unflatten(0, (heads, size)) for part in (query, gate)], dim=1)
        return turns.flatten(0, 2), key, value

    return ReversibleTensorConversion(to_our_tensor, to_their_tensors)


def _delta_net_qkvz_conversion(model: ModelConfig) -> ReversibleTensorConversion:
    """Return the conversion of two matrices, q, k, v, z and b, a by key head, to our [q | k | v | z | b | a]."""
    hybrid = model.hybrid
    groups, per_group = hybrid.linear_num_key_heads, hybrid.linear_num_value_heads // hybrid.linear_num_key_heads
    values = per_group * hybrid.linear_value_head_dim
    wide = [hybrid.linear_key_head_dim, hybrid.linear_key_head_dim, values, values]
    sizes = [size * groups for size in (*wide, per_group, per_group)]

    def to_our_tensor(parts: Sequence[Tensor]) -> Tensor:
        split = [
            part
            for whole, each in zip(parts, (wide, [per_group] * 2), strict=True)
            for part in whole.unflatten(0, (groups, -1)).split(each, dim=1)
        ]
        return torch.cat([part.flatten(0, 1) for part in split])

    def to_their_tensors(whole: Tensor) -> Sequence[Tensor]:
        parts = [part.unflatten(0, (groups, -1)) for part in whole.split(sizes)]
        return tuple(torch.cat(some, dim=1).flatten(0, 1) for some in (parts[:4], parts[4:]))

    return ReversibleTensorConversion(to_our_tensor, to_their_tensors)


def _delta_net_mappings(model: ModelConfig, ours: str, theirs: str, *, fused: bool) -> list[ParameterMapping]:
    hybrid = model.hybrid
    values, heads = hybrid.linear_num_value_heads * hybrid.linear_value_head_dim, hybrid.linear_num_value_heads
    keys = hybrid.linear_num_key_heads * hybrid.linear_key_head_dim
    names = ("qkvz", "ba") if fused else ("qkv", "z", "b", "a")
    op = _delta_net_qkvz_conversion(model) if fused else concat_conversion(2 * keys + values, values, heads, heads)
    return [
        *(ParameterMapping(f"{ours}{name}", (f"{theirs}{name}",), same) for name in ("dt_bias", "A_log")),
        *rename_only_weight_mappings(ours, theirs, {"conv1d": "conv1d", "out_norm": "norm", "out_proj": "out_proj"}),
        *module_mappings(f"{ours}in_proj", *(f"{theirs}in_proj_{name}" for name in names), op=op),
    ]


def _attention_mappings(model: ModelConfig, ours: str, theirs: str) -> list[ParameterMapping]:
    heads, groups, size = model.num_attention_heads, model.num_query_groups, model.kv_channels
    op = (
        _query_gate_conversion(heads, groups, size)
        if model.attention_output_gate
        else concat_conversion(heads * size, groups * size, groups * size)
    )
    names = {"linear_proj": "o_proj", "q_layernorm": "q_norm", "k_layernorm": "k_norm"}
    return [
        *module_mappings(f"{ours}linear_qkv", *(f"{theirs}{part}_proj" for part in "qkv"), op=op),
        *rename_only_weight_mappings(ours, theirs, names),
    ]


def _qwen_next_mappings(model: ModelConfig, *, fused: bool) -> tuple[ParameterMapping, ...]:
    """Return all mappings, in the order of transformers. fused: in_proj of delta nets in two matrices, not four."""
    rows: list[ParameterMapping] = []
    for plan in network_layer_plans(model):
        ours, theirs = f"decoder.layers.{plan.index}.", f"model.layers.{plan.index}."
        if plan.mixer == "gated_delta_net":
            rows += _delta_net_mappings(model, f"{ours}self_attention.", f"{theirs}linear_attn.", fused=fused)
        else:
            rows += _attention_mappings(model, f"{ours}self_attention.", f"{theirs}self_attn.")
        mlp = moe_mappings_with_shared_expert if plan.mlp == "moe" else mlp_mappings
        rows += mlp(model, f"{ours}mlp.", f"{theirs}mlp.")
        rows += rename_only_weight_mappings(ours, theirs, NORMS)
    return decoder_mappings_with_ends(model, rows)


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    "qwen3_next",
    _read_qwen3_next_config,
    _write_qwen3_next_config,
    partial(_qwen_next_mappings, fused=True),
    silent=(*_SAYS_NOTHING, *BALANCE),
    pinned=NO_BIAS,
    usual=(
        *(USUAL_LENGTH, ("head_dim", 256), ("num_key_value_heads", 2)),
        *(("norm_topk_prob", True), ("intermediate_size", 5632)),
    ),
    skipped=_SKIPPED,
    fused=FUSED,
)
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    _read_qwen3_5_config,
    _write_qwen3_5_config,
    partial(_qwen_next_mappings, fused=False),
    silent=_SAYS_NOTHING,
    pinned=NO_BIAS,
    usual=(USUAL_LENGTH, ("head_dim", 256), ("num_key_value_heads", 4)),
    skipped=_SKIPPED,
    respelled=((r"^model\.language_model\.", "model."),),
    holder="Qwen3_5ForConditionalGeneration",
    beside=re.compile(r"model\.visual\."),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    holder="Qwen3_5MoeForConditionalGeneration",
    read_config=_read_qwen3_5_moe_config,
    write_config=_write_qwen3_5_moe_config,
    silent=(*_SAYS_NOTHING, *BALANCE),
    usual=(USUAL_LENGTH, ("head_dim", 256), ("num_key_value_heads", 2)),
    fused=FUSED,
)
