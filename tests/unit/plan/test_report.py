"""Reports of hand-made plans: the conclusion, the numbers, the drawings and the advice."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from megatron.core.config.settings.run import RunConfig
from megatron.core.pipeline_parallel.schedules import Action
from megatron.plan.planner import (
    RunEstimate,
    add_memory_saving_changes,
    estimate_run,
    fullest_vs_emptiest_rank_lines,
    memory_saving_edits,
)
from megatron.plan.report import (
    TALL,
    axis_ticks,
    memory_picture,
    run_estimate_html,
    run_estimate_text,
    run_estimate_values,
    schedule_picture,
)
from megatron.plan.simulate.trace import DryRunResult, StepEvent
from megatron.plan.units import GIB, bytes_text, count_text, seconds_text
from tests.unit.plan.hand_made import PLAIN, VOCABULARY, config_of, op, run_of, setting_of

COMMAND = ["python", "-m", "megatron", "plan", "--gpu", "h100-80", "--data-path", "a & <b>"]
VOID = {"meta", "line", "link", "br"}


def passes(action: Action, place: int) -> Sequence[StepEvent]:
    """One second forward, two backward."""
    return [op({"F": 1, "B": 2}[action.op], "")] if action.op in "FB" else []


def planned_of(peaks: Sequence[int], flags: str = "--pipeline-model-parallel-size 2") -> RunEstimate:
    """The plan of a run whose pipeline positions need so many bytes, on a machine of 1 GiB."""
    return estimate_run(
        config_of(flags, 2), 2, PLAIN, lambda config, ranks, chosen=None: run_of(config, ranks, passes, peaks=peaks)
    )


class Tags(HTMLParser):
    """Sees whether tags are closed in order, and what they point to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.points_to: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.points_to += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_first_line_is_the_conclusion() -> None:
    said = [run_estimate_text(planned_of([GIB // 2, size])).splitlines()[0] for size in (GIB // 4, 3 * GIB)]
    assert said[0].startswith("FITS: the fullest rank needs 512.00 MiB of 1.00 GiB on plain; about 27 s a step, ")
    assert said[1].startswith("DOES NOT FIT: the fullest rank needs 3.00 GiB of 1.00 GiB on plain; ")


def test_the_fullest_rank_is_marked_and_explained() -> None:
    planned = planned_of([GIB // 4, GIB // 2])
    said = run_estimate_text(planned)
    assert re.search(r"pp 1 head, rank 1 +1 +512\.00 .*<- fullest", said), said
    assert "rank 1 holds 256.00 MiB more than rank 0: " in said
    assert "rank 0 holds the embedding, and at most 2 forward passes at once still await their" in said
    assert "rank 1 holds the head, and at most 1 forward pass at once still awaits its" in said
    assert fullest_vs_emptiest_rank_lines(planned_of([GIB, GIB]).run) == ["all ranks hold the same"]


def test_the_report_fits_one_screen_whatever_the_number_of_ranks() -> None:
    flags = "--pipeline-model-parallel-size 8 --num-layers 8"
    planned = estimate_run(
        config_of(flags, 64), 64, PLAIN, lambda config, ranks, chosen=None: run_of(config, ranks, passes)
    )
    many = replace(
        planned.run,
        traces=tuple(
            replace(trace, peak=trace.peak + more * 2**20) for more in range(20) for trace in planned.run.traces
        ),
        stands_for=planned.run.stands_for * 20,
    )
    lines = run_estimate_text(replace(planned, run=many)).splitlines()
    assert (
        len(lines) <= 30
        and max(map(len, lines)) <= 180
        and any(line.startswith("and 152 kinds with less") for line in lines)
    )


def test_the_json_has_the_numbers_of_the_plan() -> None:
    planned = planned_of([GIB // 4, GIB // 2])
    found = json.loads(json.dumps(run_estimate_values(planned)))
    assert found["fits"] and found["worst_rank"] == 1 and found["time"]["seconds"] == 27.0
    assert [rank["peak"] for rank in found["ranks"]] == [GIB // 4, GIB // 2]
    assert all(sum(rank["at_peak"].values()) == rank["peak"] for rank in found["ranks"])


@pytest.mark.parametrize("peaks", [(GIB // 4, GIB // 2), (GIB // 4, 2 * GIB)])
def test_the_page_is_whole_and_needs_nothing_from_outside(peaks: Sequence[int]) -> None:
    written = run_estimate_html(planned_of(peaks), COMMAND)
    tags = Tags()
    tags.feed(written)
    assert (
        tags.open == []
        and tags.points_to == []
        and "http" not in written
        and "$" not in written
        and "@import" not in written
    )
    assert 'name="viewport"' in written and "prefers-color-scheme: dark" in written and written.isascii()
    assert ("FITS" in written and "DOES NOT FIT" not in written) == (peaks[1] <= GIB)


def test_the_page_has_a_title_the_command_and_axes() -> None:
    planned = planned_of([GIB // 4, GIB // 2])
    written = run_estimate_html(planned, COMMAND)
    assert "<title>Plan: fits, 27 s a step, 2 ranks (pp 2); " in written
    assert "megatron plan --gpu h100-80 --data-path &#x27;a &amp; &lt;b&gt;&#x27;" in written
    memory, schedule = (
        memory_picture(planned.run.worst_trace, planned.hardware.usable_bytes()),
        schedule_picture(planned),
    )
    labels = re.compile(r'<text class="tick[^>]*>([^<]+)</text>')
    assert (
        labels.findall(memory)[:6] == ["0 MiB", "200 MiB", "400 MiB", "0", "5", "10"]
        and "operations of the step" in memory
    )
    assert labels.findall(schedule) == ["pp 0", "pp 1", "0", "10 s", "20 s", "time since the step began"]
    # A label stands where its number lies: the peak of 512 MiB between those of 400 and 600.
    (high,) = (float(y) for y in re.findall(r'y="([\d.]+)">400 MiB', memory))
    assert TALL * (1 - 512 / (1.05 * 512)) < high - 4 == pytest.approx(TALL * (1 - 400 / (1.05 * 512)), abs=0.1)


@pytest.mark.parametrize(
    "top, found",
    [
        (27.0, [0, 10, 20]),
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0221, [0, 0.005, 0.01, 0.015, 0.02]),
        (6, [0, 2, 4, 6]),
    ],
)
def test_ticks_are_round_numbers(top: float, found: list[float]) -> None:
    assert axis_ticks(top) == pytest.approx(found)


def test_the_bands_of_the_memory_end_at_the_peak() -> None:
    planned = planned_of([GIB // 4, GIB // 2])
    drawn = memory_picture(planned.run.worst_trace, planned.hardware.usable_bytes())
    heights = [float(y) for y in re.findall(r"[\d.]+,([\d.]+)", drawn)]
    top = 1.05 * GIB // 2  # what the picture's height means: the budget is too far away to be drawn
    assert "limit" not in drawn and min(heights) == pytest.approx(TALL * (1 - GIB / 2 / top), abs=0.1)
    near = memory_picture(planned.run.worst_trace, 0.6 * GIB)
    assert "limit" in near and "614.40 MiB" in near


def test_every_action_of_the_schedule_is_drawn_at_its_time() -> None:
    planned = planned_of([GIB // 4, GIB // 2])
    drawn = schedule_picture(planned)
    titles = re.findall(r"<title>rank (\d): (\S+), (\d) s</title>", drawn)
    wanted = {
        (str(rank), str(action), "1" if action.op == "F" else "2")
        for rank, row in enumerate(planned.run.whole_plan)
        for action in row
        if action.op in "FB"
    }
    assert len(titles) == len(wanted) and set(titles) == wanted


def test_advice_is_planned_again_and_put_together_until_it_fits() -> None:
    """A machine on which recomputation saves a third and the distributed optimizer a half."""
    asked: list[RunConfig] = []

    def dry(config: RunConfig, ranks: int, chosen: Sequence[int] | None = None) -> DryRunResult:
        asked.append(config)
        peak = 3.0 * GIB
        peak *= {None: 1.0, "selective": 1.0, "full": 2 / 3}[config.recompute.recompute_granularity]
        peak *= 0.5 if config.parallel.use_distributed_optimizer else 1.0
        return run_of(config, ranks, passes, peaks=[int(peak)])

    setting = setting_of("--num-attention-heads 3 --hidden-size 48 --num-layers 7", 2)
    planned = add_memory_saving_changes(
        estimate_run(config_of("--num-attention-heads 3 --hidden-size 48 --num-layers 7", 2), 2, PLAIN, dry),
        setting,
        dry,
        true_vocab_size=VOCABULARY,
    )
    said = [(one.words, one.fits) for one in planned.advice]
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert said == [
        (f"--use-distributed-optimizer {full}", True),
        ("--use-distributed-optimizer", False),
        (full, False),
    ]
    assert planned.advice[0].peak == int(3.0 * GIB * 2 / 3 * 0.5) and planned.advice[0].slower > 0
    assert f"--use-distributed-optimizer {full} saves 2.00 GiB: 1.00 GiB, +" in run_estimate_text(
        planned
    ) and ", FITS" in run_estimate_text(planned)


def test_changes_that_were_made_already_are_not_advised() -> None:
    flags = "--use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity selective"
    words = [line for line, _ in memory_saving_edits(setting_of(flags, 4), config_of(flags, 4))]
    assert words == [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--tensor-model-parallel-size 4 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
    ]


def test_numbers_have_units() -> None:
    assert [bytes_text(size) for size in (12, 3 * 2**10, 5 * 2**20, 1.5 * GIB)] == [
        "12 B",
        "3.00 KiB",
        "5.00 MiB",
        "1.50 GiB",
    ]
    assert [seconds_text(size) for size in (2e-6, 0.0123, 1.5, 2000)] == ["2 us", "12.3 ms", "1.5 s", "2,000 s"]
    assert [count_text(size) for size in (12, 1300, 1.75e11)] == ["12", "1.3 k", "175 B"]
