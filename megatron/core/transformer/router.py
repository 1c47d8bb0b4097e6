"""Which experts each token uses, and how much of each.

    tokens [t, h] -> scores [t, e] -> experts [t, k], chosen by score (and group, and expert bias) -> weights [t, k]

    softmax                 softmax over the k chosen scores; with --moe-router-pre-softmax over all e, of which k are taken
    sigmoid, sqrtsoftplus   a number for each score; for k > 1 divided by the sum of the chosen ones

Every token of a microbatch is routed on exactly one rank: where tensor ranks hold the same tokens (no sequence parallelism),
the caller splits them first. So the gradients of the router's weights are shares of a sum over the tensor ranks, and counts
add up over all of them.

Capacity follows from the tokens of one rank, as in Megatron: what is dropped depends on how tokens lie on ranks. Padding is
routed and takes capacity as a token does, but counts neither in losses nor in loads.

A balancing loss is E * sum_i f_i P_i, 1 when all is even: f_i is the share of all choices that fell on expert i, P_i the mean
score that tokens gave it (Fedus et al., 2022). They differ in whose tokens are counted:

    aux_loss          those of the microbatch
    seq_aux_loss      those of one sequence; the mean over the sequences (DeepSeek-V3, 2024)
    global_aux_loss   f: those of all microbatches of the step so far, of all data-parallel ranks; P: those of the microbatch

Tokens are what is not padding: places behind a text, of empty samples and of rows that fill up a rank are left out.

A microbatch lies in pieces on the tensor and context ranks. f is a count, which they sum; P has gradients, and each rank
joins only its own tokens' share of it. So the shares add up to the loss, and their gradients to its gradient.

Sinkhorn's way needs no loss: it chooses by scores that were made even before (Clark et al., 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.plan.layers import LayerPlan, num_layers_of_mtp_depth
from megatron.core.config.settings.moe import MoEConfig
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.rng import derive_seed
from megatron.core.parallel.spec import ParamSpec, constant_initializer, meta_parameter, param_spec_of
from megatron.core.transformer.context.forward_context import ForwardContext, MicrobatchContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext

_TINY = 1e-20
_SINKHORN_TOLERANCE, _SINKHORN_TINY, _SINKHORN_ROUNDS = 1e-4, 1e-8, 10_000
_FIRST_FACTOR, _SECOND_FACTOR = 0x2545F4914F6CDD1D, 0x1B873593CC9E2D51  # odd, so that no two places fall together
_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
# router -> first sample of a microbatch in its step, and depth -> experts [t, k]
Choices = Mapping[str, Mapping[tuple[int, int], Tensor]]


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """The experts of each token.

    weights: [t, k], with gradient, 0 where dropped. experts: int64 [t, k]. kept: bool [t, k]; None: nothing was dropped.
    capacity: how many tokens of this rank an expert takes at most; None: all.
    """

    weights: Tensor
    experts: Tensor
    kept: Tensor | None = None
    capacity: int | None = None


class TopKRouter(nn.Module):
    """The MoE router: logits in fp32 or fp64, the choice of experts, their weights and balancing losses."""

    tally: Tensor

    def __init__(self, build: LayerBuildContext, plan: LayerPlan) -> None:
        super().__init__()
        model, self.moe = build.model, build.model.moe
        self.build, self.layer, self.num_experts = build, plan.index, self.moe.num_experts_or_zero
        requested = self.moe.moe_router_dtype or ("fp64" if build.dtype == torch.float64 else "fp32")
        self.dtype = {"fp32": torch.float32, "fp64": torch.float64}[requested]
        shape = (self.num_experts, model.hidden_size)
        self.weight = meta_parameter(
            ParamSpec(shape, build.init_method(), "matrix", sum_over=("tp",)), build.mesh, build.dtype
        )
        each = ParamSpec((self.num_experts,), constant_initializer(0.0), "vector", sum_over=("tp",))
        self.bias = meta_parameter(each, build.mesh, build.dtype) if model.add_bias_linear else None
        self.expert_bias: nn.Parameter | None = None
        if self.moe.moe_router_enable_expert_bias:
            self.expert_bias = meta_parameter(each, build.mesh, torch.float32)
            self.expert_bias.requires_grad_(False)
        self.layers_of_depth = num_layers_of_mtp_depth(model)
        repeated = model.mtp.mtp_use_repeated_layer and plan.index >= model.num_layers
        depths = (model.mtp.mtp_num_layers or 1) if repeated else 1
        # Of the step that is under way: choices of this rank's tokens [e] and how many were dropped [1], by the depths that
        # the layer serves; choices of all ranks.
        self.tally = torch.zeros((depths, self.num_experts + 1), dtype=torch.int64, device=build.mesh.device)
        self.chosen_so_far = self.tally[0, :-1].clone()
        self.recorded: dict[tuple[int, int], Tensor] = {}
        self.replayed: Mapping[tuple[int, int], Tensor] | None = None
        self.observed: list[Tensor] | None = None  # takes the choices of each pass, where the caller wants them

    def forward(self, x: Tensor, context: ForwardContext, *, fill: int = 0) -> ExpertRouting:
        """Route this rank's tokens. x: [positions, b, h]. Returns the routing of its t = positions * b tokens.

        fill: positions at the end of the last tensor rank that only fill up its piece of the sequence.
        """
        microbatch_context = context.microbatch_context
        routes = None if microbatch_context is None or context.depth else microbatch_context.routes
        if microbatch_context is not None and not microbatch_context.training:
            microbatch_context = None
        scores = self.logits(x)
        if self.moe.moe_router_force_load_balancing:
            scores = self._random_scores(scores, context)
        scores = scores.flatten(0, 1)
        if routes is None:
            experts = self._choose_or_replay_experts(scores, microbatch_context, context.depth)
        else:
            experts = self._shard_of_given_routes(routes[self.layer])
        if self.observed is not None:
            self.observed.append(experts)
        weights = routing_weights(scores, experts, self.moe)
        is_token = None if microbatch_context is None else self._token_mask(x, context, fill)
        if microbatch_context is not None:
            weights = self._with_balancing_losses(weights, scores, context, x.shape[1], is_token)
        routing = ExpertRouting(weights, experts)
        if self.moe.moe_expert_capacity_factor is not None:
            limit = expert_capacity(experts.shape[0], self.moe)
            routing = drop_choices_over_capacity(routing, limit, self.moe.moe_token_drop_policy, self.num_experts)
        if microbatch_context is not None:
            microbatch_context.compute_once(
                (self, context.depth, "tally"), lambda: self._count_routing(routing, context, is_token)
            )
        return routing

    def _shard_of_given_routes(self, routes: Tensor) -> Tensor:
        """Return the given experts of this rank's tokens, [t, k]. routes: [s, b, k], of the tokens of all tensor ranks."""
        missing = -routes.shape[0] % self.build.mesh.tp.size
        whole = torch.cat((routes, routes[:1].expand(missing, -1, -1))) if missing else routes
        return collectives.local_chunk(whole, self.build.mesh.tp).flatten(0, 1)

    def _token_mask(self, x: Tensor, context: ForwardContext, fill: int) -> Tensor | None:
        """Return which of this rank's tokens are not padding, bool [t]; None: all. x: [positions, b, h]; fill: as in `forward`."""
        mask, tp = context.token_mask, self.build.mesh.tp
        if fill:
            known = x.new_ones((x.shape[0] * tp.size - fill, x.shape[1]), dtype=torch.bool) if mask is None else mask
            mask = torch.cat((known, known.new_zeros((fill, x.shape[1]))))
        return None if mask is None else collectives.local_chunk(mask, tp).flatten()

    def mtp_depth_index(self, context: ForwardContext) -> int:
        """Return the index, from 0, of the MTP depth that a pass belongs to, among those that share this layer; else 0."""
        return context.depth - 1 if len(self.tally) > 1 else 0

    def layer_number(self, depth_index: int) -> int:
        """Return the number, from 0, by which logs call this layer at one of the MTP depths that it serves, from 0."""
        return self.layer + depth_index * self.layers_of_depth

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [..., e] in the router's dtype, in training with configured input jitter. x: [..., h]."""
        noise = self.moe.moe_input_jitter_eps
        if noise and self.training:
            with self.build.streams.fork("cut"):  # every rank has tokens of its own
                x = x * torch.empty_like(x).uniform_(1.0 - noise, 1.0 + noise)
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return self.build.project(partial(F.linear, weight=self.weight.to(self.dtype), bias=bias), x.to(self.dtype))

    @staticmethod
    def after_step(routers: Sequence[TopKRouter], *, stepped: bool) -> None:
        """Finish a step: update expert biases by all ranks' loads if the optimizer `stepped`, and reset all counts.

        Collective if there are expert biases and `stepped`.
        """
        biased = [(router, router.expert_bias) for router in routers if router.expert_bias is not None]
        if biased and stepped:
            mesh = biased[0][0].build.mesh
            loads = torch.stack([router.tally[:, :-1].sum(0) for router, _ in biased])
            collectives.all_reduce(loads, mesh.tp_dp_cp)
            for (router, bias), load in zip(biased, loads, strict=True):
                bias.data.copy_(updated_expert_bias(bias.data, load, router.moe.moe_router_bias_update_rate))
        for router in routers:
            router.tally = torch.zeros_like(router.tally)
            router.chosen_so_far = torch.zeros_like(router.chosen_so_far)

    def _choose_or_replay_experts(
        self, scores: Tensor, microbatch_context: MicrobatchContext | None, depth: int
    ) -> Tensor:
        """Return the experts of each token, int64 [t, k]: chosen from logits, or in training those set to replay."""
        if microbatch_context is not None and self.replayed is not None:
            result = self.replayed.get((microbatch_context.sample, depth))
            assert result is not None, (
                f"no choice was recorded for the microbatch from sample {microbatch_context.sample} on"
            )
            assert len(result) == len(scores), "a choice is replayed for as many tokens as it was made for"
            return result
        with torch.no_grad():
            if "sinkhorn" in self.moe.moe_router_load_balancing_type and self.training:
                result = sinkhorn(scores, self.build.mesh.tp_cp).topk(self.moe.moe_router_topk, dim=-1).indices
            else:
                result = choose_expert_indices(scores, self.moe, self.expert_bias)
        if microbatch_context is not None and self.moe.moe_enable_routing_replay:
            self.recorded[microbatch_context.sample, depth] = result
        return result

    def _with_balancing_losses(
        self, weights: Tensor, scores: Tensor, context: ForwardContext, num_sequences: int, is_token: Tensor | None
    ) -> Tensor:
        """Return the weights with balancing losses and z-loss attached, whose gradients backward computes too."""
        moe, axis, microbatch_context = self.moe, self.build.mesh.tp_cp, context.microbatch_context
        assert microbatch_context is not None, "losses and metrics of a router need a microbatch context"
        requested = [
            (kind, coefficient) for kind, coefficient in moe.balancing_losses if coefficient and kind in _NAMES
        ]
        if not (requested or moe.moe_z_loss_coeff):
            return weights
        num_tokens = microbatch_context.compute_once(
            (self, context.depth, "tokens"), lambda: self._count_tokens(scores, num_sequences, is_token)
        )
        if requested:
            shares = normalized_router_scores(scores, moe.moe_router_score_function)
            by_sequence = microbatch_context.compute_once(
                (self, context.depth, "chosen"),
                lambda: collectives.all_reduce(
                    count_expert_choices(
                        shares.topk(moe.moe_router_topk, dim=-1).indices,
                        self.num_experts,
                        num_sequences,
                        is_token=is_token,
                    ),
                    axis,
                ),
            )
            for kind, coefficient in requested:
                chosen, of_each = by_sequence, num_tokens
                if kind != "seq_aux_loss":
                    chosen, of_each = by_sequence.sum(0, keepdim=True), num_tokens.sum(0, keepdim=True)
                if kind == "global_aux_loss":
                    chosen = microbatch_context.compute_once(
                        (self, context.depth, "so far"), lambda: self._add_to_step_choices(by_sequence.sum(0))
                    )[None]
                loss = local_balancing_loss(shares, chosen, num_tokens=of_each, is_token=is_token)
                weights = self._attach_loss(weights, loss, coefficient, _NAMES[kind], context, num_tokens)
        if moe.moe_z_loss_coeff:
            loss = local_router_z_loss(scores, num_tokens=num_tokens.sum(), is_token=is_token)
            weights = self._attach_loss(weights, loss, moe.moe_z_loss_coeff, "z_loss", context, num_tokens)
        return weights

    def _count_tokens(self, scores: Tensor, num_sequences: int, is_token: Tensor | None) -> Tensor:
        """Return how many tokens each sequence has on all ranks of the microbatch, in the dtype of scores, [b].

        scores: [t, e] of this rank's tokens. Collective if there is padding.
        """
        axis = self.build.mesh.tp_cp
        if is_token is None:
            return scores.new_full((num_sequences,), scores.shape[0] // num_sequences * axis.size)
        return collectives.all_reduce(is_token.view(-1, num_sequences).sum(0), axis).to(scores.dtype)

    def _attach_loss(
        self, weights: Tensor, loss: Tensor, coefficient: float, name: str, context: ForwardContext, num_tokens: Tensor
    ) -> Tensor:
        """Return the weights with coefficient * loss attached for backward, and add the loss to the metric `name`, to
        which a microbatch without tokens does not count. num_tokens: of its sequences, [b].
        """
        microbatch_context = context.microbatch_context
        assert microbatch_context is not None, "losses and metrics of a router need a microbatch context"
        # The other ranks of the microbatch add their shares to it.
        count = (num_tokens.sum() > 0).to(loss.dtype) * float(self.build.mesh.tp_cp.is_first)
        microbatch_context.add_metric(name, loss, count)
        if self.moe.moe_per_layer_logging:
            layer = self.layer_number(self.mtp_depth_index(context))
            microbatch_context.add_metric(f"moe/{name}_layer_{layer}", loss, count)
        return microbatch_context.add_loss(weights, coefficient * loss)

    def _add_to_step_choices(self, chosen: Tensor) -> Tensor:
        """Add a microbatch's choices [e], summed over data ranks, to those of the step; return a copy of the sum."""
        self.chosen_so_far += collectives.all_reduce(chosen.clone(), self.build.mesh.dp)
        return self.chosen_so_far.clone()

    def _count_routing(self, routing: ExpertRouting, context: ForwardContext, is_token: Tensor | None) -> None:
        """Add this rank's choices and dropped choices to the tally of the step. is_token: bool [t], False for padding."""
        own = self.tally[self.mtp_depth_index(context)]
        own[:-1] += count_expert_choices(routing.experts, self.num_experts, is_token=is_token)[0]
        if routing.kept is not None:
            dropped = ~routing.kept if is_token is None else ~routing.kept & is_token[:, None]
            own[-1] += dropped.sum()

    def _random_scores(self, scores: Tensor, context: ForwardContext) -> Tensor:
        """Return pseudo-random scores in [0, 1) by layer, sample and position; gradients pass to `scores` unchanged."""
        positions, num_sequences, _ = scores.shape
        tp, places = self.build.mesh.tp, context.mask.query_places
        places = torch.arange(positions * tp.size, device=scores.device) if places is None else places
        first = 0 if context.microbatch_context is None else context.microbatch_context.sample
        sample = first + torch.arange(num_sequences, device=scores.device)
        token = (sample << 32) + collectives.local_chunk(places, tp)[:, None]
        bits = token[..., None] * self.num_experts + torch.arange(self.num_experts, device=scores.device)
        bits = bits * _FIRST_FACTOR + derive_seed("routing", self.layer_number(self.mtp_depth_index(context)))
        bits = (bits ^ (bits >> 29)) * _SECOND_FACTOR
        random = ((bits ^ (bits >> 32)) & 0xFFFFFF).to(scores.dtype) / 2.0**24
        return random + (scores - scores.detach())


def choose_expert_indices(scores: Tensor, moe: MoEConfig, expert_bias: Tensor | None = None) -> Tensor:
    """Return the top-k experts of each token, int64 [t, k], by score function, expert bias and group limit.

    scores: router logits [t, e]; expert_bias: [e], used for the choice only, not for the weights.
    """
    if moe.moe_router_score_function != "softmax":
        scores = _sigmoid_or_sqrtsoftplus(scores, moe.moe_router_score_function)
    elif moe.moe_router_pre_softmax:
        scores = scores.softmax(-1)
    if expert_bias is not None:
        scores = scores + expert_bias
    if moe.moe_router_num_groups:
        scores = scores.masked_fill(~_best_expert_group_mask(scores, moe), -torch.inf)
    return scores.topk(moe.moe_router_topk, dim=-1).indices


def _best_expert_group_mask(scores: Tensor, moe: MoEConfig) -> Tensor:
    """Return the mask, bool [t, e], of experts in each token's best groups (DeepSeek-V2, V3). scores: [t, e]."""
    assert moe.moe_router_group_topk is not None, "with groups comes how many of them a token may use"
    groups = scores.unflatten(-1, (moe.moe_router_num_groups, -1))
    taken = 1 if moe.moe_router_group_score == "max" else moe.moe_router_topk // moe.moe_router_group_topk
    best = groups.topk(taken, dim=-1).values.sum(-1).topk(moe.moe_router_group_topk, dim=-1).indices
    allowed = torch.zeros(groups.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, True)
    return allowed[..., None].expand_as(groups).flatten(1)


def routing_weights(scores: Tensor, experts: Tensor, moe: MoEConfig) -> Tensor:
    """Return the routing weight of each chosen expert, [t, k]. scores: router logits [t, e]; experts: [t, k]."""
    function, even = moe.moe_router_score_function, "sinkhorn" in moe.moe_router_load_balancing_type
    if even:
        weights = (scores.sigmoid() if moe.moe_router_topk == 1 else scores.softmax(-1)).gather(1, experts)
    elif function != "softmax":
        weights = _sigmoid_or_sqrtsoftplus(scores.gather(1, experts), function)
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY) if moe.moe_router_topk > 1 else weights
    elif moe.moe_router_pre_softmax:
        weights = scores.softmax(-1).gather(1, experts)
    else:
        weights = scores.gather(1, experts).softmax(-1)
    factor = moe.moe_router_topk_scaling_factor
    return weights if factor is None else weights * factor


