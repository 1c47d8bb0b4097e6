#!/usr/bin/env python3
"""Pretrain a hybrid of Mamba-2, gated delta nets, attention, MLPs and experts: `torchrun --nproc_per_node N pretrain_hybrid.py --hybrid-layer-pattern M-M*- <flags>`; `--help` lists the flags in groups."""

from __future__ import annotations

from megatron.cli.arguments import missing_hybrid_pattern_problems, parse_args
from megatron.training.launch.launch_info import read_launch_info

if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = read_launch_info()
    CHECKED = parse_args(
        world_size=PLACE.size,
        speaks=PLACE.rank == 0,
        reads_data="datasets",
        defaults={"tokenizer_type": "GPT2BPETokenizer"},
        own_problems=missing_hybrid_pattern_problems,
    )

from megatron.training.entry import guarded_entry_point
from megatron.training.initialize import initialize_megatron
from megatron.training.loop import pretrain
from pretrain_gpt import datasets_provider, forward_step, make_eval_generate_function, model_provider


@guarded_entry_point
def main() -> None:
    """Initialize and train."""
    pretrain(initialize_megatron(CHECKED), datasets_provider, model_provider, forward_step, make_eval_generate_function)


if __name__ == "__main__":
    main()
