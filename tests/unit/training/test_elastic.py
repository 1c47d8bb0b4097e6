"""Runs that fit themselves to the ranks that there are: which layout is chosen, and that nothing else changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.preflight import fit_elastic_layout, resolve_and_examine
from megatron.core.config.flags.declare import config_from_flat_dict
from megatron.core.config.settings.run import RunConfig
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.data.sample_order import microbatch_sample_indices
from megatron.training.launch.elastic import elastic_layout_change_text
from megatron.training.report.run_log import read_run_log_events
from megatron.training.state.batch import Batch
from megatron.training.state.step import train_step
from tests.helpers import tiny
from tests.helpers.training import Held, assemble, held_weights
from tests.helpers.world import Worlds

ROOT = Path(__file__).resolve().parents[3]
ELASTIC: dict[str, Any] = {**tiny.BASE, "elastic": True, "save": "s", "load": "s", "save_interval": 1}


def given(**changes: Any) -> RunConfig:
    return config_from_flat_dict(RunConfig, {**ELASTIC, **changes})


TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
# (flags, ranks, expected sizes: tensor, context, pipeline, expert, data); by hand from the order in elastic.py's docstring
CHOICES = [
    ({}, 8, (1, 1, 1, 1, 8)),
    ({}, 6, (1, 1, 1, 1, 4)),  # 8 samples over 6, 5 or 4
    ({"global_batch_size": 24}, 6, (1, 1, 1, 1, 6)),
    ({"tensor_model_parallel_size": 2}, 6, (2, 1, 1, 1, 2)),
    (TP2_PP2, 8, (2, 1, 2, 1, 2)),
    (TP2_PP2, 7, (2, 1, 2, 1, 1)),
    (TP2_PP2, 3, (2, 1, 1, 1, 1)),  # a shorter pipeline before fewer tensor ranks
    (TP2_PP2, 1, (1, 1, 1, 1, 1)),
    ({"pipeline_model_parallel_size": 4}, 3, (1, 1, 2, 1, 1)),
    ({"context_parallel_size": 2, "tensor_model_parallel_size": 2}, 3, (2, 1, 1, 1, 1)),
    ({"num_experts": 4, "expert_model_parallel_size": 4}, 6, (1, 1, 1, 4, 4)),
    ({"num_experts": 4, "expert_model_parallel_size": 4}, 2, (1, 1, 1, 2, 2)),
    ({"rampup_batch_size": (2, 6, 10)}, 6, (1, 1, 1, 1, 2)),  # 2 samples at first
]


@pytest.mark.parametrize("flags, ranks, expected", CHOICES)
def test_the_nearest_layout_that_keeps_every_rule_is_chosen(
    flags: dict[str, Any], ranks: int, expected: tuple[int, ...]
) -> None:
    config, used = fit_elastic_layout(given(**flags), ranks)
    parallel = config.parallel
    sizes = (
        parallel.tp,
        parallel.context_parallel_size,
        parallel.pp,
        parallel.expert_model_parallel_size,
        parallel.data_parallel_size(used),
    )
    assert sizes == expected
    found, problems = resolve_and_examine(given(**flags), ranks)
    assert not problems and found.train.global_batch_size == flags.get("global_batch_size", 8), problems
    assert fit_elastic_layout(config, ranks) == (config, used), "a fitted layout fits"


def test_interleaving_is_left_out_of_a_shorter_pipeline_only() -> None:
    flags = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    assert fit_elastic_layout(given(**flags), 2)[0].parallel.num_virtual_stages_per_pipeline_rank == 2
    config, used = fit_elastic_layout(given(**flags), 1)
    assert config.parallel.num_virtual_stages_per_pipeline_rank is None
    line = elastic_layout_change_text(given(**flags).parallel, config.parallel, world_size=1, ranks=used)
    assert (
        "--pipeline-model-parallel-size 2 -> 1" in line and "--num-virtual-stages-per-pipeline-rank 2 -> None" in line
    )


def test_the_line_says_who_stands_by_and_nothing_where_nothing_changes() -> None:
    config, used = fit_elastic_layout(given(), 6)
    assert "4 of 6 ranks train, in 4 data-parallel copies, 2 stand by" in elastic_layout_change_text(
        given().parallel, config.parallel, world_size=6, ranks=used
    )
    config, used = fit_elastic_layout(given(), 8)
    assert elastic_layout_change_text(given().parallel, config.parallel, world_size=8, ranks=used) == ""


def test_without_the_flag_nothing_is_fitted() -> None:
    assert [name for name, _ in resolve_and_examine(given(elastic=False), 6)[1]] == ["global-batch"]


def test_rules_that_no_layout_mends_are_said_and_do_not_hide_the_fit() -> None:
    assert [name for name, _ in resolve_and_examine(given(lr=None), 6)[1]] == ["learning-rate"]
    assert [name for name, _ in resolve_and_examine(given(global_batch_size=None), 6)[1]] == ["elastic"]


Seen = list[tuple[int, list[int]]]


def stretch(changes: dict[str, Any], steps: int) -> tuple[list[float], Seen, Held]:
    """On every rank: go on from the last checkpoint in the layout for these ranks, for some steps, and save."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    config, used = fit_elastic_layout(given(**changes), ranks)
    assert used == ranks, "the pool's ranks all train here"
    values = {
        **ELASTIC,
        **changes,
        "tensor_model_parallel_size": config.parallel.tp,
        "pipeline_model_parallel_size": config.parallel.pp,
    }
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(ranks, **values)))
    checkpoint = Checkpointer(trainer)
    checkpoint.resume()
    run = trainer.run
    order = microbatch_sample_indices(
        run.config,
        1000,
        consumed_samples=run.progress.consumed_train_samples,
        rank=run.mesh.dp.rank,
        num_ranks=run.mesh.dp.size,
    )
    losses, seen = [], []

    def batches() -> Any:
        for numbers in order:
            seen.append((run.progress.iteration, numbers))
            rows = [torch.Generator().manual_seed(number) for number in numbers]
            window = torch.stack(
                [torch.randint(tiny.VOCABULARY, (run.config.train.seq_length + 1,), generator=row) for row in rows]
            )
            mask = torch.stack([(torch.rand(run.config.train.seq_length, generator=row) < 0.5).float() for row in rows])
            yield Batch(tokens=window[:, :-1], labels=window[:, 1:], loss_mask=mask)

    source = batches()
    for _ in range(steps):
        step = train_step(trainer, source)
        pair = step.losses["lm loss"].double()
        torch.distributed.all_reduce(pair) if ranks > 1 else None
        losses.append((pair[0] / pair[1]).item())
    checkpoint.save()
    first = run.mesh.tp.is_first and run.mesh.pp.is_first
    return losses, seen if first else [], held_weights(trainer)


