"""The state of one request: its tokens, its blocks of the KV cache, and what has been sent to its listener."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from megatron.core.tokenizers.base import Tokenizer
from megatron.inference.block_allocator import BlockAllocator
from megatron.inference.detokenizer import Detokenizer
from megatron.inference.recurrent_states import StateReadWriteSlots, StateSlotsOfSequence, next_snapshot_position
from megatron.inference.requests import (
    GenerationEvent,
    GenerationReply,
    GenerationRequest,
    Listener,
    Reason,
    TokenLogprob,
)
from megatron.inference.step_input import PromptImages, SamplingState, SequenceInput, SequenceStepOutput


class SequenceState:
    """A request, its tokens and its cache blocks. ids: prompt and new tokens; keys and values of the first `computed`
    are in `blocks` (of the first `drafted` in the draft's cache). adapter: its number, 0 for none. reserved: blocks
    reserved for it. drafts: proposed next tokens. reason: why it ended, None before. in_flight: tokens of a launched
    step whose output is not taken yet; awaited: whether that step samples the next token; place: index of that token
    among those sampled.
    """

    def __init__(
        self,
        ticket: int,
        request: GenerationRequest,
        listener: Listener,
        tokenizer: Tokenizer,
        *,
        ends: Collection[int],
        adapter: int = 0,
    ) -> None:
        assert request.seed is not None, "a request that runs has a seed"
        self.ticket, self.request, self.seed = ticket, request, request.seed
        self._listener, self._ends = listener, frozenset(ends)
        self.ids = list(request.prompt)
        self.states: StateSlotsOfSequence | None = None
        self.replica, self.blocks, self.computed, self.drafted = 0, list[int](), 0, 0
        self.reserved = range(0)
        self.drafts: tuple[int, ...] = ()
        self.in_flight, self.awaited, self.place = 0, False, 0
        self.reason: Reason | None = None
        self.adapter = adapter
        self._published, self._content = 0, self.hash_root
        self._text = Detokenizer(tokenizer, request.prompt, request.stop_words, keep_stop=request.keep_stop)
        self._prompt_scores: list[TokenLogprob] = []
        self._tokens: list[TokenLogprob] = []
        self._num_emitted, self._pending_text, self._problem = 0, "", ""
        self._end_token: TokenLogprob | None = None
        self._routes: list[tuple[int, ...]] = []
        self._submitted, self._cached = time.monotonic(), 0
        self._admitted: float | None = None
        self._first: float | None = None

    @property
    def hash_root(self) -> bytes:
        """Initial hash of its block hashes, which distinguishes adapters and images at equal ids."""
        images = b"" if self.request.images is None else b"images " + self.request.images.digest
        return images + (b"adapter %d" % self.adapter if self.adapter else b"")

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens that no step computes yet, one that is being sampled included; 1 while decoding."""
        return len(self.ids) + self.awaited - self.computed

    @property
    def num_generated(self) -> int:
        """Number of tokens generated so far."""
        return len(self.ids) - len(self.request.prompt)

    @property
    def awaits_final_token(self) -> bool:
        """Whether the step in flight samples the last requested token."""
        return self.awaited and self.num_generated + 1 >= self.request.num_tokens

    @property
    def allows_lookahead(self) -> bool:
        """Whether its next step can be prepared before this step's token is known to the host."""
        sampling = self.request.sampling
        return not sampling.depends_on_ids and self.request.newline_after_colon and not self.needs_prompt_logprobs

    @property
    def num_stored_tokens(self) -> int:
        """Number of tokens whose keys and values were computed by steps whose output was taken."""
        return self.computed - self.in_flight

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        return self.request.prompt_logprobs and len(self._prompt_scores) < len(self.request.prompt) - 1

    def max_drafts(self, most: int) -> int:
        """Return how many draft tokens, at most `most`, the next step should verify; 0 unless it decodes."""
        return max(0, min(most, self.request.num_tokens - self.num_generated - 1)) if self.num_uncomputed == 1 else 0

    def sampling_state(self, after: Sequence[tuple[int, int]]) -> SamplingState:
        """Return how the next token is sampled. after: banned (id, next id) pairs, for newlines after a colon."""
        sampling = self.request.sampling
        return SamplingState(
            sampling,
            self.seed,
            self.request.first_draw + self.num_generated + self.awaited,
            tuple(self.ids) if sampling.repetition_penalty != 1.0 else (),
            tuple(self.ids[len(self.request.prompt) :]) if sampling.penalizes_generated else (),
            () if self.request.newline_after_colon else tuple(after),
        )

    def next_input(self, count: int, after: Sequence[tuple[int, int]]) -> SequenceInput:
        """Return the input of the next step: `count` tokens and the draft tokens. after: banned (id, next id) pairs."""
        ids = tuple(self.ids[self.computed : self.computed + count]) or (0,) * count  # one that is awaited
        ends = count == self.num_uncomputed
        targets = tuple(self.ids[self.computed + 1 : self.computed + count + 1]) if self.needs_prompt_logprobs else ()
        num_logits = len(ids) if targets else int(ends)
        if self.request.num_tokens == 0 and not targets:
            num_logits = 0
        return SequenceInput(
            ids + self.drafts,
            self.computed,
            tuple(self.blocks),
            num_logits + len(self.drafts),
            targets,
            self.sampling_state(after) if num_logits > len(targets) else None,
            bool(targets) or ends and self.request.logprobs,
            self.request.top_logprobs,
            self.request.sampling.temperature if self.request.after_temperature else 1.0,
            self.adapter,
            self.place if self.awaited else None,
            self._images_at_next_tokens(len(ids)),
        )

    def _images_at_next_tokens(self, count: int) -> PromptImages | None:
        """Return the prompt's images if an embedding of them is among the next `count` tokens, else None."""
        images = self.request.images
        if images is None or max(images.slots[self.computed : self.computed + count], default=-1) < 0:
            return None
        return images

    def next_state_slots(self, count: int, blocks: BlockAllocator) -> StateReadWriteSlots:
        """Return its state slots in the next step of `count` tokens, with a snapshot's slot if one is due."""
        if self.states is None:
            return StateReadWriteSlots()
        end = self.computed + count
        at_snapshot = self.states.takes_snapshots and not self.awaited and end == self.next_snapshot_length(blocks)
        mark = blocks.block_hashes(self.ids[:end], self.hash_root)[-1] if at_snapshot else None
        return self.states.slots_for_step(len(self.drafts), mark)

    def next_snapshot_length(self, blocks: BlockAllocator) -> int:
        """Return after how many tokens the next snapshot of the states is to be taken."""
        return next_snapshot_position(self.computed, len(self.ids), blocks.size)

    def mark_launched(self, row: SequenceInput, place: int = 0) -> None:
        """Record that a launched step computes this row. place: index of its first sampled token."""
        count = len(row.ids) - len(self.drafts)
        self.computed += count
        self.in_flight += count
        self.awaited, self.place = row.num_sampled > 0, place

    def start_running(self, replica: int, beginning: list[int], blocks: BlockAllocator) -> None:
        """Start or resume on a replica, with a cached prefix in the blocks `beginning`."""
        self.replica, self.blocks = replica, beginning
        longest = blocks.num_blocks_for_tokens(len(self.request.prompt) + self.request.num_tokens)
        self.reserved = blocks.reserve_contiguous(longest - len(beginning), beginning)
        self.computed = self.drafted = len(beginning) * blocks.size
        if self._admitted is None:
            self._admitted, self._cached = time.monotonic(), self.computed

    def allocate_block(self, blocks: BlockAllocator) -> None:
        """Allocate one more block: the next reserved one, or any."""
        following = self.blocks[-1] + 1 if self.blocks else self.reserved.start
        self.blocks.append(blocks.allocate_block(following) if following in self.reserved else blocks.allocate_block())

    def release_blocks(self, blocks: BlockAllocator) -> None:
        """Release all blocks and reservations, and the recurrent-state slots."""
        if self.states is not None:
            self.states.release()
            self.states = None
        blocks.release(self.blocks, self.reserved)
        self.blocks, self.reserved = [], range(0)

    def preempt(self, blocks: BlockAllocator) -> None:
        """Release the cache of a running sequence; it is recomputed when it is admitted again."""
        self.release_blocks(blocks)
        assert not self.in_flight, "nobody is asked to wait while a step computes its tokens"
        self.computed, self.drafted, self.drafts = 0, 0, ()
        self._published, self._content = 0, self.hash_root
        if self.needs_prompt_logprobs:
            self._prompt_scores.clear()

    def append_output(self, row: SequenceInput, output: SequenceStepOutput, now: float) -> int:
        """Append the output of a step; return the number of new tokens. now: by time.monotonic()."""
        count = len(row.ids) - len(self.drafts)
        drafts, self.drafts = self.drafts, ()
        self.in_flight -= count
        self.awaited = self.in_flight > 0 and self.awaited
        if self.states is not None and not drafts:
            self.states.finish_pass(0)
        self._routes[row.start :] = output.routes[:count]
        tokens = [
            TokenLogprob(token, *_logprob_and_top_tokens_at(output, place)) for place, token in enumerate(output.ids)
        ]
        self._prompt_scores += tokens[: len(row.targets)]
        accepted = 0
        if row.start + count == len(self.ids):
            if self.request.num_tokens == 0:
                self.mark_ended("length")
                return 0
            accepted = self._accept_drafts(tokens[len(row.targets) :], drafts, now)
            self.computed += max(0, accepted - 1)
            if self.states is not None and drafts:
                self.states.finish_pass(max(0, accepted - 1))
        self.drafted = min(self.drafted, self.computed)
        return accepted

    def cache_full_blocks(self, blocks: BlockAllocator, stored: int) -> None:
        """Make the full blocks of its first `stored` tokens available for prefix caching."""
        if stored // blocks.size > self._published:
            self._content = blocks.cache_full_blocks(
                self.blocks, self.ids[:stored], known=self._published, content=self._content
            )
            self._published = stored // blocks.size

    def mark_ended(self, reason: Reason, problem: str = "") -> None:
        """Mark the sequence as ended. problem: why, if the reason is error."""
        self.reason, self._problem = reason, problem
        self._pending_text += self._text.finish()

    def notify_listener(self) -> None:
        """Send the listener the tokens and text that are new since the last call; with the reply if it has ended."""
        new, text = tuple(self._tokens[self._num_emitted :]), self._pending_text
        self._num_emitted, self._pending_text = len(self._tokens), ""
        if new or text or self.reason is not None:
            self._listener(
                GenerationEvent(self.ticket, new, text, None if self.reason is None else self._build_reply())
            )

    def _accept_drafts(self, picked: Sequence[TokenLogprob], drafts: Sequence[int], now: float) -> int:
        """Append tokens as long as they equal the draft tokens, and one more; return how many."""
        self._first = now if self._first is None else self._first
        for place, token in enumerate(picked):
            if token.id < 0:
                self.mark_ended("error", "the network's logits are not finite numbers")
                return place
            self.ids.append(token.id)
            if token.id in self._ends:
                self._end_token = token
                self.mark_ended("stop")
                return place + 1
            self._tokens.append(token if self.request.logprobs else TokenLogprob(token.id))
            self._pending_text += self._text.add((token.id,))
            if self._text.ended:
                self.mark_ended("stop")
            elif self.num_generated == self.request.num_tokens:
                self.mark_ended("length")
            if self.reason is not None or place == len(drafts) or drafts[place] != token.id:
                return place + 1
        raise AssertionError("a pass picks one token more than it checks")

    def _build_reply(self) -> GenerationReply:
        assert self.reason is not None, "a reply is given at the end"
        now, request = time.monotonic(), self.request
        prompt = (TokenLogprob(request.prompt[0]), *self._prompt_scores) if request.prompt_logprobs else ()
        return GenerationReply(
            self.reason,
            tuple(self._tokens),
            self._text.full_text,
            prompt,
            self.seed,
            self._cached,
            (self._admitted or now) - self._submitted,
            None if self._first is None else self._first - self._submitted,
            now - self._submitted,
            self._problem,
            self._end_token,
            tuple(self._routes),
        )


def _logprob_and_top_tokens_at(
    output: SequenceStepOutput, place: int
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """Return (log-probability, likeliest tokens) at an index of a step's output, as far as they were requested."""
    return output.logprobs[place] if output.logprobs else None, output.top[place] if output.top else ()
