"""Compare two runs by their run logs: the first step that differs, and the settings, files and machines that differ.

    megatron diff-runs RUN_A RUN_B          each a --save folder, or a run log

The likeliest cause stands first; docs/run_log.md tells the order. Exit code: 0 every step that both have is equal to the
last bit, 1 they part, 2 the question could not be read.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron.cli.tool_parser import ToolArgumentParser
from megatron.training.launch.launch_info import install_interrupt_excepthook
from megatron.training.report.run_log import to_json_value
from megatron.verify.compare.runs import (
    RunDivergence,
    RunHistory,
    RunSetupDifference,
    StepDifference,
    find_divergence,
    read_run_history,
)

WIDEST = 60  # characters of one value


def format_value(value: Any) -> str:
    """Format a value, truncated."""
    if value is None:
        return "(none)"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def format_ranges(iterations: Sequence[int]) -> str:
    """Format ascending numbers as ranges: "1-5, 8"."""
    ends = [
        place
        for place, number in enumerate(iterations)
        if place + 1 == len(iterations) or iterations[place + 1] != number + 1
    ]
    parts, begin = [], 0
    for end in ends:
        parts.append(f"{iterations[begin]}-{iterations[end]}" if end > begin else str(iterations[begin]))
        begin = end + 1
    return ", ".join(parts) or "none"


def run_history_lines(letter: str, run: RunHistory) -> list[str]:
    """Describe a run in two lines. letter: A or B."""
    starts = f"{len(run.starts)} start{'s' * (len(run.starts) > 1)}"
    return [f"{letter}  {run.path}", f"   steps {format_ranges(sorted(run.steps))}; {starts}; {run.end}"]


def step_value_lines(apart: StepDifference) -> list[str]:
    """Return lines with the values of one step in both runs."""
    return [
        f"  {name:16} A {'none' if a is None else repr(a):24} B {'none' if b is None else repr(b):24}"
        + ("" if a is None or b is None or not math.isfinite(a - b) else f" apart by {abs(a - b):.3g}")
        for name, (a, b) in apart.values.items()
    ]


def setup_difference_lines(inputs: Sequence[RunSetupDifference]) -> list[str]:
    """Return lines with the inputs that differ, numbered, with both values."""
    lines = []
    for place, one in enumerate(inputs, start=1):
        origins = one.origins or ("", "")
        told_origins = [f" ({origin})" if origin else "" for origin in origins]
        lines.append(f"  {place:2} {one.kind:16} {one.name}")
        lines += [
            f"       {letter} {format_value(value)}{origin}"
            for letter, value, origin in zip("AB", (one.a, one.b), told_origins)
        ]
    return lines


def run_divergence_report(a: RunHistory, b: RunHistory, difference: RunDivergence, tolerance: float) -> str:
    """Return the report as text: where the runs diverge, and what may be the cause."""
    lines = [*run_history_lines("A", a), *run_history_lines("B", b), ""]
    if not difference.common:
        lines.append("They have no step in common.")
    elif difference.first is None:
        lines.append(f"Equal to the last bit in all {len(difference.common)} steps that both have.")
    else:
        before = [step for step in difference.common if step < difference.first.iteration]
        lines += [
            f"They part in step {difference.first.iteration}, by {difference.first.size:.2g} of the value; equal to the last bit before: "
            f"{format_ranges(before)}",
            *step_value_lines(difference.first),
        ]
        if difference.beyond is None:
            lines.append(f"No step differs by more than {tolerance:g}.")
        elif difference.beyond.iteration != difference.first.iteration:
            lines += [
                f"By more than {tolerance:g} they first differ in step {difference.beyond.iteration}:",
                *step_value_lines(difference.beyond),
            ]
    if difference.restarts:
        lines.append(
            f"Only one of them was resumed behind step{'s' * (len(difference.restarts) > 1)} {format_ranges(difference.restarts)}."
        )
    lines += [
        "",
        "What they were given differently, the likeliest cause first:"
        if difference.inputs
        else "They were given the same, as far as the run logs tell.",
        *setup_difference_lines(difference.inputs),
    ]
    if difference.idle:
        lines += ["", f"And what cannot change a number: {', '.join(one.name for one in difference.idle)}"]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Print the report; exit with 1 if the runs diverge."""
    install_interrupt_excepthook()
    parser = ToolArgumentParser(description=__doc__, allow_abbrev=True)
    parser.add_argument("a", metavar="RUN_A", help="--save folder or run log of a run")
    parser.add_argument("b", metavar="RUN_B", help="that of another")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        help="relative difference up to which rounding may be the cause (default: 1e-4)",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    options = parser.parse_args(argv)
    try:
        a, b = read_run_history(options.a), read_run_history(options.b)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    result = find_divergence(a, b, options.tolerance)
    if options.json:
        ends = {
            letter: {"path": run.path, "starts": len(run.starts), "steps": len(run.steps), "end": run.end}
            for letter, run in (("a", a), ("b", b))
        }
        text = json.dumps(to_json_value({**ends, **asdict(result)}), indent=2) + "\n"
    else:
        text = run_divergence_report(a, b, result, options.tolerance)
    sys.stdout.write(text)
    raise SystemExit(1 if result.first else 0)
