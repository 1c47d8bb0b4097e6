"""The loss scale of fp16 training: constant, or adapted to overflows (Micikevicius et al., 2018)."""

from __future__ import annotations

from megatron.core.config.settings.optim import PrecisionConfig

_GROWTH, _BACKOFF = 2.0, 0.5


class LossScaler:
    """The factor of the loss before the backward pass.

    A dynamic scale doubles after `window` consecutive steps without overflow, and halves once `hysteresis` steps
    overflowed; the count of overflows is reset only when the scale grows.
    """

    def __init__(self, precision: PrecisionConfig) -> None:
        self.dynamic = precision.fp16 and precision.loss_scale is None
        self.scale = 1.0
        if precision.fp16:
            self.scale = precision.initial_loss_scale if precision.loss_scale is None else precision.loss_scale
        self.smallest, self.window = precision.min_loss_scale, int(precision.loss_scale_window)
        self.hysteresis = self.overflows_left = precision.hysteresis
        self.good_steps = 0

    def update(self, overflow: bool) -> None:
        """Adapt a dynamic scale after a step. overflow: the step's gradients were not finite."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = 0
            self.overflows_left -= 1
            if self.overflows_left <= 0:
                self.scale = max(self.scale * _BACKOFF, self.smallest)
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.good_steps, self.overflows_left = 0, self.hysteresis
            self.scale *= _GROWTH

    def state(self) -> dict[str, float]:
        """Return the state that a resumed run needs."""
        return {"scale": self.scale, "good_steps": self.good_steps, "overflows_left": self.overflows_left}

    def load(self, state: dict[str, float]) -> None:
        """Restore a state; a constant scale stays as given on the command line."""
        if self.dynamic:
            self.scale = float(state["scale"])
            self.good_steps, self.overflows_left = int(state["good_steps"]), int(state["overflows_left"])
