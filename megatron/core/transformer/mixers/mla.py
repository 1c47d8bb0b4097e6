"""Multi-head latent attention: keys and values of all heads are made of one small vector a token (DeepSeek-V2, 2024).

    x -> linear_kv_down_proj -> latent [r] -> norm -> linear_kv_up_proj -> of every head a key [dk] and a value [dv]
                             \\-> shared key [d], rotated, the same for all heads
    x -> linear_q_proj -> of every head a query [dk + d], of which d are rotated; or by a latent of its own:
    x -> linear_q_down_proj -> latent [rq] -> norm -> linear_q_up_proj

As in Megatron, the latents have norms with --qk-layernorm only, and rotation always pairs neighbouring channels.
A head's score is (query . key + rotated query . shared key) * scale. The matrices that make latents are whole on every
tensor rank; those that make heads of them are cut by head, so that under sequence parallelism only latents are gathered.

Decoding keeps the latent and the shared key of each token, and no head's key or value: a query goes through the key's
matrix instead, into the space of the latents, and what it finds there through the value's matrix (`absorbed_attention`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.config.plan.layers import LayerPlan
from megatron.core.config.settings.model import ModelConfig
from megatron.core.context_parallel.attention import gather_context_parallel_keys
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.parallel.recompute import run_recomputing_intermediates
from megatron.core.parallel.spec import FusedWeightSegment
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.context.rope import RotaryTable, yarn_mscale
from megatron.core.transformer.mixers.attention import attend
from megatron.core.transformer.mixers.qk_clip import MaxAttentionScoreTracker


class MultiLatentAttention(nn.Module):
    """Attention of a sequence to itself, by latents."""

    def __init__(self, build: LayerBuildContext, plan: LayerPlan) -> None:
        super().__init__()
        model, mla = build.model, build.model.mla
        self.plan, self.mla = plan, mla
        self.build = replace(build, model=replace(model, softmax_scale=mla_softmax_scale(model)))
        self.heads = model.num_attention_heads // build.mesh.tp.size
        query = FusedWeightSegment(model.num_attention_heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim))
        pair = FusedWeightSegment(model.num_attention_heads * (mla.qk_head_dim + mla.v_head_dim))
        whole = partial(build.make_replicated_linear, sum_over=build.tp_region.gradient_sum_axes, bias=False)
        rank, normed = mla.q_lora_rank, model.qk_layernorm
        self.linear_q_proj = build.make_column_linear(model.hidden_size, (query,), bias=False) if rank is None else None
        self.linear_q_down_proj = None if rank is None else whole(model.hidden_size, rank)
        self.q_layernorm = build.make_norm(rank, kind="qk_norm") if rank is not None and normed else None
        self.linear_q_up_proj = None if rank is None else build.make_column_linear(rank, (query,), bias=False)
        self.linear_kv_down_proj = whole(model.hidden_size, mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
        self.kv_layernorm = build.make_norm(mla.kv_lora_rank, kind="qk_norm") if normed else None
        self.linear_kv_up_proj = build.make_column_linear(mla.kv_lora_rank, (pair,), bias=False)
        self.linear_proj = build.make_row_linear(model.num_attention_heads * mla.v_head_dim, bias=model.add_bias_linear)
        self.peaks = MaxAttentionScoreTracker() if model.qk_clip else None

    def forward(self, normed: Tensor, context: ForwardContext, bias: Tensor | None = None) -> Tensor:
        """Attend within the sequence; with a cache, by latents (`absorbed_attention`).

        normed: [s or s/tp, b, h]; bias: [1, n/tp, s, s], added to the scores (not with a cache). Returns like normed.
        """
        query, latent, shared = self._down_projections(normed)
        table = context.rotations(self.plan)
        mask = context.mask.with_window(self.plan.window)
        if context.cache is not None:
            kept = torch.cat(
                (self.build.tp_region.copy_to_region(latent), self._apply_rotary_to_tensor(shared, table)[:, :, 0]),
                dim=-1,
            )
            result = self.absorbed_attention(
                self._rotated_query_heads(query, table),
                kept,
                mask,
                context.attention_kernel(self.build, self.plan.index),
            )
            return self.linear_proj(result)

        def up_project_to_qkv(query: Tensor, latent: Tensor, shared: Tensor) -> tuple[Tensor, ...]:
            return self._rotated_query_heads(query, table), *self._key_and_value_heads(latent, shared, table)

        def core_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.peaks is not None and self.training:
                self.peaks.update(
                    q, *gather_context_parallel_keys(k, mask, self.build.mesh), self.build.model.softmax_scale
                )
            return attend(self.build, q, k, v, mask, AttentionScoreModifiers(bias=bias), training=self.training)

        if self.build.recomputes_module("mla_up_proj"):
            return self.linear_proj(
                run_recomputing_intermediates(up_project_to_qkv, core_attention, query, latent, shared)
            )
        return self.linear_proj(core_attention(*up_project_to_qkv(query, latent, shared)))

    def absorbed_attention(
        self, q: Tensor, kept: Tensor, mask: AttentionMaskSpec, kernel: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """Attend to cached latents, with the keys' up projection absorbed into queries, the values' into the output.

        q: [queries, b, n/tp, dk + d], rotated. kept: [keys, b, r + d], the latent and the rotated shared key of each
        token. kernel: in place of the run's. Returns [queries, b, n/tp * dv].
        """
        mla = self.mla
        matrices = self.linear_kv_up_proj.merged_weight().unflatten(0, (self.heads, -1))
        of_key, of_value = matrices.split([mla.qk_head_dim, mla.v_head_dim], dim=1)
        still, turned = q.split([mla.qk_head_dim, mla.qk_pos_emb_head_dim], dim=-1)
        query = torch.cat((torch.einsum("sbnk,nkr->sbnr", still, of_key), turned), dim=-1)
        key = kept[:, :, None]
        result = attend(
            self.build, query, key, key[..., : mla.kv_lora_rank], mask, training=self.training, kernel=kernel
        )
        return torch.einsum("sbnr,nvr->sbnv", result.unflatten(-1, (self.heads, -1)), of_value).flatten(2)

    def qk_clip_weight_factors(self, shrink: Tensor, alpha: float) -> dict[nn.Parameter, Tensor]:
        """Return for the matrices of queries and of keys and values the factor of each local row, [rows]; 1 for values.

        shrink: factor of the scores of every head of the network, [n]; see `qk_clip`. The rotated key serves all heads,
        so a head's rotated query takes the whole factor.
        """
        mla, tp = self.mla, self.build.mesh.tp
        own = shrink[tp.rank * self.heads : (tp.rank + 1) * self.heads, None]
        queries = torch.cat(((own**alpha).expand(-1, mla.qk_head_dim), own.expand(-1, mla.qk_pos_emb_head_dim)), dim=1)
        keys = torch.cat(
            ((own ** (1.0 - alpha)).expand(-1, mla.qk_head_dim), torch.ones_like(own).expand(-1, mla.v_head_dim)), dim=1
        )
        query = self.linear_q_proj if self.linear_q_up_proj is None else self.linear_q_up_proj
        assert query is not None, "queries have a projection, with or without a latent"
        return {query.weight: queries.flatten(), self.linear_kv_up_proj.weight: keys.flatten()}

    def _down_projections(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries or their latent, the latent [s or s/tp, b, r] and the unrotated shared key [s, b, 1, d].

        normed: [s or s/tp, b, h]. Latents are normed if they have norms.
        """
        project = self.linear_q_down_proj if self.linear_q_proj is None else self.linear_q_proj
        assert project is not None, "queries have a projection, with or without a latent"
        query = self.build.project(project, normed)
        query = query if self.q_layernorm is None else self.q_layernorm(query)
        latent, shared = self.build.project(self.linear_kv_down_proj, normed).split(
            [self.mla.kv_lora_rank, self.mla.qk_pos_emb_head_dim], dim=-1
        )
        # Every tensor rank needs the whole shared key, for its own heads: each knows only a share of its gradient.
        latent = latent.contiguous() if self.kv_layernorm is None else self.kv_layernorm(latent)
        return query, latent, self.build.tp_region.copy_to_region(shared.contiguous())[:, :, None]

    def _rotated_query_heads(self, query: Tensor, table: RotaryTable | None) -> Tensor:
        """Return all local heads' queries, [s, b, n/tp, dk + d], the last d rotated. query: queries or their latent."""
        q = query if self.linear_q_up_proj is None else self.linear_q_up_proj(query)
        still, turned = q.unflatten(-1, (self.heads, -1)).split(
            [self.mla.qk_head_dim, self.mla.qk_pos_emb_head_dim], dim=-1
        )
        return torch.cat((still, self._apply_rotary_to_tensor(turned, table)), dim=-1)

    def _key_and_value_heads(self, latent: Tensor, shared: Tensor, table: RotaryTable | None) -> tuple[Tensor, Tensor]:
        """Return keys [s, b, n/tp, dk + d], values [.., dv]. latent: [s or s/tp, b, r]; shared: [s, b, 1, d]"""
        pairs = self.linear_kv_up_proj(latent).unflatten(-1, (self.heads, -1))
        still, value = pairs.split([self.mla.qk_head_dim, self.mla.v_head_dim], dim=-1)
        turned = self._apply_rotary_to_tensor(shared, table).expand(-1, -1, self.heads, -1)
        return torch.cat((still, turned), dim=-1), value

    def _apply_rotary_to_tensor(self, x: Tensor, table: RotaryTable | None) -> Tensor:
        if table is None:
            return x
        return self.build.kernels.rotary(x, table.cos, table.sin, self.build.model.has_interleaved_rotary)


def mla_softmax_scale(model: ModelConfig) -> float:
    """Return the factor of the scores: --softmax-scale, or 1/sqrt(query size) times YaRN's squared --mscale-all-dim.

    YaRN flattens the softmax; the factor sharpens it again (Peng et al., 2023; DeepSeek-V2).
    """
    if model.softmax_scale is not None:
        return model.softmax_scale
    return yarn_mscale(model.rope, model.rope.mscale_all_dim) ** 2 / math.sqrt(
        model.mla.qk_head_dim + model.mla.qk_pos_emb_head_dim
    )
