"""What is asked of the engine, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from megatron.core.config.flags import refuse
from megatron.inference.sampling import Sampling
from megatron.inference.step_input import PromptImages

Ids = tuple[int, ...]
Reason = Literal["stop", "length", "cancelled", "error"]


class Busy(Exception):
    """More requests wait than may wait; ask again later."""


@dataclass(frozen=True, slots=True)
class Request:
    """Continue a prompt.

    prompt: ids, at least one. num_tokens: most new ones; 0 only scores the prompt. seed: of the draws; None: any. first_draw: draws
    of this seed that were made before. stop_ids: tokens that end the text, beside the end of document unless `ignore_eod`;
    they are not part of it. stop_words: texts that end it; they are cut off unless `keep_stop`. newline_after_colon: whether a
    line may end with a colon. logprobs: of new tokens; prompt_logprobs: of the prompt's. top_logprobs: how many of the likeliest
    tokens are named beside each. after_temperature: log-probabilities are those of the distribution with the temperature, before top-k and top-p.
    adapter: name of the adapter that the text is made with; empty: none. images: of the prompt, whose rows stand in the place of some
    of its ids.
    """

    prompt: Ids
    num_tokens: int = 64
    sampling: Sampling = Sampling()
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
        refuse(
            filter(
                None,
                (
                    "" if self.prompt else "a prompt has no tokens; give one at least, such as the begin of a document",
                    "" if self.num_tokens >= 0 else f"{self.num_tokens} new tokens are asked for; give 0 or more",
                    ""
                    if self.num_tokens or self.prompt_logprobs
                    else "no new tokens and no log-probabilities are asked for; ask for one of them",
                    ""
                    if self.top_logprobs >= 0
                    else f"{self.top_logprobs} likeliest tokens are asked for; give 0 or more",
                    ""
                    if not self.top_logprobs or self.logprobs or self.prompt_logprobs
                    else "the likeliest tokens are named with log-probabilities only; ask for those",
                    "" if self.seed is None or self.seed >= 0 else f"seed {self.seed} is negative; give 0 or more",
                    ""
                    if self.sampling.temperature or not self.after_temperature
                    else "at temperature 0 there are no log-probabilities after temperature; give a temperature",
                    "" if all(self.stop_words) else "a stop word is empty; leave it out",
                ),
            )
        )


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer. logprob: natural logarithm of its probability after all before it, as the network says it,
    before temperature and limits; None where it was not asked for, and of a text's first token. top: (id, logprob) of the likeliest.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """All that became of a request.

    tokens: new ones, without what ended them. text: the new text. prompt: the prompt's tokens, when their log-probabilities were
    asked for. cached_tokens: of the prompt, that were known from other requests. waited, first, total: seconds from the
    submission to admission, to the first token and to the end. problem: why, if the reason is error. end: the token that ended the text, which `tokens` lacks.
    routes: of each id that was read, from the prompt's first on, the experts of all layers that have some, where they are recorded.
    """

    reason: Reason
    tokens: tuple[Token, ...] = ()
    text: str = ""
    prompt: tuple[Token, ...] = ()
    seed: int = 0
    cached_tokens: int = 0
    waited: float = 0.0
    first: float | None = None
    total: float = 0.0
    problem: str = ""
    end: Token | None = None
    routes: tuple[Ids, ...] = ()

    @property
    def ids(self) -> Ids:
        """The new ids."""
        return tuple(token.id for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Event:
    """News of a request: tokens and the text that is now certain; with the last comes the reply."""

    ticket: int
    tokens: tuple[Token, ...] = ()
    text: str = ""
    reply: Reply | None = None


Listener = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Where the engine stands. Counts since it began, but for `waiting`, `running` and blocks; rates over the last seconds.

    state_bytes: of one text, of layers that have a state; states_kept: beginnings whose states are kept. blocks_used hold running requests; blocks_kept hold beginnings that nobody uses now and anybody may. A token is `prompt` when it
    was read, `cached` when its keys and values were there already, `generated` when it was made.
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
