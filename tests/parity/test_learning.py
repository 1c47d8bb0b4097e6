"""A tiny BERT and a tiny T5 learn what they are given: hidden letters of the demo corpus, and a language of copies."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.bert import BERTDataset, BERTSampleOptions
from megatron.core.datasets.dataset_protocols import SplitRequest
from megatron.core.datasets.masking import TokenMaskingOptions
from megatron.core.datasets.samplers import collate
from megatron.core.datasets.t5 import T5Dataset, T5SampleOptions
from megatron.training.state.batch import Batch
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.architecture import ROOT

BATCH, HELD_BACK = 32, 256
# Embeddings as large as what is added to them: attention then soon tells one token from another.
SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "micro_batch_size": BATCH,
    "global_batch_size": BATCH,
    "clip_grad": 1.0,
    "weight_decay": 0.01,
    "adam_beta2": 0.98,
    "init_method_std": 0.09,
    "embedding_init_method_std": 0.5,
    "untie_embeddings_and_output_weights": True,
}


class Sentences:
    """Sentences in memory."""

    prefix = "made for this test"

    def __init__(self, documents: list[list[np.ndarray]]) -> None:
        self.sentences = [sentence for document in documents for sentence in document]
        self.sequence_lengths = np.array([len(sentence) for sentence in self.sentences], np.int32)
        self.document_indices = np.cumsum([0, *map(len, documents)])

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """The ids of a sentence."""
        return self.sentences[sequence][offset : None if length is None else offset + length]


def trained(data: BERTDataset | T5Dataset, vocab_size: int, steps: int, **changes: Any) -> tuple[Trainer, Batch]:
    """A trainer after some steps over the data, and a batch that it has not seen."""
    settings = tiny.config(**{**SHAPE, **changes}, train_iters=steps, lr_warmup_iters=steps // 20)
    settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, padded_vocab_size=None))
    trainer = tiny.trainer_of(tiny.run_of(tiny.with_vocabulary(settings, vocab_size)))

    def batch(first: int, count: int) -> Batch:
        arrays = collate([data[index] for index in range(first, first + count)])
        return Batch.from_arrays(arrays, torch.device("cpu"), positions=False)

    for step in range(steps):
        train_step(trainer, iter([batch(HELD_BACK + step * BATCH, BATCH)]))
    return trainer, batch(0, HELD_BACK)


@pytest.mark.slow
def test_a_tiny_bert_finds_hidden_letters_far_more_often_than_the_commonest_letter_would() -> None:
    lines = (ROOT / "examples/data/demo_train_small.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    texts = [json.loads(line)["text"].lower().replace("\n", " ") for line in lines]
    letters = sorted({letter for text in texts for letter in text if letter.isascii()})
    ids = {letter: number for number, letter in enumerate(letters, start=4)}  # after padding, [CLS], [SEP], [MASK]
    documents = [
        [
            np.array([ids[letter] for letter in sentence.strip()[:400] if letter in ids])
            for sentence in text.split(".")
            if sentence.strip()
        ]
        for text in texts
    ]
    vocab_size, steps = len(letters) + 4, 400
    options = BERTSampleOptions(
        32, 0.1, TokenMaskingOptions(0.15, max_ngram=1), "sentence-order", np.zeros(vocab_size, bool), 1, 2, 3, 0
    )
    data = BERTDataset(
        Sentences(documents), options, SplitRequest(range(len(documents)), HELD_BACK + steps * BATCH, "train"), seed=1
    )
    trainer, unseen = trained(
        data, vocab_size, steps, architecture="bert", position_embedding_type="rope", lr=4e-3, min_lr=4e-4
    )
    with torch.no_grad():
        words, _ = trainer.stages[0](
            ids=unseen.tokens, types=unseen.extras["types"], padding=unseen.extras["padding_mask"].bool()
        )
    hidden = unseen.loss_mask.bool()
    found, true = words.transpose(0, 1).argmax(-1)[hidden], unseen.labels[hidden]
    accuracy, commonest = float((found == true).float().mean()), float(torch.bincount(true).max() / len(true))
    assert accuracy > 2 * commonest, (
        f"accuracy {accuracy:.3f}; the commonest letter would be right {commonest:.3f} of the time"
    )


@pytest.mark.nightly
def test_a_tiny_t5_writes_spans_that_can_be_copied() -> None:
    # A word is a letter in each of three alphabets, a A @: what stays of it tells what was taken out.
    size, words, first, steps, decoder = 6, 6, 6, 600, 16
    random = np.random.default_rng(0)
    documents = [[(first + random.integers(0, size, (words, 1)) + size * np.arange(3)).ravel()] for _ in range(4000)]
    vocab_size = first + 3 * size + 8
    sentinels = tuple(range(vocab_size - 8, vocab_size))
    options = T5SampleOptions(
        20, decoder, 0.0, TokenMaskingOptions(0.15, max_ngram=2), np.zeros(vocab_size, bool), sentinels, 4, 5, 0
    )
    data = T5Dataset(
        Sentences(documents), options, SplitRequest(range(len(documents)), HELD_BACK + steps * BATCH, "train"), seed=1
    )
    trainer, unseen = trained(
        data,
        vocab_size,
        steps,
        architecture="t5",
        seq_length=20,
        decoder_seq_length=decoder,
        lr=4e-3,
        min_lr=4e-4,
        position_embedding_type="relative",
    )
    with torch.no_grad():
        logits = trainer.stages[0](
            encoder_ids=unseen.tokens,
            encoder_padding=unseen.extras["enc_mask"].bool(),
            decoder_ids=unseen.extras["text_dec"],
        )
    right = logits.transpose(0, 1).argmax(-1) == unseen.labels
    spans = exact = 0
    for row, length in enumerate(unseen.loss_mask.sum(dim=1).tolist()):
        ends = [at for at in range(length) if unseen.labels[row, at] in sentinels or unseen.labels[row, at] == 5]
        for low, high in zip(ends, ends[1:]):  # a span is right with all its letters and with where it ends
            spans += 1
            exact += bool(right[row, low + 1 : high + 1].all())
    assert exact / spans > 0.9, f"{exact} of {spans} spans are written exactly"
