"""A draft changes how many passes a text takes, and nothing of the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.config.flags.declare import ConfigError
from megatron.core.models.gpt import GPTModel
from megatron.core.models.mtp import MTPInputs, MTPLosses
from megatron.inference.requests import GenerationRequest
from megatron.inference.sampling import SamplingParams
from megatron.inference.sequence import SequenceState
from tests.unit.inference.serving import LATENT, engine_of, gigabytes, greedy, network, prompts, slowly, stages_on

SAMPLINGS = {
    "greedy": SamplingParams(0.0),
    "warm": SamplingParams(0.8, top_p=0.95),
    "penalty": SamplingParams(0.7, repetition_penalty=1.3),
    "counts": SamplingParams(0.7, presence_penalty=0.9, frequency_penalty=0.6),
    "top-k": SamplingParams(top_k=5),
    "decay": SamplingParams(1.5, top_p=0.9, top_p_decay=0.8, top_p_bound=0.2),
}


@pytest.mark.parametrize("draft", [7, 8], ids=["a perfect draft", "a stranger"])
@pytest.mark.parametrize("guesses", [1, 3, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_text_is_the_same_with_a_draft_and_without(sampling: SamplingParams, guesses: int, draft: int) -> None:
    model = network()
    requests = [
        GenerationRequest(text, 3 + 2 * number, sampling, seed=number, ignore_eod=True, logprobs=True)
        for number, text in enumerate(prompts(7))
    ]
    settings: dict[str, Any] = {"block": 4, "tokens": 20, "together": 4}
    expected = engine_of(model, **settings).run(requests)
    engine = engine_of(model, draft=network(seed=draft), guesses=guesses, **settings)
    found = engine.run(requests)
    assert [reply.ids for reply in found] == [reply.ids for reply in expected]
    for one, other in zip(found, expected, strict=True):
        assert [token.logprob for token in one.tokens] == pytest.approx(
            [token.logprob for token in other.tokens], abs=1e-9
        )
    seen = engine.metrics()
    if draft == 7:  # the draft is the network itself, and draws with the same numbers
        assert seen.accepted_tokens == seen.proposed_tokens > 0 and seen.generated_tokens == sum(
            len(reply.ids) for reply in found
        )
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
    ends, word = engine.run(
        [greedy((3, 1, 4), 12, stop_ids=(stop,)), greedy((3, 1, 4), 12, stop_words=(f" {free[6]} {free[7]}",))]
    )
    assert list(ends.ids) == free[: free.index(stop)] and ends.reason == word.reason == "stop"
    assert engine.metrics().blocks_used == 0


def test_a_draft_of_other_words_or_fewer_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="the draft knows 40 ids and the network 50"):
        engine_of(network(), draft=network(vocabulary=40), guesses=2)
    short = stages_on(1, max_position_embeddings=32, seq_length=32)[0]
    with pytest.raises(ConfigError, match="--inference-max-seq-length 32"):
        engine_of(network(), draft=short, guesses=2)
    engine_of(network(), draft=short, guesses=2, length=32)


AHEAD: dict[str, dict[str, Any]] = {
    "two layers": {"mtp_num_layers": 2},
    "one layer for two": {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
    "latent": {"mtp_num_layers": 2, **LATENT},
}


def likeliest(model: GPTModel, known: list[int], depth: int) -> int:
    """What the layers of training say stands `depth` places behind what follows a text, which holds the tokens in between: the
    label of the smallest loss, each word tried.
    """
    words, size = model.build.model.true_vocab_size, len(known) - depth
    ids, label = torch.tensor([known[:size]]).expand(words, -1), torch.arange(words)[:, None].expand(-1, size)
    further = tuple(torch.tensor([known[number : number + size]]).expand(words, -1) for number in range(1, depth + 1))
    with torch.no_grad():
        losses = model(ids=ids, labels=label, ahead=MTPInputs(further, (label,) * depth))
    assert isinstance(losses, MTPLosses)
    return int(losses.ahead[depth - 1][:, -1].argmin())


@pytest.mark.parametrize("kind", AHEAD)
def test_layers_of_multi_token_prediction_guess_what_training_would_have_them_predict(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stages_on(1, **AHEAD[kind])[0]
    engine, seen = (
        engine_of(model, guesses=2, block=4, tokens=12, together=3),
        list[tuple[tuple[int, ...], tuple[int, ...]]](),
    )
    row = SequenceState.next_input
    monkeypatch.setattr(
        SequenceState, "next_input", lambda one, *how: seen.append((tuple(one.ids), one.drafts)) or row(one, *how)
    )
    texts = prompts(3, shortest=3, longest=20)
    replies = engine.run([greedy(text, 9) for text in texts])
    assert [list(reply.ids) for reply in replies] == [slowly(model, text, 9)[0] for text in texts]
    checked = 0
    for ids, drafts in seen:
        for depth, guess in enumerate(drafts, start=1):
            checked += 1
            assert guess == likeliest(model, [*ids, *drafts[: depth - 1]], depth)
    assert checked == engine.metrics().proposed_tokens > 30


@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["penalty"]], ids=["greedy", "penalty"])
def test_a_text_is_the_same_with_guesses_of_its_own_network_and_without(sampling: SamplingParams) -> None:
    model = stages_on(1, **AHEAD["two layers"])[0]
    requests = [
        GenerationRequest(text, 3 + 2 * number, sampling, seed=number, ignore_eod=True)
        for number, text in enumerate(prompts(6))
    ]
    settings: dict[str, Any] = {"block": 4, "tokens": 12, "together": 4}
    engines = [engine_of(model, **settings, guesses=guesses) for guesses in (0, 1, 2)]
    expected, *others = [[reply.ids for reply in engine.run(requests)] for engine in engines]
    assert others == [expected, expected]
    again = [reply.ids for reply in engines[2].run(requests)]  # beginnings are shared now
    assert again == expected and engines[2].metrics().cached_tokens > 0 and engines[2].metrics().blocks_used == 0


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(0.0), SamplingParams(), SamplingParams(repetition_penalty=1.3)],
    ids=["greedy", "warm", "penalty"],
)
def test_layers_that_guess_right_save_passes(sampling: SamplingParams) -> None:
    model = stages_on(1, mtp_num_layers=2)[0]
    with torch.no_grad():  # every state is the same, whatever is read, so that what is likely is the same for all
        for norm in (model.decoder.final_layernorm, *(layer.final_layernorm for layer in model.mtp.layers)):
            norm.weight.zero_()
            norm.bias.fill_(0.2)
    request = GenerationRequest((3, 1, 4), 21, sampling, seed=3, ignore_eod=True)
    engine = engine_of(model, guesses=2)
    (reply,), seen = engine.run([request]), engine.metrics()
    assert (
        reply.ids == engine_of(model).run([request])[0].ids
        and seen.accepted_tokens == seen.proposed_tokens == 6 * 2 + 1
    )
    assert seen.steps == 1 + 7, "one to read the prompt, and then three tokens a pass"
    assert sampling.is_greedy or len(set(reply.ids)) > 5


def test_more_guesses_than_layers_and_guesses_of_nobody_are_refused() -> None:
    with pytest.raises(ConfigError, match="--num-speculative-tokens 3 is more than the network's 2 layers"):
        engine_of(network("ahead"), guesses=3)
    with pytest.raises(ConfigError, match="needs a draft model or multi-token prediction"):
        engine_of(network(), guesses=1)


def test_what_guesses_need_is_counted_in_the_cache() -> None:
    model = stages_on(1, **AHEAD["two layers"])[0]
    sizes = model.build.model
    layer = 2 * sizes.num_query_groups * sizes.kv_channels * 8
    found = [engine_of(model, guesses=guesses).metrics().bytes_per_token for guesses in (0, 1, 2)]
    assert found == [2 * layer + guesses * (layer + sizes.hidden_size * 8) for guesses in (0, 1, 2)]
