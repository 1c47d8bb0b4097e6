"""A checkpoint of Megatron's as a `Source`, whatever its format: the shards of tensor ranks, merged when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.pickles import attributes_of_inert
from megatron.core.dist_checkpointing.source import ShapeAndDtype
from megatron.core.models.parameter_names import WORD_EMBEDDING
from megatron.core.parallel.boxes import Box
from megatron.megatron_lm.checkpoint.arguments_to_settings import (
    complete_settings_by_shapes,
    megatron_argument_problems,
    run_settings_of_megatron_args,
    settings_of_megatron_args,
)
from megatron.megatron_lm.checkpoint.hybrid import LazyTensorShard
from megatron.megatron_lm.checkpoint.names import MegatronRowLayout, has_vocabulary_rows, merge_tensor_shards

_WITHOUT_STEPS = ("sgd", "lion")  # optimizers whose update is the same in every step, and that count none
_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",), "lion": ("exp_avg",)}

Shards = dict[
    str, list[LazyTensorShard]
]  # name in a saved state (`model.<parameter>`, `optimizer.<slot>.<parameter>`) -> by tensor rank


class MegatronSource:
    """An opened Megatron checkpoint: a `Source`. skipped: what of it is not read, in a sentence; empty if all is.

    run_settings: settings beside the network, for a run that resumes from it.
    """

    def __init__(
        self,
        where: str,
        shards: Mapping[str, Sequence[LazyTensorShard]],
        layout: MegatronRowLayout,
        *,
        settings: Mapping[str, Any],
        values: Mapping[str, Any],
        skipped: str,
        run_settings: Mapping[str, Any],
    ) -> None:
        self.where, self.settings, self.values = where, settings, values
        self.skipped, self.run_settings = skipped, run_settings
        self._shards, self._layout = shards, layout
        self._last: tuple[str, Tensor] | None = None
        self.formats: dict[str, ShapeAndDtype] = {}
        for name in shards:
            whole = self._unpadded_tensor(name, "meta")
            self.formats[name] = ShapeAndDtype(tuple(whole.shape), whole.dtype)

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor (any shape), in the dtype it was saved in.

        Do not write to it: it may be a view of the file.
        """
        if self._last is None or self._last[0] != name:
            self._last = (name, self._unpadded_tensor(name, "cpu"))
        return self._last[1][box.slices()]

    def _unpadded_tensor(self, name: str, device: str) -> Tensor:
        """Return the whole tensor, merged from its shards, without padding rows of the vocabulary."""
        parameter, size = parameter_of_state_name(name), self.settings.get("true_vocab_size")
        whole = merge_tensor_shards(parameter, [shard.to(device) for shard in self._shards[name]], self._layout)
        if (offset := self._layout.norm_weight_offset(parameter)) and name.startswith(("model.", "optimizer.master.")):
            whole = whole + offset
        return whole[:size] if size and has_vocabulary_rows(parameter) else whole


def make_megatron_source(
    folder: Path,
    shards: Shards,
    arguments: Mapping[str, Any],
    *,
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    skipped: str,
    version: float = 3.0,
) -> MegatronSource:
    """Return the source of what a folder holds. given: settings that override the arguments of its run.

    version: checkpoint version, for the order of rows of fused matrices. Raises `CheckpointError` if the tensors are no
    network, or contradict the settings.
    """
    if problems := megatron_argument_problems(arguments):
        raise CheckpointError(f"{folder} is of a run whose arguments are not all known here", problems)
    words = shards.get(f"model.{WORD_EMBEDDING}")
    if words is None:
        raise CheckpointError(f"{folder} holds no {WORD_EMBEDDING}; it has {', '.join(sorted(shards)[:5])}, ...")
    shapes = {
        parameter_of_state_name(name): held[0].to("meta").shape
        for name, held in shards.items()
        if name.startswith("model.")
    }
    settings = complete_settings_by_shapes(settings_of_megatron_args(arguments, given), shapes, where=str(folder))
    if "output_layer.weight" in shapes and not settings.setdefault("untie_embeddings_and_output_weights", True):
        # The last stage's copy of a tied matrix.
        shards = {name: held for name, held in shards.items() if parameter_of_state_name(name) != "output_layer.weight"}
    _require_rows_for_ids(folder, words, settings.get("true_vocab_size") or 0)
    shards, left_out = _with_counted_moments(shards, values.get("run.optimizer_steps"), str(arguments.get("optimizer")))
    return MegatronSource(
        str(folder),
        shards,
        MegatronRowLayout.from_settings(settings, version),
        settings=settings,
        values=values,
        skipped=left_out or skipped,
        run_settings=run_settings_of_megatron_args(arguments),
    )


