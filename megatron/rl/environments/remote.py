"""An environment behind HTTP: another process gives problems and judges answers.

    POST URL/problem  {"number": 7}                                       -> {"prompt": "...", "facts": {...}}
    POST URL/reward   {"number": 7, "facts": {...}, "answer": "..."}     -> {"reward": 0.5}
    POST URL/reward   ... of an environment with turns                    -> {"text": "what the environment says next"}

A reply with `text` continues the conversation; one with `reward` ends it. Errors and time-outs cost the rollout.
"""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from megatron.core.config.flags.declare import ConfigError
from megatron.rl.environments.base import Conversation, Environment, Problem
from megatron.rl.environments.threads import run_in_thread

MOST_BYTES = 1 << 22  # of a reply


class RemoteEnvironmentError(Exception):
    """A remote environment did not answer as it should."""


class RemoteEnvironment(Environment):
    """Problems and rewards of an HTTP server. seconds: limit of each request. turns: most answers of a rollout.

    kind: agent_type in the environment file.
    """

    kind = "http"

    def __init__(self, *, url: str, seconds: float = 30.0, turns: int = 8) -> None:
        if not url.startswith(("http://", "https://")) or seconds <= 0 or turns < 1:
            raise ConfigError(
                f"environment {self.kind}: url {url!r} must begin with http:// or https://, seconds {seconds} be positive, and turns {turns} 1 or more"
            )
        self._url, self._seconds, self._turns = url, seconds, turns

    def problem(self, number: int) -> Problem:
        """As the base class says; the other side is asked when the rollout is played."""
        return Problem("", {"number": number})

    def reward(self, problem: Problem, answer: str) -> float:
        """Not used: `play` asks the other side."""
        raise RemoteEnvironmentError("a remote environment judges while it plays")

    async def play(self, problem: Problem, conversation: Conversation) -> float:
        """Play a rollout whose prompts and reward come from the server. Raises `RemoteEnvironmentError` without a
        reward in `turns` turns.
        """
        number = problem.facts["number"]
        given = await self._post_json("problem", {"number": number})
        conversation.add(_require_text_field(given, "prompt"))
        for _ in range(self._turns):
            answer = await conversation.generate()
            reply = await self._post_json(
                "reward",
                {
                    "number": number,
                    "facts": given.get("facts", {}),
                    "answer": answer,
                    "finished": conversation.is_finished,
                },
            )
            if "reward" in reply:
                return float(reply["reward"])
            conversation.add(_require_text_field(reply, "text"))
        raise RemoteEnvironmentError(f"{self._url} gave no reward in {self._turns} turns")

    async def _post_json(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post to the server's endpoint `what` in a thread; return the JSON object."""
        return await run_in_thread(post_json, f"{self._url.rstrip('/')}/{what}", body, self._seconds)


def post_json(url: str, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Post a JSON body and return the JSON object that the server answers. Raises `RemoteEnvironmentError` on any
    error.
    """
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            content = response.read(MOST_BYTES + 1)
        reply = json.loads(content) if len(content) <= MOST_BYTES else None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RemoteEnvironmentError(f"{url}: {error}") from None
    if not isinstance(reply, dict):
        raise RemoteEnvironmentError(f"{url} did not answer with a JSON object of at most {MOST_BYTES} bytes")
    return reply


def _require_text_field(reply: dict[str, Any], key: str) -> str:
    """Return a text of a reply. Raises `RemoteEnvironmentError` without it."""
    if not isinstance(reply.get(key), str):
        raise RemoteEnvironmentError(f"a reply without the text {key!r}: {str(reply)[:200]}")
    return reply[key]
