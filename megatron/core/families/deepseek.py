"""DeepSeek: latent attention, experts beside an expert that every token uses, and first some layers with an MLP.

    V2   experts by the softmax of their scores, with V2 (not V2-Lite) only of the groups whose best is best
    V3   experts by a sigmoid and a bias that balances them, of the groups whose best two are best; and behind the last layer
         one that predicts a token further, as a layer of its own number

Files hold that layer's embedding and output matrix again; they are those of the network. V3 was published in 8 bits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.config_json import BALANCE, PlainKeys, format_layer_freq, read_plain_keys, write_plain_keys
from megatron.core.families.llama import (
    NO_BIAS,
    decoder_layer_mappings,
    decoder_mappings,
    gated_mlp_mappings,
    mlp_mappings,
    read_llama_keys,
    write_llama_keys,
)
from megatron.core.families.mixtral import expert_mappings
from megatron.core.families.parameter_mapping import (
    Family,
    ParameterMapping,
    module_mappings,
    rename_only_weight_mappings,
    same,
)
from megatron.core.families.qwen import FUSED
from megatron.core.models.describe import num_stored_mtp_layers

_SAYS_NOTHING = (
    *BALANCE,
    "ep_size",
    "moe_layer_freq",
    "topk_method",
    "scoring_func",
    "head_dim",
    "qk_head_dim",
    "num_nextn_predict_layers",
    "mlp_bias",
    "rope_interleave",
)
_KEYS: PlainKeys = {
    "kv_lora_rank": ("kv_lora_rank", None),
    "qk_nope_head_dim": ("qk_head_dim", None),
    "qk_rope_head_dim": ("qk_pos_emb_head_dim", None),
    "v_head_dim": ("v_head_dim", None),
    "n_routed_experts": ("num_experts", None),
    "num_experts_per_tok": ("moe_router_topk", None),
}
_EPSILON = 1e-6  # of the norms of latent vectors, whatever the others have


def _read_deepseek_keys(keys: ForeignMapping) -> dict[str, Any]:
    """Read the settings that V2 and V3 have in common."""
    rotated = keys.mapping.get("qk_rope_head_dim")
    keys.one_of("head_dim", (rotated,), rotated)  # as the class calls what is rotated
    keys.one_of("mlp_bias", (False,), False)
    keys.one_of("moe_layer_freq", (1,), 1)
    keys.one_of("rope_interleave", (True,), True)
    settings = read_llama_keys(keys, latent=True)
    if settings["norm_epsilon"] != _EPSILON:
        keys.problems.append(
            f"rms_norm_eps: {settings['norm_epsilon']:g} has no counterpart here; {_EPSILON:g}, which the norms of latent "
            "vectors have, has"
        )
    if settings["group_query_attention"]:
        keys.problems.append(
            f"num_key_value_heads: {settings['num_query_groups']} has no counterpart here; num_attention_heads has"
        )
    dense, layers, width = (
        keys.pop_or_none("first_k_dense_replace") or 0,
        settings["num_layers"],
        keys.positive_int("moe_intermediate_size"),
    )
    if not isinstance(dense, int) or not 0 <= dense < layers:
        keys.problems.append(f"first_k_dense_replace: {dense} is no number of layers from 0 to {layers - 1}")
        dense = 0
    return {
        **settings,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": keys.positive_int_or_none("q_lora_rank"),
        **read_plain_keys(keys, _KEYS),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * keys.positive_int("n_shared_experts"),
        "moe_layer_freq": format_layer_freq([place >= dense for place in range(layers)]) if dense else "1",
        **read_routed_scaling_factor(keys),
    }


def read_routed_scaling_factor(keys: ForeignMapping) -> dict[str, float | None]:
    """Read the factor of what the experts return; 1 is none."""
    factor = keys.non_negative_float("routed_scaling_factor", 1.0)
    return {"moe_router_topk_scaling_factor": None if factor == 1.0 else factor}


def read_group_limited_routing_keys(keys: ForeignMapping, score: str, *, used: bool) -> dict[str, Any]:
    """Read the settings of group-limited routing; {} without it.

    score: how a group is scored, "sum" or "max". used: whether the network limits groups at all.
    """
    groups, chosen = keys.positive_int("n_group", 1), keys.positive_int("topk_group", 1)
    experts, used_experts = keys.mapping.get("n_routed_experts"), keys.mapping.get("num_experts_per_tok", 1)
    if used and groups > 1 and isinstance(experts, int) and isinstance(used_experts, int):
        if experts % groups or chosen > groups:
            keys.problems.append(f"n_group: {groups} groups, of which {chosen}, cannot be made of {experts} experts")
        elif used_experts > chosen * (experts // groups):
            keys.problems.append(
                f"num_experts_per_tok: {used_experts} are more than the experts of {chosen} of {groups} groups"
            )
    settings = {"moe_router_num_groups": groups, "moe_router_group_topk": chosen, "moe_router_group_score": score}
    return settings if used and groups > 1 else {}


def note_sigmoid_routing_problems(keys: ForeignMapping, settings: Mapping[str, Any]) -> None:
    """Note what of a routing by normalized sigmoids has no counterpart here."""
    used, groups = settings["moe_router_topk"], settings.get("moe_router_group_topk")
    if groups and used // groups != 2:
        keys.problems.append(
            f"topk_group: {groups} of num_experts_per_tok: {used}; here a group's score is the sum of its best "
            f"{used // groups}, there of its best 2"
        )
    if used == 1:
        keys.problems.append(
            "num_experts_per_tok: 1 with norm_topk_prob: True weighs every expert alike; 2 or more have a counterpart"
        )


def write_routing_keys(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json for the factor of the experts and the groups that routing is limited to."""
    moe = model.moe
    return {
        "routed_scaling_factor": moe.moe_router_topk_scaling_factor or 1.0,
        "n_group": moe.moe_router_num_groups or like.get("n_group", 1),
        "topk_group": moe.moe_router_group_topk or like.get("topk_group", 1),
    }


