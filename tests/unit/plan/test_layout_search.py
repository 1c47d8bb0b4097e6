"""The search for layouts: against a search by brute force, and with machines that are too small."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from megatron.cli.preflight import resolve_and_examine
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.models.flops import estimate_memory_by_pipeline_rank
from megatron.core.parallel.grid import axis_rank_groups
from megatron.plan import layout_search
from megatron.plan.analytic_estimate import (
    AnalyticEstimate,
    analytic_estimate,
    num_microbatches,
    rank0_groups,
    with_padded_vocabulary,
)
from megatron.plan.command import parse_training_command
from megatron.plan.cost import StepTime
from megatron.plan.hardware import PROFILES
from megatron.plan.layout_search import (
    BEST,
    RECOMPUTE,
    CandidateLayout,
    LayoutRanking,
    Planner,
    search_layouts,
    seconds_until_dry_runs,
)
from megatron.plan.report import layout_search_text
from megatron.plan.units import bytes_text
from tests.unit.plan.hand_made import FLAGS, VOCABULARY, config_of, setting_of

MACHINE = replace(PROFILES["h100-80"], node=4)


def found_on(memory: float, flags: str = "", ranks: int = 4) -> LayoutRanking:
    """What fits into so many bytes, by formulas."""
    return search_layouts(
        setting_of(flags, ranks), replace(MACHINE, memory=memory, usable=1.0), true_vocab_size=VOCABULARY, planner=None
    )


def needed(layout: CandidateLayout, ranks: int, flags: str = "") -> float | None:
    """Bytes of a layout by the formula; None if the rules forbid it."""
    setting = setting_of(flags, ranks)
    config, problems = resolve_and_examine(setting.with_values(layout.setting_values(setting)).config, ranks)
    if problems:
        return None
    config = with_padded_vocabulary(config, VOCABULARY)
    return max(
        held.total
        for held in estimate_memory_by_pipeline_rank(
            config,
            stage_specs_of_run(config),
            data_parallel_size=layout.dp,
            num_microbatches=num_microbatches(config, ranks),
        )
    )


def test_all_layouts_that_brute_force_finds_are_found() -> None:
    ranks, limit, flags = 4, 2.6e6, "--num-layers 4 --global-batch-size 4"
    wanted = set()
    for tp, pp, chunks, micro, recompute, sharded in product(
        (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4), RECOMPUTE, (False, True)
    ):
        dp = ranks // (tp * pp)
        if tp * pp > ranks or pp == 1 < chunks or dp == 1 and sharded:
            continue
        layout = CandidateLayout(tp, 1, pp, dp, chunks, 1, tp, micro, recompute, sharded)
        bytes_ = needed(layout, ranks, flags)
        if bytes_ is not None and bytes_ <= limit:
            wanted.add(layout)
    found = found_on(limit, flags)
    beaten = {one.layout for one in found.rejected if one.rules == ("no-gain",)}
    kept = {one.layout for one in found.fits}
    assert len(wanted) > 20 and kept | beaten == wanted and not kept & beaten
    assert any("memory" in one.rules for one in found.rejected), "the limit is where nothing is too large"


def test_what_fits_comes_by_rising_time_and_nothing_beats_it_in_both() -> None:
    fits = found_on(1e9).fits
    assert [one.time.seconds for one in fits] == sorted(one.time.seconds for one in fits)
    for one, other in product(fits, fits):
        alike = replace(one.layout, recompute="", sharded=False) == replace(other.layout, recompute="", sharded=False)
        assert one is other or not (alike and one.time.seconds <= other.time.seconds and one.needs <= other.needs), (
            one,
            other,
        )


def test_a_layout_is_rejected_with_the_rules_that_it_breaks() -> None:
    setting, found = (
        setting_of("--num-attention-heads 6 --hidden-size 96", 4),
        found_on(1e9, "--num-attention-heads 6 --hidden-size 96"),
    )
    by_rules = [one for one in found.rejected if not {"memory", "no-gain"} & set(one.rules)]
    assert "heads-over-tensor" in found.rejections_by_rule()
    for one in by_rules:
        _, problems = resolve_and_examine(setting.with_values(one.layout.setting_values(setting)).config, 4)
        assert one.rules == tuple(dict.fromkeys(rule for rule, _ in problems))


def test_a_machine_that_is_too_small_takes_nothing_and_says_what_is_needed() -> None:
    found = found_on(1000.0)
    assert not found.fits and found.complete
    memory = [one for one in found.rejected if one.rules == ("memory",)]
    for one in memory[:3]:
        leanest = replace(one.layout, recompute="full", sharded=one.layout.dp > 1)
        assert one.says[0].startswith(f"needs {bytes_text(needed(leanest, 4))} on pipeline rank ")
        assert one.says[0].endswith("of 1000 B, however much is recomputed or cut")


@pytest.mark.parametrize(
    "flags, ranks",
    [("", 4), ("--num-experts 4 --moe-router-topk 2 --tensor-model-parallel-size 2 --sequence-parallel", 4)],
)
def test_the_flags_of_a_layout_make_it(flags: str, ranks: int) -> None:
    setting, found = setting_of(flags, ranks), found_on(1e9, flags, ranks)
    assert {one.layout.ep for one in found.fits} == ({1, 2, 4} if flags else {1})
    for one in found.fits[::7]:
        words = one.layout.changed_flags_text(setting)
        left_out = words.split("(without ")[1:]
        given = f"{FLAGS} {flags}".split()
        for word in (text.split()[0].strip(")") for text in left_out):
            place = given.index(word)
            end = next((at for at in range(place + 1, len(given)) if given[at].startswith("--")), len(given))
            given = given[:place] + given[end:]
        command = parse_training_command([*given, *words.split("(without ")[0].split()], ranks=ranks)
        assert command.setting is not None and not command.unread, words
        config, problems = resolve_and_examine(command.setting.config, ranks)
        assert not problems
        config = with_padded_vocabulary(config, VOCABULARY)
        assert (config.parallel, config.train, config.recompute) == (
            one.config.parallel,
            one.config.train,
            one.config.recompute,
        ), words


def test_the_best_are_run_dry_until_enough_fit() -> None:
    asked: list[str] = []

    def planner(config, world_size: int) -> tuple[int, StepTime]:
        asked.append(str(config.parallel))
        return (10**12 if len(asked) == 1 else 5 * 10**8), StepTime(float(len(asked)), 0.0, 1.0, 1.0, 0.5, 0.6, {})

    setting, machine = setting_of("", 4), replace(MACHINE, memory=1e9, usable=1.0)
    found = search_layouts(setting, machine, true_vocab_size=VOCABULARY, planner=planner, plans=2)
    assert len(asked) == 3
    assert [one.source for one in found.fits[:3]] == ["dry run", "dry run", "formulas"]
    assert found.fits[0].needs == 5 * 10**8 and found.fits[0].time.seconds == 2.0
    assert sum("by a dry run" in one.says[0] for one in found.rejected) == 1


def test_a_dry_run_whose_time_is_up_ends_the_search_with_what_is_known() -> None:
    def planner(config, world_size: int) -> tuple[int, StepTime]:
        raise TimeoutError

    found = search_layouts(setting_of("", 4), MACHINE, true_vocab_size=VOCABULARY, planner=planner, plans=2)
    assert found.fits and not found.complete and {one.source for one in found.fits} == {"formulas"}


def test_layers_leave_a_dry_run_half_of_the_time_however_slow_the_machine_is(monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(layout_search, "time", clock)

    def estimator(config, world_size: int) -> AnalyticEstimate | None:
        clock.pass_seconds(10.0, until=100.0 / 2)  # as the estimator of the command, which stops by itself
        return analytic_estimate(config, world_size, MACHINE, stage_specs_of_run(config))

    def planner(config, world_size: int) -> tuple[int, StepTime]:
        clock.pass_seconds(45.0, until=100.0)
        return 1, StepTime(1.0, 0.0, 1.0, 1.0, 0.5, 0.6, {})

    found = search_layouts(
        setting_of("", 4),
        MACHINE,
        true_vocab_size=VOCABULARY,
        planner=planner,
        estimator=estimator,
        plans=1,
        seconds=100.0,
    )
    assert seconds_until_dry_runs(100.0, 1) == 50.0 and seconds_until_dry_runs(100.0, 0) == 100.0
    sources = Counter(one.source for one in found.fits)
    assert sources["dry run"] == 1 and sources["layers"] >= 3, sources


class Clock:
    """What stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """See the module."""
        return self.now

    def pass_seconds(self, seconds: float, *, until: float) -> None:
        """Let time pass; what takes longer than `until` is given up there."""
        self.now = min(self.now + seconds, until + 0.1)
        if self.now > until:
            raise TimeoutError


