"""Some training steps of a config on made-up text, on the ranks of this process's world, with everything that they make.

    short_run_batches(run, iteration)        a rank's microbatches of a global batch that is the same in every layout
    run_short_training(config) -> ShortRun   losses, norms, activations by module, gradients and weights by logical name

Weights are drawn by name and text by sample, so two layouts of one config begin alike, and all that differs later is wrong.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.settings.run import RunConfig
from megatron.core.datasets.samplers import collate
from megatron.core.dist_checkpointing.sharded_state import (
    ShardedTensor,
    Tree,
    add_sharded_tensor,
    sharded_optimizer_state,
)
from megatron.core.kernels.choice.startup_check import select_kernels_with_trials
from megatron.core.kernels.choice.table import KernelRequirements
from megatron.core.models.stage_model import StageModel
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.parallel.spec import local_shard_boxes, param_spec_of, quantized_storage_of
from megatron.core.tensor_parallel.frozen_quantized import dense_weight
from megatron.core.tokenizers.build import NullTokenizer
from megatron.core.transformer.stack import TransformerStack
from megatron.plan.simulate.providers import PROVIDERS
from megatron.preference.data import ReferenceScoredBatches
from megatron.preference.dataset import PreferenceDataset, PreferenceRowSource
from megatron.preference.rows import LabeledAnswer, PreferencePair, Row
from megatron.preference.settings import PreferenceConfig
from megatron.preference.step import PreferenceStep
from megatron.training.checkpoint.run_state import weights_of
from megatron.training.data.rebalance import RebalancedBatches
from megatron.training.loader import ClosableBatches, iterate_split_microbatches
from megatron.training.state.batch import Batch, LossFunction
from megatron.training.state.hooks import StepHooks
from megatron.training.state.run import RunContext
from megatron.training.state.step import train_step
from megatron.training.state.trainer import ForwardStep, ModelProvider, Trainer, build_trainer

STEPS = 2  # in the first biases are zero and moments too, so that not every mistake shows before the second
_ANSWERED_ROWS = 64
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RecordedActivation:
    """A tensor that went into or came out of a module on one rank. side: input or output. microbatch: its index in the
    global batch. call: of the module in this microbatch. columns: ranges of its last dimension in the whole one, if a
    weight of the module is sharded so. stage: of the pipeline.
    """

    module: str
    side: str
    call: int
    microbatch: int
    stage: int
    value: Tensor
    columns: Ranges | None = None


@dataclass(slots=True)
class ShortRunStep:
    """What one training step gave on a rank. losses: means over all tokens, by name; norm: of the gradient.
    seen: activations. gradients: what this rank owns of them, before clipping and before division by the number of
    tokens that count. weights: after the step, what this rank owns of them; after the last step, all it holds.
    """

    losses: dict[str, float] = field(default_factory=dict)
    norm: float = 0.0
    seen: list[RecordedActivation] = field(default_factory=list)
    gradients: Tree = field(default_factory=dict)
    weights: Tree = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShortRun:
    """What a short run gave on one rank. place: axis -> (this rank's index, its size)."""

    rank: int
    place: dict[str, tuple[int, int]]
    steps: tuple[ShortRunStep, ...]


def make_short_run_context(config: RunConfig, device: torch.device = torch.device("cpu")) -> RunContext:
    """Return a `Run` on this process's ranks (or alone). The config is resolved and has a vocabulary."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    mesh = Mesh.single_process(device) if alone else Mesh.build(config.parallel, device)
    need = KernelRequirements(device=device.type, dtype=getattr(torch, config.precision.param_dtype_name))
    chosen = select_kernels_with_trials(
        config, need, device, gather=lambda rows: collectives.gather_objects(rows, mesh.world)
    )
    assert config.model.true_vocab_size is not None, "the config has its vocabulary"
    return RunContext(
        config=config,
        mesh=mesh,
        kernels=chosen.kernels,
        tokenizer=NullTokenizer(config.model.true_vocab_size),
        streams=RandomStreams.build(mesh, config.train.seed),
        log=logging.getLogger("megatron.short_run"),
    )


# Text.


def random_global_batch(config: RunConfig, iteration: int) -> dict[str, np.ndarray]:
    """Return the global batch of an iteration, [b, s] each: random ids, and a loss mask with very uneven rows."""
    random = np.random.default_rng((config.train.seed, iteration))
    shape = (config.train.global_batch_size, config.train.seq_length)
    window = random.integers(0, config.model.true_vocab_size, (shape[0], shape[1] + 1))
    in_loss = random.random(shape) < random.uniform(0.1, 1.0, (shape[0], 1))
    in_loss[:, 0] = True
    ends = random.random(shape) < 0.15
    documents: np.ndarray = np.cumsum(ends, axis=1) - ends
    if config.model.architecture.classifies_images:
        return _random_image_classifier_batch(config, random)
    if not config.model.architecture.is_decoder_only:
        return _random_padded_batch(config, random, window, in_loss)
    starts = np.maximum.accumulate(np.where(np.diff(documents, axis=1, prepend=-1) > 0, np.arange(shape[1]), 0), axis=1)
    batch: dict[str, np.ndarray] = {
        "tokens": window[:, :-1].copy(),
        "labels": window[:, 1:].copy(),
        "loss_mask": in_loss.astype(np.float32),
        "position_ids": np.arange(shape[1]) - starts,
        **({"document_ids": documents} if config.data.separates_documents else {}),
    }
    batch = _add_random_padding(random, batch) if config.data.chat.sft else batch
    return _add_random_images(config, random, batch) if config.model.has_vision else batch


def _add_random_padding(random: np.random.Generator, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """End most samples in padding, and make one of nothing else, as conversations and rows that fill up a step do."""
    size, length = batch["tokens"].shape
    lengths = np.where(np.arange(size) % 3 == 1, length, random.integers(1, length + 1, size))
    lengths[-1:] = 0 if size > 1 else lengths[-1:]
    padding_mask = (np.arange(length) < lengths[:, None]).astype(np.int64)
    batch["loss_mask"] *= padding_mask
    return {**batch, "padding_mask": padding_mask}


def _add_random_images(
    config: RunConfig, random: np.random.Generator, batch: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Put random images into every other sample, so that with two data-parallel ranks and one sample each the second
    has none. images: [b, most images of a sample, channels, height, width], of which a sample uses the first.
    """
    vision, (size, length) = config.model.vision, batch["tokens"].shape
    most = max(1, min(2, (length - 2) // (vision.num_image_embeddings + 1)))
    slots: np.ndarray = np.full((size, length), -1)
    counts = np.where(np.arange(size) % 2 == 0, random.integers(1, most + 1, size), 0)
    for sample, number in enumerate(counts.tolist()):
        for place in range(number):
            start = 1 + place * (vision.num_image_embeddings + 1)
            stop = min(start + vision.num_image_embeddings, length)
            slots[sample, start:stop] = place * vision.num_image_embeddings + np.arange(stop - start)
    batch["loss_mask"][:, :-1] *= slots[:, 1:] < 0  # what is predicted at the last slot is text, and counts
    images = random.standard_normal((size, most, vision.num_channels, vision.img_h, vision.img_w))
    return {**batch, "image_slots": slots, "image_counts": counts, "images": images}


def _random_image_classifier_batch(config: RunConfig, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the random global batch of an image classifier."""
    vision, size = config.model.vision, config.train.global_batch_size
    return {
        "tokens": np.zeros((size, 1), np.int64),
        "labels": random.integers(0, vision.num_classes, (size, 1)),
        "loss_mask": (np.arange(size)[:, None] % 3 != 2).astype(np.float32),
        "images": random.standard_normal((size, vision.num_channels, vision.img_h, vision.img_w)),
    }


def _random_padded_batch(
    config: RunConfig, random: np.random.Generator, window: np.ndarray, in_loss: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the random global batch of a BERT or a T5, with rows of very uneven length. window: ids [b, s + 1]."""
    train, ids = config.train, config.model.true_vocab_size
    lengths = random.integers(1, train.seq_length + 1, (len(window), 1))
    padding = np.arange(train.seq_length) < lengths
    if config.model.architecture.predicts_masked_words:
        return {
            "tokens": window[:, :-1].copy(),
            "labels": window[:, 1:].copy(),
            "loss_mask": (in_loss & padding).astype(np.int64),
            "types": random.integers(0, 2, padding.shape),
            "padding_mask": padding.astype(np.int64),
            "is_random": random.integers(0, 2, len(window)),
        }
    size = train.decoder_seq_length
    return {
        "tokens": window[:, :-1].copy(),
        "enc_mask": padding.astype(np.int64),
        "loss_mask": in_loss[:, :size].astype(np.int64),
        "text_dec": random.integers(0, ids, (len(window), size)),
        "labels": random.integers(0, ids, (len(window), size)),
    }


def short_run_batches(run: RunContext, iteration: int) -> Iterator[Batch]:
    """Yield this rank's microbatches in the single sampler's order; regrouped under --hybrid-context-parallel."""
    if run.config.parallel.hybrid_context_parallel:
        return RebalancedBatches(random_microbatches_of_rank(run, iteration, Axis("dp")), run.mesh, run.config)
    return random_microbatches_of_rank(run, iteration, run.mesh.dp)


def random_microbatches_of_rank(run: RunContext, iteration: int, axis: Axis) -> Iterator[Batch]:
    """Yield the microbatches of this rank on a data axis."""
    whole, train = random_global_batch(run.config, iteration), run.config.train
    for start in range(0, train.global_batch_size, train.micro_batch_size * axis.size):
        first = start + axis.rank * train.micro_batch_size
        arrays = {name: array[first : first + train.micro_batch_size] for name, array in whole.items()}
        if "image_slots" in arrays:
            arrays = _collate_with_images(arrays, run.config.model.vision.num_image_embeddings)
        batch = Batch.from_arrays(arrays, run.mesh.device, positions=run.config.data.restarts_positions)
        yield batch.with_future_tokens(
            run.config.model.mtp.mtp_num_layers or 0, per_token=run.config.train.calculate_per_token_loss
        ).shard_over_context(run.mesh.cp)


def _collate_with_images(arrays: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """Collate a microbatch's samples as a dataset does. rows: embeddings of an image."""
    arrays = dict(arrays)
    counts = arrays.pop("image_counts").tolist()
    samples = [
        {**{name: array[place] for name, array in arrays.items()}, "image_rows": np.asarray(count * rows)}
        | {"images": arrays["images"][place, :count]}
        for place, count in enumerate(counts)
    ]
    return collate(samples)


def random_finetuning_batches(
    trainer: Trainer, model: ModelProvider, config: PreferenceConfig, steps: int
) -> ReferenceScoredBatches:
    """Return the global batches of `steps` steps of a finetune.py task on random rows, with the reference's
    log-probabilities. The reference has other random weights; under adapters it is the base.
    """
    run, reference = trainer.run, None
    train, ids = run.config.train, run.config.model.true_vocab_size
    assert ids is not None, "the config has its vocabulary"
    if config.has_reference and not run.config.model.adapter.has_adapters:
        other = replace(run, config=replace(run.config, train=replace(train, seed=train.seed + 1)))
        stages = build_trainer(other, model, trainer.forward_step).stages
        for stage in stages:
            stage.eval()
        reference = replace(trainer, stages=stages, parallels=[], hooks=[], scripts={})
    dataset = PreferenceDataset(
        PreferenceRowSource("rows", _random_answer_rows(config, train.seq_length, ids, train.seed)),
        range(_ANSWERED_ROWS),
        length=train.seq_length,
        num_samples=steps * train.global_batch_size,
        seed=train.seed,
        split="train",
        task=config.finetune_task,
        packing=config.finetune_packing,
    )
    return ReferenceScoredBatches(
        trainer, iterate_split_microbatches(run, dataset, consumed_samples=0, reads=True), reference, config
    )


def _random_answer_rows(config: PreferenceConfig, length: int, ids: int, seed: int) -> tuple[Row, ...]:
    """Return random rows with very uneven answers; both of a pair fit into a sample. ids: size of the vocabulary."""
    random, rows = np.random.default_rng(seed), list[Row]()
    for number in range(_ANSWERED_ROWS):
        prompt, *answers = (
            random.integers(0, ids, random.integers(1, 1 + most)).astype(np.int32)
            for most in (2, *[max(1, length // 2 - 2)] * 2)
        )
        first, second = (np.concatenate([~prompt, answer]) for answer in answers)
        is_kto = config.finetune_task == "kto"
        rows.append(
            LabeledAnswer(first, number % 3 > 0) if is_kto else PreferencePair(first, second, 0.25 * (number % 3))
        )
    return tuple(rows)


# Steps.


def run_short_training(config: RunConfig, steps: int = STEPS, finetuning: PreferenceConfig | None = None) -> ShortRun:
    """Train so many steps on every rank of this process's world and record losses, activations, gradients and weights.
    The config is resolved and has a vocabulary. finetuning: the task of a run of finetune.py; left out, language
    modeling.
    """
    run, (model_provider, forward_step) = make_short_run_context(config), PROVIDERS[config.model.architecture.name]
    watch = _ActivationRecorder(run)
    task = None if finetuning is None or finetuning.finetune_task == "sft" else finetuning
    step: ForwardStep = forward_step if task is None else PreferenceStep(task)
    trainer = build_trainer(run, watch.record_weight_sharding_on_build(model_provider), watch.wrap_forward_step(step))
    answers = (
        None
        if task is None
        else random_finetuning_batches(replace(trainer, forward_step=step), model_provider, task, steps)
    )
    # Sequences that are cut by their length lie on other ranks, in other microbatches, than those of one rank.
    hooks = [] if config.parallel.hybrid_context_parallel else watch.add_hooks(trainer.stages)
    gradients = _CopyGradientsHook(trainer)
    trainer.add_hook(gradients)
    done = [_record_parity_train_step(trainer, watch, gradients, answers) for _ in range(steps)]
    if answers is not None:
        answers.close()
    for hook in hooks:
        hook.remove()
    done[-1].weights = {
        name.removeprefix("model."): _clone_shards(placed) for name, placed in weights_of(trainer).items()
    }
    done[-1].weights |= {
        param_spec_of(param).name: _dequantized_shards(param, run.mesh)
        for stage in trainer.stages
        for param in stage.parameters()
        if quantized_storage_of(param) is not None
    }
    place = {name: (run.mesh.axis(name).rank, run.mesh.axis(name).size) for name in ("tp", "cp", "dp", "pp", "ep")}
    return ShortRun(run.mesh.world.rank, place, tuple(done))


class _CopyGradientsHook(StepHooks):
    """Hook that copies the reduced gradients into the step's result."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.step = ShortRunStep()

    def before_update(self) -> None:
        """Copy the gradients that this rank owns."""
        segments = self.trainer.optimizer.segments
        self.step.gradients.update(owned_shards_by_name(self.trainer, [segment.grad for segment in segments]))


def _record_parity_train_step(
    trainer: Trainer, watch: _ActivationRecorder, gradients: _CopyGradientsHook, answers: ClosableBatches | None
) -> ShortRunStep:
    """Run one training step and return what it gave."""
    run, step = trainer.run, ShortRunStep()
    gradients.step = step
    watch.start_step_recording(step.seen)
    made = train_step(trainer, answers or short_run_batches(run, trainer.progress.iteration))
    for name, pair in made.losses.items():
        if isinstance(pair, Tensor) and name.endswith("loss"):
            total, count = collectives.all_reduce(torch.stack(tuple(pair.double())), run.mesh.world).tolist()
            step.losses[name] = total / count if count else 0.0
    assert made.grad_norm is not None, "a training step has the norm of its gradient"
    step.norm = float(made.grad_norm)
    step.weights = owned_shards_by_name(trainer, [segment.data for segment in trainer.optimizer.segments])
    return step


def run_short_training_pickled(
    config: RunConfig, steps: int = STEPS, finetuning: PreferenceConfig | None = None
) -> bytes:
    """Return the result of `run_short_training`, pickled."""
    # Whole: torch would hand over each of its thousands of tensors as an open file.
    return pickle.dumps(run_short_training(config, steps, finetuning))


def unpickle_short_run_result(content: bytes) -> ShortRun:
    """Unpickle the result of `run_short_training_pickled`."""
    return pickle.loads(content)


def owned_shards_by_name(trainer: Trainer, values: Sequence[Tensor]) -> Tree:
    """Return copies of this rank's shards, by parameter name. values: [elements] for each of its segments."""
    tree: Tree = {}
    for segment, value in zip(trainer.optimizer.segments, values, strict=True):
        add_sharded_tensor(tree, segment.name, _clone_shards(sharded_optimizer_state(segment, value, trainer.run.mesh)))
    return tree


def _dequantized_shards(param: nn.Parameter, mesh: Mesh) -> ShardedTensor:
    """Return a rank's shards of a quantized parameter, dequantized."""
    values = dense_weight(param)
    pieces = [(piece.box, values[piece.local.slices()]) for piece in local_shard_boxes(param_spec_of(param), mesh)]
    return ShardedTensor(param_spec_of(param).shape, param.dtype, pieces)


def _clone_shards(placed: ShardedTensor) -> ShardedTensor:
    return replace(placed, pieces=[(box, piece.clone()) for box, piece in placed.pieces])


class _ActivationRecorder:
    """Records modules' inputs and outputs in forward passes, but not in recomputation."""

    def __init__(self, run: RunContext) -> None:
        self.run = run
        self._seen: list[RecordedActivation] = []
        self._stage: StageModel | None = None
        self._counts: dict[int, int] = {}
        self._calls: dict[str, int] = {}
        self._columns: dict[str, dict[int, Ranges]] = {}

    def start_step_recording(self, seen: list[RecordedActivation]) -> None:
        """Begin a step; record into `seen`."""
        self._seen, self._counts = seen, {}

    def record_weight_sharding_on_build(self, model: ModelProvider) -> ModelProvider:
        """Return the provider, wrapped to record how the weights of modules are sharded."""

        def build_model_and_record_sharding(run: RunContext, stage: StageSpec) -> StageModel:
            made = model(run, stage)
            for name, _ in made.named_modules():  # an adapter takes and gives what its linear layer does
                linear = made.get_submodule(name.removesuffix(".adapter"))
                self._columns[name] = _local_weight_ranges_by_dim(linear, run.mesh)
            return made

        return build_model_and_record_sharding

    def wrap_forward_step(self, forward_step: ForwardStep) -> ForwardStep:
        """Return the forward step, wrapped to record during it."""

        def recorded_forward_step(
            run: RunContext, batches: Iterator[Batch], stage: StageModel
        ) -> tuple[Any, LossFunction]:
            self._stage, self._calls = stage, {}
            try:
                return forward_step(run, batches, stage)
            finally:
                self._counts[stage.stage.index] = self._counts.get(stage.stage.index, 0) + 1
                self._stage = None

        return recorded_forward_step

    def add_hooks(self, stages: Sequence[StageModel]) -> list[RemovableHandle]:
        """Hook every module of these stages but the stack of layers; return the handles."""
        modules = [
            (name, module)
            for stage in stages
            for name, module in stage.named_modules()
            if name and not any(isinstance(part, TransformerStack) for part in module.modules())
        ]
        return [module.register_forward_pre_hook(partial(self._record_input, name)) for name, module in modules] + [
            module.register_forward_hook(partial(self._record_output, name)) for name, module in modules
        ]

    def _record_input(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook."""
        if self._stage is not None:
            # A stage that only embeds what is ahead begins where the first stage, which embeds the text, would go on.
            again = name.startswith("embedding") and not self._stage.stage.has_embedding
            self._calls[name] = self._calls.get(name, int(again)) + 1
            self._record_activation(name, "input", inputs[0] if inputs else None)

    def _record_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Forward hook."""
        if self._stage is not None:
            self._record_activation(name, "output", output)

    def _record_activation(self, name: str, side: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) and value else value
        if self._stage is not None and isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2:
            index, dp = self._stage.stage.index, self.run.mesh.dp
            microbatch = self._counts.get(index, 0) * dp.size + dp.rank
            columns = self._columns[name].get(int(side == "input"))
            self._seen.append(
                RecordedActivation(name, side, self._calls[name], microbatch, index, value.detach().clone(), columns)
            )


def _local_weight_ranges_by_dim(module: nn.Module, mesh: Mesh) -> dict[int, Ranges]:
    """Return sharded dimension of a module's matrix (0 outputs, 1 inputs) -> ranges of this rank's shard."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return {}
    boxes = [piece.box for piece in local_shard_boxes(param_spec_of(weight), mesh)]
    return {
        shard.dim: tuple((box.offset[shard.dim], box.offset[shard.dim] + box.shape[shard.dim]) for box in boxes)
        for shard in param_spec_of(weight).shards
    }
