"""What a user gave to a run, and whether it keeps the rules: what is planned, searched and compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

from megatron.cli.preflight import fit_elastic_layout, preflight, resolve_and_examine
from megatron.core.config.settings.data import DataFiles
from megatron.core.config.settings.run import RequestedRun, RunConfig
from megatron.training.checked_run import CheckedRun

WORLD = "world_size"  # no flag of ours, but a number that the launcher is given


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A broken rule, and one line of its message."""

    rule: str
    says: str


@dataclass(frozen=True, slots=True)
class RunSetup:
    """What a user gave: a config that is not resolved, and the number of ranks.
    whole: check all that a run checks before it starts, not only rules between settings; device: type of device there;
    files: whether missing files are problems; reads_data: how its script reads the data that the flags name; passes:
    forward passes without gradients over the samples of a step before training on them; origins: setting -> where its
    value came from.
    """

    config: RequestedRun
    world_size: int
    whole: bool = False
    device: str = ""
    files: bool = False
    reads_data: DataFiles = "datasets"
    passes: int = 0
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def value(self, name: str) -> Any:
        """Return the value of a flag, by field name."""
        return self.world_size if name == WORLD else reduce(getattr, places_of_settings()[name][0], self.config)

    def with_values(self, values: Mapping[str, Any]) -> RunSetup:
        """Return the setup with other values of some flags."""
        config, places = self.config, places_of_settings()
        for name in values.keys() - {WORLD}:
            config = _replace_nested_field(config, places[name][0], values[name])
        return dataclasses.replace(self, config=config, world_size=values.get(WORLD, self.world_size))

    def with_elastic_layout(self) -> RunSetup:
        """Return the setup in the layout and on the ranks that --elastic chooses; unchanged without --elastic."""
        config, ranks = fit_elastic_layout(self.config, self.world_size)
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, elastic=False))
        return dataclasses.replace(self, config=config, world_size=ranks)

    def resolve_elastic_layout(self) -> tuple[RunSetup, RunConfig]:
        """Return the setup in the layout that --elastic chooses, and its resolved config. It keeps the rules."""
        setting = self.with_elastic_layout()
        return setting, resolve_and_examine(setting.config, setting.world_size)[0]

    def run_preflight_checks(self) -> CheckedRun:
        """Return the result of the checks that a run makes before it starts."""
        return preflight(
            self.config,
            self.world_size,
            device=self.device,
            files=self.files,
            reads_data=self.reads_data,
            origins=self.origins,
        )

    def find_broken_rules(self) -> tuple[BrokenRule, ...]:
        """Return every rule that is broken, one for each line of its message."""
        if self.world_size < 1:
            return (BrokenRule("world-size", f"{self.world_size} ranks: there must be at least 1"),)
        problems = (
            self.run_preflight_checks().problems if self.whole else resolve_and_examine(self.config, self.world_size)[1]
        )
        return tuple(BrokenRule(rule, line.strip()) for rule, message in problems for line in message.splitlines())


@cache
def places_of_settings() -> dict[str, tuple[tuple[str, ...], type]]:
    """Return field -> (path of names to it in a `RequestedRun`, its config class)."""
    return {path[-1]: (path, owner) for path, owner in _config_field_paths(RequestedRun())}


def _replace_nested_field(config: Any, path: tuple[str, ...], value: Any) -> Any:
    """Return the nested config with another value at a path of names."""
    new = value if len(path) == 1 else _replace_nested_field(getattr(config, path[0]), path[1:], value)
    return dataclasses.replace(config, **{path[0]: new})


def _config_field_paths(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type]]:
    """Yield (path, config class) of every field of a config and of all configs nested in it."""
    for one in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, one.name)):
            yield from _config_field_paths(value, (*path, one.name))
        else:
            yield (*path, one.name), type(config)
