"""One microbatch, and the loss over its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron.core.transformer.passing import Side

# What a loss function gives: the sum over this microbatch's tokens, their number, and [sum, count] pairs to report.
Loss = tuple[Tensor, Tensor, dict[str, Tensor]]
LossFunction = Callable[[Tensor], Loss]
_TOKENS = ("tokens", "text", "text_enc")  # what datasets call the ids that the first stage embeds


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch on one stage, [b, s] each; a stage that needs nothing of the text has None.

    hidden: the first tensor of the message of the stage before; message: all of it. documents: which document each position
    belongs to. extras: what else a kind of sample holds, by its name there. side: where layers note their own losses.
    """

    tokens: Tensor | None = None
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
    hidden: Tensor | None = None
    message: tuple[Tensor, ...] | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    side: Side | None = None

    @staticmethod
    def from_arrays(arrays: Mapping[str, np.ndarray], device: torch.device, *, positions: bool) -> Batch:
        """A batch of any dataset. positions: they do not simply count, so that layers must be told."""
        on = {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in arrays.items()
              if name != "dataset_id"}
        tokens = next(on.pop(name) for name in _TOKENS if name in on)
        places = on.pop("position_ids", None)
        return Batch(tokens=tokens, labels=on.pop("labels"), loss_mask=on.pop("loss_mask"), positions=places if positions else None,
                     documents=on.pop("document_ids", None), extras=on)


def masked_loss(losses: Tensor, mask: Tensor) -> Loss:
    """The loss of the tokens that count. losses, mask: [b, s]."""
    mask = mask.to(losses.dtype)
    total, count = (losses * mask).sum(), mask.sum()
    return total, count, {"lm loss": torch.stack((total.detach(), count))}
