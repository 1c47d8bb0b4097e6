"""The installed commands `megatron-pretrain-gpt`, `-hybrid`, `-bert`, `-t5`, `-vlm`, `-vision-classify`, `megatron-finetune` and `megatron-train-rl`: the entry scripts, run as `python -m` would."""

from __future__ import annotations

import runpy
from functools import partial

from megatron.training.launch.entry_scripts import make_entry_scripts_importable


def run_entry_script(module: str) -> None:
    """Run an entry script as the main program."""
    make_entry_scripts_importable()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


gpt = partial(run_entry_script, "pretrain_gpt")
hybrid = partial(run_entry_script, "pretrain_hybrid")
bert = partial(run_entry_script, "pretrain_bert")
t5 = partial(run_entry_script, "pretrain_t5")
vlm = partial(run_entry_script, "pretrain_vlm")
vision_classify = partial(run_entry_script, "pretrain_vision_classify")
finetune = partial(run_entry_script, "finetune")
rl = partial(run_entry_script, "train_rl")
