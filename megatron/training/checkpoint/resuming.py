"""What a run starts from: which checkpoint, in which format, whether it is sound, and whether it is this run's network.

    --load, else --pretrained-checkpoint, else nothing
    ours: the newest that is sound; every byte is read by all ranks together, and damage sends the run back to an older one
    others' (Hugging Face, Megatron): what the path means; weights, and more where there is more

The first rank looks, all hear the same, and all open and verify it; so no rank goes another way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from megatron.core.config.settings.run import CheckpointConfig, RunConfig
from megatron.core.dist_checkpointing import checkpoint_folders
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError, CommittedCheckpoint
from megatron.core.dist_checkpointing.load import open_first_valid
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.training.checkpoint.formats import CheckpointFormat, find_foreign_checkpoint, native_checkpoints
from megatron.training.checkpoint.resume_settings import compare_checkpoint_settings
from megatron.training.checkpoint.upcycling import UpcycledSource, is_dense_checkpoint

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """What to load: `steps`, our checkpoints in the order to try them, or `place`, one in another `checkpoint_format`.
    weights_only: `--finetune`, or a `--pretrained-checkpoint`. notes: warnings for the user.
    """

    path: str
    weights_only: bool
    steps: tuple[CommittedCheckpoint, ...] = ()
    checkpoint_format: CheckpointFormat | None = None
    place: Path | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """A checkpoint that was opened and verified. step: of our own format, else None. world_size: ranks that wrote it,
    or None. size: bytes. refused: lines about newer, damaged checkpoints; notes: about settings that differ.
    """

    source: CheckpointSource
    weights_only: bool
    step: CommittedCheckpoint | None = None
    world_size: int | None = None
    size: int = 0
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find_requested_checkpoint(config: RunConfig) -> ResumeRequest | None:
    """Find what a run loads, unopened; None for a fresh start. `CheckpointError` if what must be there is not."""
    options = config.checkpoint
    if options.load:
        request = _resume_request_for_path(options.load, options, weights_only=options.finetune, chosen=True)
        if request is not None:
            return request
    if options.pretrained_checkpoint:
        request = _resume_request_for_path(options.pretrained_checkpoint, options, weights_only=True, chosen=False)
        if request is None:
            raise CheckpointError(
                f"--pretrained-checkpoint {options.pretrained_checkpoint} holds no complete checkpoint"
            )
        return request
    if options.load is None:
        return None
    if options.exit_on_missing_checkpoint:
        raise CheckpointError(
            f"--load {options.load} holds no complete checkpoint, and --exit-on-missing-checkpoint is given"
        )
    if options.save is None or not same_folder(options.load, options.save):
        raise CheckpointError(
            f"--load {options.load} holds no complete checkpoint; leave --load out to start afresh, or make it "
            "the same folder as --save"
        )
    return None


def open_requested_checkpoint(request: ResumeRequest, config: RunConfig, axis: Axis) -> OpenedCheckpoint:
    """Open and verify the request on all ranks; `CheckpointError` on all if nothing is valid, or settings differ."""
    if request.steps:
        opened = _open_native_checkpoint(request, config, axis)
    else:
        source = _run_on_all_ranks(lambda: _open_foreign_checkpoint(request, config), axis)
        size = sum(one.num_bytes for one in source.formats.values())
        opened = OpenedCheckpoint(source, request.weights_only or "run.progress" not in source.values, size=size)
    if config.model.moe.moe_use_upcycling and is_dense_checkpoint(opened.source):
        opened = replace(opened, source=UpcycledSource(opened.source, config), weights_only=True)
    # What tensors do not tell: the checkpoint holds arguments too.
    has_arguments = {"ffn_hidden_size", "kv_channels"} <= opened.source.settings.keys()
    complete = request.checkpoint_format is None or request.checkpoint_format.complete or has_arguments
    return replace(opened, notes=_check_resumed_settings(opened, config, complete=complete))


def require_checkpoint_tokenizer(source: CheckpointSource, mine: Mapping[str, Any], *, allowed: bool) -> str:
    """Raise `CheckpointError` for weights of another tokenizer, or return a warning if `allowed`; "" if the same."""
    saved = source.values.get("run.tokenizer")
    if not isinstance(saved, Mapping) or saved.get("hash") == mine["hash"]:
        return ""
    differences = " and ".join(
        f"{one.get('kind')} of {one.get('vocab_size')} ids with hash {str(one.get('hash'))[:16]} {where}"
        for one, where in ((saved, "in the checkpoint"), (mine, "in this run"))
    )
    if allowed:
        return f"another tokenizer is accepted (--allow-other-tokenizer): {differences}"
    raise CheckpointError(
        f"{source.where} was trained with another tokenizer, whose ids mean other words: {differences}; give this run the "
        "tokenizer of the checkpoint, or --allow-other-tokenizer if its ids are known to agree"
    )


def same_folder(a: str | Path, b: str | Path) -> bool:
    """Whether two paths resolve to the same place."""
    return Path(a).resolve() == Path(b).resolve()


def decide_on_first_rank(axis: Axis, action: Callable[[], Result]) -> Result:
    """Run the action on the first rank only and broadcast its result; all ranks return it, or raise its error."""
    result, error = None, None
    if axis.is_first:
        try:
            result = action()
        except Exception as caught:  # noqa: BLE001 - the others wait for whatever it is
            error = caught
    result, error = collectives.broadcast_object((result, error), axis)
    if error is not None:
        raise error
    return result


def _resume_request_for_path(
    path: str, options: CheckpointConfig, *, weights_only: bool, chosen: bool
) -> ResumeRequest | None:
    """Return the request to load from a path, or None. chosen: --ckpt-step and --require-iteration apply to it."""
    step = options.ckpt_step if chosen else None
    foreign = find_foreign_checkpoint(path, step) if not checkpoint_folders.scan_checkpoint_folder(path).steps else None
    if foreign is not None:
        return ResumeRequest(path, weights_only, checkpoint_format=foreign[0], place=foreign[1])
    steps = native_checkpoints(path, step, required=options.require_iteration if chosen else None)
    if not steps:
        return None
    damaged = checkpoint_folders.scan_checkpoint_folder(path).damaged if step is None else ()
    newer = [text for iteration, text in damaged if iteration > steps[0].iteration]
    if newer and chosen and options.require_iteration is not None:
        raise CheckpointError(
            f"--require-iteration {options.require_iteration}: {path} has a later checkpoint, which is damaged", newer
        )
    named = checkpoint_folders.tracker_iteration(path)
    if step is None and named is not None and named != steps[0].iteration:
        newer.append(
            f"{checkpoint_folders.TRACKER} in {path} names iteration {named}, but {steps[0].iteration} was committed last and is loaded; "
            "--ckpt-step goes back"
        )
    return ResumeRequest(path, weights_only, tuple(steps), notes=tuple(newer))


def _open_native_checkpoint(request: ResumeRequest, config: RunConfig, axis: Axis) -> OpenedCheckpoint:
    """Open the first valid one of our checkpoints in the request; `CheckpointError` if none is."""
    options = config.checkpoint
    try:
        saved, refused = open_first_valid(request.steps, axis, verified=options.verify_integrity)
    except CheckpointError as error:
        message = f"{request.path} holds no sound checkpoint"
        if len(request.steps) == 1:
            message = f"{request.steps[0].folder} is damaged, and no other is to be loaded"
        raise CheckpointError(message, error.problems) from None
    step = CommittedCheckpoint(saved.folder, saved.commit)
    return OpenedCheckpoint(saved, request.weights_only, step, saved.description.world_size, saved.size, tuple(refused))


def _open_foreign_checkpoint(request: ResumeRequest, config: RunConfig) -> CheckpointSource:
    """Open the request's checkpoint of another format."""
    assert request.checkpoint_format and request.place, "a checkpoint of another format has a place"
    model = config.model
    return request.checkpoint_format.open(
        request.place, {"true_vocab_size": model.true_vocab_size, "mtp_num_layers": model.mtp.mtp_num_layers}
    )


