"""A config field and its command-line flag are one thing.

    sequence_parallel: bool = flag(False, "between matrices, cut the sequence over the tensor ranks")

declares the field, its default, the flag `--sequence-parallel` (and `--no-sequence-parallel`) and its line of help.
`add_config_arguments` turns a dataclass into an argparse group headed by the class's docstring; `config_from_namespace` turns the
parsed namespace back into the frozen dataclass. A field without `flag` is plain data and has no option. A field whose
type is itself a config dataclass contributes its own flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeVar, Union

from megatron.core.config.flags.when import When

Config = TypeVar("Config")

# What another value of a field means for a run that goes on from a checkpoint:
#   network     another function or other shapes of parameters; weights of one are no weights of the other
#   adaptable   another function of the same parameters, to which training on can adapt a network (--finetune)
#   tokenizer   what ids mean; the tokenizer's fingerprint is compared, since files move
#   data        other samples, or another order: how many were consumed says nothing of what comes next
#   training    other numbers from here on
#   free        the same numbers but for rounding: layout, kernels, memory, paths, reports
Role = Literal["network", "adaptable", "tokenizer", "data", "training", "free"]


class ConfigError(Exception):
    """Settings that cannot be used. The message lists every broken rule and what to do."""


def raise_config_error_if(problems: Iterable[str]) -> None:
    """Raise one `ConfigError` that lists all distinct, non-empty `problems`; return if there are none."""
    distinct = list(dict.fromkeys(filter(None, problems)))
    if distinct:
        noun = "setting cannot" if len(distinct) == 1 else "settings cannot"
        raise ConfigError("\n".join([f"{len(distinct)} {noun} be used as given", *(f"  {line}" for line in distinct)]))


def flag(
    default: Any,
    help: str,
    *,
    off: str | None = None,
    also: tuple[str, ...] = (),
    parse: Callable[[str], Any] | None = None,
    metavar: str | None = None,
    role: Role | None = None,
    used_with: When | tuple[When, ...] | None = None,
) -> Any:
    """Declare a dataclass field that is also a flag. Returns the `dataclasses.field`.

    help: line of the help text; for a switch that is on by default, of the spelling that turns it off. role: what
    another value means when a run resumes from a checkpoint (`Role`); every field of a `RunConfig` has one. off: the
    spelling that turns a default-on switch off, if it is not `--no-<name>`. also: further spellings of the same flag.
    parse: converts one word of the command line; None: the type of the field.
    metavar: as in argparse. used_with: conditions without any of which the flag has no effect (`when.py`); None: those of
    its class, `USED_WITH`, if it has that; (): none.
    """
    metadata = {
        "help": help,
        "off": off,
        "also": also,
        "parse": parse,
        "metavar": metavar,
        "role": role,
        "used_with": used_with,
    }
    return dataclasses.field(default=default, metadata=metadata)


def plain_field(default: Any, *, role: Role, named: Mapping[str, Any] | None = None) -> Any:
    """Declare a dataclass field that is not a flag, with its role. Returns the `dataclasses.field`.

    named: name -> value; a flat dict holds the name of the field's value.
    """
    return dataclasses.field(default=default, metadata={"role": role, "named": named})


@cache
def field_resume_roles(config_class: type) -> Mapping[str, Role | None]:
    """Return field name -> role, of a config class and of nested config classes; None for a field without role."""
    hints = resolved_type_hints(config_class)
    roles: dict[str, Role | None] = {}
    for field in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(hints[field.name]):
            roles |= field_resume_roles(hints[field.name])
        else:
            roles[field.name] = field.metadata.get("role")
    return roles


def flag_name(name: str) -> str:
    """Return the flag of a field name: `num_layers` -> `--num-layers`."""
    return "--" + name.replace("_", "-")


def off_spelling(field: dataclasses.Field) -> str:
    """Return the spelling that turns a switch off."""
    return field.metadata["off"] or f"--no-{flag_name(field.name)[2:]}"


def flag_text(field: dataclasses.Field, value: Any) -> str:
    """Return a flag with a value as on a command line, such as "--lr 0.001", or a switch as it gets this value."""
    if isinstance(value, bool):
        return flag_name(field.name) if value else off_spelling(field)
    words = value if isinstance(value, (tuple, list)) else (value,)
    return " ".join([flag_name(field.name), *(f"{word:g}" if isinstance(word, float) else str(word) for word in words)])


def raw_flag_values(words: Sequence[str]) -> dict[str, str]:
    """The word behind each flag of a command line that is not parsed yet, or the one glued to it by =; of a flag given twice, the last."""
    given = dict(zip(words, [*words[1:], ""]))
    return given | dict(word.split("=", 1) for word in words if "=" in word)


def flag_fields(config_class: type) -> list[tuple[dataclasses.Field, Any]]:
    """Return (field, type) of every flag of a config class and of nested config classes."""
    hints = resolved_type_hints(config_class)
    fields: list[tuple[dataclasses.Field, Any]] = []
    for field in dataclasses.fields(config_class):
        kind = hints[field.name]
        if "help" in field.metadata:
            fields.append((field, kind))
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
            fields += flag_fields(kind)
    return fields


def flag_spellings(field: dataclasses.Field, kind: Any) -> list[str]:
    """Return every spelling of a flag on the command line, including --no-... of switches. kind: type of the field."""
    words = [flag_name(field.name), *field.metadata["also"]]
    if kind is bool:
        words.append("--no-" + flag_name(field.name)[2:])
        if field.metadata["off"]:
            words.append(field.metadata["off"])
    return words


def add_config_arguments(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Add a config class's flags to a parser: a help group titled by its docstring, then those of nested classes."""
    hints = resolved_type_hints(config_class)
    own = [f for f in dataclasses.fields(config_class) if "help" in f.metadata]
    if own:
        title, _, rest = " ".join((config_class.__doc__ or config_class.__name__).split()).partition(". ")
        group = parser.add_argument_group(title.rstrip("."), rest or None)
        for field in own:
            _add_argument(group, field, hints[field.name])
    for field in dataclasses.fields(config_class):
        if "help" not in field.metadata and dataclasses.is_dataclass(hints[field.name]):
            add_config_arguments(parser, hints[field.name])


