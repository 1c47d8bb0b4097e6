"""Self attention with grouped heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron.core.config.mixers.mixer import LinearShape, Mixer
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.optim import BYTES
from megatron.core.config.settings.run import RunConfig


class Attention(Mixer):
    """Every query head, or several together, has a head of keys and values."""

    name, symbol, title, attends = "attention", "*", "attention", True

    def is_requested(self, model: ModelConfig) -> bool:
        """Whether the settings ask for it: networks without a layer pattern have it, or latent attention."""
        return super().is_requested(model) or not (model.is_hybrid or model.mla.multi_latent_attention)

    def linear_shapes(self, model: ModelConfig) -> Mapping[str, LinearShape]:
        """Return the shapes of the fused projection and of the output's."""
        query, key = model.query_projection_width, model.key_projection_width
        gate = (("gate", query),) if model.attention_output_gate else ()
        return {
            "linear_qkv": LinearShape(model.hidden_size, (("q", query), *gate, ("k", key), ("v", key))),
            "linear_proj": LinearShape(query, (("", model.hidden_size),)),
        }

    def query_and_value_widths(self, model: ModelConfig) -> tuple[int, int]:
        """Return the total width of all query heads, and of all value heads."""
        return model.query_projection_width, model.query_projection_width

    def forward_flops_per_token(self, model: ModelConfig, keys: float) -> float:
        """Return the FLOPs of scores and of the sum over values."""
        return 2 * sum(self.query_and_value_widths(model)) * keys

    def saved_bytes_per_token(self, config: RunConfig) -> float:
        """Return the bytes of queries, keys, values and output; and of scores, which the unfused kernel alone keeps."""
        model, size = config.model, BYTES[config.precision.param_dtype_name]
        saved = size * self.saved_elements(config)
        if model.attention_backend not in ("unfused", "local") or "core_attn" in config.recompute.selected_modules:
            return saved
        scores = model.num_attention_heads // config.parallel.tp * config.train.seq_length
        return saved + scores * (size + (size + 1 if model.attention_dropout > 0 else 0))

    def saved_elements(self, config: RunConfig) -> float:
        """Return how many elements a token saves on a rank, without scores."""
        model, tp = config.model, config.parallel.tp
        query = model.query_projection_width // tp
        key = max(
            model.key_projection_width // tp, model.kv_channels
        )  # with more ranks than key heads each holds one head
        return query + 2 * key + query

    def matrix_sizes(self, model: ModelConfig, tp: int) -> Iterator[tuple[str, int, int]]:
        """Yield the widths of queries and keys."""
        yield "the width of all queries", model.query_projection_width, tp
        yield "the width of all keys", model.key_projection_width, min(tp, model.num_query_groups)

    def cached_heads(self, model: ModelConfig, tp: int) -> tuple[tuple[int, int], ...]:
        """Return the heads of keys and of values."""
        return ((max(1, model.num_query_groups // tp), model.kv_channels),) * 2
