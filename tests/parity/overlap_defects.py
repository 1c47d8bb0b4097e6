"""Results that are read before they have arrived, for the table of `defects.py`; only a lazy transport shows them."""

from __future__ import annotations

from typing import Any

from megatron.core.distributed import ddp
from megatron.core.distributed.ddp import DataParallel
from megatron.core.parallel.collectives import AsyncAllToAll
from megatron.core.pipeline_parallel.executor import _TensorMessage
from megatron.core.tensor_parallel import linear
from tests.parity.defect import Defect, collectives_with, nothing


def _without_waiting(self: _TensorMessage, *_: Any) -> Any:
    return self.tensors


OVERLAPS: tuple[Defect, ...] = (
    Defect(
        "factors of adapters are read while they are gathered",
        (
            ("dp2 overlap-gather bucket200", "dora"),
            ("tp2 sp dp2 overlap-reduce overlap-gather bucket200 recompute-all-parts", "lora-some"),
            ("ep2 dp4 zero overlap-gather bucket200", "lora-moe"),
        ),
        ((ddp, "_params_read_by_call", lambda module: module.parameters(recurse=False)),),
    ),
    Defect(
        "gradients are clipped while they are reduced",
        (("dp2 overlap-reduce bucket500", "gpt"), ("dp4 zero", "llama")),
        ((DataParallel, "finish_reduction", nothing),),
    ),
    Defect(
        "experts compute while tokens are on their way",
        (("ep2 dp2 alltoall", "moe-balanced"), ("ep2 dp2 turns", "moe")),
        ((AsyncAllToAll, "wait", nothing),),
    ),
    Defect(
        "a stage computes while its input is on its way",
        (("pp2", "gpt"), ("pp2 zbv", "gpt")),
        ((_TensorMessage, "wait", _without_waiting),),
    ),
    Defect(
        "a weight's gradient is computed while its input is gathered",
        (("tp2 sp", "gpt"), ("tp4 sp mb4", "llama")),
        ((linear, "collectives", collectives_with(wait=nothing)),),
    ),
)
