"""A bad step once more, from its failure dump: in one process, on the CPU, module by module.

The whole global batch goes through the whole network, whatever the layout of the run was: the microbatches of the data
ranks one after the other, each with the dropout stream of the rank that read it. Hooks on every module look at what it
gives and at the gradient that comes back to it. The first value that is not finite, or larger than a bound, is where the
trouble arises; if there is none, data and weights are sound, and the machine or the network of machines is not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.config.flags.declare import ConfigError, config_from_flat_dict
from megatron.core.config.settings.kernels import KernelConfig
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.context_parallel.zigzag import Zigzag
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError, checkpoints_to_try
from megatron.core.dist_checkpointing.load import load_into_sharded_state
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.core.kernels.choice.table import KernelRequirements, select_kernels
from megatron.core.optimizer.clip import global_norm
from megatron.core.parallel.flight_recorder import describe_schedule_action
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.parallel.spec import param_spec_of
from megatron.core.tokenizers.build import NullTokenizer
from megatron.training.checkpoint.run_state import weights_of
from megatron.training.health.failure_dump import STEP, WEIGHTS, dumped_batch_file_name, dumped_rng_file_name
from megatron.training.state.batch import Batch
from megatron.training.state.run import RunContext, TrainingProgress
from megatron.training.state.step import StepWork
from megatron.training.state.trainer import ForwardStep, ModelProvider, Trainer, build_trainer


@dataclass(frozen=True, slots=True)
class BadValue:
    """A bad value. what: output or gradient; where: module; when: action; cause: if inputs and weights were good."""

    what: str
    where: str
    when: str
    value: float
    cause: str = ""

    def __str__(self) -> str:
        return f"{self.what} of {self.where or 'the whole network'} is {self.value:g}, in {self.when}" + (
            f"; {self.cause}" if self.cause else ""
        )


@dataclass(slots=True)
class FailureReplayResult:
    """Result of a replay. facts: of step.json. first: bad output and gradient; largest: module -> largest output."""

    facts: dict[str, Any]
    losses: dict[str, float]
    norm: float
    notes: list[str]
    first: dict[str, BadValue] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    bad_weights: list[str] = field(default_factory=list)
    bad_gradients: list[str] = field(default_factory=list)

    @property
    def conclusion(self) -> str:
        """In words, where the bad values come from."""
        if self.bad_weights:
            return f"weights were not finite before the step: {', '.join(self.bad_weights[:4])}"
        if "output" in self.first:
            return f"the trouble arises in the forward pass: {self.first['output']}"
        if "gradient" in self.first:
            return f"the trouble arises in the backward pass: {self.first['gradient']}"
        if self.bad_gradients:
            return f"the trouble arises in the gradients of {', '.join(self.bad_gradients[:4])}, whose modules pass on none that is bad"
        return (
            "nothing of it happens here: this batch and these weights are sound, so look at the machines that computed or reduced "
            "them, or at the steps between these weights and the bad one"
        )


class BadValueObserver:
    """Hooks on every module that record the first bad output and gradient. bound: larger absolute values are bad."""

    def __init__(self, trainer: Trainer, replayed: FailureReplayResult, bound: float) -> None:
        self._trail, self._found, self._bound = trainer.run.mesh.flight_recorder, replayed, bound
        for stage in trainer.stages:
            for name, module in stage.named_modules():
                module.register_forward_hook(partial(self._observe_output, name))

    def _observe_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Forward hook: record a module's output, and hook its gradient."""
        for tensor in _floating_tensors(output):
            largest = _largest_absolute(tensor)
            known = self._found.largest.get(name, 0.0)
            self._found.largest[name] = known if known >= largest else largest
            if not largest <= self._bound and "output" not in self._found.first:
                self._found.first["output"] = BadValue(
                    "an output",
                    name,
                    describe_schedule_action(self._trail.action),
                    largest,
                    self._cause_text(name, module, inputs),
                )
            if tensor.requires_grad:
                tensor.register_hook(partial(self._observe_gradient, name))

    def _observe_gradient(self, name: str, gradient: Tensor) -> None:
        """Gradient hook: record a bad gradient that arrives at a module's output."""
        largest = _largest_absolute(gradient)
        if not largest <= self._bound and "gradient" not in self._found.first:
            self._found.first["gradient"] = BadValue(
                "the gradient that comes back to the output",
                name,
                describe_schedule_action(self._trail.action),
                largest,
            )

    def _cause_text(self, name: str, module: nn.Module, inputs: Any) -> str:
        """Say whether a module's weights and inputs are good."""
        weights = [
            name for name, param in module.named_parameters() if not _largest_absolute(param.detach()) <= self._bound
        ]
        if weights:
            return f"its {', '.join(weights[:3])} is not sound"
        if all(_largest_absolute(tensor) <= self._bound for tensor in _floating_tensors(inputs)):
            return "what goes in is sound"
        outer = name.rpartition(".")[0] or "the whole network"
        return f"what goes in is not sound, and every module's output before it is: {outer} computes it between its modules, as it does a scan"


