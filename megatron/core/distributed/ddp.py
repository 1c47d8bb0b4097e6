"""When buckets are reduced, and when parameters are gathered.

One `DataParallel` serves one stage. During the last backward pass of a step, a bucket starts to be summed as soon as
its gradients are all there (`--overlap-grad-reduce`), in the order of the buckets, which is the same on every rank.
After the step, owners send their new parameters round; with `--overlap-param-gather` each module waits for its own
bucket only when its next forward pass begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from megatron.core.distributed.buffers import Bucket, Ownership, Segment, make_buckets
from megatron.core.distributed.fp8_param_gather import LowPrecisionBucket, holders_of
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
        """sharded: every rank owns a range of each bucket (ZeRO-1). average: divide by the data-parallel size, inside the
        collective where its ranks are as many; those of experts may be more or fewer.
        """
        self.module, self.overlap_reduce, self.overlap_gather = module, overlap_reduce, overlap_gather
        self.divisor = mesh.dp_cp.size if average else None
        holders = holders_of(module) if sharded else {}
        self.buckets = make_buckets(
            module,
            mesh,
            grad_dtype=grad_dtype,
            sharded=sharded,
            bucket_size=bucket_size,
            others=dict.fromkeys(holders, partial(LowPrecisionBucket, holders=holders)),
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
            self._listen(param, bucket_sum)
            for bucket in self.buckets
            for param, bucket_sum in zip(bucket.params, bucket.sums, strict=True)
        ]
        if overlap_gather:
            for child in module.modules():
                if any(True for _ in child.parameters(recurse=False)):
                    child.register_forward_pre_hook(self._before_forward)
        self.refresh()

    @property
    def whole(self) -> list[nn.Parameter]:
        """The parameters that this rank holds whole: all but those that it knows as others rounded them."""
        return [
            param
            for param in self.module.parameters()
            if param not in self._place or self.buckets[self._place[param]].holds_values
        ]

    @property
    def cut(self) -> list[Segment]:
        """What this rank holds of the others."""
        return [segment for bucket in self.buckets if not bucket.holds_values for segment in bucket.segments()]

    def refresh(self) -> None:
        """What is owned was written from outside."""
        if not all(bucket.holds_values for bucket in self.buckets):
            self.start_gather()
            self.finish_gather()

    def segments(self) -> list[Segment]:
        """What this rank owns, over all buckets."""
        return [segment for bucket in self.buckets for segment in bucket.segments()]

    def ownership(self) -> list[Ownership]:
        """Who owns what of every parameter, in the same order on all ranks."""
        return [one for bucket in self.buckets for one in bucket.ownership()]

    def zero_gradients(self) -> None:
        """Begin a step."""
        for bucket in self.buckets:
            bucket.grad.zero_()
            for one in bucket.sums:
                one.open, one.touched = True, False
        self._missing, self._launched = None, 0

    def before_last_backward(self) -> None:
        """The next backward pass is the last of the step: from now on, gradients that arrive are final."""
        if self.overlap_reduce:
            self._missing = [len(bucket.params) for bucket in self.buckets]

    def start_reduction(self) -> None:
        """Start to sum whatever is not yet on its way."""
        self._missing = None
        while self._launched < len(self.buckets):
            self._launch()

    def finish_reduction(self) -> None:
        """Wait until every bucket is summed."""
        for work in self._reducing:
            collectives.wait(work)
        self._reducing.clear()

    def start_gather(self) -> None:
        """Send the owned parameters round. Buckets go in the order in which the forward pass needs them."""
        for index in reversed(range(len(self.buckets))):
            bucket = self.buckets[index]
            if bucket.sharded:
                bucket.prepare()
                low, high = bucket.owned()
                self._gathering[index] = [
                    collectives.start_all_gather(whole, whole[low:high], bucket.axis) for whole in bucket.gathered
                ]
        if not self.overlap_gather:
            self.finish_gather()

    def finish_gather(self) -> None:
        """Wait until every parameter is whole."""
        for index in list(self._gathering):
            self._arrive(index)

    def _arrive(self, index: int) -> None:
        for work in self._gathering.pop(index, ()):
            collectives.wait(work)

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        self.demand(module.parameters(recurse=False))

    def demand(self, params: Iterable[torch.Tensor]) -> None:
        """Wait until these parameters are whole."""
        if self._gathering:
            for param in params:
                self._arrive(self._place.get(param, -1))  # state of a module is in no bucket

    def _listen(self, param: nn.Parameter, main_grad: MainGrad) -> Node:
        """Hear of every backward pass that ends at a parameter: through its node, which also hears of gradients that layers have
        added themselves. It holds on to nothing: what a node knew would never be let go of, as Python's collector does not look into
        autograd, and a trainer's memory is free with its last name.
        """
        param.main_grad, node = main_grad, get_gradient_edge(param).node  # type: ignore[attr-defined]
        main_grad.came = partial(_came, ref(self), ref(main_grad), ref(param))
        node.register_hook(lambda *_: main_grad.came())
        return node

    def arrived(self, param: torch.Tensor) -> None:
        """A gradient is in the buffer, whoever brought it there: count."""
        if self._missing is None:
            return
        self._missing[self._place[param]] -= 1
        while self._launched < len(self.buckets) and self._missing[self._launched] == 0:
            self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[self._launched]
        self._launched += 1
        for one in bucket.sums:
            one.open = False
        for hook in self.bucket_hooks:
            hook(bucket)
        op = "sum" if self.divisor is None else "avg"
        if self.divisor is not None and self.divisor != bucket.axis.size:
            bucket.grad /= self.divisor
            op = "sum"
        self._reducing.append(_start(bucket, op))


def _came(
    owner: ReferenceType[DataParallel], sums: ReferenceType[MainGrad], parameter: ReferenceType[nn.Parameter]
) -> None:
    """All that one backward pass says of a parameter was said: what autograd made of it is added, and it counts."""
    one, main_grad, param = owner(), sums(), parameter()
    if one is None or main_grad is None or param is None:
        return
    if param.grad is not None:
        main_grad.add(param.grad)
        param.grad = None
    if main_grad.touched:
        one.arrived(param)
    main_grad.touched = False


def _start(bucket: Bucket, op: str) -> collectives.Work:
    if not bucket.sharded:
        return collectives.start_all_reduce(bucket.grad, bucket.axis, op)
    low, high = bucket.owned()
    return collectives.start_reduce_scatter(bucket.grad[low:high], bucket.grad, bucket.axis, op)
