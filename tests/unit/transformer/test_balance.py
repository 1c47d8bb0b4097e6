"""Losses and biases that keep the choice of experts even: their formulas, and the same values and gradients under any layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megatron.core.datasets.chat import ChatDataset
from megatron.core.datasets.dataset_protocols import SplitRequest
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.parallel import collectives
from megatron.core.transformer.context.forward_context import ForwardContext, MicrobatchContext
from megatron.core.transformer.router import (
    count_expert_choices,
    expert_choices_of_last_step,
    local_balancing_loss,
    local_router_z_loss,
    normalized_router_scores,
    routers_of,
    set_replayed_expert_choices,
    updated_expert_bias,
)
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.data.sample_order import read_and_stack_samples
from megatron.training.report.metrics import IntervalReport, StepMetrics, StepMetricsMeter
from megatron.training.state.batch import Batch
from megatron.training.state.step import StepWork, train_step
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.training import Held, assemble, differences, held_weights, train, train_alone, train_on
from tests.helpers.world import Worlds
from tests.unit.transformer.test_router import B, E, S, router_of, tokens

EXPERTS: dict[str, Any] = {
    "fp64": True,
    "adam_eps": 1e-6,
    "num_layers": 2,
    "num_experts": 4,
    "moe_router_topk": 2,
    "micro_batch_size": 2,
    "moe_ffn_hidden_size": 32,
}
LOSSES: dict[str, Any] = {
    **EXPERTS,
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
    "moe_aux_loss_coeff": (0.2, 0.3),
    "moe_z_loss_coeff": 0.02,
}
TP2, PP2, CP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}


# Formulas.


def fractions(experts: Tensor, num_experts: int) -> list[float]:
    """f of every expert, by counting."""
    chosen = experts.flatten().tolist()
    return [chosen.count(expert) / len(chosen) for expert in range(num_experts)]


def by_hand(scores: Tensor, experts: Tensor) -> Tensor:
    """E * sum_i f_i P_i of tokens [t, e]."""
    return E * sum(f * scores[:, i].mean() for i, f in enumerate(fractions(experts, E)))


def test_a_balancing_loss_is_that_of_the_published_network_over_k() -> None:
    logits = torch.randn(40, E, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shares, experts = logits.softmax(-1), logits.topk(3).indices
    found = local_balancing_loss(shares, count_expert_choices(experts, E), num_tokens=torch.tensor([40]))
    assert float(3 * found) == pytest.approx(
        float(load_balancing_loss_func((logits,), E, 3)), rel=1e-6
    )  # which counts in fp32
    assert float(found) == pytest.approx(float(by_hand(shares, experts)), rel=1e-12)


def test_an_even_choice_costs_one_and_a_collapsed_one_as_much_as_there_are_experts() -> None:
    even, collapsed = torch.full((16, E), 1 / E), torch.eye(E)[torch.zeros(16, dtype=torch.int64)]
    everybody, first = torch.arange(16)[:, None] % E, torch.zeros(16, 1, dtype=torch.int64)
    assert float(
        local_balancing_loss(even, count_expert_choices(everybody, E), num_tokens=torch.tensor([16]))
    ) == pytest.approx(1.0)
    assert float(
        local_balancing_loss(collapsed, count_expert_choices(first, E), num_tokens=torch.tensor([16]))
    ) == pytest.approx(E)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_padding_counts_in_no_loss_as_in_the_published_network(k: int) -> None:
    logits = torch.randn(S * B, E, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    is_token = torch.rand(S * B, generator=torch.Generator().manual_seed(5)) < 0.6
    shares, experts = logits.softmax(-1), logits.topk(k).indices
    counts = count_expert_choices(experts, E, is_token=is_token)
    assert torch.equal(counts, count_expert_choices(experts[is_token], E))
    found = local_balancing_loss(shares, counts, num_tokens=is_token.sum()[None], is_token=is_token)
    expected = load_balancing_loss_func((logits,), E, k, is_token.view(1, -1).float())
    assert float(k * found) == pytest.approx(float(expected), rel=1e-6)  # theirs counts in fp32
    assert float(found) == pytest.approx(float(by_hand(shares[is_token], experts[is_token])), rel=1e-12)
    size = local_router_z_loss(logits, num_tokens=is_token.sum(), is_token=is_token)
    assert float(size) == pytest.approx(float(logits[is_token].logsumexp(-1).square().mean()), rel=1e-12)


def test_a_loss_of_sequences_is_the_mean_over_those_that_have_tokens() -> None:
    logits = torch.randn(S * 3, E, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    shares, experts = logits.softmax(-1), logits.topk(2).indices
    lengths = torch.tensor([S, 0, S // 2])
    is_token = (torch.arange(S)[:, None] < lengths).flatten()
    counts = count_expert_choices(experts, E, 3, is_token=is_token)
    found = local_balancing_loss(shares, counts, num_tokens=lengths, is_token=is_token)
    expected = sum(by_hand(shares[i::3][:size], experts[i::3][:size]) for i, size in ((0, S), (2, S // 2))) / 2
    assert float(found) == pytest.approx(float(expected), rel=1e-12)


def test_a_microbatch_of_padding_alone_has_no_loss_and_counts_in_no_figure() -> None:
    router = router_of(moe_router_load_balancing_type=("aux_loss",), moe_aux_loss_coeff=(0.1,), moe_z_loss_coeff=0.1)
    nothing = {"padding_mask": torch.zeros((S, B), dtype=torch.bool)}
    microbatch = MicrobatchContext(1.0, training=True, token_masks=nothing)
    weights = router(tokens(), ForwardContext(AttentionMaskSpec(), microbatch_context=microbatch)).weights
    assert {name: pair.tolist() for name, pair in microbatch.metrics.items()} == {
        "load_balancing_loss": [0.0, 0.0],
        "z_loss": [0.0, 0.0],
    }
    assert not router.tally.any()
    (weights * 0.0).sum().backward()
    assert not router.weight.grad.any()


def step_of_conversations(length: int, **changes: Any) -> StepMetrics:
    """The first step on two conversations, which samples of `length` positions do not fill, one in each."""
    generator = np.random.default_rng(0)
    source = SimpleNamespace(
        prefix="conversations", sequence_lengths=np.array([20, 17]), document_indices=np.array([0, 1, 2])
    )
    texts = [generator.integers(0, 49, size) for size in source.sequence_lengths]
    source.get = lambda sequence, offset=0, size=None: texts[sequence][offset:][:size]
    data = ChatDataset(source, SplitRequest(range(2), None, "train"), sequence_length=length, seed=1)
    assert len(data) == 1 if length > 40 else 2
    losses = {"moe_router_load_balancing_type": ("aux_loss",), "moe_aux_loss_coeff": (0.2,), "moe_z_loss_coeff": 0.02}
    more = {"seq_length": length, "max_position_embeddings": 128, "global_batch_size": len(data), "sft": True}
    more["micro_batch_size"] = len(data)
    run = tiny.run_of(tiny.config(1, **{**EXPERTS, **losses, **more, "calculate_per_token_loss": True, **changes}))
    arrays = read_and_stack_samples(data, sorted(range(len(data))))
    return train_step(tiny.trainer_of(run), iter([Batch.from_arrays(arrays, run.mesh.device, positions=True)]))


def test_a_step_does_not_depend_on_how_much_padding_its_conversations_have() -> None:
    """Neither on their length nor on whether they are packed."""
    first, *others = (step_of_conversations(length) for length in (24, 32, 64, 128))
    assert first.loads is not None and int(first.loads.table.sum()) == 2 * (19 + 16) * 2  # layers, tokens, experts
    for other in others:
        assert other.loads is not None and torch.equal(other.loads.table, first.loads.table)
        assert float(other.grad_norm) == pytest.approx(float(first.grad_norm), rel=1e-10)
        for name, (total, count) in first.losses.items():
            found = other.losses[name]
            assert float(found[0] / found[1]) == pytest.approx(float(total / count), rel=1e-10), name


def test_choices_are_counted_sequence_by_sequence() -> None:
    experts = torch.randint(0, E, (S * B, 2), generator=torch.Generator().manual_seed(1))
    found = count_expert_choices(experts, E, B)
    for sequence in range(B):
        assert found[sequence].tolist() == [experts[sequence::B].flatten().tolist().count(i) for i in range(E)]


def test_the_z_loss_is_the_mean_square_of_the_log_of_the_sum() -> None:
    scores = torch.randn(5, E, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = sum(math.log(sum(math.exp(s) for s in row)) ** 2 for row in scores.tolist()) / 5
    assert float(local_router_z_loss(scores, num_tokens=torch.tensor(5))) == pytest.approx(expected, rel=1e-12)


def test_biases_rise_where_tokens_are_few_and_fall_where_they_are_many() -> None:
    bias = torch.tensor([0.5, 0.0, -0.25, 1.0])
    assert torch.equal(updated_expert_bias(bias, torch.tensor([3, 1, 2, 2]), 0.1), torch.tensor([0.4, 0.1, -0.25, 1.0]))
    many = torch.tensor([2**40 + 1, 2**40, 2**40, 2**40 - 1])  # fp32 could not tell them apart
    assert torch.equal(updated_expert_bias(torch.zeros(4), many, 1.0), torch.tensor([-1.0, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss", "z"])
def test_the_backward_pass_of_the_weights_brings_the_gradient_of_the_loss(kind: str, function: Any) -> None:
    """Two microbatches of a step, whose means count 0.7 and 0.2 in the objective."""
    losses: dict[str, Any] = (
        {"moe_z_loss_coeff": 0.5}
        if kind == "z"
        else {"moe_router_load_balancing_type": (kind,), "moe_aux_loss_coeff": (0.5,)}
    )
    changes: dict[str, Any] = {"moe_router_score_function": function, "moe_router_topk": 2, "add_bias_linear": True}
    ours, plain = router_of(**changes, **losses), router_of(**changes)
    objective, seen = torch.zeros((), dtype=torch.float64), []
    for number, weight in enumerate((0.7, 0.2)):
        x = tokens(number)
        upstream = torch.randn(S * B, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        microbatch_context = MicrobatchContext(weight, training=True, sample=number)
        (
            ours(x, ForwardContext(AttentionMaskSpec(), microbatch_context=microbatch_context)).weights * upstream
        ).sum().backward()
        objective = objective + (plain(x, ForwardContext(AttentionMaskSpec())).weights * upstream).sum()
        scores = plain.logits(x).flatten(0, 1)
        shares, experts = normalized_router_scores(scores, function), scores.detach().topk(2).indices
        seen.append(experts)
        loss = {
            "aux_loss": lambda: by_hand(shares, experts),
            "seq_aux_loss": lambda: sum(by_hand(shares[i::B], experts[i::B]) for i in range(B)) / B,
            "global_aux_loss": lambda: (
                E * sum(f * shares[:, i].mean() for i, f in enumerate(fractions(torch.cat(seen), E)))
            ),
            "z": lambda: scores.logsumexp(-1).square().mean(),
        }[kind]()
        objective = objective + weight * 0.5 * loss
        (pair,) = microbatch_context.metrics.values()
        assert float(pair[0] / pair[1]) == pytest.approx(float(loss.detach()), rel=1e-12), (
            "the figure is the loss without its weight"
        )
    objective.backward()
    for name in ("weight", "bias"):
        torch.testing.assert_close(getattr(ours, name).grad, getattr(plain, name).grad, rtol=1e-10, atol=1e-12)


def test_affinities_add_up_to_one() -> None:
    scores = torch.randn(9, E, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for function in ("softmax", "sigmoid", "sqrtsoftplus"):
        torch.testing.assert_close(
            normalized_router_scores(scores, function).sum(-1), torch.ones(9, dtype=torch.float64)
        )
    torch.testing.assert_close(
        normalized_router_scores(scores, "sqrtsoftplus")[0, 0] / normalized_router_scores(scores, "sqrtsoftplus")[0, 1],
        ((1 + scores[0, 0].exp()).log() / (1 + scores[0, 1].exp()).log()).sqrt(),
    )


def test_a_recomputed_pass_counts_and_reports_once() -> None:
    router = router_of(moe_router_load_balancing_type=("global_aux_loss",), moe_aux_loss_coeff=(0.1,))
    one = ForwardContext(AttentionMaskSpec(), microbatch_context=MicrobatchContext(1.0, training=True))
    with torch.no_grad():
        router(tokens(), one)
    router(tokens(), one)
    assert int(router.tally[:, :-1].sum()) == int(router.chosen_so_far.sum()) == S * B * 2
    assert one.microbatch_context.metrics["global_load_balancing_loss"][1] == 1.0


def test_an_evaluation_counts_nothing() -> None:
    router = router_of(
        moe_aux_loss_coeff=(0.1,), moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid"
    ).eval()
    microbatch_context = MicrobatchContext(1.0, training=False)
    with torch.no_grad():
        router(tokens(), ForwardContext(AttentionMaskSpec(), microbatch_context=microbatch_context))
    assert not router.tally.any() and not microbatch_context.metrics


# The objective of a step.


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Every parameter's gradient, by name."""
    return {
        param.spec.name: view.clone()
        for parallel in trainer.parallels
        for bucket in parallel.buckets
        for param, view in zip(bucket.params, bucket.gradient_views(), strict=True)
    }


