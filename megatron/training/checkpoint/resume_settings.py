"""How the settings of a run differ from those of the checkpoint that it loads, and what follows; by the roles of the fields.

    role        differs, and the run goes on from the checkpoint        only its weights are loaded (--finetune)
    network     refused: the weights are another function's             refused
    adaptable   refused                                                 named: training on adapts the network
    data        refused, but for --allow-other-data                     -
    training    named, with both values                                 -
    tokenizer   compared by its fingerprint (`demand_same_tokenizer`)   the same
    free        nothing: the numbers stay the same but for rounding     -

A setting that a network does not use (`core/config/settings/network.py`) is another one's business, and no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from megatron.core.config.flags import flag_name, from_values, roles_of, to_values
from megatron.core.config.settings.model import RequestedModel
from megatron.core.config.settings.network import network_differences, network_fields
from megatron.core.config.settings.optim import ScheduleConfig
from megatron.core.config.settings.run import RequestedRun, RunConfig

_LABELS = {"true_vocab_size": "size of the tokenizer's vocabulary", "architecture": "kind of network"}
_PATHS = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
_DURATION = ("train_iters", "train_samples")


@dataclass(frozen=True, slots=True)
class Differences:
    """Settings that differ, a line each with both values. network: weights of another function. adapted: of another function that
    these weights can learn. data: what the samples that were consumed no longer speak of. named: what changes from here on."""

    network: tuple[str, ...] = ()
    adapted: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    named: tuple[str, ...] = ()


def compare_settings(
    saved: Mapping[str, Any], config: RunConfig, *, weights_only: bool, complete: bool = True
) -> Differences:
    """Compare the settings of a checkpoint, by field name, with this run's.

    complete: of a network setting that the checkpoint lacks its default holds, as it did before there was that setting; else the
    checkpoint's format does not say it, and nothing is compared.
    """
    mine, network = to_values(config), network_fields()
    known = {"true_vocab_size": mine["true_vocab_size"]} if complete else mine
    theirs = from_values(RequestedModel, {**known, **saved}).resolve()
    other = to_values(theirs)
    differences = network_differences(theirs, config.model)
    lines = {
        role: [_difference_line(name, other[name], mine[name]) for name in differences if network[name] == role]
        for role in ("network", "adaptable")
    }
    if weights_only:
        return Differences(network=tuple(lines["network"]), adapted=tuple(lines["adaptable"]))
    data, named = _other_settings(saved, mine, config)
    return Differences(
        network=(*lines["network"], *lines["adaptable"]),
        data=tuple(_difference_line(name, saved[name], mine[name]) for name in data),
        named=tuple(_difference_line(name, saved[name], mine[name]) + _setting_remark(name, config) for name in named),
    )


def _other_settings(
    saved: Mapping[str, Any], mine: Mapping[str, Any], config: RunConfig
) -> tuple[list[str], list[str]]:
    """(settings of data that differ in meaning, settings that change from here on): names of fields that both have."""
    from_checkpoint = config.schedule.use_checkpoint_opt_param_scheduler
    unread = {*_unused_data(config), *(roles_of(ScheduleConfig) if from_checkpoint else ())}
    roles = {name: role for name, role in roles_of(RequestedRun).items() if name in saved and saved[name] != mine[name]}
    others = [
        name
        for name, role in roles.items()
        if role == "data"
        and name not in unread
        and _comparable_value(name, saved[name]) != _comparable_value(name, mine[name])
    ]
    named = [
        name
        for name, role in roles.items()
        if (role == "training" and name not in unread) or (role == "data" and name not in others)
    ]
    return others, named


def _unused_data(config: RunConfig) -> set[str]:
    """Settings of data that choose nothing here, since others say so."""
    data = config.data
    blends = any(len(paths or ()) > 1 for paths in (data.data_path, data.train_data_path)) or bool(
        data.data_args_path or data.per_split_data_args_path
    )
    unused = {
        "data_sharding": data.dataloader_type != "cyclic",
        "mid_level_dataset_surplus": not blends,
        "blend_order": not blends,
        "short_seq_prob": config.model.architecture == "gpt",
        "decoder_seq_length": config.model.architecture != "t5",
        "split": data.split is None and data.mock_data,
    }
    return {name for name, holds in unused.items() if holds}


def _comparable_value(name: str, value: Any) -> Any:
    """What a setting of data says, without what may change beside: the folder of a file, blanks."""
    if value is None:
        return "969,30,1" if name == "split" else None
    if name in _PATHS:
        return [PurePath(word).name for word in ([value] if isinstance(value, str) else value)]
    return value.replace(" ", "") if name == "split" else value


def _setting_remark(name: str, config: RunConfig) -> str:
    if name in _DURATION and not config.data.mock_data:
        return " (if that takes another number of epochs of the data, they are shuffled in another order)"
    return " (the folder)" if name in _PATHS else ""


def _difference_line(name: str, saved: Any, mine: Any) -> str:
    return f"{_LABELS.get(name) or flag_name(name)}: {_value_text(saved)} in the checkpoint, {_value_text(mine)} in this run"


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "not given"
    return " ".join(str(one) for one in value) if isinstance(value, (list, tuple)) else str(value)
