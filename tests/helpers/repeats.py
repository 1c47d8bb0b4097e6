"""What CUDA graphs do, without a GPU: operations are recorded once, and repeated on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorded(TorchDispatchMode):
    """Every operation that runs while it is on. Python values are as they were then; only what tensors hold can change."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None) -> Any:
        assert "_local_scalar_dense" not in str(operation), "the host waits for a number of the device"
        output = operation(*arguments, **(named or {}))
        self.operations.append((operation, arguments, named or {}, output))
        return output

    def repeat(self) -> None:
        """Run them all again, each into the memory of its first output."""
        with torch.no_grad():
            for operation, arguments, named, output in self.operations:
                for old, new in zip(tree_leaves(output), tree_leaves(operation(*arguments, **named)), strict=True):
                    if isinstance(old, Tensor) and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                        old.copy_(new)


def record(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """In the place of `device.Graphs.record`."""
    with Recorded() as recorded:
        output = work()
    return recorded.repeat, output