def accept_values_with_dashes(parser: argparse.ArgumentParser) -> None:
    """Let values begin with a dash, such as the pattern -GG, the window -1,0 or -1e-5, once all flags are added.

    Of the words that begin with a dash and are no flags, argparse takes numbers alone for values.
    """
    parser._negative_number_matcher = _ValueMatcher(parser._option_string_actions)  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True, slots=True)
class _ValueMatcher:
    """Tells a value that begins with a dash from a misspelled flag. known: the parser's flags."""

    known: Mapping[str, Any]

    def match(self, word: str) -> bool:
        """Whether a word that begins with a dash, and is no flag, is a value: it is not written like one."""
        return f"-{word.partition('=')[0]}" not in self.known and not re.match(r"--[a-z]", word)


def _add_argument(group: Any, field: dataclasses.Field, kind: Any) -> None:
    """Add a flag to an argparse group; of a switch's two spellings only the one that changes the default is listed."""
    help_text = field.metadata["help"].replace("%", "%%")
    names = [flag_name(field.name), *field.metadata["also"]]
    if kind is bool:
        on, off = names, ["--no-" + names[0][2:]] + ([field.metadata["off"]] if field.metadata["off"] else [])
        # The spelling that changes the default carries the help; its opposite is accepted but not listed.
        changing, keeping = (off[::-1], on) if field.default else (on, off)
        for words, value, listed_help in (
            (changing, not field.default, help_text),
            (keeping, field.default, argparse.SUPPRESS),
        ):
            action = "store_true" if value else "store_false"
            group.add_argument(*words, dest=field.name, default=field.default, action=action, help=listed_help)
        return
    element, many, choices = _argparse_type_nargs_choices(kind)
    default = "" if field.default is None or field.default == () else f" (default: {_format_default(field.default)})"
    group.add_argument(
        *names,
        dest=field.name,
        default=field.default,
        type=field.metadata["parse"] or element,
        choices=choices,
        nargs="*" if many else None,
        help=help_text + default,
        metavar=field.metadata["metavar"] or (None if choices else field.name.split("_")[-1].upper()),
    )


def _format_default(value: Any) -> str:
    return " ".join(str(v) for v in value) if isinstance(value, (tuple, list)) else str(value)


def _argparse_type_nargs_choices(kind: Any) -> tuple[Callable[[str], Any], bool, list[Any] | None]:
    """Return for a flag's type: function that converts a word, whether it takes several, allowed values or None."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _argparse_type_nargs_choices(next(a for a in arguments if a is not type(None)))
    if origin is tuple:
        element, _, choices = _argparse_type_nargs_choices(arguments[0])
        return element, True, choices
    if origin is Literal:
        return type(arguments[0]), False, list(arguments)
    assert kind in (int, float, str), f"a flag's type is bool, int, float, str, Literal or a tuple of them, not {kind}"
    return kind, False, None


@cache
def resolved_type_hints(config_class: Hashable) -> dict[str, Any]:
    """Return the resolved type of each field; cached, as `get_type_hints` compiles every annotation."""
    return typing.get_type_hints(typing.cast(type, config_class))


def config_from_flat_dict(config_class: type[Config], values: Mapping[str, Any]) -> Config:
    """Build a config from a flat mapping of field names, nested configs included; missing fields keep their defaults."""
    hints = resolved_type_hints(typing.cast(Hashable, config_class))
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):  # type: ignore[arg-type]
        kind = hints[field.name]
        if isinstance(kind, type) and dataclasses.is_dataclass(
            kind
        ):  # never looked up by name: a part may share its name with a flag
            chosen[field.name] = config_from_flat_dict(kind, values)
        elif field.name in values:
            value = values[field.name]
            if named := field.metadata.get("named"):
                value = named.get(value, value)  # the value itself stays
            chosen[field.name] = tuple(value) if isinstance(value, list) else value
    return config_class(**chosen)


def config_from_namespace(config_class: type[Config], namespace: argparse.Namespace) -> Config:
    """Build a config from the namespace of an argparse parser."""
    return config_from_flat_dict(config_class, vars(namespace))


def config_to_flat_dict(config: Any) -> dict[str, Any]:
    """Return a config as a flat mapping of field names to values, tuples as lists; inverse of `config_from_flat_dict`."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            values.update(config_to_flat_dict(value))
        elif field.metadata.get("named"):
            values[field.name] = value.name
        else:
            values[field.name] = list(value) if isinstance(value, tuple) else value
    return values
