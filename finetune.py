#!/usr/bin/env python3
"""Train a GPT on pairs of answers (DPO and its variants): `torchrun --nproc_per_node N finetune.py <flags>`; see docs/finetuning.md."""

from __future__ import annotations

from megatron.preference.arguments import parse_preference_args
from megatron.training.launch.launch_info import launcher_place

if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = launcher_place()
    ARGS, PREFERENCE = parse_preference_args(world_size=PLACE.size, speaks=PLACE.rank == 0)

from megatron.preference.data import data_source, datasets_of
from megatron.preference.step import PreferenceStep
from megatron.training.entry import entry
from megatron.training.initialize import initialize_megatron
from megatron.training.loop import pretrain
from pretrain_gpt import model, samples


@entry
def main() -> None:
    """Initialize and train."""
    pretrain(
        initialize_megatron(ARGS),
        datasets_of(PREFERENCE),
        model,
        PreferenceStep(PREFERENCE),
        samples,
        data_of=data_source(PREFERENCE),
    )


if __name__ == "__main__":
    main()
