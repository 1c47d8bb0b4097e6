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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron.core.datasets.indexed import DataError
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.parallel.device import empty_cache, has_separate_memory
from megatron.core.parallel.mesh import SplitMeshJob
from megatron.core.transformer.adapters import without_adapters
from megatron.inference.sampling import Sampling
from megatron.rl import batches
from megatron.rl.algorithms import ALGORITHMS
from megatron.rl.bank import bank_file, read_bank, remove_expired, saved_iterations, write_bank
from megatron.rl.batches import Arrays, TrainingRollout
from megatron.rl.environments.config import read_environments, start_environments
from megatron.rl.evaluation import evaluate_held_out, results_text
from megatron.rl.generation_ranks import GenerationRanks
from megatron.rl.memory import offload_to_host
from megatron.rl.planned_memory import extra_network_memory, memory_line, rank_plan
from megatron.rl.policy_step import PolicyStep, compute_logprobs_and_values
from megatron.rl.refit import GenerationNetwork
from megatron.rl.rollout_advantages import with_advantages, with_token_advantages
from megatron.rl.rollout_queue import RolloutQueue
from megatron.rl.rollouts import Draft, Limits, PlayTimes, Rollout, Task, play_rollouts
from megatron.rl.samples import SampleFiles, sample_records
from megatron.rl.settings import RLConfig, generation_config, reference_folder
from megatron.training.checkpoint.reference import reference_trainer
from megatron.training.data.batch import Batch
from megatron.training.evaluate import evaluation_mode
from megatron.training.health.bad_steps import BadStep
from megatron.training.hooks import StepHooks
from megatron.training.loader import SplitBatches
from megatron.training.trainer import Trainer


