"""Finetuning: it learns, every layout says the same, weights are adopted, and what is written down is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.models.bert import BERTModel
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.tasks import finetune
from megatron.tasks.finetune import EpochBatches, FinetuneData, Prediction
from megatron.tasks.flags import TaskConfig, task_flag_defaults
from megatron.tasks.glue import GlueSample
from megatron.tasks.race import RaceQuestion
from megatron.tasks.texts import MultipleChoiceSamples, PairSamples, TextPairTokenizer
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.health.bad_steps import BadStepError, StepValidator
from megatron.training.health.exit_conditions import NonFiniteError
from megatron.training.hooks.writers import Writers
from megatron.training.report.run_log import read_run_log_events
from megatron.training.state.batch import Batch
from megatron.training.state.run import RunContext
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer, build_trainer
from tests.helpers import tiny
from tests.helpers.architecture import ROOT
from tests.helpers.mnli import write_mnli
from tests.helpers.world import Worlds

VOCABULARY = ROOT / "examples/data/demo-bert-vocab.txt"
LENGTH = 16
WORDS = "the state of union people war whale ship sea men".split()


def tokenizer() -> Tokenizer:
    """Word pieces of the demo corpus."""
    return build_tokenizer(TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(VOCABULARY)))


def samples(task: str, count: int = 11) -> PairSamples | MultipleChoiceSamples:
    """Random texts with labels."""
    random = np.random.default_rng(8)
    encoder = TextPairTokenizer(tokenizer(), LENGTH)

    def text() -> str:
        return " ".join(random.choice(WORDS, int(random.integers(1, 7))))

    if task == "RACE":
        return MultipleChoiceSamples(
            [
                RaceQuestion(str(i), text(), tuple(text() for _ in range(2 + i % 3)), i % 2, f"x:{i}")
                for i in range(count)
            ],
            encoder,
        )
    numbers = task == "STS-B"
    texts = [GlueSample(str(i), text(), text(), i % 6 / 2 if numbers else i % 3, f"x:{i}") for i in range(count)]
    return PairSamples(texts, encoder, numbers=numbers)


def config_of(world_size: int, **changes: Any) -> RunConfig:
    """A tiny encoder's config, with the vocabulary of the demo corpus."""
    config = tiny.config(world_size, architecture="bert", make_vocab_size_divisible_by=2, **changes)
    return tiny.with_vocabulary(
        replace(config, model=replace(config.model, padded_vocab_size=None)), tokenizer().vocab_size
    )


