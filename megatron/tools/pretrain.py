"""The installed commands `megatron-pretrain-gpt`, `-hybrid`, `-bert`, `-t5`, `-vlm`, `-vision-classify`, `megatron-finetune` and `megatron-train-rl`: the entry scripts, run as `python -m` would."""

from __future__ import annotations

import runpy


def gpt() -> None:
    """Run pretrain_gpt.py."""
    runpy.run_module("pretrain_gpt", run_name="__main__", alter_sys=True)


def hybrid() -> None:
    """Run pretrain_hybrid.py."""
    runpy.run_module("pretrain_hybrid", run_name="__main__", alter_sys=True)


def bert() -> None:
    """Run pretrain_bert.py."""
    runpy.run_module("pretrain_bert", run_name="__main__", alter_sys=True)


def t5() -> None:
    """Run pretrain_t5.py."""
    runpy.run_module("pretrain_t5", run_name="__main__", alter_sys=True)


def vlm() -> None:
    """Run pretrain_vlm.py."""
    runpy.run_module("pretrain_vlm", run_name="__main__", alter_sys=True)


def vision_classify() -> None:
    """Run pretrain_vision_classify.py."""
    runpy.run_module("pretrain_vision_classify", run_name="__main__", alter_sys=True)


def finetune() -> None:
    """Run finetune.py."""
    runpy.run_module("finetune", run_name="__main__", alter_sys=True)


def rl() -> None:
    """Run train_rl.py."""
    runpy.run_module("train_rl", run_name="__main__", alter_sys=True)
