"""Layers with a state in the engine: in pieces, together, waiting again, from a kept beginning and behind drafts a text is what one pass makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.mixers.gated_delta_net import DeltaNetSizes
from megatron.core.config.mixers.mamba import MambaSizes
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import sublayers
from megatron.core.transformer.mixers.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.mixers.mamba import MambaMixer
from megatron.inference import recurrent_states
from megatron.inference.requests import GenerationReply
from tests.helpers import tiny
from tests.unit.inference.serving import BASE, engine_of, greedy, prompts, scores, slowly, stages_on

MAMBA = MambaSizes(heads=8, head=4, groups=2, state=6)
DELTA = DeltaNetSizes(key_heads=4, value_heads=8, key_size=6, value_size=5)
TIGHT: dict[str, Any] = {"block": 4, "tokens": 11, "together": 4}
KINDS = {
    "mamba": ("mamba", "attention"),
    "delta": ("gated_delta_net", "attention"),
    "without attention": ("mamba", "gated_delta_net"),
    "beside attention": ("both", "mamba"),
}


@pytest.fixture(scope="module")
def hybrid() -> Iterator[Callable[[str], GPTModel]]:
    """Networks of two layers, whose mixers are those of a kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sublayers.MIXER_MODULES, "mamba", lambda build, plan: MambaMixer(build, MAMBA))
        patch.setitem(sublayers.MIXER_MODULES, "gated_delta_net", lambda build, plan: GatedDeltaNet(build, DELTA))
        yield lambda kind: _network(KINDS[kind])


def _network(mixers: tuple[str, ...]) -> GPTModel:
    run = tiny.run_of(tiny.config(**{**BASE, "max_position_embeddings": 128, "seq_length": 128}))
    (spec,) = stage_specs_of_run(run.config)
    both = {"mixer": "attention", "parallel_mixer": "mamba"}
    rows = tuple(
        replace(plan, **(both if mixer == "both" else {"mixer": mixer}))
        for plan, mixer in zip(spec.layers, mixers, strict=True)
    )
    return tiny.gpt(run, replace(spec, layers=rows)).materialize(7).eval()