@pytest.mark.parametrize("per_token", [False, True])
def test_the_objective_of_a_step_is_the_mean_loss_and_the_mean_of_the_balancing_losses(per_token: bool) -> None:
    changes = {
        **LOSSES,
        "moe_z_loss_coeff": None,
        "moe_router_load_balancing_type": ("aux_loss",),
        "moe_aux_loss_coeff": (3.0,),
        "calculate_per_token_loss": per_token,
        "clip_grad": 0.0,
        "lr": 0.0,
        "min_lr": 0.0,
    }
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(1, **changes)))
    before = {param.spec.name: param.detach().clone() for param in trainer.stages[0].parameters()}
    train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    found = gradients(trainer)  # as the update used them: without a clip, the gradient of the objective

    plain = tiny.trainer_of(tiny.run_of(tiny.config(1, **{**changes, "moe_aux_loss_coeff": (0.0,)})))
    stage, batches = plain.stages[0], list(tiny.short_run_batches(plain.run, 0))
    assert all(torch.equal(param, before[param.spec.name]) for param in stage.parameters())
    counts = [float(batch.loss_mask.sum()) for batch in batches]
    objective = torch.zeros((), dtype=torch.float64)
    for batch, count in zip(batches, counts, strict=True):
        balance: list[Tensor] = []
        hooks = [
            router.register_forward_hook(
                lambda module, inputs, _, kept=balance: kept.append(loss_of(module, inputs[0]))
            )
            for router in routers_of([stage])
        ]
        losses = stage(ids=batch.tokens, labels=batch.labels)
        for hook in hooks:
            hook.remove()
        assert len(balance) == 2
        share = count / sum(counts) if per_token else 1 / len(batches)
        objective = objective + share * ((losses * batch.loss_mask).sum() / count + 3.0 * sum(balance))
    names = [param.spec.name for param in stage.parameters() if param.requires_grad]
    expected = torch.autograd.grad(objective, [param for param in stage.parameters() if param.requires_grad])
    for name, value in zip(names, expected, strict=True):
        torch.testing.assert_close(
            found[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def loss_of(router: Any, x: Tensor) -> Tensor:
    """The balancing loss of a router's input [s, b, h], from its scores."""
    shares = router.logits(x).flatten(0, 1).softmax(-1)
    experts = shares.detach().topk(2).indices
    return 4 * sum(f * shares[:, i].mean() for i, f in enumerate(fractions(experts, 4)))


def test_balancing_losses_are_scaled_like_the_loss_in_fp16() -> None:
    base = {**LOSSES, "fp64": False, "moe_aux_loss_coeff": (5.0, 5.0), "clip_grad": 0.0}
    (wide,), (half,) = train_alone(base, 1).norms, train_alone({**base, "fp16": True, "loss_scale": 1024.0}, 1).norms
    (without,) = train_alone({**base, "moe_aux_loss_coeff": (0.0,)}, 1).norms
    assert abs(half - wide) < 0.02 * wide and without < 0.8 * wide, (half, wide, without)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, TP2),
    "tp2 sp": (2, SP2),
    "cp2": (2, CP2),
    "dp2 zero": (2, {"use_distributed_optimizer": True}),
    "pp2": (2, PP2),
    "dp2 average": (2, {"ddp_average_in_collective": True}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "recompute": (1, FULL),
    "tp2 pp2 recompute": (4, {**SP2, **PP2, **FULL}),
    "cp2 tp2 sp": (4, {**CP2, **SP2}),
    "tp2 ep2 dp2": (4, {**TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "pp2 vpp2": (2, {**PP2, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4}),
}


@pytest.mark.parametrize("per_token", [False, True], ids=["mean of microbatches", "per token"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_balancing_losses_have_the_gradients_of_the_serial_run(world: Worlds, layout: str, per_token: bool) -> None:
    ranks, changes = LAYOUTS[layout]
    base = {**LOSSES, "num_layers": changes.get("num_layers", 2), "calculate_per_token_loss": per_token}
    found = train(world, ranks, {**base, **changes}) if ranks > 1 else train_alone({**base, **changes})
    assert not differences(found, train_alone(base), 1e-10)


@pytest.mark.parametrize("layout", ["tp2", "tp2 sp", "cp2", "pp2", "ep2", "recompute", "tp2 pp2 recompute"])
def test_the_global_loss_and_expert_biases_are_those_of_the_serial_run(world: Worlds, layout: str) -> None:
    ranks, changes = LAYOUTS[layout]
    dp = (
        2 if layout == "ep2" else 1
    )  # what was chosen "so far" knows all data ranks' microbatches, so each dp is a run of its own
    base = {
        **EXPERTS,
        "moe_router_load_balancing_type": ("global_aux_loss",),
        "moe_aux_loss_coeff": (0.5,),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
    }
    found = train(world, ranks, {**base, **changes}) if ranks > 1 else train_alone({**base, **changes})
    expected = train_alone(base) if dp == 1 else train(world, dp, base)
    assert not differences(found, expected, 1e-10)
    biases = [value for name, value in found.weights.items() if name.endswith("expert_bias")]
    assert len(biases) == 2 and all(value.dtype == torch.float32 and value.abs().max() > 0.04 for value in biases)


@pytest.mark.parametrize("layout", ["dp2 zero", "tp2 ep2 dp2", "cp2 tp2 sp"])
def test_expert_biases_see_the_tokens_of_all_ranks_once(world: Worlds, layout: str) -> None:
    ranks, changes = LAYOUTS[layout]
    base = {
        **EXPERTS,
        "moe_router_score_function": "sqrtsoftplus",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
    }
    assert not differences(train(world, ranks, {**base, **changes}), train_alone(base), 1e-10)


def test_losses_change_the_run_and_each_kind_another_way() -> None:
    runs = [
        train_alone({**EXPERTS, "moe_router_load_balancing_type": (kind,), "moe_aux_loss_coeff": (0.3,)})
        for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")
    ]
    runs += [train_alone({**EXPERTS, "moe_z_loss_coeff": 0.02}), train_alone(EXPERTS)]
    for number, one in enumerate(runs):
        for other in runs[:number]:
            assert differences(one, other, 1e-6)


# Expert biases.

SIGMOID: dict[str, Any] = {**EXPERTS, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def biases(trainer: Trainer) -> list[Tensor]:
    return [router.expert_bias.detach().clone() for router in routers_of(trainer.stages)]


@pytest.mark.parametrize("repeated", [False, True])
def test_every_layer_of_a_depth_of_a_hybrid_network_has_its_own_line_of_loads(repeated: bool) -> None:
    losses = {"moe_router_load_balancing_type": ("aux_loss",), "moe_aux_loss_coeff": (0.1,)}
    changes = {**EXPERTS, "num_layers": None, "hybrid_layer_pattern": "*E/E*E/E*E", "mtp_use_repeated_layer": repeated}
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(1, **changes, **losses, moe_per_layer_logging=True)))
    step = train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    assert step.loads is not None
    choices = 8 * 16 * 2  # samples, positions, experts of each
    assert step.loads.table.sum(1).tolist() == [0, choices, *[choices, 0, choices] * 2]
    names = {f"moe/load_balancing_loss_layer_{layer}" for layer in (1, 2, 4, 5, 7)}
    assert {name for name in step.losses if "_layer_" in name} == names


def test_a_bias_moves_once_a_step_by_the_loads_of_all_microbatches() -> None:
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(1, **SIGMOID, moe_router_bias_update_rate=0.01)))
    chosen: dict[int, list[Tensor]] = {}
    for number, router in enumerate(routers_of(trainer.stages)):
        router.register_forward_hook(
            lambda _, __, routing, number=number: chosen.setdefault(number, []).append(routing.experts)
        )
    train_on(trainer, 1)
    for number, bias in enumerate(biases(trainer)):
        loads = torch.cat(chosen[number]).flatten().bincount(minlength=4)
        assert len(chosen[number]) == 4 and loads.sum() == 8 * 16 * 2
        assert torch.equal(bias, 0.01 * (loads.double().mean() - loads).sign().float()), loads
    assert all(not router.tally.any() for router in routers_of(trainer.stages))


def test_biases_even_out_a_crowd_that_losses_do_not_touch() -> None:
    trainer = tiny.trainer_of(
        tiny.run_of(tiny.config(1, **{**SIGMOID, "lr": 0.0, "min_lr": 0.0}, moe_router_bias_update_rate=0.02))
    )
    for router in routers_of(trainer.stages):
        router.bias.data[0] += 1.0
    crowds = [report_of(trainer, 1).losses["moe/load_max_over_mean"] for _ in range(25)]
    assert crowds[0] > 1.7 and max(crowds[-3:]) < 1.35, crowds


def test_a_step_that_overflows_moves_no_bias_and_its_tokens_are_forgotten() -> None:
    changes = {
        **SIGMOID,
        "fp64": False,
        "fp16": True,
        "initial_loss_scale": 2.0**60,
        "hysteresis": 1,
        "loss_scale_window": 1000,
    }
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(1, **changes)))
    step = train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    assert step.skipped and not any(bias.any() for bias in biases(trainer))
    assert not any(router.tally.any() for router in routers_of(trainer.stages))


