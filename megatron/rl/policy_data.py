"""The data of the training loop: samples rollouts when it needs some, and hands them out as microbatches.

A round is one set of rollouts, on which --grpo-iterations x (rollouts / --global-batch-size) optimizer steps are made:

    generate -> reward -> advantages -> log-probabilities by the policy (if several steps follow) and by the reference -> bank -> steps

The bank is a file of JSON lines for each round, written before its first step: the log of what was sampled, and what a run that is resumed
in the middle of a round goes on with, to the last bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.config.flags import ConfigError
from megatron.core.datasets.indexed import DataError
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.transformer.adapters import without_adapters
from megatron.inference.sampling import Sampling
from megatron.rl import batches
from megatron.rl.advantages import advantages, generalized_advantages, informative_groups, overlong_penalty, whitened
from megatron.rl.algorithms import ALGORITHMS
from megatron.rl.bank import bank_file, read_bank, write_bank
from megatron.rl.batches import Arrays, TrainedRollout
from megatron.rl.environments.base import EVALUATION
from megatron.rl.environments.config import environment_of, read_environments
from megatron.rl.policy_step import PolicyStep, score
from megatron.rl.refit import Generator
from megatron.rl.rollouts import Limits, Rollout, Task, play
from megatron.rl.settings import RLConfig, generation_config, reference_folder
from megatron.training.checkpoint.inference_model import GPT, load_network
from megatron.training.data.batch import Batch
from megatron.training.evaluate import resting
from megatron.training.hooks import StepHooks
from megatron.training.loader import Data
from megatron.training.trainer import Trainer

_SEEDS_A_ROUND = 2**32


class PolicyData(StepHooks):
    """Rollouts of the policy in training, as the microbatches of each optimizer step. Every method is called by all ranks together."""

    def __init__(self, trainer: Trainer, rl: RLConfig) -> None:
        assert isinstance(trainer.forward_step, PolicyStep), "policy data are trained by a policy step"
        self.trainer, self.rl, self.step = trainer, rl, trainer.forward_step
        self.run = trainer.run
        train = self.run.config.train
        self.step.steps = rl.rollouts_per_round // train.global_batch_size * rl.grpo_iterations
        self.environments = read_environments(str(rl.langrl_env_config))
        self._reference = _reference_trainer(trainer, rl)
        self._generator = (
            Generator(
                trainer, generation_config(self.run.config, rl.inference_sizes), verify=rl.rl_verify_model_weights_swap
            )
            if rl.copies_network(self.run.config)
            else None
        )
        self._round: tuple[int, list[TrainedRollout]] | None = None
        self._batches: Iterator[Batch] = iter(())
        self._informative = True
        folder = rl.rl_rollout_bank_dir or (
            self.run.config.checkpoint.save and f"{self.run.config.checkpoint.save}/rollouts"
        )
        self._bank = Path(folder) if folder else None
        trainer.add_hook(self)

    def __iter__(self) -> PolicyData:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    @property
    def rollouts(self) -> list[TrainedRollout] | None:
        """The rollouts of the round under way."""
        return None if self._round is None else self._round[1]

    def close(self) -> None:
        """Forget the rollouts of the round: the run ends, or goes back to a checkpoint."""
        self._round = None

    def begin(self, num_microbatches: int) -> int:
        """Prepare the next optimizer step; returns its number of microbatches."""
        progress, train = self.run.progress, self.run.config.train
        first = progress.iteration - progress.iteration % self.step.steps
        if self._round is None or self._round[0] != first:
            self._round = (first, self._new_round(first))
        place = (progress.iteration - first) % (self.rl.rollouts_per_round // train.global_batch_size)
        size = train.global_batch_size
        chosen = [one for one in self._round[1][place * size : (place + 1) * size] if one.rollout.num_sampled]
        self._informative = any(one.advantage or any(one.advantages) for one in chosen) or bool(
            chosen and (self.rl.grpo_kl_beta or self.rl.grpo_entropy_term_weight)
        )
        rows = self._rows(chosen)
        self._batches = self._microbatches(rows)
        return len(rows["tokens"]) // (train.micro_batch_size * self.run.mesh.dp.size)

    def figures(self) -> dict[str, tuple[float, float]]:
        """Rewards and lengths of the round's answers, from the first rank."""
        trained = self.rollouts or []
        speaks = self.run.mesh.world.is_first
        rewards = [one.rollout.reward for one in trained if speaks and not one.rollout.problem]
        lengths = [one.rollout.num_sampled for one in trained if speaks and one.rollout.num_sampled]
        return {"reward": (sum(rewards), len(rewards)), "answer tokens": (sum(lengths), len(lengths))}

    def accept_update(self, work: Any, losses: Any, norm: Tensor) -> bool:
        """Return whether the optimizer may update: False if no rollout has an advantage, so that momentum and weight
        decay do not move the weights.

        losses, norm: scalars. Raises `ConfigError` when log-probabilities of generation and training differ by more
        than --rl-max-logprob-difference.
        """
        limit = self.rl.rl_max_logprob_difference
        if limit is not None:
            total, count = collectives.all_reduce(
                losses["generation logprob difference"].double(), self.run.mesh.world
            ).tolist()
            if count and not total / count <= limit:
                raise ConfigError(
                    f"iteration {self.run.progress.iteration + 1}: log-probabilities of generation and training differ by {total / count:.3g} "
                    f"nats on average, more than --rl-max-logprob-difference {limit}; the weights are as before this iteration"
                )
        return self._informative

    def _new_round(self, first: int) -> list[TrainedRollout]:
        """The rollouts of the round that begins at an iteration: new ones, or those of the bank if the run was resumed within it."""
        file = None if self._bank is None else bank_file(self._bank, first)
        if self.run.progress.iteration != first:
            return self._from_bank(file, first)
        with self.run.timers("rollouts", 1), resting(self.trainer):
            number = first // self.step.steps
            if self._generator is not None:
                self._generator.refit()
            if (interval := self.run.config.train.eval_interval) and self.rl.rl_prompts_per_eval:
                if first // interval != (first - self.step.steps) // interval or not first:
                    self.evaluate()
            rollouts = self._generate(number)
            trained = self._with_logprobs(self._with_advantages(rollouts))
        self._say(number, rollouts)
        if file is not None and self.run.mesh.world.is_first:
            write_bank(file, trained)
        collectives.barrier(self.run.mesh.world)
        return trained

    def _generate(self, number: int) -> list[Rollout]:
        """Sample the answers of a round, on all ranks."""
        tasks = []
        for group in range(self.rl.grpo_prompts_per_step):
            which, problem = environment_of(self.environments, number * self.rl.grpo_prompts_per_step + group)
            chosen = self.environments[which]
            for answer in range(self.rl.grpo_group_size):
                place = group * self.rl.grpo_group_size + answer
                tasks.append(Task(chosen.environment, chosen.name, problem, group, self._seed(number, place)))
        return play(self._stages, self.run.tokenizer, tasks, self._limits)

    def _seed(self, number: int, place: int) -> int:
        return (self.run.config.train.seed * 1_000_003 + number) * _SEEDS_A_ROUND + place

    @property
    def _stages(self) -> list[GPTModel]:
        return list(self.trainer.stages if self._generator is None else self._generator.stages)  # type: ignore[arg-type]

    @property
    def _limits(self) -> Limits:
        rl, length = self.rl, self.run.config.train.seq_length
        sampling = Sampling(rl.rl_default_temperature, max(0, rl.rl_default_top_k), rl.rl_default_top_p)
        return Limits(sampling, length, rl.rl_max_new_tokens or length, rl.rl_rollout_seconds)

    def _with_advantages(self, rollouts: Sequence[Rollout]) -> list[TrainedRollout]:
        """Compare the answers to each prompt. A rollout that failed counts as the mean of its group, and is not trained on."""
        rewards = torch.tensor([one.reward for one in rollouts], dtype=torch.float64).view(-1, self.rl.grpo_group_size)
        if self.rl.rl_overlong_margin:
            lengths = torch.tensor([one.num_sampled for one in rollouts]).view_as(rewards)
            rewards = rewards + overlong_penalty(
                lengths, limit=min(self._limits.num_tokens, self._limits.length), margin=self.rl.rl_overlong_margin
            )
        failed = rewards.isnan()
        means = rewards.nanmean(dim=1, keepdim=True).nan_to_num(0.0)
        rewards = torch.where(failed, means, rewards)
        values = rewards if self._has_critic else advantages(rewards, ALGORITHMS[self.rl.rl_algorithm].baseline)
        dropped = failed
        if self.rl.grpo_filter_groups_with_same_reward:
            dropped = dropped | ~informative_groups(rewards)[:, None]
        return [
            TrainedRollout(
                dataclasses.replace(one, sampled=(False,) * len(one.ids)) if drop else one, 0.0 if drop else value
            )
            for one, value, drop in zip(rollouts, values.flatten().tolist(), dropped.flatten().tolist(), strict=True)
        ]

    def _with_logprobs(self, trained: list[TrainedRollout]) -> list[TrainedRollout]:
        """Add the log-probabilities by the weights of this round, if they change before it ends, and by the reference."""
        train = self.run.config.train
        for start in range(0, len(trained), train.global_batch_size):
            chosen = trained[start : start + train.global_batch_size]
            rows = self._rows([one for one in chosen if one.rollout.num_sampled])
            names: dict[str, np.ndarray] = {}
            if self.step.has_old or self._has_critic:
                scores = self._scores(self.trainer, rows)
                names |= {"old": scores["logprobs"]} if self.step.has_old else {}
                names |= {"values": scores["values"]} if self._has_critic else {}
            if self.rl.grpo_kl_beta:
                base = self._reference
                with nullcontext() if base is not None else without_adapters(*self.trainer.stages):
                    names["reference"] = self._scores(base or self.trainer, rows)["logprobs"]
            kept = [place for place, one in enumerate(chosen) if one.rollout.num_sampled]
            for name, table in names.items():
                packed = self.rl.rl_use_sequence_packing
                values = batches.values_of([chosen[place] for place in kept], rows, table, packed=packed)
                for place, value in zip(kept, values, strict=True):
                    trained[start + place] = dataclasses.replace(
                        trained[start + place], **dict[str, Any]({name: value})
                    )
        return with_token_advantages(trained, self.rl) if self._has_critic else trained

    @property
    def _has_critic(self) -> bool:
        return ALGORITHMS[self.rl.rl_algorithm].has_critic

    def _scores(self, trainer: Trainer, rows: Arrays) -> Mapping[str, np.ndarray]:
        """Log-probabilities and values of all labels that count, by a network's present weights; see `score`."""
        count = len(rows["tokens"]) // (self.run.config.train.micro_batch_size * self.run.mesh.dp.size)
        return score(trainer, self.step, self._microbatches(rows), count=count, size=rows["tokens"].size)

    def _rows(self, trained: Sequence[TrainedRollout]) -> Arrays:
        train, limits = self.run.config.train, self._limits
        return batches.rows_of(
            trained,
            train.seq_length,
            average=ALGORITHMS[self.rl.rl_algorithm].average,
            limit=min(limits.num_tokens, limits.length),
            padding=self.run.tokenizer.eod,
            packed=self.rl.rl_use_sequence_packing,
            multiple=train.micro_batch_size * self.run.mesh.dp.size,
        )

    def _microbatches(self, rows: Arrays) -> Iterator[Batch]:
        train = self.run.config.train
        return batches.microbatches(rows, self.run.mesh, train.micro_batch_size, packed=self.rl.rl_use_sequence_packing)

    def _say(self, number: int, rollouts: Sequence[Rollout]) -> None:
        """One line about a round, and its figures for the run log."""
        valid = [one for one in rollouts if not one.problem]
        lengths = [one.num_sampled for one in rollouts]
        facts = {
            "round": number,
            "reward": _mean([one.reward for one in valid]),
            "answer tokens": _mean(lengths),
            "finished": _mean([float(one.finished) for one in rollouts]),
            "failed": len(rollouts) - len(valid),
        }
        self.run.run_log.add("rollouts", iteration=self.run.progress.iteration, **facts)
        failed = f", {facts['failed']} failed" if facts["failed"] else ""
        self.run.say(
            f"round {number}: reward {facts['reward']:.3f}, {facts['answer tokens']:.1f} tokens an answer, "
            f"{100 * facts['finished']:.0f} % finished{failed}"
        )

    def evaluate(self) -> dict[str, float]:
        """The mean reward on held-out problems of each environment, with the likeliest tokens; on every rank."""
        limits = dataclasses.replace(self._limits, sampling=Sampling(temperature=0.0))
        tasks = [
            Task(one.environment, one.name, EVALUATION + number, index, 0)
            for index, one in enumerate(self.environments)
            for number in range(self.rl.rl_prompts_per_eval)
        ]
        rollouts = play(self._stages, self.run.tokenizer, tasks, limits)
        means = {
            one.name: _mean([r.reward for r in rollouts if r.group == index and not r.problem])
            for index, one in enumerate(self.environments)
        }
        self.run.run_log.add("evaluation", iteration=self.run.progress.iteration, rewards=means)
        self.run.say(
            f"held-out problems at iteration {self.run.progress.iteration}: "
            + ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        )
        return means

    def _from_bank(self, file: Path | None, first: int) -> list[TrainedRollout]:
        """The rollouts of a round that was begun before the run was resumed."""
        if file is None or not file.is_file():
            raise DataError(
                f"the run is resumed at iteration {self.run.progress.iteration}, in the middle of the round of iteration {first}, whose "
                f"rollouts are not in {file or 'a bank'}; give --rl-rollout-bank-dir, or resume from a checkpoint between two rounds"
            )
        return read_bank(file)


