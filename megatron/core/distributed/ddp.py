"""Data parallelism with buckets: when gradients are reduced, and when parameters are gathered.

One `DataParallel` serves one stage. During the last backward pass of a step, the reduction of a bucket starts as soon
as all its gradients are complete (`--overlap-grad-reduce`), in the order of the buckets, which is the same on every
rank. After the step, owners all-gather their new parameters; with `--overlap-param-gather` each module waits for the
buckets of its parameters only when its next forward pass begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from megatron.core.distributed.buffers import Bucket, OwnedSegment, ParamOwnership, make_buckets
from megatron.core.distributed.fp8_param_gather import (
    LowPrecisionBucket,
    exchange_quantization_maxima,
    quantized_weights_by_param,
)
from megatron.core.parallel import collectives
from megatron.core.parallel.main_grad import MainGrad
from megatron.core.parallel.mesh import Mesh


class DataParallel:
    """The buckets of one stage, and the collectives over them."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        grad_dtype: torch.dtype,
        sharded: bool,
        bucket_size: int | None,
        overlap_reduce: bool,
        overlap_gather: bool,
        average: bool,
    ) -> None:
        """Move the stage's parameters into buckets and register the hooks.

        sharded: every rank owns a range of each bucket (ZeRO-1). average: divide gradients by the data-parallel size,
        inside the collective where the bucket's axis has that size; experts may have another.
        """
        self.module, self.overlap_reduce, self.overlap_gather = module, overlap_reduce, overlap_gather
        self.divisor = mesh.dp_cp.size if average else None
        quantized = quantized_weights_by_param(module) if sharded else {}
        self.buckets = make_buckets(
            module,
            mesh,
            grad_dtype=grad_dtype,
            sharded=sharded,
            bucket_size=bucket_size,
            bucket_kinds=dict.fromkeys(quantized, partial(LowPrecisionBucket, quantized=quantized)),
        )
        self._place: dict[torch.Tensor, int] = {
            param: index for index, bucket in enumerate(self.buckets) for param in bucket.params
        }
        self._reducing: list[collectives.Work] = []
        self._missing: list[int] | None = None
        self._launched = 0
        self._gathering: dict[int, list[collectives.Work]] = {}
        self.bucket_hooks: list[Callable[[Bucket], None]] = []  # called with each bucket before its reduction
        self._nodes = [
            self._register_gradient_hook(param, bucket_sum)
            for bucket in self.buckets
            for param, bucket_sum in zip(bucket.params, bucket.main_grads, strict=True)
        ]
        if overlap_gather:
            for child in module.modules():
                if any(True for _ in _params_read_by_call(child)):
                    child.register_forward_pre_hook(self._before_forward)
        self.regather_loaded_params()

    @property
    def whole_params(self) -> list[nn.Parameter]:
        """The parameters that this rank holds as a whole: all but those of which it has only the quantized values."""
        return [
            param
            for param in self.module.parameters()
            if param not in self._place or self.buckets[self._place[param]].holds_values
        ]

    @property
    def sharded_segments(self) -> list[OwnedSegment]:
        """The segments that this rank owns of the parameters that are not in `whole_params` (fp8 parameter gather).

        Their data are the main weights, fp32 or wider. Empty without such parameters.
        """
        return [segment for bucket in self.buckets if not bucket.holds_values for segment in bucket.owned_segments()]

    def regather_loaded_params(self) -> None:
        """Gather parameters held as quantized values only, after their owned ranges were written from outside."""
        if not all(bucket.holds_values for bucket in self.buckets):
            self.start_gather()
            self.finish_gather()

    def owned_segments(self) -> list[OwnedSegment]:
        """Return the segments that this rank owns, over all buckets."""
        return [segment for bucket in self.buckets for segment in bucket.owned_segments()]

    def param_ownership(self) -> list[ParamOwnership]:
        """Return which rank owns which part of every parameter, in the same order on all ranks."""
        return [ownership for bucket in self.buckets for ownership in bucket.param_ownership()]

    def zero_gradients(self) -> None:
        """Zero the gradients at the start of a step."""
        for bucket in self.buckets:
            bucket.grad.zero_()
            for main_grad in bucket.main_grads:
                main_grad.open, main_grad.has_uncounted, main_grad.added_in_graph = True, False, False
        self._missing, self._launched = None, 0

    def before_last_backward(self) -> None:
        """Announce the step's last backward pass: gradients that arrive from now on are final."""
        if self.overlap_reduce:
            self._missing = [len(bucket.params) for bucket in self.buckets]

    def start_reduction(self) -> None:
        """Start the reduction of every bucket that is not yet in flight."""
        self._missing = None
        while self._launched < len(self.buckets):
            self._launch_next_reduction()

    def finish_reduction(self) -> None:
        """Wait until every bucket is reduced; and for gathers of modules that no pass has called, before an update."""
        for work in self._reducing:
            collectives.wait(work)
        self._reducing.clear()
        self.finish_gather()

    def start_gather(self) -> None:
        """Start to all-gather the owned parameters, in the order in which the forward pass needs the buckets; wait for
        them, unless gathers overlap with the forward pass.
        """
        exchange_quantization_maxima(bucket for bucket in self.buckets if bucket.sharded)
        for index in reversed(range(len(self.buckets))):
            bucket = self.buckets[index]
            if bucket.sharded:
                bucket.convert_for_all_gather()
                low, high = bucket.owned_range()
                self._gathering[index] = [
                    collectives.start_all_gather(buffer, buffer[low:high], bucket.axis)
                    for buffer in bucket.all_gather_outputs
                ]
        if not self.overlap_gather:
            self.finish_gather()

    def finish_gather(self) -> None:
        """Wait until every parameter is gathered."""
        for index in list(self._gathering):
            self._finish_bucket_gather(index)

    def _finish_bucket_gather(self, index: int) -> None:
        """Wait until the parameters of bucket `index` are gathered."""
        for work in self._gathering.pop(index, ()):
            collectives.wait(work)

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        """Forward pre-hook: wait until the parameters that the module reads itself are gathered."""
        self.wait_for_params(_params_read_by_call(module))

    def wait_for_params(self, params: Iterable[torch.Tensor]) -> None:
        """Wait until these parameters (any shape) are all-gathered, before a module uses them."""
        if self._gathering:
            for param in params:
                self._finish_bucket_gather(self._place.get(param, -1))  # buffers of a module are in no bucket

    def _register_gradient_hook(self, param: nn.Parameter, main_grad: MainGrad) -> Node:
        """Register a hook on the parameter's AccumulateGrad node, which also fires for gradients that layers add.

        The hook holds only weak references: Python's collector cannot see into autograd, so strong ones would leak.
        """
        param.main_grad, node = main_grad, get_gradient_edge(param).node  # type: ignore[attr-defined]
        main_grad.on_accumulated = partial(_on_gradient_accumulated, ref(self), ref(main_grad), ref(param))
        node.register_hook(lambda *_: main_grad.on_accumulated())
        return node

    def gradient_arrived(self, param: torch.Tensor) -> None:
        """Count a parameter (any shape) whose gradient is complete, and start the reduction of complete buckets."""
        if self._missing is None:
            return
        self._missing[self._place[param]] -= 1
        while self._launched < len(self.buckets) and self._missing[self._launched] == 0:
            self._launch_next_reduction()

    def _launch_next_reduction(self) -> None:
        """Start the reduction of the next bucket."""
        bucket = self.buckets[self._launched]
        self._launched += 1
        for main_grad in bucket.main_grads:
            main_grad.open = False
        for hook in self.bucket_hooks:
            hook(bucket)
        op = "sum" if self.divisor is None else "avg"
        if self.divisor is not None and self.divisor != bucket.axis.size:
            bucket.grad /= self.divisor
            op = "sum"
        self._reducing.append(_start_bucket_reduction(bucket, op))


