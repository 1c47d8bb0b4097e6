"""Text from an encoder and a decoder: the prompt goes through the encoder once, and the decoder writes what belongs to it.

Requests that wait are taken together, and decoded to the end of the longest of them: every text begins with the same token, so that
all are equally long at every step. Prompts of several lengths are filled up, and what fills them is not looked at.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from megatron.core.config.flags.declare import raise_config_error_if
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.models.t5 import T5Model
from megatron.core.parallel import collectives
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.context.cache import Mix, StatefulMixer
from megatron.inference.requests import (
    EngineMetrics,
    GenerationEvent,
    GenerationReply,
    GenerationRequest,
    Listener,
    Reason,
    TokenRateMeter,
)
from megatron.inference.sampled_tokens import sample_next_tokens
from megatron.inference.sequence import SequenceState
from megatron.inference.step_input import SequenceInput


class _EncoderDecoderCache:
    """The `DecodingCache` of equally long decoded texts: keys and values of each layer, [t, b, g, d], for up to `most` tokens.
    length: of the texts, including the next pass's token.
    """

    def __init__(self, most: int) -> None:
        self._most, self.length = most, 0
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._memories: dict[object, Tensor] = {}

    def wrap_attention_kernel(self, layer: int, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return an attention function for the last token of all texts, which attends to all tokens before."""

        def attend_with_cache(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            mask: AttentionMaskSpec,
            dropout: float = 0.0,
            scores: AttentionScoreModifiers = AttentionScoreModifiers(),
        ) -> Tensor:
            if layer not in self._stored:
                self._stored[layer] = k.new_empty((self._most, *k.shape[1:])), v.new_empty((self._most, *v.shape[1:]))
            for stored, new in zip(self._stored[layer], (k, v), strict=True):
                stored[self.length - 1] = new[0]
            keys, values = (stored[: self.length] for stored in self._stored[layer])
            return kernel(q, keys, values, replace(mask, causal=False), dropout, scores)  # the last token sees all

        return attend_with_cache

    def run_from_states(self, mixer: StatefulMixer, parts: Sequence[Tensor], mix: Mix) -> Tensor:
        """Raise: no layer of these networks has a state."""
        raise AssertionError("an encoder and a decoder have attention alone")

    def cached_cross_attention_kv(self, layer: object, make: Callable[[], Tensor]) -> Tensor:
        """Return a layer's keys and values of the encoder output, computed by `make` in the first pass."""
        if layer not in self._memories:
            self._memories[layer] = make()
        return self._memories[layer]

    def select_logit_states(self, x: Tensor) -> Tensor:
        """Return all hidden states x: [s, b, h]."""
        return x