def with_token_advantages(trained: Sequence[TrainedRollout], rl: RLConfig) -> list[TrainedRollout]:
    """Return the rollouts with advantages and returns of each token, from their values and rewards (`advantage`)."""
    longest = max((len(one.rollout.ids) for one in trained), default=0)
    table = torch.zeros(3, len(trained), longest, dtype=torch.float64)
    rewards, values, mask = table
    for row, one in enumerate(trained):
        size = len(one.rollout.ids)
        mask[row, :size] = torch.tensor(one.rollout.sampled, dtype=torch.float64)
        if one.values:
            values[row, :size] = torch.tensor(one.values, dtype=torch.float64)
            rewards[row, max(place for place, known in enumerate(one.rollout.sampled) if known)] = one.advantage
    gains, returns = generalized_advantages(rewards, values, mask, discount=rl.rl_discount, smoothing=rl.rl_gae_lambda)
    gains = whitened(gains, mask)
    return [
        dataclasses.replace(
            one,
            advantages=tuple(gains[row, : len(one.rollout.ids)].tolist()),
            returns=tuple(returns[row, : len(one.rollout.ids)].tolist()),
        )
        for row, one in enumerate(trained)
    ]


def _reference_trainer(trainer: Trainer, rl: RLConfig) -> Trainer | None:
    """The trainer with the stages of the reference network; None where there is none, or where it is the base under adapters."""
    run = trainer.run
    folder = reference_folder(rl, run.config)
    if folder is None:
        return None
    loaded = load_network(
        folder,
        GPT,
        parallel=run.config.parallel,
        dtype=run.config.precision.dtype,
        tokenizer=dataclasses.asdict(run.config.tokenizer),
        device=run.mesh.device,
    )
    return dataclasses.replace(trainer, stages=list(loaded.stages), parallels=[], hooks=[], scripts={})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def data_source(rl: RLConfig) -> Callable[[Trainer], Data]:
    """What gives the shared training loop its data: one `PolicyData`, also after the run has gone back to a checkpoint."""
    made: list[Data] = []

    def data_of(trainer: Trainer) -> Data:
        if not made:
            made.append(Data(PolicyData(trainer, rl), None, None))
        return made[0]

    return data_of
