"""The rollouts of the next rounds: sampled some rounds ahead of their training (--rl-generation-lag), whole or in parts (--rl-partial-rollouts).

    lag 0            round n is sampled before round n is trained on
    lag 2            rounds 0, 1, 2 are sampled at first; then round n + 2 before round n is trained on
    lag 2, partial   before round n is trained on, rollouts of rounds n to n + 2 are sampled together until those of round n are whole; the
                     others go on with the weights that come next, so that no replica waits for the longest answer. Ranks that only generate
                     sample those of rounds n + 1 and n + 2 while round n is trained on, until round n + 1 is whole

No token is older than the lag. What is ahead is written to a file of the bank, ahead_<iteration>.jsonl.gz, before the round is trained on, so that a
run that is resumed goes on with it, to the last bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed import DataError
from megatron.rl.bank import list_values_to_tuples, read_json_lines_gz, rollout_queue_path, write_json_lines_gz
from megatron.rl.environments.config import EnvironmentWithWeight, environment_and_problem_index
from megatron.rl.rollouts import Draft, Rollout, RolloutAnswer, RolloutTask, RolloutTimes
from megatron.rl.settings import RLConfig

# plays tasks with the weights as they are, until so many of the first have ended
Player = Callable[[Sequence[RolloutTask], int | None], tuple[list[Rollout | Draft], RolloutTimes]]
_SEEDS_A_ROUND = 2**32


class RolloutQueue:
    """Rollouts of rounds that are not trained on yet, the same on every rank.

    steps: iterations of a round. last: number of the last round of the run, None where it is not known. folder: of the bank.
    """

    def __init__(
        self,
        rl: RLConfig,
        environments: Sequence[EnvironmentWithWeight],
        *,
        seed: int,
        steps: int,
        last: int | None,
        folder: Path | None,
    ) -> None:
        self.rl, self.environments = rl, environments
        self._seed, self._steps, self._last, self._folder = seed, steps, last, folder
        self._ahead: dict[int, list[Rollout | Draft]] = {}
        self._places: list[tuple[int, int]] = []  # round and place of what is being played

    @property
    def is_empty(self) -> bool:
        """Whether the queue holds nothing."""
        return not self._ahead

    def clear(self) -> None:
        """Drop everything."""
        self._ahead.clear()
        self._places = []

    def play_and_pop_round(self, number: int, play: Player) -> tuple[list[Rollout], RolloutTimes]:
        """Return the rollouts of round `number` and their times; rounds ahead of it are sampled too, up to the lag."""
        tasks = self.missing_tasks(number)
        until = sum(one == number for one, _ in self._places) if self.rl.rl_partial_rollouts else None
        played, times = play(tasks, until) if tasks else ([], RolloutTimes())
        self.store_results(played)
        return self.pop_round(number), times

    def missing_tasks(self, number: int) -> list[RolloutTask]:
        """Return the tasks to play before round `number` is trained on, of it and of the rounds ahead; `store_results`
        takes
        their results.
        """
        most = (
            number + self.rl.generation_lag
            if self._last is None
            else max(number, min(number + self.rl.generation_lag, self._last))
        )
        self._ahead = {
            one: self._ahead.get(one) or [()] * self.rl.rollouts_per_round for one in range(number, most + 1)
        }
        self._places = [
            (one, place)
            for one, results in self._ahead.items()
            for place, result in enumerate(results)
            if not isinstance(result, Rollout)
        ]
        return [self._make_task(one, place, self._ahead[one][place]) for one, place in self._places]  # type: ignore[arg-type]

    @property
    def num_tasks_that_must_finish(self) -> int | None:
        """How many of the first tasks of `missing_tasks`, those of one round, must finish; None: all."""
        return sum(one == self._places[0][0] for one, _ in self._places) if self.rl.rl_partial_rollouts else None

    def store_results(self, played: Sequence[Rollout | Draft]) -> None:
        """Store the results of the tasks of `missing_tasks`, in their order."""
        for (one, place), result in zip(self._places, played, strict=True):
            self._ahead[one][place] = result
        self._places = []

    def is_round_complete(self, number: int) -> bool:
        """Return whether all rollouts of a round have finished."""
        return all(isinstance(one, Rollout) for one in self._ahead[number])

    def pop_round(self, number: int) -> list[Rollout]:
        """Remove and return the rollouts of a round, which is trained on now."""
        mine = [one for one in self._ahead.pop(number) if isinstance(one, Rollout)]
        assert len(mine) == self.rl.rollouts_per_round, "a round is trained on when all its rollouts have ended"
        return mine

    def write_ahead_file(self, number: int) -> None:
        """Write what is ahead of round `number` to the bank, if there is a lag; call on the first rank."""
        if self._folder is not None and self.rl.generation_lag:
            lines = (
                {"round": one, "place": place, **_rollout_or_draft_to_json(result)}
                for one, results in self._ahead.items()
                for place, result in enumerate(results)
            )
            write_json_lines_gz(self._ahead_file_path(number), lines)

    def restore_ahead_file(self, number: int) -> bool:
        """Read what was ahead of round `number` from the bank; return whether the file exists. `DataError` if it is of
        another run.
        """
        file = None if self._folder is None else self._ahead_file_path(number)
        if file is None or not file.is_file():
            return False
        self._ahead = {}
        for line in read_json_lines_gz(file):
            try:
                results = self._ahead.setdefault(line["round"], [()] * self.rl.rollouts_per_round)
                results[line["place"]] = _rollout_or_draft_from_json(line)
            except (KeyError, TypeError, IndexError) as error:
                raise DataError(
                    f"the rollouts of {file} are not those of this run: {type(error).__name__}: {error}"
                ) from None
        return True

    def _ahead_file_path(self, number: int) -> Path:
        assert self._folder is not None, "asked where there is a bank"
        return rollout_queue_path(self._folder, number * self._steps)

    def _make_task(self, number: int, place: int, draft: Draft) -> RolloutTask:
        """Return the task at position `place` of a round: the same problem and draws in every run of this seed."""
        group = place // self.rl.grpo_group_size
        which, problem = environment_and_problem_index(
            self.environments, number * self.rl.grpo_prompts_per_step + group
        )
        chosen = self.environments[which]
        seed = (self._seed * 1_000_003 + number) * _SEEDS_A_ROUND + place
        return RolloutTask(chosen.environment, chosen.name, problem, group, seed, draft, chosen.prompt_format)


def _rollout_or_draft_to_json(result: Rollout | Draft) -> Mapping[str, Any]:
    if isinstance(result, Rollout):
        return {"rollout": dataclasses.asdict(result)}
    return {"draft": [dataclasses.asdict(answer) for answer in result]}


def _rollout_or_draft_from_json(line: Mapping[str, Any]) -> Rollout | Draft:
    if "rollout" in line:
        return Rollout(**list_values_to_tuples(line["rollout"]))
    return tuple(RolloutAnswer(**list_values_to_tuples(answer)) for answer in line["draft"])
