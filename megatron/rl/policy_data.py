"""The data of the training loop: samples rollouts when it needs some, and hands them out as microbatches.

A round is one set of rollouts, on which --grpo-iterations x (rollouts / --global-batch-size) optimizer steps are made:

    generate -> reward -> advantages -> log-probabilities by the policy (if several steps follow) and by the reference -> bank -> steps

With --rl-generation-lag rollouts are generated some rounds before (rollout_queue.py). The bank is a file of JSON lines for each round, written
before its first step: the log of what was sampled, and what a run that is resumed in the middle of a round goes on with, to the last bit.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.adapters.quantized_base import without_adapters
from megatron.core.config.flags.declare import raise_config_error_if
from megatron.core.datasets.indexed import DataError
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.parallel.device import empty_cache, free_and_total_memory, has_separate_memory
from megatron.core.parallel.mesh import SplitMeshJob
from megatron.inference.sampling import SamplingParams
from megatron.rl import rollout_batches
from megatron.rl.advantages import rollouts_with_advantages, rollouts_with_token_advantages
from megatron.rl.algorithms import ALGORITHMS
from megatron.rl.bank import (
    read_rollout_bank,
    remove_expired_bank_files,
    rollout_bank_path,
    saved_checkpoint_iterations,
    write_rollout_bank,
)
from megatron.rl.environments.config import (
    read_environments,
    refuse_missing_chat_template,
    start_environments_on_first_rank,
)
from megatron.rl.generation_ranks import GenerationRanks
from megatron.rl.held_out_evaluation import held_out_problem_scores, held_out_scores_text
from megatron.rl.planned_memory import (
    memory_beside_policy,
    memory_parts_text,
    memory_problem,
    train_and_generation_rank_lines,
)
from megatron.rl.policy_step import PolicyForwardStep, compute_logprobs_and_values
from megatron.rl.refit import GenerationNetworkCopy
from megatron.rl.rollout_batches import Arrays, TrainingRollout
from megatron.rl.rollout_queue import RolloutQueue
from megatron.rl.rollout_sample_files import RolloutSampleFiles, rollout_sample_records
from megatron.rl.rollouts import Draft, Rollout, RolloutLimits, RolloutTask, RolloutTimes, play_rollouts
from megatron.rl.settings import RLConfig, generation_run_config, reference_checkpoint_path
from megatron.training.checkpoint.reference import load_reference_policy
from megatron.training.health.bad_steps import BadStepError
from megatron.training.hooks.online import OnlineEvaluation
from megatron.training.loader import SplitBatches
from megatron.training.state.batch import Batch
from megatron.training.state.evaluate import evaluation_mode
from megatron.training.state.hooks import StepHooks
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import Trainer


class PolicyData(StepHooks):
    """Rollouts of the policy, as the microbatches of each optimizer step. Every method is collective over the training
    ranks.

    job: with --rl-generation-ranks, the ranks that train and those that generate.
    """

    def __init__(self, trainer: Trainer, rl: RLConfig, job: SplitMeshJob | None = None) -> None:
        assert isinstance(trainer.forward_step, PolicyForwardStep), "policy data are trained by a policy step"
        self.trainer, self.rl, self.step = trainer, rl, trainer.forward_step
        self.run = trainer.run
        train = self.run.config.train
        self.step.steps = rl.rollouts_per_round // train.global_batch_size * rl.grpo_iterations
        self._reference = load_reference_policy(trainer, reference_checkpoint_path(rl, trainer.run.config))
        self._round: tuple[int, list[TrainingRollout]] | None = None
        self._batches: Iterator[Batch] = iter(())
        self._informative = True
        folder = rl.rl_rollout_bank_dir or (
            self.run.config.checkpoint.save and f"{self.run.config.checkpoint.save}/rollouts"
        )
        self._bank = Path(folder) if folder else None
        self.queue = RolloutQueue(
            rl,
            read_environments(str(rl.langrl_env_config)),
            seed=train.seed,
            steps=self.step.steps,
            last=None if train.train_iters is None else max(0, -(-train.train_iters // self.step.steps) - 1),
            folder=self._bank,
        )
        refuse_missing_chat_template(self.queue.environments, self.run.tokenizer)
        self._generator = self._build_generator(job)
        if not isinstance(self._generator, GenerationRanks):
            start_environments_on_first_rank(self.queue.environments, self.run.mesh.world)
        shows = self._bank is not None and rl.rl_samples_per_round and self.run.mesh.world.is_first
        self._samples = RolloutSampleFiles(self._bank) if shows and self._bank is not None else None
        self._bank_is_full = False  # and it was told
        self._since = time.monotonic()  # the last round was prepared, or the run began
        self._waited = 0.0  # seconds since then, for rollouts of other ranks
        if rl.rl_samples_per_round:
            trainer.add_hook(OnlineEvaluation(samples=lambda stages: self.shown_answers()))
        self._print_memory_plan()
        trainer.add_hook(self)

    def _print_memory_plan(self) -> None:
        """Print what ranks hold beside the policy; if some only generate, who holds what."""
        rl = self.rl
        if rl.rl_offload_optimizer_during_inference and not has_separate_memory(self.run.mesh.device):
            self.run.print_rank_0(
                "--rl-offload-optimizer-during-inference moves nothing: this run's memory is the CPU's already"
            )
        if isinstance(self._generator, GenerationRanks):
            for line in train_and_generation_rank_lines(
                rl, self.run.config, self.run.mesh.world.size, self._generator.hosts
            ):
                self.run.print_rank_0(line)
        else:
            beside = memory_beside_policy(rl, self.run.config, self.run.mesh.world.size)
            self.run.print_rank_0(
                f"memory of a rank beside the policy in training: {memory_parts_text(beside) or 'none'}"
            )

    def _build_generator(self, job: SplitMeshJob | None) -> GenerationNetworkCopy | GenerationRanks | None:
        """Return the network or the ranks that generate; None if the network in training does."""
        rl, config = self.rl, self.run.config
        verify = rl.rl_verify_model_weights_swap
        if job is not None:
            return GenerationRanks(self.trainer, job, self.queue.environments, verify=verify)
        if not rl.needs_network_copy(config):
            return None
        return GenerationNetworkCopy(
            self.trainer, generation_run_config(config, rl.inference_parallel_sizes), verify=verify
        )

    def __iter__(self) -> PolicyData:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    @property
    def rollouts(self) -> list[TrainingRollout] | None:
        """The rollouts of the current round, or None."""
        return None if self._round is None else self._round[1]

    def close(self) -> None:
        """Drop the rollouts of the round and the queue, as the run ends or goes back to a checkpoint."""
        self._round = None
        if isinstance(self._generator, GenerationRanks) and self._generator.is_busy:
            self._generator.collect_rollouts()
        self.queue.clear()

    def end_generation_ranks(self) -> None:
        """End the generating ranks, at the end of the run."""
        if isinstance(self._generator, GenerationRanks):
            self._generator.end_generation_ranks()

    def before_save(self) -> None:
        """Hook before a save: collect and store what other ranks have played, which the checkpoint will need."""
        self._wait_for_rollouts_ahead()

    def prepare_step(self, num_microbatches: int) -> int:
        """Prepare the next optimizer step; returns its number of microbatches."""
        progress, train = self.run.progress, self.run.config.train
        first = progress.iteration - progress.iteration % self.step.steps
        if self._round is None or self._round[0] != first:
            self._round = (first, self._sample_or_read_round(first))
        place = (progress.iteration - first) % (self.rl.rollouts_per_round // train.global_batch_size)
        size = train.global_batch_size
        chosen = [one for one in self._round[1][place * size : (place + 1) * size] if one.rollout.num_sampled]
        self._informative = any(one.advantage or any(one.advantages) for one in chosen) or bool(
            chosen and (self.rl.grpo_kl_beta or self.rl.grpo_entropy_term_weight)
        )
        rows = self._training_rows(chosen)
        self._batches = self._microbatches(rows)
        return len(rows["tokens"]) // (train.micro_batch_size * self.run.mesh.dp.size)

    def batch_metrics(self) -> dict[str, tuple[float, float]]:
        """Return (sum, count) of rewards, lengths and so on of the round's answers, by name; counted on the first rank."""
        trained = self.rollouts or []
        speaks = self.run.mesh.world.is_first
        valid = [one.rollout for one in trained if speaks and not one.rollout.problem]
        rewards = [one.reward for one in valid]
        # Also of what is not trained on.
        lengths = [float(sum(version >= 0 for version in one.versions)) for one in valid]
        cut = [float(not one.finished) for one in valid]
        facts: dict[str, list[float]] = {"reward": rewards, "answer tokens": lengths, "answers cut off": cut}
        if self.rl.generation_lag:
            facts["policy lag"] = self._token_policy_lags(trained) if speaks else []
        return {name: (sum(values), len(values)) for name, values in facts.items()}

    def _token_policy_lags(self, trained: Sequence[TrainingRollout]) -> list[float]:
        """Return for each sampled token how many iterations older its weights are than the beginning of the round."""
        first = 0 if self._round is None else self._round[0]
        return [float(first - version) for one in trained for version in one.rollout.versions if version >= 0]

    def accept_update(self, work: Any, losses: Any, norm: Tensor) -> bool:
        """Return whether the optimizer may update: False if no rollout has an advantage, so that momentum and weight
        decay do not move the weights.

        losses, norm: scalars. Raises `BadStepError` when log-probabilities of generation and training differ by more
        than --rl-max-logprob-difference.
        """
        limit = self.rl.rl_max_logprob_difference
        if limit is not None:
            total, count = collectives.all_reduce(
                losses["generation logprob difference"].double(), self.run.mesh.world
            ).tolist()
            if count and not total / count <= limit:
                raise BadStepError(
                    f"iteration {self.run.progress.iteration + 1}: log-probabilities of generation and training differ by {total / count:.3g} "
                    f"nats on average, more than --rl-max-logprob-difference {limit}; the weights are as before this iteration"
                )
        return self._informative

    def _sample_or_read_round(self, first: int) -> list[TrainingRollout]:
        """Return the rollouts of the round that begins at iteration `first`: sampled now, or from the bank if the run
        was resumed in it.
        """
        self._wait_for_rollouts_ahead()
        file, number = None if self._bank is None else rollout_bank_path(self._bank, first), first // self.step.steps
        if self.run.progress.iteration != first:
            self._restore_queue(number)
            return self._read_round_from_bank(file, first)
        if self.rl.generation_lag and number and self.queue.is_empty:
            self._restore_queue(number - 1)
        begun = time.monotonic()
        with self.run.timers("rollouts", 1), evaluation_mode(self.trainer), self._generation_context():
            if self._evaluation_is_due(first):
                self.evaluate_held_out_problems()
            sampling = time.monotonic()
            rollouts, times = self._sample_round(number)
            sampled = time.monotonic()
        _refuse_round_of_failures(number, rollouts)
        with self.run.timers("rollouts", 1), evaluation_mode(self.trainer):
            trained = self._add_logprobs(
                rollouts_with_advantages(
                    rollouts, self.rl, longest=min(self._generation_limits.num_tokens, self._generation_limits.length)
                )
            )
        waited, self._waited = self._waited, 0.0
        seconds = {
            "training": begun - self._since - waited,
            "evaluation and refit": sampling - begun,
            "generation": sampled - sampling - times.waiting + waited,
            "waiting": times.waiting,
            "log-probabilities": time.monotonic() - sampled,
        }
        self._since = time.monotonic()
        self._report_round(number, rollouts, seconds)
        if self.run.mesh.world.is_first and file is not None:
            self.queue.write_ahead_file(number)
            write_rollout_bank(file, trained)
            self._remove_expired_bank_files(file.parent, first)
        if self._samples is not None:
            self._samples.write(first, rollout_sample_records(first, trained, self.rl.rl_samples_per_round))
        collectives.barrier(self.run.mesh.world)
        return trained

    def _sample_round(self, number: int) -> tuple[list[Rollout], RolloutTimes]:
        """Return the rollouts of round `number` and their times; generating ranks may go on with later rounds."""
        if not isinstance(self._generator, GenerationRanks):
            return self.queue.play_and_pop_round(number, self._play_rollouts)
        times = RolloutTimes()
        self._start_missing_rollouts(self._generator, number)
        if not self.queue.is_round_complete(number):
            played, times = self._generator.collect_rollouts()
            self.queue.store_results(played)
            self._start_missing_rollouts(self._generator, number)
        return self.queue.pop_round(number), times

    def _start_missing_rollouts(self, ranks: GenerationRanks, number: int) -> None:
        """Start what round `number` and those ahead miss on the generating ranks; with partial rollouts, until the
        first of these rounds is complete.
        """
        if tasks := self.queue.missing_tasks(number):
            version = self.run.progress.iteration
            ranks.start_rollouts(
                tasks, self._generation_limits, version=version, until=self.queue.num_tasks_that_must_finish
            )

    def _wait_for_rollouts_ahead(self) -> None:
        """Wait for what other ranks play ahead of the current round; store it in the queue and its file."""
        if not isinstance(self._generator, GenerationRanks) or not self._generator.is_busy:
            return
        assert self._round is not None, "rollouts are played ahead of a round"
        begun = time.monotonic()
        played, _ = self._generator.collect_rollouts()
        self._waited += time.monotonic() - begun
        self.queue.store_results(played)
        if self.run.mesh.world.is_first:
            self.queue.write_ahead_file(self._round[0] // self.step.steps)

    def _remove_expired_bank_files(self, folder: Path, first: int) -> None:
        """Remove the bank's files that no checkpoint needs, and warn when the limit can no longer be kept. first:
        iteration at which the current round begins.
        """
        options = self.run.config.checkpoint
        saved = saved_checkpoint_iterations({options.save, options.load}) if options.save else None
        limit = self.rl.rl_rollout_bank_max_bytes
        trouble = remove_expired_bank_files(folder, first=first, steps=self.step.steps, saved=saved, max_bytes=limit)
        if trouble and not self._bank_is_full:
            self.run.log.warning(trouble)
        self._bank_is_full = bool(trouble)

    @contextmanager
    def _generation_context(self) -> Iterator[None]:
        """Context manager for generation: the generating network has the weights in training, and optimizer state is
        offloaded if asked.
        """
        device = self.run.mesh.device
        if isinstance(self._generator, GenerationRanks):
            self._generator.refit()
            yield
            return
        with ExitStack() as around:
            if self.rl.rl_offload_optimizer_during_inference and has_separate_memory(device):
                for hook in self.trainer.hooks:
                    hook.before_update()  # a save on its way has copied the state
                around.enter_context(offload_to_host(self.trainer.optimizer.storage_tensors()))
                empty_cache(device)
            if self._generator is not None:
                self._generator.refit()
            yield
            if self._generator is not None and self.rl.rl_offload_inference_model_weights_when_idle:
                self._generator.release_weights()
                empty_cache(device)

    def _evaluation_is_due(self, first: int) -> bool:
        """Return whether held-out problems are due before the round of iteration `first`."""
        interval = self.run.config.train.eval_interval
        if not interval or not self.rl.rl_prompts_per_eval:
            return False
        return not first or first // interval != (first - self.step.steps) // interval

    def _restore_queue(self, number: int) -> None:
        """Read what was sampled ahead of round `number`; print that it will be sampled anew if it is not in the bank."""
        if self.rl.generation_lag and not self.queue.restore_ahead_file(number):
            self.run.print_rank_0(
                f"the rollouts that were ahead of round {number} are not in the bank: they are sampled anew, with the weights as they are"
            )

    def _play_rollouts(
        self, tasks: Sequence[RolloutTask], until: int | None
    ) -> tuple[list[Rollout | Draft], RolloutTimes]:
        """Play rollouts on all ranks, with the present weights. until: see `play_rollouts`."""
        version = self.run.progress.iteration
        return play_rollouts(
            self._generation_stages,
            self.run.tokenizer,
            tasks,
            self._generation_limits,
            version=version,
            until=until,
            records_routes=self.run.config.model.moe.moe_enable_routing_replay,
        )

    def shown_answers(self) -> list[tuple[str, str]]:
        """Return (prompt, answer with its reward) for each of the first prompts of the round."""
        firsts = {one.rollout.group: one.rollout for one in reversed(self.rollouts or [])}
        return [
            (one.prompt, f"{one.answer}   [reward {one.reward:.3f}]")
            for group, one in sorted(firsts.items())
            if group < self.rl.rl_samples_per_round
        ]

    @property
    def _generation_stages(self) -> list[GPTModel]:
        """This rank's stages of the network that generates."""
        assert not isinstance(self._generator, GenerationRanks), "other ranks generate"
        return list(self.trainer.stages if self._generator is None else self._generator.stages)  # type: ignore[arg-type]

    @property
    def _generation_limits(self) -> RolloutLimits:
        """How rollouts are sampled, as the flags say."""
        rl, length = self.rl, self.run.config.train.seq_length
        sampling = SamplingParams(rl.rl_default_temperature, max(0, rl.rl_default_top_k), rl.rl_default_top_p)
        return RolloutLimits(
            sampling, length, rl.rl_max_new_tokens or length, rl.rl_rollout_seconds, rl.rl_max_inflight_requests
        )

    def _add_logprobs(self, trained: list[TrainingRollout]) -> list[TrainingRollout]:
        """Return the rollouts with log-probabilities by this round's weights (if they change within it) and by the
        reference, and with the critic's values and token advantages if there is one.
        """
        train = self.run.config.train
        for start in range(0, len(trained), train.global_batch_size):
            chosen = trained[start : start + train.global_batch_size]
            rows = self._training_rows([one for one in chosen if one.rollout.num_sampled])
            names = self._logprobs_and_values_by_name(rows)
            kept = [place for place, one in enumerate(chosen) if one.rollout.num_sampled]
            for name, table in names.items():
                packed = self.rl.rl_use_sequence_packing
                values = rollout_batches.values_per_rollout(
                    [chosen[place] for place in kept], rows, table, packed=packed
                )
                for place, value in zip(kept, values, strict=True):
                    trained[start + place] = dataclasses.replace(
                        trained[start + place], **dict[str, Any]({name: value})
                    )
        return rollouts_with_token_advantages(trained, self.rl) if self._has_critic else trained

    def _logprobs_and_values_by_name(self, rows: Arrays) -> dict[str, np.ndarray]:
        """Compute what the round needs of its tokens before its first step, by name over `rl_place`: old and reference
        log-probabilities, values.
        """
        names: dict[str, np.ndarray] = {}
        if self.step.has_old_logprobs or self._has_critic:
            scores = self._score_rows(self.trainer, rows)
            names |= {"old": scores["logprobs"]} if self.step.has_old_logprobs else {}
            names |= {"values": scores["values"]} if self._has_critic else {}
        if self.rl.grpo_kl_beta:
            base = self._reference
            own = {name: array for name, array in rows.items() if name != "rl_routes"}  # its routers choose themselves
            with nullcontext() if base is not None else without_adapters(*self.trainer.stages):
                names["reference"] = self._score_rows(base or self.trainer, own)["logprobs"]
        return names

    @property
    def _has_critic(self) -> bool:
        return ALGORITHMS[self.rl.rl_algorithm].has_critic

    def _score_rows(self, trainer: Trainer, rows: Arrays) -> Mapping[str, np.ndarray]:
        """Return log-probabilities and values of all labels by a network's present weights; see
        `compute_logprobs_and_values`.
        """
        count = len(rows["tokens"]) // (self.run.config.train.micro_batch_size * self.run.mesh.dp.size)
        return compute_logprobs_and_values(
            trainer, self.step, self._microbatches(rows), count=count, size=rows["tokens"].size
        )

    def _training_rows(self, trained: Sequence[TrainingRollout]) -> Arrays:
        """Return the row arrays of one optimizer step; see `rollout_batches.build_training_rows`."""
        train, limits = self.run.config.train, self._generation_limits
        return rollout_batches.build_training_rows(
            trained,
            train.seq_length,
            average=ALGORITHMS[self.rl.rl_algorithm].average,
            limit=min(limits.num_tokens, limits.length),
            padding=self.run.tokenizer.eod,
            packed=self.rl.rl_use_sequence_packing,
            multiple=train.micro_batch_size * self.run.mesh.dp.size,
        )

    def _microbatches(self, rows: Arrays) -> Iterator[Batch]:
        """Yield this rank's microbatches of the rows."""
        train = self.run.config.train
        return rollout_batches.build_rank_microbatches(
            rows, self.run.mesh, train.micro_batch_size, packed=self.rl.rl_use_sequence_packing
        )

    def _report_round(self, number: int, rollouts: Sequence[Rollout], seconds: Mapping[str, float]) -> None:
        """Print a line about a round, and add it to the run log. seconds: of each part of the time since the last
        round.
        """
        valid = [one for one in rollouts if not one.problem]
        lengths = [one.num_sampled for one in rollouts]
        facts = {
            "round": number,
            "reward": _mean([one.reward for one in valid]),
            "answer tokens": _mean(lengths),
            "finished": _mean([float(one.finished) for one in rollouts]),
            "failed": len(rollouts) - len(valid),
            "seconds": dict(seconds),
        }
        self.run.run_log.add("rollouts", iteration=self.run.progress.iteration, **facts)
        failed = f", {facts['failed']} failed" if facts["failed"] else ""
        total = sum(seconds.values())
        shares = ", ".join(f"{100 * value / total:.0f} % {name}" for name, value in seconds.items() if value > 0.0)
        self.run.print_rank_0(
            f"round {number}: reward {facts['reward']:.3f}, {facts['answer tokens']:.1f} tokens an answer, "
            f"{100 * _mean([float(one.finished) for one in rollouts]):.0f} % finished{failed}; {total:.1f} s: {shares}"
        )

    def evaluate_held_out_problems(self) -> dict[str, dict[str, float]]:
        """Return the scores of held-out problems of each environment, on every rank; also printed and logged."""

        def played(tasks: Sequence[RolloutTask], limits: RolloutLimits) -> list[Rollout]:
            if isinstance(self._generator, GenerationRanks):
                self._generator.start_rollouts(tasks, limits)
                results, _ = self._generator.collect_rollouts()
            else:
                results, _ = play_rollouts(self._generation_stages, self.run.tokenizer, tasks, limits)
            return [one for one in results if isinstance(one, Rollout)]

        results = held_out_problem_scores(self.rl, self.queue.environments, self._generation_limits, played)
        self.run.run_log.add("evaluation", iteration=self.run.progress.iteration, results=results)
        self.run.print_rank_0(
            f"held-out problems at iteration {self.run.progress.iteration}: {held_out_scores_text(results)}"
        )
        return results

    def _read_round_from_bank(self, file: Path | None, first: int) -> list[TrainingRollout]:
        """Read the rollouts of a round that was begun before the run was resumed. `DataError` if they are not in the
        bank.
        """
        if file is None or not file.is_file():
            raise DataError(
                f"the run is resumed at iteration {self.run.progress.iteration}, in the middle of the round of iteration {first}, whose "
                f"rollouts are not in {file or 'a bank'}; give --rl-rollout-bank-dir, or resume from a checkpoint between two rounds"
            )
        return read_rollout_bank(file)


@contextmanager
def offload_to_host(tensors: Iterable[Tensor]) -> Iterator[int]:
    """Context manager: the storages of the tensors (any shape) are in CPU memory, and must not be used; gives their
    bytes.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.numel()}
    kept = [(storage, torch.UntypedStorage(storage.nbytes()).copy_(storage)) for storage in storages.values()]
    for storage, _ in kept:
        storage.resize_(0)
    try:
        yield sum(copy.nbytes() for _, copy in kept)
    finally:
        for storage, copy in kept:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def refuse_beyond_device_memory(rl: RLConfig, run: RunContext) -> None:
    """Raise `ConfigError` for a run that cannot fit the device's memory, before anything is built; nothing on a CPU."""
    memory = free_and_total_memory(run.mesh.device)
    if memory is not None:
        raise_config_error_if([memory_problem(rl, run.config, run.mesh.world.size, memory[1])])


def _refuse_round_of_failures(number: int, rollouts: Sequence[Rollout]) -> None:
    """Raise `DataError` if every rollout of a round failed: a judge that is down would let the run go on for nothing."""
    if all(one.problem for one in rollouts):
        ((reason, _),) = Counter(one.problem for one in rollouts).most_common(1)
        raise DataError(
            f"all {len(rollouts)} rollouts of round {number} failed, so that there is nothing to train on: {reason}; mend their "
            "environment and start again, from the last checkpoint"
        )


class PolicyDataSource:
    """Callable that gives the training loop its data: always the same `PolicyData`, also after going back to a
    checkpoint.
    """

    def __init__(self, rl: RLConfig, job: SplitMeshJob | None = None) -> None:
        self._rl, self._job = rl, job
        self._made: PolicyData | None = None

    def __call__(self, trainer: Trainer) -> SplitBatches:
        """The data of a trainer."""
        if self._made is None:
            self._made = PolicyData(trainer, self._rl, self._job)
        return SplitBatches(self._made, None, None)

    def end_generation_ranks(self) -> None:
        """End the generating ranks, at the end of the run."""
        if self._made is not None:
            self._made.end_generation_ranks()
