"""A reference says the same of an answer every time: networks are asked without dropout, whatever they were trained with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adapters.quantized_base import without_adapters
from megatron.core.models.gpt import GPTModel
from megatron.preference import step as preference_step
from megatron.preference.data import ReferenceScoredBatches
from megatron.preference.settings import PreferenceConfig
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.checkpoint.reference import load_reference_policy
from megatron.training.state.evaluate import evaluation_mode
from tests.helpers import tiny
from tests.helpers.preference import BASE, random_pairs, trainer_of
from tests.unit.preference.test_training import LLAMA, LORA, answer_logprob, places_of

DROPOUT = {
    "hidden_dropout": 0.3,
    "attention_dropout": 0.3,
}  # a run of pairs is refused with them; a base may have had them
TOKENIZER = {"tokenizer_type": "NullTokenizer", "vocab_size": tiny.VOCABULARY}


def of_a_checkpoint(folder: Path) -> tuple[float, float]:
    """A reference of its own, whose checkpoint says that it was trained with dropout."""
    settings = {**BASE, **LLAMA, **DROPOUT, **TOKENIZER, "seed": 99, "save": str(folder)}
    base = tiny.trainer_of(tiny.run_of(tiny.config(**settings)))
    Checkpointer(base).save()
    trainer, data = trainer_of(PreferenceConfig(), **LLAMA, **TOKENIZER)
    return asked(data, load_reference_policy(trainer, str(folder))), by_formula(base)


def of_the_base_under_adapters(folder: Path) -> tuple[float, float]:
    """The policy with its adapters off."""
    trainer, data = trainer_of(PreferenceConfig(), **{**LORA, **DROPOUT})
    with torch.no_grad():
        for stage in trainer.stages:
            for name, param in stage.named_parameters():
                if name.endswith("lora_B"):
                    param.fill_(0.1)
    return asked(data, None), by_formula(trainer)


def asked(data: ReferenceScoredBatches, reference: Any) -> float:
    """The sum of the log-probabilities that a batch has of its answers."""
    data._reference = reference
    count = data.prepare_step(4)
    batches = [next(data) for _ in range(count)]
    return float(sum((batch.extras["reference"] * batch.extras["answer_mask"]).sum() for batch in batches))


def by_formula(trainer: Any) -> float:
    """The same from the logits of a network at rest, without adapters."""
    with evaluation_mode(trainer), without_adapters(*trainer.stages), torch.no_grad():
        return sum(float(answer_logprob(trainer.stages[0], ids)) for ids in first_answers(8))


def first_answers(samples: int) -> list[Any]:
    """The answers in the first samples."""
    pairs = [random_pairs(40)[place] for index in places_of(samples) for place in index]
    return [ids for pair in pairs for ids in pair.answer_ids]


KINDS: dict[str, tuple[Callable[[Path], tuple[float, float]], tuple[Any, str, Any]]] = {
    "of a checkpoint": (of_a_checkpoint, (GPTModel, "eval", lambda self: self)),
    "the base under adapters": (
        of_the_base_under_adapters,
        (preference_step, "evaluation_mode", lambda trainer: nullcontext()),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_has_no_dropout(kind: str, tmp_path: Path) -> None:
    found, expected = KINDS[kind][0](tmp_path)
    assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_in_train_mode_is_seen(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, defect = KINDS[kind]
    monkeypatch.setattr(*defect)
    found, expected = measure(tmp_path)
    assert found != pytest.approx(expected, rel=1e-6)
