"""Continuations against a recomputation of the whole text for every token."""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import islice

import pytest
import torch

from megatron.core.config.rules import stages_of
from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.build import ByteTokenizer, NullTokenizer
from megatron.inference.generate import continuation, generate_text
from megatron.inference.sampling import Sampling
from tests.helpers import tiny

GREEDY = Sampling(temperature=0.0)
POSITIONS = 16


@cache
def model(positions: str = "learned_absolute", vocabulary: int = tiny.VOCABULARY) -> GPTModel:
    """A whole untrained network; large initial weights make its opinions strong."""
    settings = tiny.config(1, num_layers=2, hidden_size=32, num_attention_heads=4, init_method_std=0.5,
                           position_embedding_type=positions, hidden_dropout=0.3, attention_dropout=0.3,
                           untie_embeddings_and_output_weights=True)
    unpadded = dataclasses.replace(settings, model=dataclasses.replace(settings.model, padded_vocab_size=None))
    run = tiny.run_of(tiny.with_vocabulary(unpadded, vocabulary))
    return tiny.gpt(run, stages_of(run.config)[0]).materialize(7).eval()


def likeliest(network: GPTModel, ids: list[int]) -> int:
    """The token after a text, from one forward pass over all of it."""
    with torch.no_grad():
        logits = network(ids=torch.tensor([ids]))
    return int(logits[-1, 0, :network.build.model.true_vocab_size].argmax())


@pytest.mark.parametrize("positions", ["learned_absolute", "rope", "none"])
def test_a_greedy_continuation_is_the_step_by_step_recomputation(positions: str) -> None:
    network, ids = model(positions), [3, 1, 4, 1, 5]
    found = list(continuation(network, ids, num_tokens=10, sampling=GREEDY, stop=None))
    expected = list(ids)
    for _ in range(10):
        expected.append(likeliest(network, expected))
    assert found == expected[5:]
    assert len(set(found)) > 2, "a continuation of one token proves little"


def test_a_continuation_longer_than_the_positions_slides() -> None:
    network, ids = model(), list(range(12))
    found = list(continuation(network, ids, num_tokens=20, sampling=GREEDY, stop=None))
    expected = list(ids)
    for _ in range(20):
        expected.append(likeliest(network, expected[-POSITIONS:]))
    assert found == expected[12:]


def test_a_prompt_longer_than_the_positions_is_read_from_its_end() -> None:
    ids = [7, 3, 9] * 10
    found = list(continuation(model(), ids, num_tokens=3, sampling=GREEDY, stop=None))
    assert found == list(continuation(model(), ids[-POSITIONS:], num_tokens=3, sampling=GREEDY, stop=None))


def test_it_stops_at_the_end_of_document_and_does_not_give_it() -> None:
    free = list(continuation(model(), [3, 1, 4], num_tokens=12, sampling=GREEDY, stop=None))
    stop = free[6]
    assert list(continuation(model(), [3, 1, 4], num_tokens=12, sampling=GREEDY, stop=stop)) == free[:free.index(stop)]


def test_tokens_come_one_at_a_time() -> None:
    endless = continuation(model(), [3], num_tokens=10**9, sampling=GREEDY, stop=None)
    assert len(list(islice(endless, 3))) == 3
    assert torch.is_grad_enabled(), "a continuation that is left half-way switches gradients off for its user"


def test_padded_ids_are_never_drawn() -> None:
    network = model()
    assert network.build.model.padded_vocab_size > tiny.VOCABULARY
    hot = Sampling(temperature=1e6)
    found = list(continuation(network, [3], num_tokens=300, sampling=hot, stop=None, seed=1))
    assert max(found) < tiny.VOCABULARY and len(set(found)) > 40


def test_a_seed_gives_the_same_text_again_and_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    texts = [list(continuation(model(), [3, 1], num_tokens=12, sampling=Sampling(), stop=None, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_text_is_continued_as_text() -> None:
    network, tokenizer = model("rope", 257), ByteTokenizer()
    found = generate_text(network, tokenizer, "abc", num_tokens=6, sampling=GREEDY)
    new = list(continuation(network, list(b"abc"), num_tokens=6, sampling=GREEDY, stop=256))
    assert found == "abc" + tokenizer.detokenize(new)


def test_an_empty_prompt_begins_a_document() -> None:
    network, tokenizer = model("rope", 257), ByteTokenizer()
    new = list(continuation(network, [tokenizer.eod], num_tokens=6, sampling=GREEDY, stop=256))
    assert generate_text(network, tokenizer, "", num_tokens=6, sampling=GREEDY) == tokenizer.detokenize(new)


def test_a_tokenizer_that_puts_blanks_between_tokens_keeps_them_apart_from_the_prompt() -> None:
    network, tokenizer = model(), NullTokenizer(tiny.VOCABULARY - 1)
    new = list(continuation(network, [3, 1], num_tokens=3, sampling=GREEDY, stop=tokenizer.eod))
    assert generate_text(network, tokenizer, "3 1", num_tokens=3, sampling=GREEDY) == " ".join(map(str, [3, 1, *new]))