class EncoderDecoderEngine:
    """Answers requests with a T5, as `Engine` does with a GPT, one batch after the other.
    start: the token that every decoded text begins with. The first rank submits and steps; all others call
    `run_as_follower`. The ranks of a tensor group share the network, and data-parallel replicas share the requests.
    Raises `ConfigError` for settings that do not fit.
    """

    def __init__(
        self,
        stages: Sequence[T5Model],
        tokenizer: Tokenizer,
        config: InferenceConfig = InferenceConfig(),
        *,
        start: int,
    ) -> None:
        (self._stage, *others), self.tokenizer, self.config, self._start = stages, tokenizer, config, start
        self.mesh, self.model = self._stage.build.mesh, self._stage.build.model
        positions = self.model.max_position_embeddings
        self.max_length = min(config.inference_max_seq_length or positions, positions)
        raise_config_error_if(
            [
                *config.problems(),
                "a T5 is decoded without --pipeline-model-parallel-size; divide it by --tensor-model-parallel-size"
                if others or self.mesh.pp.size > 1
                else "",
                "a T5 is decoded without drafts; leave out --num-speculative-tokens"
                if config.num_speculative_tokens
                else "",
            ]
        )
        self._tickets, self._waiting = itertools.count(), deque[tuple[int, GenerationRequest, Listener]]()
        self._finished: dict[str, int] = dict.fromkeys(get_args(Reason), 0)
        self._throughput, self._made = TokenRateMeter(), 0

    def submit(self, request: GenerationRequest, listener: Listener) -> int:
        """Add a request; return its number. listener: called with its events. `ConfigError` if it cannot be served."""
        size = self.model.true_vocab_size
        bad = [token for token in (*request.prompt, *request.stop_ids) if not 0 <= token < size]
        raise_config_error_if(
            (
                f"a prompt of {len(request.prompt)} tokens is longer than the {self.max_length} positions; shorten it"
                if len(request.prompt) > self.max_length
                else "",
                f"{request.num_tokens} new tokens are more than the {self.max_length} positions; ask for fewer"
                if request.num_tokens > self.max_length
                else "",
                f"{bad[:3]} are no ids of the network's {size}" if bad else "",
                "log-probabilities of a prompt are those of a decoder alone; a T5 has none"
                if request.prompt_logprobs
                else "",
            )
        )
        seed = secrets.randbits(63) if request.seed is None else request.seed
        self._waiting.append((next(self._tickets), replace(request, seed=seed), listener))
        return self._waiting[-1][0]

    def step(self) -> bool:
        """Answer a batch of the waiting requests; False when there was none."""
        most = self.config.inference_max_requests * self.mesh.dp.size
        taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        if not taken:
            return False
        collectives.broadcast_object([request for _, request, _ in taken], self.mesh.world)
        for (ticket, _, listener), reply in zip(
            taken, self._replies_from_all_replicas([request for _, request, _ in taken]), strict=True
        ):
            self._finished[reply.reason] += 1
            self._made += len(reply.tokens)
            self._throughput.add_new_tokens(len(reply.tokens))
            listener(GenerationEvent(ticket, reply.tokens, reply.text, reply))
        return True

    def run(self, requests: Iterable[GenerationRequest]) -> list[GenerationReply]:
        """Answer requests; replies in the order of the requests."""
        replies: dict[int, GenerationReply] = {}

        def collect_generation_reply(event: GenerationEvent) -> None:
            assert event.reply is not None, "all comes at once"
            replies[event.ticket] = event.reply

        tickets = [self.submit(request, collect_generation_reply) for request in requests]
        while self.step():
            pass
        return [replies[ticket] for ticket in tickets]

    def run_as_follower(self) -> None:
        """On every rank but the first: take part in steps until the first closes."""
        while (requests := collectives.broadcast_object(None, self.mesh.world)) is not None:
            self._replies_from_all_replicas(requests)

    def close(self) -> None:
        """End `run_as_follower` on the other ranks."""
        collectives.broadcast_object(None, self.mesh.world)

    def metrics(self) -> EngineMetrics:
        """Return counters of the engine."""
        return EngineMetrics(
            waiting=len(self._waiting),
            finished=dict(self._finished),
            generated_tokens=self._made,
            tokens_per_second=self._throughput.current_rate(),
        )

    def _replies_from_all_replicas(self, requests: Sequence[GenerationRequest]) -> list[GenerationReply]:
        """Return the replies to all requests, of which each replica of the network answers its share. Collective."""
        copies, mine = self.mesh.dp.size, self.mesh.dp.rank
        replies = self._generate_replies(requests[mine::copies]) if requests[mine::copies] else []
        gathered = dict(collectives.gather_objects((mine, replies), self.mesh.world))
        return [gathered[number % copies][number // copies] for number in range(len(requests))]

    def _generate_replies(self, requests: Sequence[GenerationRequest]) -> list[GenerationReply]:
        """Decode these requests together; return their replies."""
        replies: dict[int, GenerationReply] = {}

        def collect_generation_reply(event: GenerationEvent) -> None:
            if event.reply is not None:
                replies[event.ticket] = event.reply

        end = (self.tokenizer.eod if self.tokenizer.eos is None else self.tokenizer.eos, *self.tokenizer.end_ids)
        texts = [
            SequenceState(
                number,
                replace(request, prompt=(self._start,)),
                collect_generation_reply,
                self.tokenizer,
                ends={*request.stop_ids, *(() if request.ignore_eod else end)},
            )
            for number, request in enumerate(requests)
        ]
        with torch.no_grad():
            self._decode_loop(texts, [request.prompt for request in requests])
        return [replies[number] for number in range(len(requests))]

    def _decode_loop(self, texts: Sequence[SequenceState], prompts: Sequence[Sequence[int]]) -> None:
        """Encode the prompts, and decode token by token until all texts have ended."""
        longest, device = max(map(len, prompts)), self.mesh.device
        ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
        there = (
            torch.arange(longest, device=device)
            < torch.tensor([len(prompt) for prompt in prompts], device=device)[:, None]
        )
        padding = None if bool(there.all()) else there
        message = self._stage.encode(ids, padding)
        past = _EncoderDecoderCache(max(one.request.num_tokens for one in texts))
        last = torch.full((len(texts), 1), self._start, device=device)
        for place in itertools.count():
            past.length = place + 1
            logits = self._stage.decode_next_logits(last, place, message, padding=padding, cache=past)
            rows = [one.next_input(1, ()) if one.reason is None else SequenceInput((0,), place, ()) for one in texts]
            numbers = [number for number, row in enumerate(rows) if row.num_logits]
            rows = [rows[number] for number in numbers]
            outputs = sample_next_tokens(rows, logits[:, numbers].transpose(0, 1), self._stage.build).collect()
            for number, row, what in zip(
                numbers, rows, collectives.broadcast_object(outputs, self.mesh.tp), strict=True
            ):
                texts[number].mark_launched(row)
                texts[number].append_output(row, what, time.monotonic())
                texts[number].notify_listener()
            if all(one.reason is not None for one in texts):
                return
            last = torch.tensor([[max(0, one.ids[-1])] for one in texts], device=device)
