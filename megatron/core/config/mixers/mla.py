"""Multi-head latent attention: keys and values of all heads are made of one small vector a token (DeepSeek-V2, 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron.core.config.mixers.attention import Attention
from megatron.core.config.mixers.mixer import LinearShape
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RunConfig


class LatentAttention(Attention):
    """Attention by latents, which decoding caches instead of keys and values."""

    name, symbol, title = "mla", "+", "latent attention"
    query_and_key_parameters = ("linear_q", "q_layernorm."), ("linear_kv", "k_layernorm.", "kv_layernorm.")

    def is_requested(self, model: ModelConfig) -> bool:
        """Whether the settings ask for it."""
        return model.mla.multi_latent_attention

    def linear_shapes(self, model: ModelConfig) -> Mapping[str, LinearShape]:
        """Return the shapes of the projections to latents, from latents to heads, and of the output's."""
        mla, heads, hidden = model.mla, model.num_attention_heads, model.hidden_size
        query, value = self.query_and_value_widths(model)
        sizes = {"linear_q_proj": (hidden, query)}
        if mla.q_lora_rank is not None:
            sizes = {"linear_q_down_proj": (hidden, mla.q_lora_rank), "linear_q_up_proj": (mla.q_lora_rank, query)}
        sizes |= {
            "linear_kv_down_proj": (hidden, mla.kv_lora_rank + mla.qk_pos_emb_head_dim),
            "linear_kv_up_proj": (mla.kv_lora_rank, heads * mla.qk_head_dim + value),
            "linear_proj": (value, hidden),
        }
        return {name: LinearShape(inputs, (("", outputs),)) for name, (inputs, outputs) in sizes.items()}

    def query_and_value_widths(self, model: ModelConfig) -> tuple[int, int]:
        """Return the total width of all query heads, and of all value heads."""
        mla, heads = model.mla, model.num_attention_heads
        return heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim), heads * mla.v_head_dim

    def saved_elements(self, config: RunConfig) -> float:
        """Return how many elements a token saves on a rank: latents, output, and what is projected from latents."""
        model, mla, tp = config.model, config.model.mla, config.parallel.tp
        # before and after their norms
        latents = ((mla.q_lora_rank or 0) + mla.kv_lora_rank) * (2 if model.qk_layernorm else 1)
        # Values are views of the projection that keys come from, and keep it alive.
        query, value = (width // tp for width in self.query_and_value_widths(model))
        projections = 2 * query + model.num_attention_heads // tp * (mla.qk_head_dim + mla.v_head_dim)
        recomputed = "mla_up_proj" in (config.recompute.recompute_modules or ())
        return latents / (tp if config.parallel.sequence_parallel else 1) + value + (0 if recomputed else projections)

    def matrix_sizes(self, model: ModelConfig, tp: int) -> Iterator[tuple[str, int, int]]:
        """Yield the widths of latents, queries, keys and values."""
        mla, (query, value) = model.mla, self.query_and_value_widths(model)
        yield f"--kv-lora-rank {mla.kv_lora_rank}", mla.kv_lora_rank, 1
        if mla.q_lora_rank is not None:
            yield f"--q-lora-rank {mla.q_lora_rank}", mla.q_lora_rank, 1
        yield "the width of all queries", query, tp
        yield "the width of all keys and values", model.num_attention_heads * mla.qk_head_dim + value, tp
        yield "the width of all values", value, tp

    def cached_heads(self, model: ModelConfig, tp: int) -> tuple[tuple[int, int], ...]:
        """Return the one latent, with the rotated key that all heads share."""
        return ((1, model.mla.kv_lora_rank + model.mla.qk_pos_emb_head_dim),)
