"""One microbatch, and the loss over its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from megatron.core.config.settings.model import MTPConfig
from megatron.core.context_parallel.sequence import Zigzag
from megatron.core.kernels.documents import remember_starts
from megatron.core.models.mtp import MTPInputs, MTPLosses
from megatron.core.models.vision import IdsWithImages
from megatron.core.parallel.mesh import Axis
from megatron.core.transformer.passing import MicrobatchContext

# What a loss function gives: the sum over this microbatch's tokens, their number, and [sum, count] pairs to report.
Loss = tuple[Tensor, Tensor, dict[str, Tensor]]
LossFunction = Callable[[Any], Loss]  # of what the last stage returns
_TOKENS = ("tokens", "text", "text_enc")  # what datasets call the ids that the first stage embeds


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch on one stage, [b, s] each; a stage that needs nothing of the text has None.

    hidden: the first tensor of the message of the stage before; message: all of it. documents: which document each position
    belongs to, and stay those of whole sequences where the others are cut. extras: what else a kind of sample holds, by its
    name there, and what `with_future_tokens` adds. microbatch_context: where layers note their own losses.
    samples: the numbers of its samples, where they have some. images: [n, channels, height, width], of all its samples; where
    their rows stand is in the extra `image_slots`, [b, s] (see `models/vision.py`).
    """

    tokens: Tensor | None = None
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
    hidden: Tensor | None = None
    message: tuple[Tensor, ...] | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    microbatch_context: MicrobatchContext | None = None
    samples: tuple[int, ...] | None = None
    images: Tensor | None = None

    @staticmethod
    def from_arrays(arrays: Mapping[str, np.ndarray], device: torch.device, *, positions: bool) -> Batch:
        """Make a batch from the arrays of any dataset, each [b, s] or [b, ...].

        positions: they do not simply count, so layers must be told.
        """
        on = {
            name: torch.from_numpy(array).to(device, non_blocking=True)
            for name, array in arrays.items()
            if name != "dataset_id"
        }
        tokens = next(on.pop(name) for name in _TOKENS if name in on)
        places = on.pop("position_ids", None)
        if "document_ids" in on:
            remember_starts(on["document_ids"], arrays["document_ids"])
        return Batch(
            tokens=tokens,
            labels=on.pop("labels"),
            loss_mask=on.pop("loss_mask"),
            positions=places if positions else None,
            documents=on.pop("document_ids", None),
            images=on.pop("images", None),
            extras=on,
        )

    def with_future_tokens(self, depths: int, *, per_token: bool = True) -> Batch:
        """The batch with what multi-token prediction reads, of whole sequences: before anything of them is cut.

        Depth k of a token reads the id k places further, and predicts the one after that: its label is the main label k
        places further, and counts if that one does and if the predicted token is of the token's own document. What lies behind
        the end of the sequence is 0, and does not count.

        A depth has fewer tokens than the main loss, and its mean is to weigh as much: its tokens have weights. Those are the ratio
        of both numbers in the microbatch, as in Megatron, or with per_token (one number for the whole step divides all losses) the
        ratio for a sequence of which every token counts, so that no layout changes what a token weighs.
        """
        if self.tokens is None or self.labels is None or self.loss_mask is None:
            return self
        extras = dict(self.extras)
        for depth in range(1, depths + 1):
            counts = _shift_left(self.loss_mask, depth)
            if self.documents is not None:
                # The last label is of a token behind the sequence; its document is taken for that of the last token.
                known = torch.cat((self.documents, self.documents[:, -1:]), dim=1)[:, depth + 1 :]
                counts[:, :-depth] *= known == self.documents[:, :-depth]
            length, number = self.tokens.shape[1], counts.sum(dtype=torch.float64).clamp(min=1)
            ratio = length / max(length - depth, 1) if per_token else self.loss_mask.sum(dtype=torch.float64) / number
            extras |= {
                f"mtp_{depth}_tokens": _shift_left(self.tokens, depth),
                f"mtp_{depth}_labels": _shift_left(self.labels, depth),
                f"mtp_{depth}_loss_mask": counts,
                f"mtp_{depth}_weights": counts.to(torch.float64) * ratio,
            }
        return replace(self, extras=extras)

    def shard_over_context(self, axis: Axis) -> Batch:
        """The batch with this rank's piece of every row. Documents stay whole: attention compares its queries' with all."""
        if axis.group is None or self.tokens is None:
            return self
        cut = Zigzag(self.tokens.shape[1], axis.size)

        def local(rows: Tensor) -> Tensor:
            whole = rows.dim() < 2 or rows.shape[-1] != cut.length
            return rows if whole else cut.shard(rows, axis.rank, dim=-1)

        def given(rows: Tensor | None) -> Tensor | None:
            return None if rows is None else local(rows)

        return replace(
            self,
            tokens=local(self.tokens),
            labels=given(self.labels),
            loss_mask=given(self.loss_mask),
            positions=given(self.positions),
            extras={name: local(rows) for name, rows in self.extras.items()},
        )

    @property
    def ids(self) -> Tensor | IdsWithImages | None:
        """The tokens [b, s], with their images where the data has some."""
        if self.tokens is None or self.images is None:
            return self.tokens
        return IdsWithImages(self.tokens, self.images, self.extras["image_slots"])

    @property
    def targets(self) -> Tensor | None:
        """Return the labels [b, s], -1 where their loss does not count, so that nothing is computed for those."""
        return None if self.labels is None else _masked_labels(self.labels, self.loss_mask)

    @property
    def future_labels(self) -> MTPInputs | None:
        """What the model is told of the tokens ahead, if anything is known of them: their labels as in `targets`."""
        ids, labels, masks = (self._rows_ahead(name) for name in ("tokens", "labels", "loss_mask"))
        states = () if self.message is None else self.message[1:]
        return MTPInputs(ids, tuple(map(_masked_labels, labels, masks)), states) if ids else None

    def _rows_ahead(self, name: str) -> tuple[Tensor, ...]:
        return tuple(row for key, row in self.extras.items() if key.startswith("mtp_") and key.endswith(f"_{name}"))


