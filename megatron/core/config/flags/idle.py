"""Which settings of a config have no effect, by the conditions that their flags declare (`when.py`)."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, Literal, TypeVar

from megatron.core.config.flags.declare import flag_text, resolved_type_hints
from megatron.core.config.flags.when import FACTS, When

ConfigClass = TypeVar("ConfigClass", bound=type)
ValueOf = Callable[[str], Any]  # name of a setting or a fact -> its value


@dataclass(frozen=True, slots=True)
class ConfigField:
    """A field of a config class or of one nested in it, flag or not. path: names that lead to it. conditions: without all
    of them it has no effect.
    """

    path: tuple[str, ...]
    field: dataclasses.Field
    kind: Any
    conditions: tuple[When, ...]

    def value(self, config: Any) -> Any:
        """Return its value in a config of the class."""
        return reduce(getattr, self.path, config)


@cache
def config_fields(config_class: type) -> dict[str, ConfigField]:
    """Return field name -> place and conditions of every field of a config class and of nested config classes."""
    hints, fields = resolved_type_hints(config_class), dict[str, ConfigField]()
    for field in dataclasses.fields(config_class):
        kind = hints[field.name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            nested = config_fields(kind)
            fields |= {name: dataclasses.replace(one, path=(field.name, *one.path)) for name, one in nested.items()}
        else:
            of_flag, of_class = field.metadata.get("used_with", ()), getattr(config_class, "USED_WITH", ())
            conditions = of_class if of_flag is None else of_flag
            conditions = (conditions,) if isinstance(conditions, When) else conditions
            fields[field.name] = ConfigField((field.name,), field, kind, conditions)
    return fields


@cache
def _conditional_fields(config_class: type) -> tuple[ConfigField, ...]:
    return tuple(one for one in config_fields(config_class).values() if one.conditions)


@dataclass(frozen=True, slots=True)
class IdleSetting:
    """A setting that is given and has no effect. text: as on a command line; failing: the conditions that do not hold."""

    name: str
    text: str
    failing: tuple[When, ...]

    @property
    def is_refused(self) -> bool:
        """Whether a run that is given it does not start."""
        return any(condition.idle == "refused" for condition in self.failing)

    @property
    def is_noted(self) -> bool:
        """Whether a run that is given it starts and says so."""
        return not self.is_refused and any(condition.idle == "noted" for condition in self.failing)

    def __str__(self) -> str:
        return f"{self.text} has no effect; {self.failing[0].advice()}, or leave it out"


def idle_settings(config: Any, value_of: ValueOf, *, refused_only: bool = False) -> Iterator[IdleSetting]:
    """Yield the settings of a config that are not at their defaults and have no effect. refused_only: only those with
    which a run does not start; facts that need layers are then not asked for.
    """
    config_class: type = type(config)
    for one in _conditional_fields(config_class):
        if (value := one.value(config)) == one.field.default:
            continue
        if refused_only and all(each.idle != "refused" or each.holds(value_of) for each in one.conditions):
            continue
        if failing := tuple(each for each in one.conditions if not each.holds(value_of)):
            yield IdleSetting(one.field.name, flag_text(one.field, value), failing)


def idle_names(config_class: type, value_of: ValueOf) -> frozenset[str]:
    """Return the names of all settings of a config class that have no effect, given or not."""
    fields = _conditional_fields(config_class)
    return frozenset(one.field.name for one in fields if not all(each.holds(value_of) for each in one.conditions))


def conditions_resolve(config_class: ConfigClass) -> ConfigClass:
    """Class decorator: check that each condition of the class's flags names a setting of it or a fact, and values that it can have."""
    fields = config_fields(config_class)
    for name, one in fields.items():
        for each in one.conditions:
            place = f"{name} is used with {each.setting}"
            assert each.setting in fields or each.setting in FACTS, f"{place}, which is no setting and no fact"
            ways = FACTS[each.setting].ways if each.setting in FACTS else None
            choices = ways or _choices(fields[each.setting].kind)
            unknown = [value for value in each.values if choices and value not in choices]
            assert not unknown, f"{place} {unknown}, which it never is; it is one of {list(choices)}"
    return config_class


def _choices(kind: Any) -> list[Any]:
    """Return the values that a setting of this type can have; [] if it has no fixed choices."""
    if typing.get_origin(kind) is Literal:
        return list(typing.get_args(kind))
    if kind is bool:
        return [False, True]
    parts = typing.get_args(kind)
    chosen = [one for part in parts for one in _choices(part)]
    return [*chosen, None] if chosen and type(None) in parts else chosen
