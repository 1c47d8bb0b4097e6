"""Every piece of mutable training state: what it is, where it lives in a run, and under which names it is saved.

`INVENTORY` lists what a run must save to continue as if it had never stopped; it is compared bit for bit. A place is a path of
attributes and keys from the session of `training/loop.py`, such as `trainer.optimizer.scaler.scale`. A test walks everything that
can be reached from a session before and after some steps, and fails when something has changed that is neither in this table nor
in the test's list of derived state. `tools/checkpoint/resume_check.py` compares two checkpoints item by item.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.config.adapters import is_trained_parameter
from megatron.core.config.flags import config_from_dict
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.config.settings.vision import VisionConfig
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.trust.compare.checkpoints import CheckpointEntryDifference, compare_sources
from megatron.trust.compare.contents import matches_pattern

Settings = Mapping[str, Any]
# Weights whose products may be in low precision: their stack, their layer's number, and whether it predicts tokens ahead.
_ROUNDED = re.compile(
    r"^(.*)layers\.(\d+)\.(mtp_model_layer\.)?[a-z_.]*"
    r"(?:linear_(?:qkv|gate|proj|fc[12]|q|kv|q_proj|q_up_proj|kv_up_proj)|in_proj|out_proj)\.weight$"
)
_UNTRAINED = ".expert_bias"  # ends of the names of parameters that no gradient moves
_FP32 = (
    ".A_log",
    ".D",
    ".dt_bias",
)  # of parameters that are in fp32 in every format, and so are their own main weights
_MATRICES = (".linear_", ".out_proj.", ".router.", ".eh_proj.", ".gate_weight", "lm_head.", "pooler.", "binary_head.")


@dataclass(frozen=True, slots=True)
class StateCategory:
    """A piece of training state. names: patterns of its names in a checkpoint. places: patterns of where it lives in a
    session.
    expected: (settings, number of ranks, parameter names) -> names that a checkpoint must hold.
    """

    what: str
    names: tuple[str, ...]
    places: tuple[str, ...]
    expected: Callable[[Settings, int, list[str]], list[str]]


@dataclass(frozen=True, slots=True)
class StateCategoryComparison:
    """How an item of two checkpoints compares. count: names that either holds. missing: required names that a
    checkpoint lacks.
    differences: other names that differ, or that only one holds.
    """

    item: StateCategory
    count: int
    missing: tuple[str, ...]
    differences: tuple[CheckpointEntryDifference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether both hold all of it, bitwise equal."""
        return not self.missing and not self.differences


def _slot_names_getter(
    slot: str, needed: Callable[[Settings], bool]
) -> Callable[[Settings, int, list[str]], list[str]]:
    """Return a function that gives the expected names of an optimizer slot, if the settings need it."""
    return lambda settings, ranks, parameters: [
        f"optimizer.{slot}.{name}" for name in (_trained_names(settings, parameters) if needed(settings) else ())
    ]


def _trained_names(settings: Settings, parameters: list[str]) -> list[str]:
    """Return the parameters that an optimizer updates."""
    adapter, vision = config_from_dict(AdapterConfig, settings), config_from_dict(VisionConfig, settings)
    config = replace(adapter, freeze=(*adapter.freeze, *vision.frozen_patterns))
    return [name for name in parameters if is_trained_parameter(name, config) and not name.endswith(_UNTRAINED)]


def _is_updated_by_muon(settings: Settings, name: str) -> bool:
    """Whether Muon updates a parameter of that name: a matrix of a layer, which is multiplied by and not looked up in."""
    return (
        settings["optimizer"] == "muon"
        and name.endswith("weight")
        and any(part in name for part in _MATRICES)
        and "norm" not in name
    )


def _elementwise_slot_names_getter(slot: str, *rules: str) -> Callable[[Settings, int, list[str]], list[str]]:
    """Return a function that gives the expected names of a slot of these elementwise rules, without Muon's parameters."""

    def expected_names(settings: Settings, ranks: int, parameters: list[str]) -> list[str]:
        rule = settings["muon_scalar_optimizer"] if settings["optimizer"] == "muon" else settings["optimizer"]
        rest = [name for name in parameters if not _is_updated_by_muon(settings, name)]
        return _slot_names_getter(slot, lambda settings: rule in rules)(settings, ranks, rest)

    return expected_names


