"""Llama and those built like it: rotary positions, RMSNorm, gated MLP, grouped heads.

Llama 2 and 3 (scaled rotations included), SmolLM2 (tied), Mistral. Queries, keys and values, gate and up are matrices of
their own there, and parts of one here. Both turn the halves of a head, so no row changes its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron.core.config.model import ModelConfig
from megatron.core.families.rules import Family, Row, concat, same
from megatron.core.families.settings import Keys, groups_in, kept, rope_in, rope_out

SKIPPED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # a table that follows from the settings
COPIES = (("lm_head.weight", "model.embed_tokens.weight"),)


def common_in(keys: Keys, *, tied: bool = False) -> dict[str, Any]:
    """Settings that the whole kin of Llama has. tied: what holds when the config does not say."""
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    keys.one_of("hidden_act", ("silu",), "silu")
    return {
        "num_layers": keys.whole("num_hidden_layers"), "hidden_size": hidden,
        "ffn_hidden_size": keys.whole("intermediate_size"),
        **groups_in(heads, keys.whole("num_key_value_heads", heads)), "kv_channels": keys.whole("head_dim", hidden // heads or 1),
        "max_position_embeddings": keys.whole("max_position_embeddings"), "true_vocab_size": keys.whole("vocab_size"),
        "untie_embeddings_and_output_weights": not keys.switch("tie_word_embeddings", tied),
        "normalization": "RMSNorm", "norm_epsilon": keys.real("rms_norm_eps", 1e-6), "swiglu": True, "add_bias_linear": False,
        "init_method_std": keys.real("initializer_range", 0.02), "hidden_dropout": 0.0,
        "attention_dropout": keys.real("attention_dropout", 0.0), **rope_in(keys)}


def common_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that the whole kin of Llama has."""
    return {
        "vocab_size": model.true_vocab_size, "hidden_size": model.hidden_size, "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups, "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings, "initializer_range": model.init_method_std,
        "rms_norm_eps": model.norm_epsilon, "tie_word_embeddings": model.ties_embeddings,
        "attention_dropout": model.attention_dropout, **rope_out(model, like)}


def rows(model: ModelConfig) -> tuple[Row, ...]:
    """All parameters, in the order in which transformers has them: its files are cut in that order."""
    ours, theirs = "decoder.layers.{i}.", "model.layers.{i}."
    heads = tuple(f"{theirs}self_attn.{part}_proj" for part in "qkv")
    gated = tuple(f"{theirs}mlp.{part}_proj" for part in ("gate", "up"))
    parts = {"self_attention.linear_qkv": (heads, concat(model.query_size, model.key_size, model.key_size)),
             "self_attention.linear_proj": ((f"{theirs}self_attn.o_proj",), same),
             "mlp.linear_fc1": (gated, concat(model.ffn_hidden_size, model.ffn_hidden_size)),
             "mlp.linear_fc2": ((f"{theirs}mlp.down_proj",), same)}
    biased = [*parts] if model.add_bias_linear else ["self_attention.linear_qkv"] if model.add_qkv_bias else []
    found = [Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), same)]
    for name, (names, op) in parts.items():
        found += [Row(f"{ours}{name}.{kind}", tuple(f"{part}.{kind}" for part in names), op)
                  for kind in ("weight", "bias") if kind == "weight" or name in biased]
        if model.qk_layernorm and name == "self_attention.linear_proj":
            found += [Row(f"{ours}self_attention.{part}_layernorm.weight", (f"{theirs}self_attn.{part}_norm.weight",), same)
                      for part in "qk"]
    found += [Row(f"{ours}input_layernorm.weight", (f"{theirs}input_layernorm.weight",), same),
              Row(f"{ours}pre_mlp_layernorm.weight", (f"{theirs}post_attention_layernorm.weight",), same),
              Row("decoder.final_layernorm.weight", ("model.norm.weight",), same)]
    if not model.ties_embeddings:
        found.append(Row("output_layer.weight", ("lm_head.weight",), same))
    return tuple(found)


def _llama_in(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys = Keys(config)
    attention, mlp = keys.switch("attention_bias", False), keys.switch("mlp_bias", False)
    if attention != mlp:
        keys.problems.append(f"attention_bias: {attention} with mlp_bias: {mlp}; here all linear layers have a bias or none")
    return {**common_in(keys), "add_bias_linear": attention}, keys.finish()


def _llama_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {**kept(like), **common_out(model, like), "head_dim": model.kv_channels,
            "attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}


def _mistral_in(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys = Keys(config)
    found, window = common_in(keys), keys.pop("sliding_window")
    if window is not None and not _covers(window, found["max_position_embeddings"]):
        keys.problems.append(f"sliding_window: {window} is shorter than max_position_embeddings, "
                             f"{found['max_position_embeddings']}, and windows are not built here. Within {window} positions "
                             "the network is the same without one: set max_position_embeddings to it for shorter sequences")
    return found, keys.finish()


def _mistral_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    window = like.get("sliding_window")
    return {**kept(like), **common_out(model, like), "head_dim": model.kv_channels,
            "sliding_window": window if _covers(window, model.max_position_embeddings) else None}


def _covers(window: Any, positions: int) -> bool:
    return isinstance(window, int) and window >= positions


LLAMA = Family("llama", "LlamaForCausalLM", "llama", _llama_in, _llama_out, rows, base="model.", skipped=SKIPPED,
               copies=COPIES)
MISTRAL = Family("mistral", "MistralForCausalLM", "mistral", _mistral_in, _mistral_out, rows, base="model.", skipped=SKIPPED,
                 copies=COPIES)
