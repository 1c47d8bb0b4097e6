"""GPT-2: learned positions, LayerNorm, one fused matrix for queries, keys and values.

Its matrices stand transposed, [in, out]; beside that, the fused one is laid out as ours, [q | k | v].
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.config_json import TANH_GELU, PlainKeys, preserved_keys, read_plain_keys, write_plain_keys
from megatron.core.families.parameter_mapping import (
    BIASED,
    Family,
    ParameterMapping,
    module_mappings,
    rename_only_weight_mappings,
    same,
    transpose,
)

_KEYS: PlainKeys = {
    "vocab_size": ("true_vocab_size", None),
    "n_positions": ("max_position_embeddings", None),
    "n_embd": ("hidden_size", None),
    "n_layer": ("num_layers", None),
    "n_head": ("num_attention_heads", None),
    "layer_norm_epsilon": ("norm_epsilon", 1e-5),
    "initializer_range": ("init_method_std", 0.02),
    "resid_pdrop": ("hidden_dropout", 0.1),
    "attn_pdrop": ("attention_dropout", 0.1),
}


def _read_gpt2_config(keys: ForeignMapping) -> dict[str, Any]:
    settings = read_plain_keys(keys, _KEYS)
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    if hidden % heads:
        keys.problems.append(f"n_embd: {hidden} is not a multiple of n_head, {heads}")
    activation = keys.one_of("activation_function", (*TANH_GELU, "gelu"), "gelu_new")
    inner = keys.positive_int("n_inner", 4 * hidden)
    keys.one_of("scale_attn_weights", (True,), True)
    keys.one_of("scale_attn_by_inverse_layer_idx", (False,), False)
    keys.one_of("add_cross_attention", (False,), False)
    keys.non_negative_float("embd_pdrop", settings["hidden_dropout"])  # ours has one share for both
    return {
        **settings,
        "ffn_hidden_size": inner,
        "kv_channels": hidden // heads,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "openai_gelu": activation in TANH_GELU,
        "untie_embeddings_and_output_weights": not keys.boolean("tie_word_embeddings", True),
    }


def _write_gpt2_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    activation = like.get("activation_function", "gelu_new")
    tanh = activation if activation in TANH_GELU else "gelu_new"
    inner = model.ffn_hidden_size
    return {
        **preserved_keys(
            like, "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention", "embd_pdrop"
        ),
        **write_plain_keys(model, _KEYS),
        "n_inner": None if inner == 4 * model.hidden_size and not like.get("n_inner") else inner,
        "activation_function": tanh if model.openai_gelu else "gelu",
        "embd_pdrop": like.get("embd_pdrop", model.hidden_dropout),
        "tie_word_embeddings": model.ties_embeddings,
    }


_MODULES = {
    "input_layernorm": "ln_1",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}


def parameter_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """Return the mappings of all parameters between our names and those of transformers, in its order."""
    rows = rename_only_weight_mappings(
        "embedding.", "transformer.", {"word_embeddings": "wte", "position_embeddings": "wpe"}
    )
    for layer, (ours, theirs) in itertools.product(range(model.num_layers), _MODULES.items()):
        mine, there = f"decoder.layers.{layer}.{ours}", f"transformer.h.{layer}.{theirs}"
        rows += module_mappings(mine, there, op=transpose if ".c_" in theirs else same)
        rows += module_mappings(mine, there, kinds=("bias",))
    rows += module_mappings("decoder.final_layernorm", "transformer.ln_f", kinds=BIASED)
    return (*rows, *(() if model.ties_embeddings else module_mappings("output_layer", "lm_head")))


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "gpt2",
    _read_gpt2_config,
    _write_gpt2_config,
    parameter_mappings,
    base="transformer.",
    skipped=re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"),  # causal masks, kept as buffers once
    copies=(("lm_head.weight", "transformer.wte.weight"),),
)
