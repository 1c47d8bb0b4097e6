"""Mistakes of update rules that look at whole matrices, and of activations that wait elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.optimizer import adafactor, muon, whole_matrix
from megatron.core.optimizer.adafactor import Adafactor
from megatron.core.optimizer.muon import Muon
from megatron.core.optimizer.orthogonal import orthogonalize, orthogonalize_distributed
from megatron.core.optimizer.soap import Soap, _number_in_stack
from megatron.core.optimizer.whole_matrix import MatrixTask
from megatron.core.parallel import offload
from megatron.core.parallel.offload import OffloadedBuffer
from megatron.core.parallel.spec import ParamSpec
from tests.parity.defect import Defect

_returned, _direction, _arrived = whole_matrix._pack_send_buffer, Muon._direction, OffloadedBuffer.wait
_blocks, _sum, _whole_update = adafactor._owned_rectangles, Adafactor._all_reduce_sums, Soap._update_of_task


def _each_piece_for_a_matrix(self: Muon, x: Tensor, spec: ParamSpec) -> Tensor:
    return self._scale_update(orthogonalize(x, self.iteration), x.shape[1:])


def _every_copy_counts(x: Tensor, how: Any, axis: Any, counted: Tensor | None = None) -> Tensor:
    return orthogonalize_distributed(x, how, axis, None)


def _back_to_the_rank_beside(
    updates: Sequence[Tensor], slabs: Sequence[MatrixTask], ranks: int, nothing: Tensor
) -> Tensor:
    return _returned(updates, slabs, ranks, nothing).roll(1)


def _direction_in_the_owners_part_only(self: Muon, name: str, main: Tensor) -> Tensor:
    found = _direction(self, name, main)
    return found if self.mesh.dp_cp.is_first else torch.zeros_like(found)


def _gradient_of_the_first_rank_only(self: Soap, name: str, main: Tensor) -> Tensor:
    return main.grad if self.mesh.dp_cp.is_first else torch.zeros_like(main.grad)


def _state_is_lost_between_steps(self: Soap, task: MatrixTask, local: Tensor) -> Tensor:
    if task.is_sharded:
        self.state[f"{task.name} {_number_in_stack(task)}"] = self._initial_state(task)
    return _whole_update(self, task, local)


def _own_sums_alone(axis: str) -> Any:
    def summed(self: Adafactor, shares: Any) -> None:
        _sum(
            self,
            [(replace(whole, axes=tuple(one for one in whole.axes if one != axis)), share) for whole, share in shares],
        )

    return summed


def _every_block_counts(segment: Any, mesh: Any) -> Any:
    return (replace(block, is_counted=True) for block in _blocks(segment, mesh))


def _as_it_was_last(self: OffloadedBuffer) -> Tensor:
    self._back = torch.zeros_like(self.host) if self._back is None else self._back
    self._mark = self.side_stream.record_event()
    return _arrived(self)


UPDATES: tuple[Defect, ...] = (
    Defect(
        "a piece of a matrix is taken for the matrix",
        (("tp4 mb4", "muon"),),
        ((Muon, "_orthogonalize_local_shard", _each_piece_for_a_matrix),),
    ),
    Defect(
        "copies of key heads count twice where tensor ranks share Muon's work",
        (("tp4 sp muon-distributed mb4", "muon"),),
        ((muon, "orthogonalize_distributed", _every_copy_counts),),
    ),
    Defect(
        "owners send updates back one element off",
        (("dp4 zero bucket600 mb2", "muon"),),
        ((whole_matrix, "_pack_send_buffer", _back_to_the_rank_beside),),
    ),
    Defect(
        "an owner hears of the first data rank's momentum only",
        (("tp2 dp2 fsdp mb2", "muon-joined"),),
        ((Muon, "_direction", _direction_in_the_owners_part_only),),
    ),
    Defect(
        "an owner gets the gradients of the first data rank alone",
        (("tp2 dp2 fsdp mb2", "soap-plain"),),
        ((Soap, "_direction", _gradient_of_the_first_rank_only),),
    ),
    Defect(
        "each data rank that owns some of a matrix begins its state anew",
        (("dp4 zero bucket600 mb2", "soap"),),
        ((Soap, "_update_of_task", _state_is_lost_between_steps),),
    ),
    Defect(
        "rows and columns are those of a tensor rank's piece",
        (("tp4 mb4", "adafactor-gqa"),),
        ((Adafactor, "_all_reduce_sums", _own_sums_alone("tp")),),
    ),
    Defect(
        "rows and columns are those of what a data rank owns",
        (("pp2 dp2 zero bucket600 overlap-gather mb2", "adafactor"), ("tp2 dp2 fsdp mb2", "adafactor")),
        ((Adafactor, "_all_reduce_sums", _own_sums_alone("dp_cp")),),
    ),
    Defect(
        "rows and columns are those of a piece of an expert",
        (("tp2 sp ep2 etp2 dp4 zero mb2", "adafactor-moe"),),
        ((Adafactor, "_all_reduce_sums", _own_sums_alone("etp")),),
    ),
    Defect(
        "squares of copied key heads count twice",
        (("tp4 mb4", "adafactor-gqa"),),
        ((adafactor, "_owned_rectangles", _every_block_counts),),
    ),
    Defect(
        "activations are used before they have come back",
        (("offload-layers pp2 vpp2 recompute-mlp mb2", "llama"), ("offload-parts ep2 dp2 alltoall mb2", "moe")),
        ((offload.OffloadedBuffer, "wait", _as_it_was_last),),
    ),
)
