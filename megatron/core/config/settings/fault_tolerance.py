"""What a run looks for in itself, what it leaves behind when it fails, and when it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.flags.declare import flag


@dataclass(frozen=True, slots=True)
class FaultToleranceConfig:
    """Faults. What a run looks for in itself, what it leaves behind when it fails, and when it goes on."""

    error_dir: str | None = flag(
        None,
        "folder for what failing ranks leave: errors, hangs, failure dumps of bad steps; left out: faults in --save",
        role="free",
    )
    hang_timeout_minutes: float | None = flag(
        None,
        "minutes in which a rank does nothing new, after which all ranks say where they are and end; 0: never; left out: nine "
        "tenths of --distributed-timeout-minutes",
        role="free",
    )
    log_straggler: bool = flag(
        False, "time of each rank's own work, without waits, and the slowest ranks after the log line", role="free"
    )
    straggler_minmax_count: int = flag(
        1, "how many of the fastest and of the slowest ranks --log-straggler names", role="free"
    )
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None,
        "iterations between comparisons of all that ranks must hold alike: replicas of weights and optimizer state, counters, "
        "random streams",
        role="free",
    )
    on_bad_step: Literal["stop", "skip", "rollback"] | None = flag(
        None,
        "look at every step before its update, keep the evidence of a bad one, and then stop, or go on without its data: from "
        "where the run is, or from the last checkpoint; left out: stop at the next report",
        role="training",
    )
    check_for_spiky_loss: bool = flag(
        False, "a loss far above those of the last steps makes a step bad, too", role="training"
    )
    check_for_large_grads: bool = flag(
        False, "a gradient norm 10 times the largest of the last steps makes a step bad, too", role="training"
    )
    max_bad_steps: int = flag(
        10, "bad steps after which --on-bad-step skip and rollback stop all the same", role="training"
    )
    failure_dump_weights: bool = flag(
        False, "the failure dump of a bad step holds the weights, so that it can be replayed exactly", role="free"
    )

    rerun_mode: Literal["disabled", "validate_results", "report_stats", "report_determinism_stats"] | None = flag(
        None,
        "validate_results: a step with a bad result is run again in place, and after a restart on other devices, to tell a fault of "
        "the machine from a correct result; report_stats (also report_determinism_stats): every step is run twice, and the log says by "
        "how much the results differ; left out: disabled, or validate_results with --error-injection-rate",
        role="free",
    )
    error_injection_rate: int = flag(
        0, "about one step in so many gets a bad result on purpose, to try --rerun-mode; 0: none", role="free"
    )
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = flag(
        "transient_error",
        "injected results that come again everywhere, that do not come again, or that come again on the same device only",
        role="free",
    )
    result_rejected_tracker_filename: str | None = flag(
        None,
        "file to which ranks append their rejected results; iterations that were rejected twice on a rank are passed over",
        role="free",
    )

    @property
    def effective_rerun_mode(self) -> Literal["disabled", "validate_results", "report_stats"]:
        """Which steps run twice: none (disabled), those with bad results (validate_results), or all (report_stats)."""
        if self.rerun_mode is None:
            return "validate_results" if self.error_injection_rate else "disabled"
        return "report_stats" if self.rerun_mode == "report_determinism_stats" else self.rerun_mode

    @property
    def validates_steps(self) -> bool:
        """Whether every step is checked before its update."""
        return (
            self.on_bad_step is not None
            or self.check_for_spiky_loss
            or self.check_for_large_grads
            or self.effective_rerun_mode != "disabled"
        )
