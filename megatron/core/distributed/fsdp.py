"""Fully sharded data parallelism by torch's FSDP2: each data-parallel rank owns some rows of every weight.

A layer's weights are gathered only while it computes. `fully_shard` shards the rows of the tensor-parallel shard:

    weight [out, in]  --tp-->  [out/tp, in], the local tensor  --dp_cp-->  some of its rows: a `OwnedSegment`, low to high

    forward    gather layer 0, compute, free | gather layer 1, compute, free | ...
    backward   ... | gather layer 1, compute, reduce-scatter its gradients, free | gather layer 0, ...

For the optimizer and checkpoints an owned shard is a `OwnedSegment`, like an owned range of a bucket under ZeRO-1. It is fp32 and its
own main weight: half-precision weights exist only while gathered. Gradients are reduced over the ranks after every microbatch,
so that none is stored as a whole. Experts are sharded over the ranks that hold the same ones.

Zhao et al., 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"; torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as placements
from torch.distributed.tensor import DTensor, Shard

from megatron.core.config.flags.declare import ConfigError
from megatron.core.distributed.buffers import OwnedSegment, ParamOwnership
from megatron.core.distributed.ddp import DataParallel
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.spec import ParamSpec, param_spec_of

_HALF = (torch.float16, torch.bfloat16)


class FullySharded:
    """The sharded parameters of one stage, with the interface of `DataParallel`; torch's hooks do the work of a step.

    sharded_segments: the owned shards. whole_params: parameters that are not sharded, since they have no gradient or no
    other rank holds the same experts.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        mesh: Mesh,
        *,
        grad_dtype: torch.dtype,
        average: bool,
        keep_layers: bool,
        fill: Callable[[nn.Module], Any],
    ) -> None:
        """Initialize and shard the stage, layer by layer.

        layers: submodules that are gathered separately; the rest stays gathered during a whole pass. average: divide by
        the data-parallel size after a sum. keep_layers: layers stay gathered from the forward to the backward pass.
        fill: sets the initial values of a submodule, which is sharded before the next one is filled.
        """
        self.module, self.sharded_segments, self._owned = module, list[OwnedSegment](), list[ParamOwnership]()
        self._mesh, self._grad_dtype, self._average = mesh, grad_dtype, average
        # No caller writes into the output of a stage.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        dense_mesh = _device_mesh_of_axis(mesh.dp_cp, mesh)
        expert_placement = (
            _fsdp_row_placement(mesh.edp, mesh) if mesh.edp.group not in (None, mesh.dp_cp.group) else None
        )
        unsharded: set[nn.Parameter] = set()
        for submodule in (*layers, module):
            fill(submodule)
            unsharded |= {
                p for p in submodule.parameters() if self._is_excluded_from_sharding(p)
            } | _params_kept_in_fp32(submodule)
            fsdp_module = self._shard_submodule(
                submodule, dense_mesh, expert_placement, unsharded, reshard=submodule is not module and not keep_layers
            )
        if expert_placement:  # experts without tokens must still take part in the reduction
            fsdp_module.set_reduce_scatter_unused_params(True)
        module.register_forward_hook(_reshard_after_evaluation)
        self.whole_params = [param for param in module.parameters() if param in unsharded]
        self._rest = DataParallel(
            nn.ParameterList(p for p in self.whole_params if p.requires_grad),
            mesh,
            grad_dtype=grad_dtype,
            sharded=False,
            bucket_size=None,
            overlap_reduce=False,
            overlap_gather=False,
            average=average,
        )

    def _is_excluded_from_sharding(self, param: nn.Parameter) -> bool:
        """Return whether a parameter is not sharded: it has no gradient, or no other rank holds the same experts."""
        return not (param.requires_grad and self._mesh.axis(param_spec_of(param).reduce_over).group)

    def _shard_submodule(
        self,
        submodule: nn.Module,
        device_mesh: DeviceMesh,
        expert_placement: Any,
        unsharded: set[nn.Parameter],
        *,
        reshard: bool,
    ) -> FSDPModule:
        """Shard those parameters of a submodule that are still whole, except `unsharded`; record who owns which rows.

        expert_placement: how parameters of experts are sharded. reshard: free gathered parameters after forward.
        """
        new_params = {
            path: p for path, p in submodule.named_parameters() if p not in unsharded and not isinstance(p, DTensor)
        }
        specs = {path: param_spec_of(param) for path, param in new_params.items()}
        gather_dtype = _convert_half_params_to_fp32(list(new_params.values()))
        fsdp_module = fully_shard(
            submodule,
            mesh=device_mesh,
            reshard_after_forward=reshard,
            mp_policy=MixedPrecisionPolicy(gather_dtype, self._grad_dtype, cast_forward_inputs=False),
            shard_placement_fn=lambda p: expert_placement if param_spec_of(p).reduce_over == "edp" else None,
            ignored_params=unsharded,
        )
        fsdp_module.set_gradient_divide_factor(float(self._mesh.dp_cp.size) if self._average else 1.0)
        fsdp_module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        for path, spec in specs.items():
            param, axis = submodule.get_parameter(path), self._mesh.axis(spec.reduce_over)
            self.sharded_segments += _owned_segments(param, spec, axis, gather_dtype)
            rows = tuple(_owned_flat_range(param, axis.size, rank) for rank in range(axis.size))
            self._owned.append(ParamOwnership(spec, tuple(param.shape), rows))
        return fsdp_module

    def owned_segments(self) -> list[OwnedSegment]:
        """Return the segments that this rank owns."""
        return [*self.sharded_segments, *self._rest.owned_segments()]

    def param_ownership(self) -> list[ParamOwnership]:
        """Return which rank owns which part of every parameter, in the same order on all ranks."""
        return [*self._owned, *self._rest.param_ownership()]

    def zero_gradients(self) -> None:
        """Zero the gradients at the start of a step."""
        for segment in self.sharded_segments:
            segment.grad.zero_()
        self._rest.zero_gradients()

    def before_last_backward(self) -> None:
        """Nothing to do: gradients are reduced after every backward pass."""

    def start_reduction(self) -> None:
        """Start the reduction of parameters that are not sharded; shards were reduced during the backward passes."""
        self._rest.start_reduction()

    def finish_reduction(self) -> None:
        """Wait for the reduction of parameters that are not sharded; torch's hooks have waited for the others."""
        self._rest.finish_reduction()

    def start_gather(self) -> None:
        """Nothing to do: layers are gathered when they are needed."""

    def regather_loaded_params(self) -> None:
        """Nothing to do after shards were written from outside: layers are gathered when they are needed."""

    def finish_gather(self) -> None:
        """Nothing to do: no layer is gathered between steps."""


