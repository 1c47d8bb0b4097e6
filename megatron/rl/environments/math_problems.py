"""Problems of mathematics from a file, judged by their final answer."""

from __future__ import annotations

import re
from fractions import Fraction

from megatron.rl.environments.base import Environment, Problem, ProblemFile

_BOXED = r"\boxed{"
_LONGEST = 4000  # characters of a final answer


class MathEnvironment(Environment):
    """Problems of a JSONL file with an answer each.

    path: lines with `problem` and `answer`; the last `held_out` lines are for evaluation only. template: of the prompt, with {problem}.
    format_reward: of a wrong answer that stands in \\boxed{}, as it should. A right one earns 1, anything else 0. Final answers are equal if they
    are the same text or number; with the package math-verify, if it finds them equal.
    """

    def __init__(
        self,
        *,
        path: str,
        template: str = "{problem}\nPut the final answer in \\boxed{{}}.\n",
        held_out: int = 0,
        format_reward: float = 0.0,
    ) -> None:
        self._file = ProblemFile("math", path, ("problem", "answer"), held_out)
        self._template, self._format_reward = template, format_reward

    def problem(self, number: int) -> Problem:
        """As the base class says. Problems are taken in the order of the file, again and again."""
        text, answer = self._file.row_of_problem(number)
        return Problem(self._template.format(problem=text), {"answer": answer})

    def reward(self, problem: Problem, answer: str) -> float:
        """Return 1 for the right final answer in a box, `format_reward` for a wrong one in it, else 0."""
        given = last_boxed_answer(answer)
        if given is None:
            return 0.0
        return 1.0 if is_same_answer(given, problem.facts["answer"]) else self._format_reward


def last_boxed_answer(text: str) -> str | None:
    """Return what the last \\boxed{...} of a text holds; None if there is none, or if it is never closed."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth, begin = 1, start + len(_BOXED)
    for place in range(begin, min(len(text), begin + _LONGEST)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place].strip()
    return None


def is_same_answer(given: str, expected: str) -> bool:
    """Return whether two final answers are the same text or number, or equal by math-verify if that is installed."""
    plain = [re.sub(r"\\[,!; ]|\s|\$|(?<=\d),(?=\d{3})", "", one).rstrip(".") for one in (given, expected)]
    if plain[0] == plain[1]:
        return True
    numbers = [_fraction_or_none(one) for one in plain]
    if None not in numbers:
        return numbers[0] == numbers[1]
    try:
        from math_verify import parse, verify
    except ImportError:
        return False
    return bool(verify(parse(f"${expected}$"), parse(f"${given}$")))


def _fraction_or_none(text: str) -> Fraction | None:
    """The exact value of 3, -0.5, 1/3 or \\frac{1}{3}; None for anything else."""
    if match := re.fullmatch(r"(-?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", text):
        text = f"{match[1]}{match[2]}/{match[3]}".replace("--", "")
    if not re.fullmatch(r"-?\d+(\.\d+)?|-?\d+/\d+", text):
        return None
    try:
        return Fraction(text)
    except ZeroDivisionError:
        return None
