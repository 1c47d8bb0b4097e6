"""Problems, rewards and the file that names environments."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from megatron.core.config.flags import ConfigError
from megatron.rl.environments.arithmetic import Arithmetic
from megatron.rl.environments.config import environment_of, read_environments
from megatron.rl.environments.countdown import Countdown, value_of


@pytest.mark.parametrize(
    "text, value",
    [("3*7+5", 26), ("(1+2)*3", 9), (" 8 / 3 ", Fraction(8, 3)), ("2-3-4", -5), ("12/2/3", 2), ("((7))", 7)],
)
def test_expressions_are_read_exactly(text: str, value: Fraction) -> None:
    assert value_of(text) is not None and value_of(text)[0] == value  # type: ignore[index]


@pytest.mark.parametrize(
    "text",
    ["", "1/0", "1+", "(1", "1)", "2**3", "__import__('os')", "1 2", "-3", "1e3", "1.5", "(" * 150 + "1", "9" * 300],
)
def test_what_is_no_expression_has_no_value(text: str) -> None:
    assert value_of(text) is None


def test_countdown_rewards_the_target_from_all_numbers_and_each_once() -> None:
    environment = Countdown(count=3, seed=5)
    for number in range(50):
        problem = environment.problem(number)
        assert problem == environment.problem(number) and problem.facts["target"] > 0
    problem = type(environment.problem(0))("", {"numbers": (3, 7, 5), "target": 26})
    assert environment.reward(problem, " 3*7+5 ") == 1.0
    assert environment.reward(problem, "5+7*3") == 1.0
    assert environment.reward(problem, "26") == 0.1, "right, but not of the numbers"
    assert environment.reward(problem, "3*7+5+0") == 0.1
    assert environment.reward(problem, "3*7*5") == 0.1
    assert environment.reward(problem, "3*7+5 = 26") == 0.0


def test_arithmetic_rewards_the_number_alone() -> None:
    environment = Arithmetic(largest=20, operations="+*-", seed=1)
    problem = environment.problem(7)
    assert problem == environment.problem(7) != environment.problem(8)
    assert environment.reward(problem, f" {problem.facts['answer']} ") == 1.0
    assert environment.reward(problem, f"{problem.facts['answer']}0") == 0.0
    with pytest.raises(ConfigError, match="operations '%'"):
        Arithmetic(operations="%")


def test_environments_take_turns_by_weight(tmp_path: Path) -> None:
    file = tmp_path / "environments.yaml"
    file.write_text(
        "- agent_type: arithmetic\n  agent_args: {largest: 3}\n  weight: 3\n"
        "- agent_type: countdown\n"
        "- agent_type: arithmetic\n  evaluation_only: true\n"
    )
    environments = read_environments(str(file))
    assert [one.weight for one in environments] == [3.0, 1.0, 0.0]
    turns = [environment_of(environments, number) for number in range(40)]
    assert [sum(which == index for which, _ in turns) for index in range(3)] == [30, 10, 0]
    for index in range(2):
        assert [problem for which, problem in turns if which == index] == list(range(30 if index == 0 else 10))


def test_an_environment_of_ones_own_is_a_class_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from megatron.rl.environments.base import Environment, Problem\n"
        "class Mine(Environment):\n"
        "    def __init__(self, word='a'): self.word = word\n"
        "    def problem(self, number): return Problem(f'{number}:')\n"
        "    def reward(self, problem, answer): return float(answer == self.word)\n"
    )
    file = tmp_path / "environments.yaml"
    file.write_text("- agent_type: mine.py:Mine\n  agent_args: {word: b}\n")
    (one,) = read_environments(str(file))
    assert one.environment.reward(one.environment.problem(3), "b") == 1.0


@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", "is no list of environments"),
        ("a: 1", "is no list of environments"),
        ("- agent_type: chess\n", "chess is none of arithmetic, countdown"),
        ("- agent_type: nowhere.py:X\n", "nor FILE.py:CLASS"),
        ("- agent_type: arithmetic\n  agent_args: {size: 3}\n", "does not take these agent_args"),
        ("- agent_type: arithmetic\n  wieght: 3\n", "'wieght'"),
        ("- agent_type: arithmetic\n  weight: -1\n", "weight -1 must be 0 or more"),
        ("- agent_type: arithmetic\n  evaluation_only: true\n", "no environment to train on"),
        ("- [", "cannot be read"),
    ],
)
def test_a_file_that_says_nothing_usable_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "e.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_environments(str(tmp_path / "e.yaml"))
