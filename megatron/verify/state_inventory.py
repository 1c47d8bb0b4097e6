"""Every piece of mutable training state: what it is, where it lives in a run, and under which names it is saved.

`INVENTORY` lists what a run must save to continue as if it had never stopped; it is compared bit for bit. A place is a path of
attributes and keys from the session of `training/loop.py`, such as `trainer.optimizer.scaler.scale`. A test walks everything that
can be reached from a session before and after some steps, and fails when something has changed that is neither in this table nor
in the test's list of derived state. `megatron checkpoint resume-check` compares two checkpoints item by item. What an optimizer
must hold, its update rule says (`UpdateRule.slots`). A name of no item is refused: nobody would notice if it were not saved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.config.adapters import is_trained_parameter
from megatron.core.config.flags.declare import config_from_flat_dict
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.config.settings.vision import VisionConfig
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.dist_checkpointing.state_hooks import OPTIONAL, UNTRAINED
from megatron.core.optimizer.optimizer import UPDATE_RULES
from megatron.verify.compare.checkpoints import CheckpointEntryDifference, compare_sources
from megatron.verify.compare.contents import matches_pattern

Settings = Mapping[str, Any]
SETTINGS, OTHER_STATE = "run.config", "state of no known kind"
# Weights whose products may be in low precision: their stack, their layer's number, and whether it predicts tokens ahead.
_ROUNDED = re.compile(
    r"^(.*)layers\.(\d+)\.(mtp_model_layer\.)?[a-z_.]*"
    r"(?:linear_(?:qkv|gate|proj|fc[12]|q|kv|q_proj|q_up_proj|kv_up_proj)|in_proj|out_proj)\.weight$"
)
_UNTRAINED = ".expert_bias"  # ends of the names of parameters that no gradient moves
_FP32 = (".A_log", ".D", ".dt_bias")  # of those that are in fp32 in every format, and so are their own main weights
# Parts of the names of what rules for whole matrices update: matrices of a layer, which are multiplied by and not looked up in.
_MATRICES = (".linear_", ".out_proj.", ".router.", ".eh_proj.", ".gate_weight", "lm_head.", "pooler.", "binary_head.")


@dataclass(frozen=True, slots=True)
class StateCategory:
    """A piece of training state. names, places: patterns of its names in a checkpoint, and of where it lives."""

    what: str
    names: tuple[str, ...]
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StateCategoryComparison:
    """How an item of two checkpoints compares. count: names that either holds. missing: required names that a
    checkpoint lacks. differences: other names that differ, or that only one holds. unknown: names of no category.
    """

    item: StateCategory
    count: int
    missing: tuple[str, ...]
    differences: tuple[CheckpointEntryDifference, ...]
    unknown: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether both hold all of it, bitwise equal."""
        return not self.missing and not self.differences and not self.unknown


_INVENTORY = (
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
    ),
    StateCategory(
        "fp32 master weights",
        ("optimizer.master.*",),
        ("trainer.optimizer.main_weights.*", "trainer.optimizer.rules.*.states.*.slots.master.*"),
    ),
    StateCategory(
        "first moments (Adam)",
        ("optimizer.exp_avg.*",),
        ("trainer.optimizer.rules.*.state.*.exp_avg", "trainer.optimizer.rules.*.states.*.slots.exp_avg.*"),
    ),
    StateCategory(
        "second moments (Adam)",
        ("optimizer.exp_avg_sq.*",),
        (
            "trainer.optimizer.rules.*.state.*.exp_avg_sq",
            "trainer.optimizer.rules.*.states.*.slots.exp_avg_sq.*",
            "trainer.optimizer.rules.*.parameters.*.owned.second.*",
        ),
    ),
    StateCategory(
        "second moments by row and column (Adafactor)",
        ("optimizer.exp_avg_sq_row.*", "optimizer.exp_avg_sq_col.*"),
        ("trainer.optimizer.rules.*.parameters.*.owned.second.*",),
    ),
    StateCategory(
        "momentum (SGD, Muon)", ("optimizer.momentum_buffer.*",), ("trainer.optimizer.rules.*.state.*.momentum_buffer",)
    ),
    StateCategory(
        "updates done",
        ("run.optimizer_steps",),
        ("trainer.optimizer.rules.*.counts.*", "trainer.optimizer.rules.*.steps"),
    ),
    StateCategory("loss scale", ("run.loss_scale",), ("trainer.optimizer.scaler.*",)),
    StateCategory("schedule of learning rate and weight decay", ("run.schedule",), ("trainer.schedule.*",)),
    StateCategory("counters and position in the data", ("run.progress",), ("trainer.run.progress.*",)),
    StateCategory("random streams", ("run.random.*",), ("trainer.run.streams.*", "randomness.torch")),
    StateCategory(
        "histories of delayed scales",
        ("run.amax.*",),
        ("trainer.stages.*.scaling.history", "trainer.stages.*.scaling.knows_steps"),
    ),
    StateCategory("tokenizer", ("run.tokenizer",), ("trainer.run.tokenizer.*",)),
    StateCategory("what the weights lack: a base, optional ones", ("run.base", OPTIONAL), ()),
    StateCategory("state of a script's own hooks", ("run.hooks.*", UNTRAINED), ()),
)


