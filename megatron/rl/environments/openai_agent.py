"""An agent that speaks to the policy as to any OpenAI-compatible server, and is rewarded for what comes of it.

    POST URL  {"number": 7, "base_url": "http://127.0.0.1:PORT/ROLLOUT/v1", "model": "policy"}     -> {"reward": 0.5}

Before it answers, the agent asks BASE_URL/completions or BASE_URL/chat/completions, as often as `turns` allows. What the policy samples is trained
on, whatever else is in the conversation is not. Messages are written by the chat template of the environment's prompt_format, or the tokenizer's, or
as ChatML. A conversation only grows: each request begins with all that was said before, so that the ids that were sampled are kept. Sampling is what
the flags of the run say; a request may set `max_tokens` and `stop`. Errors and time-outs cost the rollout.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron.core.datasets.indexed import DataError
from megatron.rl.environments.base import Conversation, Problem
from megatron.rl.environments.remote import MOST_BYTES, RemoteEnvironment, RemoteEnvironmentError, post_json
from megatron.rl.environments.threads import run_in_thread


class OpenAIAgentEnvironment(RemoteEnvironment):
    """An agent behind HTTP that queries the policy. url: starts it. seconds: most for a rollout. turns: most requests
    to the policy.
    """

    kind = "openai"

    def __init__(self, *, url: str, seconds: float = 120.0, turns: int = 32) -> None:
        super().__init__(url=url, seconds=seconds, turns=turns)
        self._server: ThreadingHTTPServer | None = None
        self._rollouts: dict[str, _AgentRollout] = {}

    async def play(self, problem: Problem, conversation: Conversation) -> float:
        """Start the agent, serve its requests, and return the reward that it reports. Raises `RemoteEnvironmentError`
        without one.
        """
        if self._server is None:
            self._server = ThreadingHTTPServer(("127.0.0.1", 0), _agent_request_handler(self._rollouts, self._seconds))
            threading.Thread(target=self._server.serve_forever, daemon=True, name="policy server").start()
        name = secrets.token_hex(16)
        self._rollouts[name] = _AgentRollout(asyncio.get_running_loop(), conversation, self._turns)
        base = f"http://127.0.0.1:{self._server.server_port}/{name}/v1"
        body = {"number": problem.facts["number"], "base_url": base, "model": "policy"}
        try:
            reply = await run_in_thread(post_json, self._url, body, self._seconds)
        finally:
            del self._rollouts[name]
        reward = reply.get("reward")
        if not isinstance(reward, int | float):
            raise RemoteEnvironmentError(f"{self._url} gave no reward: {str(reply)[:200]}")
        return float(reward)


class _AgentRequestRefused(Exception):
    """A request that is answered with HTTP 400 and the reason."""


@dataclass(slots=True)
class _AgentRollout:
    """A rollout's conversation, continued by requests. turns: requests left. text, messages: all so far, of one kind."""

    loop: asyncio.AbstractEventLoop
    conversation: Conversation
    turns: int
    text: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    is_busy: bool = False

    async def answer_prompt(self, prompt: str, num_tokens: int | None, stop: tuple[str, ...]) -> tuple[str, bool]:
        """Return (the policy's answer to a prompt, whether it ended by itself). Raises `_AgentRequestRefused` if the
        prompt does not continue the conversation.
        """
        if self.conversation.prompt_format is not None:
            raise _AgentRequestRefused(
                "the environment has a prompt_format, by which messages are written; ask chat/completions"
            )
        if self.messages or not prompt.startswith(self.text) or len(prompt) == len(self.text):
            raise _AgentRequestRefused("the prompt does not begin with all that was said before, or says nothing new")
        answer = await self._answer(lambda: self.conversation.add(prompt[len(self.text) :]), num_tokens, stop)
        self.text = prompt + answer
        return answer, self.conversation.is_finished

    async def answer_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, num_tokens: int | None, stop: tuple[str, ...]
    ) -> tuple[str, bool]:
        """As `answer_prompt`, for messages, which the chat template writes."""
        earlier = len(self.messages)
        if self.text or len(messages) <= earlier or any(map(_differs, self.messages, messages)):
            raise _AgentRequestRefused("the messages do not begin with all that was said before, or say nothing new")
        answer = await self._answer(lambda: self.conversation.add_messages(messages[earlier:], tools), num_tokens, stop)
        self.messages = [*map(dict, messages), {"role": "assistant", "content": answer}]
        return answer, self.conversation.is_finished

    async def _answer(self, add: Callable[[], None], num_tokens: int | None, stop: tuple[str, ...]) -> str:
        """Add what is new and return the policy's answer."""
        if self.turns < 1 or self.is_busy:
            raise _AgentRequestRefused("the rollout has no turns left, or answers another request")
        try:
            add()
        except (DataError, ValueError) as error:
            raise _AgentRequestRefused(str(error)) from None
        self.turns, self.is_busy = self.turns - 1, True
        answer = await self.conversation.generate(num_tokens=num_tokens, stop=stop)
        self.is_busy = False
        return answer