def trainer_of(task: str, **changes: Any) -> Trainer:
    """A tiny encoder with the task's head, on this process's ranks."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    config = config_of(size, micro_batch_size=2, **changes)
    run = replace(tiny.run_of(config), tokenizer=tokenizer())
    return build_trainer(
        run,
        lambda run, stage: finetune.build_classifier_stage(run, stage, TaskConfig(task=task)),
        finetune.classifier_forward_step,
    )  # type: ignore[arg-type]


def after_an_epoch(task: str, changes: dict[str, Any]) -> list[Prediction]:
    """On every rank: what is said after an epoch with a last batch that is not full."""
    trainer = trainer_of(task, **changes)
    epochs = EpochBatches(trainer.run, samples(task), full=8, keep_last=True)
    batches = epochs.epoch_microbatches(0)
    for _ in range(epochs.steps):
        train_step(trainer, batches)
    return finetune.predict_samples(trainer, samples(task))


@pytest.mark.parametrize("task", ["MNLI", "RACE", "STS-B"])
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {}),
        (2, {"pipeline_model_parallel_size": 2}),
        (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    ],
    ids=str,
)
def test_every_layout_learns_and_says_the_same(world: Worlds, ranks: int, changes: dict[str, Any], task: str) -> None:
    changes = {**changes, "fp64": True, "num_layers": 2}
    alone = after_an_epoch(task, {"fp64": True, "num_layers": 2})
    for found in world(ranks).run(after_an_epoch, task, changes):
        assert [(row.index, row.label) for row in found] == [(row.index, row.label) for row in alone]
        assert [row.predicted for row in found] == pytest.approx([row.predicted for row in alone], rel=1e-5, abs=1e-7)
        assert np.allclose([row.scores for row in found], [row.scores for row in alone], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("task", ["MNLI", "STS-B"])
def test_scores_loss_and_gradients_are_those_of_the_published_classifier(tmp_path: Path, task: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(2)
    given = samples(task)
    published = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=tokenizer().vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            num_labels=1 if task == "STS-B" else 3,
            initializer_range=0.2,
        )
    ).eval()
    published.bert.save_pretrained(tmp_path)
    trainer = trainer_of(
        task,
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        seq_length=LENGTH,
        norm_after_residual=True,
        embedding_layernorm=True,
        norm_epsilon=1e-12,
        pretrained_checkpoint=str(tmp_path),
    )
    finetune.load_pretrained(Checkpointer(trainer), TaskConfig(task=task, epochs=1))
    (stage,) = trainer.stages
    stage.classification_head.load_state_dict(published.classifier.state_dict())
    rows = [given[number] for number in range(len(given))]
    ids, types, mask = (
        torch.from_numpy(np.stack([row[name] for row in rows])) for name in ("tokens", "types", "padding_mask")
    )
    labels = torch.tensor([text.label for text in given.texts])
    theirs = published(ids, token_type_ids=types, attention_mask=mask, labels=labels)
    found = finetune.predict_samples(trainer, given)
    assert np.allclose([row.scores for row in found], theirs.logits.detach(), rtol=1e-4, atol=1e-5)
    theirs.loss.backward()
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    scores, loss = finetune.classifier_forward_step(
        trainer.run, iter([Batch.from_arrays(arrays, torch.device("cpu"), positions=False)]), stage
    )
    total, count, _ = loss(scores)
    assert float((total / count).detach()) == pytest.approx(theirs.loss.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(total / count, stage.pooler.dense.weight)
    assert torch.allclose(gradient, published.bert.pooler.dense.weight.grad, rtol=1e-4, atol=1e-6)


def test_an_answer_that_is_not_there_is_never_chosen() -> None:
    found = finetune.predict_samples(trainer_of("RACE"), samples("RACE"))
    assert all(row.predicted < 2 + row.index % 3 for row in found)
    assert any(row.scores[3] == -np.inf for row in found)


def test_epochs_see_every_sample_once_in_orders_of_their_own() -> None:
    run = trainer_of("MNLI").run
    epochs = EpochBatches(run, samples("MNLI"), full=8, keep_last=True)
    seen = []
    for epoch in range(2):
        rows = [
            (int(i), float(m))
            for batch in epochs.epoch_microbatches(epoch)
            for i, m in zip(batch.extras["index"][:, 0], batch.loss_mask[:, 0])
        ]
        assert len(rows) == 16 and sorted(i for i, mask in rows if mask) == list(range(11))
        seen.append([i for i, mask in rows if mask])
    assert seen[0] != seen[1]
    dropped = EpochBatches(run, samples("MNLI"), full=8, keep_last=False)
    assert dropped.steps == 1 and sum(len(batch.labels) for batch in dropped.epoch_microbatches(0)) == 8
    with pytest.raises(ConfigError, match="11 samples, less than one --global-batch-size of 16"):
        EpochBatches(run, samples("MNLI"), full=16, keep_last=False)


def bert_checkpoint(folder: Path, **changes: Any) -> Trainer:
    """Save a tiny BERT."""
    config = config_of(1, save=str(folder), async_save=False, **changes)
    trainer = build_trainer(
        replace(tiny.run_of(config), tokenizer=tokenizer()), _bert, finetune.classifier_forward_step
    )
    with torch.no_grad():
        for param in trainer.stages[0].parameters():
            param += 0.25  # not what the seed draws
    Checkpointer(trainer).save()
    return trainer


def _bert(run: RunContext, stage: Any) -> BERTModel:
    return BERTModel(stage, run.layer_build_context)


@pytest.mark.parametrize("bf16", [False, True])
def test_weights_of_a_pretrained_bert_are_adopted_with_a_head_of_its_own(tmp_path: Path, bf16: bool) -> None:
    pretrained = dict(bert_checkpoint(tmp_path, bf16=bf16).stages[0].named_parameters())
    trainer = trainer_of("MNLI", bf16=bf16, pretrained_checkpoint=str(tmp_path))
    initial = {name: param.clone() for name, param in trainer.stages[0].named_parameters()}
    finetune.load_pretrained(Checkpointer(trainer), TaskConfig(task="MNLI", epochs=1))
    for name, param in trainer.stages[0].named_parameters():
        assert torch.equal(param, initial[name] if name.startswith("classification_head") else pretrained[name]), name
    masters = {
        segment.name: tensor for slot, segment, tensor in trainer.optimizer.checkpoint_state() if slot == "master"
    }
    assert bool(masters) == bf16
    for name, master in masters.items():
        assert torch.equal(
            master.to(torch.bfloat16), dict(trainer.stages[0].named_parameters())[name].detach().flatten()
        ), name


def test_a_gpt_is_refused(tmp_path: Path) -> None:
    config = tiny.config(1, save=str(tmp_path), async_save=False)
    Checkpointer(tiny.trainer_of(tiny.run_of(config))).save()
    trainer = trainer_of("MNLI", pretrained_checkpoint=str(tmp_path))
    with pytest.raises(CheckpointError, match="holds a GPT; this task finetunes a BERT"):
        finetune.load_pretrained(Checkpointer(trainer), TaskConfig(task="MNLI", epochs=1))


def test_evaluation_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="give it by --load"):
        finetune.load_pretrained(Checkpointer(trainer_of("MNLI")), TaskConfig(task="MNLI"))


def test_predictions_are_written_with_the_names_of_the_classes(tmp_path: Path) -> None:
    run, texts = trainer_of("MNLI").run, samples("MNLI", 2)
    rows = [Prediction(0, 2, 0, (0.1, 0.2, 0.7)), Prediction(1, 1, None, (0.0, 1.0, 0.5))]
    task = TaskConfig(task="MNLI", output_file=str(tmp_path / "a" / "said.jsonl"))
    finetune.write_predictions(task, FinetuneData(None, (texts,), ("dev.tsv",)), [rows], run)
    found = [json.loads(line) for line in (tmp_path / "a" / "said.jsonl").read_text().splitlines()]
    assert found == [
        {
            "file": "dev.tsv",
            "uid": "0",
            "prediction": "neutral",
            "label": "contradiction",
            "scores": {"contradiction": 0.1, "entailment": 0.2, "neutral": 0.7},
        },
        {
            "file": "dev.tsv",
            "uid": "1",
            "prediction": "entailment",
            "scores": {"contradiction": 0.0, "entailment": 1.0, "neutral": 0.5},
        },
    ]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["said.jsonl"]


def test_numbers_are_written_as_they_are_and_measured_by_correlations(tmp_path: Path) -> None:
    run, texts = trainer_of("STS-B").run, samples("STS-B", 2)
    task = TaskConfig(task="STS-B", output_file=str(tmp_path / "said.jsonl"))
    finetune.write_predictions(
        task,
        FinetuneData(None, (texts,), ("dev.tsv",)),
        [[Prediction(0, 2.25, 0.0, (2.25,)), Prediction(1, 4.0, None, (4.0,))]],
        run,
    )
    found = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert found == [
        {"file": "dev.tsv", "uid": "0", "prediction": 2.25, "label": 0.0},
        {"file": "dev.tsv", "uid": "1", "prediction": 4.0},
    ]
    trainer = trainer_of("STS-B")
    sets = FinetuneData(None, (samples("STS-B"),), ("dev.tsv",))
    results, (rows,) = finetune.evaluate_task_sets(trainer, task, sets)
    assert list(results) == ["pearson", "spearman"]
    expected = np.corrcoef([row.predicted for row in rows], [row.label for row in rows])[0, 1]
    assert results["pearson"] == pytest.approx(expected)


def test_flags_have_the_defaults_of_their_task() -> None:
    assert task_flag_defaults(["main.py", "--task", "LAMBADA"])[
        "skip_train"
    ] and "architecture" not in task_flag_defaults(["--task", "LAMBADA"])
    assert task_flag_defaults(["--task=MNLI"]) | {"skip_train": True, "architecture": "bert"} == task_flag_defaults(
        ["--task=MNLI"]
    )
    assert not task_flag_defaults(["--task=MNLI", "--epochs", "3"])["skip_train"]


@pytest.mark.parametrize("answer, error", [(None, NonFiniteError), ("stop", BadStepError), ("skip", None)])
def test_a_bad_step_ends_the_epoch_unless_it_is_to_be_skipped(
    answer: str | None, error: type[Exception] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of("MNLI", on_bad_step=answer, error_dir=str(tmp_path))
    validator, said = StepValidator(trainer.run.config), list[str]()
    if answer:
        trainer.add_hook(validator)
    monkeypatch.setattr(RunContext, "print_rank_0", lambda run, text: said.append(text))
    next(iter(trainer.stages[0].parameters())).data.fill_(float("nan"))
    epochs = EpochBatches(trainer.run, samples("MNLI"), full=trainer.batches.final_batch_size, keep_last=False)
    with pytest.raises(error, match="nan") if error else nullcontext():
        finetune.train_epoch(trainer, epochs, 0, validator, Writers.of_run(trainer.run, train_iters=0))
    assert any("the run goes on with the next data" in line for line in said) == (answer == "skip"), said
    assert list(tmp_path.glob("step-*/*")) or answer is None, "the evidence is kept"


@pytest.mark.slow
def test_a_tiny_bert_learns_a_separable_task_and_is_loaded_again(tmp_path: Path) -> None:
    train, dev, other = (
        write_mnli(tmp_path / name, count, seed)
        for seed, (name, count) in enumerate((("train.tsv", 400), ("dev_matched.tsv", 60), ("dev_mismatched.tsv", 41)))
    )
    model = (
        "--task MNLI --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        f"--vocab-file {VOCABULARY} --valid-data {dev} {other} --num-workers 0"
    ).split()
    learning = (
        f"--train-data {train} --epochs 4 --micro-batch-size 8 --lr 1e-3 --lr-decay-style linear --lr-warmup-fraction 0.065 "
        f"--save {tmp_path / 'out'} --output-file {tmp_path / 'said.jsonl'} --log-interval 10 --log-jsonl {tmp_path / 'log.jsonl'} "
        f"--tensorboard-dir {tmp_path / 'board'}"
    ).split()

    def said(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "tasks/main.py", *model, *words],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=120,
        )
        assert done.returncode == 0, done.stdout[-2000:]
        return done.stdout

    last = said(*learning).splitlines()[-1]
    events = read_run_log_events(tmp_path / "out")
    assert [event["event"] for event in events][:2] == ["start", "steps"] and events[-1] | {"time": ""} == {
        "event": "end",
        "time": "",
        "reason": "complete",
        "iteration": 200,
    }
    written = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in written if row["kind"] == "step"] == list(range(1, 201))
    scores = [(row["iteration"], row["scores"]["accuracy"]) for row in written if row["kind"] == "task"]
    assert [iteration for iteration, _ in scores] == [50, 100, 150, 200]
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [(point.step, pytest.approx(point.value)) for point in board.Scalars("MNLI accuracy")] == scores
    assert len(board.Scalars("lm loss")) == len(board.Scalars("learning-rate")) == 200
    rows = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    right = sum(row["prediction"] == row["label"] for row in rows)
    assert len(rows) == 101 and right / len(rows) > 0.95, last
    assert f"MNLI overall: accuracy: {100 * right / 101:.2f} % ({right} of 101 right)" in said(
        "--load", str(tmp_path / "out")
    )


@pytest.mark.parametrize("words, said", [([], "no --task stands on the command line"), (["--task", "STS-C"], "STS-B")])
def test_a_command_without_a_known_task_is_told_so(words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "tasks/main.py", *words], cwd=ROOT, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 2 and said in done.stderr, done.stderr
