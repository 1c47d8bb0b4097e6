#!/usr/bin/env python3
"""Finetune a GPT on answers or on preferences: `torchrun --nproc_per_node N finetune.py --finetune-task {sft,dpo,kto,reward} <flags>`; see docs/finetuning.md."""

from __future__ import annotations

from functools import partial

from megatron.preference.arguments import parse_preference_args
from megatron.training.launch.launch_info import read_launch_info

if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = read_launch_info()
    CHECKED, PREFERENCE = parse_preference_args(world_size=PLACE.size, speaks=PLACE.rank == 0)

from megatron.preference.data import make_finetune_dataset_kind, preference_data_provider, with_epoch_iterations
from megatron.preference.step import PreferenceStep
from megatron.training.entry import guarded_entry_point
from megatron.training.initialize import initialize_megatron
from megatron.training.loader import Datasets
from megatron.training.loop import pretrain
from megatron.training.state.run import RunContext
from pretrain_gpt import forward_step, make_eval_generate_function, model_provider


def datasets_provider(run: RunContext, counts: tuple[int, int | None, int]) -> Datasets:
    """Return no datasets: the data come from `preference_data_provider`."""
    return None, None, None


@guarded_entry_point
def main() -> None:
    """Initialize and train."""
    run = initialize_megatron(CHECKED)
    kind, learns_answers = make_finetune_dataset_kind(run, PREFERENCE), PREFERENCE.finetune_task == "sft"
    step = forward_step if learns_answers else PreferenceStep(PREFERENCE)
    template = None if learns_answers else PREFERENCE.preference_prompt_format
    pretrain(
        with_epoch_iterations(run, PREFERENCE, kind),
        datasets_provider,
        model_provider,
        step,
        partial(make_eval_generate_function, template=template),
        data_of=preference_data_provider(PREFERENCE, kind),
    )


if __name__ == "__main__":
    main()
