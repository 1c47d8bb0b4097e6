"""Every parameter of a network by its global name, with its whole shape, as the settings tell it.

What `core/models` builds, known without building it: converting a checkpoint needs no network.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.model import ModelConfig
from megatron.core.config.plan import LayerPlan, layer_rows

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


def mtp_depths(model: ModelConfig) -> int:
    """Layers behind the last that are stored: one may serve all depths."""
    depths = model.mtp.mtp_num_layers or 0
    return min(depths, 1) if model.mtp.mtp_use_repeated_layer else depths


def _gpt(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield from _embedding(model)
    plans = layer_rows(model)
    for plan in plans:
        yield from _layer(f"decoder.layers.{plan.index}.", model, plan)
    yield from _norm("decoder.final_layernorm", model.hidden_size, model)
    for depth in range(mtp_depths(model)):
        here = f"mtp.layers.{depth}."
        yield from _norm(f"{here}enorm", model.hidden_size, model)
        yield from _norm(f"{here}hnorm", model.hidden_size, model)
        yield f"{here}eh_proj.weight", (model.hidden_size, 2 * model.hidden_size)
        yield from _layer(f"{here}mtp_model_layer.", model, plans[-1])
        yield from _norm(f"{here}final_layernorm", model.hidden_size, model)
    yield from _output(model, bias=False)


def _bert(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden = model.hidden_size
    yield from _embedding(model)
    yield "embedding.tokentype_embeddings.weight", (_TOKEN_TYPES, hidden)
    if model.embedding_layernorm:
        yield from _norm("embedding.layernorm", hidden, model)
    for plan in layer_rows(model):
        yield from _layer(f"encoder.layers.{plan.index}.", model, plan)
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
            yield from _layer(f"{half}.layers.{layer}.", model, LayerPlan(layer, cross=half == "decoder"))
        yield from _norm(f"{half}.final_layernorm", model.hidden_size, model)
    yield from _output(model, bias=model.add_bias_linear)


def _embedding(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield EMBEDDING, (model.true_vocab_size, model.hidden_size)
    if model.rope.position_embedding_type == "learned_absolute":
        yield "embedding.position_embeddings.weight", (model.max_position_embeddings, model.hidden_size)


def _layer(here: str, model: ModelConfig, plan: LayerPlan) -> Iterator[tuple[str, Shape]]:
    hidden, bias, after = model.hidden_size, model.add_bias_linear, model.norm_after_residual
    for name in ("post_attention", "post_mlp") if after else ("input", "pre_mlp"):
        yield from _norm(f"{here}{name}_layernorm", hidden, model)
    for name in ("post_attention", "post_mlp") if model.sandwich_norm else ():
        yield from _norm(f"{here}{name}_layernorm", hidden, model)
    yield from (_latent if plan.mixer == "mla" else _attention)(f"{here}self_attention.", model)
    if plan.cross:
        yield from _norm(f"{here}pre_cross_attn_layernorm", hidden, model)
        yield from _linear(f"{here}cross_attention.linear_q", model.query_size, hidden, bias or model.add_qkv_bias)
        yield from _linear(f"{here}cross_attention.linear_kv", 2 * model.key_size, hidden, bias or model.add_qkv_bias)
        yield from _linear(f"{here}cross_attention.linear_proj", hidden, model.query_size, bias)
    if plan.mlp == "moe":
        yield from _experts(f"{here}mlp.", model)
    else:
        yield from _mlp(f"{here}mlp.", model.ffn_hidden_size, model)


def _attention(here: str, model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, qkv_bias = model.hidden_size, model.add_bias_linear or model.add_qkv_bias
    yield from _linear(f"{here}linear_qkv", model.query_size + 2 * model.key_size, hidden, qkv_bias)
    if model.attention_output_gate:
        yield from _linear(f"{here}linear_gate", model.query_size, hidden, qkv_bias)
    if model.qk_layernorm:
        yield from _norm(f"{here}q_layernorm", model.kv_channels, model)
        yield from _norm(f"{here}k_layernorm", model.kv_channels, model)
    if model.softmax_type == "learnable":
        yield f"{here}softmax_offset", (model.num_attention_heads,)
    yield from _linear(f"{here}linear_proj", hidden, model.query_size, model.add_bias_linear)


def _latent(here: str, model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    mla, hidden, heads = model.mla, model.hidden_size, model.num_attention_heads
    queries = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    if mla.q_lora_rank is None:
        yield f"{here}linear_q_proj.weight", (queries, hidden)
    else:
        yield f"{here}linear_q_down_proj.weight", (mla.q_lora_rank, hidden)
        if model.qk_layernorm:
            yield from _norm(f"{here}q_layernorm", mla.q_lora_rank, model)
        yield f"{here}linear_q_up_proj.weight", (queries, mla.q_lora_rank)
    yield f"{here}linear_kv_down_proj.weight", (mla.kv_lora_rank + mla.qk_pos_emb_head_dim, hidden)
    if model.qk_layernorm:
        yield from _norm(f"{here}kv_layernorm", mla.kv_lora_rank, model)
    yield f"{here}linear_kv_up_proj.weight", (heads * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    yield from _linear(f"{here}linear_proj", hidden, heads * mla.v_head_dim, model.add_bias_linear)


def _mlp(here: str, width: int, model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield from _linear(f"{here}linear_fc1", width * (2 if model.gated else 1), model.hidden_size, model.add_bias_linear)
    yield from _linear(f"{here}linear_fc2", model.hidden_size, width, model.add_bias_linear)


def _experts(here: str, model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    moe, hidden = model.moe, model.hidden_size
    experts, width = moe.num_experts, moe.moe_ffn_hidden_size
    yield from _linear(f"{here}router", experts, hidden, model.add_bias_linear)
    if moe.moe_router_enable_expert_bias:
        yield f"{here}router.expert_bias", (experts,)
    for name, shape in _mlp(f"{here}experts.", width, model):
        yield name, (experts, *shape)
    if moe.moe_shared_expert_intermediate_size:
        yield from _mlp(f"{here}shared_experts.", moe.moe_shared_expert_intermediate_size, model)
        if moe.moe_shared_expert_gate:
            yield f"{here}shared_experts.gate_weight", (1, hidden)


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
