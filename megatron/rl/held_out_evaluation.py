"""Held-out problems: the mean reward of the likeliest answer, or of sampled answers with pass@k."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from megatron.inference.sampling import SamplingParams
from megatron.rl.environments.base import EVALUATION
from megatron.rl.environments.config import EnvironmentWithWeight
from megatron.rl.rollouts import Rollout, RolloutLimits, RolloutTask
from megatron.rl.settings import RLConfig

_SOLVED = 1.0  # reward of a right answer


def pass_at_k(k: int, *, right: int, answers: int) -> float:
    """Return the probability that one of k of the `answers` answers, drawn without replacement, is right (pass@k, Chen
    et al., 2021).

    right: how many of them are.
    """
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def held_out_problem_scores(
    rl: RLConfig,
    environments: Sequence[EnvironmentWithWeight],
    limits: RolloutLimits,
    play: Callable[[Sequence[RolloutTask], RolloutLimits], Sequence[Rollout]],
) -> dict[str, dict[str, float]]:
    """Return for each environment `reward`, the mean over answers, and with several answers to a problem `pass@k`.

    play: plays rollouts. k is 1, 2, 4 and so on up to --rl-eval-answers. An answer is right if its reward is 1 or more.
    If its environment failed, it is wrong, and left out of the mean.
    """
    count = rl.rl_eval_answers
    if count == 1:
        limits = dataclasses.replace(limits, sampling=SamplingParams(temperature=0.0))
    tasks = [
        RolloutTask(one.environment, one.name, EVALUATION + number, index, answer, (), one.prompt_format)
        for index, one in enumerate(environments)
        for number in range(rl.rl_prompts_per_eval)
        for answer in range(count)
    ]
    rollouts = play(tasks, limits)
    results: dict[str, dict[str, float]] = {}
    for index, one in enumerate(environments):
        name = one.name if one.name not in results else f"{one.name} {index + 1}"
        results[name] = _mean_reward_and_pass_at_k([rollout for rollout in rollouts if rollout.group == index], count)
    return results


def _mean_reward_and_pass_at_k(rollouts: Sequence[Rollout], count: int) -> dict[str, float]:
    """Return one environment's scores. rollouts: `count` of each problem, problem by problem."""
    rewards = [rollout.reward for rollout in rollouts if not rollout.problem]
    scores = {"reward": sum(rewards) / len(rewards) if rewards else math.nan}
    right = [sum(r.reward >= _SOLVED for r in rollouts[at : at + count]) for at in range(0, len(rollouts), count)]
    for k in powers_of_two(count) if count > 1 else ():
        scores[f"pass@{k}"] = sum(pass_at_k(k, right=one, answers=count) for one in right) / len(right)
    return scores


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 and so on below `most`, and `most`."""
    return sorted({*(2**power for power in range(most.bit_length())), most})


def held_out_scores_text(results: Mapping[str, Mapping[str, float]]) -> str:
    """Return the results as one line of text."""
    return ", ".join(
        f"{name} "
        + " ".join(f"{what} {value:.3f}" if what != "reward" else f"{value:.3f}" for what, value in facts.items())
        for name, facts in results.items()
    )
