r"""Learning rate and weight decay as pure functions of the number of consumed samples.

    rate
     max |      ____
         |     /     \__           warm-up, then one of: constant, linear, cosine,
         |    /         \__        inverse-square-root, WSD (flat, then an anneal)
     min |   /             \_____
         +--+------------+--+-----  samples
          warm-up     horizon

A schedule has no state: the caller counts samples, adds a step's batch after each step that updated the parameters (a
step skipped for an overflow adds nothing), and calls `lr(samples)`. Since samples and not iterations are counted,
batch-size ramp-up does not change the curve.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.config.flags.declare import raise_config_error_if
from megatron.core.config.settings.optim import OptimizerConfig, ScheduleConfig
from megatron.core.config.settings.run import TrainConfig


@dataclass(frozen=True, slots=True)
class OptimizerParamSchedule:
    """The curves of learning rate and weight decay. Horizons are in samples; the warm-up may be a fraction of a sample."""

    max_lr: float
    min_lr: float
    warmup_init: float
    warmup_samples: float
    decay_samples: int
    decay_style: str
    wsd_samples: int | None
    wsd_style: str
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_samples: int
    weight_decay_style: str

    @classmethod
    def build(cls, schedule: ScheduleConfig, optimizer: OptimizerConfig, train: TrainConfig) -> OptimizerParamSchedule:
        """Build the curves from the settings. Raises one `ConfigError` with everything that does not fit."""
        raise_config_error_if(_schedule_flag_problems(schedule, optimizer, train))
        assert schedule.lr is not None, "the rules refuse a run without --lr"
        total: int
        if train.train_iters is not None:
            # With iterations the horizon counts full batches, so ramp-up reaches it later than iteration N.
            scale, total = train.global_batch_size, train.train_iters
            decay, warmup, wsd = schedule.lr_decay_iters, schedule.lr_warmup_iters, schedule.lr_wsd_decay_iters
        else:
            assert train.train_samples is not None, "the rules refuse a run without a length"
            scale, total = 1, train.train_samples
            decay, warmup, wsd = schedule.lr_decay_samples, schedule.lr_warmup_samples, schedule.lr_wsd_decay_samples
        horizon = (total if decay is None else decay) * scale
        fraction, (start, end) = schedule.lr_warmup_fraction, _weight_decay_ends(optimizer)
        result = cls(
            max_lr=schedule.lr,
            min_lr=schedule.min_lr,
            warmup_init=schedule.lr_warmup_init,
            warmup_samples=warmup * scale if fraction is None else fraction * horizon,
            decay_samples=horizon,
            decay_style=schedule.lr_decay_style,
            wsd_samples=None if wsd is None else wsd * scale,
            wsd_style=schedule.lr_wsd_decay_style,
            start_weight_decay=start,
            end_weight_decay=end,
            weight_decay_samples=total * scale,
            weight_decay_style=optimizer.weight_decay_incr_style,
        )
        raise_config_error_if(result._horizon_problems())
        return result

    def lr(self, samples: float) -> float:
        """Return the learning rate of the step after `samples` samples."""
        return self.lr_between(samples, max_lr=self.max_lr, min_lr=self.min_lr)

    def lr_between(self, samples: float, *, max_lr: float, min_lr: float) -> float:
        """Return the learning rate of the step after `samples` samples on the same curve between other bounds."""
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.warmup_init + (max_lr - self.warmup_init) * float(samples) / float(self.warmup_samples)
        if self.decay_style == "constant":
            return max_lr
        if samples > self.decay_samples:
            return min_lr
        if self.decay_style == "inverse-square-root":
            return max(min_lr, max_lr * max(self.warmup_samples, 1) ** 0.5 / max(samples, 1) ** 0.5)
        if self.decay_style == "WSD":
            assert self.wsd_samples is not None, "build() refused a WSD schedule without an anneal"
            since_anneal = samples - (self.decay_samples - self.wsd_samples)
            remaining = (
                1.0 if since_anneal <= 0 else _decay_coefficient(self.wsd_style, since_anneal / self.wsd_samples)
            )
        else:
            remaining = _decay_coefficient(
                self.decay_style, (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
            )
        return min_lr + remaining * (max_lr - min_lr)

    def weight_decay(self, samples: float) -> float:
        """Return the weight decay of the step after `samples` samples."""
        if samples > self.weight_decay_samples or self.weight_decay_style == "constant":
            return self.end_weight_decay
        done = 1.0 - _decay_coefficient(self.weight_decay_style, samples / self.weight_decay_samples)
        return self.start_weight_decay + done * (self.end_weight_decay - self.start_weight_decay)

    def state(self) -> dict[str, float | int | str | None]:
        """Return the settings for a checkpoint; `from_state` restores them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> OptimizerParamSchedule:
        """Return the schedule that a checkpoint was written with (`--use-checkpoint-opt-param-scheduler`)."""
        return cls(**{field.name: state[field.name] for field in dataclasses.fields(cls)})

    def differences_from_saved(self, saved: Mapping[str, Any]) -> list[str]:
        """Return how a checkpoint's schedule differs from this one, a line a setting; empty if the curves are equal."""
        unused = (
            self._unused_settings() & OptimizerParamSchedule.from_state({**self.state(), **saved})._unused_settings()
        )
        return [
            f"{name.replace('_', ' ')} is {current} now and was {saved.get(name)} in the checkpoint"
            for name, current in self.state().items()
            if saved.get(name) != current and name not in unused
        ]

    def _unused_settings(self) -> set[str]:
        """Return the names of settings that no point of the curves depends on."""
        unused = {
            "decay_samples": self.decay_style == "constant",
            "weight_decay_samples": self.weight_decay_style == "constant",
            "start_weight_decay": self.weight_decay_style == "constant",
            "warmup_init": not self.warmup_samples,
            "wsd_samples": self.decay_style != "WSD",
            "wsd_style": self.decay_style != "WSD",
        }
        return {name for name, holds in unused.items() if holds}

    def _horizon_problems(self) -> list[str]:
        """Return a sentence for each horizon (warm-up, WSD anneal) that does not fit into the decay horizon."""
        problems = []
        if self.warmup_samples >= self.decay_samples:
            problems.append(
                f"the warm-up of {self.warmup_samples:g} samples does not end before the decay horizon of "
                f"{self.decay_samples} samples; shorten --lr-warmup-... or lengthen --lr-decay-..."
            )
        if self.wsd_samples is not None and not 0 < self.wsd_samples <= self.decay_samples:
            problems.append(
                f"the WSD anneal of {self.wsd_samples} samples does not fit into the decay horizon of "
                f"{self.decay_samples} samples"
            )
        return problems


