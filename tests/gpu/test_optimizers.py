"""Update rules, narrow state and what waits in the CPU's memory, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.kernels.ops import adamw
from megatron.core.parallel.device import device_memory_stats
from tests.gpu.test_training import losses_on
from tests.helpers import tiny
from tests.helpers.training import train_on
from tests.parity.table import MODELS

pytestmark = pytest.mark.gpu

AWAY: dict[str, Any] = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
WIDE: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 256,
    "max_position_embeddings": 256,
    "micro_batch_size": 8,
    "bf16": True,
}


@pytest.mark.parametrize(
    "changes",
    [MODELS["muon"], MODELS["muon-joined"], MODELS["lion"], MODELS["adafactor"]],
    ids=["muon", "muon joined", "lion", "adafactor"],
)
def test_updates_on_a_gpu_are_the_cpus(changes: dict[str, Any]) -> None:
    assert losses_on("cuda", **changes) == pytest.approx(losses_on("cpu", **changes), rel=1e-3)


def test_adamws_kernel_is_the_formula() -> None:
    kernel = pytest.importorskip("megatron.core.kernels.triton.adamw", exc_type=ImportError)
    assert adamw.adamw_kernel_error(kernel.adamw, torch.device("cuda"), torch.bfloat16) < adamw.TOLERANCE


@pytest.mark.parametrize("changes", [{"bf16": True}, {"bf16": True, "use_distributed_optimizer": True}, {}])
def test_runs_with_either_kernel_of_adamw_are_alike(changes: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    found = [losses_on("cuda", kernel=(f"adamw={name}",), **changes) for name in ("torch", "triton")]
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_newton_schulz_in_bf16_stays_near() -> None:
    changes = {**MODELS["muon"], "muon_fp32_matmul_prec": "medium"}
    assert losses_on("cuda", **changes) == pytest.approx(losses_on("cpu", **MODELS["muon"]), rel=1e-2)


@pytest.mark.parametrize(
    "formats",
    [
        {},
        {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
        {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16", "main_params_dtype": "fp16", "main_grads_dtype": "bf16"},
    ],
)
def test_narrow_state_on_a_gpu_stays_near_fp32(formats: dict[str, Any]) -> None:
    narrow = {"bf16": True, "use_precision_aware_optimizer": True, **formats}
    assert losses_on("cuda", **narrow) == pytest.approx(losses_on("cpu"), rel=3e-2)


@pytest.mark.parametrize("fraction", [0.4, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_updates_in_the_cpus_memory_are_the_gpus(fraction: float, overlap: bool) -> None:
    away = {**AWAY, "optimizer_offload_fraction": fraction, "overlap_cpu_optimizer_d2h_h2d": overlap}
    for numbers in ({}, {"bf16": True}):
        assert losses_on("cuda", **numbers, **away) == pytest.approx(losses_on("cuda", **numbers), rel=1e-3)


def test_masters_and_moments_leave_the_gpu() -> None:
    held = []
    for changes in ({}, AWAY):
        torch.cuda.empty_cache()
        before = device_memory_stats(torch.device("cuda"))["allocated"]
        trainer = tiny.trainer_of(tiny.run_of(tiny.config(**WIDE, **changes), torch.device("cuda")))
        train_on(trainer, 1)
        held.append(device_memory_stats(torch.device("cuda"))["allocated"] - before)
        parameters = sum(param.numel() for param in trainer.stages[0].parameters())
        assert all(master.is_pinned() for master in trainer.optimizer.main_weights) == bool(changes)
        del trainer
    assert held[0] - held[1] > 0.95 * 12 * parameters


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_offloading_num_layers": 8},
        {"cpu_offloading_num_layers": 8, "recompute_granularity": "full", "recompute_method": "uniform"},
        {
            "fine_grained_activation_offloading": True,
            "offload_modules": ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
        },
    ],
)
def test_activations_in_the_cpus_memory_change_nothing_and_make_room(changes: dict[str, Any]) -> None:
    found, peaks = [], []
    plain = {name: value for name, value in changes.items() if name.startswith("recompute")}
    for settings in (plain, {**changes, "min_offloaded_tensor_size": 1024}):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trainer = tiny.trainer_of(
            tiny.run_of(tiny.config(**{**WIDE, "hidden_dropout": 0.1}, **settings), torch.device("cuda"))
        )
        found.append(train_on(trainer, 3))
        peaks.append(device_memory_stats(torch.device("cuda"))["max allocated"])
        del trainer
    assert peaks[1] < peaks[0]
    for kept, offloaded in zip(*found, strict=True):  # losses, norms: backward passes of attention add in any order
        assert offloaded == pytest.approx(kept, rel=1e-3)