def save_here(folder: Path, changes: dict[str, Any]) -> Held:
    """On every rank: train two steps and save."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(ranks, **changes, save=str(folder))))
    train_on(trainer, 2)
    Checkpointer(trainer).save()
    return held_weights(trainer)


def resume_here(folder: Path, changes: dict[str, Any]) -> tuple[Held, list[float]]:
    """On every rank: resume, return the weights, and train two more steps."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(ranks, **changes, load=str(folder))))
    Checkpointer(trainer).resume()
    held = held_weights(trainer)
    return held, train_on(trainer, 2)[0]


def test_biases_are_saved_and_restored_under_any_layout(world: Worlds, tmp_path: Path) -> None:
    base = {**SIGMOID, "moe_router_bias_update_rate": 0.05}
    layout = {**SP2, **PP2, "use_distributed_optimizer": True}
    saved = assemble(world(4).run(save_here, tmp_path, {**base, **layout}))
    restored, losses = resume_here(tmp_path, base)
    kept = {name for name in saved if name.endswith("expert_bias")}
    assert len(kept) == 2 and all(saved[name].abs().max() > 0.05 for name in kept)
    assert all(torch.equal(assemble([restored])[name], saved[name]) for name in saved)
    assert losses == pytest.approx(train_alone(base, 4).losses[2:], rel=1e-10), "as if the run had never stopped"


