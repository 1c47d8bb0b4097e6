"""Rollouts: answers that the policy samples to problems, with what the engine knows of each token. All ranks call together.

The first rank plays the environments and submits requests; the engine decodes them together on all ranks (continuous batching); every rank
gets the rollouts. The ids that were sampled are the ids that are trained on: no text is tokenized again.

A rollout can be paused while it is sampled, and go on with later weights (partial rollouts). What it has said so far is a `Draft`; its environment
is played again from the beginning, where `generate` gives the answers of the draft, and then goes on where the last of them ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.tokenizers.base import Tokenizer
from megatron.inference.engine import Engine
from megatron.inference.generate import decode_following
from megatron.inference.requests import (
    EngineBusyError,
    GenerationEvent,
    GenerationReply,
    GenerationRequest,
    TokenLogprob,
)
from megatron.inference.sampling import SamplingParams
from megatron.rl.environments.base import Environment
from megatron.rl.environments.threads import run_in_thread, run_leaving_strays
from megatron.rl.prompt_encoding import AnswerEnd, ChatPrompts, Message, chat_prompts, text_prompt_ids

_TOGETHER = 64  # sequences decoded at once by each replica
_IDLE_SECONDS = 0.01  # between looks at environments that wait for something else than the engine
_LARGEST_REWARD = 1e30  # sums and squares of larger ones would be infinite
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutAnswer:
    """One answer of a rollout. versions: iteration of the weights that sampled each id. text: of a whole answer only.

    ended: it ended by itself. whole: nothing of it is missing. routes: as in `Rollout`, since the answer before.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str = ""
    ended: bool = False
    whole: bool = True
    routes: tuple[tuple[int, ...], ...] = ()


Draft = tuple[RolloutAnswer, ...]  # what a rollout that is not finished has said so far


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """One rollout to play. number: of the problem. group: index of its prompt in the round. seed: of sampling.
    draft: what was sampled before it was paused. prompt_format: see `environments.config.EnvironmentWithWeight`.
    """

    environment: Environment
    name: str
    number: int
    group: int
    seed: int
    draft: Draft = ()
    prompt_format: str | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished rollout.

    ids: all tokens, prompts included. sampled: for each, whether the policy sampled it. logprobs: of the sampled ones as the engine knows them,
    after temperature; 0.0 for all others. reward: NaN if the environment failed. finished: the last answer ended by itself.
    problem: why it failed. versions: after how many iterations the weights were that sampled each token, -1 for the others.
    routes: with routing replay, the experts of all layers that each id but the last used, [tokens - 1, layers * k].
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
    versions: tuple[int, ...] = ()
    routes: tuple[tuple[int, ...], ...] = ()

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.sampled)


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """How rollouts are sampled. length: most tokens of a rollout; num_tokens: most tokens of one answer; seconds: of one rollout, 0 for no limit.

    together: most rollouts that are played at once; None: as many as the engine decodes together.
    """

    sampling: SamplingParams
    length: int
    num_tokens: int
    seconds: float = 0.0
    together: int | None = None


@dataclass(slots=True)
class RolloutTimes:
    """Seconds that rollouts took: generating; waiting, when nothing could be generated because environments were at work."""

    generating: float = 0.0
    waiting: float = 0.0


class RolloutFailed(Exception):
    """The engine could not continue a text."""


class _RolloutPaused(BaseException):
    """Raised in a paused rollout, which goes on later. No `Exception`, which environments may catch."""