def normalized_router_scores(scores: Tensor, function: str) -> Tensor:
    """Return scores that sum to 1 over the experts, [t, e], as balancing losses use them. scores: router logits [t, e]."""
    if function == "softmax":
        return scores.softmax(-1)
    result = _sigmoid_or_sqrtsoftplus(scores, function)
    return result / (result.sum(-1, keepdim=True) + _TINY)


def _sigmoid_or_sqrtsoftplus(scores: Tensor, function: str) -> Tensor:
    """Apply the score function sigmoid or sqrt(softplus) to logits."""
    return scores.sigmoid() if function == "sigmoid" else F.softplus(scores).sqrt()


def expert_capacity(num_tokens: int, moe: MoEConfig) -> int:
    """Return how many of a rank's tokens one expert takes at most: ceil(t * k / e * --moe-expert-capacity-factor)."""
    assert moe.moe_expert_capacity_factor is not None, "a capacity follows from its factor"
    return math.ceil(num_tokens * moe.moe_router_topk / moe.num_experts_or_zero * moe.moe_expert_capacity_factor)


def drop_choices_over_capacity(routing: ExpertRouting, limit: int, policy: str, num_experts: int) -> ExpertRouting:
    """Return the routing with choices dropped so that no expert takes more than `limit` tokens.

    policy: probs keeps those of largest weight, the earlier of equal ones; position keeps the earliest.
    """
    experts, weights = routing.experts.flatten(), routing.weights.detach().flatten()
    order = torch.arange(len(experts), device=experts.device)
    if policy == "probs":
        order = weights.argsort(descending=True, stable=True)
    order = order[experts[order].argsort(stable=True)]  # expert by expert, best first
    counts = count_expert_choices(routing.experts, num_experts)[0]
    first = counts.cumsum(0) - counts
    place = torch.arange(len(order), device=order.device) - first[experts[order]]
    kept = torch.empty_like(experts, dtype=torch.bool)
    kept[order] = place < limit
    kept = kept.view_as(routing.experts)
    return replace(routing, weights=routing.weights * kept, kept=kept, capacity=limit)


