"""CUDA graphs of layers on a GPU: the same training as without, but for kernels that add in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.training.accelerate.cuda_graphs import LayerGraphCapturer
from tests.helpers import tiny
from tests.helpers.training import train_on
from tests.parity.table import MODELS

pytestmark = pytest.mark.gpu


def losses_of(graphs: bool, changes: dict[str, Any]) -> list[float]:
    settings = tiny.config(
        use_cpu_initialization=True, cuda_graph_impl="local" if graphs else "none", cuda_graph_warmup_steps=2, **changes
    )
    trainer, losses = tiny.trainer_of(tiny.run_of(settings, torch.device("cuda"))), []
    recordings = LayerGraphCapturer(trainer) if graphs else None
    if recordings is not None:
        trainer.add_hook(recordings)
    for _ in range(6):
        losses += train_on(trainer, 1)[0]
        if recordings is not None:
            recordings.after_iteration(None)
    assert recordings is None or recordings.count > 0
    return losses


@pytest.mark.parametrize(
    "model", ["gpt", "llama", "gpt-oss-dense", "packed-rope", "mla-q", "moe", "mtp2", "bert", "t5-v1.1"]
)
@pytest.mark.parametrize("more", [{}, {"bf16": True}, {"hidden_dropout": 0.1}, {"pipeline_schedule": "gpipe"}], ids=str)
def test_recorded_layers_train_as_launched_ones_do(model: str, more: dict[str, Any]) -> None:
    changes = {**MODELS[model], **more}
    assert losses_of(True, changes) == pytest.approx(losses_of(False, changes), rel=1e-2 if "bf16" in more else 1e-4)


def test_recordings_may_be_repeated_in_any_order() -> None:
    changes = {**MODELS["llama"], "pipeline_schedule": "gpipe", "rampup_batch_size": (2, 2, 8)}
    assert losses_of(True, changes) == pytest.approx(losses_of(False, changes), rel=1e-4)