def _is_factored(name: str) -> bool:
    """Whether Adafactor factors the second moments of a parameter of this name, a matrix."""
    return name.endswith("weight") and "norm" not in name


def _expected_second_moment_names(settings: Settings, ranks: int, parameters: list[str]) -> list[str]:
    """Return the expected names of elementwise second moments; Adafactor has them for vectors only."""
    if settings["optimizer"] != "adafactor":
        return _elementwise_slot_names_getter("exp_avg_sq", "adam")(settings, ranks, parameters)
    return _slot_names_getter("exp_avg_sq", lambda settings: True)(
        settings, ranks, [name for name in parameters if not _is_factored(name)]
    )


def _expected_factored_moment_names(settings: Settings, ranks: int, parameters: list[str]) -> list[str]:
    return [
        f"optimizer.exp_avg_sq_{what}.{name}"
        for what in ("row", "col")
        for name in _trained_names(settings, parameters)
        if settings["optimizer"] == "adafactor" and _is_factored(name)
    ]


def _constant_names_getter(*names: str) -> Callable[[Settings, int, list[str]], list[str]]:
    """Return a function that always expects these names."""
    return lambda settings, ranks, parameters: list(names)


def _expected_main_weight_names(settings: Settings, ranks: int, parameters: list[str]) -> list[str]:
    """Return the expected names of main weights: of parameters in half precision."""
    slot = _slot_names_getter("master", lambda settings: bool(settings["bf16"] or settings["fp16"]))
    return slot(settings, ranks, [name for name in parameters if not name.endswith(_FP32)])


