"""Bytes of state: the page's table, the formula that plans a run, and what an optimizer holds are one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron.core.distributed.ddp import DataParallel
from megatron.core.models.flops import owned_bytes_per_parameter
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import ParamSpec, normal_initializer, set_global_param_names
from tests.helpers import tiny

PAGE = Path(__file__).resolve().parents[3] / "docs" / "optimizers.md"
ROWS = re.findall(
    r"^\| `(--(?:optimizer|use-precision).+?)`.*? \| ([\d.]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
)


def settings(flags: str) -> dict[str, object]:
    words = flags.removeprefix("--").split(" --")
    return {name.replace("-", "_"): value or True for name, _, value in (word.partition(" ") for word in words)}


@pytest.mark.parametrize("flags, said", ROWS)
def test_the_pages_bytes_are_what_an_optimizer_holds(flags: str, said: str) -> None:
    config = tiny.config(bf16=True, **settings(flags))
    param = torch.nn.Parameter(torch.randn(128, 64).bfloat16())
    param.spec = ParamSpec((128, 64), normal_initializer(1.0), "matrix")  # type: ignore[attr-defined]
    module = torch.nn.ParameterDict({"weight": param})
    set_global_param_names(module)
    parallel = DataParallel(
        module,
        Mesh.single_process(),
        grad_dtype=torch.float32,
        sharded=False,
        bucket_size=None,
        overlap_reduce=False,
        overlap_gather=False,
        average=False,
    )
    optimizer = Optimizer([parallel], Mesh.single_process(), config.optimizer, config.precision)
    held = sum(tensor.nbytes for tensor in optimizer.storage_tensors()) / param.numel()
    assert held == owned_bytes_per_parameter(config) and f"{held:.3g}" == said


def test_the_page_has_rows() -> None:
    assert len(ROWS) == 10
