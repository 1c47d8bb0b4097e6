"""Countdown: reach a target with each given number used once, by + - * / and brackets. Answers are parsed, never run."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections import Counter
from fractions import Fraction

from megatron.core.config.flags.declare import ConfigError
from megatron.rl.environments.base import Environment, Problem

_LONGEST = 200  # characters of an expression
_FORMAT_REWARD = 0.1
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


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
    text = " ".join(text.split())
    if len(text) > _LONGEST or not re.fullmatch(r"[0-9 ()+*/-]+", text):
        return None
    try:
        tree = ast.parse(re.sub(r"\b0+(?=\d)", "", text), mode="eval").body
        return _evaluate(tree), [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]  # type: ignore[misc]
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(tree: ast.expr) -> Fraction:
    """Return the exact value of a parsed expression. `SyntaxError` for an operator that is not one of + - * /."""
    if isinstance(tree, ast.Constant):
        return Fraction(tree.value)  # type: ignore[arg-type]
    if not isinstance(tree, ast.BinOp) or type(tree.op) not in _OPERATORS:
        raise SyntaxError("no sum, difference, product or quotient of two expressions")
    return _OPERATORS[type(tree.op)](_evaluate(tree.left), _evaluate(tree.right))
