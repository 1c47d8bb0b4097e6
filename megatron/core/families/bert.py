"""BERT: an encoder of text with token types, as it was published and as Megatron builds it.

    bert            norms after each residual sum, and one of the embeddings (Devlin et al., 2018)
    megatron_bert   norms before each sublayer, and one at the end (BERT-345M); all else is the same

A folder holds the heads that its class has: for hidden words, for pairs of texts with the pooler below it, or neither. The
published files of BERT are older than today's names of a norm's parts, and hold more heads than their class says.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.config_json import (
    TANH_GELU,
    PlainKeys,
    architectures_of,
    preserved_keys,
    read_plain_keys,
    write_plain_keys,
)
from megatron.core.families.parameter_mapping import (
    BIASED,
    Family,
    HFModelClass,
    ParameterMapping,
    concat_conversion,
    module_mappings,
    rename_only_weight_mappings,
    same,
)

_SAYS_NOTHING = (
    "classifier_dropout",
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
)
_TABLES = {
    "word_embeddings": "word_embeddings",
    "position_embeddings": "position_embeddings",
    "tokentype_embeddings": "token_type_embeddings",
}
_AFTER = {"norm_after_residual": True, "embedding_layernorm": True}
_BEFORE = {"norm_after_residual": False, "embedding_layernorm": False}
_WORDS, _POOLER, _PAIRS = ("lm_head.", "output_layer."), "pooler.", "binary_head."


_KEYS: PlainKeys = {
    "vocab_size": ("true_vocab_size", None),
    "hidden_size": ("hidden_size", None),
    "num_hidden_layers": ("num_layers", None),
    "num_attention_heads": ("num_attention_heads", None),
    "intermediate_size": ("ffn_hidden_size", None),
    "max_position_embeddings": ("max_position_embeddings", None),
    "layer_norm_eps": ("norm_epsilon", 1e-12),
    "initializer_range": ("init_method_std", 0.02),
    "hidden_dropout_prob": ("hidden_dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
}


def _read_bert_config(keys: ForeignMapping, *, norms: Mapping[str, bool], pairs: str) -> dict[str, Any]:
    """Read our settings from the keys of a config.json; what cannot be expressed is noted in `keys.problems`.

    norms: settings of the places of the norms. pairs: name of the class that always has the head for pairs of texts.
    """
    settings = read_plain_keys(keys, _KEYS)
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    if hidden % heads:
        keys.problems.append(f"hidden_size: {hidden} is not a multiple of num_attention_heads, {heads}")
    if keys.mapping.get("is_decoder"):
        keys.problems.append("is_decoder: True has no counterpart here; False has")
    activation = keys.one_of("hidden_act", ("gelu", *TANH_GELU), "gelu")
    keys.one_of("position_embedding_type", ("absolute",), "absolute")
    keys.pop_or_none("is_causal")  # which the class does not read
    return {
        **settings,
        "architecture": "bert",
        "kv_channels": hidden // heads,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        **norms,
        "add_bias_linear": True,
        "openai_gelu": activation in TANH_GELU,
        "untie_embeddings_and_output_weights": False,
        "bert_binary_head": pairs in architectures_of(keys.mapping),
    }


def _write_bert_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    activation = like.get("hidden_act", "gelu_new")
    return {
        **preserved_keys(like, "position_embedding_type", "add_cross_attention"),
        **write_plain_keys(model, _KEYS),
        "hidden_act": (activation if activation in TANH_GELU else "gelu_new") if model.openai_gelu else "gelu",
    }


def parameter_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """Return the mappings of all parameters between our names and those of transformers, in its order."""
    rows = rename_only_weight_mappings("embedding.", "bert.embeddings.", _TABLES)
    if model.embedding_layernorm:
        rows += _weight_and_bias_mappings("embedding.layernorm", "bert.embeddings.LayerNorm")
    for layer in range(model.num_layers):
        rows += _layer_mappings(model, f"encoder.layers.{layer}.", f"bert.encoder.layer.{layer}.")
    if not model.norm_after_residual:
        rows += _weight_and_bias_mappings("encoder.final_layernorm", "bert.encoder.ln")
    if model.bert_binary_head:
        rows += _weight_and_bias_mappings("pooler.dense", "bert.pooler.dense")
    rows.append(ParameterMapping("output_layer.bias", ("cls.predictions.bias",), same))
    rows += _weight_and_bias_mappings("lm_head.dense", "cls.predictions.transform.dense")
    rows += _weight_and_bias_mappings("lm_head.layer_norm", "cls.predictions.transform.LayerNorm")
    return tuple(
        rows + (_weight_and_bias_mappings("binary_head", "cls.seq_relationship") if model.bert_binary_head else [])
    )


def _layer_mappings(model: ModelConfig, ours: str, theirs: str) -> list[ParameterMapping]:
    heads, size = [f"{theirs}attention.self.{part}" for part in ("query", "key", "value")], model.query_projection_width
    after = model.norm_after_residual
    second = ("post_attention_layernorm", "attention.output.LayerNorm") if after else ("pre_mlp_layernorm", "ln")
    return [
        *([] if after else _weight_and_bias_mappings(f"{ours}input_layernorm", f"{theirs}attention.ln")),
        *module_mappings(
            f"{ours}self_attention.linear_qkv", *heads, op=concat_conversion(size, size, size), kinds=BIASED
        ),
        *_weight_and_bias_mappings(f"{ours}self_attention.linear_proj", f"{theirs}attention.output.dense"),
        *_weight_and_bias_mappings(f"{ours}{second[0]}", f"{theirs}{second[1]}"),
        *_weight_and_bias_mappings(f"{ours}mlp.linear_fc1", f"{theirs}intermediate.dense"),
        *_weight_and_bias_mappings(f"{ours}mlp.linear_fc2", f"{theirs}output.dense"),
        *(_weight_and_bias_mappings(f"{ours}post_mlp_layernorm", f"{theirs}output.LayerNorm") if after else []),
    ]


def _weight_and_bias_mappings(ours: str, theirs: str) -> list[ParameterMapping]:
    return module_mappings(ours, theirs, kinds=BIASED)


def _binary_head_from_tensor_names(settings: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Set bert_binary_head if the files hold the head for pairs or the pooler."""
    there = any(name.startswith(("bert.pooler.", "cls.seq_relationship.")) for name in names)
    return {**settings, "bert_binary_head": settings["bert_binary_head"] or there}


