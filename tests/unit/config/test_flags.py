from __future__ import annotations

import argparse
import dataclasses
import re
import typing
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pytest

from megatron.core.config.flags.declare import (
    ConfigError,
    Role,
    add_config_arguments,
    config_from_flat_dict,
    config_from_namespace,
    config_to_flat_dict,
    field_resume_roles,
    flag,
    flag_fields,
    flag_name,
    flag_spellings,
    raise_config_error_if,
)
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.config.settings.run import RequestedRun, RunConfig


@dataclass(frozen=True, slots=True)
class Part:
    """A part.

    It has a flag of its own.
    """

    inner_size: int = flag(3, "a size")


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample settings.

    One of every kind.
    """

    count: int | None = flag(None, "a number, or nothing")
    rate: float = flag(0.5, "a rate of 50%")
    quick: bool = flag(False, "a switch that is off")
    biased: bool = flag(True, "turn off what is on", off="--disable-bias")
    method: Literal["one", "two"] | None = flag(None, "a choice")
    level: Literal[0, 1, 2] = flag(0, "a choice of numbers")
    sizes: tuple[int, ...] | None = flag(None, "some numbers")
    modules: tuple[Literal["a", "b"], ...] = flag(("a",), "some choices")
    name: str | None = flag(None, "a text", also=("--called",))
    hexadecimal: int = flag(16, "a number in base 16", parse=lambda word: int(word, 16))
    part: Part = Part()
    plain: int = 7


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_config_arguments(made, Sample)
    return made


def read(*words: str) -> Sample:
    return config_from_namespace(Sample, parser().parse_args(list(words)))


CASES: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("--count 4", {"count": 4}),
    ("--rate 1e-3", {"rate": 1e-3}),
    ("--quick", {"quick": True}),
    ("--no-quick", {"quick": False}),
    ("--quick --no-quick", {"quick": False}),
    ("--disable-bias", {"biased": False}),
    ("--no-biased", {"biased": False}),
    ("--biased", {"biased": True}),
    ("--disable-bias --biased", {"biased": True}),
    ("--method two", {"method": "two"}),
    ("--level 2", {"level": 2}),
    ("--sizes 1 2 3", {"sizes": (1, 2, 3)}),
    ("--sizes", {"sizes": ()}),
    ("--modules b a", {"modules": ("b", "a")}),
    ("--name x", {"name": "x"}),
    ("--called y", {"name": "y"}),
    ("--hexadecimal ff", {"hexadecimal": 255}),
]


@pytest.mark.parametrize("line, expected", CASES, ids=[line or "nothing" for line, _ in CASES])
def test_words_become_fields(line: str, expected: dict[str, Any]) -> None:
    assert read(*line.split()) == dataclasses.replace(Sample(), **expected)


def test_a_part_gets_its_own_flags() -> None:
    assert read("--inner-size", "9").part == Part(9)


@pytest.mark.parametrize(
    "line", ["--method three", "--level 3", "--modules a c", "--count two", "--plain 3", "--rate", "--meth one"]
)
def test_words_that_do_not_fit_are_refused(line: str) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        read(*line.split())


def test_help_shows_the_spelling_that_changes_the_default_and_the_default() -> None:
    text = parser().format_help()
    assert "Sample settings" in text and "One of every kind." in text and "A part" in text
    assert "--disable-bias, --no-biased turn off what is on" in " ".join(text.split())
    assert "--no-quick" not in text and "a switch that is off" in text
    assert "a rate of 50% (default: 0.5)" in text and "(default: a)" in text and "(default: None)" not in text


def test_values_go_there_and_back() -> None:
    config = read("--sizes", "1", "2", "--quick", "--inner-size", "5")
    values = config_to_flat_dict(config)
    assert values["sizes"] == [1, 2] and values["inner_size"] == 5 and values["plain"] == 7 and "part" not in values
    assert config_from_flat_dict(Sample, values) == config
    assert config_from_flat_dict(Sample, {}) == Sample()


def test_a_value_named_like_a_part_does_not_replace_it() -> None:
    assert config_from_flat_dict(Sample, {"part": "nonsense", "inner_size": 8}).part == Part(8)


def test_spellings_of_a_field_are_all_known() -> None:
    known = {word for field, kind in flag_fields(Sample) for word in flag_spellings(field, kind)}
    assert flag_name("num_layers") == "--num-layers"
    assert {
        "--quick",
        "--no-quick",
        "--biased",
        "--no-biased",
        "--disable-bias",
        "--name",
        "--called",
        "--inner-size",
    } <= known
    assert "--plain" not in known


def test_refusals_come_together_and_once() -> None:
    raise_config_error_if([])
    with pytest.raises(ConfigError) as error:
        raise_config_error_if(["first", "second", "first"])
    assert str(error.value) == "2 settings cannot be used as given\n  first\n  second"
    with pytest.raises(ConfigError, match="1 setting cannot be used as given"):
        raise_config_error_if(["only"])


# The real configs.

FIELDS = flag_fields(RequestedRun)


def test_every_spelling_belongs_to_one_field_and_every_flag_has_help() -> None:
    owners: dict[str, list[str]] = {}
    for field, kind in FIELDS:
        for word in flag_spellings(field, kind):
            owners.setdefault(word, []).append(field.name)
        text = field.metadata["help"]
        assert len(text) > 8 and text == text.strip() and not text.endswith("."), field.name
    assert {word: fields for word, fields in owners.items() if len(fields) > 1} == {}
    assert len(FIELDS) > 150


def test_help_of_a_switch_that_is_on_speaks_of_turning_it_off() -> None:
    """A line such as `--no-save-optim  save the optimizer's state` says the opposite of what the flag does."""
    switches = [
        field
        for config in (RunConfig, InferenceConfig)
        for field, kind in flag_fields(config)
        if kind is bool and field.default
    ]
    silent = [field.name for field in switches if not re.search(r"\b(no|not|without|alone)\b", field.metadata["help"])]
    assert silent == [] and len(switches) > 20


def example(field: dataclasses.Field, kind: Any) -> tuple[list[str], Any]:
    """Words that give a field a value other than its default, and that value."""
    arguments = [a for a in typing.get_args(kind) if a is not type(None)]
    if kind is bool:
        return (
            [f"--no-{field.name.replace('_', '-')}"] if field.default else [flag_name(field.name)]
        ), not field.default
    if typing.get_origin(kind) not in (Literal, tuple) and arguments:
        return example(field, arguments[0]) if len(arguments) == 1 else pytest.fail(f"{field.name}: {kind}")
    if typing.get_origin(kind) is Literal:
        chosen = next(a for a in arguments if a != field.default)
        return [flag_name(field.name), str(chosen)], chosen
    if typing.get_origin(kind) is tuple:
        element = arguments[0]
        values = (
            tuple(typing.get_args(element))[:2]
            if typing.get_origin(element) is Literal
            else tuple(element(n) for n in (11, 12))
        )
        return [flag_name(field.name), *map(str, values)], values
    return [flag_name(field.name), "91"], kind("91")


@pytest.mark.parametrize("field, kind", FIELDS, ids=[field.name for field, _ in FIELDS])
def test_every_flag_reaches_its_field_and_only_that(field: dataclasses.Field, kind: Any) -> None:
    made = argparse.ArgumentParser(allow_abbrev=False)
    add_config_arguments(made, RequestedRun)
    words, value = example(field, kind)
    before, after = (
        config_to_flat_dict(RequestedRun()),
        config_to_flat_dict(config_from_namespace(RequestedRun, made.parse_args(words))),
    )
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {field.name}
    assert after[field.name] == (list(value) if isinstance(value, tuple) else value)


def test_every_field_of_a_run_says_what_another_value_means() -> None:
    roles = field_resume_roles(RequestedRun)
    assert {field.name for field, _ in flag_fields(RequestedRun)} < roles.keys() and len(roles) > 300
    silent = [name for name, role in roles.items() if role not in get_args(Role)]
    assert not silent, (
        f'give these a role="..." beside their help (config/flags/declare.py says which there are): {", ".join(silent)}'
    )
