"""Qwen: built like Llama, with a bias on queries, keys and values (2, 2.5) or a norm of every query and key head (3).

Both have a kin with experts: some layers may have an MLP instead, and those of Qwen 2 have an expert that every token uses,
weighed by a sigmoid of the token. Layers may see a window; which of them do, each kind tells in a way of its own:

    qwen2, qwen3    layer_types; left out, those from max_window_layers on
    qwen2_moe       layer_types; left out, every other one before max_window_layers
    qwen3_moe       all
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.config_json import (
    BALANCE,
    PlainKeys,
    format_layer_freq,
    read_plain_keys,
    sliding_window_to_settings,
    window_and_layers_of_model,
    write_plain_keys,
)
from megatron.core.families.llama import (
    NO_BIAS,
    attention_mappings,
    decoder_mappings,
    gated_mlp_mappings,
    mlp_mappings,
    parameter_mappings,
    read_llama_keys,
    write_llama_keys,
)
from megatron.core.families.mixtral import expert_mappings
from megatron.core.families.parameter_mapping import Family, ParameterMapping, same

_EXPERT_KEYS: PlainKeys = {
    "moe_intermediate_size": ("moe_ffn_hidden_size", None),
    "num_experts_per_tok": ("moe_router_topk", None),
}
_WINDOWS = ("sliding_window", "max_window_layers", "layer_types")
FUSED = (
    (r"(model\.layers\.\d+\.mlp\.experts\.)gate_up_proj", (r"\1{e}.gate_proj.weight", r"\1{e}.up_proj.weight")),
    (r"(model\.layers\.\d+\.mlp\.experts\.)down_proj", (r"\1{e}.down_proj.weight",)),
)


def _windowed_layers(layers: int, first: int, windows: str) -> list[bool]:
    """Return for each layer whether it has a window, where layer_types is missing.

    windows: layers "from" max_window_layers (first) on, the "even" ones before it, or "all".
    """
    rules = {
        "from": [layer >= first for layer in range(layers)],
        "even": [layer % 2 == 0 and layer < first for layer in range(layers)],
    }
    return rules.get(windows, [True] * layers)


def _read_window_keys(keys: ForeignMapping, layers: int, windows: str) -> dict[str, Any]:
    """Read the settings of sliding windows. windows: see `_windowed_layers`."""
    used, kinds = keys.boolean("use_sliding_window", False), keys.pop_or_none("layer_types")
    window, first = keys.pop_or_none("sliding_window"), keys.pop_or_none("max_window_layers")
    seen = _windowed_layers(layers, 28 if first is None else first, windows)
    if kinds is not None and windows != "all":
        seen = read_windowed_layers(keys, kinds, layers)
    if not used:
        if kinds is not None and any(seen):
            keys.problems.append(
                "layer_types: sliding_attention with use_sliding_window: False; set it to True, or take the others"
            )
        return {}
    if not isinstance(window, int) or window < 1:
        keys.problems.append(f"sliding_window: {window} is not a positive whole number, and use_sliding_window is True")
        return {}
    return sliding_window_to_settings(window, seen)


def read_windowed_layers(keys: ForeignMapping, kinds: Any, layers: int) -> list[bool]:
    """Return for each layer whether it has a sliding window, from `layer_types`; kinds: its value."""
    known = {"full_attention": False, "sliding_attention": True}
    if not isinstance(kinds, Sequence) or len(kinds) != layers or set(kinds) - set(known):
        others = sorted({str(kind) for kind in kinds} - set(known)) if isinstance(kinds, Sequence) else [str(kinds)]
        keys.problems.append(
            f"layer_types: {', '.join(others) or len(kinds)} is not built here; {layers} times full_attention or "
            "sliding_attention is"
        )
        return [False] * layers
    return [known[kind] for kind in kinds]


def _window_config_keys(model: ModelConfig, like: Mapping[str, Any], windows: str) -> dict[str, Any]:
    """Return the keys of config.json for sliding windows. windows: see `_windowed_layers`."""
    window, layers = window_and_layers_of_model(model)
    if window is None:
        silent = () if "sliding_attention" in (like.get("layer_types") or ()) else _WINDOWS
        return {**{name: like[name] for name in silent if name in like}, "use_sliding_window": False}
    config: dict[str, Any] = {"use_sliding_window": True, "sliding_window": window}
    first = like.get("max_window_layers", layers.index(True))
    if windows == "all":
        return {**config, **({"max_window_layers": like["max_window_layers"]} if "max_window_layers" in like else {})}
    if "layer_types" in like or layers != _windowed_layers(len(layers), first, windows):
        config["layer_types"] = [("full_attention", "sliding_attention")[seen] for seen in layers]
    return {**config, "max_window_layers": first}


def _read_qwen_config(keys: ForeignMapping, windows: str) -> dict[str, Any]:
    """Read the settings that all Qwen networks have. windows: see `_windowed_layers`."""
    settings = read_llama_keys(keys)
    return {**settings, **_read_window_keys(keys, settings["num_layers"], windows)}


def _write_qwen_config(model: ModelConfig, like: Mapping[str, Any], windows: str) -> dict[str, Any]:
    """Return the keys of config.json that all Qwen networks have. windows: see `_windowed_layers`."""
    return {**write_llama_keys(model, like), **_window_config_keys(model, like, windows)}


def _read_qwen2_config(keys: ForeignMapping) -> dict[str, Any]:
    return {**_read_qwen_config(keys, "from"), "add_qkv_bias": True}


def _write_qwen2_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {**_write_qwen_config(model, like, "from"), **write_head_dim_key(model, like)}


def write_head_dim_key(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return `head_dim` if it is not hidden size / heads, or if the earlier config.json has it; else {}."""
    plain = model.kv_channels * model.num_attention_heads == model.hidden_size
    return {} if plain and "head_dim" not in like else {"head_dim": model.kv_channels}


