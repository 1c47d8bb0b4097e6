"""AdamW's kernels against the formula in fp64 and torch's own optimizer, and what an update launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.launches import VIEWS
from megatron.core.config.settings.optim import PrecisionConfig
from megatron.core.kernels.ops import adamw
from megatron.core.kernels.ops.adamw import AdamStepSettings, AdamTensors
from megatron.core.optimizer.optimizer import Optimizer
from megatron.training.state.step import train_step
from tests.helpers import tiny
from tests.helpers.triton_interpreter import interpreted, needs_triton
from tests.unit.distributed.ranks import SIZES
from tests.unit.optimizer.test_optimizer import ADAM, optimizer_of, take_step, torch_steps
from tests.unit.optimizer.test_optimizer import adamw as torchs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """The file, imported anew so that its kernel is interpreted."""
    with interpreted("triton.adamw") as modules, pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules["triton.adamw"], "_BLOCK", 64)  # several programs, as on a GPU
        yield modules["triton.adamw"]


def test_torchs_update_is_the_formula() -> None:
    assert (
        adamw.adamw_kernel_error(adamw.adamw, CPU, torch.bfloat16) < 4e-6
        and adamw.adamw_kernel_error(adamw.adamw, CPU, torch.float64) < 1e-14
    )


@needs_triton
def test_tritons_update_is_the_formula(kernels: ModuleType) -> None:
    assert adamw.adamw_kernel_error(kernels.adamw, CPU, torch.bfloat16) < 4e-6


@needs_triton
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_pieces_of_buckets_that_begin_anywhere_are_updated_alone(
    kernels: ModuleType, dtype: torch.dtype | None
) -> None:
    """A rank's pieces begin and end between the 16 bytes that a thread loads; what lies around them stays."""
    rates, edges = AdamStepSettings(1e-2, 0.1, 0.9, 0.95, 1e-8, 3), ((0, 64), (64, 200), (201, 213), (219, 400))
    flat = torch.randn(4, 410, generator=torch.Generator().manual_seed(1))
    flat[3].abs_()
    weight = None if dtype is None else torch.full((410,), 7.0, dtype=dtype)

    def pieces(values: Tensor, weight: Tensor | None) -> list[AdamTensors]:
        return [
            AdamTensors(*(row[low:high] for row in values), None if weight is None else weight[low:high])
            for low, high in edges
        ]

    expected = flat.double()
    for one in pieces(expected, None):
        adamw.reference_adamw(one, 0.5, rates)
    kernels.adamw(pieces(flat, weight), 0.5, rates)
    for row in (0, 2, 3):
        torch.testing.assert_close(flat[row].double(), expected[row], rtol=1e-6, atol=1e-6)
    if weight is not None:
        inside = torch.zeros(410, dtype=torch.bool)
        for low, high in edges:
            inside[low:high] = True
        step = 0.0 if dtype == torch.float16 else 2.0**-7  # Triton's interpreter cuts off what a GPU rounds to bf16
        rounded = flat[0][inside].to(dtype)
        torch.testing.assert_close(weight[inside], rounded, rtol=step, atol=0.0)
        assert (weight[~inside] == 7.0).all()


@needs_triton
@pytest.mark.parametrize("sharded", [False, True])
def test_clipped_unscaled_steps_with_tritons_kernel_are_torchs(kernels: ModuleType, sharded: bool) -> None:
    fp16 = PrecisionConfig(fp16=True, loss_scale=64.0)
    module, optimizer = optimizer_of(
        torch.float16, precision=fp16, clip_grad=1.0, sharded=sharded, kernel=kernels.adamw, **ADAM
    )
    start = {name: child.weight.detach().clone() for name, child in module.items()}
    for step in range(3):
        take_step(module, optimizer, step, factor=64.0 * 4, multiplier=torch.tensor(0.25))
    main_weights = {segment.name: tensor for slot, segment, tensor in optimizer.checkpoint_state() if slot == "master"}
    for name, expected in torch_steps(torchs, 1.0, 3, start, torch.float32).items():
        main = main_weights[f"{name}.weight"].view(SIZES[name])
        torch.testing.assert_close(main, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(module[name].weight, main.half())


@pytest.mark.parametrize(
    "wrong",
    [{"decay": 0.0}, {"lr": 1.01e-2}, {"beta1": 0.89}, {"beta2": 0.96}, {"epsilon": 2e-3}, {"step": 3}],
    ids=str,
)
def test_a_kernel_with_one_wrong_number_fails_its_trial(wrong: dict[str, Any]) -> None:
    def kernel(parameters: Sequence[AdamTensors], factor: float | Tensor, rates: AdamStepSettings) -> None:
        adamw.adamw(parameters, factor, replace(rates, **wrong))

    def without_weights(parameters: Sequence[AdamTensors], factor: float | Tensor, rates: AdamStepSettings) -> None:
        adamw.adamw([replace(one, weight=None) for one in parameters], factor, rates)

    for broken in (kernel, without_weights):
        with pytest.raises(ArithmeticError):
            adamw.adamw_kernel_error(broken, CPU, torch.float32)


class _Launched(TorchDispatchMode):
    """Counts operations that compute or copy."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counts[name] += name not in VIEWS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "changes", [{}, {"grad_reduce_in_bf16": True}, {"optimizer": "muon"}], ids=["adam", "bf16 gradients", "muon"]
)
def test_an_update_of_more_layers_launches_no_more(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    update, found = Optimizer.step, list[Counter[str]]()

    def step(self: Optimizer, *given: Any, **how: Any) -> Any:
        with _Launched() as launched:
            result = update(self, *given, **how)
        found.append(launched.counts)
        return result

    monkeypatch.setattr(Optimizer, "step", step)
    for layers in (2, 4):
        trainer = tiny.trainer_of(tiny.run_of(tiny.config(num_layers=layers, bf16=True, clip_grad=1.0, **changes), CPU))
        train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    few, many = found
    copies = ("copy_", "_to_copy", "_foreach_copy_")
    assert [few[name] for name in copies] == [many[name] for name in copies]
    assert changes.get("optimizer") or few == many and few.total() <= 25, few
