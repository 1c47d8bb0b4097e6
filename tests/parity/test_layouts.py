"""All parallelisms are correct: every row of the table equals the serial run of the same network.

fp64: losses, gradient norms and final weights to 1e-10. fp32: losses and norms to 1e-5, weights to 1e-4.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.helpers.training import Outcome, differences, train, train_alone
from tests.helpers.world import Worlds
from tests.parity.table import MODELS, ROWS, read_layout

IDS = [f"{layout} / {model}" for layout, model in ROWS]
@cache
def serial(model: str, precision: str, micro_batch_size: int = 1) -> Outcome:
    return train_alone({**MODELS[model], **PRECISIONS[precision], "micro_batch_size": micro_batch_size})

PRECISIONS = {"fp64": {"fp64": True}, "fp32": {"adam_eps": 1e-4}}

@pytest.mark.parametrize("layout, model", ROWS, ids=IDS)
def test_fp64(world, layout, model):
    ranks, changes = read_layout(layout)
    assert not differences(train(world, ranks, {**MODELS[model], **PRECISIONS["fp64"], **changes}), serial(model, "fp64"), 1e-10)

@pytest.mark.parametrize("layout, model", ROWS, ids=IDS)
def test_fp32(world, layout, model):
    ranks, changes = read_layout(layout)
    assert not differences(train(world, ranks, {**MODELS[model], **PRECISIONS["fp32"], **changes}), serial(model, "fp32"), 1e-5)
