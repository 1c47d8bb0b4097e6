"""Countdown: reach a target with each given number used once, by + - * / and brackets. Answers are parsed here; nothing is evaluated."""

from __future__ import annotations

import random
import re
from collections import Counter
from fractions import Fraction

from megatron.core.config.flags import ConfigError
from megatron.rl.environments.base import Environment, Problem

_TOKEN = re.compile(r"\s*(\d+|[-+*/()])")
_LONGEST = 200  # characters of an expression
_FORMAT_REWARD = 0.1


class CountdownEnvironment(Environment):
    """Problems such as `numbers 3 5 7 target 26:`, answered by an expression, `3*7+5`.

    count: how many numbers. largest: of each. template: of the prompt, with {numbers} and {target}. seed: of the problems. format_reward: of a
    valid expression with the wrong result or the wrong numbers.
    """

    def __init__(
        self,
        *,
        count: int = 3,
        largest: int = 20,
        template: str = "numbers {numbers} target {target}: ",
        seed: int = 0,
        format_reward: float = _FORMAT_REWARD,
    ) -> None:
        if count < 2 or largest < 1 or "{numbers}" not in template or "{target}" not in template:
            raise ConfigError(
                f"environment countdown: count {count} of 2 or more, largest {largest} of 1 or more and a template with {{numbers}} and "
                f"{{target}} are needed; given is the template {template!r}"
            )
        self._count, self._largest, self._template, self._seed = count, largest, template, seed
        self._format_reward = format_reward

    def problem(self, number: int) -> Problem:
        """As the base class says. The target is what a random expression of the numbers gives, a whole number above 0."""
        draws = random.Random(f"{self._seed} {number}")
        while True:
            numbers = [draws.randint(1, self._largest) for _ in range(self._count)]
            target = numbers[0]
            for value in numbers[1:]:
                target = draws.choice((target + value, target - value, target * value))
            if target > 0:
                break
        draws.shuffle(numbers)
        prompt = self._template.format(numbers=" ".join(map(str, numbers)), target=target)
        return Problem(prompt, {"numbers": tuple(numbers), "target": target})

    def reward(self, problem: Problem, answer: str) -> float:
        """1 for an expression of all the numbers that gives the target, `format_reward` for another valid expression, 0 otherwise."""
        parsed = value_and_numbers_of_expression(answer)
        if parsed is None:
            return 0.0
        value, used = parsed
        right = value == problem.facts["target"] and Counter(used) == Counter(problem.facts["numbers"])
        return 1.0 if right else self._format_reward


def value_and_numbers_of_expression(text: str) -> tuple[Fraction, list[int]] | None:
    """Return (exact value, numbers used) of an expression of whole numbers, + - * / and brackets; None if it is none, or divides by 0."""
    text = text.strip()
    tokens = _TOKEN.findall(text) if len(text) <= _LONGEST else []
    if not tokens or "".join(tokens) != re.sub(r"\s", "", text):
        return None
    try:
        value, rest = _parse_sum(tokens)
    except (ValueError, ZeroDivisionError, RecursionError):
        return None
    return None if rest else (value, [int(token) for token in tokens if token.isdigit()])


def _parse_sum(tokens: list[str]) -> tuple[Fraction, list[str]]:
    """Evaluate terms joined by + and -; return the value and the remaining tokens."""
    value, tokens = _parse_product(tokens)
    while tokens and tokens[0] in "+-":
        sign, (other, rest) = tokens[0], _parse_product(tokens[1:])
        value, tokens = (value + other if sign == "+" else value - other), rest
    return value, tokens


def _parse_product(tokens: list[str]) -> tuple[Fraction, list[str]]:
    """Evaluate factors joined by * and /; return the value and the remaining tokens."""
    value, tokens = _parse_number_or_bracket(tokens)
    while tokens and tokens[0] in "*/":
        sign, (other, rest) = tokens[0], _parse_number_or_bracket(tokens[1:])
        value, tokens = (value * other if sign == "*" else value / other), rest
    return value, tokens


def _parse_number_or_bracket(tokens: list[str]) -> tuple[Fraction, list[str]]:
    """Evaluate a number or a bracket; return the value and the remaining tokens. `ValueError` for anything else."""
    if not tokens:
        raise ValueError("the expression ends too early")
    if tokens[0] == "(":
        value, rest = _parse_sum(tokens[1:])
        if not rest or rest[0] != ")":
            raise ValueError("a bracket is not closed")
        return value, rest[1:]
    return Fraction(int(tokens[0])), tokens[1:]
