"""What the rules accept computes the right step: random networks in random layouts, built, counted, and compared with one rank.

Every night sees others. `NIGHT=213` before pytest repeats those of the 213th day of a year.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import date
from random import Random
from typing import Any

import pytest

from megatron.cli.preflight import resolve_and_examine
from megatron.core.config.flags.declare import ConfigError, config_from_flat_dict
from megatron.core.config.settings.run import RequestedRun
from megatron.plan.simulate.collective_matching import match_collectives
from megatron.plan.simulate.dry_run import dry_run
from megatron.plan.simulate.layout_build_check import check_layout_parameters
from megatron.verify.parity.local_ranks import RankFailed
from megatron.verify.parity.proxy_config import make_proxy_config
from megatron.verify.parity.serial_comparison import compare_recorded_runs_to_serial
from megatron.verify.parity.short_run import run_short_training, run_short_training_pickled, unpickle_short_run_result
from tests.helpers import tiny
from tests.helpers.world import RankFailed as PoolFailed
from tests.helpers.world import Worlds
from tests.parity.defects import planted
from tests.parity.table import LAYOUT_WORDS, MODELS, read_layout
from tests.unit.plan.test_parameter_counts import chosen

NIGHT = int(os.environ.get("NIGHT", date.today().timetuple().tm_yday))
SLICES, EACH = 8, 15
MOST_RANKS = 8
Case = tuple[dict[str, Any], int]


def from_the_table(random: Random) -> Case:
    """Any network of the table of layouts, under words that no row may have put together."""
    model, words, ranks = random.choice(sorted(MODELS)), [], 1
    for axis, sizes in {
        "tp": (1, 1, 2, 2, 4),
        "pp": (1, 1, 2, 2, 3, 4),
        "cp": (1, 1, 1, 2, 4),
        "dp": (1, 1, 2, 2, 4),
    }.items():
        size = random.choice([size for size in sizes if ranks * size <= MOST_RANKS])
        ranks *= size
        words += [f"{axis}{size}"] * (size > 1)
    if ranks > 1 and "num_experts" in MODELS[model]:
        words += random.choice(([], ["ep2"], ["ep2"], ["ep4"])) + random.choice(([], [], ["etp1"], ["etp2"]))
    if any(word.startswith("pp") for word in words):
        words += random.choice(
            ([], [], ["vpp2"], ["vpp2"], ["first-layers1"], ["last-layers1"], ["vpp2", "group4"], ["chunk-layers1"])
        )
    words += (
        random.sample(sorted(LAYOUT_WORDS), random.randint(0, 5))
        + random.choice(([], ["mb2"]))
        + random.choice(([], ["bucket600"]))
    )
    ranks, changes = read_layout(" ".join(words))
    return {**tiny.BASE, "adam_eps": 1e-6, **MODELS[model], **changes}, ranks


def from_shapes(random: Random) -> Case:
    """A network of any shape, which is made small first."""
    return chosen(random.getrandbits(32))


def accepted(source: Callable[[Random], Case], seed: int, count: int) -> list[Case]:
    """So many configurations that keep every rule."""
    random, found = Random(seed), []
    while len(found) < count:
        values, ranks = source(random)
        if not resolve_and_examine(config_from_flat_dict(RequestedRun, values), ranks)[1]:
            found.append((values, ranks))
    return found


def wrong(world: Worlds, values: dict[str, Any], ranks: int) -> str:
    """What is not as it should be with a configuration that the rules accept, in words; "" if nothing."""
    config = config_from_flat_dict(RequestedRun, values).resolve(ranks)
    built = check_layout_parameters(config, ranks, true_vocab_size=tiny.VOCABULARY)
    if built.problems:
        return f"is built otherwise than counted: {built.problems}"
    small = make_proxy_config(config, ranks, most_ranks=MOST_RANKS)
    try:
        played = match_collectives(dry_run(small.config, small.world_size))
        if played.problems:
            return f"is said to hang: {played.text}"
    except ConfigError:
        pass  # a feature that is not run dry, which says so
    try:
        done = (
            world(small.world_size).run(run_short_training_pickled, small.config)
            if small.world_size > 1
            else [run_short_training_pickled(small.config)]
        )
    except (PoolFailed, RankFailed) as error:
        return f"does not run: {error}"
    found = compare_recorded_runs_to_serial(
        run_short_training(small.serial_config), [unpickle_short_run_result(one) for one in done]
    )
    return "" if found.is_within_tolerance else f"computes another step, {found.start}"


def report(world: Worlds, cases: list[Case]) -> str:
    """Every case with which something is wrong."""
    lines = []
    for values, ranks in cases:
        try:
            said = wrong(world, values, ranks)
        except Exception as error:  # noqa: BLE001 - the others are to be looked at too
            said = f"raises {type(error).__name__}: {error}"
        lines += [
            f"{ranks} ranks with { {name: value for name, value in values.items() if tiny.BASE.get(name) != value} }\n  {said}"
        ] * bool(said)
    return "\n".join(lines)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(SLICES))
def test_a_random_layout_of_a_network_of_the_table_computes_the_step_of_one_rank(world: Worlds, part: int) -> None:
    assert not (said := report(world, accepted(from_the_table, SLICES * NIGHT + part, EACH))), said


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(SLICES))
def test_a_network_of_any_shape_computes_the_step_of_one_rank(world: Worlds, part: int) -> None:
    assert not (said := report(world, accepted(from_shapes, SLICES * NIGHT + part, EACH))), said


def test_a_wrong_step_is_reported_with_its_configuration(world: Worlds) -> None:
    values = {**tiny.BASE, "hidden_dropout": 0.1, "recompute_granularity": "full", "recompute_method": "uniform"}
    assert report(world, [(values, 1)]) == ""
    with planted("recomputation draws other dropout"):
        said = report(world, [(values, 1)])
    assert "computes another step" in said and "'hidden_dropout': 0.1" in said, said
