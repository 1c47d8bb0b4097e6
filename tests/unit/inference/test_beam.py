"""Beam search against a search written out plainly, and against every text there is."""

from __future__ import annotations

import itertools

import pytest

from megatron.core.config.flags.declare import ConfigError
from megatron.core.models.gpt import GPTModel
from megatron.inference.beam import BeamFailed, beam_search
from megatron.inference.requests import GenerationReply, GenerationRequest, Ids
from tests.unit.inference.serving import engine_of, network, scores, stages_on


def found(
    model: GPTModel, prompt: Ids, width: int, count: int, ends: tuple[int, ...], penalty: float
) -> list[tuple[Ids, float]]:
    beams = beam_search(
        engine_of(model, block=4).run, prompt, width=width, num_tokens=count, ends=ends, length_penalty=penalty
    )
    return [(beam.ids, beam.score) for beam in beams]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_beam_as_wide_as_the_vocabulary_finds_the_best_of_all_texts(penalty: float) -> None:
    model, prompt, end = stages_on(1, 5, init_method_std=0.3)[0], (1, 3), 4
    scored = []
    for length in (1, 2, 3):
        for ids in itertools.product(range(5), repeat=length):
            if end in ids[:-1] or (ids[-1] != end and length < 3):
                continue
            rows = scores(model, prompt + ids)
            total = sum(float(rows[len(prompt) - 1 + place][token]) for place, token in enumerate(ids))
            scored.append((total / length**penalty, ids if ids[-1] != end else ids[:-1]))
    best = max(scored)
    answer = found(model, prompt, 40, 3, (end,), penalty)
    assert answer[0][0] == best[1] and answer[0][1] == pytest.approx(best[0], abs=1e-9)
    assert [score for _, score in answer] == pytest.approx(
        sorted((score for score, _ in scored), reverse=True)[:40], abs=1e-9
    )


def plainly(model: GPTModel, prompt: Ids, width: int, count: int) -> list[tuple[Ids, float]]:
    """The search without an end: at every step the best `width` of all continuations of all texts."""
    beams: list[tuple[Ids, float]] = [((), 0.0)]
    for _ in range(count):
        steps = [
            ((*ids, token), total + logprob)
            for ids, total in beams
            for token, logprob in enumerate(scores(model, prompt + ids)[-1].tolist())
        ]
        beams = sorted(steps, key=lambda step: -step[1])[:width]
    return [(ids, total / count) for ids, total in beams]


@pytest.mark.parametrize("width", [1, 3, 5])
def test_a_narrow_beam_takes_the_steps_of_the_plain_search(width: int) -> None:
    model, prompt = network(), (3, 1, 4, 1, 5)
    expected = plainly(model, prompt, width, 7)
    answer = found(model, prompt, width, 7, (), 1.0)
    assert [ids for ids, _ in answer] == [ids for ids, _ in expected]
    assert [score for _, score in answer] == pytest.approx([score for _, score in expected], abs=1e-9)


def test_a_search_over_ends_when_nothing_better_can_come() -> None:
    model, asked = network(), []

    def ask(requests: list[GenerationRequest]) -> list[GenerationReply]:
        asked.append(len(requests))
        return engine_of(model).run(requests)

    every = tuple(range(50))
    (best, *_) = beam_search(ask, (3, 1), width=2, num_tokens=9, ends=every)
    assert (
        asked == [1]
        and best.ids == ()
        and best.logprob == pytest.approx(float(scores(model, (3, 1))[-1].max()), abs=1e-9)
    )


def test_what_cannot_be_searched_is_refused() -> None:
    engine = engine_of(network())
    with pytest.raises(ConfigError, match="beam width 0"):
        beam_search(engine.run, (1,), width=0, num_tokens=2, ends=())
    with pytest.raises(BeamFailed, match="gone"):
        beam_search(
            lambda requests: [GenerationReply("error", problem="a rank is gone")] * len(requests),
            (1,),
            width=2,
            num_tokens=2,
            ends=(),
        )
