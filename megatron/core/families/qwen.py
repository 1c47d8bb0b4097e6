"""Qwen: built like Llama, with a bias on queries, keys and values (2, 2.5) or a norm of every query and key head (3).

Both have a kin with experts: some layers may have an MLP instead, and those of Qwen 2 have an expert that every token uses,
weighed by a sigmoid of the token. Layers may see a window; which of them do, each kind tells in a way of its own:

    qwen2, qwen3    layer_types; left out, those from max_window_layers on
    qwen2_moe       layer_types; left out, every other one before max_window_layers
    qwen3_moe       all
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.config.plan import layer_rows
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.llama import (
    COPIES,
    SKIPPED,
    attention_rows,
    common_in,
    common_out,
    decoder_rows,
    gated_rows,
    mlp_rows,
    rows,
)
from megatron.core.families.mixtral import expert_rows
from megatron.core.families.rules import Family, Row, same
from megatron.core.families.settings import BALANCE, Keys, layer_pattern, passed_through, windows_in, windows_out

Windowed = Callable[[int, int], bool]  # whether a layer sees a window: its number, max_window_layers
_WINDOWS = ("sliding_window", "max_window_layers", "layer_types")
FUSED = (
    (r"(model\.layers\.\d+\.mlp\.experts\.)gate_up_proj", (r"\1{e}.gate_proj.weight", r"\1{e}.up_proj.weight")),
    (r"(model\.layers\.\d+\.mlp\.experts\.)down_proj", (r"\1{e}.down_proj.weight",)),
)


def _from_layer_on(layer: int, first: int) -> bool:
    return layer >= first


def _every_other(layer: int, first: int) -> bool:
    return layer % 2 == 0 and layer < first


def _every_layer(layer: int, first: int) -> bool:
    return True


def _windows_in(keys: Keys, layers: int, windowed: Windowed) -> dict[str, Any]:
    used, kinds = keys.boolean("use_sliding_window", False), keys.pop("layer_types")
    window, first = keys.pop("sliding_window"), keys.pop("max_window_layers")
    seen = [windowed(layer, 28 if first is None else first) for layer in range(layers)]
    if kinds is not None and windowed is not _every_layer:
        seen = layer_kinds(keys, kinds, layers)
    if not used:
        if kinds is not None and any(seen):
            keys.problems.append(
                "layer_types: sliding_attention with use_sliding_window: False; set it to True, or take the others"
            )
        return {}
    if not isinstance(window, int) or window < 1:
        keys.problems.append(f"sliding_window: {window} is not a positive whole number, and use_sliding_window is True")
        return {}
    return windows_in(window, seen)


def layer_kinds(keys: Keys, kinds: Any, layers: int) -> list[bool]:
    """Which layers see a window, of `layer_types`."""
    known = {"full_attention": False, "sliding_attention": True}
    if not isinstance(kinds, Sequence) or len(kinds) != layers or set(kinds) - set(known):
        others = sorted({str(kind) for kind in kinds} - set(known)) if isinstance(kinds, Sequence) else [str(kinds)]
        keys.problems.append(
            f"layer_types: {', '.join(others) or len(kinds)} is not built here; {layers} times full_attention or "
            "sliding_attention is"
        )
        return [False] * layers
    return [known[kind] for kind in kinds]


def _windows_out(model: ModelConfig, like: Mapping[str, Any], windowed: Windowed) -> dict[str, Any]:
    window, layers = windows_out(model)
    if window is None:
        silent = () if "sliding_attention" in (like.get("layer_types") or ()) else _WINDOWS
        return {**{name: like[name] for name in silent if name in like}, "use_sliding_window": False}
    config: dict[str, Any] = {"use_sliding_window": True, "sliding_window": window}
    first = like.get("max_window_layers", layers.index(True))
    if windowed is _every_layer:
        return {**config, **({"max_window_layers": like["max_window_layers"]} if "max_window_layers" in like else {})}
    if "layer_types" in like or layers != [windowed(layer, first) for layer in range(len(layers))]:
        config["layer_types"] = [("full_attention", "sliding_attention")[seen] for seen in layers]
    return {**config, "max_window_layers": first}


def _qwen2_in(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys = Keys(config)
    settings = common_in(keys)
    return {
        **settings,
        **_windows_in(keys, settings["num_layers"], _from_layer_on),
        "add_qkv_bias": True,
    }, keys.finish()


def _qwen2_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **passed_through(like),
        **common_out(model, like),
        **_windows_out(model, like, _from_layer_on),
        **_head_size(model, like),
    }


def _head_size(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    plain = model.kv_channels * model.num_attention_heads == model.hidden_size
    return {} if plain and "head_dim" not in like else {"head_dim": model.kv_channels}


def _qwen3_in(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys = Keys(config)
    keys.one_of("attention_bias", (False,), False)
    settings = common_in(keys)
    return {
        **settings,
        **_windows_in(keys, settings["num_layers"], _from_layer_on),
        "qk_layernorm": True,
    }, keys.finish()


def _qwen3_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **passed_through(like),
        **common_out(model, like),
        "head_dim": model.kv_channels,
        "attention_bias": False,
        **_windows_out(model, like, _from_layer_on),
    }


def expert_layers_in(keys: Keys, layers: int) -> dict[str, Any]:
    """Which layers have experts, how many, and how tokens choose."""
    step, without = keys.whole("decoder_sparse_step", 1), keys.pop("mlp_only_layers") or []
    sparse = [(layer + 1) % step == 0 and layer not in without for layer in range(layers)]
    if not any(sparse):
        keys.problems.append(
            f"decoder_sparse_step: {step} with mlp_only_layers: {without} leaves no layer with experts"
        )
    fewer, more = keys.pop("num_local_experts"), keys.pop("num_experts")  # one setting by two names
    inner = Keys({"num_experts": more if fewer is None else fewer})
    settings = {
        "num_experts": inner.whole("num_experts"),
        "moe_layer_freq": "1" if all(sparse) else layer_pattern(sparse),
        "moe_ffn_hidden_size": keys.whole("moe_intermediate_size"),
        "moe_router_topk": keys.whole("num_experts_per_tok"),
        "moe_router_pre_softmax": not keys.boolean("norm_topk_prob", False),
    }
    keys.problems += inner.problems
    for name in BALANCE:
        keys.pop(name)
    return settings


def expert_layers_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have experts, how many, and how tokens choose, for a config.json."""
    moe = model.moe
    return {
        **{name: like[name] for name in BALANCE if name in like},
        **_sparse_layers_out([plan.mlp == "moe" for plan in layer_rows(model)], like),
        "num_local_experts" if "num_local_experts" in like else "num_experts": moe.num_experts,
        "moe_intermediate_size": moe.moe_ffn_hidden_size,
        "num_experts_per_tok": moe.moe_router_topk,
        "norm_topk_prob": not moe.moe_router_pre_softmax,
    }


