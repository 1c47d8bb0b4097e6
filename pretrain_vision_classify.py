#!/usr/bin/env python3
"""Train a vision transformer to classify images in folders, one a class: `torchrun --nproc_per_node N pretrain_vision_classify.py <flags>`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.cli.arguments import parse_args
from megatron.training.launch.launch_info import read_launch_info

# An image is one sample with one label; there is no text.
DEFAULTS = {"tokenizer_type": "NullTokenizer", "vocab_size": 2, "architecture": "vit", "seq_length": 1}

if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = read_launch_info()
    CHECKED = parse_args(world_size=PLACE.size, speaks=PLACE.rank == 0, reads_data="datasets", defaults=DEFAULTS)

import torch
import torch.nn.functional as F

from megatron.core.config.plan.layers import StageSpec
from megatron.core.datasets.blend import build_split_datasets
from megatron.core.datasets.image_folder import make_image_folder_dataset_kind
from megatron.core.models.vision import ImageClassifierModel
from megatron.training.entry import guarded_entry_point
from megatron.training.initialize import initialize_megatron
from megatron.training.loader import Datasets
from megatron.training.loop import pretrain
from megatron.training.state.batch import Batch, Loss, LossFunction
from megatron.training.state.run import RunContext


def datasets_provider(run: RunContext, samples: tuple[int, int | None, int]) -> Datasets:
    """Return training, validation and test datasets of images. samples: needed of each."""
    return build_split_datasets(run.config.data, make_image_folder_dataset_kind(run.config, run.tokenizer), samples)


def model_provider(run: RunContext, stage: StageSpec) -> ImageClassifierModel:
    """Build one pipeline stage."""
    return ImageClassifierModel(stage, run.layer_build_context)


def forward_step(
    run: RunContext, batches: Iterator[Batch], stage: ImageClassifierModel
) -> tuple[torch.Tensor, LossFunction]:
    """Run one microbatch through one stage. Return (message, or at the last class scores; loss function)."""
    batch = next(batches)
    output = stage(images=batch.images, hidden=batch.hidden)

    def microbatch_loss(scores: torch.Tensor) -> Loss:
        assert batch.labels is not None and batch.loss_mask is not None, "every stage reads the labels"
        labels, mask = batch.labels[:, 0], batch.loss_mask[:, 0].to(scores.dtype)
        losses = F.cross_entropy(scores.to(mask.dtype), labels, reduction="none")
        total, count = (losses * mask).sum(), mask.sum()
        right = ((scores.argmax(-1) == labels) * mask).sum()
        report = {"lm loss": torch.stack((total.detach(), count)), "accuracy": torch.stack((right, count))}
        return total, count, report

    return output, microbatch_loss


@guarded_entry_point
def main() -> None:
    """Initialize and train."""
    pretrain(initialize_megatron(CHECKED), datasets_provider, model_provider, forward_step)


if __name__ == "__main__":
    main()
