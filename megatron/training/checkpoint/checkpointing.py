"""What a run saves, and how it resumes.

    model.<name>               weights                          run.progress           counters
    optimizer.<slot>.<name>    moments, fp32 master weights     run.schedule           the learning rate's curve
    run.random.<pp>.<tp>.<dp>.<stream>   dropout streams        run.optimizer_steps, run.loss_scale, run.config, run.tokenizer
    run.amax.<layer>           histories of delayed scales      run.base               hash of the frozen weights that adapters belong to
                                                                 run.optional_weights   prefixes of weights that a run of another kind leaves

Names are global, so a checkpoint does not know the layout that wrote it, except for the dropout streams: in another
layout they start afresh. What is loaded is chosen in resuming.py; how it is saved beside training, in
core/dist_checkpointing/saver.py.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron.adapters.saved import AdaptersRefused, AdapterState, is_adapter_checkpoint
from megatron.core.config.flags.declare import config_to_flat_dict, flag_name
from megatron.core.config.settings.run import RunConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError, SavedRunConfig
from megatron.core.dist_checkpointing.load import load_into_sharded_state
from megatron.core.dist_checkpointing.lock import FolderLock
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.core.dist_checkpointing.saver import CheckpointSaver, SaveOutcome, SavePolicy
from megatron.core.dist_checkpointing.sharded_state import Tree, add_sharded_tensor, sharded_optimizer_state
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.dist_checkpointing.state_hooks import MissingWeights, StateHooks, UnusedWeights
from megatron.core.optimizer.schedule import OptimizerParamSchedule, resolve_resumed_schedule
from megatron.core.parallel import collectives
from megatron.core.tokenizers.base import tokenizer_fingerprint_fields
from megatron.training.checkpoint.resuming import (
    OpenedCheckpoint,
    ResumeRequest,
    decide_on_first_rank,
    find_requested_checkpoint,
    open_requested_checkpoint,
    require_checkpoint_tokenizer,
    same_folder,
)
from megatron.training.checkpoint.run_state import (
    AmaxHistories,
    checkpoint_load_targets,
    main_weights_to_read_instead,
    random_stream_states,
    refresh_after_load,
    resolve_missing_weights,
    weights_of,
)
from megatron.training.launch.launch_info import read_launch_info
from megatron.training.state.hooks import StepHooks
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import Trainer


@contextmanager
def lock_save_folder(run: RunContext) -> Iterator[FolderLock | None]:
    """Hold the lock of the `--save` folder while training; yields None without --save or with --skip-train.
    Raises `CheckpointError` on all ranks when another job writes there.
    """
    options = run.config.checkpoint
    if not options.save or run.config.train.skip_train:
        yield None
        return
    lock = FolderLock(options.save, job=read_launch_info().launch)
    if note := decide_on_first_rank(run.mesh.world, lock.acquire):
        run.print_rank_0(f"WARNING: {note}")
    try:
        yield lock
    finally:
        if run.mesh.world.is_first:
            lock.release()


class Checkpointer(StepHooks):
    """Saves and loads a trainer's state. Every method is collective.
    last_saved: newest iteration known to be complete in `--save`, or None. on_its_way: that of the save in flight.
    """

    def __init__(self, trainer: Trainer, config: RunConfig | None = None, *, lock: FolderLock | None = None) -> None:
        """config: what says where to save and what to load; left out, the run's. lock: of `lock_save_folder`, by which `--save` is this job's."""
        self._lock = lock
        self.trainer, self.config, self.mesh = trainer, config or trainer.run.config, trainer.run.mesh
        self.last_saved: int | None = None
        self.on_its_way: int | None = None
        self._saver: CheckpointSaver | None = None
        self.state_hooks = (*_state_hooks_of_settings(trainer, self.config), *trainer.state_hooks)
        self._log_info = trainer.run.print_rank_0
        trainer.add_hook(self)

    def before_update(self) -> None:
        """Wait until the save in flight, if any, has copied what it writes."""
        if self._saver is not None:
            self._saver.wait_for_staging()

    def preallocate_for_async_saves(self) -> None:
        """Before the first step: allocate what asynchronous saves need, so that the first save is not slower."""
        if self.config.checkpoint.save and self.config.checkpoint.async_save:
            self._get_saver().plan_and_allocate(self.state_to_save())

    def save(self) -> None:
        """Write the state of the run into `--save`; raises `CheckpointError` if that fails."""
        ended = [outcome for outcome in (*self.begin_save(), self.wait_for_save_outcome()) if outcome is not None]
        if ended[-1].problems:
            raise CheckpointError(
                f"the checkpoint of iteration {ended[-1].iteration} was not saved", ended[-1].problems
            )

    def begin_save(self) -> list[SaveOutcome]:
        """Begin to save the state, after waiting for an earlier save still in flight; a synchronous save is also
        finished. On a CPU the copy to write from is made during the next passes; the trainer waits for it before its
        next update.
        Return the outcomes of the saves that ended meanwhile. A failed one is logged and raises nothing.
        """
        ended: list[SaveOutcome] = []
        if self.on_its_way is not None:
            earlier, since = self.on_its_way, time.perf_counter()
            ended += [] if (outcome := self.wait_for_save_outcome()) is None else [outcome]
            waited = time.perf_counter() - since
            if waited > 0.1:
                self._log_warning(
                    f"the save of iteration {self.trainer.progress.iteration} waited {waited:.1f} s for that of iteration {earlier}; "
                    "a longer --save-interval avoids this"
                )
        for parallel in self.trainer.parallels:
            parallel.finish_gather()  # overlapped with a forward pass that has not come yet
        for hook in self.trainer.hooks:
            hook.before_save()
        iteration = self.trainer.progress.iteration
        self.on_its_way = iteration
        writer, on_cpu = self._get_saver(), self.mesh.device.type == "cpu"
        writer.start(
            self.state_to_save(),
            iteration,
            SavedRunConfig(config_to_flat_dict(self.config), self.mesh.world.size),
            until_staged=on_cpu,
            best=self.trainer.progress.best_iteration if self.config.checkpoint.save_best else None,
        )
        if not self.config.checkpoint.async_save:
            ended += [] if (outcome := self.wait_for_save_outcome()) is None else [outcome]
        return ended

    def poll_save(self) -> SaveOutcome | None:
        """Advance a save in flight without waiting. Return its outcome once it has ended, else None."""
        return None if self.on_its_way is None else self._report_save(self._get_saver().poll())

    def wait_for_save_outcome(self) -> SaveOutcome | None:
        """Wait for a save in flight. Return its outcome, or None if there was none."""
        return None if self.on_its_way is None else self._report_save(self._get_saver().finish())

    def require_last_save(self) -> None:
        """Raise `CheckpointError` if `--save` is given and the newest checkpoint is not of the current iteration."""
        iteration = self.trainer.progress.iteration
        if self.config.checkpoint.save and self.last_saved != iteration:
            raise CheckpointError(
                f"the last checkpoint of this run, of iteration {iteration}, could not be saved; see above"
            )

    def resume(self) -> bool:
        """Load what `--load`, `--pretrained-checkpoint` and `--adapter` ask for; False if the run starts afresh."""
        started = time.perf_counter()
        request = decide_on_first_rank(self.mesh.world, lambda: find_requested_checkpoint(self.config))
        options = self.config.checkpoint
        adapters = next((hook for hook in self.state_hooks if isinstance(hook, AdapterState)), None)
        apart = adapters is not None and request is not None and request.path != options.pretrained_checkpoint
        if apart and options.pretrained_checkpoint:
            only = dataclasses.replace(options, load=None, ckpt_step=None, require_iteration=None)
            config = dataclasses.replace(self.config, checkpoint=only)
            self._resume_from(decide_on_first_rank(self.mesh.world, lambda: find_requested_checkpoint(config)), started)
        source = self._resume_from(request, started)
        if adapters and options.adapter and source is not None and not is_adapter_checkpoint(source):
            self._load_adapters(options.adapter, adapters)
        return source is not None

    def _resume_from(self, request: ResumeRequest | None, started: float) -> CheckpointSource | None:
        """Open and load the requested checkpoint, log notes, and return its source; None if there is no request."""
        if request is None:
            if self.config.checkpoint.load:
                self._log_info(f"no checkpoint in {self.config.checkpoint.load} yet: the run starts afresh")
            return None
        for note in request.notes:
            self._log_warning(note)
        opened = open_requested_checkpoint(request, self.config, self.mesh.world)
        if opened.refused and opened.step is not None:
            heading = f"GOING BACK TO THE CHECKPOINT OF ITERATION {opened.step.iteration}, SINCE LATER ONES ARE DAMAGED"
            self._log_warning("\n".join([heading, *opened.refused]))
        for note in opened.notes:
            self._log_info(note)
        self.load(opened, started)
        return opened.source

    def roll_back(self, why: Exception) -> None:
        """Reload this run's newest checkpoint; raises `CheckpointError` from `why` if there is none yet."""
        self.wait_for_save_outcome()
        if self.last_saved is None:
            raise CheckpointError(f"there is no checkpoint to go back to: {why}") from why
        options = dataclasses.replace(
            self.config.checkpoint,
            load=self.config.checkpoint.save,
            ckpt_step=None,
            require_iteration=None,
            finetune=False,
            load_optim=True,
            load_rng=True,
        )
        Checkpointer(self.trainer, dataclasses.replace(self.config, checkpoint=options)).resume()

    def load(self, opened: OpenedCheckpoint, started: float) -> None:
        """Load an opened checkpoint; `CheckpointError` for what does not fit comes before any tensor is changed.
        started: `time.perf_counter()` when the work on it began, for the log.
        """
        options, axis = self.config.checkpoint, self.mesh.world
        self._check_tokenizer(opened.source)
        continues = self._loads_optimizer(opened)
        if opened.step is not None:
            _require_saved_state(opened, optimizer=continues, streams=options.load_rng and not opened.weights_only)
        source = opened.source
        for hook in self.state_hooks:
            source = hook.opened(source)
        names = _non_tensor_names_to_load(opened, optimizer=continues)
        values = load_into_sharded_state(dict.fromkeys(names), source, axis)
        schedule = self._restore_schedule(values.get("run.schedule"), source)
        if continues:
            self._log_optimizer_dtype_changes(source.settings)
        slots, streams = tuple(self.trainer.optimizer.checkpoint_state()), self._random_stream_load_targets(opened)
        state = values | checkpoint_load_targets(self.trainer, source.formats, slots, optimizer=continues)
        for hook in self.state_hooks:
            state = hook.targets(source, state)
        state, replacements = resolve_missing_weights(self.trainer, state, source.formats)
        load_into_sharded_state(state | streams, source, axis, complete=("model.",), instead=replacements)
        refresh_after_load(self.trainer, slots)
        for hook in self.state_hooks:
            hook.loaded(source)
        if streams:
            self.trainer.run.streams.load({name.rpartition(".")[2]: value for name, value in streams.items()})
        self._restore_counters(values)
        self.trainer.schedule = schedule
        if values and options.save and opened.step is not None and same_folder(options.save, opened.step.folder.parent):
            self.last_saved = opened.step.iteration
        what = "weights of checkpoint" if opened.weights_only else "checkpoint"
        self._log_info(
            f"loaded {what} {source.where}: {_size_and_speed_text(opened.size, time.perf_counter() - started)}"
        )

    def _check_tokenizer(self, source: CheckpointSource) -> None:
        """Raise `CheckpointError` for a checkpoint of another tokenizer, or warn of it under --allow-other-tokenizer."""
        allowed = self.config.checkpoint.allow_other_tokenizer
        note = decide_on_first_rank(
            self.mesh.world, lambda: require_checkpoint_tokenizer(source, self._tokenizer_record, allowed=allowed)
        )
        if note:
            self._log_warning(note)

    def _loads_optimizer(self, opened: OpenedCheckpoint) -> bool:
        """Whether the optimizer state is loaded. That a checkpoint of another format has none is logged."""
        source = opened.source
        if not self.config.checkpoint.load_optim or opened.weights_only:
            return False
        if opened.step is not None or any(name.startswith("optimizer.") for name in source.formats):
            return True
        why = getattr(source, "skipped", "") or f"{source.where} has no optimizer state"
        self._log_info(f"{why}: the optimizer starts afresh")
        return False

    def adopt_weights(self, source: CheckpointSource, *, initial: tuple[str, ...], unused: tuple[str, ...]) -> None:
        """Load the weights of a network that this one is finetuned from with other heads. initial: prefixes
        (`model.<name>`) that keep their initial values; unused: prefixes of the source's that are not loaded.
        """
        started = time.perf_counter()
        self._check_tokenizer(source)
        adopted = tuple(name for name in source.formats if name.startswith("model.") and not name.startswith(unused))
        self._load_weights(source, lambda name: not name.startswith(initial), complete=adopted)
        self._log_info(f"adopted weights of {source.where} in {time.perf_counter() - started:.2f} s")

    def _load_weights(
        self, source: CheckpointSource, is_chosen: Callable[[str], bool], *, complete: tuple[str, ...]
    ) -> None:
        """Load the chosen weights, without optimizer state. complete: names or prefixes that must be requested."""
        slots = tuple(self.trainer.optimizer.checkpoint_state())
        targets = checkpoint_load_targets(self.trainer, source.formats, slots, optimizer=False)
        load_into_sharded_state(
            {name: value for name, value in targets.items() if is_chosen(name)},
            source,
            self.mesh.world,
            complete=complete,
            instead=main_weights_to_read_instead(self.trainer, source.formats),
        )
        refresh_after_load(self.trainer, slots)

    def state_to_save(self) -> Tree:
        """Return this rank's part of a checkpoint: weights, optimizer state, counters, random states."""
        options, trainer = self.config.checkpoint, self.trainer
        state = weights_of(trainer, rounded=True)
        state["run.config"] = config_to_flat_dict(self.config)
        state["run.progress"] = dataclasses.asdict(trainer.progress)
        state["run.tokenizer"] = self._tokenizer_record if self.mesh.world.is_first else None
        if options.save_optim:
            for slot, segment, tensor in trainer.optimizer.checkpoint_state():
                add_sharded_tensor(
                    state, f"optimizer.{slot}.{segment.name}", sharded_optimizer_state(segment, tensor, self.mesh)
                )
            # A rank whose share of a bucket is padding counts no steps.
            state["run.optimizer_steps"] = max(collectives.gather_objects(trainer.optimizer.num_steps, self.mesh.world))
            state["run.loss_scale"] = trainer.optimizer.scaler.state()
            state["run.schedule"] = None if trainer.schedule is None else trainer.schedule.state()
        if options.save_rng:
            state |= random_stream_states(self.trainer)
        for hook in self.state_hooks:
            state = hook.chosen(state)
        return state

    def _load_adapters(self, folder: str, state: AdapterState) -> None:
        """Load a folder's adapters; `CheckpointError` before any tensor is changed. state: knows the base loaded before."""
        from megatron.training.checkpoint.adapters import (
            open_adapters,  # reads PEFT folders, by the names of all families
        )

        adapters = open_adapters(folder, self.config.model)
        source = state.source_of(adapters)
        self._load_weights(source, source.fills, complete=("model.",))
        self._log_info(
            f"loaded adapters of {folder}: {len(adapters.pairs)} of linear layers, and {len(adapters.saved)} whole parameters; "
            f"trained on {adapters.base.get('where') or 'a base that they do not name'}"
        )

    def _random_stream_load_targets(self, opened: OpenedCheckpoint) -> Tree:
        """Return tensors to load this rank's random streams into; none (logged) if layout or device differs."""
        formats = opened.source.formats
        if opened.weights_only or not self.config.checkpoint.load_rng or opened.world_size is None:
            return {}
        now = _random_stream_layout_text(config_to_flat_dict(self.config), self.mesh.world.size)
        then = _random_stream_layout_text(opened.source.settings, opened.world_size)
        mine = random_stream_states(self.trainer)
        if now == then and all(
            name in formats and formats[name].shape == tuple(value.shape) for name, value in mine.items()
        ):
            return {name: torch.empty_like(value) for name, value in mine.items()}
        why = f"the checkpoint was written by {then}, this run is {now}" if now != then else "they are another device's"
        self._log_info(f"dropout streams start afresh from --seed: {why}")
        return {}

    def _log_optimizer_dtype_changes(self, saved: Mapping[str, Any]) -> None:
        """Log which optimizer states are converted, because their dtype flag differs from the checkpoint's."""
        mine = config_to_flat_dict(self.config)
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if name in saved and saved[name] != mine[name]:
                self._log_info(
                    f"the optimizer's state is converted: {flag_name(name)} was {saved[name]} and is {mine[name]}"
                )

    def _restore_schedule(
        self, saved: Mapping[str, Any] | None, source: CheckpointSource
    ) -> OptimizerParamSchedule | None:
        """Return the schedule to resume; flags must choose if the checkpoint's differs (`resolve_resumed_schedule`)."""
        mine, requested, train = self.trainer.schedule, self.config.schedule, self.config.train
        if mine is None or saved is None:
            return mine
        then = {name: source.settings.get(name) for name in ("train_iters", "train_samples")}
        longer = [
            f"{flag_name(name)} was {then[name]} and is {now}"
            for name in then
            if (now := getattr(train, name)) is not None and then[name] not in (None, now)
        ]
        return resolve_resumed_schedule(
            mine,
            saved,
            override=requested.override_opt_param_scheduler,
            use_checkpoint=requested.use_checkpoint_opt_param_scheduler,
            longer=" and ".join(longer),
            samples=source.values.get("run.progress", {}).get("schedule_samples", 0),
        )

    def _restore_counters(self, values: Mapping[str, Any]) -> None:
        """Set progress, optimizer steps, loss scale; without optimizer state the schedule restarts, as in Megatron."""
        continues = "run.optimizer_steps" in values
        for field in dataclasses.fields(self.trainer.progress):
            if field.name in values.get("run.progress", ()) and (continues or field.name != "schedule_samples"):
                setattr(self.trainer.progress, field.name, values["run.progress"][field.name])
        if continues:
            self.trainer.optimizer.load_num_steps(values["run.optimizer_steps"])
            if "run.loss_scale" in values:
                self.trainer.optimizer.scaler.load(values["run.loss_scale"])

    def _get_saver(self) -> CheckpointSaver:
        """Return the saver that writes into `--save`; the first call makes it."""
        options = self.config.checkpoint
        assert options.save is not None, "saves are made when --save is given"
        if self._saver is None:
            rules = SavePolicy(options.async_save, options.save_retain_interval, options.save_keep_last)
            self._saver = CheckpointSaver(
                options.save, self.mesh.world, rules=rules, device=self.mesh.device, lock=self._lock
            )
        return self._saver

    def _report_save(self, outcome: SaveOutcome | None) -> SaveOutcome | None:
        """Log the outcome of a save, record it if it succeeded, and return it; None passes through."""
        if outcome is None:
            return None
        self.on_its_way = None
        for note in outcome.notes:
            self._log_warning(note)
        if outcome.problems:
            newest = "none" if self.last_saved is None else f"that of iteration {self.last_saved}"
            heading = (
                f"THE CHECKPOINT OF ITERATION {outcome.iteration} WAS NOT SAVED; the last one of this run is {newest}"
            )
            self._log_warning("\n  ".join([heading, *outcome.problems]))
        else:
            self.last_saved = outcome.iteration
            self._export_weights(outcome)
            waited = f", while training waited {outcome.blocked:.2f} s" if self.config.checkpoint.async_save else ""
            self._log_info(
                f"saved checkpoint {outcome.folder}: {_size_and_speed_text(outcome.size, outcome.seconds)}{waited}"
            )
        for hook in self.trainer.hooks:
            hook.after_save(outcome)
        return outcome

    def _export_weights(self, outcome: SaveOutcome) -> None:
        """Export a finished save in Hugging Face format (`--export-hf`), on the first rank. Failure is a warning."""
        options = self.config.checkpoint
        if options.export_hf is None or not self.mesh.world.is_first:
            return
        # Needs all families of networks, which no other run waits for.
        from megatron.training.checkpoint.export import export_hf_with_tokenizer

        target = Path(options.export_hf) / f"iter_{outcome.iteration:07d}"
        try:
            family, tokenizer = export_hf_with_tokenizer(
                open_native_checkpoint(outcome.folder), target, like=options.export_hf_like
            )
            self._log_info(f"exported checkpoint {target}: {family.name}, {tokenizer}")
        except (CheckpointError, OSError) as error:
            self._log_warning(f"THE CHECKPOINT OF ITERATION {outcome.iteration} WAS NOT EXPORTED: {error}")

    @cached_property
    def _tokenizer_record(self) -> dict[str, Any]:
        """The fingerprint of this run's tokenizer (kind, size, hash)."""
        return tokenizer_fingerprint_fields(self.trainer.run.tokenizer)

    def _log_warning(self, text: str) -> None:
        if self.mesh.world.is_first:
            self.trainer.run.log.warning(text)