def _params_read_by_call(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that a call of the module reads before it calls another: its own, and those of submodules
    without a `forward`, such as LoRA factors and containers, which have no forward pass of their own to wait in.
    """
    yield from module.parameters(recurse=False)
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _params_read_by_call(child)


def _on_gradient_accumulated(
    parallel_ref: ReferenceType[DataParallel],
    main_grad_ref: ReferenceType[MainGrad],
    param_ref: ReferenceType[nn.Parameter],
) -> None:
    """Hook of an AccumulateGrad node: add autograd's gradient to the main gradient, and count it."""
    parallel, main_grad, param = parallel_ref(), main_grad_ref(), param_ref()
    if parallel is None or main_grad is None or param is None:
        return
    if param.grad is not None:
        main_grad.add(param.grad)
        param.grad = None
    if main_grad.has_uncounted or main_grad.added_in_graph:
        parallel.gradient_arrived(param)
    main_grad.has_uncounted = False


def _start_bucket_reduction(bucket: Bucket, op: str) -> collectives.Work:
    """Start to all-reduce a bucket's gradients, or reduce-scatter them if it is sharded."""
    if not bucket.sharded:
        return collectives.start_all_reduce(bucket.grad, bucket.axis, op)
    low, high = bucket.owned_range()
    return collectives.start_reduce_scatter(bucket.grad[low:high], bucket.grad, bucket.axis, op)
