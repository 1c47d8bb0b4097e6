"""Save under any layout, resume under any other: the same numbers as never stopping. Same layout: the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.resuming import AFTER, BEFORE, never_stopped_run, resume_and_train, train_and_save
from tests.helpers.training import Outcome, differences, outcome
from tests.helpers.world import Worlds

MODEL: dict[str, Any] = {
    "fp64": True,
    "num_layers": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "swiglu": True,
    "ffn_hidden_size": 64,
}


def layout(ranks: int, **changes: Any) -> tuple[int, dict[str, Any]]:
    return ranks, changes


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "serial": layout(1),
    "dp2": layout(2),
    "dp2-zero": layout(2, use_distributed_optimizer=True),
    "dp4-zero-buckets": layout(
        4, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=3000
    ),
    "tp2-sp": layout(2, tensor_model_parallel_size=2, sequence_parallel=True),
    "tp4": layout(4, tensor_model_parallel_size=4),
    "pp2": layout(2, pipeline_model_parallel_size=2),
    "pp2-vpp2": layout(2, pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2),
    "pp4": layout(4, pipeline_model_parallel_size=4),
    "tp2-pp2": layout(4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    "tp2-dp2-zero": layout(4, tensor_model_parallel_size=2, use_distributed_optimizer=True),
    "tp2-pp2-dp2-zero": layout(
        8,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        sequence_parallel=True,
        use_distributed_optimizer=True,
    ),
    "cp2": layout(2, context_parallel_size=2),
    "cp2-tp2-zero": layout(
        4, context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True, use_distributed_optimizer=True
    ),
    "uneven": layout(2, pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=1),
    "padding": layout(1, make_vocab_size_divisible_by=64),
    "dp2-fsdp": layout(2, use_torch_fsdp2=True),
    "tp2-dp2-fsdp": layout(4, tensor_model_parallel_size=2, sequence_parallel=True, use_torch_fsdp2=True),
    "pp2-dp2-fsdp": layout(4, pipeline_model_parallel_size=2, use_torch_fsdp2=True),
    "pp2-there-and-back": layout(2, pipeline_model_parallel_size=2, pipeline_schedule="zb-v"),
}
# Eight ranks on two cores are slow: that layout is paired with a few others only, as are the last ones, each with each.
FEW = {
    "tp2-pp2-dp2-zero": (("serial", "tp4", "dp4-zero-buckets"), ("serial", "pp2-vpp2", "dp2-zero")),
    "dp2-fsdp": (("dp2", "dp4-zero-buckets", "tp2-dp2-fsdp"), ("tp2-sp", "dp2-zero", "pp2-dp2-fsdp")),
    "tp2-dp2-fsdp": (("pp2-vpp2", "dp2-fsdp"), ("cp2", "dp2-fsdp")),
    "pp2-dp2-fsdp": (("tp4", "dp2-fsdp"), ("serial", "tp2-dp2-fsdp")),
    "pp2-there-and-back": (("pp2", "dp2-zero"), ("pp2-vpp2", "serial")),
}
PAIRS = [
    (a, b)
    for a in LAYOUTS
    for b in LAYOUTS
    if (b not in FEW or a in FEW[b][0]) and (a not in FEW or b in FEW[a][1] or (b in FEW and a in FEW[b][0]))
]


@pytest.fixture(scope="module")
def never_stopped() -> Outcome:
    """The serial run that goes on."""
    return never_stopped_run(MODEL)


@pytest.fixture(scope="module")
def saved(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A checkpoint of every layout."""
    folders = {}
    for name, (ranks, changes) in LAYOUTS.items():
        folders[name] = str(tmp_path_factory.mktemp(name))
        world(ranks).run(train_and_save, {**MODEL, **changes}, folders[name], BEFORE)
    return folders


def every_pair() -> list[Any]:
    """All pairs, of which every eighth is run by day, and those with layouts that have few."""
    return [
        pytest.param(
            *pair, id="-to-".join(pair), marks=[pytest.mark.nightly] if place % 8 and not FEW.keys() & set(pair) else []
        )
        for place, pair in enumerate(PAIRS)
    ]


@pytest.mark.parametrize("writer, reader", every_pair())
def test_a_run_resumed_under_another_layout_goes_on_as_if_it_had_not_stopped(
    world: Worlds, saved: dict[str, str], never_stopped: Outcome, writer: str, reader: str
) -> None:
    ranks, changes = LAYOUTS[reader]
    resumed = outcome(world(ranks).run(resume_and_train, {**MODEL, **changes}, saved[writer], AFTER))
    problems = differences(resumed, never_stopped, 1e-10)
    assert not problems, "\n".join(problems)


SAME = {
    "serial": layout(1),
    "tp2-sp": LAYOUTS["tp2-sp"],
    "tp2-dp2-fsdp": LAYOUTS["tp2-dp2-fsdp"],
    "pp2-dp2-zero": layout(4, pipeline_model_parallel_size=2, use_distributed_optimizer=True),
}
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "initial_loss_scale": 2.0**18},
}


@pytest.mark.parametrize("numbers", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", SAME)
def test_a_run_resumed_under_its_own_layout_gives_the_same_bits_with_dropout(
    world: Worlds, tmp_path: Path, name: str, numbers: str
) -> None:
    ranks, changes = SAME[name]
    settings = {**changes, **FORMATS[numbers], "hidden_dropout": 0.1, "attention_dropout": 0.1}
    through = world(ranks).run(train_and_save, settings, None, BEFORE + AFTER)
    world(ranks).run(train_and_save, settings, str(tmp_path), BEFORE)
    resumed = world(ranks).run(resume_and_train, settings, str(tmp_path), AFTER)
    for (losses, norms, held), (losses_through, norms_through, held_through) in zip(resumed, through, strict=True):
        assert losses == losses_through[BEFORE:]
        assert norms == norms_through[BEFORE:]
        for (label, _, _, value), (_, _, _, expected) in zip(held, held_through, strict=True):
            assert torch.equal(value, expected), label
