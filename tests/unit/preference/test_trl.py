"""DPO beside TRL's trainer: two steps on a random Llama give the same weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.samplers import collate
from megatron.preference.data import ReferencedBatches
from megatron.preference.dataset import PreferenceDataset, RowSource
from megatron.preference.rows import RowReader, read_rows
from megatron.preference.settings import PreferenceConfig
from megatron.preference.step import PreferenceStep
from megatron.training.data.batch import Batch
from megatron.training.step import train_step
from megatron.training.trainer import build_trainer
from tests.helpers import tiny
from tests.helpers.preference import BASE
from tests.unit.preference.test_training import LLAMA

trl = pytest.importorskip("trl", reason="trl is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
published = pytest.importorskip("tests.parity.test_published", reason="transformers is not installed")

RATE = 0.5  # of plain gradient descent, which shows the size of gradients, too
WORDS = 49  # of the tokenizer, whose last id ends texts; the network has one more
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigmoid": ({}, {}),
    "robust": ({"preference_label_smoothing": 0.2}, {"label_smoothing": 0.2}),
    "hinge": ({}, {}),
    "ipo": ({}, {}),
    "apo_zero": ({}, {}),
}


class Words:
    """A tokenizer of numbers, for our reader."""

    eod = WORDS

    def tokenize(self, text: str) -> list[int]:
        """Ids."""
        return [int(word) for word in text.split()]


def theirs() -> Any:
    """The same tokenizer for TRL."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)} | {"<eos>": WORDS}, "0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")


def rows(number: int) -> list[dict[str, str]]:
    """Pairs of answers of very uneven lengths."""
    random = np.random.default_rng(3)

    def text(low: int, high: int) -> str:
        return " ".join(map(str, random.integers(0, WORDS, random.integers(low, high))))

    return [{"prompt": text(1, 4), "chosen": " " + text(1, 7), "rejected": " " + text(1, 7)} for _ in range(number)]


def our_batches(given: list[dict[str, str]]) -> Iterator[Batch]:
    """Global batches of 4 pairs in their order, a pair a row."""
    pairs, dropped = read_rows([json.dumps(row).encode() for row in given], RowReader(Words(), "chatml"))  # type: ignore[arg-type]
    assert not dropped
    source = RowSource("rows", tuple(pairs))
    samples = [
        PreferenceDataset(source, range(place, place + 1), length=32, num_samples=None, seed=0, split="train")[0]
        for place in range(len(given))
    ]
    for first in range(0, len(given), 4):
        yield Batch.from_arrays(collate(samples[first : first + 4]), torch.device("cpu"), positions=True)


@pytest.mark.parametrize("loss", LOSSES)
def test_two_steps_give_trls_weights(loss: str, tmp_path: Path) -> None:
    import datasets  # which TRL brings

    ours, other = LOSSES[loss]
    given = rows(8)
    changes = {
        **BASE, **LLAMA, "fp64": False, "global_batch_size": 4, "micro_batch_size": 4, "clip_grad": 0.0, "weight_decay": 0.0,
        "lr": RATE, "lr_decay_style": "constant", "num_query_groups": 4, "optimizer": "sgd", "sgd_momentum": 0.0,
    }  # fmt: skip
    config = PreferenceConfig(preference_loss=loss, preference_beta=0.3, **ours)  # type: ignore[arg-type]
    trainer = build_trainer(tiny.run_of(tiny.config(**changes)), tiny.gpt, PreferenceStep(config))
    before = build_trainer(tiny.run_of(tiny.config(**changes, seed=99)), tiny.gpt, PreferenceStep(config))
    network, reference = published.llama(), published.llama()
    for one, there in ((trainer, network), (before, reference)):
        there.load_state_dict(
            {name: value.clone() for name, value in published.as_llama(published.weights(one)).items()}
        )
    settings = trl.DPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=2,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        loss_type=[loss],
        beta=0.3,
        weight_decay=0.0,
        max_grad_norm=0.0,
        optim="sgd",
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
        **other,
    )
    their_trainer = trl.DPOTrainer(
        model=network,
        ref_model=reference,
        args=settings,
        train_dataset=datasets.Dataset.from_list(given),
        processing_class=theirs(),
    )
    their_trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(range(8))  # type: ignore[method-assign]
    their_trainer.train()
    asked = dataclasses.replace(trainer, stages=before.stages, parallels=[], hooks=[], scripts={})
    data = ReferencedBatches(trainer, our_batches(given), asked, config)  # type: ignore[arg-type]
    for _ in range(2):
        train_step(trainer, data)
    result, expected = published.as_llama(published.weights(trainer)), network.state_dict()
    for name, value in result.items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
