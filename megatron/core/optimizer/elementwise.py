"""Optimizers that update each element independently: AdamW, SGD and Lion.

AdamW is an operation with kernels (kernels/ops/adamw.py). SGD calls torch's function instead of its optimizer class, whose first use
imports torch's compiler: that takes longer than everything else that a run does before its first step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.kernels.ops.adamw import AdamStepSettings, AdamTensors, adamw
from megatron.core.optimizer.rule import Owned, Slot, UpdateRule, UpdateRuleContext, scale_gradients
from megatron.core.parallel.device import storage_id_and_offset


class ElementwiseRule(UpdateRule):
    """Base of the elementwise rules, whose moments have the shape of the main weights.

    state: main weight -> name -> tensor, allocated at construction, so that every checkpoint holds all of them.
    """

    def __init__(self, owned: Owned, config: OptimizerConfig, context: UpdateRuleContext) -> None:
        super().__init__(owned, config, context)
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        for _, param in owned:
            self.state[param] = {slot: torch.zeros_like(param) for slot in self.slots}

    @torch.no_grad()
    def step(self, factor: float | Tensor) -> None:
        """Update every main weight that has a gradient, multiplied by `factor`, a scalar."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(params, factor, group["lr"], group["weight_decay"])

    def checkpoint_state(self, segment: OwnedSegment, main: Tensor) -> Iterator[Slot]:
        """Return an iterator over (slot name, segment, values [elements]) of a segment's moments."""
        return ((slot, segment, self.state[main][slot]) for slot in self.slots)

    @abstractmethod
    def _update(self, params: list[Tensor], factor: float | Tensor, lr: float, decay: float) -> None:
        """Update parameters in place by their gradients times `factor`. decay: weight decay."""


class AdamW(ElementwiseRule):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, arXiv 1711.05101), which writes the weights itself.

    counts: main weight -> number of its updates, on the host, which no step has to wait for.
    """

    slots = ("exp_avg", "exp_avg_sq")
    writes_weights = True

    def __init__(self, owned: Owned, config: OptimizerConfig, context: UpdateRuleContext) -> None:
        super().__init__(owned, config, context)
        self.kernel = context.adamw
        self.counts = dict.fromkeys((param for _, param in owned), 0)
        self._offloaded = {param for segment, param in owned if param.device != segment.data.device}
        self._weights = {
            param: segment.data
            for segment, param in owned
            if param not in self._offloaded and storage_id_and_offset(param) != storage_id_and_offset(segment.data)
        }

    @property
    def steps(self) -> int:
        """Number of updates so far."""
        return next(iter(self.counts.values()), 0)

    @steps.setter
    def steps(self, count: int) -> None:
        """Continue counting from here."""
        self.counts = dict.fromkeys(self.counts, count)

    def _update(self, params: list[Tensor], factor: float | Tensor, lr: float, decay: float) -> None:
        tensors, config = list[AdamTensors](), self.config
        for param in params:
            self.counts[param] += 1
            assert param.grad is not None, "parameters without a gradient are left out"
            state = self.state[param]
            tensors.append(
                AdamTensors(param, param.grad, state["exp_avg"], state["exp_avg_sq"], self._weights.get(param))
            )
        kernel = adamw if params[0] in self._offloaded else self.kernel
        kernel(
            tensors,
            factor,
            AdamStepSettings(lr, decay, config.adam_beta1, config.adam_beta2, config.adam_eps, self.counts[params[0]]),
        )


class SGD(ElementwiseRule):
    """Stochastic gradient descent with momentum; weight decay is added to the gradient."""

    slots = ("momentum_buffer",)

    def _update(self, params: list[Tensor], factor: float | Tensor, lr: float, decay: float) -> None:
        sgd(
            params,
            scale_gradients(params, factor),
            [self.state[param]["momentum_buffer"] for param in params],
            foreach=True,
            weight_decay=decay,
            momentum=self.config.sgd_momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class Lion(ElementwiseRule):
    """Lion: every element changes by lr, whatever the size of its gradient (Chen et al., 2023, arXiv 2302.06675).

        direction = sign(beta1 m + (1 - beta1) g)      m <- beta2 m + (1 - beta2) g      w <- w - lr (direction + decay w)

    It has one moment, and needs about a tenth of AdamW's learning rate and ten times its weight decay.
    """

    slots = ("exp_avg",)

    def _update(self, params: list[Tensor], factor: float | Tensor, lr: float, decay: float) -> None:
        for param, gradient in zip(params, scale_gradients(params, factor), strict=True):
            moment = self.state[param]["exp_avg"]
            direction = moment.lerp(gradient, 1.0 - self.config.lion_beta1).sign_()
            moment.lerp_(gradient, 1.0 - self.config.lion_beta2)
            param.mul_(1.0 - lr * decay).add_(direction, alpha=-lr)
