"""Scans that a dry run records as one event a pass, against the same step on real tensors, operation by operation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.core.parallel.mesh import Mesh
from megatron.plan.cost import rank_time
from megatron.plan.hardware import PROFILES
from megatron.plan.simulate.dry_run import dry_run
from tests.helpers import tiny
from tests.unit.models.test_hybrid_counts import SIZES as NETWORK
from tests.unit.plan.real_steps import real_trace

SIZES: dict[str, Any] = {**NETWORK, "hidden_size": 32, "global_batch_size": 2, "micro_batch_size": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"hybrid_layer_pattern": "MM"},
        {"hybrid_layer_pattern": "G-G", "bf16": True, "reset_position_ids": True, "reset_attention_mask": True},
        pytest.param({"hybrid_layer_pattern": "MG*-", "fp64": True}, marks=pytest.mark.nightly),
        pytest.param(
            {
                "hybrid_layer_pattern": "MG*",
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
            marks=pytest.mark.nightly,
        ),
    ],
    ids=lambda changes: changes["hybrid_layer_pattern"],
)
def test_a_recorded_scan_has_the_memory_the_products_and_the_time_of_its_operations(changes: dict[str, Any]) -> None:
    config = tiny.config(1, **SIZES, **changes)
    for _ in range(2):  # the first step of a process leaves what Python collects later
        real = real_trace(config, Mesh.single_process())
    (dry,) = dry_run(config, 1, whole=True).traces
    scans = [event for event in dry.events if event.name.startswith("scan.")]
    assert len(dry.events) < len(real.events) / 2 and {event.action[0] for event in scans} == {"F", "B"}
    assert all(event.where.startswith("megatron/core/transformer/") for event in scans)
    assert dry.peak == pytest.approx(real.peak, rel=0.01)
    assert dry.at_peak.activations == pytest.approx(real.at_peak.activations, rel=0.05)
    assert sum(event.flops for event in dry.events) == sum(event.flops for event in real.events)
    seconds = [
        sum(spent.seconds for spent in rank_time(trace, config, PROFILES["h100-80"]).spent.values())
        for trace in (dry, real)
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "vocabulary, launcher, scale",
    [
        (131072, "nemotron/train_nemotron_h_8b.sh", ""),
        (131072, "nemotron/train_nemotron_h_47b.sh", ""),
        (151936, "qwen/train_qwen3_next_80b_a3b.sh", ""),
        (256000, "mamba/train.sh", "800M"),
        (256000, "mamba/train.sh", "8B"),
    ],
)
def test_launchers_of_hybrids_fit_and_end(vocabulary: int, launcher: str, scale: str) -> None:
    words = (
        ["runs/data", "runs/tokenizer"]
        if scale
        else ["runs/checkpoints", "runs/tensorboard", "runs/tokenizer", "runs/data"]
    )
    plan = f"{sys.executable} -m megatron plan --true-vocab-size {vocabulary} --"
    result = subprocess.run(
        ["bash", f"examples/{launcher}", *words],
        cwd=Path(__file__).resolve().parents[3],
        env={**os.environ, "LAUNCH": plan, **({"MODEL_SCALE": scale} if scale else {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.startswith("FITS") and "no rank waits forever" in result.stdout, result.stdout + result.stderr
