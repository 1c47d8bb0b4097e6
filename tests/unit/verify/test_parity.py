"""The comparison agrees where a layout is right, and says where it begins to be wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from megatron.core.config.adapters import is_trained_parameter
from megatron.core.dist_checkpointing.sharded_state import ShardedTensor
from megatron.core.parallel.boxes import Box
from megatron.verify.parity.local_ranks import RankFailed, run_on_local_ranks
from megatron.verify.parity.proxy_config import ProxyConfig, make_proxy_config
from megatron.verify.parity.serial_comparison import LayoutParityResult, compare_recorded_runs_to_serial
from megatron.verify.parity.short_run import (
    RecordedActivation,
    ShortRun,
    ShortRunStep,
    run_short_training,
    run_short_training_pickled,
    unpickle_short_run_result,
)
from tests.helpers import tiny
from tests.helpers.world import Worlds
from tests.parity.defects import planted
from tests.parity.table import MODELS, ROWS, named, read_layout

GOOD = (
    ("tp2 sp pp2 mb2", "qk-norm"),
    ("pp2 vpp2 mb2", "windows"),
    ("dp2 zero overlap-reduce overlap-gather bucket600", "sinks-mqa"),
    ("tp2 sp ep2 dp2 alltoall", "moe-shared"),
    ("cp2 tp2 sp mb4", "mla-q"),
    ("tp2 sp mb2", "bert"),
    ("pp2 vpp3", "t5-v1.0"),
)
# What is planted, in which layout: where it begins, and in which module.
WRONG = (
    ("ids of another rank are embedded too", ("tp2", "gpt"), "forward", "embedding.word_embeddings"),
    ("a stage skips a layer", ("pp2", "gpt"), "forward", "decoder.final_layernorm"),
    ("positions begin at zero on every rank", ("cp2", "gpt"), "forward", "embedding.position_embeddings"),
    ("late chunks do not look at other ranks' keys", ("cp2", "gpt"), "forward", "decoder.layers.0.self_attention"),
    ("rows come back one off", ("tp2 etp1 ep2", "moe"), "forward", "decoder.layers.0.mlp"),
    (
        "norm gradients are not summed under sequence parallelism",
        ("tp2 sp", "gpt"),
        "backward",
        "decoder.final_layernorm",
    ),
    (
        "gradients of key/value head copies are not summed",
        ("tp4 mb4", "mqa"),
        "backward",
        "decoder.layers.1.self_attention.linear_qkv",
    ),
    ("the norm counts the tied matrix on both stages", ("pp2", "gpt"), "norm", ""),
    ("gradients are clipped by each rank's own norm", ("tp2", "gpt"), "update", ""),
    (
        "a row layer adds its bias on every rank before the sum",
        ("tp2", "gpt"),
        "forward",
        "decoder.layers.0.self_attention.linear_proj",
    ),
    ("one rank's new parameters never arrive", ("dp2 zero", "sgd"), "forward", "embedding.word_embeddings"),
)


@cache
def small(layout: str, model: str) -> ProxyConfig:
    """A row of the table, made small."""
    ranks, changes = read_layout(layout)
    return make_proxy_config(tiny.config(ranks, **{**MODELS[model], **changes}), ranks)


def checked(
    world: Worlds, layout: str, model: str, function: Any = run_short_training_pickled, *arguments: Any
) -> LayoutParityResult:
    """What is said of a row of the table. function: what ranks run."""
    one = small(layout, model)
    ranks = (
        world(one.world_size).run(function, *arguments, one.config)
        if one.world_size > 1
        else [function(*arguments, one.config)]
    )
    return compare_recorded_runs_to_serial(
        run_short_training(one.serial_config), [unpickle_short_run_result(rank) for rank in ranks]
    )


def rehearse_planted(name: str, config: Any) -> bytes:
    """On every rank: rehearse with a mistake."""
    with planted(name):
        return run_short_training_pickled(config)


def agrees(world: Worlds, layout: str, model: str) -> None:
    """A good row is said to be good, and enough of it was looked at."""
    found = checked(world, layout, model)
    assert found.is_within_tolerance and found.start is None, (
        found.start,
        [str(one) for one in found.differences_above_tolerance],
    )
    names = {kind: [one.name for one in found.checked if one.kind == kind] for kind in ("norm", "gradient", "weight")}
    assert len(names["norm"]) == 2 and len(names["weight"]) > 10 and names["gradient"]
    adapter = small(layout, model).config.model.adapter
    assert all(
        name.endswith("router.expert_bias") or not is_trained_parameter(name, adapter)
        for name in {*names["weight"]} ^ {*names["gradient"]}
    ), "only what follows the load or is frozen has no gradient"
    assert found.compared > 100 or "hybrid" in layout, "hardly any activation was compared"


@pytest.mark.parametrize("layout, model", GOOD, ids=[named(*row) for row in GOOD])
def test_a_good_layout_computes_the_same_step(world: Worlds, layout: str, model: str) -> None:
    agrees(world, layout, model)


@pytest.mark.nightly
@pytest.mark.parametrize("layout, model", [row for row in ROWS if row not in GOOD], ids=lambda word: word)
def test_every_row_of_the_table_computes_the_same_step(world: Worlds, layout: str, model: str) -> None:
    agrees(world, layout, model)


@pytest.mark.parametrize("name, row, during, module", WRONG, ids=[name for name, *_ in WRONG])
def test_a_planted_mistake_is_found_where_it_was_made(
    world: Worlds, name: str, row: tuple[str, str], during: str, module: str
) -> None:
    found = checked(world, *row, rehearse_planted, name)
    assert not found.is_within_tolerance and found.start is not None
    assert (found.start.during, found.start.module) == (during, module), found.start


def test_what_came_before_the_first_difference_is_told(world: Worlds) -> None:
    says = checked(world, "pp2", "gpt", rehearse_planted, "a stage skips a layer").start.says
    assert (
        "which a message brings from stage 0 to stage 1" in says
        and "the output of decoder.layers.0, just before it, agrees" in says
    )
    says = checked(world, "cp2", "gpt", rehearse_planted, "late chunks do not look at other ranks' keys").start.says
    assert (
        "the input of decoder.layers.0.self_attention.linear_proj" in says
        and "linear_qkv, just before it, agrees" in says
    )


def alone(
    weight: float = 1.0, *, loss: float = 2.0, second: float | None = None, seen: tuple[RecordedActivation, ...] = ()
) -> ShortRun:
    """A made-up step of one parameter. second: its last row on this rank, if another."""
    value = torch.full((2, 2), weight, dtype=torch.float64)
    if second is not None:
        value[1] = second
    step = ShortRunStep(
        {"lm loss": loss},
        1.0,
        list(seen),
        {"fc.weight": ShardedTensor((2, 2), value.dtype, [(Box((0, 0), (2, 2)), value)])},
        {"fc.weight": ShardedTensor((2, 2), value.dtype, [(Box((0, 0), (2, 2)), value.clone())])},
    )
    return ShortRun(0, {"tp": (0, 1), "cp": (0, 1), "dp": (0, 1), "pp": (0, 1), "ep": (0, 1)}, (step,))


def test_differences_are_relative_and_what_is_missing_or_disagrees_is_infinitely_far() -> None:
    assert compare_recorded_runs_to_serial(alone(), [alone()]).is_within_tolerance
    near, far = (
        compare_recorded_runs_to_serial(alone(1.0), [alone(1.0 + 1e-11)]),
        compare_recorded_runs_to_serial(alone(1.0), [alone(1.0 + 1e-9)]),
    )
    assert (
        near.is_within_tolerance
        and not far.is_within_tolerance
        and far.differences_above_tolerance[0].gap == pytest.approx(1e-9, rel=1e-3)
    )
    replicas = compare_recorded_runs_to_serial(alone(), [alone(), alone(second=1.0 + 1e-15)])
    assert [(one.kind, one.gap) for one in replicas.differences_above_tolerance] == [
        ("weight", float("inf"))
    ] and "replica on rank 0" in replicas.differences_above_tolerance[0].says
    step = alone().steps[0]
    half = replace(
        alone(),
        steps=(
            ShortRunStep(
                step.losses,
                step.norm,
                [],
                step.gradients,
                {
                    "fc.weight": ShardedTensor(
                        (2, 2), torch.float64, [(Box((0, 0), (1, 2)), torch.ones(1, 2, dtype=torch.float64))]
                    )
                },
            ),
        ),
    )
    assert (
        "2 of 4 elements are on no rank"
        in compare_recorded_runs_to_serial(alone(), [half]).differences_above_tolerance[0].says
    )
    assert (
        "nan"
        in compare_recorded_runs_to_serial(alone(), [alone(loss=float("nan"))]).differences_above_tolerance[0].says
    ), "what is not a number is not the same"
    losses = compare_recorded_runs_to_serial(alone(), [alone(), alone(loss=2.0 + 1e-15)]).differences_above_tolerance
    assert [one.gap for one in losses] == [float("inf")] and "on rank 1" in losses[0].says, (
        "ranks that disagree are apart, however little"
    )


def fail_on_the_second_rank(word: str) -> int:
    """What a rank runs in a test."""
    if torch.distributed.get_rank() == 1:
        raise ValueError(word)
    return torch.distributed.get_rank()


def wait_for_each_other(_: str) -> None:
    """What two ranks run that both wait."""
    torch.distributed.recv(torch.zeros(1), src=1 - torch.distributed.get_rank())


def test_a_rank_that_fails_is_named_with_its_error() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2: (.|\n)*ValueError: of its own"):
        run_on_local_ranks(fail_on_the_second_rank, 2, "of its own")


@pytest.mark.nightly
def test_ranks_that_wait_for_each_other_are_stopped() -> None:
    with pytest.raises(RankFailed, match="2 of 2 ranks did not come back within 20 s"):
        run_on_local_ranks(wait_for_each_other, 2, "", timeout=20.0)
