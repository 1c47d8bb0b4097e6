"""How the settings of a run differ from those of the checkpoint that it loads, and what follows; by the roles of the fields.

    role        differs, and the run goes on from the checkpoint        only its weights are loaded (--finetune)
    network     refused: the weights are another function's             refused
    adaptable   refused                                                 named: training on adapts the network
    data        refused, but for --allow-other-data                     -
    training    named, with both values                                 -
    tokenizer   compared by its fingerprint (`require_checkpoint_tokenizer`)   the same
    free        nothing: the numbers stay the same but for rounding     -

A setting that a network does not use (`core/config/plan/network.py`) is another one's business, and no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from megatron.core.config.flags.declare import config_from_flat_dict, config_to_flat_dict, field_resume_roles, flag_name
from megatron.core.config.plan.network import network_fields, network_setting_differences
from megatron.core.config.settings.model import RequestedModel
from megatron.core.config.settings.optim import ScheduleConfig
from megatron.core.config.settings.run import RequestedRun, RunConfig

_LABELS = {"true_vocab_size": "size of the tokenizer's vocabulary", "architecture": "kind of network"}
_PATHS = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
_DURATION = ("train_iters", "train_samples")


@dataclass(frozen=True, slots=True)
class SettingDifferences:
    """Settings that differ between checkpoint and run, a line each with both values. network: it computes another
    function; adapted: so, but training can go on. data: consumed samples mean others. named: allowed, to be told.
    """

    network: tuple[str, ...] = ()
    adapted: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    named: tuple[str, ...] = ()


def compare_checkpoint_settings(
    saved: Mapping[str, Any], config: RunConfig, *, weights_only: bool, complete: bool = True
) -> SettingDifferences:
    """Compare a checkpoint's settings, by field name, with this run's. weights_only: only the network counts. complete:
    a network setting that the checkpoint lacks has its default; else it is not compared.
    """
    mine, network = config_to_flat_dict(config), network_fields()
    known = {"true_vocab_size": mine["true_vocab_size"]} if complete else mine
    theirs = config_from_flat_dict(RequestedModel, {**known, **saved}).resolve()
    other = config_to_flat_dict(theirs)
    if weights_only and not theirs.adapter.has_adapters:  # new adapters add nothing to what a base computes
        theirs = replace(theirs, adapter=config.model.adapter)
    differences = network_setting_differences(theirs, config.model)
    lines = {
        role: [_setting_difference_line(name, other[name], mine[name]) for name in differences if network[name] == role]
        for role in ("network", "adaptable")
    }
    if weights_only:
        return SettingDifferences(network=tuple(lines["network"]), adapted=tuple(lines["adaptable"]))
    data, named = _changed_data_and_training(saved, mine, config)
    return SettingDifferences(
        network=(*lines["network"], *lines["adaptable"]),
        data=tuple(_setting_difference_line(name, saved[name], mine[name]) for name in data),
        named=tuple(
            _setting_difference_line(name, saved[name], mine[name]) + _setting_difference_remark(name, config)
            for name in named
        ),
    )


def _changed_data_and_training(
    saved: Mapping[str, Any], mine: Mapping[str, Any], config: RunConfig
) -> tuple[list[str], list[str]]:
    """Return names of (data settings whose meaning differs, other data and training settings that differ)."""
    from_checkpoint = config.schedule.use_checkpoint_opt_param_scheduler
    unread = {*_unused_data_settings(config), *(field_resume_roles(ScheduleConfig) if from_checkpoint else ())}
    others, named = [], []
    for name, role in field_resume_roles(RequestedRun).items():
        if name not in saved or saved[name] == mine[name] or role not in ("data", "training"):
            continue
        same_meaning = _comparable_value(name, saved[name]) == _comparable_value(name, mine[name])
        if role == "data" and name not in unread and not same_meaning:
            others.append(name)
        elif role == "data" or name not in unread:
            named.append(name)
    return others, named


def _unused_data_settings(config: RunConfig) -> set[str]:
    """Return the names of data settings that have no effect in this config."""
    data = config.data
    blends = any(len(paths or ()) > 1 for paths in (data.data_path, data.train_data_path)) or bool(
        data.data_args_path or data.per_split_data_args_path
    )
    unused = {
        "data_sharding": data.dataloader_type != "cyclic",
        "mid_level_dataset_surplus": not blends,
        "blend_order": not blends,
        "short_seq_prob": config.model.architecture.is_decoder_only,
        "decoder_seq_length": not config.model.architecture.is_encoder_decoder,
        "split": data.split is None and data.mock_data,
    }
    return {name for name, holds in unused.items() if holds}


def _comparable_value(name: str, value: Any) -> Any:
    """Return a data setting normalized for comparison: file names without folders, a split without blanks."""
    if value is None:
        return "969,30,1" if name == "split" else None
    if name in _PATHS:
        return [PurePath(word).name for word in ([value] if isinstance(value, str) else value)]
    return value.replace(" ", "") if name == "split" else value


def _setting_difference_remark(name: str, config: RunConfig) -> str:
    """Return a remark to append to a setting's difference line, or an empty string."""
    if name in _DURATION and not config.data.mock_data:
        return " (if that takes another number of epochs of the data, they are shuffled in another order)"
    return " (the folder)" if name in _PATHS else ""


def _setting_difference_line(name: str, saved: Any, mine: Any) -> str:
    return f"{_LABELS.get(name) or flag_name(name)}: {_setting_value_text(saved)} in the checkpoint, {_setting_value_text(mine)} in this run"


def _setting_value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "not given"
    return " ".join(str(one) for one in value) if isinstance(value, (list, tuple)) else str(value)
