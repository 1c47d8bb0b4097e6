"""Continuations against a recomputation of the whole text for every token."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import ByteTokenizer, NullTokenizer
from megatron.inference.engine import Engine
from megatron.inference.generate import generate_continuation, generate_texts
from megatron.inference.sampling import SamplingParams
from tests.helpers import tiny
from tests.unit.inference.serving import GREEDY, engine_of, network, stages_on

POSITIONS = 16


@cache
def model(positions: str = "learned_absolute", vocabulary: int = tiny.VOCABULARY) -> GPTModel:
    """A whole untrained network with few positions."""
    return stages_on(
        1, vocabulary, position_embedding_type=positions, max_position_embeddings=POSITIONS, seq_length=POSITIONS
    )[0]


def engine(positions: str = "learned_absolute") -> Engine:
    return engine_of(model(positions))


def recomputed(network: GPTModel, ids: list[int], count: int) -> list[int]:
    """The likeliest tokens after a text, each from one forward pass over as much of it as there are positions for."""
    ids = list(ids)
    for _ in range(count):
        with torch.no_grad():
            logits = network(ids=torch.tensor([ids[-POSITIONS:]]))
        ids.append(int(logits[-1, 0, : network.build.model.true_vocab_size].argmax()))
    return ids[-count:]


@pytest.mark.parametrize("positions", ["learned_absolute", "rope", "none"])
def test_a_greedy_continuation_is_the_step_by_step_recomputation(positions: str) -> None:
    ids = [3, 1, 4, 1, 5]
    assert generate_continuation(engine(positions), ids, num_tokens=10, sampling=GREEDY, ends=False) == recomputed(
        model(positions), ids, 10
    )


@pytest.mark.parametrize("length", [1, 12, 16, 30])
def test_a_text_longer_than_the_positions_slides(length: int) -> None:
    ids = [number * 7 % 50 for number in range(length)]
    assert generate_continuation(engine(), ids, num_tokens=20, sampling=GREEDY, ends=False) == recomputed(
        model(), ids, 20
    )


def test_a_text_that_slides_draws_on_with_its_seed() -> None:
    warm = SamplingParams(temperature=0.8)
    found = generate_continuation(engine(), [3, 1, 4], num_tokens=40, sampling=warm, ends=False, seed=4)
    assert found[:14] == generate_continuation(engine(), [3, 1, 4], num_tokens=14, sampling=warm, ends=False, seed=4)
    assert found == generate_continuation(engine(), [3, 1, 4], num_tokens=40, sampling=warm, ends=False, seed=4)
    assert found != generate_continuation(engine(), [3, 1, 4], num_tokens=40, sampling=warm, ends=False, seed=5)


def test_it_stops_at_the_end_of_document_and_does_not_give_it() -> None:
    free = generate_continuation(engine(), [3, 1, 4], num_tokens=30, sampling=GREEDY, ends=False)
    for stop in (free[6], free[20]):
        tokenizer = NullTokenizer(tiny.VOCABULARY)
        tokenizer.eod = stop
        found = generate_continuation(engine_of(model(), tokenizer), [3, 1, 4], num_tokens=30, sampling=GREEDY)
        assert found == free[: free.index(stop)]


TOKENIZERS: dict[str, tuple[Tokenizer, str]] = {
    "bytes": (ByteTokenizer(), "abc"),
    "numbers": (NullTokenizer(256), "3 1"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("count", [0, 6, 20])
def test_a_text_is_continued_as_text(name: str, count: int) -> None:
    tokenizer, prompt = TOKENIZERS[name]
    asked = engine_of(model("rope", 257), tokenizer)
    ids = tokenizer.tokenize(prompt)
    new = generate_continuation(asked, ids, num_tokens=count, sampling=GREEDY)
    assert generate_texts(asked, [prompt], num_tokens=count, sampling=GREEDY)[0] == tokenizer.detokenize(ids + new)


def test_texts_decoded_together_are_those_decoded_alone() -> None:
    asked, prompts = engine_of(network(vocabulary=257), ByteTokenizer()), ["a", "", "abcdef", "x" * 70]
    together = generate_texts(asked, prompts, num_tokens=10, sampling=SamplingParams(0.8), seed=3)
    assert together == [
        generate_texts(asked, [prompt], num_tokens=10, sampling=SamplingParams(0.8), seed=3)[0] for prompt in prompts
    ]


def test_an_empty_prompt_begins_a_document() -> None:
    tokenizer = ByteTokenizer()
    asked = engine_of(model("rope", 257), tokenizer)
    new = generate_continuation(asked, [tokenizer.eod], num_tokens=6, sampling=GREEDY)
    assert generate_texts(asked, [""], num_tokens=6, sampling=GREEDY)[0] == tokenizer.detokenize(new)
