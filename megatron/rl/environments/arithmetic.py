"""Sums and products of small numbers, with exactly one right answer."""

from __future__ import annotations

import random

from megatron.core.config.flags.declare import ConfigError
from megatron.rl.environments.base import Environment, Problem

_OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


class ArithmeticEnvironment(Environment):
    """Problems such as `12+7=`, whose answer is a whole number.

    largest: of the two numbers. operations: some of + - *. template: of the prompt, with {problem}. seed: of the problems.
    """

    def __init__(
        self, *, largest: int = 99, operations: str = "+", template: str = "{problem}=", seed: int = 0
    ) -> None:
        unknown = set(operations) - set(_OPERATIONS)
        if unknown or not operations or largest < 0 or "{problem}" not in template:
            raise ConfigError(
                f"environment arithmetic: operations {operations!r} of {' '.join(_OPERATIONS)}, largest {largest} of 0 or more and a "
                f"template with {{problem}} are needed; given is the template {template!r}"
            )
        self._largest, self._operations, self._template, self._seed = largest, operations, template, seed

    def problem(self, number: int) -> Problem:
        """As the base class says."""
        draws = random.Random(f"{self._seed} {number}")
        operation = draws.choice(self._operations)
        a, b = draws.randint(0, self._largest), draws.randint(0, self._largest)
        text = self._template.format(problem=f"{a}{operation}{b}")
        return Problem(text, {"answer": _OPERATIONS[operation](a, b)})

    def reward(self, problem: Problem, answer: str) -> float:
        """1 for the right number and nothing else, 0 otherwise."""
        return float(answer.strip() == str(problem.facts["answer"]))
