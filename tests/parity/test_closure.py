"""Resharding is closed: random walks of saves and loads over all layouts end where they began, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.checkpoint_folders import iteration_folder
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.verify.compare.checkpoints import compare_sources
from tests.helpers import tiny
from tests.helpers.training import train_on
from tests.helpers.world import Worlds

STEPS = 2
MODEL: dict[str, Any] = {
    "group_query_attention": True,
    "num_query_groups": 2,
    "swiglu": True,
    "ffn_hidden_size": 64,
    "bf16": True,
}
TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"
ZERO: dict[str, Any] = {"use_distributed_optimizer": True}
FSDP: dict[str, Any] = {"use_torch_fsdp2": True}
BUCKETS: dict[str, Any] = {**ZERO, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}),
    (1, {"make_vocab_size_divisible_by": 64}),
    (1, {"ddp_bucket_size": 700}),
    (2, {}),
    (2, ZERO),
    (2, {**BUCKETS, "ddp_bucket_size": 2000}),
    (2, {TP: 2}),
    (2, {TP: 2, "sequence_parallel": True, "make_vocab_size_divisible_by": 16}),
    (2, {PP: 2}),
    (2, {PP: 2, VPP: 2}),
    (2, {PP: 2, "decoder_first_pipeline_num_layers": 1}),
    (4, {TP: 4}),
    (4, {TP: 4, "make_vocab_size_divisible_by": 7}),
    (4, {PP: 4}),
    (4, ZERO),
    (4, {**BUCKETS, "ddp_bucket_size": 900}),
    (4, {TP: 2, **ZERO}),
    (4, {TP: 2, PP: 2, "sequence_parallel": True}),
    (4, {PP: 2, **ZERO}),
    (4, {PP: 2, VPP: 2, **BUCKETS, "ddp_bucket_size": 1500}),
    (2, FSDP),
    (4, {TP: 2, "sequence_parallel": True, **FSDP}),
)


def begin(changes: dict[str, Any], folder: Path) -> None:
    """On every rank: train, and save."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(world_size, **{**MODEL, **changes}, save=str(folder))))
    train_on(trainer, STEPS)
    Checkpointer(trainer).save()


def carry(changes: dict[str, Any], source: Path, folder: Path) -> None:
    """On every rank: load one checkpoint, and save another. Every weight is another before, and every moment zero."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(
        tiny.run_of(
            tiny.config(
                world_size,
                **{**MODEL, **changes, "seed": 8, "allow_other_data": True},
                load=str(source),
                save=str(folder),
            )
        )
    )
    checkpoint = Checkpointer(trainer)
    assert checkpoint.resume()
    assert (trainer.progress.iteration, trainer.optimizer.num_steps) in (
        (STEPS, STEPS),
        (STEPS, 0),
    )  # 0: this rank owns padding alone
    checkpoint.save()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_walk_over_all_layouts_ends_bit_equal_to_its_start_moments_included(
    seed: int, world: Worlds, tmp_path: Path
) -> None:
    choose = random.Random(seed)
    walk = choose.sample(LAYOUTS, len(LAYOUTS))
    ranks, changes = walk[-1]  # the first hop changes the layout too
    world(ranks).run(begin, changes, tmp_path / "start")
    start = open_native_checkpoint(iteration_folder(tmp_path / "start", STEPS))
    parameters = {name.removeprefix("model.") for name in start.formats if name.startswith("model.")}
    slots = {name for name in start.formats if name.startswith("optimizer.")}
    assert slots == {f"optimizer.{slot}.{name}" for slot in ("master", "exp_avg", "exp_avg_sq") for name in parameters}
    patterns = (
        "model.*",
        "optimizer.*",
        "run.progress",
        "run.optimizer_steps",
        "run.loss_scale",
        "run.schedule",
        "run.tokenizer",
    )
    here = tmp_path / "start"
    for hop, (ranks, changes) in enumerate(walk):
        there = tmp_path / f"hop{hop}"
        world(ranks).run(carry, changes, here, there)
        found = open_native_checkpoint(iteration_folder(there, STEPS))
        problems = [str(one) for one in compare_sources(found, start, patterns=patterns)]
        assert not problems, f"after hop {hop} of {walk}:\n" + "\n".join(problems[:10])
        here = there
