"""Named stopwatches, compared across ranks, printed as Megatron prints them.

    timers = Timers(level=1, option="minmax", synchronize=..., barrier=..., gather=...)
    with timers("forward-backward", level=1):
        ...
    times = timers.collect(STEP_TIMERS, steps=100)        # every rank calls it, with the same names
    text = timer_report_text(times, "minmax")                    # None when nothing ran

A timer has a level, and only timers up to the chosen level run; the others cost one comparison. Level 0 times whole
phases, 1 the parts of a step, 2 everything. A running timer waits for the device before it reads the clock, so higher
levels make the device idle: they are for finding out where time goes, not for normal runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

LogOption = Literal["max", "minmax", "all"]
Times = dict[str, list[float]]  # name -> seconds of each rank, per step

STEP_TIMERS = tuple(
    """
    forward-backward forward-compute backward-compute batch-generator forward-recv forward-send backward-recv
    backward-send forward-send-forward-recv forward-send-backward-recv backward-send-forward-recv
    backward-send-backward-recv forward-backward-send-forward-backward-recv layernorm-grads-all-reduce
    embedding-grads-all-reduce all-grads-sync params-all-gather optimizer-copy-to-main-grad
    optimizer-unscale-and-check-inf optimizer-clip-main-grad optimizer-count-zeros optimizer-inner-step
    optimizer-copy-main-to-model-params optimizer
    """.split()
)


class Timer:
    """One stopwatch. settle: called before every reading of the clock. live: a timer that is not live does nothing."""

    def __init__(self, name: str, *, live: bool, settle: Callable[[], None]) -> None:
        self.name = name
        self.live = live
        self._settle = settle
        self._total = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Start it."""
        if self.live:
            assert self._since is None, f"timer {self.name} is running already"
            self._settle()
            self._since = time.perf_counter()

    def stop(self) -> None:
        """Stop it; the time adds up with earlier ones."""
        if self.live:
            assert self._since is not None, f"timer {self.name} is not running"
            self._settle()
            self._total += time.perf_counter() - self._since
            self._since = None

    def elapsed(self) -> float:
        """Return the seconds since the last call and reset them; a running timer keeps running."""
        running = self._since is not None
        if running:
            self.stop()
        seconds, self._total = self._total, 0.0
        if running:
            self.start()
        return seconds

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.stop()
        else:
            # The other ranks may not get here, so do not wait for them on the way out of an error.
            self._since = None


class Timers:
    """All timers of a rank, by name. synchronize: waits until the device has finished. barrier: waits for all ranks, at
    every reading of level 0 timers, and of level 1 with `barrier_with_level_1`. gather: takes this rank's numbers,
    returns those of every rank.
    """

    def __init__(
        self,
        *,
        level: int,
        option: LogOption = "minmax",
        synchronize: Callable[[], None] = lambda: None,
        barrier: Callable[[], None] = lambda: None,
        gather: Callable[[Sequence[float]], Sequence[Sequence[float]]] = lambda row: [row],
        barrier_with_level_1: bool = True,
    ) -> None:
        self.level = level
        self.option: LogOption = option
        self._synchronize = synchronize
        self._barrier = barrier
        self._gather = gather
        self._last_level_with_barrier = 1 if barrier_with_level_1 else 0
        self._timers: dict[str, tuple[Timer, int]] = {}

    def __call__(self, name: str, level: int = 2) -> Timer:
        """The timer of this name, made when it is first asked for."""
        if name not in self._timers:
            assert level in (0, 1, 2), f"timer {name} has level {level}, not 0, 1 or 2"
            settle = self._synchronize if level > self._last_level_with_barrier else self._barrier_and_synchronize
            self._timers[name] = Timer(name, live=level <= self.level, settle=settle), level
        timer, known = self._timers[name]
        assert known == level, f"timer {name} was made with level {known} and is now asked for with level {level}"
        return timer

    def _barrier_and_synchronize(self) -> None:
        self._barrier()
        self._synchronize()

    def collect_times_of_all_ranks(self, names: Sequence[str] = STEP_TIMERS, *, steps: int = 1) -> Times:
        """Return the seconds of these timers on every rank by `steps`, and reset them; without those that ran nowhere.
        Collective: every rank calls it with the same names, whether or not it has such timers.
        """
        row = [self._timers[name][0].elapsed() if name in self._timers else 0.0 for name in names]
        rows = self._gather(row)
        table = {name: [ranks[index] / steps for ranks in rows] for index, name in enumerate(names)}
        return {name: seconds for name, seconds in table.items() if any(seconds)}


def timer_report_text(times: Mapping[str, Sequence[float]], option: LogOption) -> str | None:
    """Return Megatron's timer lines in ms, without ranks where a timer did not run; None if `times` is empty."""
    if not times:
        return None
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name, ranks in times.items():
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {1000 * seconds:.2f}" for rank, seconds in enumerate(ranks) if seconds > 0]
        return "\n".join(lines)
    lines = ["max time across ranks (ms):" if option == "max" else "(min, max) time across ranks (ms):"]
    for name, ranks in times.items():
        ran = [1000 * seconds for seconds in ranks if seconds > 0]
        formatted = f"{max(ran):.2f}" if option == "max" else f"({min(ran):.2f}, {max(ran):.2f})"
        lines.append(f"    {(name + ' ').ljust(48, '.')}: {formatted}")
    return "\n".join(lines)


def max_times_by_tag(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the slowest rank's seconds of each timer, by TensorBoard tag."""
    return {f"{name}-time": max(ranks) for name, ranks in times.items()}