def drill(world: Worlds, folder: Path, counts: tuple[int, ...], **changes: Any) -> None:
    """A run over these numbers of ranks, two steps each, against the serial run that never stopped."""
    changes = {"fp64": True, "save": str(folder / "drill"), "load": str(folder / "drill"), **changes}
    losses: list[float] = []
    samples: dict[int, list[int]] = {}
    for count in counts:
        results = world(count).run(stretch, changes, 2)
        losses += results[0][0]
        for _, seen, _ in results:
            for iteration, numbers in seen:
                samples.setdefault(iteration, []).extend(numbers)
    serial = {
        **changes,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "save": str(folder / "serial"),
        "load": str(folder / "serial"),
    }
    expected, _, held = stretch(serial, 2 * len(counts))
    size = changes["global_batch_size"]
    assert {step: sorted(numbers) for step, numbers in samples.items()} == {
        step: list(range(step * size, (step + 1) * size)) for step in range(2 * len(counts))
    }, "a sample was seen twice or not at all"
    assert losses == pytest.approx(expected, rel=1e-10)
    whole, alone = assemble([held for _, _, held in results]), assemble([held])
    assert all(torch.allclose(whole[name], alone[name], rtol=1e-9, atol=1e-12) for name in alone), (
        "the weights are others"
    )


def test_a_run_that_loses_and_finds_ranks_is_the_run_that_never_stopped(world: Worlds, tmp_path: Path) -> None:
    drill(
        world, tmp_path, (4, 2, 1, 4), global_batch_size=8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2
    )


@pytest.mark.nightly
def test_the_drill_of_eight_six_four_and_eight_ranks(world: Worlds, tmp_path: Path) -> None:
    drill(world, tmp_path, (8, 6, 4, 8), global_batch_size=24, tensor_model_parallel_size=2)
    drill(world, tmp_path / "copies", (8, 6, 4, 8), global_batch_size=24)


def launched(folder: Path, ranks: int, *more: str) -> str:
    """What pretrain_gpt.py says under torchrun on so many ranks."""
    flags = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 "
        "--tokenizer-type NullTokenizer --vocab-size 30 --num-workers 0 --eval-iters 0 --log-interval 1 --mock-data --train-iters 4 "
        "--hidden-dropout 0 --attention-dropout 0 --elastic --save-interval 2"
    ).split()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(ranks),
        "pretrain_gpt.py",
        *flags,
        "--save",
        str(folder / "save"),
        "--load",
        str(folder / "save"),
        "--log-samples",
        str(folder / "samples"),
        *more,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "MEGATRON_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_rank_without_a_place_stands_by_and_ends_well(tmp_path: Path) -> None:
    said = launched(tmp_path, 3)
    assert "elastic: 2 of 3 ranks train, in 2 data-parallel copies, 1 stand by" in said, said
    assert "mesh: 2 ranks" in said and "saved checkpoint" in said
    (start,) = [event for event in read_run_log_events(tmp_path / "save") if event["event"] == "start"]
    assert start["layout"]["ranks"] == 2 and any(message.startswith("elastic: ") for message in start["messages"])


@pytest.mark.nightly
def test_the_drill_under_torchrun(tmp_path: Path) -> None:
    for ranks, end in ((8, "2"), (6, "4"), (4, "6"), (8, "8")):
        launched(tmp_path, ranks, "--train-iters", "8", "--exit-interval", end, "--global-batch-size", "24")
    rows = [json.loads(line) for path in (tmp_path / "samples").iterdir() for line in path.read_text().splitlines()]
    for step in range(8):
        seen = sorted(number for row in rows if row["iteration"] == step + 1 for number in row["samples"])
        assert seen == list(range(step * 24, (step + 1) * 24)), f"step {step + 1}"
    events = read_run_log_events(tmp_path / "save")
    assert [event["layout"]["ranks"] for event in events if event["event"] == "start"] == [8, 6, 4, 8]
    assert [(event["before"]["ranks"], event["after"]["ranks"]) for event in events if event["event"] == "layout"] == [
        (8, 6),
        (6, 4),
        (4, 8),
    ]
