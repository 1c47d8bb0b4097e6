"""Optimizers that update each element independently: AdamW, SGD and Lion.

AdamW and SGD call torch's functions instead of its optimizer classes, whose first use imports torch's compiler: that
takes longer than everything else that a run does before its first step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.distributed.buffers import Segment
from megatron.core.optimizer.rule import Owned, Slot, UpdateRule, scale_gradients


class Elementwise(UpdateRule):
    """Base of the elementwise rules, whose moments have the shape of the main weights.

    moments: names of the moments. state: main weight -> name -> tensor, allocated at construction, so that every
    checkpoint holds all of them; and "step", a counter, if `counts`.
    """

    moments: tuple[str, ...]
    counts = False

    def __init__(self, owned: Owned, config: OptimizerConfig) -> None:
        super().__init__(owned, config)
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        for _, param in owned:
            self.state[param] = {slot: torch.zeros_like(param) for slot in self.moments}
            if self.counts:
                self.state[param]["step"] = torch.zeros((), dtype=torch.float32, device=param.device)

    @torch.no_grad()
    def step(self, factor: float | Tensor) -> None:
        """Update every main weight that has a gradient, multiplied by `factor`, a scalar."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                states = {slot: [self.state[param][slot] for param in params] for slot in self.state[params[0]]}
                self._update(params, scale_gradients(params, factor), states, group["lr"], group["weight_decay"])

    def slots(self, segment: Segment, main: Tensor) -> Iterator[Slot]:
        """Yield the moments of a segment, each [elements]."""
        return ((slot, segment, self.state[main][slot]) for slot in self.moments)

    @property
    def steps(self) -> int:
        """Number of updates so far; 0 for a rule that does not count them."""
        return next((int(state["step"]) for state in self.state.values() if "step" in state), 0)

    @steps.setter
    def steps(self, count: int) -> None:
        """Continue counting from here."""
        for state in self.state.values():
            if "step" in state:
                state["step"].fill_(count)

    @abstractmethod
    def _update(
        self, params: list[Tensor], gradients: list[Tensor], states: dict[str, list[Tensor]], lr: float, decay: float
    ) -> None:
        """Update parameters in place. states: name -> one tensor for each parameter. decay: weight decay."""


class AdamW(Elementwise):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, arXiv 1711.05101)."""

    moments = ("exp_avg", "exp_avg_sq")
    counts = True

    def _update(
        self, params: list[Tensor], gradients: list[Tensor], states: dict[str, list[Tensor]], lr: float, decay: float
    ) -> None:
        adamw(
            params,
            gradients,
            states["exp_avg"],
            states["exp_avg_sq"],
            [],
            states["step"],
            fused=True,
            amsgrad=False,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            lr=lr,
            weight_decay=decay,
            eps=self.config.adam_eps,
            maximize=False,
        )


class SGD(Elementwise):
    """Stochastic gradient descent with momentum; weight decay is added to the gradient."""

    moments = ("momentum_buffer",)

    def _update(
        self, params: list[Tensor], gradients: list[Tensor], states: dict[str, list[Tensor]], lr: float, decay: float
    ) -> None:
        sgd(
            params,
            gradients,
            list(states["momentum_buffer"]),
            foreach=True,
            weight_decay=decay,
            momentum=self.config.sgd_momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class Lion(Elementwise):
    """Lion: every element changes by lr, whatever the size of its gradient (Chen et al., 2023, arXiv 2302.06675).

        direction = sign(beta1 m + (1 - beta1) g)      m <- beta2 m + (1 - beta2) g      w <- w - lr (direction + decay w)

    It has one moment, and needs about a tenth of AdamW's learning rate and ten times its weight decay.
    """

    moments = ("exp_avg",)

    def _update(
        self, params: list[Tensor], gradients: list[Tensor], states: dict[str, list[Tensor]], lr: float, decay: float
    ) -> None:
        for param, gradient, moment in zip(params, gradients, states["exp_avg"], strict=True):
            direction = moment.lerp(gradient, 1.0 - self.config.lion_beta1).sign_()
            moment.lerp_(gradient, 1.0 - self.config.lion_beta2)
            param.mul_(1.0 - lr * decay).add_(direction, alpha=-lr)


RULES: dict[str, type[Elementwise]] = {"adam": AdamW, "sgd": SGD, "lion": Lion}
