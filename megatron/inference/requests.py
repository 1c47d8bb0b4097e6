"""What is asked of the engine, and what it answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from megatron.core.config.flags.declare import raise_config_error_if
from megatron.inference.sampling import SamplingParams
from megatron.inference.step_input import PromptImages

Ids = tuple[int, ...]
Reason = Literal["stop", "length", "cancelled", "error"]
_RATE_SECONDS = 10.0  # over which a rate is averaged


class EngineBusyError(Exception):
    """As many requests wait as may wait; try again later."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to continue or to score. prompt: ids, at least one. num_tokens: most new ones; 0 only scores the prompt.
    seed: of sampling; None: any. first_draw: number of tokens that were sampled with this seed before. stop_ids: tokens
    that end the text, beside the end of document unless `ignore_eod`; they are not part of it. stop_words: texts that
    end it; they are cut off unless `keep_stop`. newline_after_colon: whether a newline may follow a colon. logprobs: of
    new tokens; prompt_logprobs: of the prompt's. top_logprobs: how many of the likeliest tokens are returned beside
    each. after_temperature: log-probabilities are those of the distribution with the temperature, before top-k and
    top-p. adapter: name of the adapter to use; empty: none. images: of the prompt, whose embeddings replace some of its
    ids.
    """

    prompt: Ids
    num_tokens: int = 64
    sampling: SamplingParams = SamplingParams()
    seed: int | None = None
    first_draw: int = 0
    stop_ids: Ids = ()
    stop_words: tuple[str, ...] = ()
    keep_stop: bool = False
    ignore_eod: bool = False
    newline_after_colon: bool = True
    logprobs: bool = False
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    after_temperature: bool = False
    adapter: str = ""
    images: PromptImages | None = None

    def __post_init__(self) -> None:
        raise_config_error_if(
            (
                "" if self.prompt else "a prompt has no tokens; give one at least, such as the begin of a document",
                "" if self.num_tokens >= 0 else f"{self.num_tokens} new tokens are asked for; give 0 or more",
                ""
                if self.num_tokens or self.prompt_logprobs
                else "no new tokens and no log-probabilities are asked for; ask for one of them",
                "" if self.top_logprobs >= 0 else f"{self.top_logprobs} likeliest tokens are asked for; give 0 or more",
                ""
                if not self.top_logprobs or self.logprobs or self.prompt_logprobs
                else "the likeliest tokens are named with log-probabilities only; ask for those",
                "" if self.seed is None or self.seed >= 0 else f"seed {self.seed} is negative; give 0 or more",
                ""
                if self.sampling.temperature or not self.after_temperature
                else "at temperature 0 there are no log-probabilities after temperature; give a temperature",
                "" if all(self.stop_words) else "a stop word is empty; leave it out",
            )
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of a reply. logprob: natural logarithm of its probability after all before it, before temperature and
    limits; None if it was not requested, and for a text's first token. top: (id, logprob) of the likeliest.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationReply:
    """The result of a request. tokens: new ones, without what ended them. text: the new text. prompt: the prompt's
    tokens, if their log-probabilities were requested. cached_tokens: of the prompt, found in the prefix cache. waited,
    first, total: seconds from the submission to admission, to the first token and to the end. problem: why, if the
    reason is error. end: the end token, which `tokens` lacks. routes: the experts in all MoE layers for each id that
    was read, from the prompt's first on, if they are recorded.
    """

    reason: Reason
    tokens: tuple[TokenLogprob, ...] = ()
    text: str = ""
    prompt: tuple[TokenLogprob, ...] = ()
    seed: int = 0
    cached_tokens: int = 0
    waited: float = 0.0
    first: float | None = None
    total: float = 0.0
    problem: str = ""
    end: TokenLogprob | None = None
    routes: tuple[Ids, ...] = ()

    @property
    def ids(self) -> Ids:
        """The new ids."""
        return tuple(token.id for token in self.tokens)


@dataclass(frozen=True, slots=True)
class GenerationEvent:
    """New tokens and text of a request; the last event has the reply."""

    ticket: int
    tokens: tuple[TokenLogprob, ...] = ()
    text: str = ""
    reply: GenerationReply | None = None


Listener = Callable[[GenerationEvent], None]


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Counters and gauges of an engine: counts since its start, but for `waiting`, `running` and blocks; rates over the
    last seconds. state_bytes: recurrent states of one sequence; states_kept: snapshots of prefixes. blocks_used: of
    running requests; blocks_kept: unused ones in the prefix cache. prompt_tokens were computed, cached_tokens found in
    the cache, generated_tokens sampled.
    """

    waiting: int = 0
    running: int = 0
    blocks: int = 0
    blocks_used: int = 0
    blocks_kept: int = 0
    bytes_per_token: int = 0
    state_bytes: int = 0
    states_kept: int = 0
    requests: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preempted: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    tokens_per_second: float = 0.0


class TokenRateMeter:
    """Tokens per second, exponentially averaged over the last seconds."""

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()
        self._rate = 0.0

    def add_new_tokens(self, count: int) -> None:
        """Count new tokens."""
        now = time.monotonic()
        self._rate = self._rate * math.exp((self._last - now) / _RATE_SECONDS) + count / _RATE_SECONDS
        self._last = now

    def current_rate(self) -> float:
        """Return the tokens per second averaged over the last seconds."""
        now = time.monotonic()
        seen = 1.0 - math.exp((self._begun - now) / _RATE_SECONDS)  # of the time that counts, how much there has been
        return self._rate * math.exp((self._last - now) / _RATE_SECONDS) / seen if seen > 0.0 else 0.0
