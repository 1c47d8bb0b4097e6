"""T5: an encoder and a decoder that looks at it, with biases of the scores by distance (Raffel et al., 2019).

    v1.0           ReLU; the output layer is the embedding, and its logits are divided by sqrt(hidden size)
    v1.1, Flan     gated GELU; an output layer of its own

Attention scores have no factor, no linear layer has a bias, and the tables of distances stand in the first layer of either
half. Which of both a folder is, is said in two ways: `tie_word_embeddings`, as published, where false stands for an output
layer of its own; and `scale_decoder_outputs`, as later saved, where the files alone tell whether there is one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.config_json import PlainKeys, preserved_keys, read_plain_keys, write_plain_keys
from megatron.core.families.parameter_mapping import (
    Family,
    HFModelClass,
    ParameterMapping,
    concat_conversion,
    module_mappings,
    same,
)

# feed_forward_proj -> our settings, and the name of the activation that transformers derives from it
_MLP: dict[str, tuple[dict[str, bool], str]] = {
    "relu": ({"relu": True}, "relu"),
    "gated-gelu": ({"geglu": True, "openai_gelu": True}, "gelu_new"),
    "gated-silu": ({"swiglu": True}, "silu"),
    "gelu": ({}, "gelu"),
    "gelu_new": ({"openai_gelu": True}, "gelu_new"),
}
_CHOICES = ("relu", "geglu", "swiglu", "openai_gelu")
_LENGTH = 512  # of the texts that the published ones were trained on; their positions allow any
_HEAD = "lm_head.weight"


_KEYS: PlainKeys = {
    "vocab_size": ("true_vocab_size", None),
    "d_model": ("hidden_size", None),
    "d_kv": ("kv_channels", None),
    "d_ff": ("ffn_hidden_size", None),
    "num_layers": ("num_layers", None),
    "num_heads": ("num_attention_heads", None),
    "relative_attention_num_buckets": ("relative_attention_num_buckets", 32),
    "relative_attention_max_distance": ("relative_attention_max_distance", 128),
    "dropout_rate": ("hidden_dropout", 0.1),
    "layer_norm_epsilon": ("norm_epsilon", 1e-6),
}


def _read_t5_config(keys: ForeignMapping) -> dict[str, Any]:
    settings = read_plain_keys(keys, _KEYS)
    kind = keys.one_of("feed_forward_proj", tuple(_MLP), "relu")
    mlp, activation = _MLP.get(kind, ({}, ""))
    keys.one_of("dense_act_fn", (activation,), activation)
    keys.one_of("is_gated_act", (str(kind).startswith("gated-"),), str(kind).startswith("gated-"))
    tied = keys.boolean("tie_word_embeddings", True)
    scaled = keys.boolean("scale_decoder_outputs", tied)
    if scaled and not tied:
        keys.problems.append(
            "tie_word_embeddings: False with scale_decoder_outputs: True; only a tied output layer is scaled here"
        )
    return {
        **settings,
        "architecture": "t5",
        "encoder_num_layers": settings["num_layers"],
        "decoder_num_layers": keys.positive_int("num_decoder_layers", settings["num_layers"]),
        "max_position_embeddings": keys.positive_int("n_positions", _LENGTH),
        "position_embedding_type": "relative",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "softmax_scale": 1.0,
        **{name: mlp.get(name, False) for name in _CHOICES},
        "untie_embeddings_and_output_weights": not tied,
        "scale_tied_logits": scaled,
        "attention_dropout": settings["hidden_dropout"],
    }


def _write_t5_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name for name in _CHOICES if getattr(model, name)}
    kind = min(_MLP, key=lambda kind: len(_MLP[kind][0].keys() ^ chosen))  # the same, or the nearest
    derived = {"dense_act_fn": _MLP[kind][1], "is_gated_act": kind.startswith("gated-")}
    ends: dict[str, Any] = {"tie_word_embeddings": model.ties_embeddings}
    if "scale_decoder_outputs" in like or (model.ties_embeddings and not model.scale_tied_logits):
        ends = {"tie_word_embeddings": True, "scale_decoder_outputs": model.scale_tied_logits and model.ties_embeddings}
    return {
        **preserved_keys(like, "n_positions"),
        **write_plain_keys(model, _KEYS),
        "num_decoder_layers": model.decoder_num_layers,
        "feed_forward_proj": kind,
        **{name: value for name, value in derived.items() if name in like},
        **ends,
    }


def parameter_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """Return all mappings, in the order of transformers, layer by layer, as encoder and decoder have their own."""
    rows = module_mappings("embedding.word_embeddings", "shared")
    for half, depth in (("encoder", model.num_layers), ("decoder", model.decoder_num_layers or 0)):
        for layer in range(depth):
            rows += _t5_layer_mappings(model, half, layer)
        rows += module_mappings(f"{half}.final_layernorm", f"{half}.final_layer_norm")
    return (*rows, *(() if model.ties_embeddings else module_mappings("output_layer", "lm_head")))


def _t5_layer_mappings(model: ModelConfig, half: str, layer: int) -> list[ParameterMapping]:
    ours, theirs, size = f"{half}.layers.{layer}.", f"{half}.block.{layer}.layer.", model.query_projection_width
    table = f"{theirs}0.SelfAttention.relative_attention_bias"
    rows = [
        *_attention_mappings(f"{ours}self_attention.", f"{theirs}0.SelfAttention.", "qkv", size),
        *(module_mappings(f"{half}_relative_pos_emb.relative_attention_bias", table) if layer == 0 else ()),
        *module_mappings(f"{ours}input_layernorm", f"{theirs}0.layer_norm"),
    ]
    if half == "decoder":
        rows += module_mappings(f"{ours}cross_attention.linear_q", f"{theirs}1.EncDecAttention.q")
        rows += _attention_mappings(f"{ours}cross_attention.", f"{theirs}1.EncDecAttention.", "kv", size)
        rows += module_mappings(f"{ours}pre_cross_attn_layernorm", f"{theirs}1.layer_norm")
    last = f"{theirs}{2 if half == 'decoder' else 1}."
    wide = [f"{last}DenseReluDense.{part}" for part in (("wi_0", "wi_1") if model.has_gated_mlp else ("wi",))]
    op = concat_conversion(*[model.ffn_hidden_size] * 2) if model.has_gated_mlp else same
    return [
        *rows,
        *module_mappings(f"{ours}mlp.linear_fc1", *wide, op=op),
        *module_mappings(f"{ours}mlp.linear_fc2", f"{last}DenseReluDense.wo"),
        *module_mappings(f"{ours}pre_mlp_layernorm", f"{last}layer_norm"),
    ]


def _attention_mappings(ours: str, theirs: str, parts: str, size: int) -> list[ParameterMapping]:
    """Return an attention block's mappings. parts: letters of the matrices that are one here; size: rows of each."""
    names = [f"{theirs}{part}" for part in parts]
    return [
        *module_mappings(f"{ours}linear_{parts}", *names, op=concat_conversion(*[size] * len(parts))),
        *module_mappings(f"{ours}linear_proj", f"{theirs}o"),
    ]


def _complete_by_tensor_names(settings: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Untie the output layer if the files hold one and its logits are not scaled."""
    own = _HEAD in names and not settings["scale_tied_logits"]
    return {**settings, "untie_embeddings_and_output_weights": settings["untie_embeddings_and_output_weights"] or own}


T5 = Family(
    "t5",
    "T5ForConditionalGeneration",
    "t5",
    _read_t5_config,
    _write_t5_config,
    parameter_mappings,
    silent=("initializer_factor", "classifier_dropout"),
    pinned=(("is_encoder_decoder", True),),
    base="",
    skipped=re.compile(
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
    ),  # never read by anyone
    copies=(
        (_HEAD, "shared.weight"),
        ("encoder.embed_tokens.weight", "shared.weight"),
        ("decoder.embed_tokens.weight", "shared.weight"),
    ),
    respelled=((r"^(encoder|decoder)\.embed_tokens\.weight$", "shared.weight"),),
    variants=(HFModelClass("T5ForConditionalGeneration"), HFModelClass("T5WithLMHeadModel")),
    seen=_complete_by_tensor_names,
)