def _sparse_layers_out(sparse: Sequence[bool], like: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have experts: every `decoder_sparse_step`-th, but for `mlp_only_layers`. sparse: a value a layer."""
    step = like.get("decoder_sparse_step") or 1
    if any(has and (layer + 1) % step for layer, has in enumerate(sparse)):
        step = 1
    earlier = [layer for layer in like.get("mlp_only_layers") or [] if layer < len(sparse)]
    without = [layer for layer, has in enumerate(sparse) if not has and ((layer + 1) % step == 0 or layer in earlier)]
    named = {"mlp_only_layers": without} if without or "mlp_only_layers" in like else {}
    return {"decoder_sparse_step": step, **named}


def _qwen2_moe_in(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys = Keys(config)
    settings = common_in(keys)
    return {
        **settings,
        **_windows_in(keys, settings["num_layers"], _every_other),
        **expert_layers_in(keys, settings["num_layers"]),
        "add_qkv_bias": keys.boolean("qkv_bias", True),
        "moe_shared_expert_gate": True,
        "moe_shared_expert_intermediate_size": keys.whole("shared_expert_intermediate_size"),
    }, keys.finish()


def _qwen2_moe_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    config = {
        **passed_through(like),
        **common_out(model, like),
        **_windows_out(model, like, _every_other),
        **expert_layers_out(model, like),
        **_head_size(model, like),
        "shared_expert_intermediate_size": model.moe.moe_shared_expert_intermediate_size,
    }
    return config if model.add_qkv_bias and "qkv_bias" not in like else {**config, "qkv_bias": model.add_qkv_bias}


def _qwen3_moe_in(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys = Keys(config)
    keys.one_of("attention_bias", (False,), False)
    settings = common_in(keys)
    return {
        **settings,
        **_windows_in(keys, settings["num_layers"], _every_layer),
        **expert_layers_in(keys, settings["num_layers"]),
        "qk_layernorm": True,
    }, keys.finish()


def _qwen3_moe_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **passed_through(like),
        **common_out(model, like),
        "head_dim": model.kv_channels,
        "attention_bias": False,
        **_windows_out(model, like, _every_layer),
        **expert_layers_out(model, like),
    }


def moe_rows(model: ModelConfig) -> tuple[Row, ...]:
    """All parameters of a network some of whose layers have experts."""
    return tuple(decoder_rows(model, attention_rows, {"dense": mlp_rows, "moe": shared_expert_rows}))


def shared_expert_rows(model: ModelConfig, ours: str, theirs: str) -> list[Row]:
    """Experts, and the one that every token uses, with its gate."""
    rows, shared = expert_rows(model, ours, theirs), model.moe.moe_shared_expert_intermediate_size
    if shared:
        rows += gated_rows(f"{ours}shared_experts.", f"{theirs}shared_expert.", shared)
    if shared and model.moe.moe_shared_expert_gate:
        rows.append(Row(f"{ours}shared_experts.gate_weight", (f"{theirs}shared_expert_gate.weight",), same))
    return rows


QWEN2 = Family(
    "qwen2", "Qwen2ForCausalLM", "qwen2", _qwen2_in, _qwen2_out, rows, base="model.", skipped=SKIPPED, copies=COPIES
)
QWEN3 = Family(
    "qwen3", "Qwen3ForCausalLM", "qwen3", _qwen3_in, _qwen3_out, rows, base="model.", skipped=SKIPPED, copies=COPIES
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    _qwen2_moe_in,
    _qwen2_moe_out,
    moe_rows,
    base="model.",
    skipped=SKIPPED,
    copies=COPIES,
    fused=FUSED,
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    _qwen3_moe_in,
    _qwen3_moe_out,
    moe_rows,
    base="model.",
    skipped=SKIPPED,
    copies=COPIES,
    fused=FUSED,
)
