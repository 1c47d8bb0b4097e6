"""What a run looks for in itself, what it leaves behind when it fails, and when it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.flags import flag


@dataclass(frozen=True, slots=True)
class FaultConfig:
    """Faults.

    What a run looks for in itself, what it leaves behind when it fails, and when it goes on.
    """

    error_dir: str | None = flag(
        None, "folder for what failing ranks leave: errors, hangs, bundles of bad steps; left out: faults in --save")
    hang_timeout_minutes: float | None = flag(
        None, "minutes in which a rank does nothing new, after which all ranks say where they are and end; 0: never; left out: nine "
              "tenths of --distributed-timeout-minutes")
    log_straggler: bool = flag(False, "time of each rank's own work, without waits, and the slowest ranks after the log line")
    straggler_minmax_count: int = flag(1, "how many of the fastest and of the slowest ranks --log-straggler names")
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None, "iterations between comparisons of all that ranks must hold alike: replicas of weights and optimizer state, counters, "
              "random streams")
    on_bad_step: Literal["stop", "skip", "rollback"] | None = flag(
        None, "look at every step before its update, keep the evidence of a bad one, and then stop, or go on without its data: from "
              "where the run is, or from the last checkpoint; left out: stop at the next report")
    check_for_spiky_loss: bool = flag(False, "a loss far above those of the last steps makes a step bad, too")
    check_for_large_grads: bool = flag(False, "a gradient norm 10 times the largest of the last steps makes a step bad, too")
    max_bad_steps: int = flag(10, "bad steps after which --on-bad-step skip and rollback stop all the same")
    bundle_weights: bool = flag(False, "the bundle of a bad step holds the weights, so that it can be replayed exactly")

    @property
    def guards_steps(self) -> bool:
        """Whether every step is judged before its update."""
        return self.on_bad_step is not None or self.check_for_spiky_loss or self.check_for_large_grads
