"""The report of a plan as text, as JSON, and as one self-contained HTML page.

text    one screen: the conclusion first, then memory by kind of rank, time, traffic, and what to change
JSON    the same as plain values
HTML    the same, with drawings of the memory over the step and of the schedule
"""

from __future__ import annotations

import html
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any

from megatron.core.models.describe import count_parameters
from megatron.core.pipeline_parallel.schedules import num_plan_stages
from megatron.plan.layout_search import FittingLayout, LayoutRanking
from megatron.plan.planner import RunEstimate, fullest_vs_emptiest_rank_lines, stage_contents_text
from megatron.plan.simulate.trace import KINDS, DryRunResult, Trace
from megatron.plan.stage_estimate import estimate_tolerance
from megatron.plan.units import GIB, bytes_text, count_text, seconds_text

TEMPLATE = Path(__file__).with_name("report.html")
SHOWN_RANKS, DRAWN_ACTIONS, DRAWN_ROWS = 8, 4000, 64
WIDE, TALL, ROW = 1000, 300, 22
LEFT, BELOW = 70, 36  # room for the axes of a picture


def run_estimate_text(planned: RunEstimate) -> str:
    """Return the report as text of one screen."""
    run, time = planned.run, planned.cost.time
    lines = [
        memory_fit_and_speed_line(planned),
        "",
        planned_run_summary_line(run),
        "",
        *_format_table(_memory_rows(planned)),
    ]
    worst, summit = run.worst_trace, run.worst_trace.event_at_peak
    lines += [
        "",
        f"peak of rank {worst.rank}: {summit.name} in {summit.action}"
        + (f", {summit.module}" if summit.module else "")
        + (f", {summit.where}" if summit.where else ""),
    ]
    lines += [
        f"{'' if place else 'why there:':10} {line}" for place, line in enumerate(fullest_vs_emptiest_rank_lines(run))
    ]
    parts = [
        f"{part} {seconds / time.seconds:.0%}"
        for part, seconds in time.parts.items()
        if seconds >= 0.005 * time.seconds
    ]
    lines += [
        "",
        f"time of a step: {seconds_text(time.seconds)}, of which {', '.join(parts)}",
        f"schedule: {_plural_count_text(num_plan_stages(run.whole_plan), 'stage')}, {_plural_count_text(run.whole_microbatches, 'microbatch')}, bubble {time.bubble:.1%}",
    ]
    moved = [
        f"{axis} {bytes_text(size)}" for axis, size in sorted(planned.cost.traffic.items(), key=lambda pair: -pair[1])
    ]
    lines += [f"a rank's collectives and messages in a step: {', '.join(moved) or 'none'}"]
    lines += [] if planned.matching is None else [planned.matching.text]
    lines += dry_run_caveats(run)
    lines += ["", *_advice_lines(planned)] if not planned.fits_in_memory else []
    return "\n".join(lines) + "\n"


def memory_fit_and_speed_line(planned: RunEstimate) -> str:
    """Return one line: whether the run fits, its step time and throughput."""
    time, worst, hardware = planned.cost.time, planned.run.worst_trace, planned.hardware
    fits = "FITS" if planned.fits_in_memory else "DOES NOT FIT"
    if not planned.no_rank_deadlocks:
        fits = f"NEVER ENDS (see below), and {fits}"
    return (
        f"{fits}: the fullest rank needs {bytes_text(worst.peak)} of {bytes_text(hardware.usable_bytes())} on {hardware.name}; about "
        f"{seconds_text(time.seconds)} a step, {count_text(time.tokens)} tokens/s, MFU {time.mfu:.1%} causal ({time.mfu_square:.1%} square)"
    )


