"""--langrl-env-config: the environments of a run, and how often each is drawn.

- agent_type: arithmetic             # or countdown, math, reward_model, http, openai, or FILE.py:CLASS for one's own, a path relative to this file
  agent_args: {largest: 9}           # arguments of the constructor
  weight: 1.0                        # share of the problems
  prompt_format: tokenizer           # the policy is asked by the tokenizer's chat template, or one of chatml, llama2, ...; left out: text
- agent_type: my_task.py:MyTask
  evaluation_only: true              # never trained on
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.templates import FORMATS
from megatron.core.parallel.mesh import Axis
from megatron.core.tokenizers.base import Tokenizer
from megatron.rl.environments.arithmetic import ArithmeticEnvironment
from megatron.rl.environments.base import Environment
from megatron.rl.environments.countdown import CountdownEnvironment
from megatron.rl.environments.math_problems import MathEnvironment
from megatron.rl.environments.openai_agent import OpenAIAgentEnvironment
from megatron.rl.environments.remote import RemoteEnvironment
from megatron.rl.environments.reward_model import RewardModelEnvironment

KINDS: Mapping[str, type[Environment]] = {
    "arithmetic": ArithmeticEnvironment,
    "countdown": CountdownEnvironment,
    "math": MathEnvironment,
    "reward_model": RewardModelEnvironment,
    "http": RemoteEnvironment,
    "openai": OpenAIAgentEnvironment,
}
_KEYS = {"agent_type", "agent_args", "weight", "evaluation_only", "prompt_format"}
PROMPT_FORMATS = ("tokenizer", *FORMATS)


@dataclass(frozen=True, slots=True)
class EnvironmentWithWeight:
    """An environment with its name and its share of the training problems; weight 0: it is only evaluated.

    prompt_format: chat template by which the policy is asked, one of PROMPT_FORMATS; None: as text.
    """

    name: str
    environment: Environment
    weight: float
    prompt_format: str | None = None


def read_environments(path: str) -> tuple[EnvironmentWithWeight, ...]:
    """Read the file of --langrl-env-config. Raises `ConfigError` with everything that is wrong with it."""
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--langrl-env-config {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"--langrl-env-config {path} is no list of environments; see docs/rl.md for one")
    made = tuple(_build_environment(entry, Path(path), place) for place, entry in enumerate(entries, start=1))
    if not any(one.weight for one in made):
        raise ConfigError(f"--langrl-env-config {path} has no environment to train on; give one a weight above 0")
    return made


def refuse_missing_chat_template(environments: Sequence[EnvironmentWithWeight], tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` if an environment asks by the tokenizer's chat template, and it has none."""
    names = [one.name for one in environments if one.prompt_format == "tokenizer"]
    if names and tokenizer.chat_template is None:
        raise ConfigError(
            f"environment {names[0]}: prompt_format tokenizer asks by the tokenizer's chat template, and it has none; give "
            f"--chat-template, or one of {', '.join(FORMATS)}"
        )


def start_environments_on_first_rank(environments: Sequence[EnvironmentWithWeight], world: Axis) -> None:
    """Start the environments on the rank that plays, the first of the given axis."""
    for one in environments if world.is_first else ():
        one.environment.start()


def _build_environment(entry: Mapping[str, Any], path: Path, place: int) -> EnvironmentWithWeight:
    """Build the environment of one entry of the file. `ConfigError` if it is invalid. place: its number, for messages."""
    where = f"--langrl-env-config {path}, environment {place}"
    unknown = set(entry) - _KEYS
    if unknown or not isinstance(entry.get("agent_type"), str):
        raise ConfigError(f"{where}: {sorted(unknown)} are no keys, or agent_type is missing; keys are {sorted(_KEYS)}")
    name, arguments = entry["agent_type"], entry.get("agent_args") or {}
    weight = 0.0 if entry.get("evaluation_only") else entry.get("weight", 1.0)
    if not isinstance(weight, int | float) or not 0 <= weight < math.inf or not isinstance(arguments, Mapping):
        raise ConfigError(f"{where}: weight {weight!r} must be 0 or more, and agent_args a mapping")
    template = entry.get("prompt_format")
    if template is not None and template not in PROMPT_FORMATS:
        raise ConfigError(f"{where}: prompt_format {template!r} is none of {', '.join(PROMPT_FORMATS)}")
    kind = KINDS.get(name) or _load_environment_class(name, path.parent, where)
    try:
        inspect.signature(kind).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{where}: {name} does not take these agent_args: {error}") from None
    return EnvironmentWithWeight(name, kind(**arguments), float(weight), template)


def _load_environment_class(name: str, folder: Path, where: str) -> type[Environment]:
    """Load the class FILE.py:CLASS that the user wrote. `ConfigError` if it does not exist or is no environment."""
    file, _, class_name = name.partition(":")
    path = folder / file
    if not file.endswith(".py") or not class_name or not path.is_file():
        raise ConfigError(f"{where}: {name} is none of {', '.join(KINDS)}, nor FILE.py:CLASS of a file in {folder}")
    spec = importlib.util.spec_from_file_location(f"environment_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind = getattr(module, class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigError(f"{where}: {path} has no class {class_name} that derives from Environment")
    return kind


def environment_and_problem_index(environments: Sequence[EnvironmentWithWeight], number: int) -> tuple[int, int]:
    """Return (index of the environment, number of the problem in it) of the training problem of this number.

    After any number of problems each environment has had its share to within one problem, and those from 0 on, none
    left out.
    """
    turns = _turns_by_weight(tuple(one.weight for one in environments))
    return turns.environment_and_count(number)


class _WeightedTurns:
    """Whose turn is each problem: the chairman assignment of Tijdeman (1980), whose distance from the shares is below 1.

    Turn n belongs to one of those whose share W n / T leads what they had by 1 / (2 k - 2) or more: the one that has to
    come soonest. Whole numbers, so that it is the same on every machine.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        scale = math.lcm(*(one.denominator for one in exact))
        self._weights = [int(one * scale) for one in exact]
        self._total = sum(self._weights)
        self._margin = max(1, 2 * sum(weight > 0 for weight in weights) - 2)
        self._counts = [0] * len(weights)
        self._turns: list[tuple[int, int]] = []

    def environment_and_count(self, number: int) -> tuple[int, int]:
        """Return (index, turns it had before) of turn `number`, from 0. Turns are worked out once, in order."""
        while len(self._turns) <= number:
            chosen = self._next_index(len(self._turns) + 1)
            self._turns.append((chosen, self._counts[chosen]))
            self._counts[chosen] += 1
        return self._turns[number]

    def _next_index(self, turn: int) -> int:
        lead = [weight * turn - count * self._total for weight, count in zip(self._weights, self._counts, strict=True)]
        eligible = [
            index for index, weight in enumerate(self._weights) if weight and self._margin * lead[index] >= self._total
        ]
        return min(
            eligible,
            key=lambda i: Fraction((self._margin - 1) * self._total - self._margin * lead[i], self._weights[i]),
        )


@lru_cache(maxsize=8)
def _turns_by_weight(weights: tuple[float, ...]) -> _WeightedTurns:
    return _WeightedTurns(weights)
