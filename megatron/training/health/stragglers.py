"""Who holds the others up: the time that each rank itself needs for the forward and backward passes of a step.

Waits for other ranks are left out, as far as they are known: those for messages and for collectives inside of a layer. On
a GPU the time is that of its stream. All ranks wait for the slowest in every step, so their whole step times are alike;
their own times are not.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from megatron.core.parallel import collectives
from megatron.core.parallel.device import Stopwatch
from megatron.core.parallel.mesh import Mesh
from megatron.training.health.failures import rank_and_node_text
from megatron.training.state.hooks import StepHooks


class StragglerDetector(StepHooks):
    """Times this rank's own work from its creation on, and compares all ranks in the log. count: ranks named at each end."""

    def __init__(self, mesh: Mesh, *, count: int = 1) -> None:
        self._mesh, self._count = mesh, count
        self._stopwatch = Stopwatch(mesh.device)
        mesh.flight_recorder.stopwatch = self._stopwatch
        place = f"tensor {mesh.tp.rank}, context {mesh.cp.rank}, pipeline {mesh.pp.rank}, data {mesh.dp.rank}"
        self._places = collectives.gather_objects(f"{rank_and_node_text(mesh.world.rank)} ({place})", mesh.world)

    def interval_line(self, steps: int) -> str:
        """Return a line on the ranks' own time per step, over `steps` steps. Collective."""
        seconds = collectives.gather_objects(self._stopwatch.take_seconds() / max(1, steps), self._mesh.world)
        return straggler_line(seconds, self._places, count=self._count)


def straggler_line(seconds: Sequence[float], places: Sequence[str], *, count: int) -> str:
    """Return a line that names the slowest and fastest ranks. seconds, places: of every rank, per step."""
    rows = sorted(zip(seconds, places, strict=True), key=lambda row: row[0])
    texts = [f"{own * 1000.0:.1f} {place}" for own, place in rows]
    return (
        f"straggler: own time per iteration (ms): median {statistics.median(seconds) * 1000.0:.1f} | fastest "
        f"{', '.join(texts[:count])} | slowest {', '.join(texts[::-1][:count])}"
    )
