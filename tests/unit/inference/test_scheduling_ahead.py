"""The next step launched before the tokens of this one are known: the same tokens, scores, reasons and texts as step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.inference import engine as engines
from megatron.inference.engine import Engine
from megatron.inference.requests import GenerationEvent, GenerationReply, GenerationRequest
from megatron.inference.sampling import SamplingParams
from tests.unit.inference.serving import engine_of, gigabytes, greedy, network, prompts

WARM = SamplingParams(temperature=0.9, top_p=0.95)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Engines look ahead on a CPU, too; how many steps were launched so."""
    counts = {"ahead": 0, "waited": 0}
    old = Engine._can_look_ahead

    def counting(self: Engine) -> bool:
        can = old(self)
        counts["ahead" if can else "waited"] += 1
        return can

    monkeypatch.setattr(engines, "has_separate_memory", lambda device: True)
    monkeypatch.setattr(Engine, "_can_look_ahead", counting)
    return counts


def both(
    kind: str, asked: list[GenerationRequest], **settings: Any
) -> tuple[list[GenerationReply], list[GenerationReply], Engine]:
    """(replies when steps are scheduled ahead, replies step by step, the engine of the first)."""
    model = network(kind)
    looking = engine_of(model, **settings)
    return (looking.run(asked), engine_of(model, inference_async_scheduling=False, **settings).run(asked), looking)


def same(found: list[GenerationReply], expected: list[GenerationReply]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.ids, one.reason, one.text) == (other.ids, other.reason, other.text)
        assert (one.end is None) == (other.end is None)
        for mine, theirs in zip((*one.prompt, *one.tokens), (*other.prompt, *other.tokens), strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-9)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


def mixed(count: int = 12) -> list[GenerationRequest]:
    """Greedy and warm ones, of many lengths; some end with a token or a word, some are scored, some alter logits by what was said."""
    asked = []
    for number, text in enumerate(prompts(count, longest=24)):
        sampling = SamplingParams(0.0) if number % 2 else WARM
        asked.append(
            GenerationRequest(
                text,
                5 + 2 * number,
                replace(sampling, repetition_penalty=1.2)
                if number == 7
                else replace(sampling, frequency_penalty=0.5)
                if number == 8
                else sampling,
                seed=number,
                stop_ids=(3, 7, 11, 19) if number % 3 == 1 else (),
                stop_words=(" 2", " 40 ") if number % 4 == 2 else (),
                ignore_eod=number % 5 != 0,
                logprobs=number % 2 == 0,
                top_logprobs=2 * (number == 4),
                prompt_logprobs=number == 6,
                after_temperature=number == 8,
            )
        )
    return asked


@pytest.mark.parametrize("kind", ["rope", "sinks and windows", "experts"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"block": 3, "tokens": 7, "together": 4}, {"block": 4, "together": 12}],
    ids=["whole", "pieces", "all"],
)
def test_mixed_batches_say_the_same(ahead: dict[str, int], kind: str, settings: dict[str, Any]) -> None:
    found, expected, engine = both(kind, mixed(), **settings)
    same(found, expected)
    assert {reply.reason for reply in found} == {"stop", "length"}
    assert ahead["ahead"] > 5 and ahead["waited"] > 0
    assert engine.is_idle and engine.metrics().blocks_used == 0


def test_blocks_that_run_short_make_the_last_wait_all_the_same(ahead: dict[str, int]) -> None:
    texts = prompts(6, shortest=10, longest=20)
    asked = [
        GenerationRequest(text, 30, WARM, seed=number, ignore_eod=True, logprobs=True)
        for number, text in enumerate(texts)
    ]
    settings = {"block": 4, "together": 6, "gb": gigabytes(network(), 80)}
    found, expected, engine = both("rope", asked, **settings)
    same(found, expected)
    assert engine.metrics().preempted > 0 and ahead["ahead"] > 5 and engine.metrics().blocks_used == 0


def test_beginnings_are_shared_and_what_followed_the_end_of_a_text_is_in_none(ahead: dict[str, int]) -> None:
    model, beginning = network(), prompts(1, shortest=20, longest=20)[0]
    engine = engine_of(model, block=4)
    first = engine.run([greedy(beginning, 12, stop_ids=tuple(range(0, 50, 2)))])[0]
    whole = beginning + first.ids + (() if first.end is None else (first.end.id,))
    again = engine.run([greedy(whole + text, 8) for text in prompts(4, longest=6)])
    plain = engine_of(model, block=4, inference_async_scheduling=False, sharing=False)
    same(again, plain.run([greedy(whole + text, 8) for text in prompts(4, longest=6)]))
    assert all(reply.cached_tokens >= 20 for reply in again) and ahead["ahead"] > 0


def test_requests_that_come_while_a_step_is_computed_join_the_next_one(ahead: dict[str, int]) -> None:
    engine, events = engine_of(network(), together=3), dict[int, list[GenerationEvent]]()
    texts = prompts(5)
    for number, text in enumerate(texts):
        events[number] = []
        engine.submit(greedy(text, 6 + number), events[number].append)
        engine.step()
    while engine.step():
        pass
    expected = engine_of(network(), inference_async_scheduling=False).run(
        [greedy(text, 6 + number) for number, text in enumerate(texts)]
    )
    same([own[-1].reply for own in events.values() if own[-1].reply is not None], expected)
    assert all(len(event.tokens) == 1 for own in events.values() for event in own), "a token an event"


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_who_is_cancelled_while_a_step_is_computed_says_what_it_has(ahead: dict[str, int], steps: int) -> None:
    engine, events, others = engine_of(network()), list[GenerationEvent](), list[GenerationEvent]()
    ticket = engine.submit(greedy(tuple(range(12)), 20), events.append)
    engine.submit(greedy((3, 1, 4), 12), others.append)
    for _ in range(steps):
        engine.step()
    engine.cancel(ticket)
    while engine.step():
        pass
    assert events[-1].reply is not None and events[-1].reply.reason == "cancelled"
    assert steps <= len(events[-1].reply.tokens) <= steps + 1
    assert others[-1].reply is not None and len(others[-1].reply.tokens) == 12
    assert engine.metrics().blocks_used == 0 and engine.is_idle


def test_logits_that_are_no_numbers_end_a_text_and_no_other(
    ahead: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, count = network(), 0
    old = model.forward

    def broken(**given: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        logits = old(**given)
        if count == 3:
            logits[0] = float("nan")
        return logits

    monkeypatch.setattr(model, "forward", broken)
    short, long = engine_of(model).run([greedy((3, 1, 4), 9), greedy((5, 9), 9)])
    assert sorted((short.reason, long.reason)) == ["error", "length"]


def test_drafts_and_several_ranks_wait_for_every_step() -> None:
    assert engine_of(network())._overlaps is False, "a CPU computes when it is asked"
    assert engine_of(network("ahead"), guesses=2)._overlaps is False


def test_nothing_is_computed_behind_a_last_token_that_is_foreseen(ahead: dict[str, int]) -> None:
    engine, computed = engine_of(network()), list[int]()
    old = engine.runner.launch
    engine.runner.launch = lambda step: (computed.extend(len(row.ids) for row in step.rows[0]), old(step))[1]  # type: ignore[method-assign]
    engine.run([greedy((3, 1, 4), 5), greedy((2, 7, 1, 8), 9)])
    assert sum(computed) == 3 + 4 + 4 + 8 and ahead["ahead"] > 5
