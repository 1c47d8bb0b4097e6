"""Steps against torch's own optimizers, on a module small enough to follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig, PrecisionConfig
from megatron.core.distributed.ddp import DataParallel
from megatron.core.kernels.ops.adamw import AdamKernel
from megatron.core.kernels.ops.adamw import adamw as adamw_by_torch
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.optimizer.rule import ParamGroup, param_group_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import ParamSpec, normal_initializer
from tests.unit.distributed.ranks import SIZES, small_module

RATE, DECAY = 1e-2, 0.1


def optimizer_of(
    dtype: torch.dtype,
    *,
    precision: PrecisionConfig,
    grad_dtype: torch.dtype = torch.float32,
    sharded: bool = False,
    kernel: AdamKernel = adamw_by_torch,
    offloads: bool = False,
    **settings: Any,
) -> tuple[Any, Optimizer]:
    mesh = Mesh.single_process()
    module = small_module(mesh, dtype)
    parallel = DataParallel(
        module,
        mesh,
        grad_dtype=grad_dtype,
        sharded=sharded,
        bucket_size=100,
        overlap_reduce=False,
        overlap_gather=False,
        average=False,
    )
    config = OptimizerConfig(**settings)
    return module, Optimizer([parallel], mesh, config, precision, adamw=kernel, offloads=offloads)


def gradient(name: str, step: int) -> Tensor:
    return torch.randn(
        SIZES[name], dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + list(SIZES).index(name))
    )


def take_step(module: Any, optimizer: Optimizer, step: int, *, factor: float = 1.0, **keywords: Any) -> Any:
    """One step on known gradients, factor times as large."""
    for parallel in optimizer.parallels:
        for bucket in parallel.buckets:
            for param, view in zip(bucket.params, bucket.gradient_views(), strict=True):
                view.copy_(factor * gradient(param.spec.name.removesuffix(".weight"), step))
    optimizer.set_rates(RATE, DECAY)
    return optimizer.step(**keywords)


def torch_steps(
    make: Callable[..., torch.optim.Optimizer], clip: float, steps: int, start: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """What torch makes of the same gradients."""
    weights = {name: value.detach().to(dtype).clone().requires_grad_() for name, value in start.items()}
    inner = make(list(weights.values()))
    for step in range(steps):
        for name, weight in weights.items():
            weight.grad = gradient(name, step).to(dtype)
        if clip:
            torch.nn.utils.clip_grad_norm_(list(weights.values()), clip)
        inner.step()
    return {name: weight.detach() for name, weight in weights.items()}


def adamw(weights: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=RATE, weight_decay=DECAY, betas=(0.8, 0.95), eps=1e-6)


def sgd(weights: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=RATE, weight_decay=DECAY, momentum=0.7)


ADAM = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-6}
SGD = {"optimizer": "sgd", "sgd_momentum": 0.7}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("clip", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("make, settings", [(adamw, ADAM), (sgd, SGD)], ids=["adam", "sgd"])
def test_steps_are_torchs(make: Callable, settings: dict[str, Any], clip: float, sharded: bool) -> None:
    module, optimizer = optimizer_of(
        torch.float64,
        precision=PrecisionConfig(fp64=True),
        grad_dtype=torch.float64,
        sharded=sharded,
        clip_grad=clip,
        **settings,
    )
    start = {name: child.weight.detach().clone() for name, child in module.items()}
    for step in range(4):
        result = take_step(module, optimizer, step)
        expected = sum(gradient(name, step).square().sum() for name in SIZES).sqrt()
        assert float(result.norm) == pytest.approx(float(expected), rel=1e-12) and result.stepped
    for name, expected in torch_steps(make, clip, 4, start, torch.float64).items():
        torch.testing.assert_close(module[name].weight.detach(), expected, rtol=1e-12, atol=1e-12)


def test_bf16_weights_are_rounded_from_fp32_masters() -> None:
    module, optimizer = optimizer_of(torch.bfloat16, precision=PrecisionConfig(bf16=True), clip_grad=1.0, **ADAM)
    start = {name: child.weight.detach().clone() for name, child in module.items()}
    for step in range(5):
        take_step(module, optimizer, step)
    masters = {segment.name: tensor for slot, segment, tensor in optimizer.checkpoint_state() if slot == "master"}
    for name, expected in torch_steps(adamw, 1.0, 5, start, torch.float32).items():
        torch.testing.assert_close(masters[f"{name}.weight"].view(SIZES[name]), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(module[name].weight, masters[f"{name}.weight"].view(SIZES[name]).bfloat16())
        assert not torch.equal(module[name].weight.float().view(-1), masters[f"{name}.weight"]), (
            "masters hold more digits"
        )


def test_gradients_are_unscaled_and_multiplied_before_they_are_clipped() -> None:
    fp16 = PrecisionConfig(fp16=True, loss_scale=64.0)
    module, optimizer = optimizer_of(torch.float16, precision=fp16, clip_grad=1.0, **ADAM)
    start = {name: child.weight.detach().clone() for name, child in module.items()}
    for step in range(3):
        result = take_step(module, optimizer, step, factor=64.0 * 4, multiplier=torch.tensor(0.25))
        expected = sum(gradient(name, step).square().sum() for name in SIZES).sqrt()
        assert float(result.norm) == pytest.approx(float(expected), rel=1e-5)
    masters = {segment.name: tensor for slot, segment, tensor in optimizer.checkpoint_state() if slot == "master"}
    for name, expected in torch_steps(adamw, 1.0, 3, start, torch.float32).items():
        torch.testing.assert_close(masters[f"{name}.weight"].view(SIZES[name]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_fp16_overflow_changes_the_scale_and_nothing_else(bad: float) -> None:
    fp16 = PrecisionConfig(fp16=True, initial_loss_scale=64.0, hysteresis=1)
    module, optimizer = optimizer_of(torch.float16, precision=fp16, clip_grad=1.0, **ADAM)
    take_step(module, optimizer, 0)
    before = [tensor.clone() for _, _, tensor in optimizer.checkpoint_state()] + [
        child.weight.detach().clone() for child in module.values()
    ]
    result = take_step(module, optimizer, 1, factor=bad)
    after = [tensor for _, _, tensor in optimizer.checkpoint_state()] + [
        child.weight.detach() for child in module.values()
    ]
    assert not result.stepped and not torch.isfinite(result.norm)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (optimizer.scaler.scale, optimizer.num_steps) == (32.0, 1)
    assert take_step(module, optimizer, 2).stepped and optimizer.num_steps == 2


def test_every_kind_of_state_is_there_from_the_start() -> None:
    _, adam = optimizer_of(torch.bfloat16, precision=PrecisionConfig(bf16=True))
    _, wide = optimizer_of(torch.float32, precision=PrecisionConfig())
    _, momentum = optimizer_of(torch.float32, precision=PrecisionConfig(), optimizer="sgd")
    assert {slot for slot, _, _ in adam.checkpoint_state()} == {"master", "exp_avg", "exp_avg_sq"}
    assert {slot for slot, _, _ in wide.checkpoint_state()} == {"exp_avg", "exp_avg_sq"}
    assert {slot for slot, _, _ in momentum.checkpoint_state()} == {"momentum_buffer"}


def test_the_number_of_steps_can_be_loaded() -> None:
    module, optimizer = optimizer_of(
        torch.float64, precision=PrecisionConfig(fp64=True), grad_dtype=torch.float64, **ADAM
    )
    optimizer.load_num_steps(41)
    take_step(module, optimizer, 0)
    assert optimizer.num_steps == 42


@pytest.mark.parametrize(
    "kind, settings, expected",
    [
        ("matrix", {}, ParamGroup(True, False)),
        ("vector", {}, ParamGroup(False, False)),
        ("embedding", {}, ParamGroup(True, False)),
        ("embedding", {"decoupled_lr": 1e-3}, ParamGroup(True, True)),
        ("matrix", {"decoupled_lr": 1e-3}, ParamGroup(True, False)),
        ("qk_norm", {}, ParamGroup(False, False)),
        ("qk_norm", {"apply_wd_to_qk_layernorm": True}, ParamGroup(True, False)),
    ],
)
def test_matrices_decay_and_embeddings_may_have_a_rate_of_their_own(
    kind: Any, settings: dict[str, Any], expected: ParamGroup
) -> None:
    assert param_group_of(ParamSpec((2,), normal_initializer(1.0), kind), OptimizerConfig(**settings)) == expected


def test_rates_reach_their_groups() -> None:
    module, optimizer = optimizer_of(torch.float64, precision=PrecisionConfig(fp64=True), grad_dtype=torch.float64)
    optimizer.set_rates(0.5, 0.25)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.rules[-1].param_groups] == [(0.5, 0.25)]
    optimizer.rules[-1].param_groups[0]["group"] = ParamGroup(False, True)
    optimizer.set_rates(0.5, 0.25, decoupled_lr=2.0)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.rules[-1].param_groups] == [(2.0, 0.0)]


def test_a_rank_that_owns_nothing_steps_all_the_same() -> None:
    optimizer = Optimizer([], Mesh.single_process(), OptimizerConfig(), PrecisionConfig())
    optimizer.set_rates(RATE, DECAY)
    result = optimizer.step(multiplier=torch.tensor(0.5), count_zero_elements=True)
    assert result.stepped and float(result.norm) == 0.0 and int(result.zeros) == 0 and optimizer.num_steps == 0