def resolve_resumed_schedule(
    current: OptimizerParamSchedule,
    saved: Mapping[str, Any],
    *,
    override: bool,
    use_checkpoint: bool,
    longer: str = "",
    samples: float = 0,
) -> OptimizerParamSchedule:
    """Return the schedule of a resumed run: that of the flags, that of the checkpoint, or either if they are equal.

    override: `--override-opt-param-scheduler`. use_checkpoint: `--use-checkpoint-opt-param-scheduler`. longer: a
    message if the run has another length than the checkpoint's, which the decay follows. samples: consumed so far.
    Raises ConfigError if the schedules differ and no flag selects one.
    """
    if override and use_checkpoint:
        raise_config_error_if(
            ["--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other; give one"]
        )
    if override:
        return current
    if use_checkpoint:
        return OptimizerParamSchedule.from_state(saved)
    lines = current.differences_from_saved(saved)
    if longer and lines:
        previous = OptimizerParamSchedule.from_state(saved)
        raise_config_error_if(
            [
                f"{longer}, and the decay follows it ({'; '.join(lines)}). One flag goes on: --override-opt-param-scheduler takes the new "
                f"curve (the next step has a learning rate of {current.lr(samples):.6g}, where it would have been {previous.lr(samples):.6g}), or "
                f"--use-checkpoint-opt-param-scheduler keeps the old one, at whose end the rate is {previous.lr(previous.decay_samples):.6g}"
            ]
        )
    raise_config_error_if(
        f"{line}; --override-opt-param-scheduler takes the new value, --use-checkpoint-opt-param-scheduler the old"
        for line in lines
    )
    return current


def _decay_coefficient(style: str, ratio: float) -> float:
    """Return the share of a decay from 1 (at ratio 0) to 0 (at ratio 1) that remains after `ratio` of it."""
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, ratio) - 1.0
    assert style == "minus_sqrt", f"the configs allow no decay style {style!r}"
    return 1.0 - math.sqrt(ratio)


def _weight_decay_ends(optimizer: OptimizerConfig) -> tuple[float, float]:
    """Return the first and the last weight decay, each of which is --weight-decay if it is not given."""
    start, end, both = optimizer.start_weight_decay, optimizer.end_weight_decay, optimizer.weight_decay
    return both if start is None else start, both if end is None else end


def _schedule_flag_problems(schedule: ScheduleConfig, optimizer: OptimizerConfig, train: TrainConfig) -> list[str]:
    """Return a sentence for each problem of the flags that can be seen before any curve is built."""
    assert schedule.lr is not None, "the rules refuse a run without --lr"
    problems = []
    if not 0.0 <= schedule.min_lr <= schedule.lr:
        problems.append(f"--min-lr {schedule.min_lr} must lie between 0 and --lr {schedule.lr}")
    if schedule.lr_warmup_init > schedule.lr:
        problems.append(f"--lr-warmup-init {schedule.lr_warmup_init} is above --lr {schedule.lr}")
    other = "samples" if train.train_iters is not None else "iters"
    unit = "iters" if train.train_iters is not None else "samples"
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if getattr(schedule, f"{name}_{other}"):
            flag = "--" + name.replace("_", "-")
            problems.append(f"{flag}-{other} does not go with --train-{unit}; say it as {flag}-{unit}")
    if schedule.lr_warmup_fraction is not None and (schedule.lr_warmup_iters or schedule.lr_warmup_samples):
        problems.append(
            "--lr-warmup-fraction and --lr-warmup-iters or --lr-warmup-samples say the warm-up twice; give one"
        )
    if schedule.lr_decay_style == "WSD" and getattr(schedule, f"lr_wsd_decay_{unit}") is None:
        problems.append(f"--lr-decay-style WSD needs the length of its anneal; give --lr-wsd-decay-{unit}")
    start, end = _weight_decay_ends(optimizer)
    if optimizer.weight_decay_incr_style == "constant" and start != end:
        problems.append(f"--weight-decay-incr-style constant cannot go from {start} to {end}; choose linear or cosine")
    return problems
