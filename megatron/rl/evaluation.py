"""Held-out problems: the mean reward of the likeliest answer, or of sampled answers with pass@k."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from megatron.inference.sampling import Sampling
from megatron.rl.environments.base import EVALUATION
from megatron.rl.environments.config import WeightedEnvironment
from megatron.rl.rollouts import Limits, Rollout, Task
from megatron.rl.settings import RLConfig

_SOLVED = 1.0  # reward of a right answer


def pass_at(k: int, *, right: int, answers: int) -> float:
    """Return how likely one of k answers, drawn without replacement from so many, is right: 1 - C(n - c, k) / C(n, k) (Chen et al., 2021)."""
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def evaluate_held_out(
    rl: RLConfig,
    environments: Sequence[WeightedEnvironment],
    limits: Limits,
    play: Callable[[Sequence[Task], Limits], Sequence[Rollout]],
) -> dict[str, dict[str, float]]:
    """Return for each environment `reward`, the mean over answers, and with several answers to a problem `pass@k`.

    k is 1, 2, 4 and so on up to --rl-eval-answers. An answer is right if it earns 1 or more. An answer whose environment failed is wrong, and
    left out of the mean.
    """
    count = rl.rl_eval_answers
    if count == 1:
        limits = dataclasses.replace(limits, sampling=Sampling(temperature=0.0))
    tasks = [
        Task(one.environment, one.name, EVALUATION + number, index, answer)
        for index, one in enumerate(environments)
        for number in range(rl.rl_prompts_per_eval)
        for answer in range(count)
    ]
    rollouts = play(tasks, limits)
    results: dict[str, dict[str, float]] = {}
    for index, one in enumerate(environments):
        name = one.name if one.name not in results else f"{one.name} {index + 1}"
        results[name] = _scores([rollout for rollout in rollouts if rollout.group == index], count)
    return results


def _scores(rollouts: Sequence[Rollout], count: int) -> dict[str, float]:
    """The scores of an environment. rollouts: `count` of each problem, one problem after the other."""
    rewards = [rollout.reward for rollout in rollouts if not rollout.problem]
    scores = {"reward": sum(rewards) / len(rewards) if rewards else math.nan}
    right = [sum(r.reward >= _SOLVED for r in rollouts[at : at + count]) for at in range(0, len(rollouts), count)]
    for k in powers_of_two(count) if count > 1 else ():
        scores[f"pass@{k}"] = sum(pass_at(k, right=one, answers=count) for one in right) / len(right)
    return scores


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 and so on, up to `most`, which is the last."""
    return sorted({*(2**power for power in range(most.bit_length())), most})


def results_text(results: Mapping[str, Mapping[str, float]]) -> str:
    """The results in a line."""
    return ", ".join(
        f"{name} "
        + " ".join(f"{what} {value:.3f}" if what != "reward" else f"{value:.3f}" for what, value in facts.items())
        for name, facts in results.items()
    )
