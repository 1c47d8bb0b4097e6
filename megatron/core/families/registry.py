"""The published architectures that are known here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from megatron.core.config.flags import from_values, spelling, to_values
from megatron.core.config.model import MLAConfig, ModelConfig
from megatron.core.config.moe import MoEConfig
from megatron.core.config.plan import LayerPlan, layer_rows
from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.core.families.bert import BERT, MEGATRON_BERT
from megatron.core.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megatron.core.families.gemma import GEMMA, GEMMA2
from megatron.core.families.gpt2 import GPT2
from megatron.core.families.gpt_oss import GPT_OSS
from megatron.core.families.llama import LLAMA, MISTRAL
from megatron.core.families.mixtral import MIXTRAL
from megatron.core.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from megatron.core.families.rules import Family
from megatron.core.families.settings import classes_of
from megatron.core.families.t5 import T5

FAMILIES: dict[str, Family] = {family.name: family for family in (
    GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS, GEMMA, GEMMA2, BERT,
    MEGATRON_BERT, T5)}

# Settings of ours that no published config holds: they do not change the function that the weights are.
_FREE = frozenset(("attention_backend", "kernel", "cross_entropy_fusion_impl", "hidden_dropout", "attention_dropout",
                   "init_method_std", "embedding_init_method_std", "init_method_xavier_uniform", "make_vocab_size_divisible_by", "padded_vocab_size", "true_vocab_size",
                   "fp32_residual_connection", "group_query_attention", "bert_binary_head", "qk_clip", "qk_clip_threshold",
                   "qk_clip_alpha", "mtp_loss_scaling_factor", "mtp_detach_heads"))
# How experts are trained and run; and what is compared as rows of layers instead.
_EXPERTS_FREE = frozenset(field.name for field in fields(MoEConfig)) - {
    "num_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score",
    "moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"}
_ROWS = frozenset(("window_size", "window_attn_skip_freq", "no_rope_freq"))
_ROTARY = frozenset(("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor",
                     "use_rope_scaling", "rope_type"))
_SCALING = frozenset(("rope_scaling_factor", "rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor",
                      "rope_scaling_original_length"))
_YARN = frozenset(("rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow",
                   "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim"))
_RELATIVE = frozenset(("relative_attention_num_buckets", "relative_attention_max_distance"))
_GATE = frozenset(("activation_func_clamp_value", "glu_linear_offset"))


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family that a config.json belongs to. Raises `CheckpointError` that names those known here."""
    named = classes_of(config)
    for family in FAMILIES.values():
        if family.variant(named) or (not named and config.get("model_type") == family.model_type):
            return family
    known = ", ".join(variant.architecture for family in FAMILIES.values() for variant in family.variants or (family,))
    what = f"architectures: {', '.join(named)}" if named else f"model_type: {config.get('model_type')}"
    raise CheckpointError(f"{where} holds {what}, which is not known here; known are {known}")


def model_of(settings: Mapping[str, Any]) -> ModelConfig:
    """The resolved model of settings by field name, such as a `Source` has."""
    return from_values(ModelConfig, settings).resolve()


def fitting_family(model: ModelConfig, asked: str | None = None) -> Family:
    """The family whose config.json can say all that this network is; `asked`: this one, or an error.

    Raises `CheckpointError` that says, family by family, which settings it has no word for.
    """
    if asked is not None and asked not in FAMILIES:
        raise CheckpointError(f"the family {asked} is not known here; known are {', '.join(FAMILIES)}")
    tried = [FAMILIES[asked]] if asked else list(FAMILIES.values())
    problems = []
    for family in tried:
        unsaid = differences(model, family)
        if not unsaid:
            return family
        problems.append(f"{family.name}: {'; '.join(unsaid)}")
    raise CheckpointError("no published architecture known here computes what this network does" if asked is None else
                          f"{asked} does not compute what this network does", problems)


def differences(model: ModelConfig, family: Family) -> list[str]:
    """Which settings of a network get lost in the family's config.json, a line each; nothing when it can be published so."""
    found, problems = family.config_in(family.config_out(model, {}))
    found["mtp_num_layers"] = model.mtp.mtp_num_layers if family.beyond else None  # those are told by the weights
    again = model_of(found)
    mine, back, silent = to_values(model), to_values(again), _silent(model)
    if model.rope.rotates and again.rope.rotates and model.rope.is_yarn == again.rope.is_yarn and model.rope.mrope_section is None:
        silent |= {"position_embedding_type", "rope_type"}  # two ways to say yarn
    unsaid = [f"{spelling(name)} is {mine[name]}, there {back[name]}" for name in mine
              if name not in silent and mine[name] != back[name]]
    layers = [(a, b) for a, b in zip(_layers(model), _layers(again)) if a != b]
    unsaid += [f"layer {a.index} is {a}, there {b}" for a, b in layers[:1]]
    return unsaid or problems


def _silent(model: ModelConfig) -> frozenset[str]:
    """Settings that say nothing of this network, since others say that they are not used, or do not change what it computes."""
    rope, moe, mla = model.rope, model.moe, model.mla
    kinds = {plan.mlp for plan in layer_rows(model)}
    unused = {
        _SCALING: not (rope.rotates and rope.use_rope_scaling), _YARN: not rope.is_yarn, _ROTARY: not rope.rotates,
        _RELATIVE: rope.position_embedding_type != "relative",
        frozenset(("max_position_embeddings",)): rope.position_embedding_type == "relative",
        frozenset(field.name for field in fields(MoEConfig)) - {"num_experts"}: not moe.num_experts,
        frozenset(("ffn_hidden_size",)): "dense" not in kinds,
        frozenset(("moe_router_pre_softmax",)): moe.moe_router_score_function != "softmax",
        frozenset(("moe_router_group_topk", "moe_router_group_score")): not moe.moe_router_num_groups,
        frozenset(("moe_router_topk_scaling_factor",)): moe.moe_router_topk_scaling_factor in (None, 1.0),
        frozenset(field.name for field in fields(MLAConfig)) - {"multi_latent_attention"}: not mla.multi_latent_attention,
        frozenset(("kv_channels", "num_query_groups", "qk_layernorm")): mla.multi_latent_attention,
        _GATE: not model.gated}
    return _FREE | _EXPERTS_FREE | _ROWS | frozenset().union(*(names for names, holds in unused.items() if holds))


def _layers(model: ModelConfig) -> list[LayerPlan]:
    """The rows of the network; to the right of the query causality leaves a window nothing to say."""
    return [replace(plan, window=(plan.window[0], -1)) if plan.causal and plan.window else plan for plan in layer_rows(model)]
