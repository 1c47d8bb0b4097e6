"""Draw a simulated plan as PNG or SVG. For tools only: nothing that trains imports this file, nor matplotlib."""

from __future__ import annotations

from typing import IO

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from megatron.core.pipeline_parallel.schedules import Plan, num_plan_stages
from megatron.core.pipeline_parallel.timeline import Timeline

COLORS = {"F": "Blues", "B": "Greens", "W": "Purples", "R": "Oranges"}
ROW_INCHES = 0.4
UNIT_INCHES = 0.3
WIDEST_INCHES = 40.0


def draw_pipeline_timeline(plan: Plan, timeline: Timeline, file: IO[bytes], format: str) -> None:
    """Draw one row for each rank with time to the right, in a format such as png or svg.

    Forward passes are blue, backward passes green, delayed weight gradients purple, reductions orange; later chunks are
    darker. A box is labelled with its microbatch; in SVG its id is the action, such as F4.0.
    """
    chunks = num_plan_stages(plan) // len(plan)
    span = max(end for row in timeline.end for end in row)
    figure = Figure(
        figsize=(min(1.5 + UNIT_INCHES * span, WIDEST_INCHES), 1.2 + ROW_INCHES * len(plan)), layout="constrained"
    )
    axes = figure.add_subplot()
    for rank, (row, starts, ends) in enumerate(zip(plan, timeline.start, timeline.end, strict=True)):
        for action, start, end in zip(row, starts, ends, strict=True):
            color = colormaps[COLORS[action.op]](0.3 + 0.4 * (action.stage // len(plan)) / chunks)
            axes.add_patch(
                Rectangle(
                    (start, rank + 0.05),
                    end - start,
                    0.9,
                    facecolor=color,
                    edgecolor="white",
                    linewidth=0.5,
                    gid=str(action),
                )
            )
            if end > start:
                label = "R" if action.op == "R" else str(action.microbatch)
                axes.text((start + end) / 2, rank + 0.5, label, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set(
        xlim=(0, span),
        ylim=(len(plan), 0),
        xlabel="time",
        yticks=[rank + 0.5 for rank in range(len(plan))],
        yticklabels=[f"rank {rank}" for rank in range(len(plan))],
        title=f"bubble {timeline.bubble:.1%}, peak activations {max(timeline.peak)}",
    )
    axes.spines[:].set_visible(False)
    figure.savefig(file, format=format)
