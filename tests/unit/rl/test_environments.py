"""Problems, rewards and the file that names environments."""

from __future__ import annotations

import asyncio
import json
import threading
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.flags import ConfigError
from megatron.rl.environments.arithmetic import Arithmetic
from megatron.rl.environments.base import EVALUATION
from megatron.rl.environments.config import environment_of, read_environments
from megatron.rl.environments.countdown import Countdown, value_of
from megatron.rl.environments.math_problems import MathProblems, same_answer
from megatron.rl.environments.remote import Remote, RemoteFailed


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
    "given, expected, same",
    [
        ("42", "42.0", True),
        ("1,234", "1234", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"-\dfrac{3}{4}", "-0.75", True),
        ("1/0", "1", False),
        ("x + 1", "x+1", True),
        ("41", "42", False),
    ],
)
def test_final_answers_are_compared_as_text_and_as_numbers(given: str, expected: str, same: bool) -> None:
    assert same_answer(given, expected) == same


def test_problems_of_a_file_are_judged_by_the_last_box(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{n} + 1", "answer": n + 1}) + "\n" for n in range(4)))
    environment = MathProblems(path=str(path), held_out=1, format_reward=0.1)
    prompts = [environment.problem(number).prompt for number in range(6)]
    assert prompts[:3] == prompts[3:] and "3 + 1" not in "".join(prompts)
    assert environment.problem(EVALUATION).prompt.startswith("3 + 1")
    problem = environment.problem(1)
    assert environment.reward(problem, r"\boxed{5}, no: \boxed{{2}") == 0.0, "never closed"
    assert environment.reward(problem, r"so \boxed{5}, no: \boxed{ 2 }.") == 1.0
    assert environment.reward(problem, r"\boxed{7}") == 0.1 and environment.reward(problem, "2") == 0.0
    with pytest.raises(ConfigError, match="held_out 4 leaves none"):
        MathProblems(path=str(path), held_out=4)
    with pytest.raises(ConfigError, match="is no JSONL file"):
        MathProblems(path=str(tmp_path / "nowhere"))


class _Turns:
    """A conversation whose answers are given."""

    is_finished = True

    def __init__(self, *answers: str) -> None:
        self.answers, self.texts = list(answers), list[str]()

    def add(self, text: str) -> None:
        """Note the text."""
        self.texts.append(text)

    async def generate(self, *, num_tokens: int | None = None, stop: tuple[str, ...] = ()) -> str:
        """The next answer."""
        return self.answers.pop(0)


class _Server(BaseHTTPRequestHandler):
    """Wants the number of the problem, and says so after a wrong answer."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/problem":
            reply: Any = {"prompt": f"say {body['number']}: ", "facts": {"n": body["number"]}}
        elif body["answer"] == "list":
            reply = ["no object"]
        else:
            right = body["answer"] == str(body["facts"]["n"])
            reply = {"reward": 1.0} if right else {"text": "wrong. "}
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def test_an_environment_behind_http_answers_in_turns() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = Remote(url=f"http://127.0.0.1:{server.server_port}", turns=2)
        turns = _Turns("3", "7")
        assert asyncio.run(environment.play(environment.problem(7), turns)) == 1.0
        assert turns.texts == ["say 7: ", "wrong. "]
        with pytest.raises(RemoteFailed, match="gave no reward in 2 turns"):
            asyncio.run(environment.play(environment.problem(7), _Turns("1", "2")))
        with pytest.raises(RemoteFailed, match="did not answer with a JSON object"):
            asyncio.run(environment.play(environment.problem(7), _Turns("list")))
        server.shutdown()
    with pytest.raises(RemoteFailed, match="problem: "):
        asyncio.run(environment.play(environment.problem(7), _Turns("1")))
    with pytest.raises(ConfigError, match="must begin with http"):
        Remote(url="ftp://x")


@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", "is no list of environments"),
        ("a: 1", "is no list of environments"),
        ("- agent_type: chess\n", "chess is none of arithmetic, countdown, math, http"),
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
