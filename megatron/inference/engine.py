"""Requests decoded together: which go into each step, where they are stored, and what becomes of them.

    submit -> waiting -> running: prompt read in pieces -> a token a step -> reply
                 ^            |
                 +------------+  when blocks run short, who came last waits again, and is read anew with what it said

Each step is one forward pass of the network over the next tokens of all running requests: of those that decode one each (with
a draft's guesses more), and of prompts as many as the step has room for. A request's tokens do not depend on what else is in
the step. `submit` and `cancel` may be called from any thread, everything else from one.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

from megatron.core.config.flags import ConfigError, refuse
from megatron.core.config.inference import InferenceConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.tokenizers.base import Tokenizer
from megatron.inference.blocks import Blocks
from megatron.inference.cache import bytes_per_token
from megatron.inference.crew import Crew, Found, Network, Order, Row, stored
from megatron.inference import graphs
from megatron.inference.requests import Busy, Event, Listener, Metrics, Reason, Reply, Request
from megatron.inference.running import Running
from megatron.inference.speculative import Draft, Heads

_MOST_BYTES = 4 * 10**9  # of the cache, unless another size is asked for
_SCORED = 256  # places of prompts that a step asks for log-probabilities, so that logits stay small
_RECORDINGS = 16  # shapes of a step
_RATE_SECONDS = 10.0


class Engine:
    """Continuous batching over the stages of a network.

    stages: this rank's, in evaluation mode. draft: stages of a smaller network with the same vocabulary and layout, which guesses;
    without, the network's own layers of multi-token prediction do. The first rank of the mesh submits and steps; all others call
    `follow`. Raises `ConfigError` for settings that do not fit together.
    """

    def __init__(self, stages: Sequence[GPTModel], tokenizer: Tokenizer, config: InferenceConfig = InferenceConfig(), *,
                 draft: Sequence[GPTModel] = ()) -> None:
        build = stages[0].build
        self.model, self.mesh, self.config, self.tokenizer = build.model, build.mesh, config, tokenizer
        refuse([*config.problems(), *_problems(stages, config, draft)])
        size = config.inference_dynamic_batching_block_size
        positions = self.model.max_position_embeddings
        self.max_length = min(config.inference_max_seq_length or positions, positions)
        parts = [(stages, 0 if draft else config.num_speculative_tokens), *([(draft, 0)] if draft else [])]
        count = _block_count(parts, config, self.max_length)
        networks = [Network(part, blocks=count, block_size=size, depths=depths, recordings=_recordings(part, config)) for part, depths in parts]
        self.crew = Crew(networks)
        self.copies = [Blocks(count, size, sharing=config.inference_dynamic_batching_prefix_caching) for _ in range(self.mesh.dp.size)]
        self._bytes = networks[0].bytes_per_token
        self._tickets = itertools.count()
        self._inbox: deque[Running] = deque()
        self._cancelled: deque[int] = deque()
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._counts: Counter[str] = Counter()
        # All keys from the start: other threads read it.
        self._finished: dict[str, int] = dict.fromkeys(get_args(Reason), 0)
        self._pace = Pace()
        self._after = _line_end(tokenizer)
        guesser = Draft if draft else Heads if config.num_speculative_tokens else None
        self._draft = guesser and guesser(self.crew, config.num_speculative_tokens, self._after)

    def submit(self, request: Request, listener: Listener) -> int:
        """Ask for a continuation; the number of the request. listener: hears of it, in the thread that steps.

        Raises `ConfigError` for what can never be served, and `Busy` when too many wait.
        """
        refuse(self._refusals(request))
        if len(self._inbox) + len(self._waiting) >= self.config.inference_max_waiting_requests + self.config.inference_max_requests:
            raise Busy(f"{len(self._inbox) + len(self._waiting)} requests wait already; ask again later")
        ticket = next(self._tickets)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        end = () if request.ignore_eod else (self.tokenizer.eod,)
        self._inbox.append(Running(ticket, replace(request, seed=seed), listener, self.tokenizer, ends={*request.stop_ids, *end}))
        return ticket

    def cancel(self, ticket: int) -> None:
        """Let a request go; its listener hears a last event. A request that is not there any more is none of our business."""
        self._cancelled.append(ticket)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._inbox or self._waiting or self._running or self._cancelled)

    def step(self) -> bool:
        """One forward pass for all that can take part; False when there was nothing to do."""
        self._take_in()
        chosen = self._schedule()
        if not any(chosen):
            return False
        if self._draft is not None:
            self._counts["proposed_tokens"] += self._draft.propose(chosen)
        rows = tuple(tuple(one.row(count, self._after) for one, count in shares) for shares in chosen)
        found = self.crew.run(Order(0, rows))
        self._counts["steps"] += 1
        for blocks, *copy in zip(self.copies, chosen, rows, found, strict=True):
            for (one, _), row, what in zip(*copy, strict=True):
                self._digest(one, row, what, blocks)
        for one in (one for shares in chosen for one, _ in shares):
            one.tell()
        return True

    def run(self, requests: Iterable[Request]) -> list[Reply]:
        """Answer requests, in their order, in this thread. What the engine holds besides goes on meanwhile."""
        replies: dict[int, Reply] = {}

        def keep(event: Event) -> None:
            if event.reply is not None:
                replies[event.ticket] = event.reply

        left, tickets = deque(requests), []
        while left or any(ticket not in replies for ticket in tickets):
            while left:
                try:
                    tickets.append(self.submit(left[0], keep))
                except Busy:
                    break
                left.popleft()
            self.step()
        return [replies[ticket] for ticket in tickets]

    def follow(self) -> None:
        """On every rank but the first: take part in steps until the first closes."""
        self.crew.follow()

    def beat(self) -> None:
        """To be called now and then while nothing is asked: other ranks wait only so long for a word."""
        self.crew.beat()

    def close(self) -> None:
        """Give up all that is still asked, and let the other ranks go."""
        self._take_in()
        self._cancel([*self._waiting, *self._running])
        self.crew.dismiss()

    def fail(self, problem: str) -> None:
        """Answer all that is asked with an error, as when a rank is gone. The engine cannot be used after."""
        self._waiting += self._inbox
        self._inbox.clear()
        for one in [*self._waiting, *self._running]:
            one.end("error", problem)
            one.tell()
            self._finished["error"] += 1
        self._waiting.clear()
        self._running.clear()

    def forget_beginnings(self) -> None:
        """No text shares what was stored before, as when the weights have changed."""
        for blocks in self.copies:
            blocks.forget_all()

    def metrics(self) -> Metrics:
        """Where the engine stands. May be called from any thread."""
        capacity, available, kept = (sum(getattr(blocks, name) for blocks in self.copies) for name in ("capacity", "available", "kept"))
        return Metrics(waiting=len(self._inbox) + len(self._waiting), running=len(self._running), blocks=capacity,
                       blocks_used=capacity - available, blocks_kept=kept, bytes_per_token=self._bytes, finished=dict(self._finished),
                       tokens_per_second=self._pace.now(),
                       **{name: self._counts[name] for name in ("requests", "steps", "prompt_tokens", "cached_tokens", "generated_tokens",
                                                                "preempted", "proposed_tokens", "accepted_tokens")})

    def _refusals(self, request: Request) -> list[str]:
        total = len(request.prompt) + request.num_tokens
        size = self.model.true_vocab_size
        bad = [token for token in (*request.prompt, *request.stop_ids) if not 0 <= token < size]
        room = self.config.inference_dynamic_batching_max_tokens - self.config.inference_max_requests
        capacity = self.copies[0].capacity * self.copies[0].size
        # The last token is never read, so that it needs neither a position nor a place in the cache.
        return [said for broken, said in (
            (total - (request.num_tokens > 0) > self.max_length, f"a prompt of {len(request.prompt)} tokens and {request.num_tokens} new "
             f"ones are more than the {self.max_length} positions; shorten the prompt or ask for fewer"),
            (bad, f"{bad[:3]} are no ids of the network's {size}"),
            (total > capacity, f"{total} tokens are more than the cache's {capacity}; raise --inference-dynamic-batching-buffer-size-gb"),
            (not self.config.enable_chunked_prefill and len(request.prompt) > room, f"a prompt of {len(request.prompt)} tokens does not fit "
             f"into one pass with --no-enable-chunked-prefill; raise --inference-dynamic-batching-max-tokens"),
        ) if broken]

    def _take_in(self) -> None:
        """Submissions and cancellations that came since the last step."""
        while self._inbox:
            self._waiting.append(self._inbox.popleft())
            self._counts["requests"] += 1
        gone = {self._cancelled.popleft() for _ in range(len(self._cancelled))}
        if gone:
            self._cancel([one for one in (*self._waiting, *self._running) if one.ticket in gone])

    def _cancel(self, those: Sequence[Running]) -> None:
        """Let requests go."""
        for one in those:
            one.end("cancelled")
            self._leave(one)
            one.tell()
        self._waiting = deque(one for one in self._waiting if one.reason is None)

    def _schedule(self) -> list[list[tuple[Running, int]]]:
        """For each copy of the network, who takes part in the next step and with how many tokens."""
        budget = [self.config.inference_dynamic_batching_max_tokens] * len(self.copies)
        scored = [_SCORED] * len(self.copies)
        chosen: list[list[tuple[Running, int]]] = [[] for _ in self.copies]
        for one in sorted(self._running, key=lambda one: (one.left > 1, one.ticket)):  # who decodes goes first
            if one in self._running:  # and was not asked to wait again for one before
                self._share(one, budget, scored, chosen)
        while self._waiting and len(self._running) < self.config.inference_max_requests * len(self.copies):
            one = self._waiting[0]
            copy = max(range(len(self.copies)), key=lambda copy: (budget[copy] > 0, -self._load(copy)))
            if self._load(copy) >= self.config.inference_max_requests or not self._admit(one, copy, budget[copy]):
                break
            self._waiting.popleft()
            self._running.append(one)
            self._share(one, budget, scored, chosen)
            if one not in self._running:  # it waits again at once: there is no room now
                break
        return chosen

    def _load(self, copy: int) -> int:
        return sum(one.copy == copy for one in self._running)

    def _admit(self, one: Running, copy: int, budget: int) -> bool:
        """Give a waiting request the beginning of its text that is stored already, if there is room for all of it."""
        blocks = self.copies[copy]
        beginning = [] if one.request.prompt_logprobs else blocks.beginning(one.ids)
        # One block more for each that runs here, so that a new one does not push out an old one at once.
        needed = blocks.needed(len(one.ids) + 1) - len(beginning) + self._load(copy)
        left = len(one.ids) - len(beginning) * blocks.size
        whole = self.config.enable_chunked_prefill or left <= budget
        # Alone it always gets in, since what could never fit was refused: else it might wait for ever.
        if self._load(copy) and (budget < 1 or not whole or needed > blocks.available):
            blocks.give_back(beginning)
            return False
        one.admit(copy, beginning, blocks)
        self._counts["cached_tokens"] += one.computed
        return True

    def _share(self, one: Running, budget: list[int], scored: list[int], chosen: list[list[tuple[Running, int]]]) -> None:
        """Put a request into the step with as many tokens as there is room for."""
        count = min(one.left, budget[one.copy])
        if one.scores_prompt:
            count = min(count, scored[one.copy])
        guesses = one.room(self.config.num_speculative_tokens)
        if count < 1 or not self._store(one, one.computed + count + guesses, chosen[one.copy]):
            return
        budget[one.copy] -= count + guesses
        scored[one.copy] -= count * one.scores_prompt
        chosen[one.copy].append((one, count))

    def _store(self, one: Running, tokens: int, chosen: list[tuple[Running, int]]) -> bool:
        """Blocks for so many tokens; who came last makes room if there are none, which may be the request itself."""
        blocks = self.copies[one.copy]
        while len(one.blocks) < blocks.needed(tokens):
            if blocks.available:
                one.grow(blocks)
                continue
            last = max((other for other in self._running if other.copy == one.copy), key=lambda other: other.ticket)
            self._counts["preempted"] += 1
            self._running.remove(last)
            chosen[:] = [share for share in chosen if share[0] is not last]
            last.wait_again(blocks)
            self._waiting.appendleft(last)
            if last is one:
                return False
        return True

    def _digest(self, one: Running, row: Row, found: Found, blocks: Blocks) -> None:
        """What a step found for a request."""
        guesses, read = len(one.drafts), len(row.ids) - len(one.drafts)
        made = one.take(row, found, time.monotonic())
        self._counts["accepted_tokens"] += max(0, made - 1) if guesses else 0
        self._counts["generated_tokens"] += made
        self._counts["prompt_tokens"] += read if row.start < len(one.request.prompt) else 0
        self._pace.add(made)
        if one.reason != "error":
            one.publish(blocks, one.computed if self._draft is None else one.drafted)
        if one.reason is not None:
            self._leave(one)

    def _leave(self, one: Running) -> None:
        """A request that has ended lets its blocks go."""
        if one in self._running:
            self._running.remove(one)
            one.let_go(self.copies[one.copy])
        assert one.reason is not None, "who leaves has ended"
        self._finished[one.reason] += 1


class Pace:
    """Tokens a second, of which those of the last seconds count most."""

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()
        self._rate = 0.0

    def add(self, count: int) -> None:
        """So many tokens have been made."""
        now = time.monotonic()
        self._rate = self._rate * math.exp((self._last - now) / _RATE_SECONDS) + count / _RATE_SECONDS
        self._last = now

    def now(self) -> float:
        """The rate at this moment."""
        now = time.monotonic()
        seen = 1.0 - math.exp((self._begun - now) / _RATE_SECONDS)  # of the time that counts, how much there has been
        return self._rate * math.exp((self._last - now) / _RATE_SECONDS) / seen if seen > 0.0 else 0.0


def _problems(stages: Sequence[GPTModel], config: InferenceConfig, draft: Sequence[GPTModel]) -> list[str]:
    build = stages[0].build
    found = []
    if build.mesh.cp.size > 1:
        found.append("text is generated without --context-parallel-size; leave it out, since sequences are not cut then")
    if build.model.rope.position_embedding_type == "relative":
        found.append("text is not generated with --position-embedding-type relative")
    guesses, depths = config.num_speculative_tokens, build.model.mtp.mtp_num_layers or 0
    if draft and not guesses or guesses and not (draft or depths):
        found.append("--num-speculative-tokens needs a draft model or multi-token prediction, and a draft model needs "
                     "--num-speculative-tokens")
    elif not draft and guesses > depths:
        found.append(f"--num-speculative-tokens {guesses} is more than the network's {depths} layers of multi-token prediction guess; "
                     f"give {depths} or fewer, or a draft")
    if guesses and not draft and build.region.sequence_parallel:
        found.append("multi-token prediction guesses without --sequence-parallel; leave it out")
    if draft and draft[0].build.model.true_vocab_size != build.model.true_vocab_size:
        found.append(f"the draft knows {draft[0].build.model.true_vocab_size} ids and the network {build.model.true_vocab_size}; give a draft "
                     "with the same tokenizer")
    asked = config.inference_dynamic_batching_num_cuda_graphs
    if asked and (reason := graphs.unfit(stages)):
        found.append(f"--inference-dynamic-batching-num-cuda-graphs {asked} cannot be had: {reason}; leave it out")
    longest = config.inference_max_seq_length or build.model.max_position_embeddings
    if draft and draft[0].build.model.max_position_embeddings < longest:
        found.append(f"the draft has {draft[0].build.model.max_position_embeddings} positions, fewer than the {longest} of a text; give "
                     f"--inference-max-seq-length {draft[0].build.model.max_position_embeddings} or another draft")
    return found


def _recordings(stages: Sequence[GPTModel], config: InferenceConfig) -> int:
    """Shapes of a step that are kept recorded: those asked for, or a few where that is possible."""
    asked = config.inference_dynamic_batching_num_cuda_graphs
    return asked if asked is not None else 0 if graphs.unfit(stages) else _RECORDINGS


def _block_count(parts: Sequence[tuple[Sequence[GPTModel], int]], config: InferenceConfig, max_length: int) -> int:
    """Blocks of the cache, with the first, which is nobody's; the same number on every rank. parts: (stages, depths that guess)."""
    size = config.inference_dynamic_batching_block_size
    mine = 0
    for stages, depths in parts:
        build, (plans, states) = stages[0].build, stored(stages, depths)
        mine += bytes_per_token(build.model, plans, build.mesh.tp.size, build.dtype, states=states)
    each = max(collectives.gather_objects(mine, build.mesh.world))
    longest = -(-(max_length + config.num_speculative_tokens) // size)
    wanted = config.inference_max_requests * longest
    given = config.inference_dynamic_batching_buffer_size_gb
    room = int((given * 10**9 if given else _MOST_BYTES) // (each * size))
    count = room if given else min(room, wanted)
    if count < longest and given:
        raise ConfigError(f"--inference-dynamic-batching-buffer-size-gb {given} holds {count * size} tokens, fewer than one text of "
                          f"{max_length}; give {longest * size * each / 10**9:.3g} or more, or a shorter --inference-max-seq-length")
    return max(count, longest) + 1


def _line_end(tokenizer: Tokenizer) -> tuple[tuple[int, int], ...]:
    """(colon, newline) if the tokenizer writes each as one id."""
    try:
        colon, newline = tokenizer.tokenize(":"), tokenizer.tokenize("\n")
    except ValueError:  # its texts are not words
        return ()
    return ((colon[0], newline[0]),) if len(colon) == len(newline) == 1 else ()
