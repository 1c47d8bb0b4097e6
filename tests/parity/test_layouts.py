"""All parallelisms are correct: every row of the table equals the serial run of the same network.

Tolerances, all relative:
    fp64   losses, gradient norms and final weights 1e-10
    fp32   losses and gradient norms 1e-5, or three times what rounding changes in the serial run, where that is more;
           final weights 1e-4, since Adam enlarges what rounding leaves of small gradients (the epsilon of both runs limits
           that, see table.py)
    bf16, fp16   losses 2e-2 of the serial fp32 run; all ranks agree to the last bit

Rows run over a lazy transport (`helpers/lazy_collectives.py`): in fp64 a collective is complete only once it was waited for, in
fp32 others may become complete with it, in any order. So what is read too early is not the serial run either.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.helpers import tiny
from tests.helpers.lazy_collectives import Completion
from tests.helpers.training import Outcome, assemble, differences, train, train_alone
from tests.helpers.world import Worlds
from tests.parity import half_rows, rounding_rows
from tests.parity.half import HalfStep, train_half_here
from tests.parity.table import LAYOUT_WORDS, MODELS, NUMBERED_WORDS, PRECISIONS, ROWS, Changes, named, read_layout
from tests.quick import covering, layout_features

TOLERANCES = {"fp64": (1e-10, 1e-10), "fp32": (1e-5, 1e-4)}
COMPLETIONS: dict[str, Completion] = {"fp64": "on_wait", "fp32": "any_order"}
STEPS = 2
DYNAMIC: Changes = {"fp16": True, "initial_loss_scale": 2.0**22, "hysteresis": 1, "loss_scale_window": 2}


@cache
def serial(model: str, precision: str) -> Outcome:
    """The run that rows of this network are compared with."""
    return train_alone({**MODELS[model], **PRECISIONS[precision]}, STEPS)


@cache
def rounding(model: str) -> float:
    """How much fp32 changes of the serial run's losses and norms, relative to them."""
    exact = train_alone({**MODELS[model], **PRECISIONS["fp32"], "fp64": True}, STEPS)
    found = serial(model, "fp32")
    pairs = zip([*found.losses, *found.norms], [*exact.losses, *exact.norms], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def every_row() -> list[Any]:
    """By default rows in fp64 with every network once and every word of layouts twice, and every tenth in fp32; the others are nightly."""
    once = covering(ROWS)
    twice = covering([row for row in ROWS if row not in once], layout_features)
    by_default = {"fp64": {*once, *twice}, "fp32": set(ROWS[::10])}
    return [
        pytest.param(
            *row,
            precision,
            id=f"{named(*row)}-{precision}",
            marks=[] if row in by_default[precision] else [pytest.mark.nightly],
        )
        for precision in PRECISIONS
        for row in ROWS
        if precision == "fp64" or row not in rounding_rows.ROWS
    ]


@pytest.mark.parametrize("layout, model, precision", every_row())
def test_a_row_of_the_table_equals_the_serial_run(world: Worlds, layout: str, model: str, precision: str) -> None:
    ranks, changes = read_layout(layout)
    changes = {**MODELS[model], **PRECISIONS[precision], **changes}
    found = train(world, ranks, changes, STEPS, completion=COMPLETIONS[precision])
    tolerance, weights = TOLERANCES[precision]
    problems = differences(found, serial(model, precision), tolerance, weights=weights)
    if problems and precision == "fp32":  # layers of states round more: 2e-5 after one update
        tolerance = max(tolerance, 3 * rounding(model))
        problems = differences(found, serial(model, precision), tolerance, weights=weights)
    assert not problems, "\n".join([f"{layout} / {model} in {precision} is not the serial run:", *problems])


@pytest.mark.parametrize(
    "layout, model",
    [
        ("tp2 sp pp2 vpp2 dp2 zero average", "llama-tied"),
        ("pp2 blocking", "untied"),
        ("dp4 overlap-reduce overlap-gather bucket700", "gpt"),
    ],
)
def test_the_same_layout_twice_is_equal_to_the_last_bit(world: Worlds, layout: str, model: str) -> None:
    ranks, changes = read_layout(layout)
    first, second = (train(world, ranks, {**MODELS[model], **changes}, STEPS) for _ in range(2))
    assert (first.losses, first.norms) == (second.losses, second.norms)
    assert [name for name in first.weights if not torch.equal(first.weights[name], second.weights[name])] == []


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_off_per_token_loss_the_gradient_is_that_of_the_mean_of_microbatch_means(micro_batch_size: int) -> None:
    changes = {**MODELS["mean"], "fp64": True, "micro_batch_size": micro_batch_size}
    run = tiny.run_of(tiny.config(**changes))
    trainer = tiny.trainer_of(run)
    means = []
    for batch in tiny.short_run_batches(run, 0):
        losses = trainer.stages[0](ids=batch.tokens, labels=batch.labels)
        means.append((losses * batch.loss_mask).sum() / batch.loss_mask.sum())
    gradients = torch.autograd.grad(torch.stack(means).mean(), list(trainer.stages[0].parameters()))
    expected = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
    assert train_alone(changes, 1).norms[0] == pytest.approx(expected, rel=1e-12)
    assert train_alone({**changes, "calculate_per_token_loss": True}, 1).norms[0] != pytest.approx(expected, rel=1e-3)


def half(world: Worlds, layout: str, changes: Changes, steps: int) -> list[HalfStep]:
    """The steps of a half-precision run, on which all ranks agree."""
    ranks, cut = read_layout(layout)
    everything = {**changes, **cut}
    results = (
        world(ranks).run(train_half_here, everything, steps) if ranks > 1 else [train_half_here(everything, steps)]
    )
    assert all(done == results[0][0] for done, _ in results), f"ranks disagree: {[done for done, _ in results]}"
    assemble([held for _, held in results])
    return results[0][0]


@pytest.mark.parametrize(
    "layout, model, precision", half_rows.ROWS, ids=[named(*row[:2]) + " " + "-".join(row[2]) for row in half_rows.ROWS]
)
def test_half_precision_stays_near_the_serial_fp32_run(
    world: Worlds, layout: str, model: str, precision: Changes
) -> None:
    done = half(world, layout, {**MODELS[model], **precision}, STEPS + 1)
    wide = train_alone(MODELS[model], STEPS + 1)
    assert [step.loss for step in done] == pytest.approx(wide.losses, rel=2e-2)
    assert [step.norm for step in done] == pytest.approx(wide.norms, rel=5e-2)
    assert not any(step.skipped for step in done)


@pytest.mark.parametrize(
    "layout, model", [("", "gpt"), ("tp2 sp pp2 mb2", "llama"), ("pp2 dp2 zero", "gpt"), ("dp2 fsdp", "gpt")]
)
def test_an_fp16_step_that_overflows_changes_nothing_but_the_loss_scale(world: Worlds, layout: str, model: str) -> None:
    done = half(world, layout, {**MODELS[model], **DYNAMIC}, 7)
    first = next(index for index, step in enumerate(done) if not step.skipped)
    assert first > 0, "the first loss scale was meant to overflow"
    untrained = train_alone({**MODELS[model], "lr": 0.0, "min_lr": 0.0}, first + 2)
    assert [step.loss for step in done[: first + 1]] == pytest.approx(untrained.losses[: first + 1], rel=1e-2)
    assert done[first].norm == pytest.approx(untrained.norms[first], rel=2e-2)
    assert done[first + 1].loss != pytest.approx(untrained.losses[first + 1], rel=5e-3), "a good step moves the weights"
    scale, good = DYNAMIC["initial_loss_scale"], 0
    for step in done:
        good = 0 if step.skipped else good + 1
        scale = scale / 2 if step.skipped else scale * 2 if good % 2 == 0 else scale
        assert step.scale == scale, f"{done}"


def test_the_table_has_rows_of_every_word_and_every_network() -> None:
    words = {word for layout, _ in ROWS for word in layout.split()}
    assert set(LAYOUT_WORDS) <= words, "a switch that no row uses"
    assert set(NUMBERED_WORDS) <= {
        word[:7] if word.startswith("layout=") else word.rstrip("0123456789") for word in words
    }
    used = {model for _, model in ROWS} | {model for _, model, _ in half_rows.ROWS}
    assert set(MODELS) == used, "a network that no row trains"
    assert len(set(ROWS)) == len(ROWS) >= 40, "rows are all different, and many"
