"""An environment: problems, and how the answers of a policy are rewarded.

A task of one's own needs two methods, for example in a file `reverse.py` beside the environment file:

    class Reverse(Environment):
        def problem(self, number: int) -> Problem:
            word = "".join(random.Random(number).sample("abcdefgh", 4))
            return Problem(f"Reverse {word}: ", {"answer": word[::-1]})

        def reward(self, problem: Problem, answer: str) -> float:
            return float(answer.strip() == problem.facts["answer"])

Problems follow from their number alone, so that a run that is resumed sees the same ones. For several turns, tools or servers,
override `play`: it is asynchronous, and what it adds to the conversation is not trained on. With --rl-partial-rollouts it may be
played again from its beginning, and gets the same answers as before up to where it was paused.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.storage import read_text_lines

EVALUATION = 2**40  # number of the first held-out problem


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. prompt: the text that is continued. facts: what the reward needs."""

    prompt: str
    facts: Mapping[str, Any] = field(default_factory=dict)


class ProblemFile:
    """The rows of a JSONL file with these fields in each line; the last `held_out` lines are for evaluation only."""

    def __init__(self, kind: str, path: str, fields: Sequence[str], held_out: int) -> None:
        """kind: agent_type, for messages. Raises `ConfigError` for other files, and if no line is left to train on."""
        try:
            lines = [json.loads(line) for line in read_text_lines(path) if line.strip()]
            rows = [tuple(_text_of_field(line, name) for name in fields) for line in lines]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"environment {kind}: {path} is no JSONL file with {' and '.join(f'`{name}`' for name in fields)} in each line: "
                f"{type(error).__name__} {error}"
            ) from None
        if not 0 <= held_out < len(rows):
            raise ConfigError(
                f"environment {kind}: held_out {held_out} leaves none of the {len(rows)} {fields[0]}s of {path} to train on"
            )
        count = len(rows) - held_out
        self._train, self._held_out = rows[:count], rows[count:] or rows

    def row_of_problem(self, number: int) -> tuple[str, ...]:
        """Return the fields of the problem of this number: the lines in order, again and again."""
        rows = self._train if number < EVALUATION else self._held_out
        return rows[number % EVALUATION % len(rows)]


def _text_of_field(line: Any, name: str) -> str:
    """Return the text or the number of a field. Raises `TypeError` for messages and other lists."""
    if not isinstance(line[name], (str, int, float)):
        raise TypeError(
            f"`{name}` {str(line[name])[:80]} is no text; of messages give the text (prompt_format writes it as a message)"
        )
    return str(line[name])


class Conversation(Protocol):
    """The text of one rollout so far. prompt_format: of the environment file; None: what is added is text."""

    prompt_format: str | None

    @property
    def is_finished(self) -> bool:
        """Whether the last answer ended by itself, with the end of the document or a stop word, and not at the limit."""

    def add(self, text: str, *, role: str = "user") -> None:
        """Append a text of the environment: a prompt, or what a tool says. Names of special tokens in it become those tokens.

        With `prompt_format` in the environment file it is a message of this role (system, user, tool), which the chat template writes:
        names of special tokens in it stay text.
        """

    def add_messages(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> None:
        """Append messages as the chat template of `prompt_format` writes them, or if that is left out the tokenizer's (ChatML if it has
        none). tools: as with the template, of the whole rollout.
        """

    async def generate(self, *, num_tokens: int | None = None, stop: tuple[str, ...] = ()) -> str:
        """Sample what comes next, append it, and return its text; of a message what the template puts behind it is left out.

        num_tokens: at most so many; left out: as --rl-max-new-tokens says. stop: texts that end it.
        """

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function returns that may take long, such as a tool: with --rl-rollout-seconds in a thread of its own, which is
        given up when that time is over.
        """


class Environment(ABC):
    """A task with a verifiable reward. Options of the environment file are the arguments of the constructor."""

    def start(self) -> None:
        """Get ready to play, such as load a network. Called once before the first rollout, on the one rank that plays."""
        return None

    @abstractmethod
    def problem(self, number: int) -> Problem:
        """Return the problem of a number, 0 and up. The same number gives the same problem on every rank and in every run."""

    @abstractmethod
    def reward(self, problem: Problem, answer: str) -> float:
        """Return the reward of an answer, usually from 0 to 1."""

    async def play(self, problem: Problem, conversation: Conversation) -> float:
        """Play one rollout and return its reward. As given here: one prompt, one answer; one that was cut off earns nothing."""
        conversation.add(problem.prompt)
        answer = await conversation.generate()
        return await conversation.call(self.reward, problem, answer) if conversation.is_finished else 0.0