def test_layouts_are_estimated_from_their_layers_until_the_best_are_known() -> None:
    memory = 1.01 * found_on(1e9).fits[0].needs
    formulas = found_on(memory).fits
    asked = []

    def estimator(config, world_size: int) -> AnalyticEstimate | None:
        """The fastest by formulas does not fit, the next is not known, and all others take twice as long."""
        asked.append(config)
        plain = analytic_estimate(config, world_size, MACHINE, stage_specs_of_run(config))
        if len(asked) == 2:
            return None
        return replace(
            plain,
            needs=1.02 * formulas[0].needs if len(asked) == 1 else plain.needs,
            time=replace(plain.time, seconds=2 * plain.time.seconds),
        )

    machine = replace(MACHINE, memory=memory, usable=1.0)
    found = search_layouts(setting_of("", 4), machine, true_vocab_size=VOCABULARY, planner=None, estimator=estimator)
    known = [one for one in found.fits if one.source == "layers"]
    assert BEST <= len(known) == len(asked) - 2 < len(formulas) - 2 and found.fits[: len(known)] == known
    assert [one.time.seconds for one in known] == sorted(one.time.seconds for one in known)
    assert {one.layout for one in known[:BEST]} <= {one.layout for one in formulas[: BEST + 4]}
    assert [one.layout for one in found.rejected if "by dry runs of its layers" in one.says[0]] == [formulas[0].layout]