@dataclass(slots=True)
class _RolloutConversation:
    """The text of one rollout, and how the engine continues it. See `environments.base.Conversation`.

    known: answers of the draft that are still to be given; answers: given so far. version: of the weights. prompt: what came before the first answer.
    prompt_format: chat template that writes what is added, None for none. messages, tools: of a rollout by a chat template.
    """

    tokenizer: Tokenizer
    limits: RolloutLimits
    seed: int
    version: int
    submit: Callable[[GenerationRequest], asyncio.Future[GenerationReply]]
    known: list[RolloutAnswer]
    prompt_format: str | None = None
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    answers: list[RolloutAnswer] = field(default_factory=list)
    routes: list[tuple[int, ...]] = field(default_factory=list)
    is_finished: bool = False
    is_paused: bool = False
    prompt: str = ""
    messages: list[Message] = field(default_factory=list)
    tools: Any = None
    _text: str = ""  # added since the last answer
    _num_answered: int = 0  # ids up to the end of the last answer
    _answer: int = 0  # its number among the messages

    def add(self, text: str, *, role: str = "user") -> None:
        """Append a text of the environment; with a prompt format, a message of this role."""
        if self.prompt_format is not None:
            self.add_messages([{"role": role, "content": text}])
            return
        if self.messages or role != "user":
            raise ValueError(
                "a message with a role is written by a chat template; give the environment a prompt_format"
            )
        self._text += text
        self.prompt += "" if self.answers else text
        answer = self.answers[-1] if self.answers else None
        after = None if answer is None else "" if self._end_of(answer).token is not None else answer.text
        self._set_ids_since_answer(text_prompt_ids(self.tokenizer, self._text, answer=after))

    def add_messages(self, messages: Sequence[Message], tools: Any = None) -> None:
        """Append messages, written by the chat template of the prompt format, or else of the tokenizer."""
        if self._text or self.prompt and not self.messages:
            raise ValueError("a rollout is of text or of messages, and this one has begun with text")
        if self.messages and tools != self.tools:
            raise ValueError("tools are named with the first message of a rollout")
        self.messages += messages
        self.tools = tools
        if self.answers:
            end = self._end_of(self.answers[-1])
            ids = self._chat.ids_after_answer(self.messages, self._answer, end, tools)
        else:
            ids, self.prompt = self._chat.prompt_ids_and_text(self.messages, tools)
        self._set_ids_since_answer(ids)

    @property
    def _chat(self) -> ChatPrompts:
        return chat_prompts(self.tokenizer, self.prompt_format)  # type: ignore[arg-type]  # mypy: a Protocol has no hash

    def _end_of(self, answer: RolloutAnswer) -> AnswerEnd:
        """Return how an answer ended."""
        last = answer.ids[-1] if answer.ids else None
        ends = {
            *self.tokenizer.special_ids,
            self.tokenizer.eod,
            *self.tokenizer.end_ids,
            *(self._chat.stop_ids if self.messages else ()),
        }
        if last in ends:
            return AnswerEnd(token=last)
        words = self._chat.stop_words if self.messages and answer.ended else ()
        return AnswerEnd(word=next(filter(answer.text.endswith, words), ""))

    def _set_ids_since_answer(self, ids: Sequence[int]) -> None:
        """Set all that follows the last answer to these ids, which are not learnt."""
        begin = self._num_answered
        self.ids[begin:] = ids
        self.sampled[begin:] = [False] * len(ids)
        self.logprobs[begin:] = [0.0] * len(ids)
        self.versions[begin:] = [-1] * len(ids)

    async def generate(self, *, num_tokens: int | None = None, stop: tuple[str, ...] = ()) -> str:
        """Sample the next tokens and append them, with the token that ended them."""
        stop = (stop,) if isinstance(stop, str) else stop
        room = self.limits.length - len(self.ids)
        most = min(self.limits.num_tokens if num_tokens is None else operator.index(num_tokens), room)
        if most < 1:
            self.is_finished = False
            return ""
        begun = self.known[0] if self.known else RolloutAnswer((), (), (), whole=False)
        answer = begun if begun.whole else await self._continue_unfinished_answer(begun, most, stop)
        del self.known[:1]
        self.answers.append(answer)
        self.ids += answer.ids
        self.sampled += [True] * len(answer.ids)
        self.logprobs += answer.logprobs
        self.versions += answer.versions
        self.routes += answer.routes
        self._text, self._num_answered = "", len(self.ids)
        if not answer.whole:
            raise _RolloutPaused
        self.is_finished = answer.ended
        if not self.messages:
            return answer.text
        content = answer.text.removesuffix(self._end_of(answer).word)
        self._answer = len(self.messages)
        self.messages.append({"role": "assistant", "content": content})
        return content

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function that may take long; in a thread of its own if rollouts have a time limit."""
        return await run_in_thread(function, *args) if self.limits.seconds else function(*args)

    async def _continue_unfinished_answer(
        self, begun: RolloutAnswer, most: int, stop: tuple[str, ...]
    ) -> RolloutAnswer:
        """Continue an answer by the engine until it ends or is paused.

        With stop words it is sampled again from its beginning, since a stop word may have begun before the pause.
        """
        ids = self._chat.stop_ids if self.messages else ()
        stop = (*stop, *self._chat.stop_words) if self.messages else stop
        if stop:
            begun = RolloutAnswer((), (), (), whole=False)
        request = GenerationRequest(
            (*self.ids, *begun.ids),
            most - len(begun.ids),
            self.limits.sampling,
            seed=self.seed,
            first_draw=sum(self.sampled) + len(begun.ids),
            stop_ids=ids,
            stop_words=stop,
            keep_stop=True,
            logprobs=True,
            after_temperature=self.limits.sampling.temperature > 0,
        )
        reply = await self.submit(request)
        if reply.reason == "error":
            raise RolloutFailed(reply.problem)
        tokens: tuple[TokenLogprob, ...] = reply.tokens if reply.end is None else (*reply.tokens, reply.end)
        all_ids = (*begun.ids, *(token.id for token in tokens))
        text = decode_following(self.tokenizer, self.ids, [*begun.ids, *reply.ids]) if begun.ids else reply.text
        return RolloutAnswer(
            all_ids,
            (*begun.logprobs, *(token.logprob or 0.0 for token in tokens)),
            (*begun.versions, *(self.version for _ in tokens)),
            text,
            ended=reply.reason == "stop",
            whole=reply.reason != "cancelled",
            routes=(*begun.routes, *reply.routes[len(self.routes) + len(begun.routes) :]),
        )


def play_rollouts(
    stages: Sequence[GPTModel],
    tokenizer: Tokenizer,
    tasks: Sequence[RolloutTask],
    limits: RolloutLimits,
    *,
    version: int = 0,
    until: int | None = None,
    records_routes: bool = False,
    engine: Engine | None = None,
) -> tuple[list[Rollout | Draft], RolloutTimes]:
    """Play rollouts with the weights as they are; return the rollouts, or drafts of paused ones, and times, on every
    rank. Collective.

    stages: this rank's, in evaluation mode. version: iteration of these weights. until: only the first so many must
    end; then the others are paused. records_routes: note the experts of each token. An environment that raises or
    exceeds `limits.seconds` costs its rollout, whose reward is NaN. engine: of `build_rollout_engine`, paused before
    and after; None: one for this call.
    """
    mesh, lasting = stages[0].build.mesh, engine is not None
    engine = engine or build_rollout_engine(stages, tokenizer, len(tasks), limits, records_routes=records_routes)
    if not mesh.world.is_first:
        engine.run_as_follower()
        return collectives.broadcast_object(None, mesh.world)
    times = RolloutTimes()
    engine.resume()
    try:
        results = run_leaving_strays(_play_all_rollouts(engine, tokenizer, tasks, limits, version, until, times))
    finally:
        if lasting:
            engine.pause()
        engine.close()  # of the other ranks' `follow`; a new call opens it again
    return collectives.broadcast_object((results, times), mesh.world)


def build_rollout_engine(
    stages: Sequence[GPTModel],
    tokenizer: Tokenizer,
    rollouts: int,
    limits: RolloutLimits,
    *,
    records_routes: bool = False,
) -> Engine:
    """Build an engine that decodes up to `rollouts` rollouts at once. Collective."""
    each = max(1, min(_TOGETHER, -(-rollouts // stages[0].build.mesh.dp.size)))
    config = InferenceConfig(inference_max_requests=each, inference_max_seq_length=limits.length)
    return Engine(stages, tokenizer, config, records_routes=records_routes)


async def _play_all_rollouts(
    engine: Engine,
    tokenizer: Tokenizer,
    tasks: Sequence[RolloutTask],
    limits: RolloutLimits,
    version: int,
    until: int | None,
    times: RolloutTimes,
) -> list[Rollout | Draft]:
    """Play all rollouts at once, stepping the engine; return rollouts, and drafts of those that were paused."""
    loop = asyncio.get_running_loop()

    def submit(request: GenerationRequest) -> asyncio.Future[GenerationReply]:
        future: asyncio.Future[GenerationReply] = loop.create_future()

        def resolve_future(event: GenerationEvent) -> None:
            if event.reply is not None and not future.done():
                future.set_result(event.reply)

        engine.submit(request, resolve_future)
        return future

    together = engine.config.inference_max_requests * engine.mesh.dp.size
    semaphore = asyncio.Semaphore(min(together, limits.together or together))

    conversations = [
        _RolloutConversation(tokenizer, limits, task.seed, version, submit, list(task.draft), task.prompt_format)
        for task in tasks
    ]

    async def play_when_slot_free(task: RolloutTask, conversation: _RolloutConversation) -> Rollout | Draft:
        try:
            async with semaphore:
                return await _play_one_rollout(task, conversation, limits.seconds)
        except (_RolloutPaused, asyncio.CancelledError):
            return (*conversation.answers, *conversation.known)

    playing = [asyncio.ensure_future(play_when_slot_free(*both)) for both in zip(tasks, conversations, strict=True)]
    first = playing[:until]
    beat = since = time.monotonic()
    try:
        while not all(task.done() for task in first):
            await asyncio.sleep(0)
            stepped = engine.step()
            if not stepped:
                if time.monotonic() - beat > 1.0:
                    engine.heartbeat()
                    beat = time.monotonic()
                await asyncio.sleep(0 if not engine.is_idle else _IDLE_SECONDS)
            now = time.monotonic()
            times.generating += (now - since) * stepped
            times.waiting += (now - since) * (not stepped)
            since = now
    finally:  # what is cancelled from now on is not the environments' doing
        for conversation in conversations:
            conversation.is_paused = True
    await _pause_unfinished(engine, playing)
    return [task.result() for task in playing]


async def _pause_unfinished(engine: Engine, playing: Sequence[asyncio.Task[Any]]) -> None:
    """Pause unfinished rollouts: cancel what the engine generates, then the environments where they wait."""
    engine.cancel_all()
    for _ in itertools.takewhile(lambda _: not all(task.done() for task in playing), range(10)):
        await asyncio.sleep(0)
    for task in playing:
        task.cancel()
    await asyncio.gather(*playing)


async def _play_one_rollout(task: RolloutTask, conversation: _RolloutConversation, seconds: float) -> Rollout:
    """Play one rollout; errors and time-outs of its environment are stored in it."""
    if not seconds:
        outcome = await _play_environment(task, conversation)
    else:
        playing = asyncio.ensure_future(_play_environment(task, conversation))
        try:
            await asyncio.wait({playing}, timeout=seconds)
        finally:  # the time is over, or the rollout is paused
            playing.cancel()
        late = _Outcome(trouble=f"the environment took longer than {seconds:g} s")
        outcome = playing.result() if playing.done() else late
    if outcome.trouble:
        _LOG.warning("rollout of problem %d of %s failed: %s", task.number, task.name, _encodable(outcome.trouble))
    return Rollout(
        task.name,
        task.number,
        task.group,
        tuple(conversation.ids),
        tuple(conversation.sampled),
        tuple(conversation.logprobs),
        outcome.reward,
        conversation.is_finished,
        _encodable(outcome.prompt or conversation.prompt),
        _encodable("\n".join(answer.text for answer in conversation.answers)),
        _encodable(outcome.trouble),
        tuple(conversation.versions),
        tuple(conversation.routes),
    )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What an environment made of a rollout. prompt: of its problem. trouble: why there is no reward."""

    prompt: str = ""
    reward: float = math.nan
    trouble: str = ""


async def _play_environment(task: RolloutTask, conversation: _RolloutConversation) -> _Outcome:
    """Play a rollout with its environment. Whatever that raises is the outcome, as no task may see it."""
    prompt = ""
    try:
        problem = await conversation.call(task.environment.problem, task.number)
        prompt = str(problem.prompt)
        reward = float(await task.environment.play(problem, conversation))
    except (_RolloutPaused, KeyboardInterrupt):
        raise
    except EngineBusyError as busy:
        return _Outcome(prompt, trouble=str(busy))
    except BaseException as error:  # noqa: BLE001 - of the user's code, which may exit or cancel something of its own
        if conversation.is_paused and isinstance(error, asyncio.CancelledError):
            raise
        return _Outcome(prompt, trouble=_error_text(error))
    if not abs(reward) <= _LARGEST_REWARD:
        return _Outcome(prompt, trouble=f"the environment gave a reward of {reward}")
    return _Outcome(prompt, reward)


def _error_text(error: BaseException) -> str:
    """Return kind and text of an error of the user's code, whose text may raise one of its own."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - as above
        return type(error).__name__


def _encodable(text: str) -> str:
    """Return a text that can be written to files: half of a surrogate pair becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")