def count_expert_choices(
    experts: Tensor, num_experts: int, num_groups: int = 1, *, is_token: Tensor | None = None
) -> Tensor:
    """Count how often each expert was chosen, int64 [groups, e].

    experts: int64 [t, k]; token i belongs to group i % num_groups (a sequence, where tokens are [s, b]). is_token: bool
    [t], False for padding, which is not counted; None: all are tokens.
    """
    group = torch.arange(experts.shape[0], device=experts.device)[:, None] % num_groups
    place = (group * num_experts + experts).flatten()
    counts = torch.zeros(num_groups * num_experts, dtype=torch.int64, device=experts.device)
    one = torch.ones_like(place) if is_token is None else is_token[:, None].expand_as(experts).flatten().to(place.dtype)
    return counts.scatter_add_(0, place, one).view(num_groups, num_experts)  # bincount would wait for a GPU


def local_balancing_loss(
    scores: Tensor, chosen: Tensor, *, num_tokens: Tensor, is_token: Tensor | None = None
) -> Tensor:
    """Return this rank's share of a balancing loss, a scalar, not yet multiplied by its coefficient: the mean over the
    groups that have tokens.

    scores: [t, e] of this rank's tokens, normalized; token i belongs to group i % groups. chosen: [groups, e], the
    choices that f is computed from. num_tokens: of each group, on all ranks, [groups]. is_token: bool [t], False for
    padding; None: all are tokens.
    """
    num_groups, num_experts = chosen.shape
    fractions = chosen.to(scores.dtype) / chosen.sum(1, keepdim=True).clamp(min=1).to(scores.dtype)
    scores = scores if is_token is None else scores * is_token[:, None]
    mean_scores = scores.view(-1, num_groups, num_experts).sum(0) / num_tokens.clamp(min=1)[:, None]
    groups_with_tokens = (num_tokens > 0).sum().clamp(min=1).to(scores.dtype)
    return num_experts / groups_with_tokens * (fractions * mean_scores).sum()


