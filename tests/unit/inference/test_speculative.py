"""A draft changes how many passes a text takes, and nothing of the text."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.config.flags import ConfigError
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling
from tests.unit.inference.serving import engine_of, gigabytes, greedy, network, prompts, slowly, stages_on

SAMPLINGS = {"greedy": Sampling(0.0), "warm": Sampling(0.8, top_p=0.95), "penalty": Sampling(0.7, repetition_penalty=1.3),
             "top-k": Sampling(top_k=5), "decay": Sampling(1.5, top_p=0.9, top_p_decay=0.8, top_p_bound=0.2)}


@pytest.mark.parametrize("draft", [7, 8], ids=["a perfect draft", "a stranger"])
@pytest.mark.parametrize("guesses", [1, 3, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_text_is_the_same_with_a_draft_and_without(sampling: Sampling, guesses: int, draft: int) -> None:
    model = network()
    requests = [Request(text, 3 + 2 * number, sampling, seed=number, ignore_eod=True, logprobs=True)
                for number, text in enumerate(prompts(7))]
    settings: dict[str, Any] = {"block": 4, "tokens": 20, "together": 4}
    expected = engine_of(model, **settings).run(requests)
    engine = engine_of(model, draft=network(seed=draft), guesses=guesses, **settings)
    found = engine.run(requests)
    assert [reply.ids for reply in found] == [reply.ids for reply in expected]
    for one, other in zip(found, expected, strict=True):
        assert [token.logprob for token in one.tokens] == pytest.approx([token.logprob for token in other.tokens], abs=1e-9)
    seen = engine.metrics()
    if draft == 7:  # the draft is the network itself, and draws with the same numbers
        assert seen.accepted_tokens == seen.proposed_tokens > 0 and seen.generated_tokens == sum(len(reply.ids) for reply in found)
    else:
        assert seen.accepted_tokens < seen.proposed_tokens
    assert seen.blocks_used == 0


def test_a_good_draft_saves_passes() -> None:
    model, request = network(), greedy((3, 1, 4), 40)
    steps = []
    for guesses in (0, 4):
        engine = engine_of(model, draft=network() if guesses else None, guesses=guesses)
        engine.run([request])
        steps.append(engine.metrics().steps)
    assert steps == [40, 1 + 8], "one to read the prompt, and then five tokens a pass but for the last"


@pytest.mark.parametrize("sharing", [True, False])
def test_texts_share_beginnings_that_both_networks_have_stored(sharing: bool) -> None:
    model, beginning = network(), prompts(1, shortest=17, longest=17)[0]
    engine = engine_of(model, draft=network(seed=8), guesses=3, block=4, sharing=sharing)
    for seed in range(5):
        text = beginning + prompts(1, longest=6, seed=seed)[0]
        (reply,) = engine.run([greedy(text, 12)])
        assert list(reply.ids) == slowly(model, text, 12)[0]
    assert reply.cached_tokens == (16 if sharing else 0)


def test_a_request_that_had_to_wait_says_the_same() -> None:
    model, texts = network(), prompts(5, shortest=10, longest=20)
    engine = engine_of(model, draft=network(seed=8), guesses=2, block=4, together=5, gb=2 * gigabytes(model, 80))
    found = engine.run([greedy(text, 28) for text in texts])
    assert engine.metrics().preempted > 0
    assert [list(reply.ids) for reply in found] == [slowly(model, text, 28)[0] for text in texts]


def test_a_text_may_end_amid_guesses() -> None:
    model = network()
    free = slowly(model, (3, 1, 4), 12)[0]
    stop = free[5]
    engine = engine_of(model, draft=network(), guesses=4)
    ends, word = engine.run([greedy((3, 1, 4), 12, stop_ids=(stop,)), greedy((3, 1, 4), 12, stop_words=(f" {free[6]} {free[7]}",))])
    assert list(ends.ids) == free[:free.index(stop)] and ends.reason == word.reason == "stop"
    assert engine.metrics().blocks_used == 0


def test_a_draft_of_other_words_or_fewer_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="the draft knows 40 ids and the network 50"):
        engine_of(network(), draft=network(vocabulary=40), guesses=2)
    short = stages_on(1, max_position_embeddings=32, seq_length=32)[0]
    with pytest.raises(ConfigError, match="--inference-max-seq-length 32"):
        engine_of(network(), draft=short, guesses=2)
    engine_of(network(), draft=short, guesses=2, length=32)
