from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.core.config.flags.declare import ConfigError
from megatron.core.kernels.choice.table import KernelRequirements, select_kernels
from megatron.core.kernels.ops import grouped, reference

COUNTS = {
    "even": (6, 6, 6, 6),
    "uneven": (1, 17, 5, 2),
    "one hot": (0, 0, 40, 0),
    "some without rows": (3, 0, 0, 4),
    "few": (1, 2, 0, 1),
    "no row at all": (0, 0, 0, 0),
    "one expert": (7,),
}


def results(
    call: Callable[..., Tensor],
    counts: tuple[int, ...],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    biased: bool = True,
) -> list[Tensor]:
    """Output, and gradients of input, weight and bias."""
    random = torch.Generator().manual_seed(3)
    experts, rows, inputs, outputs = len(counts), sum(counts), 8, 16
    shapes = ((rows, inputs), (experts, outputs, inputs), (experts, outputs))
    x, weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=random).to(device, dtype).requires_grad_() for shape in shapes
    )
    target = torch.randn((rows, outputs), dtype=torch.float64, generator=random).to(device, dtype)
    output = call(x, weight, torch.tensor(counts, device=device), bias if biased else None)
    output.backward(target)
    return [output.detach(), x.grad, weight.grad, *([bias.grad] if biased else [])]


def row_by_row(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """One row after the other, each by the matrix of its expert."""
    owners = [expert for expert, count in enumerate(counts.tolist()) for _ in range(count)]
    rows = [
        weight[expert] @ row + (0.0 if bias is None else bias[expert]) for row, expert in zip(x, owners, strict=True)
    ]
    return (
        torch.stack(rows) if rows else x @ weight[0].t() + 0.0 * (weight.sum() + (0.0 if bias is None else bias.sum()))
    )


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("call", [reference.grouped_linear, grouped.grouped_linear])
def test_every_row_meets_the_matrix_of_its_own_expert(
    call: Callable[..., Tensor], counts: tuple[int, ...], biased: bool
) -> None:
    found, expected = (results(which, counts, torch.float64, biased=biased) for which in (call, row_by_row))
    for value, true in zip(found, expected, strict=True):
        torch.testing.assert_close(value, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_in_bf16_the_grouped_matmul_is_the_loop_up_to_rounding(counts: tuple[int, ...]) -> None:
    for value, true in zip(
        results(grouped.grouped_linear, counts, torch.bfloat16),
        results(reference.grouped_linear, counts, torch.bfloat16),
        strict=True,
    ):
        torch.testing.assert_close(value, true, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_on_a_gpu_torchs_grouped_matmul_is_the_loop_up_to_rounding(counts: tuple[int, ...]) -> None:
    for value, true in zip(
        results(grouped.grouped_linear_by_grouped_mm, counts, torch.bfloat16, "cuda"),
        results(row_by_row, counts, torch.float64),
        strict=True,
    ):
        torch.testing.assert_close(value.double().cpu(), true, rtol=5e-2, atol=1e-1)


def test_the_loop_is_taken_when_it_is_asked_for_and_torchs_kernel_only_where_it_runs() -> None:
    assert select_kernels(KernelRequirements(), {"grouped_linear": "loop"}).grouped_linear is reference.grouped_linear
    assert select_kernels(KernelRequirements(), {"grouped_linear": "auto"}).grouped_linear is grouped.grouped_linear
    assert (
        select_kernels(KernelRequirements(device="cuda", dtype=torch.bfloat16)).grouped_linear
        is grouped.grouped_linear_by_grouped_mm
    )
    assert select_kernels(KernelRequirements(device="cuda")).grouped_linear is grouped.grouped_linear
    with pytest.raises(ConfigError, match="for GPUs"):
        select_kernels(KernelRequirements(), {"grouped_linear": "torch"})


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_a_weighed_bias_has_the_gradients_of_its_formula(counts: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(8)
    weights, bias = (
        torch.randn(shape, dtype=torch.float64, generator=random).requires_grad_()
        for shape in ((sum(counts),), (len(counts), 3))
    )
    owners = torch.tensor([expert for expert, count in enumerate(counts) for _ in range(count)], dtype=torch.int64)
    assert torch.equal(
        grouped.weighted_bias_of_expert_rows(weights, bias, torch.tensor(counts)), weights[:, None] * bias[owners]
    )
    assert torch.autograd.gradcheck(
        lambda w, b: grouped.weighted_bias_of_expert_rows(w, b, torch.tensor(counts)), (weights, bias)
    )


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_weight_gradients_that_wait_are_the_same_by_torchs_grouped_kernel(counts: tuple[int, ...]) -> None:
    x, gradient = (torch.randn(sum(counts), size).bfloat16() for size in (16, 24))
    sizes = torch.tensor(counts)
    result = grouped._weight_gradients_by_grouped_mm(x, gradient, sizes)
    torch.testing.assert_close(result, grouped.grouped_weight_gradients(x, gradient, sizes), rtol=2e-2, atol=1e-2)
