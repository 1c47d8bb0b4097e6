"""check_parity of finetune.py: the losses of answers under a layout, and mistakes that show in them alone."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.cli.commands.check_parity import parse_arguments, proxy_config_of_command
from megatron.core.parallel import collectives
from megatron.preference import data as data_module
from megatron.preference.settings import PreferenceConfig
from megatron.verify.parity.proxy_config import ProxyConfig
from megatron.verify.parity.serial_comparison import LayoutParityResult, compare_recorded_runs_to_serial
from megatron.verify.parity.short_run import (
    STEPS,
    run_short_training,
    run_short_training_pickled,
    unpickle_short_run_result,
)
from tests.helpers.world import Worlds

FLAGS = (
    "--entry finetune.py --world-size 2 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 4 --data-path rows.jsonl "
    "--pretrained-checkpoint base --tokenizer-type ByteTokenizer"
)
LAYOUTS = {
    "tp2 sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "cp2": "--context-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
    "dp2 zero": "--use-distributed-optimizer",
    "tp2 lora": "--tensor-model-parallel-size 2 --lora-rank 4",
}
ROWS = [
    *(
        (task, layout)
        for task in ("dpo", "kto", "reward")
        for layout in LAYOUTS
        if (task, layout) != ("reward", "tp2 lora")
    )
]
DEFAULT = (("kto", "cp2"),)


def small(task: str, layout: str) -> ProxyConfig:
    """A run of finetune.py, made small as the tool makes it."""
    return proxy_config_of_command(*parse_arguments(f"{FLAGS} {LAYOUTS[layout]} --finetune-task {task}".split()))


def checked(world: Worlds, one: ProxyConfig, function: Any = run_short_training_pickled) -> LayoutParityResult:
    """What is said of it. function: what ranks run."""
    ranks = world(one.world_size).run(function, one.config, STEPS, one.finetuning)
    return compare_recorded_runs_to_serial(
        run_short_training(one.serial_config, STEPS, one.finetuning),
        [unpickle_short_run_result(rank) for rank in ranks],
    )


@pytest.mark.parametrize(
    "task, layout", [pytest.param(*row, marks=[] if row in DEFAULT else [pytest.mark.nightly]) for row in ROWS]
)
def test_a_layout_is_compared_in_the_loss_of_its_task(world: Worlds, task: str, layout: str) -> None:
    one = small(task, layout)
    assert one.finetuning is not None and one.finetuning.finetune_task == task
    found = checked(world, one)
    assert found.is_within_tolerance, [str(one) for one in found.differences_above_tolerance]
    assert {one.name for one in found.checked if one.kind == "loss"} == {"preference loss"}


def test_a_divergence_of_one_rank_shows(world: Worlds) -> None:
    found = checked(world, small("kto", "dp2 zero"), _with_local_divergence)
    assert not found.is_within_tolerance and any(one.kind == "loss" for one in found.differences_above_tolerance)


def _with_local_divergence(config: Any, steps: int, finetuning: PreferenceConfig) -> bytes:
    """On every rank: z of its own answers."""
    with pytest.MonkeyPatch.context() as patch:
        local = type("Local", (), {**vars(collectives), "all_reduce": staticmethod(lambda x, *_: x)})
        patch.setattr(data_module, "collectives", local)
        return run_short_training_pickled(config, steps, finetuning)