def planned_run_summary_line(run: DryRunResult) -> str:
    """Return one line on the run: ranks and layout, parameters, batch, dtype."""
    parallel, train = run.config.parallel, run.config.train
    sizes = [
        ("tp", parallel.tp),
        ("pp", parallel.pp),
        ("cp", parallel.context_parallel_size),
        ("ep", parallel.expert_model_parallel_size),
        ("dp", parallel.data_parallel_size(run.world_size)),
    ]
    layout = ", ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one"
    model, batches = run.config.model, _plural_count_text(run.whole_microbatches, "microbatch")
    batches = (
        f"up to {batches} of at most {parallel.max_seqlen_per_dp_cp_rank:,} tokens on a rank"
        if parallel.hybrid_context_parallel
        else f"{batches} of {train.micro_batch_size} x {train.seq_length:,} tokens"
    )
    return (
        f"{_plural_count_text(run.world_size, 'rank')} ({layout}); {count_text(count_parameters(model).total)} parameters with a vocabulary of "
        f"{model.padded_vocab_size:,}; {batches}; {run.config.precision.param_dtype_name}"
    )


def run_estimate_values(planned: RunEstimate) -> dict[str, Any]:
    """Return the report as plain values, in bytes and seconds."""
    run, hardware = planned.run, planned.hardware
    ranks = [
        {
            "rank": trace.rank,
            "place": dict(trace.place),
            "ranks": list(members),
            "parameters": trace.parameters,
            "peak": trace.peak,
            "at_peak": asdict(trace.at_peak),
            "steady": asdict(trace.steady),
            "summit": {name: getattr(trace.event_at_peak, name) for name in ("name", "where", "action", "module")},
        }
        for trace, members in zip(run.traces, run.stands_for, strict=True)
    ]
    return {
        "fits": planned.fits_in_memory,
        "hardware": hardware.name,
        "budget": hardware.usable_bytes(),
        "world_size": run.world_size,
        "worst_rank": run.worst_trace.rank,
        "why": fullest_vs_emptiest_rank_lines(run),
        "notes": dry_run_caveats(run),
        "ranks": ranks,
        "microbatches": run.whole_microbatches,
        "time": asdict(planned.cost.time),
        "traffic": dict(planned.cost.traffic),
        "advice": [asdict(one) for one in planned.advice],
        "waits_forever": None
        if planned.matching is None
        else [asdict(problem) for problem in planned.matching.problems],
        "planning_seconds": planned.seconds,
    }


def run_estimate_html(planned: RunEstimate, command: Sequence[str]) -> str:
    """Return the report as one HTML page. command: the words of the command that made it."""
    run, time = planned.run, planned.cost.time
    fullest = sorted(run.traces, key=lambda trace: -trace.peak)
    drawn = [fullest[0], *([fullest[-1]] if fullest[-1].peak < fullest[0].peak else [])]
    figures = "".join(
        f"<figure><figcaption>Rank {trace.rank}: {bytes_text(trace.peak)} at {html.escape(trace.event_at_peak.name)} in "
        f"{html.escape(trace.event_at_peak.action)}</figcaption>{memory_picture(trace, planned.hardware.usable_bytes())}</figure>"
        for trace in drawn
        if trace.timeline
    )
    split = _html_table(
        [
            ["part", "seconds", "share"],
            *([part, f"{seconds:.4g}", f"{seconds / time.seconds:.1%}"] for part, seconds in time.parts.items()),
        ]
    )
    moved = _html_table(
        [
            ["axis", "bytes a rank and step"],
            *([axis, bytes_text(size)] for axis, size in sorted(planned.cost.traffic.items())),
        ]
    )
    keys = "".join(f'<span class="key {kind}">{kind}</span>' for kind in KINDS)
    changes = (
        "".join(f"<li>{html.escape(line.strip())}</li>" for line in _advice_lines(planned)[1:])
        if not planned.fits_in_memory
        else ""
    )
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(
            f"{'fits' if planned.fits_in_memory else 'does not fit'}, {seconds_text(time.seconds)} a step, {planned_run_summary_line(run)}"
        ),
        command=html.escape(shlex.join(command)),
        state="good" if planned.fits_in_memory else "bad",
        conclusion=html.escape(memory_fit_and_speed_line(planned)),
        headline=html.escape(planned_run_summary_line(run)),
        memory=_html_table(_memory_rows(planned, most=DRAWN_ROWS)),
        why="".join(
            f"<li>{html.escape(line)}</li>" for line in (*fullest_vs_emptiest_rank_lines(run), *dry_run_caveats(run))
        ),
        figures=figures,
        keys=keys,
        schedule=schedule_picture(planned),
        bubble=f"{time.bubble:.1%}",
        split=split,
        moved=moved,
        advice=f"<h2>What to change</h2><ul>{changes}</ul>" if changes else "",
    )