def chatml_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the messages in ChatML as one text, with the beginning of an answer; for agents that ask for completions."""
    texts = [f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages]
    return "".join(texts) + "<|im_start|>assistant\n"


def _differs(earlier: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether a message is another than the earlier one at its place."""
    return any(earlier.get(key) != message.get(key) for key in ("role", "content"))


def _read_request(request: Mapping[str, Any], *, chat: bool) -> tuple[Any, int | None, tuple[str, ...]]:
    """Return (prompt or messages, most tokens, stop words) of a request. Raises `_AgentRequestRefused` if it cannot be
    read.
    """
    try:
        prompt: Any = [dict(message) for message in request["messages"]] if chat else request["prompt"]
        stop = request.get("stop") or ()
        words = (stop,) if isinstance(stop, str) else tuple(map(str, stop))
        most = request.get("max_tokens", request.get("max_completion_tokens"))
        most = None if most is None else int(most)
    except (KeyError, TypeError, ValueError) as error:
        raise _AgentRequestRefused(f"the request cannot be read: {type(error).__name__}: {error}") from None
    if not chat and not isinstance(prompt, str):
        raise _AgentRequestRefused("the prompt must be a text")
    return prompt, most, words


def _generate_agent_response(
    rollout: _AgentRollout, path: str, request: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    """Return the response to a request of OpenAI's completions or chat API. Raises `_AgentRequestRefused` if it is not
    served.
    """
    chat = path == "chat/completions"
    if not chat and path != "completions":
        raise _AgentRequestRefused(f"{path} is not served; completions and chat/completions are")
    if request.get("stream") or request.get("n", 1) != 1:
        raise _AgentRequestRefused("a rollout has one answer at a time, which is not streamed")
    prompt, most, words = _read_request(request, chat=chat)
    coroutine = (
        rollout.answer_messages(prompt, request.get("tools"), most, words)
        if chat
        else rollout.answer_prompt(prompt, most, words)
    )
    content, finished = asyncio.run_coroutine_threadsafe(coroutine, rollout.loop).result(seconds)
    choice = {"message": {"role": "assistant", "content": content}} if chat else {"text": content}
    return {
        "id": secrets.token_hex(8),
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, "finish_reason": "stop" if finished else "length", **choice}],
    }


def _agent_request_handler(rollouts: Mapping[str, _AgentRollout], seconds: float) -> type[BaseHTTPRequestHandler]:
    """Return the HTTP handler class that serves the requests of agents."""

    class Handler(BaseHTTPRequestHandler):
        """One request."""

        timeout = seconds

        def do_POST(self) -> None:
            """Answer a request; 404 for a rollout that has ended, 400 with the reason for one that is not served."""
            _, name, _, path = (self.path.split("/", 3) + ["", "", "", ""])[:4]
            length = int(self.headers.get("Content-Length") or 0)
            rollout = rollouts.get(name)
            if rollout is None or not 0 < length <= MOST_BYTES:
                self._reply(
                    404 if rollout is None else 413, {"error": {"message": "no such rollout, or too long a request"}}
                )
                return
            try:
                request = json.loads(self.rfile.read(length))
                self._reply(200, _generate_agent_response(rollout, path, dict(request), seconds))
            except (_AgentRequestRefused, ValueError, TypeError) as error:
                self._reply(400, {"error": {"message": str(error)}})
            except BaseException as error:  # noqa: BLE001 - the rollout failed, ended or is paused, which the agent has to know
                self._reply(503, {"error": {"message": f"the rollout cannot go on: {type(error).__name__} {error}"}})

        def _reply(self, status: int, body: Mapping[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return Handler
