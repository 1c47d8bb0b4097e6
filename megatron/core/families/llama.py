"""Llama and those built like it: rotary positions, RMSNorm, gated MLP, grouped heads.

Llama 2 and 3 (scaled rotations included), SmolLM2 (tied), Mistral. Queries, keys and values, gate and up are matrices of
their own there, and parts of one here. Both turn the halves of a head, so no row changes its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.config.plan import layer_rows
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.rules import Family, Op, Row, concat, same
from megatron.core.families.settings import Keys, groups_in, passed_through, rope_in, rope_out, windows_in, windows_out

Part = Callable[[ModelConfig, str, str], list[Row]]  # rows of a part of a layer: the network, our beginning, theirs

SKIPPED = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
)  # a table that follows from the settings
_MOST_LAYERS = 10_000
COPIES = (("lm_head.weight", "model.embed_tokens.weight"),)


def common_in(keys: Keys, *, tied: bool = False, base: float = 10000.0, latent: bool = False) -> dict[str, Any]:
    """Settings that the whole kin of Llama has. tied, base: what holds when the config does not say; latent: see `rope_in`."""
    hidden, heads, layers = (
        keys.whole("hidden_size"),
        keys.whole("num_attention_heads"),
        keys.whole("num_hidden_layers"),
    )
    keys.one_of("hidden_act", ("silu",), "silu")
    if layers > _MOST_LAYERS:  # which some kinds count one by one
        keys.problems.append(f"num_hidden_layers: {layers} are more than any network has")
        layers = 1
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": keys.whole("intermediate_size"),
        **groups_in(heads, keys.whole("num_key_value_heads", heads)),
        "kv_channels": keys.whole("head_dim", hidden // heads or 1),
        "max_position_embeddings": keys.whole("max_position_embeddings"),
        "true_vocab_size": keys.whole("vocab_size"),
        "untie_embeddings_and_output_weights": not keys.boolean("tie_word_embeddings", tied),
        "normalization": "RMSNorm",
        "norm_epsilon": keys.real("rms_norm_eps", 1e-6),
        "swiglu": True,
        "add_bias_linear": False,
        "init_method_std": keys.real("initializer_range", 0.02),
        "hidden_dropout": 0.0,
        "attention_dropout": keys.real("attention_dropout", 0.0),
        **rope_in(keys, base=base, latent=latent),
    }


def common_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that the whole kin of Llama has."""
    return {
        "vocab_size": model.true_vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.ties_embeddings,
        "attention_dropout": model.attention_dropout,
        **rope_out(model, like),
    }


NORMS = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}  # ours -> transformers' names


def decoder_rows(
    model: ModelConfig, attention: Part, mlps: Mapping[str, Part], norms: Mapping[str, str] = NORMS
) -> list[Row]:
    """All parameters of a network of Llama's kin, whose layers have these norms and an MLP of one of these kinds each.

    They stand in the order in which transformers has them: its files are cut in that order.
    """
    rows = [Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), same)]
    for plan in layer_rows(model):
        ours, theirs = f"decoder.layers.{plan.index}.", f"model.layers.{plan.index}."
        rows += layer(model, ours, theirs, attention, mlps[plan.mlp], norms)
    rows.append(Row("decoder.final_layernorm.weight", ("model.norm.weight",), same))
    if not model.ties_embeddings:
        rows.append(Row("output_layer.weight", ("lm_head.weight",), same))
    return rows


def layer(
    model: ModelConfig, ours: str, theirs: str, attention: Part, mlp: Part, norms: Mapping[str, str] = NORMS
) -> list[Row]:
    """One layer."""
    return [
        *attention(model, f"{ours}self_attention.", f"{theirs}self_attn."),
        *mlp(model, f"{ours}mlp.", f"{theirs}mlp."),
        *(Row(f"{ours}{own}.weight", (f"{theirs}{there}.weight",), same) for own, there in norms.items()),
    ]


def attention_rows(model: ModelConfig, ours: str, theirs: str) -> list[Row]:
    """Queries, keys and values are three matrices there and one here."""
    heads = concat(model.query_size, model.key_size, model.key_size)
    rows = _linear_rows(
        f"{ours}linear_qkv",
        [f"{theirs}{part}_proj" for part in "qkv"],
        heads,
        model.add_bias_linear or model.add_qkv_bias,
    )
    rows += _linear_rows(f"{ours}linear_proj", [f"{theirs}o_proj"], same, model.add_bias_linear)
    if model.qk_layernorm:
        rows += [Row(f"{ours}{part}_layernorm.weight", (f"{theirs}{part}_norm.weight",), same) for part in "qk"]
    return rows


def mlp_rows(model: ModelConfig, ours: str, theirs: str) -> list[Row]:
    """Gate and up are two matrices there and one here."""
    return gated_rows(ours, theirs, model.ffn_hidden_size, bias=model.add_bias_linear)


def gated_rows(ours: str, theirs: str, width: int, *, bias: bool = False) -> list[Row]:
    """A gated MLP of a width."""
    return [
        *_linear_rows(f"{ours}linear_fc1", [f"{theirs}gate_proj", f"{theirs}up_proj"], concat(width, width), bias),
        *_linear_rows(f"{ours}linear_fc2", [f"{theirs}down_proj"], same, bias),
    ]


def _linear_rows(ours: str, theirs: Sequence[str], op: Op, bias: bool) -> list[Row]:
    kinds = ("weight", "bias") if bias else ("weight",)
    return [Row(f"{ours}.{kind}", tuple(f"{part}.{kind}" for part in theirs), op) for kind in kinds]


def rows(model: ModelConfig) -> tuple[Row, ...]:
    """All parameters of a network whose layers are all alike."""
    return tuple(decoder_rows(model, attention_rows, {"dense": mlp_rows}))


def _llama_in(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys = Keys(config)
    attention, mlp = keys.boolean("attention_bias", False), keys.boolean("mlp_bias", False)
    if attention != mlp:
        keys.problems.append(
            f"attention_bias: {attention} with mlp_bias: {mlp}; here all linear layers have a bias or none"
        )
    return {**common_in(keys), "add_bias_linear": attention}, keys.finish()


def _llama_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **passed_through(like),
        **common_out(model, like),
        "head_dim": model.kv_channels,
        "attention_bias": model.add_bias_linear,
        "mlp_bias": model.add_bias_linear,
    }


def window_in(keys: Keys, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`sliding_window` of all layers. One that covers every position is none."""
    window = keys.whole("sliding_window", settings["max_position_embeddings"])
    return windows_in(window, [window < settings["max_position_embeddings"]] * settings["num_layers"])


def window_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """`sliding_window` of all layers; an earlier one that covers every position stays."""
    window, _ = windows_out(model)
    earlier = like.get("sliding_window")
    return {
        "sliding_window": earlier if window is None and earlier and earlier >= model.max_position_embeddings else window
    }


def _mistral_in(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys = Keys(config)
    settings = common_in(keys)
    return {**settings, **window_in(keys, settings)}, keys.finish()


def _mistral_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {**passed_through(like), **common_out(model, like), "head_dim": model.kv_channels, **window_out(model, like)}


LLAMA = Family(
    "llama", "LlamaForCausalLM", "llama", _llama_in, _llama_out, rows, base="model.", skipped=SKIPPED, copies=COPIES
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    "mistral",
    _mistral_in,
    _mistral_out,
    rows,
    base="model.",
    skipped=SKIPPED,
    copies=COPIES,
)