def local_router_z_loss(scores: Tensor, *, num_tokens: Tensor, is_token: Tensor | None = None) -> Tensor:
    """Return this rank's share of the mean squared log-sum-exp of logits [t, e] (z-loss, Zoph et al., 2022).

    num_tokens: a scalar, on all ranks. is_token: as in `local_balancing_loss`.
    """
    squares = torch.logsumexp(scores, dim=-1).square()
    return (squares if is_token is None else squares * is_token).sum() / num_tokens.clamp(min=1)


def sinkhorn(scores: Tensor, axis: Axis) -> Tensor:
    """Return exp(scores) scaled by rows and columns until all tokens, and all experts, have about the same sum.

    scores: router logits [t, e], which get no gradient; returns the same shape. Tokens of all ranks of the axis are
    balanced together.
    """
    whole = collectives.all_gather(scores.detach(), axis)
    whole = (whole - whole.amax(1, keepdim=True)).exp()  # rows are scaled anyway, and large scores would overflow
    num_tokens, num_experts = whole.shape
    rows, columns = whole.new_ones(num_tokens), whole.new_ones(num_experts)
    for _ in range(_SINKHORN_ROUNDS):
        rows = 1.0 / num_tokens / ((whole * columns).sum(1) + _SINKHORN_TINY)
        before, columns = columns, 1.0 / num_experts / ((rows[:, None] * whole).sum(0) + _SINKHORN_TINY)
        if float((before - columns).abs().mean()) <= _SINKHORN_TOLERANCE:
            break
    return collectives.local_chunk(whole * columns * rows[:, None], axis)


def updated_expert_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """Return the expert bias after a step: raised by `rate` below the mean load, else lowered (Wang et al., 2024).

    bias: [..., e]; load: int64 [..., e], choices of each expert.
    """
    missing = load.sum(-1, keepdim=True) - load * load.shape[-1]  # e times (mean - load), in whole numbers
    return bias + rate * missing.sign().to(bias.dtype)


def expert_choices_of_last_step(stages: Iterable[nn.Module]) -> Choices:
    """Return the last step's choices, by router, for `set_replayed_expert_choices` (--moe-enable-routing-replay)."""
    return {param_spec_of(router.weight).name: dict(router.recorded) for router in routers_of(stages)}


def set_replayed_expert_choices(stages: Iterable[nn.Module], choices: Choices | None) -> None:
    """Make training use these recorded choices until called with None; weights are computed as usual."""
    for router in routers_of(stages):
        router.replayed = None if choices is None else choices[param_spec_of(router.weight).name]


def routers_of(stages: Iterable[nn.Module]) -> list[TopKRouter]:
    """Return all routers of the stages, in order."""
    return [module for stage in stages for module in stage.modules() if isinstance(module, TopKRouter)]
