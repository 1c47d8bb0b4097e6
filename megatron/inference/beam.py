"""Beam search: the few likeliest texts, a token at a time.

Each step asks the engine what follows every text that is still in the running. Texts of one beam begin alike, so that nearly
all of their keys and values are shared and stored already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from megatron.core.config.flags.declare import raise_config_error_if
from megatron.inference.requests import GenerationReply, GenerationRequest, Ids
from megatron.inference.sampling import SamplingParams

Ask = Callable[[Sequence[GenerationRequest]], list[GenerationReply]]


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation. logprob: sum over its tokens and the end token, which is not among `ids`; score: that sum over
    the number of those tokens to the power of the length penalty.
    """

    ids: Ids
    logprob: float
    score: float


class BeamFailed(Exception):
    """The engine could not answer a request of the search; the message says why."""


def beam_search(
    ask: Ask, prompt: Ids, *, width: int, num_tokens: int, ends: Collection[int], length_penalty: float = 1.0
) -> list[Beam]:
    """Return the `width` continuations with the highest scores that beam search finds, the best first. ask: runs
    requests, such as `Engine.run` or `Service.submit_and_wait_all`. ends: ids that end a text. A length penalty above 1
    favours long texts. Raises `ConfigError` as `Engine.submit` does, and `BeamFailed`.
    """
    raise_config_error_if(
        (
            "" if width >= 1 else f"beam width {width} is too small; give 1 or more",
            "" if num_tokens >= 1 else f"{num_tokens} new tokens are asked for; a beam needs 1 or more",
        )
    )
    running: list[tuple[Ids, float]] = [((), 0.0)]
    ended: list[Beam] = []
    for length in range(1, num_tokens + 1):
        scores = _request_top_next_logprobs(ask, prompt, [ids for ids, _ in running], 2 * width)
        steps = sorted(
            (
                (before + logprob, place, token)
                for place, (_, before) in enumerate(running)
                for token, logprob in scores[place]
            ),
            key=lambda step: (-step[0], *step[1:]),
        )[: 2 * width]
        going: list[tuple[Ids, float]] = []
        for place, (total, parent, token) in enumerate(steps):
            if token not in ends:
                going.append(((*running[parent][0], token), total))
            elif place < width:  # further down it is no better than what goes on
                ended.append(Beam(running[parent][0], total, total / length**length_penalty))
        ended = sorted(ended, key=lambda beam: -beam.score)[:width]
        running = going[:width]
        if not running or _no_beam_can_improve(ended, width, running[0][1], length, length_penalty):
            break
    else:
        ended += [Beam(ids, total, total / len(ids) ** length_penalty) for ids, total in running]
    return sorted(ended, key=lambda beam: -beam.score)[:width]


def _no_beam_can_improve(ended: Sequence[Beam], width: int, best: float, length: int, penalty: float) -> bool:
    """Whether no running text would be among the best if it ended now. best: their highest sum of logprobs."""
    return len(ended) == width and ended[-1].score >= best / length**penalty


def _request_top_next_logprobs(
    ask: Ask, prompt: Ids, texts: Sequence[Ids], count: int
) -> list[tuple[tuple[int, float], ...]]:
    """Return the `count` likeliest (id, log-probability) after each text. Raises `BeamFailed`."""
    replies = ask(
        [
            GenerationRequest(
                prompt + ids,
                num_tokens=1,
                sampling=SamplingParams(0.0),
                ignore_eod=True,
                logprobs=True,
                top_logprobs=count,
            )
            for ids in texts
        ]
    )
    for reply in replies:
        if reply.reason not in ("length", "stop") or not reply.tokens:
            raise BeamFailed(reply.problem or f"a request of the search was {reply.reason}")
    return [reply.tokens[0].top for reply in replies]
