"""Grouped linear layers: row i of the input is multiplied by the matrix of its expert.

    rows      [ expert 0 | expert 1 | .. | expert 3 ]     sorted by expert, counts = (3, 1, 0, 2)
    weight    [e, out, in]

`reference.grouped_linear` defines the op: one matmul for each expert. Here it is a single autograd op that writes each result in place; experts with
few rows are padded to one batched matmul, since a call then costs more than its work.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megatron.core.kernels.ops import reference
from megatron.core.kernels.ops.host_read_permission import host_may_read

_FEW = 8  # rows an expert, on average, up to which one batched matmul with padding was faster on CPUs
_WASTE = 4  # padded rows over true ones from which it was not


class _GroupedLinear(Function):
    """The autograd function of `grouped_linear`."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        context.save_for_backward(x, weight)
        context.sizes = sizes
        output = x.new_empty((x.shape[0], weight.shape[1]))
        for rows, matrix, target in zip(x.split(sizes), weight, output.split(sizes), strict=True):
            torch.mm(rows, matrix.t(), out=target)
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = context.saved_tensors
        sizes = context.sizes
        for_x, for_weight = torch.empty_like(x), torch.empty_like(weight)
        for rows, matrix, gone, back, change in zip(
            x.split(sizes), weight, gradient.split(sizes), for_x.split(sizes), for_weight, strict=True
        ):
            torch.mm(gone, matrix, out=back)
            torch.mm(gone.t(), rows, out=change)  # of no rows: zeros
        return for_x, for_weight, None


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `reference.grouped_linear` as one autograd op, or as one padded batched matmul if experts have few rows.
    x: [n, in], sorted by expert; weight: [e, out, in]; counts: [e], rows of each expert; bias: [e, out] or None.
    Returns [n, out].
    """
    if not host_may_read():  # then any expert may have all rows
        return reference.add_bias_of_expert_rows(_grouped_linear_by_padded_bmm(x, weight, counts, len(x)), bias, counts)
    sizes, experts = counts.tolist(), weight.shape[0]
    most = max(sizes)
    few = len(x) <= _FEW * experts and 0 < most * experts <= _WASTE * len(x)
    output = (
        _grouped_linear_by_padded_bmm(x, weight, counts, most)
        if few
        else _GroupedLinear.apply(x.contiguous(), weight, sizes)
    )
    return reference.add_bias_of_expert_rows(output, bias, counts)


def _grouped_linear_by_padded_bmm(x: Tensor, weight: Tensor, counts: Tensor, most: int) -> Tensor:
    """Compute `grouped_linear` without bias as one batched matmul, in which every expert has `most` rows, padded with
    zeros. Returns [n, out].
    """
    owners = reference.expert_of_rows(x, counts)
    place = owners * most + torch.arange(len(x), device=x.device) - (counts.cumsum(0) - counts)[owners]
    table = x.new_zeros(weight.shape[0] * most, x.shape[1]).index_copy(0, place, x)
    output = torch.bmm(table.view(weight.shape[0], most, -1), weight.transpose(1, 2))
    return output.flatten(0, 1).index_select(0, place)


def grouped_linear_by_grouped_mm(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `reference.grouped_linear` by torch's grouped GPU kernel, for which the host need not know the counts.

    x: [t, in]; weight: [e, out, in]; counts: [e], rows of each expert; bias: [e, out]. Returns [t, out].
    """
    if x.shape[-1] % 8 or weight.shape[1] % 8:  # its rows must begin at multiples of 16 bytes
        return grouped_linear(x, weight, counts, bias)
    ends = counts.cumsum(0).to(torch.int32)
    return reference.add_bias_of_expert_rows(F.grouped_mm(x, weight.transpose(1, 2), offs=ends), bias, counts)


def grouped_weight_gradients(x: Tensor, gradient: Tensor, counts: Tensor) -> Tensor:
    """Return the gradients of `grouped_linear`'s weight matrices, [e, out, in].

    x: [n, in] and gradient (of the output): [n, out], both sorted by expert; counts: [e], rows of each expert. On a GPU
    in bf16 torch's grouped kernel computes them, without the host reading the counts.
    """
    if x.device.type == "cuda" and x.dtype == torch.bfloat16 and not (x.shape[-1] % 8 or gradient.shape[-1] % 8):
        return _weight_gradients_by_grouped_mm(x, gradient, counts)
    sizes = counts.tolist()
    return torch.stack([dy.t().matmul(rows) for dy, rows in zip(gradient.split(sizes), x.split(sizes), strict=True)])


def _weight_gradients_by_grouped_mm(x: Tensor, gradient: Tensor, counts: Tensor) -> Tensor:
    """Compute `grouped_weight_gradients` by torch's grouped GPU kernel."""
    return F.grouped_mm(gradient.t(), x, offs=counts.cumsum(0).to(torch.int32))


class _WeightedBiasOfExpertRows(Function):
    """The autograd function of `weighted_bias_of_expert_rows`."""

    @staticmethod
    def forward(context: Any, weights: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
        owners = reference.expert_of_rows(weights, counts)
        context.save_for_backward(weights, bias, owners)
        return weights[:, None] * bias.index_select(0, owners)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, bias, owners = context.saved_tensors
        for_weights = (gradient * bias.index_select(0, owners)).sum(1).to(weights.dtype)
        for_bias = torch.zeros_like(bias, dtype=gradient.dtype).index_add(0, owners, gradient * weights[:, None])
        return for_weights, for_bias.to(bias.dtype), None


def weighted_bias_of_expert_rows(weights: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """Return each row's weight times the bias of its expert, [n, out]; no [n, out] tensor is kept for the backward
    pass.

    weights: [n], rows sorted by expert; bias: [e, out]; counts: [e], rows of each expert.
    """
    return _WeightedBiasOfExpertRows.apply(weights, bias, counts)