@pytest.mark.parametrize("changes", [{}, FULL], ids=["kept", "recomputed"])
def test_a_replayed_step_is_the_recorded_one_whatever_would_be_chosen_now(changes: dict[str, Any]) -> None:
    def trainer_of(upset: bool) -> Trainer:
        trainer = tiny.trainer_of(tiny.run_of(tiny.config(1, **SIGMOID, **changes, moe_enable_routing_replay=True)))
        for router in routers_of(trainer.stages) if upset else ():  # biases choose, and weigh nothing
            router.expert_bias.data.copy_(torch.arange(4.0))
        return trainer

    first, other, again = trainer_of(False), trainer_of(True), trainer_of(True)
    expected = train_on(first, 1)
    choices = expert_choices_of_last_step(first.stages)
    assert set(choices) == {f"decoder.layers.{layer}.mlp.router.weight" for layer in range(2)}
    assert all(sorted(kept) == [(0, 0), (2, 0), (4, 0), (6, 0)] for kept in choices.values()), (
        "microbatches of two samples"
    )
    set_replayed_expert_choices(again.stages, choices)
    assert train_on(again, 1) == expected
    assert train_on(other, 1) != expected


# Reports.


def report_of(trainer: Trainer, steps: int) -> IntervalReport:
    """Train, and report as the loop does."""
    meter = StepMetricsMeter(lambda tensor: collectives.all_reduce(tensor, trainer.run.mesh.world))
    for _ in range(steps):
        meter.add(train_step(trainer, tiny.short_run_batches(trainer.run, trainer.progress.iteration)))
    meter.resolve()
    return meter.report(train_iters=steps, seconds=1.0)


