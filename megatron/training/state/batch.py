"""One microbatch, and the loss over its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from megatron.core.config.settings.model import MTPConfig
from megatron.core.context_parallel.zigzag import Zigzag
from megatron.core.datasets.indexed import DataError
from megatron.core.kernels.ops.packed_document_starts import memoize_packed_document_starts
from megatron.core.models.embedding import IdsWithImages
from megatron.core.models.mtp import MTPInputs, MTPLosses
from megatron.core.parallel.mesh import Axis
from megatron.core.transformer.context.forward_context import MicrobatchContext

# What a loss function gives: the sum over this microbatch's tokens, their number, and [sum, count] pairs to report.
Loss = tuple[Tensor, Tensor, dict[str, Tensor]]
LossFunction = Callable[[Any], Loss]  # of what the last stage returns
_TOKENS = ("tokens", "text", "text_enc")  # what datasets call the ids that the first stage embeds


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch on one stage, [b, s] each; None for what the stage does not read.
    hidden: the first tensor of the previous stage's message; message: all of it. documents: index of the document of
    each position, of whole sequences even where the others are sharded over context ranks. extras: further arrays of
    the sample, by name, and what `with_future_tokens` adds. microbatch_context: where layers add their own losses.
    samples: sample numbers, if they have some. images: [n, channels, height, width], of all samples; the positions of
    their embeddings are in the extra `image_slots`, [b, s] (see `models/vision.py`).
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
        """Make a batch on `device` from arrays [b, s] or [b, ...]. positions: pass on what does not count up."""
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if name != "dataset_id"}
        on = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        tokens = next(on.pop(name) for name in _TOKENS if name in on)
        places = on.pop("position_ids", None)
        if "document_ids" in on:
            memoize_packed_document_starts(on["document_ids"], arrays["document_ids"])
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
        """Return the batch with the inputs of multi-token prediction as extras; for whole sequences, before context
        sharding. Depth k of a token reads the id k positions later and predicts the one after: its label is the main
        label k positions later, and counts if that does and the predicted token is of the same document. Beyond the
        sequence's end is 0, which does not count. Since a depth has fewer tokens than the main loss but its mean weighs
        as much, its tokens have weights: the ratio of both numbers in the microbatch, as in Megatron, or with per_token
        in each sequence, which is the same in every layout. Where padding is marked, a depth has no token where it would
        read padding.
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
            every, own = (
                mask.sum(dim=1, keepdim=True, dtype=torch.float64) if per_token else mask.sum(dtype=torch.float64)
                for mask in (self.loss_mask, counts)
            )
            extras |= {
                f"mtp_{depth}_tokens": _shift_left(self.tokens, depth),
                f"mtp_{depth}_labels": _shift_left(self.labels, depth),
                f"mtp_{depth}_loss_mask": counts,
                f"mtp_{depth}_weights": counts.to(torch.float64) * (every / own.clamp(min=1)),
            }
            if (mask := self.extras.get("padding_mask")) is not None:
                ahead = torch.cat((mask[:, depth:], torch.ones_like(mask[:, :depth])), dim=1)
                extras[f"mtp_{depth}_padding_mask"] = mask * ahead
        return replace(self, extras=extras)

    def shard_over_context(self, axis: Axis) -> Batch:
        """Return this context rank's zigzag part of every row; documents stay whole, for attention masks."""
        if axis.group is None or self.tokens is None:
            return self
        cut = Zigzag(self.tokens.shape[1], axis.size)

        def shard_sequence(rows: Tensor) -> Tensor:
            whole = rows.dim() < 2 or rows.shape[-1] != cut.length
            return rows if whole else cut.shard(rows, axis.rank, dim=-1)

        def shard_sequence_if_given(rows: Tensor | None) -> Tensor | None:
            return None if rows is None else shard_sequence(rows)

        return replace(
            self,
            tokens=shard_sequence(self.tokens),
            labels=shard_sequence_if_given(self.labels),
            loss_mask=shard_sequence_if_given(self.loss_mask),
            positions=shard_sequence_if_given(self.positions),
            extras={name: shard_sequence(rows) for name, rows in self.extras.items()},
        )

    @property
    def token_ids_with_images(self) -> Tensor | IdsWithImages | None:
        """The tokens [b, s], together with the images if there are any; None on a stage without tokens."""
        if self.tokens is None or self.images is None:
            return self.tokens
        return IdsWithImages(self.tokens, self.images, self.extras["image_slots"])

    @property
    def masked_labels(self) -> Tensor | None:
        """The labels [b, s], -1 where the loss mask is 0, so that no loss is computed there; None without labels."""
        return None if self.labels is None else _masked_labels(self.labels, self.loss_mask)

    @property
    def mtp_inputs(self) -> MTPInputs | None:
        """Ids and masked labels of each prediction depth, and the previous stage's states; None without."""
        ids, labels, masks = (self._mtp_extras_of_all_depths(name) for name in ("tokens", "labels", "loss_mask"))
        states = () if self.message is None else self.message[1:]
        return MTPInputs(ids, tuple(map(_masked_labels, labels, masks)), states) if ids else None

    @property
    def token_masks(self) -> dict[str, Tensor]:
        """The masks of padding by name, bool [s, b] each, False at padding, as layers with experts read them."""
        return {
            name: rows.t().bool()
            for name, rows in self.extras.items()
            if name.endswith("padding_mask") and rows.dim() == 2
        }

    def _mtp_extras_of_all_depths(self, name: str) -> tuple[Tensor, ...]:
        """Return the extras `mtp_<depth>_<name>` of all depths."""
        return tuple(row for key, row in self.extras.items() if key.startswith("mtp_") and key.endswith(f"_{name}"))


