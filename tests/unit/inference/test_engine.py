"""The engine against networks that compute the whole text anew for every token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from megatron.core.config.flags.declare import ConfigError
from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.build import NullTokenizer
from megatron.inference.engine import Engine
from megatron.inference.requests import EngineBusyError, GenerationEvent, GenerationReply, GenerationRequest
from megatron.inference.sampling import SamplingParams
from tests.helpers import tiny
from tests.unit.inference.serving import (
    KINDS,
    POSITIONS,
    engine_of,
    gigabytes,
    greedy,
    network,
    prompts,
    scores,
    slowly,
    stages_on,
)

TIGHT = {"block": 3, "tokens": 7, "together": 4}  # prompts are read in pieces, and texts cross many blocks
WARM = SamplingParams(temperature=0.9, top_p=0.95)


def near(found: list[float | None], expected: list[float]) -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("settings", [{}, TIGHT], ids=["whole", "pieces"])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_the_cache_is_the_recomputation_of_the_whole_text(kind: str, settings: dict[str, Any]) -> None:
    model, texts = network(kind), prompts(9)
    replies = engine_of(model, **settings).run([greedy(text, 18, logprobs=True) for text in texts])
    for text, reply in zip(texts, replies, strict=True):
        ids, logprobs = slowly(model, text, 18)
        assert list(reply.ids) == ids
        near([token.logprob for token in reply.tokens], logprobs)
    assert len({token for reply in replies for token in reply.ids}) > 2, "continuations of one token prove little"


def test_fp32_decoding_is_the_recomputation_to_five_digits() -> None:
    model = stages_on(1, fp64=False, init_method_std=0.2)[0]
    for text, reply in zip(
        prompts(6), engine_of(model, **TIGHT).run([greedy(text, 12, logprobs=True) for text in prompts(6)]), strict=True
    ):
        ids, logprobs = slowly(model, text, 12)
        assert list(reply.ids) == ids
        torch.testing.assert_close(
            torch.tensor([token.logprob for token in reply.tokens]), torch.tensor(logprobs), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("settings", [{}, TIGHT], ids=["whole", "pieces"])
def test_log_probabilities_of_a_prompt_are_those_of_one_pass(settings: dict[str, Any]) -> None:
    model, texts = network(), prompts(5, longest=40)
    asked = [
        greedy(text, count, prompt_logprobs=True, logprobs=True, top_logprobs=3)
        for text, count in zip(texts, (0, 4, 0, 1, 2), strict=True)
    ]
    for request, reply in zip(asked, engine_of(model, **settings).run(asked), strict=True):
        whole = request.prompt + reply.ids
        expected, said = scores(model, whole), (*reply.prompt, *reply.tokens)
        assert [token.id for token in said] == list(whole) and said[0].logprob is None and reply.reason == "length"
        near(
            [token.logprob for token in said[1:]],
            [float(row[token]) for row, token in zip(expected, whole[1:], strict=False)],
        )
        for row, token in zip(expected, said[1:], strict=False):
            best = row.topk(3)
            assert [number for number, _ in token.top] == best.indices.tolist()
            near([score for _, score in token.top], best.values.tolist())


def test_a_prompt_of_more_places_than_are_scored_at_once_is_scored_whole() -> None:
    model = stages_on(1, max_position_embeddings=700, seq_length=700)[0]
    (text,) = prompts(1, shortest=600, longest=600)
    (reply,) = engine_of(model).run([greedy(text, 0, prompt_logprobs=True)])
    near(
        [token.logprob for token in reply.prompt[1:]],
        [float(row[token]) for row, token in zip(scores(model, text), text[1:], strict=False)],
    )


@pytest.mark.parametrize(
    "sampling",
    [WARM, replace(WARM, repetition_penalty=1.3), SamplingParams(top_k=8, min_p=0.02)],
    ids=["top-p", "penalty", "min-p"],
)
def test_a_text_does_not_depend_on_what_else_is_decoded(sampling: SamplingParams) -> None:
    model = network()
    requests = [
        GenerationRequest(text, 5 + 3 * number, sampling, seed=number, ignore_eod=True)
        for number, text in enumerate(prompts(10))
    ]
    together = [reply.ids for reply in engine_of(model, together=6, tokens=16).run(requests)]
    alone = [engine_of(model).run([request])[0].ids for request in requests]
    backwards = [reply.ids for reply in engine_of(model, together=3, block=5).run(requests[::-1])][::-1]
    assert together == alone == backwards and len(set(alone)) == 10


def test_the_same_seed_draws_the_same_and_another_draws_something_else() -> None:
    engine, request = engine_of(network()), GenerationRequest((3, 1, 4), 16, SamplingParams(), seed=5, ignore_eod=True)
    state = torch.get_rng_state()
    one, again, other = engine.run([request, request, replace(request, seed=6)])
    assert one.ids == again.ids != other.ids and one.seed == 5
    assert torch.equal(torch.get_rng_state(), state), "the global generator belongs to others"


def test_requests_without_a_seed_draw_differently_and_say_with_what() -> None:
    engine, request = engine_of(network()), GenerationRequest((3, 1, 4), 16, SamplingParams(), ignore_eod=True)
    one, other = engine.run([request, request])
    assert one.ids != other.ids
    assert engine.run([replace(request, seed=one.seed)])[0].ids == one.ids


def test_padded_ids_are_never_drawn() -> None:
    model = network()
    assert model.build.model.padded_vocab_size > tiny.VOCABULARY
    drawn = [
        token
        for reply in engine_of(model).run(
            [
                GenerationRequest((3,), 60, SamplingParams(temperature=1e6), seed=seed, ignore_eod=True)
                for seed in range(6)
            ]
        )
        for token in reply.ids
    ]
    assert max(drawn) < tiny.VOCABULARY and len(set(drawn)) > 40


def test_blocks_that_run_short_make_the_last_wait_and_change_no_text() -> None:
    model = network()
    requests = [
        GenerationRequest(text, 30, WARM, seed=number, ignore_eod=True, prompt_logprobs=number == 2, logprobs=True)
        for number, text in enumerate(prompts(6, shortest=10, longest=20))
    ]
    expected = engine_of(model).run(requests)
    engine = engine_of(model, block=4, together=6, gb=gigabytes(model, 80))
    found = engine.run(requests)
    assert engine.metrics().preempted > 0, "the cache is large enough for all"
    assert [reply.ids for reply in found] == [reply.ids for reply in expected]
    near(
        [token.logprob for reply in found for token in (*reply.prompt[1:], *reply.tokens)],
        [token.logprob for reply in expected for token in (*reply.prompt[1:], *reply.tokens)],
    )
    assert engine.metrics().blocks_used == 0


def test_a_prompt_that_had_to_wait_amid_its_scoring_is_scored_once() -> None:
    model, (long,) = network(), prompts(1, shortest=40, longest=40)
    engine = engine_of(model, block=4, together=4, tokens=5, gb=gigabytes(model, 84))
    asked = [*(greedy(text, 40) for text in prompts(3, shortest=4, longest=4)), greedy(long, 2, prompt_logprobs=True)]
    reply = engine.run(asked)[-1]
    assert engine.metrics().preempted > 0 and [token.id for token in reply.prompt] == list(long)
    near(
        [token.logprob for token in reply.prompt[1:]],
        [float(row[token]) for row, token in zip(scores(model, long), long[1:], strict=False)],
    )


def test_who_came_last_makes_room_for_a_prompt_though_it_was_to_decode_in_the_same_step() -> None:
    model = stages_on(1, max_position_embeddings=700, seq_length=700)[0]
    (long,), (short,) = (
        prompts(1, shortest=600, longest=600),
        prompts(1, shortest=60, longest=60),
    )  # 256 places are scored in a step
    engine = engine_of(model, block=4, together=2, length=620, gb=gigabytes(model, 640))
    first, second = engine.run([greedy(long, 1, prompt_logprobs=True), greedy(short, 12)])
    assert engine.metrics().preempted > 0
    assert list(first.ids) == slowly(model, long, 1)[0] and list(second.ids) == slowly(model, short, 12)[0]


@pytest.mark.parametrize("sharing", [True, False])
def test_texts_that_begin_alike_share_what_is_stored(sharing: bool) -> None:
    model, beginning = network(), prompts(1, shortest=20, longest=20)[0]
    texts = [beginning + text for text in prompts(5, longest=8, seed=2)]
    engine = engine_of(model, block=4, sharing=sharing)
    first = engine.run([greedy(texts[0], 6)])
    replies = first + engine.run([greedy(text, 6) for text in texts[1:]])
    assert [list(reply.ids) for reply in replies] == [slowly(model, text, 6)[0] for text in texts]
    assert [reply.cached_tokens for reply in replies] == ([0, 20, 20, 20, 20] if sharing else [0] * 5)
    assert (engine.metrics().blocks_kept > 0) == sharing


def test_a_prompt_that_is_stored_whole_is_still_asked_what_follows() -> None:
    model, text = network(), prompts(1, shortest=16, longest=16)[0]
    engine = engine_of(model, block=4)
    one, again = engine.run([greedy(text, 6)]) + engine.run([greedy(text, 6)])
    assert one.ids == again.ids and (one.cached_tokens, again.cached_tokens) == (0, 12)


def test_what_is_kept_gives_way_to_what_is_needed() -> None:
    model = network()
    engine = engine_of(model, block=4, together=2, gb=gigabytes(model, 96))
    for seed in range(6):
        texts = prompts(2, shortest=20, longest=30, seed=seed)
        assert [list(reply.ids) for reply in engine.run([greedy(text, 8) for text in texts])] == [
            slowly(model, text, 8)[0] for text in texts
        ]
    assert engine.metrics().blocks_used == 0 and engine.metrics().preempted == 0


def test_forgotten_beginnings_are_read_anew() -> None:
    engine, text = engine_of(network(), block=4), prompts(1, shortest=20, longest=20)[0]
    engine.run([greedy(text, 2)])
    engine.clear_prefix_cache()
    (reply,) = engine.run([greedy(text, 2)])
    assert reply.cached_tokens == 0


def heard(engine: Engine, request: GenerationRequest) -> tuple[int, list[GenerationEvent]]:
    events: list[GenerationEvent] = []
    return engine.submit(request, events.append), events


def test_tokens_come_one_a_step_and_the_reply_with_the_last() -> None:
    engine = engine_of(network())
    _, events = heard(engine, greedy((3, 1, 4), 5))
    while engine.step():
        assert len(events[-1].tokens) == 1
    assert [event.reply is None for event in events] == [True] * 4 + [False]
    reply = events[-1].reply
    assert reply is not None and sum((event.tokens for event in events), ()) == reply.tokens
    assert "".join(event.text for event in events) == reply.text == " " + " ".join(map(str, reply.ids))


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_cancelled_request_says_what_it_has_and_frees_its_blocks(steps: int) -> None:
    engine = engine_of(network(), **TIGHT)
    ticket, events = heard(engine, greedy(tuple(range(12)), 20))
    _, others = heard(engine, greedy((3, 1, 4), 12))
    for _ in range(steps):
        engine.step()
    engine.cancel(ticket)
    engine.cancel(ticket)
    engine.cancel(10**6)
    while engine.step():
        pass
    assert events[-1].reply is not None and events[-1].reply.reason == "cancelled" and len(events[-1].reply.tokens) < 20
    assert others[-1].reply is not None and list(others[-1].reply.ids) == slowly(network(), (3, 1, 4), 12)[0]
    assert (
        engine.metrics().blocks_used == 0
        and engine.is_idle
        and engine.metrics().finished == {"stop": 0, "length": 1, "cancelled": 1, "error": 0}
    )


def test_the_end_of_document_and_stop_ids_end_a_text_and_are_not_given() -> None:
    model = network()
    free = slowly(model, (3, 1, 4), 12)[0]
    stop = free[6]
    (reply,) = engine_of(model).run([greedy((3, 1, 4), 12, stop_ids=(stop,))])
    assert (list(reply.ids), reply.reason) == (free[: free.index(stop)], "stop")
    tokenizer = NullTokenizer(tiny.VOCABULARY)
    tokenizer.eod = stop
    ends, goes_on = engine_of(model, tokenizer).run([greedy((3, 1, 4), 12, ignore_eod=False), greedy((3, 1, 4), 12)])
    assert (list(ends.ids), ends.reason) == (free[: free.index(stop)], "stop")
    assert (list(goes_on.ids), goes_on.reason) == (free, "length")


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_word_ends_a_text_where_it_begins(keep: bool) -> None:
    model = network()
    free = slowly(model, (3, 1, 4), 12)[0]
    word = f" {free[4]} {free[5]} "
    (reply,) = engine_of(model).run([greedy((3, 1, 4), 12, stop_words=(word, "never"), keep_stop=keep)])
    text = "".join(f" {token}" for token in free)
    assert reply.reason == "stop" and reply.text == text[: text.index(word) + len(word) * keep] and len(reply.ids) <= 7


class Colons(NullTokenizer):
    """Numbers, of which two are a colon and the end of a line."""

    def __init__(self, colon: int, newline: int) -> None:
        super().__init__(tiny.VOCABULARY)
        self.ids = {":": colon, "\n": newline}

    def tokenize(self, text: str) -> list[int]:
        return [self.ids[text]] if text in self.ids else super().tokenize(text)


def test_a_line_does_not_end_with_a_colon_if_that_is_asked_for() -> None:
    model = network()
    free = slowly(model, (3, 1, 4), 8)[0]
    colon, newline = free[0], free[1]
    runs = engine_of(model, Colons(colon, newline)).run(
        [greedy((3, 1, 4), 8), greedy((3, 1, 4), 8, newline_after_colon=False)]
    )
    assert list(runs[0].ids) == free and runs[1].ids[0] == colon
    second = scores(model, (3, 1, 4, colon))[-1].topk(2).indices[1]
    assert runs[1].ids[1] == int(second)


def test_repeated_tokens_are_penalized_by_the_published_formula() -> None:
    model, penalty = network(), 1.4
    (reply,) = engine_of(model).run([greedy((3, 1, 4), 12, sampling=SamplingParams(0.0, repetition_penalty=penalty))])
    ids = [3, 1, 4]
    for _ in range(12):
        with torch.no_grad():
            logits = model(ids=torch.tensor([ids]))[-1, 0, : tiny.VOCABULARY].tolist()
        ids.append(
            max(
                range(tiny.VOCABULARY),
                key=lambda token: (
                    logits[token]
                    if token not in ids
                    else (logits[token] / penalty if logits[token] > 0 else logits[token] * penalty)
                ),
            )
        )
    assert list(reply.ids) == ids[3:] != slowly(model, (3, 1, 4), 12)[0]


@pytest.mark.parametrize(
    "presence, frequency, repetition", [(1.5, 0.0, 1.0), (0.0, 0.4, 1.0), (-2.0, 0.3, 1.0), (0.7, 0.5, 1.2)]
)
def test_generated_tokens_are_penalized_by_openais_formula(
    presence: float, frequency: float, repetition: float
) -> None:
    """logits[j] -= frequency * count(j) + presence * (count(j) > 0), of new tokens; after the repetition penalty, as in vLLM."""
    model, prompt = network(), [3, 1, 4, 1]
    sampling = SamplingParams(
        0.0, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    tight = {"block": 4, "together": 3, "gb": gigabytes(model, 64)}  # requests wait and come back
    asked = [greedy(tuple(prompt), 14, sampling=sampling), *(greedy(text, 14) for text in ((5, 6), (7,), (8, 9)))]
    reply, *others = engine_of(model, **tight).run(asked)
    ids = list(prompt)
    for _ in range(14):
        with torch.no_grad():
            logits = model(ids=torch.tensor([ids]))[-1, 0, : tiny.VOCABULARY]
        seen = torch.tensor(sorted(set(ids)))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition)
        counts = torch.bincount(torch.tensor(ids[len(prompt) :], dtype=torch.int64), minlength=tiny.VOCABULARY)
        ids.append(int((logits - frequency * counts - presence * (counts > 0)).argmax()))
    assert list(reply.ids) == ids[len(prompt) :] != slowly(model, tuple(prompt), 14)[0]
    assert [list(other.ids) for other in others] == [slowly(model, one.prompt, 14)[0] for one in asked[1:]]


@pytest.mark.parametrize(
    "request_, words",
    [
        (lambda: GenerationRequest((1,) * POSITIONS, 2), "more than the 64 positions"),
        (lambda: GenerationRequest((1, 99), 2), "[99] are no ids of the network's 50"),
        (lambda: GenerationRequest((), 2), "a prompt has no tokens"),
        (lambda: GenerationRequest((1,), 0), "no new tokens and no log-probabilities"),
        (lambda: GenerationRequest((1,), 1, top_logprobs=2), "named with log-probabilities only"),
        (lambda: GenerationRequest((1,), 1, stop_words=("",)), "a stop word is empty"),
        (lambda: GenerationRequest((1,), 1, seed=-1), "seed -1 is negative"),
        (lambda: GenerationRequest((1,), 1, SamplingParams(temperature=float("nan"))), "temperature nan"),
        (lambda: GenerationRequest((1,), 1, SamplingParams(top_p_decay=0.5)), "need a top-p"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    request_: Callable[[], GenerationRequest], words: str
) -> None:
    engine = engine_of(network())
    with pytest.raises(ConfigError) as caught:
        engine.submit(request_(), lambda _: None)
    assert words in str(caught.value) and engine.is_idle


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"together": 0}, "--inference-max-requests 0"),
        ({"block": 0}, "block-size 0"),
        ({"tokens": 3}, "less than --inference-max-requests"),
        ({"gb": 1e-6}, "fewer than one text of 64"),
        ({"guesses": 2}, "needs a draft model"),
        ({"length": 1}, "--inference-max-seq-length 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_what_to_do(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_of(network(), **settings)


def test_a_text_may_fill_every_position_and_one_token_more() -> None:
    (reply,) = engine_of(network("learned")).run([greedy(tuple(range(40)), 25)])
    assert list(reply.ids) == slowly(network("learned"), tuple(range(40)), 25)[0]


def test_too_many_waiting_requests_are_turned_away() -> None:
    engine = engine_of(network(), together=2, waiting=3)
    for _ in range(5):
        engine.submit(greedy((1,), 2), lambda _: None)
    with pytest.raises(EngineBusyError):
        engine.submit(greedy((1,), 2), lambda _: None)
    engine.step()
    engine.submit(greedy((1,), 2), lambda _: None)


def test_a_long_prompt_waits_for_room_when_it_may_not_be_cut() -> None:
    model, texts = network(), prompts(4, shortest=12, longest=12)
    engine = engine_of(model, enable_chunked_prefill=False, tokens=16, together=4)
    assert [list(reply.ids) for reply in engine.run([greedy(text, 6) for text in texts])] == [
        slowly(model, text, 6)[0] for text in texts
    ]
    with pytest.raises(ConfigError, match="--no-enable-chunked-prefill"):
        engine.submit(greedy((1,) * 14, 2), lambda _: None)


@pytest.mark.parametrize("seed", range(12))
def test_no_settings_change_a_text(seed: int) -> None:
    random = Random(seed)
    model, beginning = network(), prompts(1, shortest=9, longest=9)[0]
    texts = [
        text if random.random() < 0.5 else beginning[: random.randint(1, 9)] + text
        for text in prompts(8, longest=12, seed=seed)
    ]
    counts = [random.randint(1, 30) for _ in texts]
    guesses, together = random.choice((0, 1, 4)), random.randint(1, 5)
    room = random.randint(64 + 1 + guesses, 160)  # tokens: from one text at its longest
    engine = engine_of(
        model,
        draft=network(seed=random.choice((7, 8))) if guesses else None,
        guesses=guesses,
        together=together,
        block=random.choice((1, 2, 3, 8)),
        tokens=together * (1 + guesses) + random.randint(0, 10),
        sharing=random.random() < 0.7,
        gb=(1 + (guesses > 0)) * gigabytes(model, room + 8),
    )
    found = engine.run([greedy(text, count) for text, count in zip(texts, counts, strict=True)])
    assert [list(reply.ids) for reply in found] == [
        slowly(model, text, count)[0] for text, count in zip(texts, counts, strict=True)
    ]
    assert engine.metrics().blocks_used == 0


def test_a_text_that_had_to_wait_goes_on_though_it_has_outgrown_one_pass() -> None:
    model, texts = network(), prompts(3, shortest=10, longest=12)
    engine = engine_of(model, enable_chunked_prefill=False, tokens=16, together=3, block=4, gb=gigabytes(model, 72))
    assert [list(reply.ids) for reply in engine.run([greedy(text, 40) for text in texts])] == [
        slowly(model, text, 40)[0] for text in texts
    ]
    assert engine.metrics().preempted > 0


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_half_formats_decode_what_they_recompute_to_their_precision(half: str) -> None:
    model = stages_on(1, fp64=False, init_method_std=0.1, **{half: True})[0]
    for text, reply in zip(
        prompts(4), engine_of(model, **TIGHT).run([greedy(text, 8, logprobs=True) for text in prompts(4)]), strict=True
    ):
        expected = scores(model, text + reply.ids)[len(text) - 1 :]
        found = [token.logprob for token in reply.tokens]
        assert found == pytest.approx(
            [float(row[token]) for row, token in zip(expected, reply.ids, strict=False)], abs=0.05
        )


def test_logits_that_are_no_numbers_are_an_error_of_the_request() -> None:
    model = stages_on(1)[0]
    with torch.no_grad():
        model.decoder.final_layernorm.weight.fill_(float("nan"))
    (reply,) = engine_of(model).run([GenerationRequest((1, 2), 4, SamplingParams(), seed=1)])
    assert reply.reason == "error" and "not finite" in reply.problem


def test_closing_answers_all_that_is_still_asked() -> None:
    engine = engine_of(network(), together=2)
    told = [heard(engine, greedy((1, 2), 9))[1] for _ in range(4)]
    engine.step()
    engine.close()
    assert all(events[-1].reply is not None and events[-1].reply.reason == "cancelled" for events in told)
    assert engine.metrics().blocks_used == 0 and engine.is_idle


def test_metrics_count_what_happened() -> None:
    engine, texts = engine_of(network(), block=4), prompts(5)
    engine.run([greedy(text, 6) for text in texts])
    found = engine.metrics()
    assert (found.requests, found.generated_tokens, found.prompt_tokens) == (5, 30, sum(map(len, texts)))
    assert (found.waiting, found.running, found.blocks_used) == (0, 0, 0) and found.tokens_per_second > 0
    assert found.bytes_per_token == 2 * 2 * 32 * 8, "keys and values of two layers, 32 fp64 numbers each"


def test_a_default_cache_holds_all_requests_at_their_longest() -> None:
    engine = engine_of(network(), together=3, block=16)
    assert engine.metrics().blocks == 3 * POSITIONS // 16
    assert engine_of(network(), together=3, block=16, length=20).metrics().blocks == 3 * 2


def reply_of(model: GPTModel, request: GenerationRequest, **settings: Any) -> GenerationReply:
    return engine_of(model, **settings).run([request])[0]


def test_top_p_shrinks_after_every_token_down_to_its_bound() -> None:
    model = network()
    sampling = SamplingParams(temperature=3.0, top_p=0.9, top_p_decay=0.5, top_p_bound=0.1)
    reply = reply_of(model, GenerationRequest((3, 1), 12, sampling, seed=4, ignore_eod=True))
    limits = [max(0.9 * 0.5**number, 0.1) for number in range(12)]
    assert [sampling.params_for_token(number).top_p for number in range(12)] == pytest.approx(limits)
    for number, token in enumerate(reply.ids):
        shares = (scores(model, (3, 1, *reply.ids[:number]))[-1] / 3.0).softmax(-1)
        assert float(shares[shares > shares[token]].sum()) < limits[number], (
            "a token outside of the likeliest that reach p"
        )


def test_a_step_builds_no_plans_of_attention_for_its_lengths() -> None:
    model, seen = network(), []
    engine = engine_of(model)
    model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    engine.run([greedy(prompts(1)[0], 3)])
    assert set(seen) == {False} and torch.backends.cuda.cudnn_sdp_enabled()
