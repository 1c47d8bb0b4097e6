"""What a run saves, and how it resumes.

    model.<name>               weights                          run.progress           counters
    optimizer.<slot>.<name>    moments, fp32 master weights     run.schedule           the learning rate's curve
    run.random.<pp>.<tp>.<dp>.<stream>   dropout streams        run.optimizer_steps, run.loss_scale, run.config

Names are global, so a checkpoint does not know the layout that wrote it, except for the dropout streams: in another
layout they start afresh. Rank 0 decides what is loaded, and tells the others; so no rank goes another way.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron.core.config.flags import spelling, to_values
from megatron.core.config.run import RunConfig
from megatron.core.dist_checkpointing import dcp, store
from megatron.core.dist_checkpointing.store import CheckpointError, Description
from megatron.core.dist_checkpointing.tree import Tree, placed_parameter, placed_segment, put
from megatron.core.optimizer.schedule import Schedule, choose
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import spec_of
from megatron.training.stages import Trainer

Result = TypeVar("Result")
Formats = Mapping[str, dcp.Format]

# Settings that give parameters another shape or meaning: a checkpoint of other ones is another network.
_SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
          "true_vocab_size", "position_embedding_type", "normalization", "apply_layernorm_1p", "qk_layernorm", "add_bias_linear",
          "add_qkv_bias", "swiglu", "quick_geglu", "squared_relu", "openai_gelu", "untie_embeddings_and_output_weights",
          "apply_residual_connection_post_layernorm")
# Settings that a network can be adapted to by training on (--finetune), but that a run does not change midway.
_NUMBERS = ("norm_epsilon",)
_ROTARY = ("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "use_rope_scaling",
           "rope_scaling_factor")
_LABELS = {"true_vocab_size": "size of the tokenizer's vocabulary"}


@dataclass(frozen=True, slots=True)
class Source:
    """What to load. folder: of the one iteration. weights_only: `--finetune`, or a `--pretrained-checkpoint`."""

    folder: Path
    iteration: int
    weights_only: bool
    description: Description


class Checkpoint:
    """Saves and loads a trainer. last_saved: iteration whose checkpoint `--save` is known to hold."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.config, self.mesh = trainer, trainer.run.config, trainer.run.mesh
        self.last_saved: int | None = None

    def save(self) -> None:
        """Write the state of the run into `--save`. All ranks call this together."""
        folder, iteration, started = self.config.checkpoint.save, self.trainer.progress.iteration, time.perf_counter()
        assert folder is not None, "save() is called when --save is given"
        for parallel in self.trainer.parallels:
            parallel.finish_gather()  # overlapped with a forward pass that has not come yet
        made = _decided(self.mesh, lambda: store.begin(folder, iteration))
        dcp.save(self.state(), made, self.mesh.world)
        target, size = _decided(self.mesh, lambda: self._finish(folder, iteration))
        self.last_saved = iteration
        self._say(f"saved checkpoint {target}: {_speed(size, time.perf_counter() - started)}")

    def resume(self) -> bool:
        """Load what `--load` asks for. Returns whether there was something; otherwise the run starts afresh."""
        source = _decided(self.mesh, lambda: find_source(self.config))
        if source is None:
            if self.config.checkpoint.load:
                self._say(f"no checkpoint in {self.config.checkpoint.load} yet: the run starts afresh")
            return False
        self.load(source)
        return True

    def load(self, source: Source) -> None:
        """Load a checkpoint that `find_source` found. What does not fit is refused before any tensor is changed."""
        started, asked, axis = time.perf_counter(), self.config.checkpoint, self.mesh.world
        formats = dcp.formats(dcp.read_metadata(source.folder, axis))
        continues = asked.load_optim and not source.weights_only
        _check_contents(source, formats, optimizer=continues, streams=asked.load_rng and not source.weights_only)
        values: dict[str, Any] = {}
        if not source.weights_only:
            names = ("run.progress", *(("run.schedule", "run.optimizer_steps", "run.loss_scale") if continues else ()))
            values = dcp.load(dict.fromkeys(names), source.folder, axis)
        schedule = self._schedule(values.get("run.schedule"))
        state, streams = self._tensors(formats, optimizer=continues), self._fitting_streams(source, formats)
        dcp.load(state | streams, source.folder, axis, complete=("model.",), instead=self._instead(formats))
        if streams:
            self.trainer.run.streams.load({name.rpartition(".")[2]: value for name, value in streams.items()})
        self._adopt(values)
        self.trainer.schedule = schedule
        if values and asked.save and _same_folder(asked.save, source.folder.parent):
            self.last_saved = source.iteration
        size = store.bytes_in(source.folder) if axis.is_first else 0
        what = "weights of checkpoint" if source.weights_only else "checkpoint"
        self._say(f"loaded {what} {source.folder}: {_speed(size, time.perf_counter() - started)}")

    def state(self) -> Tree:
        """Everything that a save holds: this rank's part."""
        asked, trainer = self.config.checkpoint, self.trainer
        state: Tree = self._weights()
        state["run.config"] = to_values(self.config)
        state["run.progress"] = dataclasses.asdict(trainer.progress)
        if asked.save_optim:
            for slot, segment, tensor in trainer.optimizer.slots():
                put(state, f"optimizer.{slot}.{segment.name}", placed_segment(segment, tensor, self.mesh))
            # A rank whose share of a bucket is padding counts no steps.
            state["run.optimizer_steps"] = max(collectives.gather_objects(trainer.optimizer.num_steps, self.mesh.world))
            state["run.loss_scale"] = trainer.optimizer.scaler.state()
            state["run.schedule"] = None if trainer.schedule is None else trainer.schedule.state()
        if asked.save_rng:
            state |= self._streams()
        return state

    def _weights(self) -> Tree:
        weights: Tree = {}
        for stage in self.trainer.stages:
            for param in stage.parameters():
                put(weights, f"model.{spec_of(param).name}", placed_parameter(param, self.mesh))
        return weights

    def _streams(self) -> Tree:
        place = f"{self.mesh.pp.rank}.{self.mesh.tp.rank}.{self.mesh.dp_cp.rank}"
        return {f"run.random.{place}.{name}": value for name, value in self.trainer.run.streams.state().items()}

    def _tensors(self, formats: Formats, *, optimizer: bool) -> Tree:
        """What a load fills: weights, and slots of the optimizer. Masters that are not in the checkpoint, or not asked
        for, are filled from the weights, in the precision in which those were saved."""
        tensors = self._weights()
        for slot, segment, tensor in self.trainer.optimizer.slots():
            name = f"optimizer.{slot}.{segment.name}"
            if slot == "master" and not (optimizer and name in formats):
                put(tensors, f"model.{segment.name}", placed_segment(segment, tensor, self.mesh))
            elif optimizer:
                put(tensors, name, placed_segment(segment, tensor, self.mesh))
        return tensors

    def _instead(self, formats: Formats) -> dict[str, str]:
        """Weights to read from their masters: those saved in another format than this run's, so as to round only once."""
        found = {}
        for stage in self.trainer.stages:
            for param in stage.parameters():
                name, master = f"model.{spec_of(param).name}", f"optimizer.master.{spec_of(param).name}"
                if master in formats and name in formats and formats[name].dtype != param.dtype:
                    found[name] = master
        return found

    def _fitting_streams(self, source: Source, formats: Formats) -> Tree:
        """Tensors to load this rank's dropout streams into; none if the checkpoint's do not belong to this layout."""
        if source.weights_only or not self.config.checkpoint.load_rng:
            return {}
        now = _layout(to_values(self.config), self.mesh.world.size)
        then = _layout(source.description.values, source.description.world_size)
        mine = self._streams()
        if now == then and all(name in formats and formats[name].shape == tuple(value.shape) for name, value in mine.items()):
            return {name: torch.empty_like(value) for name, value in mine.items()}
        why = f"the checkpoint was written by {then}, this run is {now}" if now != then else "they are another device's"
        self._say(f"dropout streams start afresh from --seed: {why}")
        return {}

    def _schedule(self, saved: Mapping[str, Any] | None) -> Schedule | None:
        """The learning rate's curve from now on; refuses one that differs from the checkpoint's unless told whose wins."""
        mine, asked = self.trainer.schedule, self.config.schedule
        if mine is None or saved is None:
            return mine
        return choose(mine, saved, override=asked.override_opt_param_scheduler,
                      use_checkpoint=asked.use_checkpoint_opt_param_scheduler)

    def _adopt(self, values: Mapping[str, Any]) -> None:
        """Take over counters. Without optimizer state the learning rate's curve begins anew, as in Megatron."""
        continues = "run.optimizer_steps" in values
        for field in dataclasses.fields(self.trainer.progress):
            if field.name in values.get("run.progress", ()) and (continues or field.name != "schedule_samples"):
                setattr(self.trainer.progress, field.name, values["run.progress"][field.name])
        if continues:
            self.trainer.optimizer.load_num_steps(values["run.optimizer_steps"])
            self.trainer.optimizer.scaler.load(values["run.loss_scale"])

    def _finish(self, folder: str, iteration: int) -> tuple[Path, int]:
        """On rank 0, when all ranks have written."""
        target = store.finish(folder, iteration, Description(to_values(self.config), self.mesh.world.size))
        interval = self.config.checkpoint.save_retain_interval
        if interval:
            store.retain(folder, interval, saved=iteration)
        return target, store.bytes_in(target)

    def _say(self, text: str) -> None:
        self.trainer.run.say(text)


