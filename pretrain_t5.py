#!/usr/bin/env python3
"""Pretrain a T5: `torchrun --nproc_per_node N pretrain_t5.py <flags>`; `--help` lists the flags in groups."""

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
        defaults={"tokenizer_type": "BertWordPieceLowerCase", "architecture": "t5"},
    )

import torch

from megatron.core.config.plan.layers import StageSpec
from megatron.core.datasets.blend import build_split_datasets
from megatron.core.datasets.sentence_kinds import make_t5_dataset_kind
from megatron.core.models.t5 import Message, T5Model
from megatron.training.entry import guarded_entry_point
from megatron.training.initialize import initialize_megatron
from megatron.training.loader import Datasets
from megatron.training.loop import pretrain
from megatron.training.state.batch import Batch, Loss, LossFunction, masked_loss_sum
from megatron.training.state.run import RunContext


def datasets_provider(run: RunContext, samples: tuple[int, int | None, int]) -> Datasets:
    """Return training, validation and test datasets of texts with corrupted spans. samples: needed of each."""
    return build_split_datasets(run.config.data, make_t5_dataset_kind(run.config, run.tokenizer), samples)


def model_provider(run: RunContext, stage: StageSpec) -> T5Model:
    """Build one pipeline stage."""
    return T5Model(stage, run.layer_build_context)


def forward_step(
    run: RunContext, batches: Iterator[Batch], stage: T5Model
) -> tuple[torch.Tensor | Message, LossFunction]:
    """Run one microbatch through one stage. Return (message, or on the last stage the loss of each decoder token; loss
    function).
    """
    batch = next(batches)
    output = stage(
        encoder_ids=batch.tokens,
        encoder_padding=batch.extras["enc_mask"].bool(),
        decoder_ids=batch.extras["text_dec"],
        message=batch.message,
        labels=batch.masked_labels,
    )

    def microbatch_loss(losses: torch.Tensor) -> Loss:
        return masked_loss_sum(losses, batch.loss_mask)

    return output, microbatch_loss


@guarded_entry_point
def main() -> None:
    """Initialize and train."""
    pretrain(initialize_megatron(CHECKED), datasets_provider, model_provider, forward_step)


if __name__ == "__main__":
    main()