@pytest.mark.parametrize("peak, source", [(0.99, "dry run"), (1.01, None)])
@pytest.mark.parametrize("estimate", [0.98, 1.02])
def test_near_the_limit_only_a_dry_run_decides(estimate: float, peak: float, source: str | None) -> None:
    limit = 1.01 * found_on(1e9).fits[0].needs
    first = found_on(limit).fits[0].layout
    setting, machine = setting_of("", 4), replace(MACHINE, memory=limit, usable=1.0)
    sizes: list[str] = []

    def estimator(config, world_size: int) -> AnalyticEstimate | None:
        """The first that is asked for is near the limit, and the fastest."""
        plain = analytic_estimate(config, world_size, MACHINE, stage_specs_of_run(config))
        sizes.append("")
        if len(sizes) == 1:
            return replace(plain, needs=estimate * limit)
        return replace(plain, needs=limit / 2, time=replace(plain.time, seconds=2 * plain.time.seconds))

    def planner(config, world_size: int) -> tuple[int, StepTime]:
        return int(peak * limit), StepTime(1.0, 0.0, 1.0, 1.0, 0.5, 0.6, {})

    def search(planner: Planner | None) -> LayoutRanking:
        sizes.clear()
        return search_layouts(
            setting, machine, true_vocab_size=VOCABULARY, planner=planner, estimator=estimator, plans=1
        )

    found = search(planner)
    assert next((one.source for one in found.fits if one.layout == first), None) == source
    assert [one.rules for one in found.rejected if one.layout == first] == [("memory",)] * (source is None)
    undecided = search(None)
    assert [one.rules for one in undecided.rejected if one.layout == first] == [("near-limit",)] * (estimate > 1)
    if estimate < 1:
        assert re.search(
            rf"^1 +{first} .*layers, within 8%; may not fit$", layout_search_text(undecided, [""]), re.MULTILINE
        )
        assert layout_search_text(undecided, [""]).count("may not fit") == 1


def test_a_search_without_time_says_that_it_is_not_complete() -> None:
    found = search_layouts(setting_of("", 4), MACHINE, true_vocab_size=VOCABULARY, planner=None, seconds=0.0)
    assert not found.complete and not found.fits


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --use-tp-pp-dp-mapping",
        "--num-experts 4 --expert-model-parallel-size 4 --pipeline-model-parallel-size 2",
    ],
)
def test_the_groups_of_a_sketch_are_those_of_the_mesh(flags: str) -> None:
    config = config_of(flags, 16)
    lists = axis_rank_groups(config.parallel, 16)
    assert {name: tuple(ranks) for name, ranks in rank0_groups(config, 16).items()} == {
        name: lists[name][0] for name in rank0_groups(config, 16)
    }


def test_more_recomputation_takes_longer_and_needs_less() -> None:
    drawn = [
        analytic_estimate(config, 4, MACHINE, stage_specs_of_run(config))
        for config in (
            config_of(f"--seq-length 512 --max-position-embeddings 512 {words}", 4)
            for words in ("", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
        )
    ]
    assert drawn[0].needs > drawn[1].needs and drawn[0].time.seconds < drawn[1].time.seconds