Parallel = DataParallel | FullySharded


def _params_kept_in_fp32(module: nn.Module) -> set[nn.Parameter]:
    """Return parameters that are fp32 beside half precision, such as decays, which a joint gather would round."""
    whole = [param for param in module.parameters() if not isinstance(param, DTensor)]
    if not any(param.dtype in _HALF for param in whole):
        return set()
    return {param for param in whole if param.dtype not in _HALF}


def _fsdp_row_placement(axis: Axis, mesh: Mesh) -> Any:
    """Return FSDP2's placement of rows over `axis`, a mesh of its own; `ConfigError` before torch 2.13."""
    if not hasattr(placements, "ShardPlacementResult"):
        raise ConfigError(
            f"--use-torch-fsdp2 cuts experts over {axis.size} ranks and the rest over {mesh.dp_cp.size}, which torch "
            f"{torch.__version__} cannot; use torch 2.13, --expert-model-parallel-size 1, or --use-distributed-optimizer"
        )
    return placements.ShardPlacementResult(
        Shard(0), placements.FSDPMeshInfo(_device_mesh_of_axis(axis, mesh), shard_mesh_dim=0)
    )


def _device_mesh_of_axis(axis: Axis, mesh: Mesh) -> DeviceMesh:
    """Return a torch device mesh over the axis's process group."""
    assert axis.group is not None, f"{axis.name} has several ranks, and so a group"
    return DeviceMesh.from_group(axis.group, mesh.device.type)


def _convert_half_params_to_fp32(params: Sequence[nn.Parameter]) -> torch.dtype | None:
    """Convert half-precision parameters to fp32; return the dtype in which to gather them, None if there are none."""
    half_dtypes = {param.dtype for param in params if param.dtype in _HALF}
    for param in params:
        param.data = param.data.float() if param.dtype in _HALF else param.data
    return half_dtypes.pop() if half_dtypes else None


def _owned_segments(
    param: nn.Parameter, spec: ParamSpec, axis: Axis, gather_dtype: torch.dtype | None
) -> list[OwnedSegment]:
    """Return the rows of a parameter that this rank owns as a segment, with a gradient buffer; empty if it owns none.

    gather_dtype: dtype of the gathered weights.
    """
    param.spec = spec  # type: ignore[attr-defined]
    param.grad = torch.zeros_like(param)
    assert isinstance(param, DTensor) and isinstance(param.grad, DTensor), (
        "FSDP2 shards every parameter that it is given"
    )
    data, grad = param.to_local().detach().view(-1), param.grad.to_local().view(-1)
    low, high = _owned_flat_range(param, axis.size, axis.rank)
    assert high - low == data.numel(), f"torch gave this rank {data.numel()} elements of {spec.name}, not {high - low}"
    return (
        [OwnedSegment(spec, tuple(param.shape), low, high, data, grad, sharded=True, rounds_to=gather_dtype)]
        if data.numel()
        else []
    )


def _owned_flat_range(param: nn.Parameter, ranks: int, rank: int) -> tuple[int, int]:
    """Return the flat range [low, high) of the rows of a parameter that `rank` of `ranks` owns."""
    rows, size = math.ceil(param.shape[0] / ranks), math.prod(param.shape[1:])
    return min(rows * rank, param.shape[0]) * size, min(rows * (rank + 1), param.shape[0]) * size


def _reshard_after_evaluation(module: nn.Module, *_: Any) -> None:
    """Forward hook: free gathered parameters if no backward pass follows, since nothing else would."""
    if not torch.is_grad_enabled():
        for submodule in module.modules():
            if isinstance(submodule, FSDPModule):
                submodule.reshard()