def memory_picture(trace: Trace, budget: float) -> str:
    """Draw a rank's memory over its step as SVG: one band for each kind, and the available memory as a line."""
    points = trace.timeline
    top = 1.05 * max(budget if budget < 2 * trace.peak else 0.0, trace.peak, 1)
    last = max(points[-1][0], 1)
    across = [WIDE * event / last for event, _ in points]
    below, bands = [0.0] * len(points), []
    for kind in KINDS:
        above = [under + getattr(held, kind) for under, (_, held) in zip(below, points, strict=True)]
        if above != below:
            corners = [(x, TALL * (1 - y / top)) for x, y in zip(across, above, strict=True)]
            corners += [(x, TALL * (1 - y / top)) for x, y in zip(reversed(across), reversed(below), strict=True)]
            bands.append(f'<polygon class="{kind}" points="{_svg_points(corners)}"><title>{kind}</title></polygon>')
        below = above
    line = TALL * (1 - budget / top)
    limit = f'<line class="limit" x1="0" x2="{WIDE}" y1="{line:.1f}" y2="{line:.1f}"/><text x="4" y="{line - 4:.1f}">{bytes_text(budget)}</text>'
    unit, name = (GIB, "GiB") if trace.peak >= GIB else (2**20, "MiB")
    sides = [(TALL * (1 - size * unit / top), f"{size:g} {name}") for size in axis_ticks(top / unit)]
    return (
        f'<svg viewBox="{-LEFT} -14 {WIDE + LEFT + 30} {TALL + 14 + BELOW}" role="img" aria-label="memory over the step">'
        f"{_svg_ticks(TALL, sides, [(WIDE * event / last, f'{event:,.0f}') for event in axis_ticks(last)], 'operations of the step, in their order')}"
        f"{''.join(bands)}{limit if line >= 0 else ''}</svg>"
    )


def schedule_picture(planned: RunEstimate) -> str:
    """Draw the simulated schedule as SVG: a row for each pipeline rank; of a long step the beginning."""
    plan, timeline = planned.run.whole_plan, planned.cost.timeline
    actions = [
        (start, end, rank, action)
        for rank, (row, starts, ends) in enumerate(zip(plan, timeline.start, timeline.end, strict=True))
        for action, start, end in zip(row, starts, ends, strict=True)
        if rank < DRAWN_ROWS and end > start
    ]
    drawn = sorted(actions, key=lambda one: (one[0], one[2]))[:DRAWN_ACTIONS]
    span, rows = max((end for _, end, _, _ in drawn), default=1.0), min(len(plan), DRAWN_ROWS)
    boxes = []
    for start, end, rank, action in drawn:
        x, width = WIDE * start / span, WIDE * (end - start) / span
        chunk = action.stage // len(plan)
        boxes.append(
            f'<rect class="{action.op} c{min(chunk, 3)}" x="{x:.2f}" y="{ROW * rank + 1}" width="{max(width - 0.3, 0.2):.2f}" '
            f'height="{ROW - 2}"><title>rank {rank}: {action}, {seconds_text(end - start)}</title></rect>'
        )
        if width > 14:
            boxes.append(f'<text class="in" x="{x + width / 2:.1f}" y="{ROW * rank + 15}">{action.microbatch}</text>')
    note = "" if len(drawn) == len(actions) else f"<p>The first {len(drawn):,} of {len(actions):,} actions.</p>"
    sides = [(ROW * (rank + 0.5), f"pp {rank}") for rank in range(rows)]
    below = [(WIDE * moment / span, seconds_text(moment) if moment else "0") for moment in axis_ticks(span)]
    return (
        f'<svg viewBox="{-LEFT} 0 {WIDE + LEFT + 30} {ROW * rows + BELOW}" role="img" aria-label="schedule">'
        f"{_svg_ticks(ROW * rows, sides, below, 'time since the step began')}{''.join(boxes)}</svg>{note}"
    )


