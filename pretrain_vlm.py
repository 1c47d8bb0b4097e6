#!/usr/bin/env python3
"""Train a language model that reads images: `torchrun --nproc_per_node N pretrain_vlm.py <flags>`; `--help` lists the flags in groups."""

from __future__ import annotations

from megatron.training.cli.arguments import parse_args
from megatron.training.launch.launch_info import launcher_place

DEFAULTS = {"tokenizer_type": "HuggingFaceTokenizer", "vision_model_type": "clip", "sft": True}

if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = launcher_place()
    ARGS = parse_args(world_size=PLACE.size, speaks=PLACE.rank == 0, reads_data=True, defaults=DEFAULTS)

from megatron.core.config.stages import stages_of
from megatron.core.datasets.blend import build_splits
from megatron.core.datasets.multimodal import Use, image_chat_kind
from megatron.training.entry import entry
from megatron.training.initialize import initialize_megatron
from megatron.training.loader import Datasets
from megatron.training.loop import pretrain
from megatron.training.run import Run
from pretrain_gpt import forward_step, model


def datasets(run: Run, samples: tuple[int, int | None, int]) -> Datasets:
    """Training, validation and test conversations, with the images that this rank's stages ask for."""
    stages = [stage for stage in stages_of(run.config) if stage.rank == run.mesh.pp.rank]
    use: Use = "check" if any(stage.has_output for stage in stages) else "nothing"
    if any(stage.has_embedding for stage in stages):
        use = "pixels"
    return build_splits(run.config.data, image_chat_kind(run.config, run.tokenizer, use), samples)


@entry
def main() -> None:
    """Initialize and train."""
    pretrain(initialize_megatron(ARGS), datasets, model, forward_step)


if __name__ == "__main__":
    main()