def _state_hooks_of_settings(trainer: Trainer, config: RunConfig) -> Iterator[StateHooks]:
    """Yield what a run's settings change in what is saved and loaded."""
    run, model = trainer.run, config.model
    if config.checkpoint.allow_missing_vision_projection_checkpoint:
        note = "the projector of images starts afresh (--allow-missing-vision-projection-checkpoint)"
        yield MissingWeights("model.vision_projection.", note, log=run.print_rank_0)
    if model.reward_head:  # a reward model may start from a language model
        yield UnusedWeights("model.output_layer.")
    yield AdapterState(trainer.stages, run.mesh, model) if model.adapter.has_adapters else AdaptersRefused()
    yield AmaxHistories(trainer.stages, run.mesh.device, log=run.print_rank_0)


def _require_saved_state(opened: OpenedCheckpoint, *, optimizer: bool, streams: bool) -> None:
    """Raise `CheckpointError` if a checkpoint of ours lacks the optimizer state or random streams to be loaded."""
    problems, formats = [], opened.source.formats
    if optimizer and not any(name.startswith("optimizer.") for name in formats):
        problems.append("no optimizer state (--no-save-optim); load it with --no-load-optim, or --finetune")
    if streams and not any(name.startswith("run.random.") for name in formats):
        problems.append("no dropout streams (--no-save-rng); load it with --no-load-rng, or --finetune")
    if problems:
        raise CheckpointError(f"{opened.source.where} lacks what this run wants to load", problems)


def _random_stream_layout_text(values: Mapping[str, Any], world_size: int) -> str:
    """Describe the layout that decides which rank has which random stream. values: a run's settings by field name."""
    tp, pp = values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"]
    return f"tensor {tp} x pipeline {pp} x data {world_size // (tp * pp)}"


def _size_and_speed_text(size: int, seconds: float) -> str:
    return f"{size / 1e9:.3g} GB in {seconds:.2f} s ({size / 1e9 / seconds:.2g} GB/s)"


def _non_tensor_names_to_load(opened: OpenedCheckpoint, *, optimizer: bool) -> tuple[str, ...]:
    """Return the names of the non-tensor values to load; of other formats and converted checkpoints what they have."""
    if opened.weights_only:
        return ()
    names = ("run.progress", *(("run.schedule", "run.optimizer_steps", "run.loss_scale") if optimizer else ()))
    values = opened.source.values
    complete = opened.step is not None and "run.schedule" in values
    return names if complete else tuple(name for name in names if name in values)