def replay_failure_dump(
    folder: Path,
    providers: Mapping[str, tuple[ModelProvider, ForwardStep]],
    *,
    weights: Path | None = None,
    bound: float = float("inf"),
) -> FailureReplayResult:
    """Run the step of a failure dump again in this process. providers: architecture -> (model provider, forward step).
    weights: checkpoint to use instead of the dump's own or the one that it names. bound: absolute values above it are
    bad. Raises `ConfigError` if the folder is no failure dump, and `CheckpointError` if there are no weights.
    """
    try:
        facts = json.loads((folder / STEP).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} is no failure dump of a bad step: {STEP} cannot be read ({error}); --error-dir or --save holds "
            "faults/step-... after one"
        ) from error
    config, notes = _single_process_config(facts)
    trainer = _build_trainer(config, facts, providers[config.model.architecture.name])
    notes += _load_weights(trainer, _weights_folder(folder, facts, weights), facts)
    replayed = FailureReplayResult(facts, {}, 0.0, notes)
    replayed.bad_weights = [
        param_spec_of(param).name
        for stage in trainer.stages
        for param in stage.parameters()
        if not bool(param.isfinite().all())
    ]
    BadValueObserver(trainer, replayed, torch.finfo(torch.float64).max if bound == float("inf") else bound)
    count = config.train.global_batch_size // config.train.micro_batch_size
    work = StepWork(trainer, _read_dumped_microbatches(folder, facts, trainer, notes), count, training=True)
    trainer.run_schedule(work, count, training=True)
    trainer.finish_reductions()
    replayed.losses = {name: float(total / number) for name, (total, number) in work.loss_sums().items()}
    optimizer = trainer.optimizer
    replayed.norm = float(
        global_norm(optimizer.segments, trainer.run.mesh) * work.remaining_gradient_scale() / optimizer.scaler.scale
    )
    replayed.bad_gradients = [segment.name for segment in optimizer.segments if not bool(segment.grad.isfinite().all())]
    return replayed


def _single_process_config(facts: dict[str, Any]) -> tuple[RunConfig, list[str]]:
    """Return the config for one process, and notes on what that cannot repeat exactly. facts: the dump's step.json."""
    config = config_from_flat_dict(RunConfig, facts["config"])
    parallel, model, notes = config.parallel, config.model, []
    if parallel.hybrid_context_parallel:
        raise ConfigError(
            "a step with --hybrid-context-parallel cannot be repeated in one process: its microbatches are regrouped"
        )
    if model.adapter.lora_base_quantization != "none":
        raise ConfigError(
            "a step with --lora-base-quantization cannot be repeated: the failure dump holds no quantized weights"
        )
    dropout = model.hidden_dropout or model.attention_dropout
    if dropout and (parallel.tp > 1 or parallel.pp > 1 or parallel.context_parallel_size > 1):
        notes.append("dropout is drawn otherwise than in the run, whose ranks each drew for a part of the network")
    model = replace(model, attention_backend="auto", kernels=KernelConfig())  # this machine may have others
    return replace(config, parallel=ParallelConfig(), model=model).resolve(1), notes


def _build_trainer(config: RunConfig, facts: dict[str, Any], provider: tuple[ModelProvider, ForwardStep]) -> Trainer:
    """Build the trainer of one process on the CPU, with the counters and loss scale of the dump."""
    mesh = Mesh.single_process(torch.device("cpu"))
    kernels = select_kernels(
        KernelRequirements(
            device="cpu",
            dtype=getattr(torch, config.precision.param_dtype_name),
            documents=config.data.separates_documents,
            padding=config.model.architecture.pads,
        ),
        config.model.all_requested_kernels,
    )
    run = RunContext(
        config=config,
        mesh=mesh,
        kernels=kernels,
        tokenizer=NullTokenizer(config.model.true_vocab_size),
        streams=RandomStreams.build(mesh, config.train.seed),
        progress=TrainingProgress(**facts["progress"]),
    )
    trainer = build_trainer(run, *provider)
    trainer.optimizer.scaler.scale = facts["loss_scale"]
    return trainer