@runtime_checkable
class PlannedBatches(Protocol):
    """Microbatches of which each step has a number of its own."""

    def prepare_step(self, num_microbatches: int) -> int:
        """Prepare the next global batch; return this rank's number of microbatches. num_microbatches: what --global-batch-size gives."""

    def __next__(self) -> Batch: ...

    def batch_metrics(self) -> Mapping[str, tuple[float, float]]:
        """What is logged of the global batch: name -> (sum, count), this rank's share; the same names on every rank."""


def masked_loss(losses: Tensor, mask: Tensor | None) -> Loss:
    """The loss of the tokens that count. losses, mask: [b, s]; the last stage has both."""
    assert mask is not None, "the stage of the loss reads its mask"
    mask = mask.to(losses.dtype)
    total, count = (losses * mask).sum(), mask.sum()
    return total, count, {"lm loss": torch.stack((total.detach(), count))}


def language_loss(output: Tensor | MTPLosses, batch: Batch, config: MTPConfig) -> Loss:
    """Return the loss of the next tokens, plus --mtp-loss-scaling-factor times the mean loss of the depths of
    multi-token prediction.

    output: losses [b, s] of each token, also of each depth, which have the weights that `with_future_tokens` gave them.
    Reported are means over each depth's own tokens.
    """
    if not isinstance(output, MTPLosses):
        return masked_loss(output, batch.loss_mask)
    total, count, report = masked_loss(output.next, batch.loss_mask)
    for depth, losses in enumerate(output.ahead, start=1):
        further, own, _ = masked_loss(losses, batch.extras[f"mtp_{depth}_loss_mask"])
        weighed = (losses * batch.extras[f"mtp_{depth}_weights"].to(losses.dtype)).sum()
        total = total + weighed * (config.mtp_loss_scaling_factor / len(output.ahead))
        report[f"mtp_{depth} loss"] = torch.stack((further.detach(), own))
    return total, count, report


def _masked_labels(labels: Tensor, mask: Tensor | None) -> Tensor:
    """The labels, -1 where the mask is 0."""
    return labels if mask is None else labels.masked_fill(mask == 0, -1)


def _shift_left(rows: Tensor, places: int) -> Tensor:
    """What stands so many places further, 0 behind the end. rows: [b, s]."""
    return torch.cat((rows[:, places:], torch.zeros_like(rows[:, :places])), dim=1)
