"""Scans that a dry run records as one event a pass, against the same step on real tensors, operation by operation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.kernels.choice.table import Kernels
from megatron.core.parallel.mesh import Mesh
from megatron.plan.cost import rank_time
from megatron.plan.hardware import PROFILES
from megatron.plan.simulate.dry_run import dry_run
from megatron.plan.simulate.recorder import StepRecorder
from megatron.plan.simulate.scan_recorder import CHUNK, COLUMNS, KINDS, SPAN, ScanKind, ScanRecorder
from tests.helpers import tiny
from tests.helpers.triton_interpreter import interpreted, needs_triton
from tests.unit.models.test_hybrid_counts import SIZES as NETWORK
from tests.unit.plan.real_steps import real_trace

TRITON = ("state_space.triton_scan_forward", "state_space.triton_scan_gradients", "state_space.triton_scans")
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


def test_a_scan_that_is_asked_for_by_name_is_planned_as_its_kernel() -> None:
    network = {**SIZES, "hybrid_layer_pattern": "MG", "bf16": True}
    asked = tiny.config(1, **network, kernel=("selective_scan=triton", "delta_rule_scan=fla"))
    found = {}
    for name, config, on_gpu in (
        ("torch", tiny.config(1, **network), True),
        ("asked", asked, True),
        ("asked of a CPU", asked, False),
    ):
        (trace,) = dry_run(config, 1, on_gpu=on_gpu).traces
        spent = rank_time(trace, config, PROFILES["h100-80"]).spent
        scans = [event for event in trace.events if event.name.startswith("scan.")]
        seconds = sum(kind.parts["scans over states"] for kind in spent.values())
        operations = max(len(operations.events) for event in scans for _, operations in event.parts)
        found[name] = (seconds, operations, [event.flops for event in scans])
    assert found["asked of a CPU"] == found["torch"]
    assert found["asked"][2] == pytest.approx(found["torch"][2]), "a kernel has the products of the formula"
    assert found["asked"][1] <= 4 < 30 < found["torch"][1] and found["asked"][0] < found["torch"][0] / 4


@needs_triton
def test_scans_are_planned_with_the_sizes_of_tritons_kernels() -> None:
    kernels, forward = (
        pytest.importorskip(f"megatron.core.kernels.state_space.{name}")
        for name in ("triton_scans", "triton_scan_forward")
    )
    assert (CHUNK, SPAN, COLUMNS) == (kernels._CHUNK, kernels._SPAN * kernels._CHUNK, forward._COLUMNS)


def held_by(scan: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], recorder: StepRecorder) -> list[int]:
    """The most bytes that a scan's forward and backward pass hold beside its inputs."""
    leaves, memory, most = [each.clone().requires_grad_() for each in inputs], recorder.memory, []
    for leaf in leaves:
        memory.track(leaf)
    with recorder:
        before = memory.live
        memory.begin_peak_measurement()
        output, _ = scan(*leaves, segments=None)
        most.append(memory.peak - before)
        memory.begin_peak_measurement()
        torch.autograd.backward(output, torch.ones_like(output))
        most.append(memory.peak - before)
    return most


@needs_triton
@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("length", [100, 700])
def test_a_scan_by_triton_holds_what_the_plan_counts(kind: ScanKind, length: int) -> None:
    keys, rates = [0.1 * torch.randn(length, 1, 2, 24) for _ in range(2)], 0.1 * torch.rand(length, 1, 4)
    values = torch.randn(length, 1, 4, 40)
    inputs = (values, rates, -torch.rand(4), *keys) if kind.fixed else (*keys, values, -rates, rates)
    with interpreted(*TRITON) as modules:
        real = held_by(getattr(modules["state_space.triton_scans"], kind.name), inputs, StepRecorder({}))
    recorder = StepRecorder({})
    kernels = ScanRecorder(recorder).replace_scans_with_recorded(Kernels(), [kind.name])
    planned = held_by(getattr(kernels, kind.name), inputs, recorder)
    # The interpreter keeps the arguments of the last kernel.
    assert planned == [pytest.approx(real[0], rel=0.08), pytest.approx(real[1], rel=0.16)]


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