class PolicyData(StepHooks):
    """Rollouts of the policy in training, as the microbatches of each optimizer step. Every method is called by all ranks that train together.

    job: with --rl-generation-ranks, the ranks that train and those that generate.
    """

    def __init__(self, trainer: Trainer, rl: RLConfig, job: SplitMeshJob | None = None) -> None:
        assert isinstance(trainer.forward_step, PolicyStep), "policy data are trained by a policy step"
        self.trainer, self.rl, self.step = trainer, rl, trainer.forward_step
        self.run = trainer.run
        train = self.run.config.train
        self.step.steps = rl.rollouts_per_round // train.global_batch_size * rl.grpo_iterations
        self._reference = reference_trainer(trainer, reference_folder(rl, trainer.run.config))
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
        self._generator = self._build_generator(job)
        if not isinstance(self._generator, GenerationRanks):
            start_environments(self.queue.environments, self.run.mesh.world)
        shows = self._bank is not None and rl.rl_samples_per_round and self.run.mesh.world.is_first
        self._samples = SampleFiles(self._bank) if shows and self._bank is not None else None
        self._bank_is_full = False  # and it was told
        self._since = time.monotonic()  # the last round was prepared, or the run began
        self._waited = 0.0  # seconds since then, for rollouts of other ranks
        if trainer.samples is None and rl.rl_samples_per_round:
            trainer.samples = lambda stages: self._shown_answers()
        self._tell_memory()
        trainer.add_hook(self)

    def _tell_memory(self) -> None:
        """Say what ranks hold beside the policy in training; where some only generate, who holds what."""
        rl = self.rl
        if rl.rl_offload_optimizer_during_inference and not has_separate_memory(self.run.mesh.device):
            self.run.print_rank_0(
                "--rl-offload-optimizer-during-inference moves nothing: this run's memory is the CPU's already"
            )
        if isinstance(self._generator, GenerationRanks):
            for line in rank_plan(rl, self.run.config, self.run.mesh.world.size, self._generator.hosts):
                self.run.print_rank_0(line)
        else:
            beside = extra_network_memory(rl, self.run.config, self.run.mesh.world.size)
            self.run.print_rank_0(f"memory of a rank beside the policy in training: {memory_line(beside) or 'none'}")

    def _build_generator(self, job: SplitMeshJob | None) -> GenerationNetwork | GenerationRanks | None:
        """The network that generates; None: that in training."""
        rl, config = self.rl, self.run.config
        verify = rl.rl_verify_model_weights_swap
        if job is not None:
            return GenerationRanks(self.trainer, job, self.queue.environments, verify=verify)
        if not rl.needs_network_copy(config):
            return None
        return GenerationNetwork(self.trainer, generation_config(config, rl.inference_parallel_sizes), verify=verify)

    def __iter__(self) -> PolicyData:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    @property
    def rollouts(self) -> list[TrainingRollout] | None:
        """The rollouts of the round under way."""
        return None if self._round is None else self._round[1]

    def close(self) -> None:
        """Forget the rollouts of the round: the run ends, or goes back to a checkpoint."""
        self._round = None
        if isinstance(self._generator, GenerationRanks) and self._generator.is_busy:
            self._generator.collect()
        self.queue.clear()

    def end_generation(self) -> None:
        """At the end of the run: let the ranks that generate end."""
        if isinstance(self._generator, GenerationRanks):
            self._generator.end()

    def before_save(self) -> None:
        """Collect what other ranks play meanwhile: the bank has to have it before there is a checkpoint that needs it."""
        self._collect()

    def prepare_step(self, num_microbatches: int) -> int:
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
        rows = self._training_rows(chosen)
        self._batches = self._microbatches(rows)
        return len(rows["tokens"]) // (train.micro_batch_size * self.run.mesh.dp.size)

    def batch_metrics(self) -> dict[str, tuple[float, float]]:
        """Rewards and lengths of the round's answers, from the first rank."""
        trained = self.rollouts or []
        speaks = self.run.mesh.world.is_first
        valid = [one.rollout for one in trained if speaks and not one.rollout.problem]
        rewards = [one.reward for one in valid]
        lengths = [
            float(sum(version >= 0 for version in one.versions)) for one in valid
        ]  # also of what is not trained on
        cut = [float(not one.finished) for one in valid]
        facts: dict[str, list[float]] = {"reward": rewards, "answer tokens": lengths, "answers cut off": cut}
        if self.rl.lag:
            facts["policy lag"] = self._lags(trained) if speaks else []
        return {name: (sum(values), len(values)) for name, values in facts.items()}

    def _lags(self, trained: Sequence[TrainingRollout]) -> list[float]:
        """Of each sampled token, how many iterations its weights were behind those at the beginning of the round."""
        first = 0 if self._round is None else self._round[0]
        return [float(first - version) for one in trained for version in one.rollout.versions if version >= 0]

    def accept_update(self, work: Any, losses: Any, norm: Tensor) -> bool:
        """Return whether the optimizer may update: False if no rollout has an advantage, so that momentum and weight
        decay do not move the weights.

        losses, norm: scalars. Raises `BadStep` when log-probabilities of generation and training differ by more
        than --rl-max-logprob-difference.
        """
        limit = self.rl.rl_max_logprob_difference
        if limit is not None:
            total, count = collectives.all_reduce(
                losses["generation logprob difference"].double(), self.run.mesh.world
            ).tolist()
            if count and not total / count <= limit:
                raise BadStep(
                    f"iteration {self.run.progress.iteration + 1}: log-probabilities of generation and training differ by {total / count:.3g} "
                    f"nats on average, more than --rl-max-logprob-difference {limit}; the weights are as before this iteration"
                )
        return self._informative

    def _new_round(self, first: int) -> list[TrainingRollout]:
        """The rollouts of the round that begins at an iteration: new ones, or those of the bank if the run was resumed within it."""
        self._collect()
        file, number = None if self._bank is None else bank_file(self._bank, first), first // self.step.steps
        if self.run.progress.iteration != first:
            self._restore(number)
            return self._from_bank(file, first)
        if self.rl.lag and number and self.queue.is_empty:
            self._restore(number - 1)
        begun = time.monotonic()
        with self.run.timers("rollouts", 1), evaluation_mode(self.trainer), self._generating():
            if self._evaluates_before(first):
                self.evaluate()
            sampling = time.monotonic()
            rollouts, times = self._take(number)
            sampled = time.monotonic()
        with self.run.timers("rollouts", 1), evaluation_mode(self.trainer):
            trained = self._with_logprobs(
                with_advantages(
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
            self.queue.write(number)
            write_bank(file, trained)
            self._remove_expired(file.parent, first)
        if self._samples is not None:
            self._samples.write(first, sample_records(first, trained, self.rl.rl_samples_per_round))
        collectives.barrier(self.run.mesh.world)
        return trained

    def _take(self, number: int) -> tuple[list[Rollout], PlayTimes]:
        """The rollouts of a round; other ranks may go on to play those ahead of it."""
        if not isinstance(self._generator, GenerationRanks):
            return self.queue.next_round(number, self._play)
        times = PlayTimes()
        self._start(self._generator, number)
        if not self.queue.is_whole(number):
            played, times = self._generator.collect()
            self.queue.fill(played)
            self._start(self._generator, number)
        return self.queue.pop(number), times

    def _start(self, ranks: GenerationRanks, number: int) -> None:
        """Let other ranks play what a round and those ahead of it miss; with partial rollouts, until the first of these rounds is whole."""
        if tasks := self.queue.missing(number):
            version = self.run.progress.iteration
            ranks.start_rollouts(tasks, self._generation_limits, version=version, until=self.queue.until)

    def _collect(self) -> None:
        """Wait for what other ranks play ahead of the round under way, and keep it."""
        if not isinstance(self._generator, GenerationRanks) or not self._generator.is_busy:
            return
        assert self._round is not None, "rollouts are played ahead of a round"
        begun = time.monotonic()
        played, _ = self._generator.collect()
        self._waited += time.monotonic() - begun
        self.queue.fill(played)
        if self.run.mesh.world.is_first:
            self.queue.write(self._round[0] // self.step.steps)

    def _remove_expired(self, folder: Path, first: int) -> None:
        """Remove the files of the bank that no checkpoint needs; first: iteration at which the round under way begins."""
        options = self.run.config.checkpoint
        saved = saved_iterations({options.save, options.load}) if options.save else None
        limit = self.rl.rl_rollout_bank_max_bytes
        trouble = remove_expired(folder, first=first, steps=self.step.steps, saved=saved, max_bytes=limit)
        if trouble and not self._bank_is_full:
            self.run.log.warning(trouble)
        self._bank_is_full = bool(trouble)

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """While text is generated: the weights are those in training, and what only training needs is out of the way."""
        device = self.run.mesh.device
        if isinstance(self._generator, GenerationRanks):
            self._generator.refit()
            yield
            return
        with ExitStack() as around:
            if self.rl.rl_offload_optimizer_during_inference and has_separate_memory(device):
                for hook in self.trainer.hooks:
                    hook.before_update()  # a save on its way has copied the state
                around.enter_context(offload_to_host(self.trainer.optimizer.stored_tensors()))
                empty_cache(device)
            if self._generator is not None:
                self._generator.refit()
            yield
            if self._generator is not None and self.rl.rl_offload_inference_model_weights_when_idle:
                self._generator.release_weights()
                empty_cache(device)

    def _evaluates_before(self, first: int) -> bool:
        """Whether held-out problems are due before the round of an iteration."""
        interval = self.run.config.train.eval_interval
        if not interval or not self.rl.rl_prompts_per_eval:
            return False
        return not first or first // interval != (first - self.step.steps) // interval

    def _restore(self, number: int) -> None:
        """Read what was ahead of a round, which may have to be sampled anew."""
        if self.rl.lag and not self.queue.restore(number):
            self.run.print_rank_0(
                f"the rollouts that were ahead of round {number} are not in the bank: they are sampled anew, with the weights as they are"
            )

    def _play(self, tasks: Sequence[Task], until: int | None) -> tuple[list[Rollout | Draft], PlayTimes]:
        """Play rollouts on all ranks, with the weights as they are."""
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

    def _shown_answers(self) -> list[tuple[str, str]]:
        """An answer to each of the first prompts of the round, with its reward."""
        firsts = {one.rollout.group: one.rollout for one in reversed(self.rollouts or [])}
        return [
            (one.prompt, f"{one.answer}   [reward {one.reward:.3f}]")
            for group, one in sorted(firsts.items())
            if group < self.rl.rl_samples_per_round
        ]

    @property
    def _generation_stages(self) -> list[GPTModel]:
        assert not isinstance(self._generator, GenerationRanks), "other ranks generate"
        return list(self.trainer.stages if self._generator is None else self._generator.stages)  # type: ignore[arg-type]

    @property
    def _generation_limits(self) -> Limits:
        rl, length = self.rl, self.run.config.train.seq_length
        sampling = Sampling(rl.rl_default_temperature, max(0, rl.rl_default_top_k), rl.rl_default_top_p)
        return Limits(
            sampling, length, rl.rl_max_new_tokens or length, rl.rl_rollout_seconds, rl.rl_max_inflight_requests
        )

    def _with_logprobs(self, trained: list[TrainingRollout]) -> list[TrainingRollout]:
        """Add the log-probabilities by the weights of this round, if they change before it ends, and by the reference."""
        train = self.run.config.train
        for start in range(0, len(trained), train.global_batch_size):
            chosen = trained[start : start + train.global_batch_size]
            rows = self._training_rows([one for one in chosen if one.rollout.num_sampled])
            names = self._tables(rows)
            kept = [place for place, one in enumerate(chosen) if one.rollout.num_sampled]
            for name, table in names.items():
                packed = self.rl.rl_use_sequence_packing
                values = batches.values_per_rollout([chosen[place] for place in kept], rows, table, packed=packed)
                for place, value in zip(kept, values, strict=True):
                    trained[start + place] = dataclasses.replace(
                        trained[start + place], **dict[str, Any]({name: value})
                    )
        return with_token_advantages(trained, self.rl) if self._has_critic else trained

    def _tables(self, rows: Arrays) -> dict[str, np.ndarray]:
        """What a round needs of its tokens before its first step, over `rl_place`: old and reference log-probabilities, values."""
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
        """Log-probabilities and values of all labels that count, by a network's present weights; see `score`."""
        count = len(rows["tokens"]) // (self.run.config.train.micro_batch_size * self.run.mesh.dp.size)
        return compute_logprobs_and_values(
            trainer, self.step, self._microbatches(rows), count=count, size=rows["tokens"].size
        )

    def _training_rows(self, trained: Sequence[TrainingRollout]) -> Arrays:
        train, limits = self.run.config.train, self._generation_limits
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

    def _report_round(self, number: int, rollouts: Sequence[Rollout], seconds: Mapping[str, float]) -> None:
        """One line about a round, and its figures for the run log. seconds: of each part of the time since the last round."""
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

    def evaluate(self) -> dict[str, dict[str, float]]:
        """The rewards of held-out problems of each environment; on every rank."""

        def played(tasks: Sequence[Task], limits: Limits) -> list[Rollout]:
            if isinstance(self._generator, GenerationRanks):
                self._generator.start_rollouts(tasks, limits)
                results, _ = self._generator.collect()
            else:
                results, _ = play_rollouts(self._generation_stages, self.run.tokenizer, tasks, limits)
            return [one for one in results if isinstance(one, Rollout)]

        results = evaluate_held_out(self.rl, self.queue.environments, self._generation_limits, played)
        self.run.run_log.add("evaluation", iteration=self.run.progress.iteration, results=results)
        self.run.print_rank_0(f"held-out problems at iteration {self.run.progress.iteration}: {results_text(results)}")
        return results

    def _from_bank(self, file: Path | None, first: int) -> list[TrainingRollout]:
        """The rollouts of a round that was begun before the run was resumed."""
        if file is None or not file.is_file():
            raise DataError(
                f"the run is resumed at iteration {self.run.progress.iteration}, in the middle of the round of iteration {first}, whose "
                f"rollouts are not in {file or 'a bank'}; give --rl-rollout-bank-dir, or resume from a checkpoint between two rounds"
            )
        return read_bank(file)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


class PolicyDataSource:
    """What gives the shared training loop its data: one `PolicyData`, also after the run has gone back to a checkpoint."""

    def __init__(self, rl: RLConfig, job: SplitMeshJob | None = None) -> None:
        self._rl, self._job = rl, job
        self._made: PolicyData | None = None

    def __call__(self, trainer: Trainer) -> SplitBatches:
        """The data of a trainer."""
        if self._made is None:
            self._made = PolicyData(trainer, self._rl, self._job)
        return SplitBatches(self._made, None, None)

    def end_generation(self) -> None:
        """At the end of the run."""
        if self._made is not None:
            self._made.end_generation()
