#!/usr/bin/env python3
"""Finetune a GPT: `torchrun --nproc_per_node N finetune.py --finetune-task {sft,dpo,kto,reward} <flags>`; see docs/finetuning.md."""

from __future__ import annotations

from functools import partial

from megatron.preference.arguments import parse_preference_args
from megatron.training.launch.launch_info import read_launch_info

if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = read_launch_info()
    ARGS, PREFERENCE = parse_preference_args(world_size=PLACE.size, speaks=PLACE.rank == 0)

from megatron.preference.data import data_source, dataset_kind, with_epochs
from megatron.preference.step import PreferenceStep
from megatron.training.entry import run_entry
from megatron.training.initialize import initialize_megatron
from megatron.training.loader import Datasets
from megatron.training.loop import pretrain
from megatron.training.run import Run
from pretrain_gpt import forward_step, model, samples


def datasets(run: Run, counts: tuple[int, int | None, int]) -> Datasets:
    """None: the data come from `data_source`."""
    return None, None, None


@run_entry
def main() -> None:
    """Initialize and train."""
    run = initialize_megatron(ARGS)
    kind, learns_answers = dataset_kind(run, PREFERENCE), PREFERENCE.finetune_task == "sft"
    step = forward_step if learns_answers else PreferenceStep(PREFERENCE)
    template = None if learns_answers else PREFERENCE.preference_prompt_format
    pretrain(
        with_epochs(run, PREFERENCE, kind),
        datasets,
        model,
        step,
        partial(samples, template=template),
        data_of=data_source(PREFERENCE, kind),
    )


if __name__ == "__main__":
    main()
