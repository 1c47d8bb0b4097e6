"""BERT's loss: of hidden words, and of pairs of texts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.core.models.bert import BERTOutput
from megatron.training.data.batch import Batch, Loss, masked_loss


def mlm_and_pair_loss(output: BERTOutput, batch: Batch, *, per_token: bool) -> Loss:
    """The loss of hidden words, and of each sample's pair where there is a head for it.

    per_token: a sample's pair weighs as much as its hidden words, so that the loss of a step does not depend on its cut into
    microbatches; off: the mean over hidden words plus the mean over samples, as Megatron has it. A sample without hidden
    words has no part in it.
    """
    assert batch.loss_mask is not None, "the last stage reads the batch"
    total, count, report = masked_loss(output.words, batch.loss_mask)
    if output.pairs is None:
        return total, count, report
    losses = F.cross_entropy(output.pairs.to(output.words.dtype), batch.extras["is_random"], reduction="none")
    hidden = batch.loss_mask.sum(dim=1).to(losses.dtype)
    present = (hidden > 0).to(losses.dtype)
    weights = hidden if per_token else present * (count / present.sum().clamp(min=1.0))
    report["sop loss"] = torch.stack(((losses * present).sum().detach(), present.sum()))
    return total + (losses * weights).sum(), count, report
