"""Every parameter of a network by its global name, with its whole shape, as the settings tell it.

What `core/models` builds, known without building it: converting a checkpoint needs no network.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.model import ModelConfig

Shape = tuple[int, ...]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
VOCABULARY = frozenset((EMBEDDING, OUTPUT, "output_layer.bias"))  # those with a row for each id
_TOKEN_TYPES = 2


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Name -> shape of a network. model: resolved, with its vocabulary; rows of padding do not count.

    Of a BERT these are all its heads; a checkpoint may lack some.
    """
    return dict({"gpt": _gpt, "bert": _bert, "t5": _t5}[model.architecture](model))


def _gpt(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield from _embedding(model)
    for layer in range(model.num_layers):
        yield from _layer(f"decoder.layers.{layer}.", model)
    yield from _norm("decoder.final_layernorm", model.hidden_size, model)
    yield from _output(model, bias=False)


def _bert(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden = model.hidden_size
    yield from _embedding(model)
    yield "embedding.tokentype_embeddings.weight", (_TOKEN_TYPES, hidden)
    if model.embedding_layernorm:
        yield from _norm("embedding.layernorm", hidden, model)
    for layer in range(model.num_layers):
        yield from _layer(f"encoder.layers.{layer}.", model)
    if not model.norm_after_residual:
        yield from _norm("encoder.final_layernorm", hidden, model)
    yield from _linear("lm_head.dense", hidden, hidden, True)
    yield from _norm("lm_head.layer_norm", hidden, model)
    yield from _output(model, bias=True)
    if model.bert_binary_head:
        yield from _linear("pooler.dense", hidden, hidden, True)
        yield from _linear("binary_head", 2, hidden, True)


def _t5(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield from _embedding(model)
    for half, depth in (("encoder", model.encoder_num_layers), ("decoder", model.decoder_num_layers)):
        if model.rope.position_embedding_type == "relative":
            yield f"{half}_relative_pos_emb.relative_attention_bias.weight", (
                model.rope.relative_attention_num_buckets, model.num_attention_heads)
        for layer in range(depth):
            yield from _layer(f"{half}.layers.{layer}.", model, cross=half == "decoder")
        yield from _norm(f"{half}.final_layernorm", model.hidden_size, model)
    yield from _output(model, bias=model.add_bias_linear)


def _embedding(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield EMBEDDING, (model.true_vocab_size, model.hidden_size)
    if model.rope.position_embedding_type == "learned_absolute":
        yield "embedding.position_embeddings.weight", (model.max_position_embeddings, model.hidden_size)


def _layer(here: str, model: ModelConfig, *, cross: bool = False) -> Iterator[tuple[str, Shape]]:
    hidden, bias, qkv_bias = model.hidden_size, model.add_bias_linear, model.add_bias_linear or model.add_qkv_bias
    width, after = model.ffn_hidden_size * (2 if model.gated else 1), model.norm_after_residual
    yield from _norm(f"{here}{'post_attention' if after else 'input'}_layernorm", hidden, model)
    yield from _linear(f"{here}self_attention.linear_qkv", model.query_size + 2 * model.key_size, hidden, qkv_bias)
    if model.qk_layernorm:
        yield from _norm(f"{here}self_attention.q_layernorm", model.kv_channels, model)
        yield from _norm(f"{here}self_attention.k_layernorm", model.kv_channels, model)
    yield from _linear(f"{here}self_attention.linear_proj", hidden, model.query_size, bias)
    if cross:
        yield from _norm(f"{here}pre_cross_attn_layernorm", hidden, model)
        yield from _linear(f"{here}cross_attention.linear_q", model.query_size, hidden, qkv_bias)
        yield from _linear(f"{here}cross_attention.linear_kv", 2 * model.key_size, hidden, qkv_bias)
        yield from _linear(f"{here}cross_attention.linear_proj", hidden, model.query_size, bias)
    yield from _norm(f"{here}{'post_mlp' if after else 'pre_mlp'}_layernorm", hidden, model)
    yield from _linear(f"{here}mlp.linear_fc1", width, hidden, bias)
    yield from _linear(f"{here}mlp.linear_fc2", hidden, model.ffn_hidden_size, bias)


def _output(model: ModelConfig, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    if not model.ties_embeddings:
        yield OUTPUT, (model.true_vocab_size, model.hidden_size)
    if bias:
        yield "output_layer.bias", (model.true_vocab_size,)


def _norm(name: str, size: int, model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (size,)
    if model.normalization == "LayerNorm":
        yield f"{name}.bias", (size,)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)