def find_source(config: RunConfig) -> Source | None:
    """What a run loads: `--load`, else `--pretrained-checkpoint`, else nothing. Refuses another network's checkpoint."""
    asked = config.checkpoint
    iteration = store.find(asked.load, asked.ckpt_step) if asked.load else None
    if iteration is not None:
        return _source(asked.load, iteration, config, weights_only=asked.finetune)
    if asked.pretrained_checkpoint:
        iteration = store.find(asked.pretrained_checkpoint)
        if iteration is None:
            raise CheckpointError(f"--pretrained-checkpoint {asked.pretrained_checkpoint} holds no complete checkpoint")
        return _source(asked.pretrained_checkpoint, iteration, config, weights_only=True)
    if asked.load is None:
        return None
    if asked.exit_on_missing_checkpoint:
        raise CheckpointError(f"--load {asked.load} holds no complete checkpoint, and --exit-on-missing-checkpoint is given")
    if asked.save is None or not _same_folder(asked.load, asked.save):
        raise CheckpointError(f"--load {asked.load} holds no complete checkpoint; leave --load out to start afresh, or make it "
                              "the same folder as --save")
    return None


def differences(saved: Mapping[str, Any], config: RunConfig, *, weights_only: bool) -> list[str]:
    """How the checkpoint's network differs from this run's, a line each."""
    mine = to_values(config)
    names = list(_SHAPE)
    if mine["position_embedding_type"] == "learned_absolute":
        names.append("max_position_embeddings")
    if not weights_only:
        names += _NUMBERS + (_ROTARY if mine["position_embedding_type"] == "rope" else ())
    return [f"{_LABELS.get(name) or spelling(name)}: {_word(saved[name])} in the checkpoint, {_word(mine[name])} in this run"
            for name in names if name in saved and saved[name] != mine[name]]


