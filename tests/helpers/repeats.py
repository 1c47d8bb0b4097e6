"""What CUDA graphs do, without a GPU: operations are recorded once, and repeated on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.autograd import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Recorded(TorchDispatchMode):
    """Every operation that runs while it is on. Python values are as they were then; only what tensors hold can change."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self._made: set[int] = set()  # storages
        self._before: list[tuple[Tensor, Tensor]] = []
        self._random = torch.get_rng_state()

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        assert "_local_scalar_dense" not in str(operation), "the host waits for a number of the device"
        named = named or {}
        self._before += [
            (tensor, tensor.clone())
            for tensor in _written(operation, arguments, named)
            if _storage(tensor) not in self._made
        ]
        output = _done(operation, arguments, named)
        given = {_storage(one) for one in tree_leaves((arguments, named)) if isinstance(one, Tensor)}
        self._made |= {_storage(one) for one in tree_leaves(output) if isinstance(one, Tensor)} - given
        self.operations.append((operation, arguments, named, output))
        return output

    def repeat(self) -> None:
        """Run them all again, each into the memory of its first output. Like a GPU, autograd hears nothing of it."""
        with torch.no_grad():
            for operation, arguments, named, output in self.operations:
                with _unsafe_preserve_version_counter(tuple(_written(operation, arguments, named))):
                    again = _done(operation, arguments, named)
                for old, new in zip(tree_leaves(output), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and _storage(old) != _storage(new):
                        old.data.copy_(new)

    def undo(self) -> None:
        """As if nothing had run: what was written is as before, and what was made holds no numbers."""
        torch.set_rng_state(self._random)
        for tensor, before in reversed(self._before):
            tensor.data.copy_(before)
        for one in tree_leaves([output for *_, output in self.operations]):
            if isinstance(one, Tensor) and one.is_floating_point() and _storage(one) in self._made:
                one.data.fill_(float("nan"))
        self._before.clear()


def record(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """In the place of `device.CudaGraphPool.warm_up_and_capture`."""
    with Recorded() as recorded:
        output = work()
    return recorded.repeat, output


def capture(work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """In the place of `device.CudaGraphPool.capture`."""
    with Recorded() as recorded:
        output = work()
    recorded.undo()
    return recorded.repeat, output


def _done(operation: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What an operation gives, collectives when they are through: a GPU's stream would wait for them. Gloo copies as one waits."""

    def through(work: Any) -> Any:
        if not isinstance(work, torch.ScriptObject):
            return work
        dist.Work.unbox(work).wait()
        return FakeWork().boxed()

    return tree_map(through, operation(*arguments, **named))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(operation: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation writes into."""
    for place, one in enumerate(operation._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            given = (
                named.get(one.name)
                if one.kwarg_only
                else arguments[place]
                if place < len(arguments)
                else named.get(one.name)
            )
            yield from (tensor for tensor in tree_leaves(given) if isinstance(tensor, Tensor))