def _deepseek_config_keys(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that V2 and V3 have in common."""
    moe = model.moe
    width = moe.moe_ffn_hidden_size or 1
    return {
        **write_llama_keys(model, like),
        "q_lora_rank": model.mla.q_lora_rank,
        **write_plain_keys(model, _KEYS),
        "moe_intermediate_size": width,
        "n_shared_experts": (moe.moe_shared_expert_intermediate_size or 0) // width,
        "first_k_dense_replace": sum(plan.mlp == "dense" for plan in network_layer_plans(model)),
        **write_routing_keys(model, like),
    }


def _read_v2_config(keys: ForeignMapping) -> dict[str, Any]:
    method = keys.one_of("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    keys.one_of("scoring_func", ("softmax",), "softmax")
    return {
        **_read_deepseek_keys(keys),
        **read_group_limited_routing_keys(keys, "max", used=method != "greedy"),
        "moe_router_pre_softmax": True,
    }


def _write_v2_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    method = "group_limited_greedy" if model.moe.moe_router_num_groups else "greedy"
    return {**_deepseek_config_keys(model, like), "topk_method": method}


def _read_v3_config(keys: ForeignMapping) -> dict[str, Any]:
    keys.one_of("topk_method", ("noaux_tc",), "noaux_tc")
    keys.one_of("scoring_func", ("sigmoid",), "sigmoid")
    settings = {**_read_deepseek_keys(keys), **read_group_limited_routing_keys(keys, "sum", used=True)}
    note_sigmoid_routing_problems(keys, settings)
    return {**settings, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def _write_v3_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_deepseek_config_keys(model, like),
        "num_nextn_predict_layers": model.mtp.mtp_num_layers or like.get("num_nextn_predict_layers", 0),
    }


def parameter_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """Return the mappings of all parameters; those of multi-token prediction follow the last layer."""
    mlps = {"dense": mlp_mappings, "moe": _expert_mappings}
    rows = list(decoder_mappings(model, _mla_mappings, mlps))
    for depth in range(num_stored_mtp_layers(model)):
        ours, theirs = f"mtp.layers.{depth}.", f"model.layers.{model.num_layers + depth}."
        rows += rename_only_weight_mappings(ours, theirs, {name: name for name in ("enorm", "hnorm", "eh_proj")})
        rows += decoder_layer_mappings(
            model, f"{ours}mtp_model_layer.", theirs, _mla_mappings, mlps[network_layer_plans(model)[-1].mlp]
        )
        rows += module_mappings(f"{ours}final_layernorm", f"{theirs}shared_head.norm")
    return tuple(rows)


def _mla_mappings(model: ModelConfig, ours: str, theirs: str) -> list[ParameterMapping]:
    queries = (
        {"linear_q_proj": "q_proj"}
        if model.mla.q_lora_rank is None
        else {"linear_q_down_proj": "q_a_proj", "q_layernorm": "q_a_layernorm", "linear_q_up_proj": "q_b_proj"}
    )
    names = {
        **queries,
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
        "linear_proj": "o_proj",
    }
    return rename_only_weight_mappings(ours, theirs, names)


def _expert_mappings(model: ModelConfig, ours: str, theirs: str) -> list[ParameterMapping]:
    rows = expert_mappings(model, ours, theirs)
    if model.moe.moe_router_enable_expert_bias:
        rows.append(ParameterMapping(f"{ours}router.expert_bias", (f"{theirs}gate.e_score_correction_bias",), same))
    return rows + gated_mlp_mappings(
        f"{ours}shared_experts.", f"{theirs}shared_experts.", model.moe.moe_shared_expert_intermediate_size or 0
    )


def _mtp_layers_from_tensor_names(settings: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Set mtp_num_layers to the number of MTP layers that the files hold."""
    depths = sum(
        f"model.layers.{number}.eh_proj.weight" in names
        for number in range(settings["num_layers"], settings["num_layers"] + 16)
    )
    return {**settings, "mtp_num_layers": depths or None}


_BEYOND = re.compile(r"model\.layers\.(\d+)\.")
_AGAIN = (
    (r"model\.layers\.\d+\.embed_tokens\.weight", "model.embed_tokens.weight"),
    (r"model\.layers\.\d+\.shared_head\.head\.weight", "lm_head.weight"),
)

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    _read_v2_config,
    _write_v2_config,
    parameter_mappings,
    silent=_SAYS_NOTHING,
    pinned=(*NO_BIAS, ("norm_topk_prob", False)),
    usual=(("q_lora_rank", 1536),),
    fused=FUSED,
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    _read_v3_config,
    _write_v3_config,
    parameter_mappings,
    silent=_SAYS_NOTHING,
    pinned=(*NO_BIAS, ("norm_topk_prob", True)),
    usual=(
        *(("first_k_dense_replace", 3), ("n_group", 8), ("topk_group", 4), ("routed_scaling_factor", 2.5)),
        *(("max_position_embeddings", 4096), ("q_lora_rank", 1536), ("num_key_value_heads", 128)),
    ),
    copies=(*DEEPSEEK_V2.copies, *_AGAIN),
    fused=FUSED,
    beyond=_BEYOND,
    seen=_mtp_layers_from_tensor_names,
)
