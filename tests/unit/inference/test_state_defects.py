"""Mistakes in how states of running texts are kept, planted, each of which a check of a long continuation must notice.

A check counts no time: the numbers that the operations of a step compute and the bytes that a pool holds are those of any step behind any text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.context.cache import MixerState
from megatron.core.transformer.mixers.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.mixers.mamba import MambaMixer
from megatron.inference import recurrent_states
from megatron.inference.engine import Engine
from megatron.inference.recurrent_states import StatePool, StateSlotsOfSequence
from tests.unit.inference.serving import HYBRID, engine_of, greedy, prompts, slowly, stages_on

PATTERN = {
    **HYBRID,
    "hybrid_layer_pattern": "MG",
    "position_embedding_type": "none",
    "max_position_embeddings": 256,
    "seq_length": 256,
}
BLOCK = 4
LONG = 70  # tokens that a text goes on by


class ComputedNumbers(TorchDispatchMode):
    """Counts the elements of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count."""
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        self.count += sum(each.numel() for each in tensors if isinstance(each, Tensor))
        return result


def network() -> GPTModel:
    """Two layers with states, in fp64."""
    return stages_on(1, **PATTERN)[0]


def engine() -> Engine:
    """An engine for one text at a time."""
    return engine_of(network(), block=BLOCK, tokens=256, together=1, sharing=False)


def held(engine: Engine) -> int:
    """Bytes of all tensors that the pool of states refers to."""
    pool, found = engine.runner.networks[0].state_pool, dict[int, int]()

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            walk(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for each in value:
                walk(each)

    walk(vars(pool))
    return sum(found.values())


def decoding_is_flat() -> None:
    """A token behind 200 tokens takes the operations and the bytes of one behind 20."""
    seen = {}
    for length in (20, 200):
        running, (text,) = engine(), prompts(1, shortest=length, longest=length)
        before = held(running)
        running.submit(greedy(text, 12), lambda event: None)
        running.step()  # the prompt
        counts = list[int]()
        while not running.is_idle:
            with ComputedNumbers() as numbers:
                running.step()
            counts.append(numbers.count)
        seen[length] = counts[1:-1]
        assert held(running) == before, f"the pool held {before} bytes and holds {held(running)}"
    assert len(seen[20]) >= 8
    for short, long in zip(seen[20], seen[200], strict=True):  # the list of a text's blocks has a number for each
        assert long - short <= (200 - 20) / BLOCK, f"a step computes {short} numbers, and behind a longer text {long}"


def long_texts_are_exact() -> None:
    """A long continuation is what whole passes make of the text."""
    model, (text,) = network(), prompts(1, shortest=9, longest=9)
    (reply,) = engine().run([greedy(text, LONG, logprobs=True)])
    ids, logprobs = slowly(model, text, LONG)
    assert list(reply.ids) == ids
    assert [token.logprob for token in reply.tokens] == pytest.approx(logprobs, abs=1e-8)


def _from_the_beginning() -> Callable[..., Any]:
    """Steps that scan the whole text again: right, and slower with each token."""
    go_on, seen = MambaMixer._conv_and_scan_from, dict[MambaMixer, list[Tensor]]()

    def changed(self: MambaMixer, parts: list[Tensor], state: MixerState) -> tuple[Tensor, MixerState]:
        goes_on = self in seen and bool(state.scan.any())
        seen[self] = [torch.cat(pair) for pair in zip(seen[self], parts, strict=True)] if goes_on else parts
        outputs, after = go_on(self, seen[self], self.initial_state(parts[0].shape[1]))
        return outputs[-len(parts[0]) :], after

    return changed


def _keeping_every_state() -> Callable[..., None]:
    write = StatePool.write

    def changed(self: StatePool, mixer: Any, slots: Tensor, state: MixerState) -> None:
        write(self, mixer, slots, state)
        vars(self).setdefault("_earlier", []).append((state.conv.clone(), state.scan.clone()))

    return changed


def _another_slot_later() -> Callable[..., Any]:
    slots_for_step, steps = StateSlotsOfSequence.slots_for_step, dict[StateSlotsOfSequence, int]()

    def changed(self: StateSlotsOfSequence, drafts: int, mark: bytes | None) -> recurrent_states.StateReadWriteSlots:
        steps[self] = steps.get(self, 0) + 1
        found = slots_for_step(self, drafts, mark)
        return (
            recurrent_states.StateReadWriteSlots(recurrent_states.BLANK, found.write, found.snapshot)
            if steps[self] == 50
            else found
        )

    return changed


def _not_written_later() -> Callable[..., None]:
    write, written = StatePool.write, [0]

    def changed(self: StatePool, mixer: Any, slots: Tensor, state: MixerState) -> None:
        written[0] += isinstance(mixer, GatedDeltaNet)
        if written[0] <= 50 or not isinstance(mixer, GatedDeltaNet):
            write(self, mixer, slots, state)

    return changed


DEFECTS: dict[str, tuple[Any, str, Callable[[], Callable[..., Any]], Callable[[], None]]] = {
    "a step scans the whole text": (MambaMixer, "_conv_and_scan_from", _from_the_beginning, decoding_is_flat),
    "the states of all steps are kept": (StatePool, "write", _keeping_every_state, decoding_is_flat),
    "a text goes on from a blank slot after 50 steps": (
        StateSlotsOfSequence, "slots_for_step", _another_slot_later, long_texts_are_exact,
    ),
    "the state of a delta net is not written after 50 steps": (
        StatePool, "write", _not_written_later, long_texts_are_exact,
    ),
}  # fmt: skip


@pytest.mark.parametrize("check", [decoding_is_flat, long_texts_are_exact])
def test_a_long_continuation_is_right(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_mistake_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, replacement, check = DEFECTS[name]
    monkeypatch.setattr(owner, attribute, replacement())
    with pytest.raises(AssertionError):
        check()
