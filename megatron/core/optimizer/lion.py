"""Lion: the sign of a mean of gradients is the update (Chen et al., 2023, arXiv 2302.06675). One moment; three numbers to tune."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Every element moves by lr, whatever the size of its gradient; wants a tenth of AdamW's rate and ten times its decay.

        direction = sign(beta1 m + (1 - beta1) g)      m <- beta2 m + (1 - beta2) g      w <- w - lr (direction + decay w)
    """

    def __init__(self, groups: Sequence[dict[str, Any]], *, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient. The state `exp_avg` is there already."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in (param for param in group["params"] if param.grad is not None):
                moment = self.state[param]["exp_avg"]
                direction = moment.lerp(param.grad, 1.0 - beta1).sign_()
                moment.lerp_(param.grad, 1.0 - beta2)
                param.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
