"""Continuous batching: schedules requests into steps, allocates their KV cache, and returns their tokens.

    submit -> waiting -> running: chunked prefill -> decoding, a token a step -> reply
                 ^            |
                 +------------+  preempted when blocks run short, last come first; its tokens are recomputed later

Each step is one forward pass over the next tokens of all running requests: one of each that decodes (plus its draft
tokens), and as many prompt tokens as the step has room for. A request's tokens do not depend on what else is in
the step. `submit` and `cancel` may be called from any thread, everything else from one.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from megatron.core.config.flags.declare import raise_config_error_if
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel.device import has_separate_memory
from megatron.core.tokenizers.base import Tokenizer
from megatron.inference import engine_setup
from megatron.inference.block_allocator import BlockAllocator
from megatron.inference.expert_choice_recorder import ExpertChoiceRecorder
from megatron.inference.image_prompts import ImagePromptWriter
from megatron.inference.model_runner import CachedNetwork, LaunchedStep, ModelRunner
from megatron.inference.recurrent_states import (
    RecurrentStateDtypes,
    StatePool,
    StateSlotAllocator,
    StateSlotsOfSequence,
    num_recurrent_state_slots,
    recurrent_state_bytes,
)
from megatron.inference.requests import (
    EngineBusyError,
    EngineMetrics,
    GenerationEvent,
    GenerationReply,
    GenerationRequest,
    Listener,
    Reason,
    TokenRateMeter,
)
from megatron.inference.sequence import SequenceState
from megatron.inference.served_adapters import ServedAdapters
from megatron.inference.speculative import DraftNetwork, MTPDraft
from megatron.inference.step_input import SequenceInput, SequenceStepOutput, StepInput

_SCORED = 256  # most prompt positions per step with log-probabilities, which bounds the logits


class Engine:
    """Continuous batching over the stages of a network. stages: this rank's, in evaluation mode. draft: stages of a
    smaller network with the same vocabulary and layout, for speculative decoding; without it the network's multi-token
    prediction layers propose. records_routes: replies contain the experts of each token; then prefixes are not shared
    and no CUDA graphs are used. The first rank of the mesh submits and steps; all others call `run_as_follower`. Raises
    `ConfigError` for settings that do not fit together.
    """

    def __init__(
        self,
        stages: Sequence[GPTModel],
        tokenizer: Tokenizer,
        config: InferenceConfig = InferenceConfig(),
        *,
        draft: Sequence[GPTModel] = (),
        records_routes: bool = False,
    ) -> None:
        build = stages[0].build
        config = engine_setup.config_without_caching_and_graphs(config, records_routes)
        self.model, self.mesh, self.config, self.tokenizer = build.model, build.mesh, config, tokenizer
        self.image_prompts: ImagePromptWriter | None = None  # of a network that reads images, set by who loads it
        raise_config_error_if([*config.problems(), *engine_setup.engine_setting_problems(stages, config, draft)])
        size = config.inference_dynamic_batching_block_size
        positions = self.model.max_position_embeddings
        self.max_length = min(config.inference_max_seq_length or positions, positions)
        parts = [(stages, 0 if draft else config.num_speculative_tokens), *([(draft, 0)] if draft else [])]
        count = engine_setup.num_cache_blocks(parts, config, self.max_length)
        snapshots = engine_setup.state_snapshot_count(stages, config)
        networks = [
            CachedNetwork(
                part,
                blocks=count,
                block_size=size,
                most_blocks=-(-(self.max_length + config.num_speculative_tokens) // size),
                most_rows=config.inference_max_requests,
                depths=depths,
                captured_graphs=engine_setup.max_captured_graphs(part, config),
                paged=engine_setup.choose_paged_attention(part[0].build, config),
            )
            for part, depths in parts
        ]
        if snapshots is not None:
            slots = num_recurrent_state_slots(config.inference_max_requests, config.num_speculative_tokens, snapshots)
            networks[0].state_pool = StatePool(stages, slots, RecurrentStateDtypes.from_config(config))
        self.runner = ModelRunner(networks)
        networks[0].recorder = ExpertChoiceRecorder(stages) if records_routes else None
        self.adapters = ServedAdapters(self.runner, most=config.max_loras, rank=config.max_lora_rank)
        self.allocators = [
            BlockAllocator(count, size, sharing=config.inference_dynamic_batching_prefix_caching)
            for _ in range(self.mesh.dp.size)
        ]
        self.slots = [
            StateSlotAllocator(config.inference_max_requests, config.num_speculative_tokens, snapshots)
            for _ in range(self.mesh.dp.size if snapshots is not None else 0)
            if snapshots is not None
        ]
        self._state_bytes = recurrent_state_bytes(stages, RecurrentStateDtypes.from_config(config))
        self._bytes = networks[0].bytes_per_token
        self._tickets = itertools.count()
        self._inbox: deque[SequenceState] = deque()
        self._cancelled: deque[int] = deque()
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []
        self._counts: Counter[str] = Counter()  # of `EngineMetrics`, by field
        # All keys from the start: other threads read it.
        self._finished: dict[str, int] = dict.fromkeys(get_args(Reason), 0)
        self._throughput = TokenRateMeter()
        self._after = _banned_newline_after_colon(tokenizer)
        self._in_flight: _InFlightStep | None = None
        self.is_paused = False
        self._overlaps = config.inference_async_scheduling and has_separate_memory(self.mesh.device)
        self._overlaps &= self.mesh.world.size == 1 and not config.num_speculative_tokens
        guesser = DraftNetwork if draft else MTPDraft if config.num_speculative_tokens else None
        self._draft = guesser and guesser(self.runner, config.num_speculative_tokens, self._after)

    def submit(self, request: GenerationRequest, listener: Listener) -> int:
        """Add a request; return its number. listener: called with its events, in the thread that steps.
        Raises `ConfigError` for a request that can never be served, and `EngineBusyError` when too many wait.
        """
        raise_config_error_if(self._request_problems(request))
        if (
            len(self._inbox) + len(self._waiting)
            >= self.config.inference_max_waiting_requests + self.config.inference_max_requests
        ):
            raise EngineBusyError(f"{len(self._inbox) + len(self._waiting)} requests wait already; ask again later")
        ticket, adapter = next(self._tickets), self.adapters.number_of(request.adapter)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        end = () if request.ignore_eod else (self.tokenizer.eod, *self.tokenizer.end_ids)
        self._inbox.append(
            SequenceState(
                ticket,
                replace(request, seed=seed),
                listener,
                self.tokenizer,
                ends={*request.stop_ids, *end},
                adapter=adapter,
            )
        )
        return ticket

    def cancel(self, ticket: int) -> None:
        """Cancel a request; its listener gets a last event. A request that has already ended is ignored."""
        self._cancelled.append(ticket)

    @property
    def is_idle(self) -> bool:
        """Whether no request or cancellation is pending."""
        return not (self._inbox or self._waiting or self._running or self._cancelled)

    def capture_next_graph(self) -> bool:
        """While idle: capture the next requested shape as a CUDA graph; False if there is none left."""
        return self.runner.capture_next_graph()

    def capture_all_graphs(self, say: Callable[[str], None]) -> None:
        """Capture all shapes known beforehand. say: called with progress lines."""
        number, total = 0, self.runner.num_uncaptured_shapes()
        while self.capture_next_graph():
            number += 1
            say(f"CUDA graphs: {number} of {total} shapes of a step are captured")

    def step(self) -> bool:
        """Run one forward pass over the scheduled requests, and append its tokens; False when there was nothing to do.
        If possible, the next pass is launched before these tokens are known, so that the device need not wait.
        """
        if self.is_paused:
            return False
        if self._in_flight is None:
            self._process_inbox()
            self._in_flight = self._launch_step()
        current = self._in_flight
        if current is None:
            return False
        self._in_flight = self._launch_step() if self._can_look_ahead() else None
        self._finish_pass(current)
        if self._in_flight is not None and not self._in_flight.has_running_sequences:
            self._in_flight = None
        self.adapters.remove_unused_unloaded(one.adapter for one in (*self._inbox, *self._waiting, *self._running))
        return True

    def _finish_pass(self, current: _InFlightStep) -> None:
        """Wait for a launched pass and append its tokens to the sequences."""
        outputs = current.launched.collect()
        self._counts["steps"] += 1
        for blocks, *replica in zip(self.allocators, current.chosen, current.rows, outputs, strict=True):
            for (one, _), row, what in zip(*replica, strict=True):
                if one.reason is None:  # else it had ended before, and nobody hears of this token
                    self._append_sequence_output(one, row, what, blocks)
                    one.notify_listener()

    def _launch_step(self) -> _InFlightStep | None:
        """Schedule and launch a pass; None when there is nothing to do."""
        chosen = self._schedule()
        if not any(chosen):
            return None
        if self._draft is not None:
            self._counts["proposed_tokens"] += self._draft.set_draft_tokens(chosen)
        rows = tuple(tuple(self._sequence_input(one, count) for one, count in shares) for shares in chosen)
        launched = self.runner.launch(StepInput(0, rows))
        places = iter(launched.places)
        for shares, own in zip(chosen, rows, strict=True):
            for (one, _), row in zip(shares, own, strict=True):
                one.mark_launched(row, next(places, 0))
        return _InFlightStep(chosen, rows, launched)

    def _sequence_input(self, one: SequenceState, count: int) -> SequenceInput:
        """Return the input of a sequence in the next step. count: of its tokens."""
        states = one.next_state_slots(count, self.allocators[one.replica])
        return replace(one.next_input(count, self._after), states=states)

    def _can_look_ahead(self) -> bool:
        """Whether the next pass can be launched before this one's tokens are known: every sequence grows by one token,
        and gets a block if it needs one without a preemption.
        """
        if not self._overlaps or self._cancelled or not all(one.allows_lookahead for one in self._running):
            return False
        most = self.config.inference_dynamic_batching_max_tokens
        needed = [0] * len(self.allocators)
        for one in self._running:
            blocks = self.allocators[one.replica]
            needed[one.replica] += max(
                0, blocks.num_blocks_for_tokens(min(len(one.ids) + 1, one.computed + most)) - len(one.blocks)
            )
        if any(count > blocks.available for count, blocks in zip(needed, self.allocators, strict=True)):
            return False
        self._process_inbox()
        return True

    def run(self, requests: Iterable[GenerationRequest]) -> list[GenerationReply]:
        """Run requests to their end; replies in their order. Other requests of the engine go on meanwhile."""
        replies: dict[int, GenerationReply] = {}

        def collect_generation_reply(event: GenerationEvent) -> None:
            if event.reply is not None:
                replies[event.ticket] = event.reply

        left = deque(requests)
        tickets: list[int] = []
        while left or any(ticket not in replies for ticket in tickets):
            while left:
                try:
                    tickets.append(self.submit(left[0], collect_generation_reply))
                except EngineBusyError:
                    break
                left.popleft()
            self.step()
        return [replies[ticket] for ticket in tickets]

    def run_as_follower(self) -> None:
        """On every rank but the first: take part in steps until the first closes the engine."""
        self.runner.run_as_follower()

    def heartbeat(self) -> None:
        """Run an empty collective; call it regularly while idle, so that the other ranks' collectives do not time out."""
        self.runner.heartbeat()

    def cancel_all(self) -> None:
        """Cancel all requests; each listener gets a last event with the tokens so far."""
        self._in_flight = None
        self._process_inbox()
        self._cancel_sequences([*self._waiting, *self._running])

    def close(self) -> None:
        """Cancel all requests, and end `run_as_follower` on the other ranks."""
        self.cancel_all()
        self.runner.shut_down()

    def fail_all_requests(self, problem: str) -> None:
        """End all requests with an error, as when a rank has died. The engine cannot be used afterwards."""
        self._in_flight = None
        self._waiting += self._inbox
        self._inbox.clear()
        for one in [*self._waiting, *self._running]:
            one.mark_ended("error", problem)
            one.notify_listener()
            self._finished["error"] += 1
        self._waiting.clear()
        self._running.clear()

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache, as when the weights have changed."""
        for blocks in self.allocators:
            blocks.clear_prefix_cache()
        for slots in self.slots:
            slots.clear_snapshots()

    def pause(self) -> None:
        """Stop between two steps until `resume`, as while weights change. Requests wait, and new ones are accepted;
        running ones keep their tokens and are prefilled again afterwards. Caches of keys, prefixes, states and images
        are dropped.
        """
        if self._in_flight is not None:
            current, self._in_flight = self._in_flight, None
            self._finish_pass(current)
        for one in sorted(self._running, key=lambda one: -one.ticket):
            one.preempt(self.allocators[one.replica])
            self._waiting.appendleft(one)
        self._running.clear()
        self.clear_prefix_cache()
        self.runner.clear_image_cache()
        self.is_paused = True

    def resume(self) -> None:
        """Continue after `pause`, with the current weights."""
        self.is_paused = False

    def metrics(self) -> EngineMetrics:
        """Return counters and gauges of the engine. May be called from any thread."""
        capacity, available, cached = (
            sum(getattr(blocks, name) for blocks in self.allocators) for name in ("capacity", "available", "cached")
        )
        return EngineMetrics(
            waiting=len(self._inbox) + len(self._waiting),
            running=len(self._running),
            blocks=capacity,
            blocks_used=capacity - available,
            blocks_kept=cached,
            bytes_per_token=self._bytes,
            state_bytes=self._state_bytes,
            states_kept=sum(slots.num_snapshots for slots in self.slots),
            finished=dict(self._finished),
            tokens_per_second=self._throughput.current_rate(),
            **dict(self._counts),  # a copy: the thread that steps may add a field
        )

    def _request_problems(self, request: GenerationRequest) -> list[str]:
        """Return why a request can never be served; empty if it can."""
        total = len(request.prompt) + request.num_tokens
        size = self.model.true_vocab_size
        images, sees = request.images, self.model.has_vision
        bad = [token for token in (*request.prompt, *request.stop_ids) if not 0 <= token < size]
        room = self.config.inference_dynamic_batching_max_tokens - self.config.inference_max_requests
        capacity = self.allocators[0].capacity * self.allocators[0].size
        # The last token is never read, so that it needs neither a position nor a place in the cache.
        return [
            message
            for broken, message in (
                (
                    total - (request.num_tokens > 0) > self.max_length,
                    f"a prompt of {len(request.prompt)} tokens and {request.num_tokens} new "
                    f"ones are more than the {self.max_length} positions; shorten the prompt or ask for fewer",
                ),
                (bad, f"{bad[:3]} are no ids of the network's {size}"),
                (images is not None and not sees, "the network reads no images; send text alone"),
                (
                    images is not None and len(images.slots) != len(request.prompt),
                    "the slots of a prompt's images are not as many as its tokens",
                ),
                (
                    total > capacity,
                    f"{total} tokens are more than the cache's {capacity}; raise --inference-dynamic-batching-buffer-size-gb",
                ),
                (
                    not self.config.enable_chunked_prefill and len(request.prompt) > room,
                    f"a prompt of {len(request.prompt)} tokens does not fit "
                    f"into one pass with --no-enable-chunked-prefill; raise --inference-dynamic-batching-max-tokens",
                ),
            )
            if broken
        ]

    def _process_inbox(self) -> None:
        """Process the submissions and cancellations since the last step."""
        while self._inbox:
            one = self._inbox.popleft()
            self._counts["requests"] += 1
            if self.adapters.has_adapter_number(one.adapter):
                self._waiting.append(one)
            else:
                one.mark_ended("error", f"the adapter {one.request.adapter!r} was unloaded")
                self._release_ended_sequence(one)
                one.notify_listener()
        gone = {self._cancelled.popleft() for _ in range(len(self._cancelled))}
        if gone:
            self._cancel_sequences([one for one in (*self._waiting, *self._running) if one.ticket in gone])

    def _cancel_sequences(self, those: Sequence[SequenceState]) -> None:
        """Cancel these requests."""
        for one in those:
            one.mark_ended("cancelled")
            self._release_ended_sequence(one)
            one.notify_listener()
        self._waiting = deque(one for one in self._waiting if one.reason is None)

    def _schedule(self) -> list[list[tuple[SequenceState, int]]]:
        """Return for each data-parallel replica the sequences of the next step and their numbers of tokens."""
        budget = [self.config.inference_dynamic_batching_max_tokens] * len(self.allocators)
        scored = [_SCORED] * len(self.allocators)
        chosen: list[list[tuple[SequenceState, int]]] = [[] for _ in self.allocators]
        # Who decodes goes first.
        for one in sorted(self._running, key=lambda one: (one.num_uncomputed > 1, one.ticket)):
            if one in self._running:  # and was not asked to wait again for one before
                self._schedule_sequence(one, budget, scored, chosen)
        while self._waiting and len(self._running) < self.config.inference_max_requests * len(self.allocators):
            one = self._waiting[0]
            replica = max(
                range(len(self.allocators)), key=lambda replica: (budget[replica] > 0, -self._num_running_on(replica))
            )
            if self._num_running_on(replica) >= self.config.inference_max_requests or not self._try_admit_request(
                one, replica, budget[replica]
            ):
                break
            self._waiting.popleft()
            self._running.append(one)
            self._schedule_sequence(one, budget, scored, chosen)
            if one not in self._running:  # it waits again at once: there is no room now
                break
        return chosen

    def _num_running_on(self, replica: int) -> int:
        """Return the number of running sequences on a replica."""
        return sum(one.replica == replica for one in self._running)

    def _try_admit_request(self, one: SequenceState, replica: int, budget: int) -> bool:
        """Admit a request and its cached prefix if all of it fits; return whether. budget: the step's tokens left."""
        blocks = self.allocators[replica]
        beginning = [] if one.request.prompt_logprobs else blocks.take_cached_prefix_blocks(one.ids, one.hash_root)
        mark: bytes | None = None
        if self.slots:
            marks = blocks.block_hashes(one.ids, one.hash_root)[: len(beginning)]
            reached = self.slots[replica].num_blocks_with_snapshot(marks)
            blocks.release(beginning[reached:])
            beginning, mark = beginning[:reached], marks[reached - 1] if reached else None
        # One block more for each that runs here, so that a new one does not push out an old one at once.
        needed = blocks.num_blocks_for_tokens(len(one.ids) + 1) - len(beginning) + self._num_running_on(replica)
        left = len(one.ids) - len(beginning) * blocks.size
        whole = self.config.enable_chunked_prefill or left <= budget
        # Alone it always gets in, since what could never fit was refused: else it might wait for ever.
        if self._num_running_on(replica) and (budget < 1 or not whole or needed > blocks.available):
            blocks.release(beginning)
            return False
        one.start_running(replica, beginning, blocks)
        if self.slots:
            one.states = StateSlotsOfSequence(self.slots[replica], mark)
        self._counts["cached_tokens"] += one.computed
        return True

    def _schedule_sequence(
        self, one: SequenceState, budget: list[int], scored: list[int], chosen: list[list[tuple[SequenceState, int]]]
    ) -> None:
        """Add a sequence to the step, with as many tokens as budgets and blocks allow. budget, scored: tokens, and
        prompt tokens with log-probabilities, left on each replica.
        """
        count = 0 if one.awaits_final_token else min(one.num_uncomputed, budget[one.replica])
        if (
            one.states is not None
            and one.states.takes_snapshots
            and self.config.enable_chunked_prefill
            and not one.awaited
        ):
            count = min(count, one.next_snapshot_length(self.allocators[one.replica]) - one.computed)
        if one.needs_prompt_logprobs:
            count = min(count, scored[one.replica])
        guesses = one.max_drafts(self.config.num_speculative_tokens)
        if count < 1 or not self._allocate_blocks(one, one.computed + count + guesses, chosen[one.replica]):
            return
        budget[one.replica] -= count + guesses
        scored[one.replica] -= count * one.needs_prompt_logprobs
        chosen[one.replica].append((one, count))

    def _allocate_blocks(self, one: SequenceState, tokens: int, chosen: list[tuple[SequenceState, int]]) -> bool:
        """Allocate blocks for so many tokens, preempting the latest requests; False if that was this one."""
        blocks = self.allocators[one.replica]
        while len(one.blocks) < blocks.num_blocks_for_tokens(tokens):
            if blocks.available:
                one.allocate_block(blocks)
                continue
            last = max(
                (other for other in self._running if other.replica == one.replica), key=lambda other: other.ticket
            )
            self._counts["preempted"] += 1
            self._running.remove(last)
            chosen[:] = [share for share in chosen if share[0] is not last]
            last.preempt(blocks)
            self._waiting.appendleft(last)
            if last is one:
                return False
        return True

    def _append_sequence_output(
        self, one: SequenceState, row: SequenceInput, output: SequenceStepOutput, blocks: BlockAllocator
    ) -> None:
        """Append a step's output to a request, cache its full blocks, and release it if it has ended."""
        guesses, read = len(one.drafts), len(row.ids) - len(one.drafts)
        made = one.append_output(row, output, time.monotonic())
        self._counts["accepted_tokens"] += max(0, made - 1) if guesses else 0
        self._counts["generated_tokens"] += made
        self._counts["prompt_tokens"] += read if row.start < len(one.request.prompt) else 0
        self._throughput.add_new_tokens(made)
        if one.reason != "error":
            one.cache_full_blocks(blocks, one.num_stored_tokens if self._draft is None else one.drafted)
        if one.reason is not None:
            self._release_ended_sequence(one)

    def _release_ended_sequence(self, one: SequenceState) -> None:
        """Release the blocks of a request that has ended."""
        if one in self._running:
            self._running.remove(one)
            one.release_blocks(self.allocators[one.replica])
        assert one.reason is not None, "who leaves has ended"
        self._finished[one.reason] += 1


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A launched pass. chosen: each replica's sequences with their numbers of tokens; rows: their inputs."""

    chosen: list[list[tuple[SequenceState, int]]]
    rows: tuple[tuple[SequenceInput, ...], ...]
    launched: LaunchedStep

    @property
    def has_running_sequences(self) -> bool:
        """Whether any of its sequences has not ended."""
        return any(one.reason is None for shares in self.chosen for one, _ in shares)


def _banned_newline_after_colon(tokenizer: Tokenizer) -> tuple[tuple[int, int], ...]:
    """(colon, newline) if the tokenizer writes each as one id."""
    try:
        colon, newline = tokenizer.tokenize(":"), tokenizer.tokenize("\n")
    except ValueError:  # its texts are not words
        return ()
    return ((colon[0], newline[0]),) if len(colon) == len(newline) == 1 else ()
