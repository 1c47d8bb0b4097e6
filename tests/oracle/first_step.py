"""The first training step of a decoder in plain torch: nothing of `megatron` computes here, and no tensor is shared or cut.

Written from the papers that the functions name. A step is described by settings (`ModelConfig` tells them), weights by their
global names and whole microbatches; what comes back are the losses that a log shows and the norm of the gradient.

b sequences, s positions, h width, n heads, g key heads, d channels of a head, v words, t = b * s tokens, e experts, k chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.plan.layers import LayerPlan, mtp_depth_layer_plans, network_layer_plans
from megatron.core.config.settings.model import ModelConfig, PositionConfig

Weights = Mapping[str, Tensor]
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "squared_relu": lambda x: F.relu(x) ** 2,
}


@dataclass(slots=True)
class Microbatch:
    """tokens, labels: int64 [b, s]; mask: [b, s], 1 where a label counts. present: bool [b, s], False where padding stands."""

    tokens: Tensor
    labels: Tensor
    mask: Tensor
    present: Tensor


@dataclass(slots=True)
class Found:
    """losses: name -> value as a log shows it. norm: of all gradients. loads: router -> choices of each expert in the step, [e]."""

    losses: dict[str, float]
    norm: float
    loads: dict[str, Tensor]


@dataclass(slots=True)
class Notes:
    """What the layers of a microbatch add beside the tokens' losses. objective: a sum of coefficient * loss. present: bool [b, s],
    the tokens that routers count.
    """

    objective: Tensor
    present: Tensor
    notes: dict[str, list[Tensor]] = field(default_factory=dict)
    loads: dict[str, Tensor] = field(default_factory=dict)


class Decoder:
    """A GPT by its settings and weights. so_far: router -> choices of the microbatches before, [e], for the global loss."""

    def __init__(self, model: ModelConfig, weights: Weights) -> None:
        self.model, self.weights, self.so_far = model, weights, {}

    def losses(self, batch: Microbatch, side: Notes) -> list[Tensor]:
        """The loss of every token, [b, s]: of the next token, and of each depth of multi-token prediction."""
        model = self.model
        places = torch.arange(batch.tokens.shape[1])
        x = self.embed(batch.tokens, places)
        plans = network_layer_plans(model)
        for plan in plans:
            x = self.layer(f"decoder.layers.{plan.index}.", plan, x, side, plan.index)
        x = self.norm("decoder.final_layernorm", x)
        found = [self.head(x, batch.labels)]
        for depth in range(1, (model.mtp.mtp_num_layers or 0) + 1):
            # DeepSeek-V3 (2024), section 2.2: [norm(vector of token i + k); norm(state of i at depth k - 1)], projected, one layer.
            here = f"mtp.layers.{0 if model.mtp.mtp_use_repeated_layer else depth - 1}."
            ahead = self.embed(
                shifted(batch.tokens, depth), (places + depth).clamp(max=model.max_position_embeddings - 1)
            )
            both = torch.cat((self.norm(f"{here}enorm", ahead), self.norm(f"{here}hnorm", x)), dim=-1)
            x = both @ self.weights[f"{here}eh_proj.weight"].T
            # A depth has no token where it reads padding; behind the sequence's end there is none to see.
            side.present = batch.present & F.pad(batch.present[:, depth:], (0, depth), value=True)
            plan = mtp_depth_layer_plans(model, 0 if model.mtp.mtp_use_repeated_layer else depth - 1)[0]
            x = self.layer(f"{here}mtp_model_layer.", plan, x, side, model.num_layers + depth - 1)
            x = self.norm(f"{here}final_layernorm", x)
            found.append(self.head(x, shifted(batch.labels, depth)))
        return found

    def embed(self, ids: Tensor, places: Tensor) -> Tensor:
        """[b, s] to [b, s, h]."""
        x = self.weights["embedding.word_embeddings.weight"][ids]
        if self.model.rope.position_embedding_type == "learned_absolute":
            x = x + self.weights["embedding.position_embeddings.weight"][places]
        return x * self.model.hidden_size**0.5 if self.model.scale_embeddings else x

    def head(self, x: Tensor, labels: Tensor) -> Tensor:
        """[b, s, h] to the cross entropy of each label, [b, s], over the words that exist."""
        name = "embedding.word_embeddings.weight" if self.model.ties_embeddings else "output_layer.weight"
        logits = x @ self.weights[name][: self.model.true_vocab_size].T
        cap = self.model.final_logit_softcap
        logits = cap * torch.tanh(logits / cap) if cap else logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Over the last dimension: LayerNorm (Ba et al., 2016) or RMSNorm (Zhang and Sennrich, 2019)."""
        scale = self.weights[f"{name}.weight"] + (1.0 if self.model.apply_layernorm_1p else 0.0)
        if self.model.normalization == "RMSNorm":
            return x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.model.norm_epsilon) * scale
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + self.model.norm_epsilon) * scale
            + self.weights[f"{name}.bias"]
        )

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x W^T, and the bias if there is one."""
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def layer(self, here: str, plan: LayerPlan, x: Tensor, side: Notes, number: int) -> Tensor:
        """One layer, [b, s, h] to the same. number: by which logs call its router."""
        model = self.model
        before = not model.norm_after_sublayer
        attention = self.latent_attention if plan.mixer == "mla" else self.attention
        normed = self.norm(f"{here}input_layernorm", x) if before else x
        update = attention(f"{here}self_attention.", plan, normed)
        if model.sandwich_norm or model.norm_after_sublayer:
            update = self.norm(f"{here}post_attention_layernorm", update)
        x = (normed if model.apply_residual_connection_post_layernorm else x) + update
        normed = self.norm(f"{here}pre_mlp_layernorm", x) if before else x
        if plan.mlp == "moe":
            update = self.experts(f"{here}mlp.", normed, side, number)
        else:
            update = self.mlp(f"{here}mlp.", normed)
        if model.sandwich_norm or model.norm_after_sublayer:
            update = self.norm(f"{here}post_mlp_layernorm", update)
        return (normed if model.apply_residual_connection_post_layernorm else x) + update

    def attention(self, here: str, plan: LayerPlan, x: Tensor) -> Tensor:
        """Grouped heads (Ainslie et al., 2023), [b, s, h] to the same."""
        model, (b, s, _) = self.model, x.shape
        n, g, d = model.num_attention_heads, model.num_query_groups, model.kv_channels
        gated = [n * d] if model.attention_output_gate else []
        q, *gate, k, v = (
            part.view(b, s, -1, d)
            for part in self.linear(f"{here}linear_qkv", x).split([n * d, *gated, g * d, g * d], dim=-1)
        )
        if model.qk_layernorm_across_heads:
            q = self.norm(f"{here}q_layernorm", q.flatten(2)).view_as(q)
            k = self.norm(f"{here}k_layernorm", k.flatten(2)).view_as(k)
        elif model.qk_layernorm:
            q, k = self.norm(f"{here}q_layernorm", q), self.norm(f"{here}k_layernorm", k)
        if model.uses_rotary and plan.rope:
            q, k = (rotated(part, model.rope, pairs=model.rope.rotary_interleaved) for part in (q, k))
        if model.qk_l2_norm:
            q, k = (part / torch.sqrt(part.square().mean(-1, keepdim=True) + model.norm_epsilon) for part in (q, k))
        mixed = self.weighed(here, plan, q, k.repeat_interleave(n // g, dim=2), v.repeat_interleave(n // g, dim=2))
        if model.attention_output_gate:
            mixed = mixed * torch.sigmoid(gate[0].flatten(2))
        return self.linear(f"{here}linear_proj", mixed)

    def latent_attention(self, here: str, plan: LayerPlan, x: Tensor) -> Tensor:
        """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): keys and values come from a latent, one rotated key serves all."""
        model, mla, (b, s, _) = self.model, self.model.mla, x.shape
        n, still, turned = model.num_attention_heads, mla.qk_head_dim, mla.qk_pos_emb_head_dim
        if mla.q_lora_rank is None:
            q = self.linear(f"{here}linear_q_proj", x)
        else:
            latent = self.linear(f"{here}linear_q_down_proj", x)
            q = self.linear(
                f"{here}linear_q_up_proj", self.norm(f"{here}q_layernorm", latent) if model.qk_layernorm else latent
            )
        latent, shared = self.linear(f"{here}linear_kv_down_proj", x).split([mla.kv_lora_rank, turned], dim=-1)
        latent = self.norm(f"{here}kv_layernorm", latent) if model.qk_layernorm else latent
        k, v = self.linear(f"{here}linear_kv_up_proj", latent).view(b, s, n, -1).split([still, mla.v_head_dim], dim=-1)
        q, q_turned = q.view(b, s, n, -1).split([still, turned], dim=-1)
        shared = shared[:, :, None]
        if plan.rope:  # beside learned positions too, if there are some
            q_turned, shared = (rotated(part, model.rope, pairs=True) for part in (q_turned, shared))
        q, k = torch.cat((q, q_turned), dim=-1), torch.cat((k, shared.expand(b, s, n, turned)), dim=-1)
        return self.linear(f"{here}linear_proj", self.weighed(here, plan, q, k, v))

    def weighed(self, here: str, plan: LayerPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of [b, s, n, d] each: [b, s, n * d of v]. A sink is one more score, that brings nothing."""
        model, s = self.model, q.shape[1]
        scale = model.softmax_scale if model.softmax_scale is not None else q.shape[-1] ** -0.5
        if plan.mixer == "mla" and model.softmax_scale is None:  # DeepSeek-V2's code: YaRN's growth of the scores
            scale = scale * growth(model.rope, model.rope.mscale_all_dim) ** 2
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) * scale
        if model.attention_logit_softcap:
            scores = model.attention_logit_softcap * torch.tanh(scores / model.attention_logit_softcap)
        distance = torch.arange(s)[:, None] - torch.arange(s)
        hidden = distance < 0
        if plan.window is not None and plan.window[0] >= 0:
            hidden = hidden | (distance > plan.window[0])
        scores = scores.masked_fill(hidden, -torch.inf)
        if model.softmax_type != "vanilla":
            sink = (
                self.weights[f"{here}softmax_offset"]
                if model.softmax_type == "learnable"
                else scores.new_zeros(q.shape[2])
            )
            scores = torch.cat((scores, sink[None, :, None, None].expand(*scores.shape[:3], 1)), dim=-1)
        return torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1)[..., :s], v).flatten(2)

    def mlp(self, here: str, x: Tensor) -> Tensor:
        """[..., h] to the same."""
        return self.linear(f"{here}linear_fc2", self.activated(self.linear(f"{here}linear_fc1", x)))

    def activated(self, wide: Tensor) -> Tensor:
        """Of a gated MLP (Shazeer, 2020) [..., 2f] to [..., f]."""
        act = ACTIVATIONS[self.model.activation_name]
        if not self.model.has_gated_mlp:
            return act(wide)
        gate, up = wide.chunk(2, dim=-1)
        if (bound := self.model.activation_func_clamp_value) is not None:  # gpt-oss (2025)
            gate, up = gate.clamp(max=bound), up.clamp(-bound, bound)
        return act(gate) * (up + self.model.glu_linear_offset)

    def experts(self, here: str, x: Tensor, side: Notes, number: int) -> Tensor:
        """A mixture of experts, token by token: [b, s, h] to the same. Its losses are noted beside."""
        moe, (b, s, h) = self.model.moe, x.shape
        scores = self.linear(f"{here}router", x).transpose(0, 1).reshape(s * b, -1)  # token i is of sequence i % b
        chosen, weights = self.choice(scores, self.weights.get(f"{here}router.expert_bias"))
        self.balance(here, scores, b, side, number)
        counted = chosen[side.present.T.flatten()].flatten()
        load = torch.zeros(moe.num_experts, dtype=torch.int64).index_add_(0, counted, torch.ones_like(counted))
        key = f"load_layer_{number}"
        side.loads[key] = side.loads.get(key, 0) + load
        tokens = x.transpose(0, 1).reshape(s * b, h)
        if moe.moe_expert_capacity_factor is not None:
            weights = weights * self.kept(chosen, weights.detach())
        output = torch.zeros_like(tokens)
        for expert in range(moe.num_experts):
            row, place = (chosen == expert).nonzero(as_tuple=True)
            names = [f"{here}experts.linear_fc{which}" for which in (1, 2)]
            (first, one), (second, two) = (
                (self.weights[f"{name}.weight"][expert], self.weights.get(f"{name}.bias")) for name in names
            )
            wide = F.linear(tokens[row], first, None if one is None else one[expert])
            made = F.linear(self.activated(wide), second, None if two is None else two[expert])
            output = output.index_add(0, row, made * weights[row, place][:, None])
        output = output.view(s, b, h).transpose(0, 1)
        if moe.moe_shared_expert_intermediate_size:
            shared = self.mlp(f"{here}shared_experts.", x)
            if moe.moe_shared_expert_gate:
                shared = shared * torch.sigmoid(x @ self.weights[f"{here}shared_experts.gate_weight"].T)
            output = output + shared
        return output

    def choice(self, scores: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Experts [t, k] of tokens with scores [t, e], and how much of each is taken. bias: [e], for the choice alone (DeepSeek-V3)."""
        moe = self.model.moe
        among = scores.softmax(-1) if moe.moe_router_pre_softmax else self.positive(scores)
        ranked = among.detach() if bias is None else among.detach() + bias
        if moe.moe_router_num_groups:
            ranked = self.of_best_groups(ranked)
        chosen = ranked.topk(moe.moe_router_topk, dim=-1).indices
        weights = among.gather(1, chosen)
        if moe.moe_router_score_function != "softmax":
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) if moe.moe_router_topk > 1 else weights
        elif not moe.moe_router_pre_softmax:
            weights = weights.softmax(-1)
        return chosen, weights * (moe.moe_router_topk_scaling_factor or 1.0)

    def positive(self, scores: Tensor) -> Tensor:
        """Scores by a function of each alone; of softmax, as they are."""
        return {
            "softmax": lambda x: x,
            "sigmoid": torch.sigmoid,
            "sqrtsoftplus": lambda x: torch.log1p(x.exp()).sqrt(),
        }[self.model.moe.moe_router_score_function](scores)

    def of_best_groups(self, ranked: Tensor) -> Tensor:
        """Experts of other groups than a token's best are out, [t, e] (DeepSeek-V2: by the best expert; V3: by the sum of the best)."""
        moe, groups = self.model.moe, []
        for group in ranked.chunk(moe.moe_router_num_groups, dim=-1):
            best = group.sort(-1, descending=True).values
            count = 1 if moe.moe_router_group_score == "max" else moe.moe_router_topk // moe.moe_router_group_topk
            groups.append(best[:, :count].sum(-1))
        totals = torch.stack(groups, dim=-1)
        worst = totals.sort(-1, descending=True).values[:, moe.moe_router_group_topk - 1]
        inside = (totals >= worst[:, None]).repeat_interleave(moe.num_experts // moe.moe_router_num_groups, dim=-1)
        return ranked.where(inside, -torch.inf)

    def kept(self, chosen: Tensor, weights: Tensor) -> Tensor:
        """1 for choices that an expert has room for, 0 for the others, [t, k]: those of most weight stay, or those that come first."""
        moe = self.model.moe
        room = math.ceil(chosen.numel() / moe.num_experts * moe.moe_expert_capacity_factor)
        keep = torch.zeros_like(weights)
        for expert in range(moe.num_experts):
            row, place = (chosen == expert).nonzero(as_tuple=True)
            first = moe.moe_token_drop_policy == "position"
            best = (row if first else -weights[row, place]).argsort(stable=True)[:room]
            keep[row[best], place[best]] = 1.0
        return keep

    def balance(self, here: str, scores: Tensor, b: int, side: Notes, number: int) -> None:
        """Balancing losses, E * sum of share of choices * mean score (Switch, 2022), and the z-loss (ST-MoE, 2022)."""
        moe, present = self.model.moe, side.present.T.flatten()
        sequence = (torch.arange(len(scores)) % b)[present]
        scores = scores[present]
        if not len(scores):
            return
        shares = (
            scores.softmax(-1)
            if moe.moe_router_score_function == "softmax"
            else (self.positive(scores) / (self.positive(scores).sum(-1, keepdim=True) + 1e-20))
        )
        hits = torch.zeros_like(shares).scatter(1, shares.topk(moe.moe_router_topk, dim=-1).indices, 1.0)

        def note(name: str, loss: Tensor, coefficient: float) -> None:
            side.objective = side.objective + coefficient * loss
            side.notes.setdefault(name, []).append(loss.detach())

        for kind, coefficient in moe.balancing_losses:
            if not coefficient or kind == "none":
                continue
            if kind == "seq_aux_loss":
                each = [
                    moe.num_experts * (hits[own].mean(0) / moe.moe_router_topk * shares[own].mean(0)).sum()
                    for own in (sequence == number for number in range(b))
                    if own.any()
                ]
                note("seq_load_balancing_loss", sum(each) / len(each), coefficient)
                continue
            counts = hits.sum(0)
            if kind == "global_aux_loss":
                counts = self.so_far[here] = (
                    self.so_far.get(here, 0) + counts
                )  # of a layer that serves several depths, of all of them
            loss = moe.num_experts * (counts / counts.sum() * shares.mean(0)).sum()
            note(
                {"aux_loss": "load_balancing_loss", "global_aux_loss": "global_load_balancing_loss"}[kind],
                loss,
                coefficient,
            )
        if moe.moe_z_loss_coeff:
            note("z_loss", torch.logsumexp(scores, dim=-1).square().mean(), moe.moe_z_loss_coeff)


def rotated(x: Tensor, rope: PositionConfig, *, pairs: bool) -> Tensor:
    """RoFormer (Su et al., 2021): channels [b, s, n, d], the first of them turned in pairs by their position; pairs: neighbours, or halves."""
    d = int(x.shape[-1] * rope.rotary_percent) // 2 * 2
    x, rest = x[..., :d], x[..., d:]
    places = torch.arange(x.shape[1], dtype=x.dtype) / (rope.rotary_seq_len_interpolation_factor or 1.0)
    angle = places[:, None] * torch.tensor([turn(rope, number, d) for number in range(d // 2)], dtype=x.dtype)
    size = growth(rope, rope.mscale) / growth(rope, rope.mscale_all_dim)
    turns = torch.polar(torch.full_like(angle, size), angle)[:, None]
    left, right = (x[..., 0::2], x[..., 1::2]) if pairs else x.chunk(2, dim=-1)
    turned = torch.complex(left.contiguous(), right.contiguous()) * turns
    return torch.cat((turned.real, turned.imag, rest), dim=-1)  # the same order of channels for queries and keys


def turn(rope: PositionConfig, number: int, d: int) -> float:
    """By how much a position turns one pair of d channels: plain, as Llama 3.1 slows it, or by YaRN (Peng et al., 2023, section 3.2)."""
    plain = rope.rotary_base ** (-2 * number / d)
    if rope.is_yarn:
        length = rope.yarn_original_max_position_embeddings
        ends = [
            d * math.log(length / (2 * math.pi * turns)) / (2 * math.log(rope.rotary_base))
            for turns in (rope.yarn_beta_fast, rope.yarn_beta_slow)
        ]
        if rope.yarn_correction_range_round_to_int:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        low, high = max(ends[0], 0), min(ends[1], d - 1)
        share = min(max((number - low) / (high - low or 0.001), 0.0), 1.0)
        return plain * (1 - share) + plain / rope.rotary_scaling_factor * share
    if rope.use_rope_scaling:
        length, low, high = (
            rope.rope_scaling_original_length,
            rope.rope_scaling_low_freq_factor,
            rope.rope_scaling_high_freq_factor,
        )
        wave = 2 * math.pi / plain
        if wave < length / high:
            return plain
        if wave > length / low:
            return plain / rope.rope_scaling_factor
        share = (length / wave - low) / (high - low)
        return (1 - share) * plain / rope.rope_scaling_factor + share * plain
    return plain


def growth(rope: PositionConfig, share: float) -> float:
    """YaRN's growth of what is rotated with the logarithm of its factor."""
    return (
        1.0 + 0.1 * share * math.log(rope.rotary_scaling_factor)
        if rope.is_yarn and rope.rotary_scaling_factor > 1
        else 1.0
    )


def shifted(rows: Tensor, places: int) -> Tensor:
    """Rows [b, s], so many places earlier; zeros behind."""
    return F.pad(rows[:, places:], (0, places))


def first_step(model: ModelConfig, weights: Weights, batches: Sequence[Microbatch], *, per_token: bool) -> Found:
    """The losses and the gradient of a step, by the objective of Megatron-LM: with per_token one mean over all tokens that count, else
    the mean of the microbatches' means. Balancing losses count as much as their microbatch does.
    """
    leaves = {name: value.detach().clone().requires_grad_(value.is_floating_point()) for name, value in weights.items()}
    network, factor, depths = Decoder(model, leaves), model.mtp.mtp_loss_scaling_factor, model.mtp.mtp_num_layers or 0
    every = sum(float(batch.mask.sum()) for batch in batches)
    sums: dict[str, list[Tensor]] = {}
    loads: dict[str, Tensor] = {}
    objective = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        side = Notes(torch.zeros((), dtype=torch.float64), batch.present)
        following, *ahead = network.losses(batch, side)
        own = float(batch.mask.sum())
        total = (following * batch.mask).sum()
        add(sums, "lm loss", total, own)
        for depth, losses in enumerate(ahead, start=1):
            mask = shifted(batch.mask, depth)
            ratio = (
                batch.mask.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1.0)
                if per_token
                else own / max(float(mask.sum()), 1.0)
            )
            add(sums, f"mtp_{depth} loss", (losses * mask).sum(), float(mask.sum()))
            total = total + factor / depths * (ratio * losses * mask).sum()
        share = own / every if per_token else 1 / len(batches)
        objective = objective + total / max(own, 1.0) * share + side.objective * share
        for name, found in side.notes.items():
            for loss in found:
                add(sums, name, loss, 1.0)
        for name, load in side.loads.items():
            loads[name] = loads.get(name, 0) + load
    learned = [value for value in leaves.values() if value.requires_grad]
    found = [
        gradient for gradient in torch.autograd.grad(objective, learned, allow_unused=True) if gradient is not None
    ]
    return Found(
        {name: float(total / count) for name, (total, count) in sums.items()},
        math.sqrt(sum(float(gradient.square().sum()) for gradient in found)),
        loads,
    )


def add(sums: dict[str, list[Tensor]], name: str, total: Tensor, count: float) -> None:
    """Add to a sum and its number."""
    before = sums.get(name, [torch.zeros(()), 0.0])
    sums[name] = [before[0] + total.detach(), before[1] + count]