def _run_on_all_ranks(action: Callable[[], Result], axis: Axis) -> Result:
    """Run the action on every rank and return the result; a `CheckpointError` on one is raised on all."""
    result, error = None, None
    try:
        result = action()
    except CheckpointError as caught:
        error = caught
    failures = [one for one in collectives.gather_objects(error, axis) if one is not None]
    if failures:
        raise failures[0]
    assert result is not None, "an action without an error has a result"
    return result


def _check_resumed_settings(opened: OpenedCheckpoint, config: RunConfig, *, complete: bool) -> tuple[str, ...]:
    """Raise `CheckpointError` for another network, optimizer or data; return notes about other settings that differ."""
    settings, where, options = opened.source.settings, opened.source.where, config.checkpoint
    differences = compare_checkpoint_settings(settings, config, weights_only=opened.weights_only, complete=complete)
    if differences.network:
        raise CheckpointError(
            f"{where} holds another network; --use-checkpoint-args takes its shape", differences.network
        )
    saved, mine = settings.get("optimizer"), config.optimizer.optimizer
    if not opened.weights_only and options.load_optim and saved not in (None, mine):
        raise CheckpointError(
            f"{where} holds the state of --optimizer {saved}, this run has {mine}; --no-load-optim starts it afresh"
        )
    consumed = opened.source.values.get("run.progress", {}).get("consumed_train_samples", 0)
    if differences.data and consumed and not options.allow_other_data and not config.train.skip_train:
        raise CheckpointError(
            f"{where} has trained on {consumed} samples of other data, or in another order, so that which come next "
            f"means nothing here; --allow-other-data goes on at sample {consumed} all the same, --finetune at 0",
            differences.data,
        )
    notes = [
        ("the network is another function than the checkpoint's, and learns from its weights", differences.adapted),
        ("settings that are not the checkpoint's hold from here on", (*differences.data, *differences.named)),
    ]
    return tuple("\n".join([f"{heading}:", *(f"  {line}" for line in lines)]) for heading, lines in notes if lines)