def agree(model: GPTModel, texts: list[tuple[int, ...]], replies: list[GenerationReply], count: int) -> None:
    """Tokens and log-probabilities are those of whole passes, to 1e-8."""
    for text, reply in zip(texts, replies, strict=True):
        ids, logprobs = slowly(model, text, count)
        assert list(reply.ids) == ids
        assert [token.logprob for token in reply.tokens] == pytest.approx(logprobs, abs=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_64_steps_with_states_are_the_recomputation_of_the_whole_text(
    hybrid: Callable[[str], nn.Module], kind: str
) -> None:
    model, (text,) = hybrid(kind), prompts(1, shortest=21, longest=21)
    engine = engine_of(model, block=4, tokens=13, together=1)
    agree(model, [text], engine.run([greedy(text, 64, logprobs=True)]), 64)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_together_that_wait_again_are_what_each_is_alone(hybrid: Callable[[str], GPTModel], kind: str) -> None:
    model, texts = hybrid(kind), prompts(9)
    room = 100 if kind == "without attention" else 60  # tokens of all texts together: fewer than they need
    width = 1 if kind == "without attention" else 2 * 32 * 8
    engine = engine_of(model, **TIGHT, length=50, gb=width * room / 1e9)
    agree(model, texts, engine.run([greedy(text, 18, logprobs=True) for text in texts]), 18)
    assert engine.metrics().preempted > 0
    assert len(engine.slots[0]._free) == TIGHT["together"], "all slots came back"


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_goes_on_from_a_kept_beginning(
    hybrid: Callable[[str], GPTModel], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent_states, "_INTERVAL", 8)
    model, (common,) = hybrid(kind), prompts(1, shortest=22, longest=22)
    texts = [(*common, *text) for text in prompts(5, longest=9)] + [common[:13]]
    budget = 20.5 * recurrent_states.recurrent_state_bytes([model]) / 1e9
    engine = engine_of(model, **TIGHT, inference_dynamic_batching_prefix_caching_mamba_gb=budget)
    agree(model, texts[:1], engine.run([greedy(texts[0], 9, logprobs=True)]), 9)
    replies = engine.run([greedy(text, 9, logprobs=True) for text in texts])
    agree(model, texts, replies, 9)
    assert all(reply.cached_tokens >= 16 for reply in replies[:-1]) and replies[-1].cached_tokens == 8
    assert 4 < engine.metrics().states_kept <= 20
    engine.clear_prefix_cache()
    agree(model, texts, engine.run([greedy(text, 9, logprobs=True) for text in texts]), 9)


def test_without_room_for_snapshots_no_beginning_is_shared(hybrid: Callable[[str], GPTModel]) -> None:
    model, (text,) = hybrid("mamba"), prompts(1, shortest=30, longest=30)
    engine = engine_of(model, **TIGHT, inference_dynamic_batching_prefix_caching_mamba_gb=0)
    for _ in range(2):
        (reply,) = engine.run([greedy(text, 5, logprobs=True)])
        agree(model, [text], [reply], 5)
        assert reply.cached_tokens == 0


@pytest.mark.parametrize("perfect", [False, True], ids=["a stranger", "a good draft"])
@pytest.mark.parametrize("kind", ["mamba", "delta"])
def test_what_of_a_draft_is_not_accepted_leaves_no_trace_in_the_states(
    hybrid: Callable[[str], GPTModel], kind: str, perfect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, texts = hybrid(kind), prompts(6)
    draft = stages_on(1, seed=8, **{"max_position_embeddings": 128, "seq_length": 128})[0]
    engine = engine_of(model, draft=draft, guesses=3, block=4, tokens=20, together=4)
    if perfect:
        propose = engine._draft.set_draft_tokens

        def right(chosen: Any) -> int:
            count = propose(chosen)
            for one, _ in (share for shares in chosen for share in shares):
                known = tuple(slowly(model, tuple(one.ids), len(one.drafts))[0])
                one.drafts = known[:2] + one.drafts[2:]  # the third is a stranger's
            return count

        monkeypatch.setattr(engine._draft, "set_draft_tokens", right)
    agree(model, texts, engine.run([greedy(text, 14, logprobs=True) for text in texts]), 14)
    seen = engine.metrics()
    assert 0 <= seen.accepted_tokens < seen.proposed_tokens
    assert not perfect or seen.accepted_tokens > 40


def test_the_bytes_of_states_are_those_of_theory_and_of_any_length(hybrid: Callable[[str], GPTModel]) -> None:
    model = hybrid("without attention")
    mamba = 3 * (8 * 4 + 2 * 2 * 6) + 8 * 4 * 6  # convolution of x, B, C; heads x size x state
    delta = 3 * (2 * 4 * 6 + 8 * 5) + 8 * 6 * 5  # convolution of q, k, v; heads x keys x values
    engine = engine_of(model, **TIGHT)
    assert engine.metrics().state_bytes == 8 * (mamba + delta) and engine.metrics().bytes_per_token == 0
    pool = engine.runner.networks[0].state_pool
    slots = recurrent_states.num_recurrent_state_slots(TIGHT["together"], 0, TIGHT["together"])
    held = sum(part.numel() * part.element_size() for pair in pool._states.values() for part in pair)
    assert held == slots * engine.metrics().state_bytes


BYTES = {None: 8, "fp32": 4, "bf16": 2, "fp16": 2}


@pytest.mark.parametrize(
    "conv, scan, largest", [("fp32", None, 1e-5), (None, "fp32", 1e-5), ("bf16", "fp16", 0.3), ("fp16", "bf16", 0.3)]
)
def test_states_kept_in_a_format_are_rounded_to_it_between_steps_and_have_its_bytes(
    hybrid: Callable[[str], GPTModel], conv: str | None, scan: str | None, largest: float
) -> None:
    model, (text,) = hybrid("without attention"), prompts(1, shortest=21, longest=21)
    words = {"mamba_inference_conv_states_dtype": conv, "mamba_inference_ssm_states_dtype": scan}
    engine, exact = engine_of(model, **TIGHT, **words), engine_of(model, **TIGHT)
    pool = exact.runner.networks[0].state_pool
    write = pool.write

    def rounded(part: Tensor, word: str | None) -> Tensor:
        formats = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        return part if word is None else part.to(formats[word]).double()

    pool.write = lambda mixer, slots, state: write(
        mixer, slots, type(state)(rounded(state.conv, conv), rounded(state.scan, scan))
    )
    (reply,), (expected,) = (one.run([greedy(text, 40, logprobs=True)]) for one in (engine, exact))
    assert list(reply.ids) == list(expected.ids)
    found = [token.logprob for token in reply.tokens]
    assert found == pytest.approx([token.logprob for token in expected.tokens], abs=1e-10)
    whole = scores(model, (*text, *reply.ids))[len(text) - 1 : -1]
    gap = max(abs(float(row[token]) - one) for row, token, one in zip(whole, reply.ids, found, strict=True))
    assert 1e-10 < gap < largest, f"log-probabilities are those of a whole pass but for {gap:.3g}"
    first = 3 * (8 * 4 + 2 * 2 * 6) + 3 * (2 * 4 * 6 + 8 * 5)  # convolutions of both layers
    states_of = 8 * 4 * 6 + 8 * 6 * 5
    assert engine.metrics().state_bytes == first * BYTES[conv] + states_of * BYTES[scan]
    slots = recurrent_states.num_recurrent_state_slots(TIGHT["together"], 0, TIGHT["together"])
    held = sum(part.nbytes for pair in engine.runner.networks[0].state_pool._states.values() for part in pair)
    assert held == slots * engine.metrics().state_bytes


def test_snapshots_in_use_stay_and_the_longest_unused_goes() -> None:
    books = recurrent_states.StateSlotAllocator(1, 0, 2)
    for mark in (b"a", b"b"):
        books.record_snapshot(mark, books.allocate_snapshot(mark))
    books.pin_snapshot(b"a")
    books.record_snapshot(b"c", books.allocate_snapshot(b"c"))  # in the place of b, for a is in use
    assert [books.num_blocks_with_snapshot([mark]) for mark in (b"a", b"b", b"c")] == [1, 0, 1]
    assert books.allocate_snapshot(b"c") == recurrent_states.NOWHERE, "there is one of these tokens"
    books.pin_snapshot(b"c")
    assert books.allocate_snapshot(b"d") == recurrent_states.NOWHERE, "all are in use"
    books.unpin_snapshot(b"a")
    assert (
        books.allocate_snapshot(b"d") != recurrent_states.NOWHERE
        and books.num_blocks_with_snapshot([b"a", b"c", b"d"]) == 2
    )


def test_a_hybrid_draft_is_refused(hybrid: Callable[[str], GPTModel]) -> None:
    with pytest.raises(
        Exception, match="a draft model whose layers keep a state cannot take back what is not accepted"
    ):
        engine_of(stages_on(1)[0], draft=hybrid("mamba"), guesses=2)


def test_outputs_depend_on_the_state_that_is_gone_on_from(hybrid: Callable[[str], GPTModel]) -> None:
    """That these tests can fail: with blank states in the place of a text's own, its continuation is another."""
    model, (text,) = hybrid("without attention"), prompts(1, shortest=30, longest=30)
    engine = engine_of(model, **TIGHT)
    pool = engine.runner.networks[0].state_pool
    read = pool.read
    pool.read = lambda mixer, slots: read(mixer, torch.zeros_like(slots))
    (reply,) = engine.run([greedy(text, 9, logprobs=True)])
    ids, logprobs = slowly(model, text, 9)
    assert list(reply.ids) != ids or [token.logprob for token in reply.tokens] != pytest.approx(logprobs, abs=1e-3)
