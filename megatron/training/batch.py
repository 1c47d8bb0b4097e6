"""One microbatch, and the loss over its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# What a loss function gives: the sum over this microbatch's tokens, their number, and [sum, count] pairs to report.
Loss = tuple[Tensor, Tensor, dict[str, Tensor]]
LossFunction = Callable[[Tensor], Loss]


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch on one stage, [b, s] each; a stage that needs nothing of the text has None.

    hidden: the message of the stage before. documents: which document each position belongs to.
    """

    tokens: Tensor | None = None
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
    hidden: Tensor | None = None

    @staticmethod
    def from_arrays(arrays: Mapping[str, np.ndarray], device: torch.device, *, positions: bool) -> Batch:
        """A batch of a GPT dataset. positions: they do not simply count, so that layers must be told."""
        on = {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in arrays.items()
              if name != "dataset_id"}
        return Batch(tokens=on["tokens"], labels=on["labels"], loss_mask=on["loss_mask"],
                     positions=on["position_ids"] if positions else None, documents=on.get("document_ids"))


def masked_loss(losses: Tensor, mask: Tensor) -> Loss:
    """The loss of the tokens that count. losses, mask: [b, s]."""
    mask = mask.to(losses.dtype)
    total, count = (losses * mask).sum(), mask.sum()
    return total, count, {"lm loss": torch.stack((total.detach(), count))}
