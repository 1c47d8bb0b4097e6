"""Plot the loss curves of a run: the JSONL log of --log-jsonl in, a PNG out.

    megatron plot-loss runs/quickstart/log.jsonl --output loss.png --line "unigram entropy" 6.89

A log holds every stretch of a run, one after the other; where a run resumed, the picture has a thin upright line. Several
logs give several curves. Steps that were written twice, because a run resumed from before them, count as written last.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.cli.tool_parser import ToolArgumentParser
from megatron.core.datasets.storage import atomic_file, read_text_lines

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
if HAS_MATPLOTLIB:
    from matplotlib.figure import Figure


class UnreadableLogError(Exception):
    """A log that is no JSON or lacks the loss."""


@dataclass(frozen=True, slots=True)
class LossCurves:
    """The curves of one loss in a log. train, valid: (iteration, loss), ascending. resumed: iterations of resumes."""

    name: str
    train: list[tuple[int, float]]
    valid: list[tuple[int, float]]
    resumed: list[int]


def read_loss_curves(path: Path, loss: str) -> LossCurves:
    """Read a loss's curves in a log; later lines of an iteration replace earlier ones. `UnreadableLogError`."""
    train: dict[int, float] = {}
    valid: dict[int, float] = {}
    resumed: list[int] = []
    seen: set[str] = set()
    for record in _read_log_records(path):
        kind, losses = record.get("kind"), record.get("losses", {})
        seen.update(losses)
        if kind == "start":
            # What a stretch wrote beyond the iteration at which the next one begins was never part of the run.
            train, valid = _points_up_to(train, record["iteration"]), _points_up_to(valid, record["iteration"])
            resumed += [record["iteration"]] if train else []
        elif kind == "step" and loss in losses:
            train[record["iteration"]] = float(losses[loss])
        elif kind == "validation" and loss in losses and record.get("final") != "test":
            valid[record["iteration"]] = float(losses[loss])
    if not train and not valid:
        known = f"it has {', '.join(sorted(seen))}" if seen else "it has no losses at all"
        raise UnreadableLogError(f"{path} has no '{loss}'; {known}")
    name = path.stem if path.stem != "log" else path.parent.name
    return LossCurves(name, sorted(train.items()), sorted(valid.items()), resumed)


def _read_log_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a log, line by line. Raises `UnreadableLogError`."""
    for number, line in enumerate(read_text_lines(path), start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise UnreadableLogError(f"{path} line {number} is not JSON: {error}") from None


def _points_up_to(points: dict[int, float], iteration: int) -> dict[int, float]:
    return {at: value for at, value in points.items() if at <= iteration}


def moving_average(points: Sequence[tuple[int, float]], window: int) -> list[tuple[int, float]]:
    """Return the means over the last `window` points (over fewer at the start)."""
    means = []
    for place, (iteration, _) in enumerate(points):
        recent = [value for _, value in points[max(0, place + 1 - window) : place + 1]]
        means.append((iteration, sum(recent) / len(recent)))
    return means


def draw_loss_curves(curves: Iterable[LossCurves], loss: str, lines: Sequence[tuple[str, float]] = ()) -> Figure:
    """Draw each log in its own colour, faint as measured, strong as moving average. lines: (name, value) of levels."""
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="iteration", ylabel=loss)
    for place, curve in enumerate(curves):
        colour = f"C{place}"
        if curve.train:
            window = max(1, len(curve.train) // 40)
            axes.plot(*zip(*curve.train), color=colour, alpha=0.25, linewidth=1)
            axes.plot(*zip(*moving_average(curve.train, window)), color=colour, label=f"{curve.name}: training")
        if curve.valid:
            axes.plot(*zip(*curve.valid), color=colour, marker="o", linestyle="--", label=f"{curve.name}: validation")
        for number, iteration in enumerate(curve.resumed):
            axes.axvline(
                iteration,
                color=colour,
                linewidth=0.8,
                linestyle=":",
                label=f"{curve.name}: resumed" if number == 0 else None,
            )
    for name, height in lines:
        axes.axhline(height, color="black", linewidth=1, linestyle="-.", label=f"{name} {height:.2f}")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the curves into a PNG."""
    parser = ToolArgumentParser(description=__doc__, allow_abbrev=True)
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="files that --log-jsonl wrote")
    parser.add_argument("--output", type=Path, default=Path("loss.png"), metavar="PNG", help="default: loss.png")
    parser.add_argument("--loss", default="lm loss", metavar="NAME", help="which loss (default: 'lm loss')")
    parser.add_argument(
        "--line",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="a level line to compare with; may be given several times",
    )
    args = parser.parse_args(arguments)
    if not HAS_MATPLOTLIB:
        sys.exit("plot_loss.py needs the package matplotlib, which is not installed: pip install matplotlib")
    try:
        figure = draw_loss_curves(
            [read_loss_curves(path, args.loss) for path in args.logs],
            args.loss,
            [(name, float(value)) for name, value in args.line],
        )
        with atomic_file(args.output) as file:
            figure.savefig(file, format=args.output.suffix[1:] or "png")
    except (UnreadableLogError, OSError, ValueError) as error:
        sys.exit(f"plot_loss.py: {error}")
    print(f"{args.output}: {args.loss} of {', '.join(str(path) for path in args.logs)}")
