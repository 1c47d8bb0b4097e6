"""One forward pass of policy training: the loss of rollouts, or without gradients the log-probabilities and values of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.config.plan.layers import StageSpec, network_layer_plans
from megatron.core.config.settings.model import ModelConfig
from megatron.core.models.decoders import build_decoder
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.rl import losses
from megatron.rl.algorithms import ALGORITHMS, PolicyAlgorithm
from megatron.rl.critic import ActorCritic, VisionActorCritic
from megatron.rl.settings import RLConfig
from megatron.training.state.batch import Batch, Loss, LossFunction
from megatron.training.state.run import RunContext
from megatron.training.state.step import StepWork
from megatron.training.state.trainer import ModelProvider, Trainer


@dataclass(frozen=True, slots=True)
class PolicyLossFunction:
    """The loss of --rl-algorithm. has_old, has_reference: whether batches hold those log-probabilities; context: the axis of cut sequences."""

    config: RLConfig
    context: Axis
    has_old: bool
    has_reference: bool

    @property
    def policy_algorithm(self) -> PolicyAlgorithm:
        """The algorithm of --rl-algorithm."""
        return ALGORITHMS[self.config.rl_algorithm]

    def __call__(
        self, token_losses: Tensor, batch: Batch, values: Tensor | None = None, entropy: Tensor | None = None
    ) -> Loss:
        """Return (sum over tokens, number of tokens, figures to log).

        token_losses: [b, s], minus the log-probabilities of the labels. values: [b, s], of the critic's state before each label. entropy: [b, s],
        of the whole distribution; None: the entropy term is that of the sampled tokens.
        """
        assert batch.loss_mask is not None, "the stage of the loss has the mask"
        config, extras = self.config, batch.extras
        mask = batch.loss_mask.to(token_losses.dtype)
        logprobs = -token_losses * mask
        advantages, weight = (extras[name].to(token_losses.dtype) for name in ("rl_advantage", "rl_weight"))
        generation = extras["rl_generation"].to(token_losses.dtype)
        old = extras["rl_old"].to(token_losses.dtype) if self.has_old else logprobs.detach()
        ratio = self._importance_ratio(logprobs, old, mask, extras["rl_answer"])
        limits = {"lower": config.grpo_clamp_eps_lower, "upper": config.grpo_clamp_eps_upper}
        if self.policy_algorithm.loss == "cispo":
            loss = losses.cispo_loss(logprobs, ratio, advantages, upper=limits["upper"])
        else:
            loss = losses.clipped_policy_loss(ratio, advantages, dual_clip=config.rl_dual_clip, **limits)
        if config.rl_inference_logprobs_is_correction:
            loss = loss * self._generation_mismatch_weight((old - generation) * mask, extras["rl_answer"])
        divergence = torch.zeros_like(loss)
        if self.has_reference:
            reference = extras["rl_reference"].to(token_losses.dtype)
            divergence = losses.kl_to_reference(logprobs, reference, config.rl_kl_estimator)
            loss = loss + config.grpo_kl_beta * divergence
        bonus = losses.sampled_entropy_term(logprobs) if entropy is None else entropy.to(loss.dtype)
        loss = loss - config.grpo_entropy_term_weight * bonus
        count, total = mask.sum(), (loss * weight).sum()
        clipped = losses.is_ratio_clipped(ratio, advantages, **limits)
        difference = (old - generation).abs()

        def sum_and_count(values: Tensor) -> Tensor:
            return torch.stack(((values.detach() * mask).sum(), count))

        report = {
            "rl loss": torch.stack((total.detach(), count)),
            "clip fraction": sum_and_count(clipped.to(loss.dtype)),
            "entropy estimate": sum_and_count(-logprobs),
            "generation logprob difference": sum_and_count(difference),
        }
        if entropy is not None:
            report["entropy"] = sum_and_count(entropy)
        if self.has_reference:
            report["kl to reference"] = sum_and_count(divergence)
        if values is not None:
            old_values, returns = (extras[name].to(token_losses.dtype) for name in ("rl_value", "rl_return"))
            values = values.to(token_losses.dtype)
            errors = losses.value_loss(values, old_values, returns, clip=config.rl_value_clip)
            total = total + config.rl_value_loss_coef * (errors * mask).sum()
            report["value loss"] = sum_and_count(errors)
            moved_far = (values - old_values).abs() > config.rl_value_clip
            report["value clip fraction"] = sum_and_count((moved_far & (config.rl_value_clip > 0)).to(loss.dtype))
        return total, count, report

    def _importance_ratio(self, logprobs: Tensor, old: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
        """Return the policy ratio of each token, or of its whole answer, [b, s]. answers: index of each token's answer
        in its row.
        """
        if self.policy_algorithm.sequence_ratio == "none":
            return losses.policy_ratio(logprobs, old)
        sums = answer_sum_at_each_token((logprobs - old) * mask, answers, self.context)
        if self.policy_algorithm.sequence_ratio == "mean":
            sums = sums / answer_sum_at_each_token(mask, answers, self.context).clamp(min=1.0)
        return losses.policy_ratio(sums, torch.zeros_like(sums))

    def _generation_mismatch_weight(self, differences: Tensor, answers: Tensor) -> Tensor:
        """Return the weight that corrects for generation's log-probabilities, [b, s], by --rl-importance-sampling-mode.

        differences: old minus generation's log-probabilities.
        """
        level, _, above = self.config.rl_importance_sampling_mode.partition("_")
        if level == "sequence":
            differences = answer_sum_at_each_token(differences, answers, self.context)
        cap = self.config.rl_importance_sampling_truncation_coef or float("inf")
        return losses.importance_weight(differences, torch.zeros_like(differences), cap=cap, masks=above == "mask")


def answer_sum_at_each_token(values: Tensor, answers: Tensor, context: Axis) -> Tensor:
    """Return at each token the sum of the values over its answer, on all context ranks. values, answers: [b, s]; answers counts from 0 in each row."""
    rows, length = values.shape
    # A row has no more answers than tokens, so the host need not ask the device how many there are.
    width = length * context.size
    sums = torch.zeros(rows, width, dtype=values.dtype, device=values.device).scatter_add(1, answers, values)
    whole = collectives.identity_with_reduce_backward(collectives.reduce_with_identity_backward(sums, context), context)
    return whole.gather(1, answers)


class PolicyForwardStep:
    """The forward step of policy training.

    steps: optimizer steps of a round. collected: (places, log-probabilities, and values where there is a critic) of the microbatches
    so far, [b, s] each, while `compute_logprobs_and_values` runs; else None.
    """

    steps: int = 1

    def __init__(self, rl: RLConfig) -> None:
        self.rl = rl
        self.collected: list[tuple[Tensor, ...]] | None = None

    @property
    def has_old_logprobs(self) -> bool:
        """Whether weights change within a round, so that log-probabilities from before its first step are needed."""
        return self.steps > 1

    def __call__(self, run: RunContext, microbatches: Iterator[Batch], stage: GPTModel) -> tuple[Any, LossFunction]:
        """One microbatch through one stage."""
        batch = next(microbatches)
        if stage.output_layer is not None:
            stage.output_layer.temperature = self.rl.rl_default_temperature
            stage.output_layer.even = False
            stage.output_layer.wants_entropy = self.rl.rl_full_entropy and self.collected is None
        if (routes := batch.extras.get("rl_routes")) is not None and batch.microbatch_context is not None:
            batch.microbatch_context.routes = expert_routes_by_layer(routes, run.config.model)
        inputs: dict[str, Any] = {
            "ids": batch.tokens,
            "positions": batch.positions,
            "documents": batch.documents,
            "microbatch_context": batch.microbatch_context,
        }
        output: Any = stage(hidden=batch.hidden, labels=batch.masked_labels, **inputs)
        entropy = None
        if stage.output_layer is not None:
            entropy, stage.output_layer.entropy = stage.output_layer.entropy, None
        if isinstance(stage, ActorCritic):
            output = (output, stage.critic(hidden=None if batch.message is None else batch.message[-1], **inputs))
        loss = PolicyLossFunction(self.rl, run.mesh.cp, self.has_old_logprobs, self.rl.grpo_kl_beta != 0)

        def loss_of_output(output: Any) -> Loss:
            token_losses, values = output if isinstance(output, tuple) else (output, None)
            if self.collected is None:
                return loss(token_losses, batch, values, entropy)
            assert batch.loss_mask is not None, "the stage of the loss has the mask"
            scores = (-token_losses * batch.loss_mask, *(() if values is None else (values * batch.loss_mask,)))
            self.collected.append((batch.extras["rl_place"], *scores))
            zero = torch.zeros((), device=token_losses.device)
            return zero, zero, {}

        return output, loss_of_output


def expert_routes_by_layer(routes: Tensor, model: ModelConfig) -> Mapping[int, Tensor]:
    """Return layer -> experts, int64 [s, b, k]. routes: [b, layers * k, s]; layers that have experts are counted."""
    layers = [row.index for row in network_layer_plans(model) if row.mlp == "moe"]
    by_layer = routes.unflatten(1, (len(layers), model.moe.moe_router_topk)).permute(1, 3, 0, 2)
    return dict(zip(layers, by_layer, strict=True))


def policy_model_provider(rl: RLConfig) -> ModelProvider:
    """Return the function that builds a pipeline stage of the policy, with its critic if --rl-algorithm has one."""

    def build_policy_stage(run: RunContext, stage: StageSpec) -> GPTModel:
        if ALGORITHMS[rl.rl_algorithm].has_critic:
            actor_critic = VisionActorCritic if run.config.model.has_vision else ActorCritic
            return actor_critic(stage, run.layer_build_context, lr_ratio=rl.rl_critic_lr_ratio)
        return build_decoder(stage, run.layer_build_context)

    return build_policy_stage


def compute_logprobs_and_values(
    trainer: Trainer, step: PolicyForwardStep, microbatches: Iterator[Batch], *, count: int, size: int
) -> Mapping[str, np.ndarray]:
    """Return `logprobs`, and with a critic `values`, of all labels by a network's present weights: [size] over
    `rl_place`; `values` is zero without a critic. Collective; equal on all ranks.

    count: microbatches of this rank. size: rows * s.
    """
    mesh = trainer.run.mesh
    step.collected = []
    names, trainer.loss_names = trainer.loss_names, ()
    try:
        work = StepWork(trainer, microbatches, count, training=False)
        trainer.run_schedule(work, count, training=False)
        collected = step.collected
    finally:
        step.collected, trainer.loss_names = None, names
    speaks = trainer.stages[-1].stage.has_output and mesh.tp.is_first
    mine = [torch.stack([one.double() for one in scores]).flatten(1).cpu().numpy() for scores in collected]
    tables = np.zeros((2, size))
    for table in collectives.gather_objects(np.concatenate(mine, axis=1) if speaks and mine else None, mesh.world):
        if table is not None:
            tables[: len(table) - 1, table[0].astype(np.int64)] = table[1:]
    return {"logprobs": tables[0], "values": tables[1]}
