"""Training on pairs: a step by the formulas, the same step under every layout, and mistakes that these see."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.preference import dataset as dataset_module
from megatron.preference import step as step_module
from megatron.preference.data import ReferenceScoredBatches
from megatron.preference.losses import PAIR_LOSSES
from megatron.preference.settings import WITHOUT_REFERENCE, PreferenceConfig
from megatron.training.state.evaluate import evaluation_mode
from megatron.training.state.step import train_step
from tests.helpers import tiny
from tests.helpers.lazy_collectives import run_lazily
from tests.helpers.preference import random_pairs, train_pairs_here, trainer_of
from tests.helpers.training import assemble
from tests.helpers.world import Worlds

STEPS = 2
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 48,
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
MOE: dict[str, Any] = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 24}
LORA: dict[str, Any] = {**LLAMA, "lora_rank": 4, "lora_alpha": 8.0}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp2 sp": (2, LLAMA, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, LLAMA, {"pipeline_model_parallel_size": 2}),
    "pp2 lora": (2, LORA, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, LLAMA, {"context_parallel_size": 2}),
    "dp2 zero": (
        2,
        LLAMA,
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    "dp2 fsdp": (2, LLAMA, {"use_torch_fsdp2": True, "ckpt_format": "torch_dist"}),
    "ep2 dp2": (2, MOE, {"expert_model_parallel_size": 2}),
    "ep2 etp2 tp2": (
        4,
        MOE,
        {
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
    "tp2": (2, LLAMA, {"tensor_model_parallel_size": 2}),
    "pp2 frozen": (
        2,
        {**LLAMA, "freeze": ("embedding.*", "*.layers.0.*", "*.layers.1.*")},
        {"pipeline_model_parallel_size": 2},
    ),
}
ROBUST = {"preference_loss": "robust", "preference_label_smoothing": 0.1, "preference_sft_weight": 0.3}


def answer_logprob(stage: torch.nn.Module, ids: Any) -> Tensor:
    """The sum of the log-probabilities of an answer's ids by a whole network, from its logits."""
    whole = torch.from_numpy(ids).long()
    tokens = torch.where(whole < 0, ~whole, whole)
    logits = stage(ids=tokens[None, :-1])[:, 0, :50].log_softmax(-1)
    scores = logits.gather(1, tokens[1:, None])[:, 0]
    return (scores * (whole[1:] >= 0)).sum()


@pytest.mark.parametrize("loss", [*PAIR_LOSSES, "sft"])
def test_a_step_is_that_of_the_formulas(loss: str) -> None:
    """The loss and its gradient for the packed batch are those of each answer alone, by the published formulas."""
    options: dict[str, Any] = {"preference_loss": "sigmoid" if loss == "sft" else loss, "preference_beta": 0.3}
    options |= {"preference_label_smoothing": 0.2} if loss in ("robust", "sigmoid") else {}
    options |= {"preference_margin": 0.7} if loss == "simpo" else {}
    options |= {"preference_sft_weight": 0.5} if loss == "sft" else {}
    trainer, data = trainer_of(PreferenceConfig(**options), **LLAMA, clip_grad=0.0)
    stage, beta, smoothing = trainer.stages[0], 0.3, options.get("preference_label_smoothing", 0.0)
    pairs = [random_pairs(40)[place] for index in places_of(8) for place in index]
    reference = data._reference.stages[0] if data._reference is not None else None
    losses, rewards = [], []
    with evaluation_mode(trainer):
        for pair in pairs:
            c, r = (answer_logprob(stage, one) for one in (pair.chosen, pair.rejected))
            with torch.no_grad():
                rc, rr = (
                    (answer_logprob(reference, one) for one in (pair.chosen, pair.rejected)) if reference else (0, 0)
                )
            nc, nr = (float((one >= 0).sum() - (one[0] >= 0)) for one in (pair.chosen, pair.rejected))
            delta = beta * ((c - rc) - (r - rr))
            sigmoid = torch.sigmoid
            values = {
                "sigmoid": lambda: -(1 - smoothing) * sigmoid(delta).log() - smoothing * sigmoid(-delta).log(),
                "robust": lambda: (
                    (-(1 - smoothing) * sigmoid(delta).log() + smoothing * sigmoid(-delta).log()) / (1 - 2 * smoothing)
                ),
                "hinge": lambda: torch.clamp(1 - delta, min=0),
                "ipo": lambda: ((c - rc) / nc - (r - rr) / nr - 1 / (2 * beta)) ** 2,
                "apo_zero": lambda: 1 - sigmoid(beta * (c - rc)) + sigmoid(beta * (r - rr)),
                "simpo": lambda: -sigmoid(beta * (c / nc - r / nr) - 0.7).log(),
                "orpo": lambda: -c / nc - beta * sigmoid(_logit(torch.exp(c / nc)) - _logit(torch.exp(r / nr))).log(),
                "sft": lambda: -sigmoid(delta).log() - 0.5 * c / nc,
            }
            losses.append(values[loss]())
            means = loss in ("ipo", "simpo", "orpo")
            rewards.append(
                [beta * one.item() for one in (((c - rc) / nc, (r - rr) / nr) if means else (c - rc, r - rr))]
            )
        expected = torch.stack(losses).mean()
        weights = [param for param in stage.parameters() if param.requires_grad]
        gradients = torch.autograd.grad(expected, weights)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    step = train_step(trainer, data)
    total, count = step.losses["preference loss"].tolist()
    assert count == len(pairs) and total / count == pytest.approx(float(expected), rel=1e-10)
    assert float(step.grad_norm) == pytest.approx(norm, rel=1e-9)
    logged = {name: float(pair[0] / pair[1]) for name, pair in step.losses.items()}
    for name, values_of_pairs in (
        ("chosen reward", [c for c, _ in rewards]),
        ("rejected reward", [r for _, r in rewards]),
        ("reward margin", [c - r for c, r in rewards]),
        ("preference accuracy", [float(c > r) for c, r in rewards]),
    ):
        assert logged[name] == pytest.approx(sum(values_of_pairs) / len(pairs), abs=1e-10), name


