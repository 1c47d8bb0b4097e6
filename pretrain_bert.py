#!/usr/bin/env python3
"""Pretrain a BERT: `torchrun --nproc_per_node N pretrain_bert.py <flags>`; `--help` lists the flags in groups."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.cli.arguments import parse_args
from megatron.training.launch.launch_info import read_launch_info

if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = read_launch_info()
    CHECKED = parse_args(
        world_size=PLACE.size,
        speaks=PLACE.rank == 0,
        reads_data="datasets",
        defaults={"tokenizer_type": "BertWordPieceLowerCase", "architecture": "bert"},
    )

import torch
import torch.nn.functional as F

from megatron.core.config.plan.layers import StageSpec
from megatron.core.datasets.blend import build_split_datasets
from megatron.core.datasets.sentence_kinds import make_bert_dataset_kind
from megatron.core.models.bert import BERTModel, BERTOutput
from megatron.training.entry import guarded_entry_point
from megatron.training.initialize import initialize_megatron
from megatron.training.loader import Datasets
from megatron.training.loop import pretrain
from megatron.training.state.batch import Batch, Loss, LossFunction, masked_loss_sum
from megatron.training.state.run import RunContext


def datasets_provider(run: RunContext, samples: tuple[int, int | None, int]) -> Datasets:
    """Return training, validation and test datasets of text pairs with masked words. samples: needed of each."""
    return build_split_datasets(run.config.data, make_bert_dataset_kind(run.config, run.tokenizer), samples)


def model_provider(run: RunContext, stage: StageSpec) -> BERTModel:
    """Build one pipeline stage."""
    return BERTModel(stage, run.layer_build_context)


def mlm_and_pair_loss(output: BERTOutput, batch: Batch, *, per_token: bool) -> Loss:
    """Return the masked-word loss plus the sentence-order loss of each sample, if there is a head for it.
    per_token: a sample's pair weighs as much as its masked words, so that the loss does not depend on the microbatches;
    off: mean over words plus mean over samples, as in Megatron. Samples without masked words do not count.
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


def forward_step(
    run: RunContext, batches: Iterator[Batch], stage: BERTModel
) -> tuple[torch.Tensor | BERTOutput, LossFunction]:
    """Run one microbatch through one stage. Return (message, or the heads' outputs on the last stage; loss function)."""
    batch = next(batches)
    output = stage(
        ids=batch.tokens,
        types=batch.extras["types"],
        hidden=batch.hidden,
        labels=batch.masked_labels,
        padding=batch.extras["padding_mask"].bool(),
    )

    def microbatch_loss(output: BERTOutput) -> Loss:
        return mlm_and_pair_loss(output, batch, per_token=run.config.train.calculate_per_token_loss)

    return output, microbatch_loss


@guarded_entry_point
def main() -> None:
    """Initialize and train."""
    pretrain(initialize_megatron(CHECKED), datasets_provider, model_provider, forward_step)


if __name__ == "__main__":
    main()