@dataclass(frozen=True, slots=True)
class ZeroShard:
    """A moment that no step has changed yet. like: the main weight of its parameter."""

    like: LazyTensorShard

    def to(self, device: str) -> Tensor:
        """Return fp32 zeros in the shape of the main weight (any shape), on a device."""
        return torch.zeros(self.like.to("meta").shape, device=device)


def _with_counted_moments(
    shards: Mapping[str, Sequence[LazyTensorShard]], steps: int | None, optimizer: str
) -> tuple[Shards, str]:
    """Return the shards with moments of as many steps, zero before the first; or without, and why. steps: None if unknown."""
    if steps is None and any(name.startswith("optimizer.") for name in shards):
        weights = {name: [*held] for name, held in shards.items() if not name.startswith("optimizer.")}
        return (
            weights,
            "the optimizer's moments are left out: the checkpoint does not say how many steps they have seen",
        )
    return {
        **(_zero_moments(shards, optimizer) if steps == 0 else {}),
        **{name: [*held] for name, held in shards.items()},
    }, ""


def _zero_moments(shards: Mapping[str, Sequence[LazyTensorShard]], optimizer: str) -> Shards:
    """Return the moments of an optimizer before its first step, by name, for all parameters with main weights."""
    return {
        f"optimizer.{slot}.{parameter_of_state_name(name)}": [ZeroShard(one) for one in held]
        for slot in _MOMENTS.get(optimizer, ())
        for name, held in shards.items()
        if name.startswith("optimizer.master.")
    }


def _require_rows_for_ids(folder: Path, words: Sequence[LazyTensorShard], ids: int) -> None:
    """Raise `CheckpointError` if the word embedding has fewer rows than the tokenizer has ids."""
    rows = sum(shard.to("meta").shape[0] for shard in words)
    if ids > rows:
        raise CheckpointError(
            f"{folder} has {rows} rows of word embeddings, fewer than the tokenizer's {ids} ids; it is another tokenizer's"
        )


def parameter_of_state_name(name: str) -> str:
    """Return the parameter that a name in a saved state, model.<parameter> or optimizer.<slot>.<parameter>, refers to."""
    return name.split(".", 2)[2] if name.startswith("optimizer.") else name.removeprefix("model.")


def saved_training_counters(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters that a run resumes from, as far as they are known; {} without iteration or samples.

    common: what a checkpoint holds beside tensors.
    """
    arguments = attributes_of_inert(common.get("args"))
    iteration = common.get("iteration")
    samples = arguments.get("consumed_train_samples")
    if not isinstance(iteration, int) or not isinstance(samples, int):
        return {}
    skipped = arguments.get("skipped_train_samples") or 0
    scheduled = next(_values_in_state({"schedule": common.get("opt_param_scheduler")}, "num_steps"), None)
    values: dict[str, Any] = {
        "run.progress": {
            "iteration": iteration,
            "consumed_train_samples": samples,
            "skipped_train_samples": skipped,
            "consumed_valid_samples": arguments.get("consumed_valid_samples") or 0,
            # Of steps that changed the weights: without those that overflowed in fp16.
            "schedule_samples": samples - skipped if scheduled is None else int(scheduled),
            "consumed_tokens": samples * int(arguments.get("seq_length") or 0),
            "floating_point_operations": int(common.get("num_floating_point_operations_so_far") or 0),
        }
    }
    state = common.get("optimizer")
    steps = {int(step) for name in ("step", "common_step") for step in _values_in_state(state, name)}
    if not steps and (scheduled == 0 or arguments.get("optimizer") in _WITHOUT_STEPS):
        steps = {0 if scheduled == 0 else iteration}  # 0: every step has overflowed
    if len(steps) == 1:
        values["run.optimizer_steps"] = steps.pop()
    return values | _saved_loss_scale(state)


def _saved_loss_scale(state: Any) -> dict[str, Any]:
    """Return the loss scale of fp16 in an optimizer's state as `run.loss_scale`; {} if there is none, or it is constant.

    Of a chain of optimizers, Megatron's loss has the scale of the first.
    """
    for scaler in _values_in_state(state, "grad_scaler"):
        values = scaler[0] if isinstance(scaler, list) and scaler else scaler
        if isinstance(values, Mapping) and values:
            return {
                "run.loss_scale": {
                    "scale": float(values["scale"]),
                    "good_steps": int(values["growth_tracker"]),
                    "overflows_left": int(values["hysteresis_tracker"]),
                }
            }
    return {}


def _values_in_state(value: Any, name: str) -> Iterator[Any]:
    """Yield every value by a name in an optimizer's state, of groups, parameters and optimizers of a chain."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key == name:
                yield item
            elif isinstance(item, (Mapping, list, tuple)):
                yield from _values_in_state(item, name)
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, (Mapping, list)):
                yield from _values_in_state(item, name)
