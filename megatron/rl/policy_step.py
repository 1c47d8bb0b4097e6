"""One forward pass of policy training: the loss of rollouts, or without gradients the log-probabilities and values of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.config.plan import StageSpec, network_layer_plans
from megatron.core.config.settings.model import ModelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.executor import run_rank_script as execute
from megatron.rl.algorithms import ALGORITHMS
from megatron.rl.critic import ActorCritic
from megatron.rl.policy_loss import PolicyLoss
from megatron.rl.settings import RLConfig
from megatron.training.data.batch import Batch, Loss, LossFunction
from megatron.training.run import RunContext
from megatron.training.step import StepWork
from megatron.training.trainer import ModelProvider, Trainer


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
        loss = PolicyLoss(self.rl, run.mesh.cp, self.has_old_logprobs, self.rl.grpo_kl_beta != 0)

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
            return ActorCritic(stage, run.layer_build_context, lr_ratio=rl.rl_critic_lr_ratio)
        return GPTModel(stage, run.layer_build_context)

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
        execute(trainer.pipeline_script(count, training=False), work=work, axis=mesh.pp, backward_axis=mesh.pp_backward)
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
