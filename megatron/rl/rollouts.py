"""Rollouts: answers that the policy samples to problems, with what the engine knows of each token. All ranks call together.

The first rank plays the environments and submits requests; the engine decodes them together on all ranks (continuous batching); every rank
gets the finished rollouts. The ids that were sampled are the ids that are trained on: no text is tokenized again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.tokenizers.base import Tokenizer
from megatron.inference.engine import Engine
from megatron.inference.requests import Busy, Event, Reply, Request, Token
from megatron.inference.sampling import Sampling
from megatron.rl.environments.base import Environment, Problem

_TOGETHER = 64  # sequences decoded at once by each replica
_IDLE_SECONDS = 0.01  # between looks at environments that wait for something else than the engine
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """One rollout to play. group: index of its prompt among those of the step. seed: of its draws."""

    environment: Environment
    name: str
    number: int
    group: int
    seed: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished rollout.

    ids: all tokens, prompts included. sampled: for each, whether the policy sampled it. logprobs: of the sampled ones as the engine knows them,
    after temperature; 0.0 for all others. reward: NaN if the environment failed. finished: the last answer ended by itself.
    problem: why it failed.
    """

    name: str
    number: int
    group: int
    ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    logprobs: tuple[float, ...]
    reward: float
    finished: bool
    prompt: str = ""
    answer: str = ""
    problem: str = ""

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.sampled)


@dataclass(frozen=True, slots=True)
class Limits:
    """How rollouts are sampled. length: most tokens of a rollout; num_tokens: most tokens of one answer; seconds: of one rollout, 0 for no limit."""

    sampling: Sampling
    length: int
    num_tokens: int
    seconds: float = 0.0


class RolloutFailed(Exception):
    """The engine could not continue a text."""


@dataclass(slots=True)
class _Conversation:
    """The text of one rollout, and how the engine continues it. See `environments.base.Conversation`."""

    tokenizer: Tokenizer
    limits: Limits
    seed: int
    submit: Callable[[Request], asyncio.Future[Reply]]
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    is_finished: bool = False

    def add(self, text: str) -> None:
        """Append a text of the environment."""
        ids = self.tokenizer.tokenize(text)
        self.ids += ids
        self.sampled += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)

    async def generate(self, *, num_tokens: int | None = None, stop: tuple[str, ...] = ()) -> str:
        """Sample the next tokens and append them, with the token that ended them."""
        room = self.limits.length - len(self.ids)
        most = min(self.limits.num_tokens if num_tokens is None else num_tokens, room)
        if most < 1:
            self.is_finished = False
            return ""
        request = Request(
            tuple(self.ids),
            most,
            self.limits.sampling,
            seed=self.seed,
            first_draw=sum(self.sampled),
            stop_words=stop,
            keep_stop=True,
            logprobs=True,
            after_temperature=self.limits.sampling.temperature > 0,
        )
        reply = await self.submit(request)
        if reply.reason == "error":
            raise RolloutFailed(reply.problem)
        tokens: tuple[Token, ...] = reply.tokens if reply.end is None else (*reply.tokens, reply.end)
        self.ids += [token.id for token in tokens]
        self.sampled += [True] * len(tokens)
        self.logprobs += [token.logprob or 0.0 for token in tokens]
        self.texts.append(reply.text)
        self.is_finished = reply.reason == "stop"
        return reply.text


def play(stages: Sequence[GPTModel], tokenizer: Tokenizer, tasks: Sequence[Task], limits: Limits) -> list[Rollout]:
    """Play rollouts with the weights as they are; the same list on every rank. stages: this rank's, in evaluation mode.

    Environments that raise or exceed `limits.seconds` cost their rollout, whose reward is NaN.
    """
    mesh = stages[0].build.mesh
    each = max(1, min(_TOGETHER, -(-len(tasks) // mesh.dp.size)))
    config = InferenceConfig(inference_max_requests=each, inference_max_seq_length=limits.length)
    engine = Engine(stages, tokenizer, config)
    if not mesh.world.is_first:
        engine.follow()
        return collectives.broadcast_object(None, mesh.world)
    try:
        rollouts = asyncio.run(_play_all(engine, tokenizer, tasks, limits))
    finally:
        engine.close()
    return collectives.broadcast_object(rollouts, mesh.world)


async def _play_all(engine: Engine, tokenizer: Tokenizer, tasks: Sequence[Task], limits: Limits) -> list[Rollout]:
    """Play all rollouts at once, and step the engine while any of them waits for it."""
    loop = asyncio.get_running_loop()

    def submit(request: Request) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = loop.create_future()

        def listen(event: Event) -> None:
            if event.reply is not None and not future.done():
                future.set_result(event.reply)

        engine.submit(request, listen)
        return future

    semaphore = asyncio.Semaphore(engine.config.inference_max_requests * engine.mesh.dp.size)

    async def limited(task: Task) -> Rollout:
        async with semaphore:
            return await _play_one(task, _Conversation(tokenizer, limits, task.seed, submit), limits.seconds)

    playing = [asyncio.ensure_future(limited(task)) for task in tasks]
    beat = time.monotonic()
    while not all(task.done() for task in playing):
        await asyncio.sleep(0)
        if engine.step():
            continue
        if time.monotonic() - beat > 1.0:
            engine.heartbeat()
            beat = time.monotonic()
        await asyncio.sleep(0 if not engine.idle else _IDLE_SECONDS)
    return [task.result() for task in playing]


async def _play_one(task: Task, conversation: _Conversation, seconds: float) -> Rollout:
    """Play one rollout; what goes wrong in it is told in it."""
    problem, reward, trouble = Problem(""), float("nan"), ""
    try:
        problem = task.environment.problem(task.number)
        reward = float(await asyncio.wait_for(task.environment.play(problem, conversation), seconds or None))
    except TimeoutError:
        trouble = f"the environment took longer than {seconds:g} s"
    except Busy as busy:
        trouble = str(busy)
    except Exception as error:  # of the user's code
        trouble = f"{type(error).__name__}: {error}"
    if trouble:
        _LOG.warning("rollout of problem %d of %s failed: %s", task.number, task.name, trouble)
    return Rollout(
        task.name,
        task.number,
        task.group,
        tuple(conversation.ids),
        tuple(conversation.sampled),
        tuple(conversation.logprobs),
        reward,
        conversation.is_finished,
        problem.prompt,
        "\n".join(conversation.texts),
        trouble,
    )