def _read_qwen3_config(keys: ForeignMapping) -> dict[str, Any]:
    return {**_read_qwen_config(keys, "from"), "qk_layernorm": True}


def _write_qwen3_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {**_write_qwen_config(model, like, "from"), "head_dim": model.kv_channels}


def read_moe_keys(keys: ForeignMapping, layers: int) -> dict[str, Any]:
    """Read the settings of experts: which layers have them, how many, and how tokens choose."""
    step, without = keys.positive_int("decoder_sparse_step", 1), keys.pop_or_none("mlp_only_layers") or []
    sparse = [(layer + 1) % step == 0 and layer not in without for layer in range(layers)]
    if not any(sparse):
        keys.problems.append(
            f"decoder_sparse_step: {step} with mlp_only_layers: {without} leaves no layer with experts"
        )
    fewer, more = keys.pop_or_none("num_local_experts"), keys.pop_or_none("num_experts")  # one setting by two names
    inner = ForeignMapping({"num_experts": more if fewer is None else fewer})
    settings = {
        "num_experts": inner.positive_int("num_experts"),
        "moe_layer_freq": "1" if all(sparse) else format_layer_freq(sparse),
        **read_plain_keys(keys, _EXPERT_KEYS),
        "moe_router_pre_softmax": not keys.boolean("norm_topk_prob", False),
    }
    keys.problems += inner.problems
    return settings


