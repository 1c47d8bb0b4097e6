"""Adafactor against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig, PrecisionConfig
from megatron.core.distributed.ddp import DataParallel
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import (
    FusedWeightSegment,
    ParamSpec,
    ShardedDim,
    normal_initializer,
    set_global_param_names,
)

RATE, DECAY = 0.3, 0.1
SPECS = {
    "matrix": ParamSpec((6, 10), normal_initializer(1.0), "matrix"),
    "conv": ParamSpec((5, 1, 4), normal_initializer(1.0), "matrix"),
    "fused": ParamSpec(
        (12, 7),
        normal_initializer(1.0),
        "matrix",
        (ShardedDim(0, "tp", (FusedWeightSegment(6), FusedWeightSegment(3), FusedWeightSegment(3))),),
    ),
    "bias": ParamSpec((9,), normal_initializer(1.0), "vector"),
    "experts": ParamSpec(
        (3, 8, 5),
        normal_initializer(1.0),
        "matrix",
        (ShardedDim(0, "ep", (FusedWeightSegment(3),)),),
        reduce_over="edp",
        stacked=True,
    ),
    "expert_bias": ParamSpec(
        (3, 8),
        normal_initializer(1.0),
        "vector",
        (ShardedDim(0, "ep", (FusedWeightSegment(3),)),),
        reduce_over="edp",
        stacked=True,
    ),
}


def drawn(name: str, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + list(SPECS).index(name))
    return torch.randn(SPECS[name].shape, dtype=torch.float64, generator=generator).to(dtype)


def alone(name: str, value: Tensor) -> list[Tensor]:
    """Each of those that are stacked, or all of it."""
    return [one.clone() for one in value] if SPECS[name].stacked else [value.clone()]


def ours(dtype: torch.dtype, steps: int, *, size: float, **settings: Any) -> tuple[dict[str, Tensor], Optimizer]:
    """The weights after some steps."""
    module = torch.nn.ParameterDict({name: torch.nn.Parameter(drawn(name, 0, dtype)) for name in SPECS})
    for name, spec in SPECS.items():
        module[name].spec = spec
    set_global_param_names(module)
    parallel = DataParallel(
        module,
        Mesh.single_process(),
        grad_dtype=dtype,
        sharded=True,
        bucket_size=100,
        overlap_reduce=False,
        overlap_gather=False,
        average=False,
    )
    optimizer = Optimizer(
        [parallel],
        Mesh.single_process(),
        OptimizerConfig(optimizer="adafactor", clip_grad=0.0, **settings),
        PrecisionConfig(fp64=dtype == torch.float64),
    )
    for step in range(1, steps + 1):
        for bucket in parallel.buckets:
            for param, view in zip(bucket.params, bucket.gradient_views(), strict=True):
                view.copy_(size * drawn(param.spec.name, step, dtype))
        optimizer.set_rates(RATE, DECAY)
        optimizer.step()
    return {name: param.detach() for name, param in module.items()}, optimizer


def torchs(name: str, dtype: torch.dtype, steps: int, *, size: float, **settings: Any) -> list[Tensor]:
    """The same by torch.optim.Adafactor. Vectors do not decay here."""
    weights = [torch.nn.Parameter(one) for one in alone(name, drawn(name, 0, dtype))]
    theirs = torch.optim.Adafactor(
        weights, lr=RATE, weight_decay=DECAY if SPECS[name].kind == "matrix" else 0.0, **settings
    )
    for step in range(1, steps + 1):
        for weight, gradient in zip(weights, alone(name, size * drawn(name, step, dtype)), strict=True):
            weight.grad = gradient
        theirs.step()
    return [weight.detach() for weight in weights]


# Gradients about as large as an epsilon, and steps after which the rate begins to fall, at 1 / 0.3^2.
@pytest.mark.parametrize(
    "dtype, size, mine, theirs",
    [
        (torch.float64, 1.0, {}, {}),
        (torch.float32, 1e-7, {}, {}),
        (
            torch.float64,
            1.0,
            {"adafactor_decay_rate": 0.5, "adafactor_clip_threshold": 1.1, "adafactor_min_rms": 1.2},
            {"beta2_decay": -0.5, "d": 1.1, "eps": (None, 1.2)},
        ),
    ],
    ids=["fp64", "small gradients", "other settings"],
)
def test_steps_are_torchs_of_every_parameter_and_of_every_expert(
    dtype: torch.dtype, size: float, mine: dict[str, Any], theirs: dict[str, Any]
) -> None:
    found, _ = ours(dtype, 14, size=size, **mine)
    rounding = 1e-11 if dtype == torch.float64 else 2e-5
    for name in SPECS:
        for one, expected in zip(alone(name, found[name]), torchs(name, dtype, 14, size=size, **theirs), strict=True):
            torch.testing.assert_close(
                one, expected, rtol=rounding, atol=rounding, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_only_rows_and_columns_of_matrices_are_kept_and_all_of_vectors() -> None:
    _, optimizer = ours(torch.float64, 1, size=1.0)
    kept = {(slot, segment.name): segment.spec.shape for slot, segment, _ in optimizer.checkpoint_state()}
    assert kept == {
        ("exp_avg_sq_row", "matrix"): (6,),
        ("exp_avg_sq_col", "matrix"): (10,),
        ("exp_avg_sq_row", "conv"): (5, 1),
        ("exp_avg_sq_col", "conv"): (5, 4),
        ("exp_avg_sq_row", "fused"): (12,),
        ("exp_avg_sq_col", "fused"): (7,),
        ("exp_avg_sq_row", "experts"): (3, 8),
        ("exp_avg_sq_col", "experts"): (3, 5),
        ("exp_avg_sq", "bias"): (9,),
        ("exp_avg_sq", "expert_bias"): (3, 8),
    }
    assert all(len(tensor) == segment.high - segment.low for _, segment, tensor in optimizer.checkpoint_state())