def report_here(changes: dict[str, Any]) -> dict[str, float]:
    """On every rank: the figures of two steps."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return dict(report_of(tiny.trainer_of(tiny.run_of(tiny.config(ranks, **changes))), 2).losses)


@pytest.mark.parametrize(
    "layout", ["tp2", "tp2 sp", "dp2 zero", "pp2", "cp2 tp2 sp", "tp2 pp2 recompute", "tp2 ep2 dp2"]
)
def test_every_rank_reports_the_figures_of_the_serial_run(world: Worlds, layout: str) -> None:
    ranks, changes = LAYOUTS[layout]
    base = {**LOSSES, "moe_per_layer_logging": True, "moe_layer_freq": "[0]+[1]"}
    expected = report_here(base)
    assert {
        "lm loss",
        "load_balancing_loss",
        "seq_load_balancing_loss",
        "z_loss",
        "moe/load_balancing_loss_layer_1",
        "moe/z_loss_layer_1",
        "moe/load_max_over_mean",
        "moe/load_entropy_layer_1",
        "moe/dropped",
        "moe/load_layer_1_expert_3",
    } <= set(expected)
    assert not any("layer_0" in name for name in expected), "the first layer is dense"
    for found in world(ranks).run(report_here, {**base, **changes}):
        assert found == pytest.approx(expected, rel=1e-10)


def test_figures_of_loads_are_those_of_the_choices_made() -> None:
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(1, **EXPERTS, moe_expert_capacity_factor=0.75)))
    made: list[Any] = []
    for router in routers_of(trainer.stages):
        router.register_forward_hook(lambda module, _, routing: made.append((module, routing)))
    found = report_of(trainer, 1).losses
    largest, entropy, dropped = [], [], []
    for router in routers_of(trainer.stages):
        routings = [routing for module, routing in made if module is router]
        shares = fractions(torch.cat([routing.experts for routing in routings]), 4)
        largest.append(4 * max(shares))
        entropy.append(-sum(f * math.log(f, 4) for f in shares if f))
        dropped.append(float(torch.cat([~routing.kept for routing in routings]).double().mean()))
    assert found["moe/load_max_over_mean"] == pytest.approx(sum(largest) / 2)
    assert found["moe/load_entropy"] == pytest.approx(sum(entropy) / 2)
    assert found["moe/dropped"] == pytest.approx(sum(dropped) / 2) and dropped[0] > 0.05


def test_a_validation_reports_no_balance_and_an_evaluation_between_steps_changes_nothing() -> None:
    def losses(evaluates: bool) -> Iterator[dict[str, float]]:
        trainer = tiny.trainer_of(tiny.run_of(tiny.config(1, **LOSSES)))
        for _ in range(2):
            yield dict(report_of(trainer, 1).losses)
            if evaluates:
                trainer.set_train_mode(False)
                work = StepWork(trainer, tiny.short_run_batches(trainer.run, 9), 4, training=False)
                with torch.no_grad():
                    for microbatch in range(4):
                        work.forward(0, microbatch, ())
                assert set(work.loss_sums()) == {"lm loss"}
                trainer.set_train_mode(True)

    assert list(losses(True)) == list(losses(False))