def write_moe_keys(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json for experts: which layers have them, how many, and how tokens choose."""
    moe = model.moe
    return {
        **_sparse_layer_keys([plan.mlp == "moe" for plan in network_layer_plans(model)], like),
        "num_local_experts" if "num_local_experts" in like else "num_experts": moe.num_experts,
        **write_plain_keys(model, _EXPERT_KEYS),
        "norm_topk_prob": not moe.moe_router_pre_softmax,
    }


def read_shared_expert_moe_keys(keys: ForeignMapping, layers: int) -> dict[str, Any]:
    """Read the settings of experts beside an expert that every token uses, weighed by a sigmoid."""
    return {
        **read_moe_keys(keys, layers),
        "moe_shared_expert_gate": True,
        "moe_shared_expert_intermediate_size": keys.positive_int("shared_expert_intermediate_size"),
    }


def write_shared_expert_moe_keys(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json for experts beside an expert that every token uses."""
    shared = model.moe.moe_shared_expert_intermediate_size
    return {**write_moe_keys(model, like), "shared_expert_intermediate_size": shared}


def _sparse_layer_keys(sparse: Sequence[bool], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return decoder_sparse_step and mlp_only_layers for these layers. sparse: whether each layer has experts."""
    step = like.get("decoder_sparse_step") or 1
    if any(has and (layer + 1) % step for layer, has in enumerate(sparse)):
        step = 1
    earlier = [layer for layer in like.get("mlp_only_layers") or [] if layer < len(sparse)]
    without = [layer for layer, has in enumerate(sparse) if not has and ((layer + 1) % step == 0 or layer in earlier)]
    named = {"mlp_only_layers": without} if without or "mlp_only_layers" in like else {}
    return {"decoder_sparse_step": step, **named}


def _read_qwen2_moe_config(keys: ForeignMapping) -> dict[str, Any]:
    settings = _read_qwen_config(keys, "even")
    return {
        **settings,
        **read_shared_expert_moe_keys(keys, settings["num_layers"]),
        "add_qkv_bias": keys.boolean("qkv_bias", True),
    }


def _write_qwen2_moe_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    config = {
        **_write_qwen_config(model, like, "even"),
        **write_shared_expert_moe_keys(model, like),
        **write_head_dim_key(model, like),
    }
    return config if model.add_qkv_bias and "qkv_bias" not in like else {**config, "qkv_bias": model.add_qkv_bias}


def _read_qwen3_moe_config(keys: ForeignMapping) -> dict[str, Any]:
    settings = _read_qwen_config(keys, "all")
    # Of other classes, and what holds here: every head is normalized, and no expert is shared.
    keys.one_of("use_qk_norm", (True,), True)
    keys.one_of("shared_expert_intermediate_size", (0,), 0)
    return {**settings, **read_moe_keys(keys, settings["num_layers"]), "qk_layernorm": True}


def _write_qwen3_moe_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    others = {name: like[name] for name in ("use_qk_norm", "shared_expert_intermediate_size") if name in like}
    return {
        **_write_qwen_config(model, like, "all"),
        "head_dim": model.kv_channels,
        **write_moe_keys(model, like),
        **others,
    }


def qwen_moe_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """Return the mappings of all parameters of a network with experts in some layers."""
    return decoder_mappings(model, attention_mappings, {"dense": mlp_mappings, "moe": moe_mappings_with_shared_expert})


def moe_mappings_with_shared_expert(model: ModelConfig, ours: str, theirs: str) -> list[ParameterMapping]:
    """Return the mappings of an MoE layer: router, experts, and the shared expert with its gate."""
    rows, shared = expert_mappings(model, ours, theirs), model.moe.moe_shared_expert_intermediate_size
    if shared:
        rows += gated_mlp_mappings(f"{ours}shared_experts.", f"{theirs}shared_expert.", shared)
    if shared and model.moe.moe_shared_expert_gate:
        gate = ParameterMapping(f"{ours}shared_experts.gate_weight", (f"{theirs}shared_expert_gate.weight",), same)
        rows.append(gate)
    return rows


USUAL_LENGTH = ("max_position_embeddings", 32768)  # in the configs of all Qwen classes

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    "qwen2",
    _read_qwen2_config,
    _write_qwen2_config,
    parameter_mappings,
    usual=(USUAL_LENGTH, ("num_key_value_heads", 32)),
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    "qwen3",
    _read_qwen3_config,
    _write_qwen3_config,
    parameter_mappings,
    pinned=NO_BIAS,
    usual=(USUAL_LENGTH, ("head_dim", 128), ("num_key_value_heads", 32)),
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    _read_qwen2_moe_config,
    _write_qwen2_moe_config,
    qwen_moe_mappings,
    silent=BALANCE,
    usual=(USUAL_LENGTH, ("num_key_value_heads", 16)),
    fused=FUSED,
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    _read_qwen3_moe_config,
    _write_qwen3_moe_config,
    qwen_moe_mappings,
    silent=BALANCE,
    pinned=NO_BIAS,
    usual=(USUAL_LENGTH, ("num_key_value_heads", 4)),
    fused=FUSED,
)
