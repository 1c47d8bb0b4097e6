"""Flags that have no effect: conditions name what exists, and what becomes of a run that is given one follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from megatron.core.config.flags.declare import flag, flag_text
from megatron.core.config.flags.idle import conditions_resolve, config_fields
from megatron.core.config.flags.when import When
from megatron.core.config.plan.network import value_of_run
from megatron.core.config.settings.run import RequestedRun
from megatron.core.tokenizers.build import KINDS
from tests.helpers.every_setting import RUNS, other_values, run_setup, verdict

GOVERNING = {each.setting for one in config_fields(RequestedRun).values() for each in one.conditions}
SMALL_RUNS = ("gpt", "rope", "moe", "mla", "hybrid", "images", "classes", "bert", "t5")


@pytest.mark.parametrize(
    "condition, message",
    [
        (When("num_expert"), "num_expert, which is no setting and no fact"),
        (When("kind", ("c",)), r"\['c'\], which it never is"),
        (When("architecture", ("gtp",)), r"\['gtp'\], which it never is"),
    ],
)
def test_a_condition_that_names_nothing_fails_when_its_class_is_made(condition: When, message: str) -> None:
    with pytest.raises(AssertionError, match=message):

        @conditions_resolve
        @dataclass(frozen=True)
        class Bad:
            kind: Literal["a", "b"] = flag("a", "kind")
            size: int = flag(1, "size", used_with=condition)


@pytest.mark.parametrize("label", SMALL_RUNS)
def test_the_verdict_on_each_setting_follows_from_its_declaration(label: str) -> None:
    setup = run_setup(label)
    for name, one in config_fields(RequestedRun).items():
        if "help" not in one.field.metadata or not one.conditions:
            continue
        for value in other_values(name, one.kind, setup.value(name))[:1]:
            changed: dict[str, Any] = {name: value}
            value_of = value_of_run(setup.with_values(changed).config.resolve(setup.world_size))
            failing = [] if value == one.field.default else conditions_that_fail(one.conditions, value_of)
            found, rules, notes = verdict(setup, changed)
            # Others may lose their effect by a setting that conditions name.
            expected = "refused" in failing or (name in GOVERNING and "no-effect" in rules)
            assert ("no-effect" in rules) == expected, f"{name}={value!r}: {rules}, {failing}"
            if found != "refused":
                named = any(note.startswith(f"{flag_text(one.field, value)} has no effect; ") for note in notes)
                assert named == ("noted" in failing), f"{name}={value!r}: {notes}, {failing}"


def conditions_that_fail(conditions: tuple[When, ...], value_of: Any) -> list[str]:
    """What becomes of a run by each condition that does not hold; facts of layers are asked only where layers are valid."""
    refused = [one.idle for one in conditions if one.idle == "refused" and not one.holds(value_of)]
    return refused or [one.idle for one in conditions if one.idle != "refused" and not one.holds(value_of)]


def test_tokenizers_that_conditions_name_exist() -> None:
    named = {
        value
        for one in config_fields(RequestedRun).values()
        for each in one.conditions
        if each.setting == "tokenizer_type"
        for value in each.values
    }
    assert named <= KINDS.keys()
    assert RUNS.keys() >= set(SMALL_RUNS)
