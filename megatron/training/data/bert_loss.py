"""BERT's loss: of hidden words, and of pairs of texts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.core.models.bert import BERTOutput
from megatron.training.data.batch import Batch, Loss, masked_loss_sum


def mlm_and_pair_loss(output: BERTOutput, batch: Batch, *, per_token: bool) -> Loss:
    """Return the masked-word loss plus the sentence-order loss of each sample, if there is a head for it.
    per_token: a sample's pair weighs as much as its masked words, so that the step's loss does not depend on the split
    into microbatches; off: mean over words plus mean over samples, as in Megatron. Samples without masked words do not
    count.
    """
    assert batch.loss_mask is not None, "the last stage reads the batch"
    total, count, report = masked_loss_sum(output.words, batch.loss_mask)
    if output.pairs is None:
        return total, count, report
    losses = F.cross_entropy(output.pairs.to(output.words.dtype), batch.extras["is_random"], reduction="none")
    hidden = batch.loss_mask.sum(dim=1).to(losses.dtype)
    present = (hidden > 0).to(losses.dtype)
    weights = hidden if per_token else present * (count / present.sum().clamp(min=1.0))
    report["sop loss"] = torch.stack(((losses * present).sum().detach(), present.sum()))
    return total + (losses * weights).sum(), count, report
