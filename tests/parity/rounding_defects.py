"""Mistakes around matrices of 8 bits, for the table of `defects.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.core.distributed import fp8_param_gather
from megatron.core.distributed.ddp import DataParallel
from megatron.core.kernels.low_precision.fp8 import QuantizedMatrix
from megatron.core.kernels.low_precision.recipes import OPERANDS, Operand
from megatron.core.parallel.mesh import Axis
from megatron.core.tensor_parallel import low_precision
from megatron.core.tensor_parallel.low_precision import LowPrecisionLinearOptions, LowPrecisionScaling
from tests.parity.defect import Defect, collectives_with, nothing

_largest, _maxima, _whole, _later = (
    LowPrecisionScaling.global_amax,
    low_precision._compute_weight_amaxes,
    low_precision._gather_quantized_rows,
    low_precision._gather_then_weight_gradients,
)


def _of_own_piece(tensor: Tensor, *_: Any) -> Tensor:
    return tensor


def _of_own_pieces(layers: Sequence[tuple[LowPrecisionScaling, Tensor]]) -> None:
    with patch.object(low_precision, "collectives", collectives_with(all_reduce=_of_own_piece)):
        _maxima(layers)


def _by_the_step_under_way(self: LowPrecisionScaling, operand: Operand, x: Tensor) -> Tensor | None:
    found = _largest(self, operand, x)
    place = OPERANDS.index(operand)
    if found is not None and self.knows_steps:
        self.history[place, 0] = torch.maximum(self.history[place, 0], self.seen[place])
    return found


def _of_own_data(scalings: Sequence[LowPrecisionScaling], *, stepped: bool) -> None:
    LowPrecisionScaling.append_to_amax_history(scalings, torch.stack([scaling.seen for scaling in scalings]))


def _scales_of_own_rows(x: QuantizedMatrix, axis: Axis) -> QuantizedMatrix:
    whole = _whole(x, axis)
    return (
        whole
        if x.blocks is None
        else QuantizedMatrix(whole.values, whole.scale, x.blocks.repeat(axis.size, 1), whole.block)
    )


def _own_tokens_later(compute: Any, kept: Tensor, way: LowPrecisionLinearOptions) -> tuple[Tensor, ...]:
    return _later(compute, kept if not way.gathers else torch.zeros_like(kept), way)


ROUNDING: tuple[Defect, ...] = (
    Defect(
        "owners round their ranges of a weight by scales of their own",
        (
            ("dp4 fp8-gather overlap-reduce overlap-gather bucket900 average", "fp8-tensorwise"),
            ("tp2 sp pp2 dp2 fp8-gather", "fp8-tensorwise"),
            ("tp2 sp dp2 fp8-gather overlap-gather", "fp8-blocks"),
            ("tp2 sp dp2 fp8-gather", "fp8-mx"),
        ),
        ((fp8_param_gather, "collectives", collectives_with(all_reduce_together=nothing)),),
    ),
    Defect(
        "a transposed weight is the first rounding, transposed",
        (("tp2 sp dp2 fp8-gather", "fp8-mx"),),
        (
            (
                LowPrecisionLinearOptions,
                "held_transposed_weight",
                property(lambda self: self.held_quantized_weight and self.held_quantized_weight.t()),
            ),
        ),
    ),
    Defect(
        "experts take the matrix of the first",
        (("tp2 sp dp2 fp8-gather", "fp8-experts-tensorwise"),),
        (
            (
                LowPrecisionLinearOptions,
                "held_quantized_weight",
                property(lambda self: self.scaling.held[0] if self.scaling.held else None),
            ),
        ),
    ),
    Defect(
        "weights of 8 bits are not rounded anew after a step",
        (("tp2 sp pp2 dp2 fp8-gather", "fp8-tensorwise"),),
        ((DataParallel, "start_gather", nothing),),
    ),
    Defect(
        "every rank scales by the largest value of its own piece",
        (("tp2 sp", "fp8-tensorwise"), ("tp4", "fp8-tensorwise"), ("cp2 tp2 sp", "fp8-tensorwise")),
        ((low_precision, "collectives", collectives_with(all_reduce=_of_own_piece)),),
    ),
    Defect(
        "pieces of a weight are scaled apart",
        (("tp4", "fp8-tensorwise"),),
        ((low_precision, "_compute_weight_amaxes", _of_own_pieces),),
    ),
    Defect(
        "delayed scales know the largest values of this rank only",
        (("tp2 sp dp2 zero", "fp8-delayed"), ("dp2 fsdp", "fp8-delayed")),
        ((LowPrecisionScaling, "after_step", staticmethod(_of_own_data)),),
    ),
    Defect(
        "delayed scales move within a step, so that what is recomputed is rounded anew",
        (("recompute-uniform cp2", "fp8-delayed"),),
        ((LowPrecisionScaling, "global_amax", _by_the_step_under_way),),
    ),
    Defect(
        "gathered blocks take this rank's scales",
        (("tp2 sp", "fp8-mx"),),
        ((low_precision, "_gather_quantized_rows", _scales_of_own_rows),),
    ),
    Defect(
        "gradients of weights that wait see no tokens",
        (("pp2 zb tp2 sp", "fp8-tensorwise"),),
        ((low_precision, "_gather_then_weight_gradients", _own_tokens_later),),
    ),
)