def _weights_folder(folder: Path, facts: dict[str, Any], weights: Path | None) -> Path:
    """Return the folder to take weights from: `weights`, the dump's own, or that it names. `CheckpointError`."""
    folder_of_weights = weights or (folder / WEIGHTS if (folder / WEIGHTS).is_dir() else None)
    if folder_of_weights is None and facts["checkpoint"] is None:
        raise CheckpointError(
            "the failure dump holds no weights, and the run had saved no checkpoint; give one with --weights, and next time "
            "--failure-dump-weights to the run"
        )
    place = Path(facts["checkpoint"]["folder"]) if folder_of_weights is None else folder_of_weights
    saved = checkpoints_to_try(place) if not (place / "commit.txt").is_file() else []
    return saved[0].folder if saved else place


def _load_weights(trainer: Trainer, place: Path, facts: dict[str, Any]) -> list[str]:
    """Load the network's weights; return notes for the user."""
    source = open_native_checkpoint(place)
    load_into_sharded_state(weights_of(trainer), source, complete=("model.",))
    missing = facts["iteration"] - 1 - source.commit.iteration
    return [
        f"the weights are {place}" + (f", {missing} steps before the bad one: numbers will differ" if missing else "")
    ]


def _read_dumped_microbatches(
    folder: Path, facts: dict[str, Any], trainer: Trainer, notes: list[str]
) -> Iterator[Batch]:
    """Yield the microbatches of all data ranks in order, in the random streams of each rank. Adds to `notes`."""
    data_rank, context = 0, config_from_flat_dict(RunConfig, facts["config"]).parallel.context_parallel_size
    while (folder / dumped_batch_file_name(data_rank, 0)).is_file():
        read = [
            torch.load(folder / dumped_batch_file_name(data_rank, rank), weights_only=True) for rank in range(context)
        ]
        streams = torch.load(folder / dumped_rng_file_name(read[0]["rank"]), weights_only=True)
        if all(streams[name].shape == state.shape for name, state in trainer.run.streams.state().items()):
            trainer.run.streams.load(streams)
        elif data_rank == 0:
            notes.append("random streams are those of another device, and start afresh")
        for rows in zip(*(one["microbatches"] for one in read), strict=True):
            yield _join_context_ranks(rows)
        data_rank += 1


def _join_context_ranks(pieces: tuple[dict[str, Any], ...]) -> Batch:
    """Join the parts of a microbatch that the context ranks hold."""
    first = pieces[0]
    cut = Zigzag(sum(piece["tokens"].shape[-1] for piece in pieces), len(pieces))

    def join_along_sequence(pick: Callable[[dict[str, Any]], Tensor]) -> Tensor:
        rows = [pick(piece) for piece in pieces]
        if len(rows) == 1 or [row.shape[-1] for row in rows] != cut.position_counts_by_rank():
            return rows[0]  # what is not cut, all hold
        return torch.cat(rows, dim=-1)[..., cut.sorting_permutation(range(len(rows)), rows[0].device)]

    names = [name for name in first if name not in ("samples", "extras")]
    extras = {name: join_along_sequence(partial(_named_extra_tensor, name)) for name in first["extras"]}
    samples = None if first["samples"] is None else tuple(first["samples"])
    fields: dict[str, Any] = {name: join_along_sequence(itemgetter(name)) for name in names}
    return Batch(**fields, extras=extras, samples=samples)


def _named_extra_tensor(name: str, piece: dict[str, Any]) -> Tensor:
    return piece["extras"][name]


def _floating_tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() and value.numel() else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for one in inner for tensor in _floating_tensors(one)]


def _largest_absolute(tensor: Tensor) -> float:
    """The largest absolute value; NaN or infinity if there is one."""
    return float(torch.linalg.vector_norm(tensor.detach().double(), float("inf"))) if tensor.numel() else 0.0
