"""Finetuning by epochs: a pretrained encoder learns to judge texts, and is measured after every epoch.

The steps are those of pretraining (`train_step`), on batches that go through the training set in a new order each epoch;
the evaluation is a forward-only pass whose scores are gathered sample by sample. The epoch that does best is kept in `--save`
and predicts `--output-file`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.layers import StageSpec
from megatron.core.datasets.storage import atomic_file
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.lock import FolderLock
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.models.bert import ClassifierModel
from megatron.core.parallel import collectives
from megatron.tasks.flags import TaskConfig
from megatron.tasks.glue import TASKS, GlueTask, Pairs, glue_metrics, read_glue_samples
from megatron.tasks.race import CHOICES, RaceQuestion, read_race_questions
from megatron.tasks.texts import MultipleChoiceSamples, PairSamples, TextPairTokenizer, truncation_warning
from megatron.training.accelerate.compile import LayerCompiler
from megatron.training.checkpoint.checkpointing import Checkpointer, lock_save_folder
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.data.sample_order import FILL, read_and_stack_samples, stages_read_data
from megatron.training.health.bad_steps import StepValidator
from megatron.training.health.exit_conditions import ExitConditions
from megatron.training.hooks.run_record import add_steps_to_run_log
from megatron.training.hooks.writers import Writers
from megatron.training.loader import single_pass_microbatches
from megatron.training.report.metrics import StepMetricsMeter
from megatron.training.state.batch import Batch, Loss, LossFunction
from megatron.training.state.evaluate import evaluate_loss
from megatron.training.state.run import RunContext
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer, build_trainer

Samples = PairSamples | MultipleChoiceSamples
_TASKS = {**TASKS, "RACE": GlueTask((), "answers", tuple("ABCD"))}
_HEADS = ("model.classification_head.", "model.multichoice_head.")
_UNUSED = ("model.lm_head.", "model.output_layer.", "model.binary_head.", *_HEADS)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for one sample. predicted: number of a class, or on the scale of a regression task. label: None if
    the file has none. scores: the network's outputs.
    """

    index: int
    predicted: int | float
    label: int | float | None
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FinetuneData:
    """The data of a task. names: files or folders of the evaluation sets."""

    train: Samples | None
    valid: tuple[Samples, ...]
    names: tuple[str, ...]


def read_finetune_data(task: TaskConfig, run: RunContext) -> FinetuneData:
    """Read all files of a task. Raises `ConfigError` for missing flags, `DataError` for invalid files."""
    if not task.valid_data:
        raise ConfigError(f"--task {task.task} needs --valid-data")
    if task.epochs and not task.train_data:
        raise ConfigError(f"--epochs {task.epochs} of --task {task.task} need --train-data")
    encoder = TextPairTokenizer(run.tokenizer, run.config.train.seq_length)

    def read_task_samples(paths: Sequence[str], name: str) -> Samples:
        if task.task == "RACE":
            samples: Samples = MultipleChoiceSamples(
                [question for path in paths for question in read_race_questions(path)], encoder
            )
        else:
            texts = [text for path in paths for text in read_glue_samples(str(task.task), path)]
            samples = PairSamples(texts, encoder, numbers=TASKS[str(task.task)].scale is not None)
        message = truncation_warning(samples, name, encoder.length, refuse=task.long_texts == "refuse")
        if message:
            run.print_rank_0(message)
        return samples

    train = read_task_samples(task.train_data, "training data") if task.epochs and task.train_data else None
    return FinetuneData(train, tuple(read_task_samples([path], path) for path in task.valid_data), task.valid_data)


def classifier_forward_step(
    run: RunContext, batches: Iterator[Batch], stage: ClassifierModel
) -> tuple[Tensor, LossFunction]:
    """Run one microbatch through one stage; return its output and the loss function.

    The loss function takes the scores [b, classes] of the last stage: cross entropy of the class, or squared error.
    """
    batch = next(batches)
    scores = classifier_output(batch, stage)

    def loss(scores: Tensor) -> Loss:
        assert batch.labels is not None and batch.loss_mask is not None, "the stage of the loss reads its labels"
        scores, labels = scores if scores.dtype == torch.float64 else scores.float(), batch.labels[:, 0]
        losses = (
            F.mse_loss(scores[:, 0], labels.to(scores.dtype), reduction="none")
            if labels.is_floating_point()
            else (F.cross_entropy(scores, labels, reduction="none"))
        )
        mask = batch.loss_mask[:, 0].to(losses.dtype)
        total, count = (losses * mask).sum(), mask.sum()
        return total, count, {"lm loss": torch.stack((total.detach(), count))}

    return scores, loss