def _bert_model_classes(name: str) -> tuple[HFModelClass, ...]:
    """Return the classes of transformers with their heads. name: their common beginning."""
    return (
        HFModelClass(f"{name}ForPreTraining", (*_WORDS, _POOLER, _PAIRS)),
        HFModelClass(f"{name}ForMaskedLM", _WORDS),
        HFModelClass(f"{name}Model", bare=True),
    )


_SKIPPED = re.compile(r"bert\.embeddings\.(position_ids|token_type_ids)")  # counts and zeros, kept as buffers once
_COPIES = (
    ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
)
_RESPELLED = ((r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))

BERT = Family(
    "bert",
    "BertForPreTraining",
    "bert",
    partial(_read_bert_config, norms=_AFTER, pairs="BertForPreTraining"),
    _write_bert_config,
    parameter_mappings,
    silent=_SAYS_NOTHING,
    pinned=(("type_vocab_size", 2), ("tie_word_embeddings", True)),
    base="bert.",
    skipped=_SKIPPED,
    copies=_COPIES,
    respelled=_RESPELLED,
    variants=_bert_model_classes("Bert"),
    seen=_binary_head_from_tensor_names,
)
MEGATRON_BERT = replace(
    BERT,
    name="megatron_bert",
    architecture="MegatronBertForPreTraining",
    model_type="megatron-bert",
    read_config=partial(_read_bert_config, norms=_BEFORE, pairs="MegatronBertForPreTraining"),
    variants=_bert_model_classes("MegatronBert"),
)
