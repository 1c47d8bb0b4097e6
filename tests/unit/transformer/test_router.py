"""The choice of experts against published routers and plain formulas; and what drops out where room is short."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeTopKRouter

from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.settings.moe import MoEConfig
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import set_global_param_names
from megatron.core.transformer.context.forward_context import ForwardContext, MicrobatchContext
from megatron.core.transformer.router import (
    ExpertRouting,
    TopKRouter,
    choose_expert_indices,
    drop_choices_over_capacity,
    expert_capacity,
    expert_choices_of_last_step,
    routing_weights,
    set_replayed_expert_choices,
    sinkhorn,
)
from tests.helpers import tiny

S, B, H, E = 12, 3, 32, 8
ONE = ForwardContext(AttentionMaskSpec())


def router_of(layer: int = 0, **changes: Any) -> TopKRouter:
    """A router of the tiny network, with weights large enough to have opinions."""
    run = tiny.run_of(
        tiny.config(**{"fp64": True, "num_experts": E, "add_bias_linear": False, "init_method_std": 0.5, **changes})
    )
    router = TopKRouter(run.layer_build_context, network_layer_plans(run.config.model)[layer])
    set_global_param_names(router)
    materialize_parameters(router, run.mesh, seed=layer)
    return router


def tokens(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(S, B, H, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def table(weights: Tensor, experts: Tensor) -> Tensor:
    """[t, e]: the weight of every expert, 0 where a token does not use it. The order of a choice has no meaning."""
    return torch.zeros(len(weights), E, dtype=torch.float64).scatter_(1, experts, weights.double())


SIZES: dict[str, Any] = {"hidden_size": H, "num_experts_per_tok": 4}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
PUBLISHED: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (lambda: MixtralTopKRouter(MixtralConfig(num_local_experts=E, **SIZES)), {}),
    "qwen3": (lambda: Qwen3MoeTopKRouter(Qwen3MoeConfig(num_experts=E, norm_topk_prob=True, **SIZES)), {}),
    "qwen3, shares of all": (
        lambda: Qwen3MoeTopKRouter(Qwen3MoeConfig(num_experts=E, norm_topk_prob=False, **SIZES)),
        {"moe_router_pre_softmax": True},
    ),
    "gpt-oss": (lambda: GptOssTopKRouter(GptOssConfig(num_local_experts=E, **SIZES)), {"add_bias_linear": True}),
    "deepseek-v2": (
        lambda: DeepseekV2TopkRouter(
            DeepseekV2Config(
                n_routed_experts=E,
                topk_method="group_limited_greedy",
                routed_scaling_factor=2.5,
                norm_topk_prob=False,
                **GROUPS,
                **SIZES,
            )
        ),
        {
            "moe_router_pre_softmax": True,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_group_score": "max",
        },
    ),
    "deepseek-v3": (
        lambda: DeepseekV3TopkRouter(
            DeepseekV3Config(n_routed_experts=E, routed_scaling_factor=2.5, norm_topk_prob=True, **GROUPS, **SIZES)
        ),
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_topk_scaling_factor": 2.5,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_enable_expert_bias": True,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_choice_is_that_of_the_published_router(name: str) -> None:
    make, changes = PUBLISHED[name]
    theirs, ours = make(), router_of(**{"moe_router_topk": 4, "fp64": False, **changes})
    generator = torch.Generator().manual_seed(3)
    for param in (*theirs.parameters(), *theirs.buffers()):
        param.data.normal_(0.0, 0.5, generator=generator)
    pairs = {
        "weight": theirs.weight,
        "bias": getattr(theirs, "bias", None),
        "expert_bias": getattr(theirs, "e_score_correction_bias", None),
    }
    for part, value in pairs.items():
        assert (value is None) == (getattr(ours, part) is None), part
        if value is not None:
            getattr(ours, part).data.copy_(value)
    x = tokens(dtype=torch.float32)
    with torch.no_grad():
        found, (_, weights, experts) = ours(x, ONE), theirs(x.flatten(0, 1))
    assert found.kept is None and found.weights.shape == found.experts.shape == (S * B, 4)
    torch.testing.assert_close(table(found.weights, found.experts), table(weights, experts), rtol=1e-5, atol=1e-6)


def by_hand(scores: list[float], moe: MoEConfig) -> list[float]:
    """The weights of one token, a number at a time."""
    k = moe.moe_router_topk
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[:k]
    positive = {
        "sigmoid": lambda s: 1 / (1 + math.exp(-s)),
        "sqrtsoftplus": lambda s: math.sqrt(math.log1p(math.exp(s))),
        "softmax": math.exp,
    }
    values = [positive[moe.moe_router_score_function](s) for s in scores]
    if moe.moe_router_score_function == "softmax":
        total = sum(values if moe.moe_router_pre_softmax else [values[i] for i in best])
    else:
        total = sum(values[i] for i in best) if k > 1 else 1.0
    factor = moe.moe_router_topk_scaling_factor or 1.0
    return [factor * values[i] / total if i in best else 0.0 for i in range(len(scores))]


@pytest.mark.parametrize("topk, scaling", [(1, None), (2, None), (3, 1.7), (E, None)])
@pytest.mark.parametrize(
    "function, before", [("softmax", False), ("softmax", True), ("sigmoid", False), ("sqrtsoftplus", False)]
)
def test_weights_follow_the_formula_of_their_function(
    function: Any, before: bool, topk: int, scaling: float | None
) -> None:
    moe = MoEConfig(
        num_experts=E,
        moe_router_topk=topk,
        moe_router_score_function=function,
        moe_router_pre_softmax=before,
        moe_router_topk_scaling_factor=scaling,
    )
    scores = 2.0 * torch.randn(20, E, dtype=torch.float64, generator=torch.Generator().manual_seed(topk))
    experts = choose_expert_indices(scores, moe)
    expected = torch.tensor([by_hand(row.tolist(), moe) for row in scores], dtype=torch.float64)
    torch.testing.assert_close(table(routing_weights(scores, experts, moe), experts), expected, rtol=1e-12, atol=1e-12)


def test_weights_have_the_gradient_of_their_formula() -> None:
    moe = MoEConfig(
        num_experts=E, moe_router_topk=3, moe_router_score_function="sqrtsoftplus", moe_router_topk_scaling_factor=2.0
    )
    scores = torch.randn(4, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    experts = choose_expert_indices(scores.detach(), moe)
    assert torch.autograd.gradcheck(lambda s: routing_weights(s, experts, moe), (scores,))


def test_an_expert_bias_takes_part_in_choosing_and_not_in_weighing() -> None:
    moe = MoEConfig(num_experts=E, moe_router_topk=2, moe_router_score_function="sigmoid")
    scores = torch.randn(30, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    bias = torch.zeros(E)
    bias[5], bias[2] = 2.0, -2.0
    experts = choose_expert_indices(scores, moe, bias)
    assert (experts == 5).any(1).all() and not (experts == 2).any()
    picked = scores.sigmoid().gather(1, experts)
    torch.testing.assert_close(routing_weights(scores, experts, moe), picked / picked.sum(1, keepdim=True))


def test_a_token_stays_in_its_best_groups() -> None:
    moe = MoEConfig(
        num_experts=E,
        moe_router_topk=2,
        moe_router_num_groups=4,
        moe_router_group_topk=1,
        moe_router_score_function="sigmoid",
    )
    scores = torch.tensor([[9.0, -9, 2, 2, 1, 1, 0, 0]])  # the best expert is alone; the best pair is the second group
    assert sorted(choose_expert_indices(scores, moe)[0].tolist()) == [2, 3]
    best = MoEConfig(
        num_experts=E, moe_router_topk=2, moe_router_num_groups=4, moe_router_group_topk=1, moe_router_group_score="max"
    )
    assert sorted(choose_expert_indices(scores, best)[0].tolist()) == [0, 1]


def test_scores_are_computed_in_the_format_asked_for() -> None:
    x = tokens(dtype=torch.bfloat16)
    for asked, given, expected in (
        (None, {"bf16": True}, torch.float32),
        ("fp64", {"bf16": True}, torch.float64),
        ("fp32", {}, torch.float32),
        (None, {}, torch.float32),
    ):
        router = router_of(**{"fp64": False, "moe_router_dtype": asked, **given})
        found = router.logits(x.to(router.weight.dtype))
        assert found.dtype == expected
        exact = F.linear(x.double() if given else x.float().double(), router.weight.double())
        assert (found.double() - exact).abs().max() < (1e-12 if expected == torch.float64 else 1e-4)
    assert router_of().dtype == torch.float64, "--fp64"


def test_jitter_is_noise_of_the_input_while_training_only() -> None:
    plain, noisy = router_of(), router_of(moe_input_jitter_eps=0.1)
    noisy.weight.data.copy_(torch.eye(E, H))
    x = torch.ones(S, B, H, dtype=torch.float64)
    shares = noisy.logits(x) / noisy.eval().logits(x)
    assert 0.9 <= shares.min() < 0.92 and 1.08 < shares.max() <= 1.1, (
        "every input has noise of its own, within the bounds"
    )
    assert torch.equal(noisy.logits(x), x[..., :E]) and plain.moe.moe_input_jitter_eps is None


def test_forced_balance_depends_on_the_place_of_a_token_and_on_the_layer_alone() -> None:
    one = router_of(moe_router_force_load_balancing=True, moe_router_topk=2)
    other = router_of(layer=1, moe_router_force_load_balancing=True, moe_router_topk=2)

    def chosen(router: TopKRouter, seed: int, sample: int, places: Tensor | None = None) -> Tensor:
        x = tokens(seed) if places is None else tokens(seed)[: len(places)]
        microbatch_context = MicrobatchContext(1.0, training=False, sample=sample)
        return router(
            x, ForwardContext(AttentionMaskSpec(query_places=places), microbatch_context=microbatch_context)
        ).experts.view(len(x), B, 2)

    first = chosen(one, 0, 0)
    assert torch.equal(first, chosen(one, 1, 0)), "what a token says does not matter"
    assert not torch.equal(first, chosen(other, 0, 0)), "layers differ"
    assert torch.equal(first[:, 1:], chosen(one, 0, 1)[:, :-1]), "a sample keeps its choice in another microbatch"
    assert torch.equal(first[[0, 1, 10, 11]], chosen(one, 0, 0, torch.tensor([0, 1, 10, 11]))), (
        "and in another cut of the sequence"
    )
    many = router_of(moe_router_force_load_balancing=True)(torch.zeros(2000, 2, H, dtype=torch.float64), ONE).experts
    counts = many.flatten().bincount(minlength=E)
    assert (counts - 1000).abs().max() < 120, counts  # four deviations


def test_forced_balance_lets_gradients_pass() -> None:
    router = router_of(moe_router_force_load_balancing=True, moe_router_topk=3)
    x = tokens().requires_grad_()
    (router(x, ONE).weights * torch.arange(3.0)).sum().backward()
    assert router.weight.grad.abs().sum() > 0 and x.grad.abs().sum() > 0


# Sinkhorn.


def test_scores_are_made_even_over_tokens_and_experts() -> None:
    scores = 3.0 * torch.randn(64, E, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = sinkhorn(scores, Axis("tp_cp"))
    torch.testing.assert_close(found.sum(0), torch.full((E,), 1 / E, dtype=torch.float64), rtol=1e-3, atol=0)
    torch.testing.assert_close(found.sum(1), torch.full((64,), 1 / 64, dtype=torch.float64), rtol=0.05, atol=0)
    ratio = found.log() - scores  # rows and columns were scaled, and no more
    torch.testing.assert_close(ratio, ratio[:, :1] + ratio[:1] - ratio[0, 0], rtol=1e-9, atol=1e-9)
    assert sinkhorn(1e4 * scores, Axis("tp_cp")).isfinite().all(), "large scores do not overflow"


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn_chooses_by_even_scores_and_weighs_by_plain_ones(topk: int) -> None:
    router = router_of(moe_router_topk=topk, moe_router_load_balancing_type=("sinkhorn",))
    router.weight.data[0] += 2.0
    x = tokens() + 0.5  # the first expert is everybody's favourite
    scores = router.logits(x).flatten(0, 1)
    plain = scores.sigmoid() if topk == 1 else scores.softmax(-1)
    found, judged = router(x, ONE), router.eval()(x, ONE)
    assert judged.experts.flatten().bincount(minlength=E)[0] > 1.5 * found.experts.flatten().bincount(minlength=E)[0]
    for routing in (found, judged):
        torch.testing.assert_close(routing.weights, plain.gather(1, routing.experts))


# Capacity.


def crowd(name: str, count: int = 24, k: int = 2) -> Tensor:
    """Experts [t, k] of adversarial routings."""
    token = torch.arange(count)[:, None]
    return {
        "balanced": (token * k + torch.arange(k)) % E,
        "one hot expert": torch.cat((torch.zeros_like(token), 1 + token % (E - 1)), 1),
        "one hot rank": torch.cat((token % 2, 2 + token % 2), 1),  # only the first four of eight
        "an expert without token": torch.cat((token % 3, 3 + token % 4), 1),
        "bursts": torch.cat((token // 6, 4 + token // 6), 1),
    }[name]


CROWDS = ("balanced", "one hot expert", "one hot rank", "an expert without token", "bursts")


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 1.25, 4.0])
@pytest.mark.parametrize("name", CROWDS)
def test_every_expert_keeps_its_best_or_first_tokens_up_to_capacity(name: str, factor: float, policy: str) -> None:
    experts = crowd(name)
    weights = torch.rand(
        experts.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4), requires_grad=True
    )
    limit = expert_capacity(
        len(experts), MoEConfig(num_experts=E, moe_router_topk=2, moe_expert_capacity_factor=factor)
    )
    assert limit == math.ceil(24 * 2 / E * factor)
    found = drop_choices_over_capacity(ExpertRouting(weights, experts), limit, policy, E)
    kept = torch.zeros_like(experts, dtype=torch.bool)
    for expert in range(E):
        wishes = [(token, place) for token in range(24) for place in range(2) if experts[token, place] == expert]
        if policy == "probs":
            wishes.sort(key=lambda wish: -weights[wish].item())
        for wish in wishes[:limit]:
            kept[wish] = True
    assert found.kept is not None and torch.equal(found.kept, kept) and found.capacity == limit
    assert torch.equal(found.weights, weights * kept), "what is dropped has no weight, and the rest keeps its own"
    found.weights.sum().backward()
    assert torch.equal(weights.grad, kept.double())
    hits = experts.flatten().bincount(minlength=E)
    assert (~kept).sum() == (hits - limit).clamp(min=0).sum()


def test_of_equal_weights_the_earlier_is_kept() -> None:
    experts = torch.zeros(5, 1, dtype=torch.int64)
    found = drop_choices_over_capacity(
        ExpertRouting(torch.tensor([[0.5], [0.7], [0.5], [0.7], [0.7]]), experts), 3, "probs", E
    )
    assert found.kept.flatten().tolist() == [False, True, False, True, True]
    many = torch.arange(4000)[:, None] % 3  # long enough for a sort to lose the order of equals, if it may
    found = drop_choices_over_capacity(ExpertRouting(torch.full((4000, 1), 0.5), many), 700, "probs", E)
    assert found.kept.flatten().tolist() == [token < 2100 for token in range(4000)]


def test_a_router_with_a_capacity_drops_and_counts_what_it_dropped() -> None:
    router = router_of(moe_expert_capacity_factor=0.5, moe_router_topk=2)
    microbatch_context = MicrobatchContext(1.0, training=True)
    found = router(tokens(), ForwardContext(AttentionMaskSpec(), microbatch_context=microbatch_context))
    assert found.capacity == math.ceil(S * B * 2 / E * 0.5) and not found.kept.all()
    hits = found.experts.flatten().bincount(minlength=E)
    assert router.tally.tolist() == [[*hits.tolist(), int((~found.kept).sum())]]
    assert (hits - found.capacity).clamp(min=0).sum() == router.tally[0, -1]


# Replay.


def test_recorded_choices_are_replayed_until_told_otherwise() -> None:
    router = router_of(moe_enable_routing_replay=True)
    passes = [
        ForwardContext(AttentionMaskSpec(), microbatch_context=MicrobatchContext(1.0, training=True, sample=number))
        for number in (0, 4)
    ]
    first = [router(tokens(number), one) for number, one in enumerate(passes)]
    choices = expert_choices_of_last_step([router])
    assert set(choices) == {"weight"} and set(choices["weight"]) == {(0, 0), (4, 0)}
    router.weight.data.neg_()
    set_replayed_expert_choices([router], choices)
    for number in (1, 0):  # in any order: choices belong to microbatches
        again = router(tokens(number), passes[number])
        assert torch.equal(again.experts, first[number].experts)
        expected = routing_weights(router.logits(tokens(number)).flatten(0, 1), again.experts, router.moe)
        torch.testing.assert_close(again.weights, expected)
        assert not torch.equal(again.weights, first[number].weights), "weights follow the router of today"
    with pytest.raises(AssertionError, match="no choice was recorded for the microbatch from sample 8 on"):
        router(
            tokens(),
            ForwardContext(AttentionMaskSpec(), microbatch_context=MicrobatchContext(1.0, training=True, sample=8)),
        )
    set_replayed_expert_choices([router], None)
    assert not torch.equal(router(tokens(0), passes[0]).experts, first[0].experts)