def _source(folder: str, iteration: int, config: RunConfig, *, weights_only: bool) -> Source:
    path = store.iteration_folder(folder, iteration)
    description = store.describe(path)
    found = differences(description.values, config, weights_only=weights_only)
    if found:
        raise CheckpointError(f"{path} holds another network; --use-checkpoint-args takes its shape", found)
    saved, mine = description.values.get("optimizer"), config.optimizer.optimizer
    if not weights_only and config.checkpoint.load_optim and saved != mine:
        raise CheckpointError(f"{path} holds the state of --optimizer {saved}, this run has {mine}; --no-load-optim starts it "
                              "afresh")
    return Source(path, iteration, weights_only, description)


def _check_contents(source: Source, formats: Formats, *, optimizer: bool, streams: bool) -> None:
    """Refuse a checkpoint that was saved without what is asked of it."""
    found = []
    if optimizer and not any(name.startswith("optimizer.") for name in formats):
        found.append("no optimizer state (--no-save-optim); load it with --no-load-optim, or --finetune")
    if streams and not any(name.startswith("run.random.") for name in formats):
        found.append("no dropout streams (--no-save-rng); load it with --no-load-rng, or --finetune")
    if found:
        raise CheckpointError(f"{source.folder} lacks what this run wants to load", found)


def _layout(values: Mapping[str, Any], world_size: int) -> str:
    """The layout that decides which rank has which dropout stream."""
    tp, pp = values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"]
    return f"tensor {tp} x pipeline {pp} x data {world_size // (tp * pp)}"


def _same_folder(a: str | Path, b: str | Path) -> bool:
    return Path(a).resolve() == Path(b).resolve()


def _word(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _speed(size: int, seconds: float) -> str:
    return f"{size / 1e9:.3g} GB in {seconds:.2f} s ({size / 1e9 / seconds:.2g} GB/s)"


def _decided(mesh: Mesh, action: Callable[[], Result]) -> Result:
    """Let rank 0 act; all ranks get its result, or its error."""
    result, error = None, None
    if mesh.world.is_first:
        try:
            result = action()
        except Exception as caught:  # noqa: BLE001 - the others wait for whatever it is
            error = caught
    result, error = collectives.broadcast_object((result, error), mesh.world)
    if error is not None:
        raise error
    return result
