"""The host of a training step waits for the GPU nowhere: torch, or the stand-in, raises where it would."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.checkpoint_folders import SavedRunConfig
from megatron.core.dist_checkpointing.saver import CheckpointSaver, SavePolicy
from megatron.core.parallel.device import DeviceToHostCopy
from megatron.core.parallel.mesh import Axis
from megatron.core.transformer.dispatch import AllToAllTokenDispatcher
from megatron.core.transformer.router import ExpertRouting
from megatron.training.health.exit_conditions import ExitConditions
from megatron.training.session import TrainingSession
from megatron.training.state.hooks import StepHooks
from megatron.training.state.step import train_step
from tests.gpu.test_training import MODELS
from tests.helpers import tiny
from tests.helpers.programme import trained

pytestmark = pytest.mark.gpu

WIDE: dict[str, Any] = {"bf16": True, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4}
FP8: dict[str, Any] = {**MODELS["llama"], **WIDE, "fp8_format": "hybrid"}
STEPS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt in bf16": {"bf16": True},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "llama": MODELS["llama"],
    "packed": MODELS["packed"],
    "packed without a mask": {**MODELS["packed"], "bf16": True, "attention_backend": "varlen"},
    "recomputed": MODELS["recomputed"],
    "experts": {"num_experts": 4, "moe_ffn_hidden_size": 32, "moe_grouped_gemm": True, "bf16": True},
    "experts, weights later": {
        "num_experts": 4,
        "moe_ffn_hidden_size": 32,
        "moe_grouped_gemm": True,
        "bf16": True,
        "delay_wgrad_compute": True,
    },
    "fp8 tensorwise": {**FP8, "fp8_recipe": "tensorwise"},
    "fp8 delayed": {**FP8, "fp8_recipe": "delayed"},
    "fp8 blockwise": {**FP8, "fp8_recipe": "blockwise"},
    "loss in blocks": {"cross_entropy_fusion_impl": "linear"},
    "loss by triton": {"cross_entropy_fusion_impl": "triton"},
}


@contextmanager
def no_wait() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", STEPS)
def test_a_step_waits_for_nothing(name: str) -> None:
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(**STEPS[name]), torch.device("cuda")))
    for iteration in range(2):
        train_step(trainer, tiny.short_run_batches(trainer.run, iteration))
    batches = list(tiny.short_run_batches(trainer.run, 2))
    with no_wait():
        train_step(trainer, iter(batches))


def test_experts_of_other_ranks_are_asked_for_with_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, wait = list[int](), DeviceToHostCopy.wait

    def counted(self: DeviceToHostCopy) -> list[torch.Tensor]:
        waits.append(1)
        torch.cuda.set_sync_debug_mode("default")
        try:
            return wait(self)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(DeviceToHostCopy, "wait", counted)
    experts = torch.tensor([[0, 2], [3, 2], [1, 0]], device="cuda")
    tokens, weights = torch.randn(3, 8, device="cuda"), torch.rand(3, 2, device="cuda")
    dispatcher = AllToAllTokenDispatcher(4, Axis("ep"), Axis("etp"))
    with no_wait():
        dispatched = dispatcher.dispatch(tokens, ExpertRouting(weights, experts), None)
        rows = dispatched.wait()
        combined = dispatcher.combine(rows.tokens * rows.weights[:, None], dispatched)
    assert waits == [1], "for the counts of rows, once a layer and microbatch"
    torch.testing.assert_close(combined, tokens * weights.sum(1, keepdim=True))


@pytest.mark.parametrize("operation", [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: x.nonzero()])
def test_a_wait_is_found(operation: Callable[[torch.Tensor], Any]) -> None:
    with no_wait(), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        operation(torch.ones(3, device="cuda"))


def test_an_iteration_of_the_loop_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked, seen = ExitConditions.reason_to_stop, []

    class NoWaitInAnIteration(StepHooks):
        """From the first question of an iteration to behind the other hooks."""

        def reason_to_skip(self, iteration: int) -> str:
            """Waits are errors from the third iteration on."""
            if iteration > 2:
                seen.append(iteration - 1)
                torch.cuda.set_sync_debug_mode("error")
            return ""

        def after_iteration(self, session: TrainingSession) -> None:
            """Waits are allowed."""
            torch.cuda.set_sync_debug_mode("default")

    def reason(self: ExitConditions, done: int) -> str:
        with no_wait():
            return asked(self, done)

    monkeypatch.setattr(ExitConditions, "reason_to_stop", reason)
    monkeypatch.chdir(tmp_path)
    assert os.environ.get("MEGATRON_DEVICE", "auto") != "cpu"
    flags = ["--mock-data", "--seq-length", "64", "--train-iters", "6", "--log-interval", "100", "--bf16"]
    try:
        trained(flags, hooks=[NoWaitInAnIteration()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen == [2, 3, 4, 5]


def test_polling_a_save_waits_for_nothing(tmp_path: Path) -> None:
    state = {"model.a": torch.full((100,), 1.0, device="cuda")}
    saver = CheckpointSaver(tmp_path, rules=SavePolicy(asynchronous=True), device=torch.device("cuda"))
    saver.start(state, 1, SavedRunConfig({}, 1))
    outcome = None
    with no_wait():
        while outcome is None:
            outcome = saver.poll()
    assert not outcome.problems
