"""Activations that wait for their backward pass in the memory of the CPU.

    forward     layer 0 works | layer 1 works ...        lane down:  what layer 0 saved | what layer 1 saved ...
    backward    layer 1 works | layer 0 works            lane up:    layer 1's | layer 0's, while layer 1 works

Autograd hands over each tensor that it saves (torch.autograd.graph.saved_tensors_hooks), and asks for it back. What lies in
one storage travels once, and comes back as the views that were saved, with their strides: so every operation sees what it
would have seen, and results are the same to the last bit. Weights, small tensors and what is recomputed stay where they are.

On a CPU the copies are plain ones, which save nothing. Rhu et al., 2016, "vDNN", arXiv 1602.08124.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.parallel.device import Lane, Mark, host_memory


class Parcel:
    """Some bytes of a storage, in the CPU's memory, and on the device again once they were fetched."""

    def __init__(self, source: Tensor, lane: Lane) -> None:
        """source: uint8 [bytes], on the device."""
        self.lane, self.device = lane, source.device
        self.host = host_memory(source.numel(), torch.uint8)
        with lane:
            self.host.copy_(source, non_blocking=True)
        lane.uses(source)
        self._back: Tensor | None = None
        self._mark: Mark | None = None

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._back is None:
            self._back = torch.empty_like(self.host, device=self.device)
            with self.lane:
                self._back.copy_(self.host, non_blocking=True)
            self.lane.uses(self._back)
            self._mark = self.lane.mark()

    def arrived(self) -> Tensor:
        """It, on the device: uint8 [bytes]."""
        self.fetch()
        assert self._back is not None and self._mark is not None, "what was fetched is on its way"
        self._mark.wait()
        return self._back


@dataclass(frozen=True, slots=True)
class _Ticket:
    """What autograd keeps instead of a tensor: a view into a parcel. offset: in elements."""

    parcel: Parcel
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class _Group:
    """What one part of a network saved in one forward pass. When the backward pass asks for any of it, the group before is fetched too."""

    def __init__(self, owner: Offload, stay: set[int], before: _Group | None) -> None:
        self.owner, self.stay, self.before = owner, stay, before
        self.parcels: weakref.WeakSet[Parcel] = weakref.WeakSet()  # the tickets alone keep a parcel alive
        self._known: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[Parcel]]] = {}  # by storage and version

    def pack(self, tensor: Tensor) -> Tensor | _Ticket:
        """Send a tensor away, if it is worth it."""
        if isinstance(tensor, nn.Parameter) or tensor.numel() < max(1, self.owner.smallest):
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self.stay:
            return tensor
        size, first = tensor.element_size(), int(tensor.storage_offset())
        last = (
            first + 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        )
        if storage.nbytes() > 2 * (last - first) * size:  # a piece of something large, of which the rest may be let go
            parcel = Parcel(_bytes(tensor, first * size, last * size), self.owner.lane)
            offset = 0
        else:
            parcel, offset = self._parcel(tensor), first
        self.parcels.add(parcel)
        return _Ticket(parcel, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def unpack(self, packed: Tensor | _Ticket) -> Tensor:
        """The tensor again."""
        if isinstance(packed, Tensor):
            return packed
        arrived = packed.parcel.arrived()
        self._fetch()
        if self.before is not None:
            self.before._fetch()
        typed = torch.empty(0, dtype=packed.dtype, device=arrived.device)
        return typed.set_(arrived.untyped_storage(), packed.offset, packed.shape, packed.strides)

    def _fetch(self) -> None:
        for parcel in list(self.parcels):
            parcel.fetch()

    def _parcel(self, tensor: Tensor) -> Parcel:
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        source, known = self._known.get(key, (None, None))
        parcel = known() if known is not None and source is not None and source() is not None else None
        if parcel is None:  # also where another storage has come to lie at the same place
            parcel = Parcel(_bytes(tensor, 0, storage.nbytes()), self.owner.lane)
            self._known[key] = weakref.ref(storage), weakref.ref(parcel)
        return parcel


class Offload:
    """Sends away what parts of one stage save. smallest: elements of a tensor that is sent."""

    def __init__(self, device: torch.device, smallest: int) -> None:
        self.lane, self.smallest = Lane(device), smallest
        self._last: _Group | None = None

    def begin(self) -> None:
        """Another forward pass begins."""
        self._last = None

    @contextmanager
    def aside(self, *parts: nn.Module) -> Iterator[None]:
        """Inside, what autograd saves goes to the CPU. parts: whose weights stay."""
        # What is made again in the backward pass is used at once.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            yield
            return
        stay = {param.untyped_storage()._cdata for part in parts for param in part.parameters()}
        self._last = group = _Group(self, stay, self._last)
        with torch.autograd.graph.saved_tensors_hooks(group.pack, group.unpack):
            yield


@contextmanager
def kept() -> Iterator[None]:
    """Inside, what autograd saves stays on the device, whatever is said around it."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


def around(module: nn.Module, inside: Callable[[], Any]) -> None:
    """Every forward pass of a module is made inside `inside()`."""
    entered: list[Any] = []

    def enter(*_: Any) -> None:
        entered.append(inside())
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _bytes(tensor: Tensor, low: int, high: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), low, (high - low,), (1,)
    )