def _expected_random_streams(settings: Settings, ranks: int, parameters: list[str]) -> list[str]:
    tensor, pipeline = settings["tensor_model_parallel_size"], settings["pipeline_model_parallel_size"]
    return [
        f"run.random.{p}.{t}.{d}.{stream}"
        for p in range(pipeline)
        for t in range(tensor)
        for d in range(ranks // (tensor * pipeline))
        for stream in ("default", "cut")
    ]


def _expected_amax_histories(settings: Settings, ranks: int, parameters: list[str]) -> list[str]:
    if settings.get("fp8_format") is None or settings["fp8_recipe"] != "delayed":
        return []
    matches = [match for match in map(_ROUNDED.search, parameters) if match]
    low, depth = config_from_dict(LowPrecisionConfig, settings), dict[str, int]()
    for match in matches:  # encoders and decoders count their own layers
        depth[match[1]] = max(depth.get(match[1], 0), int(match[2]) + 1)
    return [
        f"run.amax.{match.string.removesuffix('.weight')}"
        for match in matches
        if match[3] or low.is_low_precision_layer(int(match[2]), depth[match[1]])
    ]


INVENTORY = (
    StateCategory(
        "weights",
        ("model.*",),
        (
            "trainer.stages.*._parameters.*",
            "trainer.parallels.*.buckets.*.data",
            "trainer.parallels.*.buckets.*.params.*",
            "trainer.optimizer.segments.*.data",
            "trainer.optimizer.main_weights.*",
        ),
        lambda settings, ranks, parameters: [f"model.{name}" for name in parameters],
    ),
    StateCategory(
        "fp32 master weights",
        ("optimizer.master.*",),
        ("trainer.optimizer.main_weights.*", "trainer.optimizer.rules.*.states.*.slots.master.*"),
        _expected_main_weight_names,
    ),
    StateCategory(
        "first moments (Adam)",
        ("optimizer.exp_avg.*",),
        ("trainer.optimizer.rules.*.state.*.exp_avg", "trainer.optimizer.rules.*.states.*.slots.exp_avg.*"),
        _elementwise_slot_names_getter("exp_avg", "adam", "lion"),
    ),
    StateCategory(
        "second moments (Adam)",
        ("optimizer.exp_avg_sq.*",),
        (
            "trainer.optimizer.rules.*.state.*.exp_avg_sq",
            "trainer.optimizer.rules.*.states.*.slots.exp_avg_sq.*",
            "trainer.optimizer.rules.*.parameters.*.owned.second.*",
        ),
        _expected_second_moment_names,
    ),
    StateCategory(
        "second moments by row and column (Adafactor)",
        ("optimizer.exp_avg_sq_row.*", "optimizer.exp_avg_sq_col.*"),
        ("trainer.optimizer.rules.*.parameters.*.owned.second.*",),
        _expected_factored_moment_names,
    ),
    StateCategory(
        "momentum (SGD)",
        ("optimizer.momentum_buffer.*",),
        ("trainer.optimizer.rules.*.state.*.momentum_buffer",),
        _slot_names_getter("momentum_buffer", lambda settings: settings["optimizer"] == "sgd"),
    ),
    StateCategory(
        "momentum (Muon)",
        ("optimizer.momentum_buffer.*",),
        ("trainer.optimizer.rules.*.owned_parts.*.momentum",),
        lambda settings, ranks, parameters: [
            f"optimizer.momentum_buffer.{name}"
            for name in _trained_names(settings, parameters)
            if _is_updated_by_muon(settings, name)
        ],
    ),
    StateCategory(
        "updates done",
        ("run.optimizer_steps",),
        ("trainer.optimizer.rules.*.counts.*", "trainer.optimizer.rules.*.steps"),
        _constant_names_getter("run.optimizer_steps"),
    ),
    StateCategory(
        "loss scale", ("run.loss_scale",), ("trainer.optimizer.scaler.*",), _constant_names_getter("run.loss_scale")
    ),
    StateCategory(
        "schedule of learning rate and weight decay",
        ("run.schedule",),
        ("trainer.schedule.*",),
        _constant_names_getter("run.schedule"),
    ),
    StateCategory(
        "counters and position in the data",
        ("run.progress",),
        ("trainer.run.progress.*",),
        _constant_names_getter("run.progress"),
    ),
    StateCategory(
        "random streams", ("run.random.*",), ("trainer.run.streams.*", "randomness.torch"), _expected_random_streams
    ),
    StateCategory(
        "histories of delayed scales",
        ("run.amax.*",),
        ("trainer.stages.*.scaling.history", "trainer.stages.*.scaling.knows_steps"),
        _expected_amax_histories,
    ),
    StateCategory(
        "tokenizer", ("run.tokenizer",), ("trainer.run.tokenizer.*",), _constant_names_getter("run.tokenizer")
    ),
)


def missing_state_names(
    item: StateCategory, source: CheckpointSource, *, world_size: int, parameters: list[str]
) -> list[str]:
    """Return the names of an item that a checkpoint should hold and does not. parameters: names of the network's
    parameters.
    """
    held = {*source.formats, *source.values}
    return [name for name in item.expected(source.settings, world_size, parameters) if name not in held]


def parameter_names_in_checkpoints(*sources: CheckpointSource) -> list[str]:
    """Return the names of the network's parameters: every name that any of the checkpoints has a weight or an optimizer
    slot for.
    """
    parameters: dict[str, None] = {}
    for name in (name for source in sources for name in source.formats):
        if name.startswith("model."):
            parameters[name.removeprefix("model.")] = None
        elif name.startswith("optimizer."):
            parameters[name.split(".", 2)[2]] = None
    return list(parameters)


def compare_training_states(
    a: CheckpointSource, b: CheckpointSource, *, world_size: int
) -> Iterator[StateCategoryComparison]:
    """Yield the comparison of each state item of two checkpoints that should be equal: both of one run, of `world_size`
    ranks.
    """
    parameters = parameter_names_in_checkpoints(a, b)
    for item in INVENTORY:
        lacking = {
            one.where: missing_state_names(item, one, world_size=world_size, parameters=parameters) for one in (a, b)
        }
        names = [name for name in {*a.formats, *b.formats, *a.values, *b.values} if matches_pattern(name, item.names)]
        keys = {name for lines in lacking.values() for name in lines}
        yield StateCategoryComparison(
            item,
            len(names),
            tuple(f"{name} in {where}" for where, lines in lacking.items() for name in lines),
            tuple(one for one in compare_sources(a, b, patterns=item.names) if one.name not in keys),
        )
