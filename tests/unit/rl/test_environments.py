"""Problems, rewards and the file that names environments."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from megatron.core.config.flags.declare import ConfigError
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.rl.environments.arithmetic import ArithmeticEnvironment
from megatron.rl.environments.base import EVALUATION
from megatron.rl.environments.config import EnvironmentWithWeight, environment_and_problem_index, read_environments
from megatron.rl.environments.countdown import CountdownEnvironment, value_and_numbers_of_expression
from megatron.rl.environments.math_problems import MathEnvironment, is_same_answer
from megatron.rl.environments.openai_agent import (
    OpenAIAgentEnvironment,
    _AgentRequestRefused,
    _AgentRollout,
    chatml_prompt,
)
from megatron.rl.environments.remote import RemoteEnvironment, RemoteEnvironmentError
from megatron.training.state.step import train_step
from tests.helpers.policy import RL, trainer_of
from tests.unit.rl.test_prompt_encoding import Policy


@pytest.mark.parametrize(
    "text, value",
    [("3*7+5", 26), ("(1+2)*3", 9), (" 8 / 3 ", Fraction(8, 3)), ("2-3-4", -5), ("12/2/3", 2), ("((7))", 7)],
)
def test_expressions_are_read_exactly(text: str, value: Fraction) -> None:
    assert value_and_numbers_of_expression(text) is not None and value_and_numbers_of_expression(text)[0] == value  # type: ignore[index]


@pytest.mark.parametrize(
    "text",
    ["", "1/0", "1+", "(1", "1)", "2**3", "__import__('os')", "1 2", "-3", "1e3", "1.5", "(" * 150 + "1", "9" * 300],
)
def test_what_is_no_expression_has_no_value(text: str) -> None:
    assert value_and_numbers_of_expression(text) is None


def test_countdown_rewards_the_target_from_all_numbers_and_each_once() -> None:
    environment = CountdownEnvironment(count=3, seed=5)
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
    environment = ArithmeticEnvironment(largest=20, operations="+*-", seed=1)
    problem = environment.problem(7)
    assert problem == environment.problem(7) != environment.problem(8)
    assert environment.reward(problem, f" {problem.facts['answer']} ") == 1.0
    assert environment.reward(problem, f"{problem.facts['answer']}0") == 0.0
    with pytest.raises(ConfigError, match="operations '%'"):
        ArithmeticEnvironment(operations="%")


@pytest.mark.parametrize(
    "weights", [(1, 1), (1, 2), (1, 1, 1), (0.3, 0.7), (5, 1, 1, 1, 1, 1), (1, 0, 1e-3), (3, 2, 2, 1), (1,)]
)
def test_every_problem_is_drawn_once_before_any_twice_and_shares_are_kept(weights: tuple[float, ...]) -> None:
    environments = [EnvironmentWithWeight(str(i), ArithmeticEnvironment(), weight) for i, weight in enumerate(weights)]
    counts = [0] * len(weights)
    for number in range(5000):
        which, problem = environment_and_problem_index(environments, number)
        assert problem == counts[which], f"problem {counts[which]} of environment {which} is left out at {number}"
        counts[which] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - weight / sum(weights) * (number + 1)) < 1, (number, counts)


def test_environments_take_turns_by_weight(tmp_path: Path) -> None:
    file = tmp_path / "environments.yaml"
    file.write_text(
        "- agent_type: arithmetic\n  agent_args: {largest: 3}\n  weight: 3\n"
        "- agent_type: countdown\n"
        "- agent_type: arithmetic\n  evaluation_only: true\n"
    )
    environments = read_environments(str(file))
    assert [one.weight for one in environments] == [3.0, 1.0, 0.0]
    turns = [environment_and_problem_index(environments, number) for number in range(40)]
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
    assert is_same_answer(given, expected) == same


def test_problems_of_a_file_are_judged_by_the_last_box(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{n} + 1", "answer": n + 1}) + "\n" for n in range(4)))
    environment = MathEnvironment(path=str(path), held_out=1, format_reward=0.1)
    prompts = [environment.problem(number).prompt for number in range(6)]
    assert prompts[:3] == prompts[3:] and "3 + 1" not in "".join(prompts)
    assert environment.problem(EVALUATION).prompt.startswith("3 + 1")
    problem = environment.problem(1)
    assert environment.reward(problem, r"\boxed{5}, no: \boxed{{2}") == 0.0, "never closed"
    assert environment.reward(problem, r"so \boxed{5}, no: \boxed{ 2 }.") == 1.0
    assert environment.reward(problem, r"\boxed{7}") == 0.1 and environment.reward(problem, "2") == 0.0
    (tmp_path / "messages.jsonl").write_text('{"problem": [{"role": "user", "content": "1 + 1"}], "answer": 2}\n')
    with pytest.raises(ConfigError, match="is no text; of messages give the text"):
        MathEnvironment(path=str(tmp_path / "messages.jsonl"))
    with pytest.raises(ConfigError, match="held_out 4 leaves none"):
        MathEnvironment(path=str(path), held_out=4)
    with pytest.raises(ConfigError, match="is no JSONL file"):
        MathEnvironment(path=str(tmp_path / "nowhere"))


class _Turns:
    """A conversation whose answers are given."""

    is_finished = True
    prompt_format = None

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
        environment = RemoteEnvironment(url=f"http://127.0.0.1:{server.server_port}", turns=2)
        turns = _Turns("3", "7")
        assert asyncio.run(environment.play(environment.problem(7), turns)) == 1.0
        assert turns.texts == ["say 7: ", "wrong. "]
        with pytest.raises(RemoteEnvironmentError, match="gave no reward in 2 turns"):
            asyncio.run(environment.play(environment.problem(7), _Turns("1", "2")))
        with pytest.raises(RemoteEnvironmentError, match="did not answer with a JSON object"):
            asyncio.run(environment.play(environment.problem(7), _Turns("list")))
        server.shutdown()
    with pytest.raises(RemoteEnvironmentError, match="problem: "):
        asyncio.run(environment.play(environment.problem(7), _Turns("1")))
    with pytest.raises(ConfigError, match="must begin with http"):
        RemoteEnvironment(url="ftp://x")


@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", "is no list of environments"),
        ("a: 1", "is no list of environments"),
        ("- agent_type: chess\n", "chess is none of arithmetic, countdown, math, reward_model, http, openai"),
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


class _Agent(BaseHTTPRequestHandler):
    """Has the policy chat about even ids in two turns; asks for what is not served first."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))

        def ask(path: str, **request: Any) -> tuple[int, Any]:
            content = json.dumps({"model": body["model"], **request}).encode()
            try:
                with urlopen(Request(f"{body['base_url']}/{path}", content), timeout=30) as reply:
                    return 200, json.loads(reply.read())
            except HTTPError as error:
                return error.code, json.loads(error.read())

        statuses = [ask("completions", prompt="1", n=2)[0], ask("nothing", prompt="1")[0]]
        _, first = ask("completions", prompt=f"{body['number'] % 40} ", max_tokens=3)
        said = f"{body['number'] % 40} {first['choices'][0]['text']}"
        statuses.append(ask("completions", prompt="not what was said", max_tokens=3)[0])
        status, second = ask("completions", prompt=f"{said} 7", max_tokens=3)
        ids = (said + second["choices"][0]["text"]).split() if status == 200 else []
        reward = sum(int(one) % 2 == 0 for one in ids) / len(ids) if statuses == [400] * 3 and ids else "none"
        content = json.dumps({"reward": reward}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def test_an_agent_that_speaks_openais_api_is_trained_with_what_the_policy_sampled() -> None:
    trainer, data = trainer_of(dataclasses.replace(RL, grpo_prompts_per_step=2, grpo_group_size=4), global_batch_size=8)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Agent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        agent = OpenAIAgentEnvironment(url=f"http://127.0.0.1:{server.server_port}/", seconds=60)
        data.queue.environments = (dataclasses.replace(data.queue.environments[0], environment=agent),)
        losses = train_step(trainer, data).losses
        server.shutdown()
    assert data.rollouts is not None and not any(one.rollout.problem for one in data.rollouts), data.rollouts
    for one in data.rollouts:
        sampled = one.rollout.sampled
        assert not sampled[0] and 4 <= one.rollout.num_sampled + 2 <= 8 and 0 <= one.rollout.reward <= 1
    total, count = losses["generation logprob difference"].tolist()
    assert count == sum(one.rollout.num_sampled for one in data.rollouts) and total / count < 1e-12


def test_an_agents_messages_are_written_by_the_chat_template_and_only_grow() -> None:
    policy = Policy(ByteTokenizer(), "4", "Yes.")
    question, doubt = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "sure?"}
    answer = {"role": "assistant", "content": "4"}

    async def ask() -> None:
        rollout = _AgentRollout(asyncio.get_running_loop(), policy.conversation, 2)
        assert await rollout.answer_messages([question], None, None, ()) == ("4", True)
        for refused in ([question], [question, {**answer, "content": "5"}, doubt], [doubt, answer, question]):
            with pytest.raises(_AgentRequestRefused, match="do not begin with all that was said"):
                await rollout.answer_messages(refused, None, None, ())
        assert await rollout.answer_messages([question, answer, doubt], None, None, ()) == ("Yes.", True)
        with pytest.raises(_AgentRequestRefused, match="no turns left"):
            await rollout.answer_messages([*policy.conversation.messages, doubt], None, None, ())

    asyncio.run(ask())
    expected = chatml_prompt([question, answer, doubt]) + "Yes.<|im_end|>"
    assert ByteTokenizer().detokenize(policy.conversation.ids) == expected


def test_messages_are_rendered_so_that_a_conversation_only_grows() -> None:
    messages = [{"role": "user", "content": "2+2?"}]
    first = chatml_prompt(messages) + "4<|im_end|>"
    messages += [{"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}]
    assert chatml_prompt(messages).startswith(first)