def classifier_output(batch: Batch, stage: ClassifierModel) -> Tensor:
    """Return a stage's output for a microbatch; from the last stage scores [b, classes] or [b, choices]."""
    assert batch.tokens is not None, "every stage of an encoder reads the batch: it must know what is padding"
    scores = stage(
        ids=batch.tokens.flatten(0, -2),
        types=batch.extras["types"].flatten(0, -2),
        hidden=batch.hidden,
        padding=batch.extras["padding_mask"].bool().flatten(0, -2),
    )
    return scores + batch.extras["choices"] if stage.stage.has_output and stage.choices > 1 else scores


class EpochBatches:
    """The microbatches of one data-parallel rank over all epochs, each epoch in its own order.

    steps: global batches an epoch. full: samples of a global batch. keep_last: fill up a last batch that is not full
    with samples without loss; else it is left out. The order of an epoch follows from the seed and its number alone.
    """

    def __init__(self, run: RunContext, samples: Samples, *, full: int, keep_last: bool) -> None:
        self.run, self.samples, self.full, self.keep_last = run, samples, full, keep_last
        self.steps = -(-len(samples) // full) if keep_last else len(samples) // full
        if not self.steps:
            raise ConfigError(
                f"the training data have {len(samples)} samples, less than one --global-batch-size of {full}; give a "
                "smaller batch, or --keep-last"
            )

    def epoch_microbatches(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's microbatches of an epoch, counted from 0."""
        train, axis = self.run.config.train, self.run.mesh.dp
        order = np.random.default_rng((train.seed, epoch)).permutation(len(self.samples)).tolist()
        order += [FILL] * (self.steps * self.full - len(order))
        block = train.micro_batch_size * axis.size
        for start in range(axis.rank * train.micro_batch_size, self.steps * self.full, block):
            arrays = read_and_stack_samples(self.samples, order[start : start + train.micro_batch_size])
            yield Batch.from_arrays(arrays, self.run.mesh.device, positions=False)


def finetune(run: RunContext, task: TaskConfig) -> dict[str, float]:
    """Finetune and evaluate. Returns the metrics of the last epoch over all evaluation sets together."""
    with lock_save_folder(run) if task.epochs else nullcontext() as lock:
        return _finetune_locked(run, task, lock)


def _finetune_locked(run: RunContext, task: TaskConfig, lock: FolderLock | None) -> dict[str, float]:
    """Finetune and evaluate under the lock of `--save`, if any. Returns the last epoch's metrics."""
    sets = read_finetune_data(task, run)
    train = run.config.train
    epochs = (
        EpochBatches(run, sets.train, full=train.global_batch_size, keep_last=task.keep_last)
        if sets.train is not None
        else None
    )
    if run.config.faults.on_bad_step == "rollback":
        raise ConfigError(
            "--on-bad-step rollback goes back within the data of pretraining; finetuning can only stop or skip"
        )
    if run.config.faults.effective_rerun_mode != "disabled":
        raise ConfigError(
            f"--rerun-mode {run.config.faults.effective_rerun_mode} is for pretraining; finetuning looks at its steps with --on-bad-step"
        )
    if epochs is not None:
        length = dataclasses.replace(train, train_iters=epochs.steps * task.epochs, skip_train=False)
        run = dataclasses.replace(run, config=dataclasses.replace(run.config, train=length))
        epochs.run = run
    trainer = build_trainer(run, lambda run, stage: build_classifier_stage(run, stage, task), classifier_forward_step)
    if run.config.compilation.compile:
        LayerCompiler(trainer)
    checkpoint = Checkpointer(trainer, lock=lock)
    load_pretrained(checkpoint, task)
    validator = StepValidator(run.config)
    if run.config.faults.validates_steps:
        trainer.add_hook(validator)
    with closing(Writers.of_run(run, train_iters=run.config.train.train_iters or 0)) as writers:
        return _train_and_keep_best(trainer, task, sets, epochs, checkpoint, validator, writers)


def _train_and_keep_best(
    trainer: Trainer,
    task: TaskConfig,
    sets: FinetuneData,
    epochs: EpochBatches | None,
    checkpoint: Checkpointer,
    validator: StepValidator,
    writers: Writers,
) -> dict[str, float]:
    """Train epoch by epoch; save and predict when the first metric is the best so far. Without epochs evaluate only.

    Returns the last metrics.
    """
    run, best, results = trainer.run, float("-inf"), dict[str, float]()
    for epoch in range(task.epochs if epochs is not None else 1):
        if epochs is not None:
            train_epoch(trainer, epochs, epoch, validator, writers)
        results, rows = evaluate_task_sets(trainer, task, sets)
        writers.write_scores(str(task.task), results, iteration=trainer.progress.iteration)
        score = next(iter(results.values()), 0.0)
        if score > best:
            best = score
            write_predictions(task, sets, rows, run)
            if epochs is not None and run.config.checkpoint.save:
                checkpoint.save()
    return results


def build_classifier_stage(run: RunContext, stage: StageSpec, task: TaskConfig) -> ClassifierModel:
    """Build one stage of the task's network."""
    if task.task == "RACE":
        return ClassifierModel(stage, run.layer_build_context, classes=1, choices=CHOICES)
    return ClassifierModel(stage, run.layer_build_context, classes=len(TASKS[str(task.task)].classes) or 1)


def load_pretrained(checkpoint: Checkpointer, task: TaskConfig) -> None:
    """Load `--load`, a finetuned model with this task's head, or the encoder of `--pretrained-checkpoint`.
    `ConfigError` if neither is given and nothing is trained.
    """
    requested, run = checkpoint.config.checkpoint, checkpoint.trainer.run
    if requested.load:
        if not checkpoint.resume():
            raise ConfigError(
                f"--load {requested.load} holds no checkpoint; a pretrained encoder is given by --pretrained-checkpoint"
            )
    elif requested.pretrained_checkpoint:
        source = open_encoder_checkpoint(
            requested.pretrained_checkpoint, {"true_vocab_size": run.config.model.true_vocab_size}
        )
        checkpoint.adopt_weights(source, initial=_HEADS, unused=_UNUSED)
    elif task.epochs:
        run.print_rank_0("neither --pretrained-checkpoint nor --load is given: the encoder begins with random weights")
    else:
        raise ConfigError(f"--task {task.task} without --epochs evaluates a finetuned model: give it by --load")


def open_encoder_checkpoint(path: str, given: dict[str, Any]) -> CheckpointSource:
    """Open the checkpoint of an encoder in any format. `CheckpointError` for another kind of network.

    given: settings that the checkpoint may lack, by field name.
    """
    source = open_checkpoint(path, given=given)
    encodes, decodes = (any(n.startswith(f"model.{part}.") for n in source.formats) for part in ("encoder", "decoder"))
    if not encodes or decodes:
        kind = "a T5" if encodes else "a GPT"
        raise CheckpointError(
            f"{source.where} holds {kind}; this task finetunes a BERT: give a checkpoint of pretrain_bert.py, or one "
            "of a published BERT"
        )
    return source


def train_epoch(trainer: Trainer, epochs: EpochBatches, epoch: int, validator: StepValidator, writers: Writers) -> None:
    """Train on every sample once, with Megatron's log lines. A bad step ends the run, unless it is to be skipped."""
    run, progress, precision = trainer.run, trainer.progress, trainer.run.config.precision
    meter = StepMetricsMeter(lambda tensor: collectives.all_reduce(tensor, run.mesh.world))
    watch = ExitConditions(run.config.train, tolerates_overflow=precision.fp16 and precision.loss_scale is None)
    batches, since = epochs.epoch_microbatches(epoch), time.perf_counter()
    for step in range(epochs.steps):
        meter.add(train_step(trainer, batches))
        if validator.problem:
            run.print_rank_0(f"WARNING: {validator.decide_after_bad_step(progress.iteration)}")
        if progress.iteration % run.config.log.log_interval == 0 or step + 1 == epochs.steps:
            resolved = meter.resolve()  # the same on all ranks
            writers.write_steps(resolved)
            add_steps_to_run_log(run.run_log, resolved)
            watch.require_finite(resolved)
            train = run.config.train
            assert train.train_iters is not None, "finetuning counts its steps before it begins"
            writers.write_interval_report(
                meter.report(
                    train_iters=train.train_iters,
                    seconds=time.perf_counter() - since,
                    seq_length=train.seq_length,
                    samples_left=(train.train_iters - progress.iteration) * epochs.full,
                )
            )
            since = time.perf_counter()
    run.print_rank_0(f"epoch {epoch + 1} is done")


def predict_samples(trainer: Trainer, samples: Samples) -> list[Prediction]:
    """Return the prediction for every sample, in order, on every rank. Collective."""
    run, full = trainer.run, trainer.batches.final_batch_size
    rows: dict[int, tuple[float, ...]] = {}

    def collecting_forward_step(
        run: RunContext, batches: Iterator[Batch], stage: ClassifierModel
    ) -> tuple[Tensor, LossFunction]:
        batch = next(batches)
        output, loss = classifier_forward_step(run, iter((batch,)), stage)

        def record_scores_and_return_loss(scores: Tensor) -> Loss:
            rows.update(zip(batch.extras["index"][:, 0].tolist(), map(tuple, scores.detach().float().tolist())))
            return loss(scores)

        return output, record_scores_and_return_loss

    ordinary, trainer.forward_step = trainer.forward_step, collecting_forward_step
    batches = single_pass_microbatches(
        run, samples, split="valid", full_batch=full, reads=stages_read_data(run.config, trainer.specs)
    )
    evaluate_loss(trainer, batches, -(-len(samples) // full))
    trainer.forward_step = ordinary
    predicted = {
        index: scores for theirs in collectives.gather_objects(rows, run.mesh.world) for index, scores in theirs.items()
    }
    assert len(predicted) == len(samples), f"{len(predicted)} of {len(samples)} samples were judged"
    labels = [text.label for text in samples.texts]
    return [
        Prediction(index, scores[0] if len(scores) == 1 else int(np.argmax(scores)), labels[index], scores)
        for index, scores in sorted(predicted.items())
    ]


def evaluate_task_sets(
    trainer: Trainer, task: TaskConfig, sets: FinetuneData
) -> tuple[dict[str, float], list[list[Prediction]]]:
    """Evaluate every set and print its metrics. Returns those of all labelled samples, and the predictions."""
    rows = [predict_samples(trainer, samples) for samples in sets.valid]
    together: list[tuple[float, float]] = []
    for name, judged_ in zip(sets.names, rows):
        pairs = [(row.predicted, row.label) for row in judged_ if row.label is not None]
        if not pairs:
            trainer.run.print_rank_0(f"{task.task} on {name}: no labels")
            continue
        together += pairs
        trainer.run.print_rank_0(f"{task.task} on {name}: {_metrics_text(task, pairs)}")
    if together and len(rows) > 1:
        trainer.run.print_rank_0(f"{task.task} overall: {_metrics_text(task, together)}")
    return glue_metrics(_TASKS[str(task.task)], together) if together else {}, rows


def write_predictions(
    task: TaskConfig, sets: FinetuneData, rows: Sequence[Sequence[Prediction]], run: RunContext
) -> None:
    """Write `--output-file` atomically on the first rank: a JSON line for each sample of each set."""
    if not task.output_file or not run.mesh.world.is_first:
        return
    path = Path(task.output_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, durable=False) as file:
        for name, samples, judged_ in zip(sets.names, sets.valid, rows):
            for row in judged_:
                file.write((json.dumps(_prediction_record(task, name, samples, row)) + "\n").encode())


def _prediction_record(task: TaskConfig, name: str, samples: Samples, row: Prediction) -> dict[str, object]:
    """Return one sample's output line: classes by name, RACE's answers by letter, numbers as they are."""
    text, classes = samples.texts[row.index], _TASKS[str(task.task)].classes
    record: dict[str, object] = {"file": name, "uid": text.uid}
    if not classes:
        record["prediction"] = round(row.predicted, 6)
        return record if row.label is None else {**record, "label": row.label}
    if isinstance(text, RaceQuestion):
        classes = classes[: len(text.answers)]
    record["prediction"] = classes[int(row.predicted)]
    record["scores"] = dict(zip(classes, (round(score, 6) for score in row.scores)))
    return record if row.label is None else {**record, "label": classes[int(row.label)]}


def _metrics_text(task: TaskConfig, pairs: Pairs) -> str:
    """Return the task's metrics in percent and the number of samples, as text."""
    numbers = " | ".join(
        f"{name}: {100 * value:.2f} %" for name, value in glue_metrics(_TASKS[str(task.task)], pairs).items()
    )
    if not _TASKS[str(task.task)].classes:
        return f"{numbers} ({len(pairs)} pairs)"
    return f"{numbers} ({sum(predicted == true for predicted, true in pairs)} of {len(pairs)} right)"
