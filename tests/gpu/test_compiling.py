"""--compile on a GPU, where triton makes the kernels, against the same training on the CPU without a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.training.accelerate.compile import LayerCompiler
from tests.helpers import tiny
from tests.helpers.training import train_on
from tests.parity.table import MODELS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("model", ["gpt2", "llama", "gpt-oss-dense", "moe"])
@pytest.mark.parametrize(
    "more", [{}, {"recompute_granularity": "full", "recompute_method": "uniform"}], ids=["", "recomputed"]
)
def test_compiled_training_on_a_gpu_equals_the_cpu(model: str, more: dict[str, Any]) -> None:
    changes = {**MODELS[model], **more, "use_cpu_initialization": True}
    expected, _ = train_on(tiny.trainer_of(tiny.run_of(tiny.config(**changes))), 4)
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(**changes, compile=True), torch.device("cuda")))
    LayerCompiler(trainer)
    found, _ = train_on(trainer, 4)
    torch._dynamo.reset()
    assert found == pytest.approx(expected, rel=1e-4)


def test_dropout_draws_on_a_gpu_what_it_draws_without_a_compiler() -> None:
    changes = {**MODELS["llama"], "hidden_dropout": 0.1}
    expected, _ = train_on(tiny.trainer_of(tiny.run_of(tiny.config(**changes), torch.device("cuda"))), 4)
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(**changes, compile=True), torch.device("cuda")))
    LayerCompiler(trainer)
    assert train_on(trainer, 4)[0] == pytest.approx(expected, rel=1e-4)