def axis_ticks(top: float, about: int = 5) -> list[float]:
    """Return about so many round numbers from 0 to the top: multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(top / about))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * about >= top * 0.999)
    return [step * count for count in range(math.floor(top / step * 1.000001) + 1)]


def _svg_ticks(tall: float, sides: Iterable[tuple[float, str]], below: Iterable[tuple[float, str]], name: str) -> str:
    """Draw tick marks at the side (y, label) and below (x, label). name: of the horizontal axis."""
    drawn = [
        f'<line class="axis" x1="0" x2="0" y1="0" y2="{tall}"/><line class="axis" x1="0" x2="{WIDE}" y1="{tall}" y2="{tall}"/>'
    ]
    drawn += [
        f'<line class="axis" x1="-4" x2="0" y1="{y:.1f}" y2="{y:.1f}"/><text class="tick side" x="-7" y="{y + 4:.1f}">{label}</text>'
        for y, label in sides
    ]
    drawn += [
        f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{tall + 4}"/><text class="tick" x="{x:.1f}" y="{tall + 16}">{label}</text>'
        for x, label in below
    ]
    return "".join(drawn) + f'<text class="tick" x="{WIDE / 2}" y="{tall + 31}">{name}</text>'


def layout_search_text(ranking: LayoutRanking, flags: Iterable[str], most: int = 10) -> str:
    """Return the result of a layout search as text: the best layouts, and why others were rejected. flags: of the fitting layouts, in order."""
    if ranking.fits:
        best = ranking.fits[0]
        how = {
            "dry run": "run dry",
            "layers": "by dry runs of its layers",
            "formulas": "by formulas alone, which can be far too low",
        }[best.source]
        lines = [
            f"{len(ranking.fits)} of {ranking.tried:,} layouts fit; the fastest: {best.layout}: {seconds_text(best.time.seconds)} a step, "
            f"{bytes_text(best.needs)}, MFU {best.time.mfu:.1%} causal ({how})",
            "",
        ]
        rows = [["", "layout", "memory", "step", "tokens/s", "MFU", "bubble", "by"]]
        rows += [
            [
                str(place),
                str(one.layout),
                bytes_text(one.needs),
                seconds_text(one.time.seconds),
                count_text(one.time.tokens),
                f"{one.time.mfu:.1%}",
                f"{one.time.bubble:.1%}",
                _source_text(one, ranking.limit),
            ]
            for place, one in enumerate(ranking.fits[:most], start=1)
        ]
        lines += [
            *_format_table(rows, left=2),
            "",
            f"changes for 1: {next(iter(flags)) or 'none: it is what was given'}",
        ]
    else:
        lines = [f"none of {ranking.tried:,} layouts fits"]
    lines += ["", f"{len(ranking.rejected):,} were rejected:"]
    for rule, count in ranking.rejections_by_rule().most_common():
        example = next(one for one in ranking.rejected if rule in one.rules)
        message = example.says[min(example.rules.index(rule), len(example.says) - 1)]
        lines.append(f"  {count:>6,} {rule:18} for example {example.layout}: {message}")
    if not ranking.complete:
        known = Counter(one.source for one in ranking.fits)
        lines += [
            "",
            f"time was up before the best were known: {known['dry run']} of these were run dry, {known['layers']} are estimates by layers; "
            "give more --seconds",
        ]
    return "\n".join(lines) + "\n"


def _source_text(one: FittingLayout, limit: float) -> str:
    """Return what a layout is known from, with the tolerance of an estimate by layers, and whether that leaves open if it fits."""
    if one.source != "layers":
        return one.source
    within = estimate_tolerance(one.config)
    return f"layers, within {within:.0%}" + "; may not fit" * (one.needs * (1 + within) > limit)


def layout_search_report_values(ranking: LayoutRanking, flags: Sequence[str]) -> dict[str, Any]:
    """Return the result of a layout search as plain values, with the reason for each rejected layout."""
    return {
        "tried": ranking.tried,
        "complete": ranking.complete,
        "fits": [
            {
                "layout": asdict(one.layout),
                "flags": words,
                "needs": one.needs,
                "time": asdict(one.time),
                "source": one.source,
            }
            for one, words in zip(ranking.fits, flags, strict=True)
        ],
        "rejected": [asdict(one) for one in ranking.rejected],
    }


def _memory_rows(planned: RunEstimate, most: int = SHOWN_RANKS) -> list[list[str]]:
    """Return table rows of peak memory by kind of rank: the fullest kinds, in order of ranks. Kinds of one stage with equal memory share a row."""
    run = planned.run
    unit, name = (GIB, "GiB") if run.worst_trace.peak >= GIB else (2**20, "MiB")
    alike: dict[tuple[str, ...], tuple[Trace, int]] = {}
    for trace, ranks in zip(run.traces, run.stands_for, strict=True):
        key = (
            str(trace.place.get("pp", 0)),
            *(f"{size / unit:.2f}" for size in (trace.peak, *asdict(trace.at_peak).values())),
        )
        first, count = alike.get(key, (trace, 0))
        alike[key] = first if first.peak >= trace.peak else trace, count + len(ranks)
    fullest = sorted(alike.values(), key=lambda pair: -pair[0].peak)
    rows = [[f"{name} at the peak", "ranks", "peak", *KINDS]]
    for trace, count in sorted(fullest[:most], key=lambda pair: pair[0].rank):
        held = [f"{size / unit:.2f}" for size in asdict(trace.at_peak).values()]
        mark = " <- fullest" if trace is fullest[0][0] and len(fullest) > 1 else ""
        has = stage_contents_text(run, trace).replace("the ", "").replace(" and ", "+")
        stage = f"pp {trace.place.get('pp', 0)}" + (f" {has}" if has else "") + f", rank {trace.rank}"
        rows.append([stage, f"{count:,}", f"{trace.peak / unit:.2f}", *held[:-1], held[-1] + mark])
    if len(fullest) > most:
        rows.append([f"and {len(fullest) - most} kinds with less", "", "", *[""] * len(KINDS)])
    return rows


def dry_run_caveats(run: DryRunResult) -> list[str]:
    """Return notes on how the dry run differs from the real run."""
    notes_of_run = []
    if run.config.parallel.hybrid_context_parallel:
        notes_of_run.append(
            "note: a dry run has no text, so documents were taken to be whole rows, halves, quarters and so on in turn; work that "
            "the real lengths divide less evenly takes longer"
        )
    if any(event.name == "aten.bmm" and event.role == "attention" for event in run.worst_trace.events):
        notes_of_run.append(
            "note: attention ran unfused here, as a CPU has no fused kernel with such masks; where the machine has one, less "
            "memory is needed"
        )
    return notes_of_run


def _advice_lines(planned: RunEstimate) -> list[str]:
    """Return lines of advice; first what makes the run fit."""
    if not planned.advice:
        return ["What to change: no change that was tried saves memory; --search looks at all layouts"]
    lines = ["What to change (each was planned; times by formulas):"]
    for one in planned.advice:
        slower = f"{one.slower:+.1%} time" if abs(one.slower) >= 0.0005 else "no more time"
        lines.append(
            f"  {one.words} saves {bytes_text(one.saved)}: {bytes_text(one.peak)}, {slower}{', FITS' if one.fits else ''}"
        )
    enough = any(one.fits for one in planned.advice)
    return [
        *lines,
        "  --search looks at all layouts" if enough else "  none of them is enough; --search looks at all layouts",
    ]


def _format_table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Format rows as lines with aligned columns. What follows " <-" in a cell does not count for its width."""
    widths = [max(len(row[place].split(" <-")[0]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            value, arrow, mark = cell.partition(" <-")
            cells.append((value.ljust(width) if place < left else value.rjust(width)) + arrow + mark)
        lines.append("  ".join(cells).rstrip())
    return lines


def _plural_count_text(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "es" if what.endswith("ch") else "s")


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _svg_points(corners: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
