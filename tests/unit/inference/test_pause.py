"""An engine that is paused while its weights change: requests wait, and go on with the new weights as if those had read the whole text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.models.gpt import GPTModel
from megatron.inference.requests import GenerationEvent
from tests.unit.inference.serving import BASE, HYBRID, KINDS, engine_of, greedy, prompts, slowly, stages_on

NEW = 12
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "blocks of 4": ({}, {"block": 4, "together": 3}),
    "states": (HYBRID, {"block": 4, "together": 3}),
    "drafts": (KINDS["ahead"], {"guesses": 2}),
}


def go_on(case: str, *, pauses: bool) -> tuple[list[bool], GPTModel]:
    """Change the weights after some steps; whether each reply is what the new weights say of its text so far."""
    changes, settings = CASES[case]
    (model,), (other,) = stages_on(1, **{**BASE, **changes}), stages_on(1, seed=8, **{**BASE, **changes})
    engine, texts = engine_of(model, **settings), prompts(5, shortest=9, longest=20)
    events: list[list[GenerationEvent]] = [[] for _ in texts]
    for text, heard in zip(texts, events, strict=True):
        engine.submit(greedy(text, NEW, logprobs=True), heard.append)
    for _ in range(5):
        engine.step()
    known = [[token.id for event in heard for token in event.tokens] for heard in events]
    assert sum(map(len, known)) > 5 and any(len(one) < NEW for one in known)
    if pauses:
        engine.pause()
        assert not engine.step() and engine.metrics().blocks_used == engine.metrics().blocks_kept == 0
        late: list[GenerationEvent] = []
        engine.submit(greedy(texts[0], NEW, logprobs=True), late.append)
        texts, known, events = [*texts, texts[0]], [*known, []], [*events, late]
        assert not engine.step() and not late and engine.metrics().running == 0
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    if pauses:
        engine.resume()
    while engine.step():
        pass
    right = []
    for text, before, heard in zip(texts, known, events, strict=True):
        reply = heard[-1].reply
        assert reply is not None and list(reply.ids[: len(before)]) == before and len(reply.ids) == NEW
        ids, logprobs = slowly(other, (*text, *before), NEW - len(before))
        found = [token.logprob or 0.0 for token in reply.tokens[len(before) :]]
        right.append(list(reply.ids[len(before) :]) == ids and found == pytest.approx(logprobs, rel=1e-9, abs=1e-9))
    return right, model


@pytest.mark.parametrize("case", CASES)
def test_requests_go_on_with_the_new_weights(case: str) -> None:
    right, _ = go_on(case, pauses=True)
    assert all(right) and len(right) == 6


def test_what_old_weights_have_stored_would_be_seen() -> None:
    right, _ = go_on("blocks of 4", pauses=False)
    assert not all(right)
