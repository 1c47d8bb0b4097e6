"""FSDP2 over the same mesh: a data-parallel rank holds a share of every weight, and a layer is whole only while it works.

torch's `fully_shard` cuts the rows of what a tensor rank holds, after the cuts of the spec:

    weight [out, in]  --tp-->  [out/tp, in], the local tensor  --dp_cp-->  some of its rows: a `Segment`, low to high

    forward    gather layer 0, work, let go | gather layer 1, work, let go | ...
    backward   ... | gather layer 1, work, sum its gradients into the shares, let go | gather layer 0, ...

To all others a share is what a rank owns of a bucket under ZeRO-1: a segment, which is stepped, counted and saved as such.
It is its own fp32 main weight, since half precision is made when a layer is gathered. Gradients are summed over the ranks after
every microbatch, so that none is kept whole. Experts are cut over the ranks that hold the same ones.

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

from megatron.core.config.flags import ConfigError
from megatron.core.distributed.buffers import Ownership, Segment
from megatron.core.distributed.ddp import DataParallel
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.spec import ParamSpec, spec_of

_HALF = (torch.float16, torch.bfloat16)


class FullySharded:
    """The shares of one stage. It stands where a `DataParallel` does; torch's hooks on the layers do the work of a step.

    cut: the shares, all that is left of most weights. whole: parameters that stay whole, since they have no gradient, or
    since no other rank has the same experts.
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
        """layers: parts of the module that are gathered by themselves; the rest is whole from the first to the last of a pass.

        average: divide by the data-parallel size after a sum. keep_layers: whole from the forward to the backward pass.
        fill: gives a part its initial values; what was filled is cut before the next part is.
        """
        self.module, self.cut, self._owned = module, list[Segment](), list[Ownership]()
        self._mesh, self._grad_dtype, self._average = mesh, grad_dtype, average
        # Nobody writes into what a stage returns.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        ranks = _device_mesh(mesh.dp_cp, mesh)
        experts = _placement(mesh.edp, mesh) if mesh.edp.group not in (None, mesh.dp_cp.group) else None
        stay: set[nn.Parameter] = set()
        for part in (*layers, module):
            fill(part)
            stay |= {p for p in part.parameters() if not (p.requires_grad and mesh.axis(spec_of(p).reduce_over).group)}
            unit = self._shard(part, ranks, experts, stay, reshard=part is not module and not keep_layers)
        if experts:  # where those of a rank see no token, others still wait for it to sum their gradients
            unit.set_reduce_scatter_unused_params(True)
        module.register_forward_hook(_let_go)
        self.whole = [param for param in module.parameters() if param in stay]
        self._rest = DataParallel(
            nn.ParameterList(p for p in self.whole if p.requires_grad),
            mesh,
            grad_dtype=grad_dtype,
            sharded=False,
            bucket_size=None,
            overlap_reduce=False,
            overlap_gather=False,
            average=average,
        )

    def _shard(
        self, part: nn.Module, ranks: DeviceMesh, experts: Any, stay: set[nn.Parameter], *, reshard: bool
    ) -> FSDPModule:
        """Shard those parameters of a part that are still whole, but for those that stay so; note which range each rank owns.

        experts: where parameters of experts are sharded. reshard: after the forward pass.
        """
        fresh = {path: p for path, p in part.named_parameters() if p not in stay and not isinstance(p, DTensor)}
        specs = {path: spec_of(param) for path, param in fresh.items()}
        narrow = _widen(list(fresh.values()))
        unit = fully_shard(
            part,
            mesh=ranks,
            reshard_after_forward=reshard,
            mp_policy=MixedPrecisionPolicy(narrow, self._grad_dtype, cast_forward_inputs=False),
            shard_placement_fn=lambda p: experts if spec_of(p).reduce_over == "edp" else None,
            ignored_params=stay,
        )
        unit.set_gradient_divide_factor(float(self._mesh.dp_cp.size) if self._average else 1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo knows no sum that multiplies first
        for path, spec in specs.items():
            param, axis = part.get_parameter(path), self._mesh.axis(spec.reduce_over)
            self.cut += _share(param, spec, axis, narrow)
            rows = tuple(_rows(param, axis.size, rank) for rank in range(axis.size))
            self._owned.append(Ownership(spec, tuple(param.shape), rows))
        return unit

    def segments(self) -> list[Segment]:
        """What this rank owns."""
        return [*self.cut, *self._rest.segments()]

    def ownership(self) -> list[Ownership]:
        """Who owns what of every parameter, in the same order on all ranks."""
        return [*self._owned, *self._rest.ownership()]

    def zero_gradients(self) -> None:
        """Begin a step."""
        for segment in self.cut:
            segment.grad.zero_()
        self._rest.zero_gradients()

    def before_last_backward(self) -> None:
        """Every backward pass is summed alike."""

    def start_reduction(self) -> None:
        """Shares were summed during the backward passes."""
        self._rest.start_reduction()

    def finish_reduction(self) -> None:
        """Torch's hooks have waited for the sums."""
        self._rest.finish_reduction()

    def start_gather(self) -> None:
        """Layers are gathered when they are needed."""

    def refresh(self) -> None:
        """Shares were written from outside: layers are gathered anew when they are needed."""

    def finish_gather(self) -> None:
        """Shares are all there is between steps."""


Parallel = DataParallel | FullySharded


def _placement(axis: Axis, mesh: Mesh) -> Any:
    """Rows over the ranks of this axis. Torch has had other axes for some parameters of a layer since 2.13."""
    if not hasattr(placements, "ShardPlacementResult"):
        raise ConfigError(
            f"--use-torch-fsdp2 cuts experts over {axis.size} ranks and the rest over {mesh.dp_cp.size}, which torch "
            f"{torch.__version__} cannot; use torch 2.13, --expert-model-parallel-size 1, or --use-distributed-optimizer"
        )
    return placements.ShardPlacementResult(
        Shard(0), placements.FSDPMeshInfo(_device_mesh(axis, mesh), shard_mesh_dim=0)
    )


def _device_mesh(axis: Axis, mesh: Mesh) -> DeviceMesh:
    assert axis.group is not None, f"{axis.name} has several ranks, and so a group"
    return DeviceMesh.from_group(axis.group, mesh.device.type)


def _widen(params: Sequence[nn.Parameter]) -> torch.dtype | None:
    """Make half-precision parameters fp32, and return the format in which they are to be gathered."""
    narrow = {param.dtype for param in params if param.dtype in _HALF}
    for param in params:
        param.data = param.data.float() if param.dtype in _HALF else param.data
    return narrow.pop() if narrow else None


def _share(param: nn.Parameter, spec: ParamSpec, axis: Axis, narrow: torch.dtype | None) -> list[Segment]:
    """The rows of a parameter that this rank holds, if any, with room for their gradient. narrow: format that it works in."""
    param.spec = spec  # type: ignore[attr-defined]
    param.grad = torch.zeros_like(param)
    assert isinstance(param, DTensor) and isinstance(param.grad, DTensor), (
        "FSDP2 shards every parameter that it is given"
    )
    data, grad = param.to_local().detach().view(-1), param.grad.to_local().view(-1)
    low, high = _rows(param, axis.size, axis.rank)
    assert high - low == data.numel(), f"torch gave this rank {data.numel()} elements of {spec.name}, not {high - low}"
    return [Segment(spec, tuple(param.shape), low, high, data, grad, narrow)] if data.numel() else []


def _rows(param: nn.Parameter, ranks: int, rank: int) -> tuple[int, int]:
    """The flat elements of the rows that a rank holds."""
    rows, size = math.ceil(param.shape[0] / ranks), math.prod(param.shape[1:])
    return min(rows * rank, param.shape[0]) * size, min(rows * (rank + 1), param.shape[0]) * size


def _let_go(module: nn.Module, *_: Any) -> None:
    """After a forward pass that no backward pass follows, nothing else would let go of what stays whole between them."""
    if not torch.is_grad_enabled():
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