def _logit(p: Tensor) -> Tensor:
    return (p / (1 - p)).log()


def places_of(number: int) -> list[list[int]]:
    """Numbers of the pairs in the first samples."""
    made = dataset_module.PreferenceDataset(
        dataset_module.PreferenceRowSource("pairs", random_pairs(40)),
        range(40),
        length=32,
        num_samples=200,
        seed=1,
        split="train",
    )
    return [[span.sequence for span in made.token_sources(index)[::2]] for index in range(number)]


def test_what_is_behind_the_answers_of_a_sample_is_marked_as_padding() -> None:
    source = dataset_module.PreferenceRowSource("pairs", random_pairs(10))
    made = dataset_module.PreferenceDataset(source, range(10), length=40, num_samples=10, seed=1, split="train")
    for index in range(len(made)):
        last = max(span.start + span.length for span in made.token_sources(index))
        assert made[index]["padding_mask"].tolist() == [1] * last + [0] * (40 - last)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_serial_step(world: Worlds, layout: str) -> None:
    ranks, network, changes = LAYOUTS[layout]
    results = world(ranks).run(run_lazily, "on_wait", train_pairs_here, ROBUST, {**network, **changes}, STEPS)
    compare(train_pairs_here(ROBUST, network, STEPS), results)


def compare(expected: Any, results: list[Any]) -> None:
    """Figures, gradient norms and weights of a run on several ranks are those of one."""
    for mine, theirs in zip(results[0][0], expected[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-11)
    assert results[0][1] == pytest.approx(expected[1], rel=1e-9)
    weights, reference = assemble([[held for one in results for held in one[2]]]), assemble([expected[2]])
    for name, weight in reference.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-8, atol=1e-10, msg=name)


def test_under_adapters_the_base_is_the_reference() -> None:
    """B starts as zero, so policy and base agree: all margins are 0 in the first step, and not in the second."""
    figures, _, _ = train_pairs_here({}, LORA, 2)
    assert figures[0]["reward margin"] == pytest.approx(0, abs=1e-12)
    assert figures[0]["preference accuracy"] == 0.5, "a tie is one half, whatever rounding makes of it"
    assert (
        figures[0]["preference loss"] == pytest.approx(math.log(2), rel=1e-12)
        and abs(figures[1]["reward margin"]) > 1e-6
    )


@pytest.mark.parametrize("task", ["dpo", "kto"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "layout",
    ["serial", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("tp2 sp", "pp2", "cp2", "dp2 zero"))],
)
def test_rounding_prefers_no_answer(world: Worlds, layout: str, precision: str, task: str) -> None:
    """Policy and reference are one network in the first step."""
    ranks, _, changes = LAYOUTS.get(layout, (1, {}, {}))
    options = {**LORA, "fp64": False, "bf16": precision == "bf16", **changes}
    if ranks == 1:
        figures = train_pairs_here({"finetune_task": task}, options, 1)[0]
    else:
        figures = world(ranks).run(train_pairs_here, {"finetune_task": task}, options, 1)[0][0]
    assert figures[0]["preference accuracy"] == 0.5


@pytest.mark.parametrize("loss", WITHOUT_REFERENCE)
def test_losses_without_a_reference_ask_none(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceScoredBatches, "_reference_logprobs", lambda *_: pytest.fail("a reference was asked"))
    train_pairs_here({"preference_loss": loss}, LLAMA, 1)