@runtime_checkable
class VariableCountBatches(Protocol):
    """Protocol of microbatch iterators whose number of microbatches varies from step to step."""

    def prepare_step(self, num_microbatches: int) -> int:
        """Prepare the next global batch; return this rank's number of microbatches. num_microbatches: what --global-batch-size gives."""

    def __next__(self) -> Batch: ...

    def batch_metrics(self) -> Mapping[str, tuple[float, float]]:
        """Return what to log: name -> (sum, count), this rank's share; the same names on every rank."""


def require_next_batch(batches: Iterator[Batch]) -> Batch:
    """The next microbatch; `DataError` when there is none."""
    try:
        return next(batches)
    except StopIteration:
        raise DataError("the data ended before the run did; train on fewer samples or give more data") from None


def masked_loss_sum(losses: Tensor, mask: Tensor | None) -> Loss:
    """Return (sum of the losses where the mask is 1, their number, metrics). losses, mask: [b, s]."""
    assert mask is not None, "the stage of the loss reads its mask"
    mask = mask.to(losses.dtype)
    total, count = (losses * mask).sum(), mask.sum()
    return total, count, {"lm loss": torch.stack((total.detach(), count))}


def language_loss_with_mtp(output: Tensor | MTPLosses, batch: Batch, config: MTPConfig) -> Loss:
    """Return the next-token loss plus --mtp-loss-scaling-factor times the mean loss of the prediction depths.
    output: losses [b, s] of each token, and of each depth, weighted as in `with_future_tokens`. Metrics are means over
    each depth's own tokens.
    """
    if not isinstance(output, MTPLosses):
        return masked_loss_sum(output, batch.loss_mask)
    total, count, report = masked_loss_sum(output.next, batch.loss_mask)
    for depth, losses in enumerate(output.ahead, start=1):
        further, own, _ = masked_loss_sum(losses, batch.extras[f"mtp_{depth}_loss_mask"])
        weighed = (losses * batch.extras[f"mtp_{depth}_weights"].to(losses.dtype)).sum()
        total = total + weighed * (config.mtp_loss_scaling_factor / len(output.ahead))
        report[f"mtp_{depth} loss"] = torch.stack((further.detach(), own))
    return total, count, report


def _masked_labels(labels: Tensor, mask: Tensor | None) -> Tensor:
    """The labels, -1 where the mask is 0."""
    return labels if mask is None else labels.masked_fill(mask == 0, -1)


def _shift_left(rows: Tensor, places: int) -> Tensor:
    """Shift rows [b, s] left by `places`, filled with 0 at the end."""
    return torch.cat((rows[:, places:], torch.zeros_like(rows[:, :places])), dim=1)