def with_other_slots(items: tuple[StateCategory, ...]) -> tuple[StateCategory, ...]:
    """Return the items, and one for each slot of an update rule that none of them has: an optimizer that was added."""
    named = [name for item in items for name in item.names]
    others = {
        slot: rule
        for rule, kind in UPDATE_RULES.items()
        for slot in (*kind.slots, *(kind.matrix_slots or ()))
        if f"optimizer.{slot}.*" not in named
    }
    return items + tuple(
        StateCategory(f"{slot} ({rule})", (f"optimizer.{slot}.*",), (f"trainer.optimizer.rules.*.state.*.{slot}",))
        for slot, rule in others.items()
    )


INVENTORY = with_other_slots(_INVENTORY)
_UNCHANGING = {
    one.what: list(one.names) for one in INVENTORY if one.places and not any("*" in name for name in one.names)
}


def expected_state_names(
    settings: Settings, world_size: int, parameters: list[str], *, untrained: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Return category -> names that a checkpoint must hold. parameters: names of the network's parameters. untrained:
    patterns of those that a script's own hook says it froze.
    """
    trained = _trained_names(settings, parameters)
    if untrained:
        trained = [name for name in trained if not matches_pattern(name, untrained)]
    slots = [*_expected_slots(settings, trained)]
    return {
        **{item.what: [name for name in slots if matches_pattern(name, item.names)] for item in INVENTORY},
        **_UNCHANGING,
        "weights": [f"model.{name}" for name in parameters],
        "random streams": _expected_random_streams(settings, world_size),
        "histories of delayed scales": _expected_amax_histories(settings, parameters),
    }


def _expected_slots(settings: Settings, trained: list[str]) -> Iterator[str]:
    """Yield the names of an optimizer's state, by what its update rules say. trained: the parameters that it updates."""
    config = config_from_flat_dict(OptimizerConfig, settings)
    of_matrices, of_others = (UPDATE_RULES[config.update_rules[at]] for at in (0, -1))
    for name in trained:
        if (settings["bf16"] or settings["fp16"]) and not name.endswith(_FP32):
            yield f"optimizer.master.{name}"
        is_matrix = name.endswith("weight") and "norm" not in name
        rule = of_matrices if is_matrix and any(part in name for part in _MATRICES) else of_others
        slots = rule.slots if rule.matrix_slots is None or not is_matrix else rule.matrix_slots
        yield from (f"optimizer.{slot}.{name}" for slot in slots)


def _trained_names(settings: Settings, parameters: list[str]) -> list[str]:
    """Return the parameters that an optimizer updates."""
    adapter, vision = config_from_flat_dict(AdapterConfig, settings), config_from_flat_dict(VisionConfig, settings)
    config = replace(adapter, freeze=(*adapter.freeze, *vision.frozen_patterns))
    return [name for name in parameters if is_trained_parameter(name, config) and not name.endswith(_UNTRAINED)]


def _expected_random_streams(settings: Settings, world_size: int) -> list[str]:
    tensor, pipeline = settings["tensor_model_parallel_size"], settings["pipeline_model_parallel_size"]
    return [
        f"run.random.{p}.{t}.{d}.{stream}"
        for p in range(pipeline)
        for t in range(tensor)
        for d in range(world_size // (tensor * pipeline))
        for stream in ("default", "cut")
    ]


def _expected_amax_histories(settings: Settings, parameters: list[str]) -> list[str]:
    if settings.get("fp8_format") is None or settings["fp8_recipe"] != "delayed":
        return []
    matches = [match for match in map(_ROUNDED.search, parameters) if match]
    low, depth = config_from_flat_dict(LowPrecisionConfig, settings), dict[str, int]()
    for match in matches:  # encoders and decoders count their own layers
        depth[match[1]] = max(depth.get(match[1], 0), int(match[2]) + 1)
    return [
        f"run.amax.{match.string.removesuffix('.weight')}"
        for match in matches
        if match[3] or low.is_low_precision_layer(int(match[2]), depth[match[1]])
    ]


KNOWN_NAMES = (SETTINGS, *(name for item in INVENTORY for name in item.names))


def all_checkpoint_parameter_names(*sources: CheckpointSource) -> list[str]:
    """Return the names of all parameters that any of the checkpoints has a weight or an optimizer slot for."""
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
    """Yield how each category of two checkpoints of one run, of `world_size` ranks, compares; all should be equal. Last
    come the names that no category knows.
    """
    parameters = all_checkpoint_parameter_names(a, b)
    expected = {
        one.where: expected_state_names(one.settings, world_size, parameters, untrained=one.values.get(UNTRAINED, ()))
        for one in (a, b)
    }
    held = {one.where: {*one.formats, *one.values} for one in (a, b)}
    everything = sorted(set().union(*held.values()))
    for item in INVENTORY:
        lacking = [
            (name, where) for where, names in expected.items() for name in names[item.what] if name not in held[where]
        ]
        keys = {name for name, _ in lacking}
        yield StateCategoryComparison(
            item,
            sum(matches_pattern(name, item.names) for name in everything),
            tuple(f"{name} in {where}" for name, where in lacking),
            tuple(one for one in compare_sources(a, b, patterns=item.names) if one.name not in keys),
        )
    unknown = tuple(name for name in everything if not matches_pattern(name, KNOWN_NAMES))
    yield StateCategoryComparison(StateCategory(OTHER_STATE, (), ()), len(unknown), (), (), unknown)