def _prompts_counted(sample: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Any, index: int) -> Any:
        rows = sample(self, index)
        return rows | {"answer_mask": rows["labels"] * 0 + 1}

    return wrong


def _labels_off_by_one(sample: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Any, index: int) -> Any:
        rows = sample(self, index)
        return rows | {"labels": rows["tokens"].copy()}

    return wrong


def _see_each_other(sample: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Any, index: int) -> Any:
        rows = sample(self, index)
        return rows | {"document_ids": rows["document_ids"] // 2}

    return wrong


@pytest.mark.parametrize(
    "defect", [_prompts_counted, _labels_off_by_one, _see_each_other], ids=lambda one: one.__name__[1:]
)
def test_a_wrong_sample_is_seen(defect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = dataset_module.PreferenceDataset
    monkeypatch.setattr(dataset, "__getitem__", defect(dataset.__getitem__))
    with pytest.raises(AssertionError):
        test_a_step_is_that_of_the_formulas("sigmoid")


def test_a_mean_in_the_place_of_the_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = step_module.AnswerLogprobs
    monkeypatch.setattr(step_module, "AnswerLogprobs", lambda a, b, n: real(a / n, b / n, n))
    with pytest.raises(AssertionError):
        test_a_step_is_that_of_the_formulas("sigmoid")


def test_a_count_of_one_rank_in_the_place_of_all_is_seen(world: Worlds) -> None:
    with pytest.raises(AssertionError):
        compare(train_pairs_here(ROBUST, LLAMA, STEPS), world(2).run(_with_local_count, ROBUST, dict(LLAMA), STEPS))


def _with_local_count(config: dict[str, Any], changes: dict[str, Any], steps: int) -> Any:
    """Every rank divides by its own number of pairs."""
    real = step_module.pair_step_loss

    def local(*given: Any) -> Any:
        total, count, report = real(*given)
        return total / count, count / count / 2, report

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(step_module.LOSSES, "dpo", local)
        return train_pairs_here(config, changes, steps)


def test_sums_of_one_context_rank_are_seen(world: Worlds) -> None:
    with pytest.raises(AssertionError):
        compare(
            train_pairs_here(ROBUST, LLAMA, STEPS),
            world(2).run(_with_local_sums, ROBUST, {**LLAMA, "context_parallel_size": 2}, STEPS),
        )


def _with_local_sums(config: dict[str, Any], changes: dict[str, Any], steps: int) -> Any:
    """Answers are summed over the part of one context rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "reduce_with_identity_backward", lambda x, axis: x)
        return train_pairs_here(config, changes, steps)


def test_a_loss_of_a_layer_weighs_as_in_any_training() -> None:
    """The balance loss of experts moves the weights of a step on pairs as it moves those of a language model on the same tokens."""
    of_pairs, of_text = (_move_by_balance(step) for step in (None, tiny.forward_step))
    assert max(float(move.abs().max()) for move in of_text.values()) > 1e-4
    for name, move in of_pairs.items():
        torch.testing.assert_close(move, of_text[name], rtol=1e-7, atol=1e-12, msg=name)


def _move_by_balance(forward_step: Any) -> dict[str, Tensor]:
    """How a step of gradient descent changes with the balance loss, by parameter. forward_step: None for that of pairs."""
    moves: list[dict[str, Tensor]] = []
    for coefficient in (0.0, 1.0):
        changes = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 1.0, "weight_decay": 0.0, "clip_grad": 0.0}
        trainer, data = trainer_of(
            PreferenceConfig(preference_loss="simpo"),
            **MOE,
            **changes,
            lr_decay_style="constant",
            micro_batch_size=8,
            moe_router_load_balancing_type=("aux_loss",),
            moe_aux_loss_coeff=(coefficient,),
        )
        if forward_step is not None:
            trainer = dataclasses.replace(trainer, forward_step=forward_step)
            data = data._inner  # type: ignore[assignment]
        train_step(trainer, data)
        moves.append({name: param.detach().clone() for name, param in trainer.stages[0].named_parameters()})
    return {name: weight - moves[0][name] for name, weight in moves[1].items()}


def test_a_loss_of_a_layer_that_weighs_by_answer_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dataset_module.PreferenceDataset.__getitem__

    def every_token(self: Any, index: int) -> Any:
        rows = real(self, index)
        return rows | {"loss_mask": rows["answer_mask"].astype("float32")}

    monkeypatch.setattr(dataset_module.PreferenceDataset, "__getitem__", every_token)
    with pytest.raises(AssertionError):
        test_a_loss_of_a_layer_weighs_as_in_any_training()
