"""Activation offloading: saved activations wait for their backward pass in CPU memory.

    forward     layer 0 computes | layer 1 computes ...   copy to the CPU:   saved by layer 0 | saved by layer 1 ...
    backward    layer 1 computes | layer 0 computes       copy to the GPU:   of layer 1 | of layer 0

Autograd passes each tensor that it saves to a hook (torch.autograd.graph.saved_tensors_hooks) and requests it back in
the backward pass. Tensors that share a storage are copied once and come back as the same views with the same strides,
so every operation sees what it would have seen, and results are bitwise equal. Weights, small tensors and recomputed
activations are not offloaded.

On a CPU the copies are plain ones, which save no memory. Rhu et al., 2016, "vDNN", arXiv 1602.08124.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.parallel.device import SideStream, StreamEvent, empty_host_tensor
from megatron.core.parallel.main_grad import active_main_grad


class OffloadedBuffer:
    """A range of bytes of a storage, copied to CPU memory, and back to the device after `start_fetch`."""

    def __init__(self, source: Tensor, side_stream: SideStream) -> None:
        """Start the copy to the CPU. source: uint8 [bytes], on the device."""
        self.side_stream, self.device = side_stream, source.device
        self.host = empty_host_tensor(source.numel(), torch.uint8)
        with side_stream:
            self.host.copy_(source, non_blocking=True)
        side_stream.record_use(source)
        self._back: Tensor | None = None
        self._mark: StreamEvent | None = None

    def start_fetch(self) -> None:
        """Start the copy back to the device, once."""
        if self._back is None:
            self._back = torch.empty_like(self.host, device=self.device)
            with self.side_stream:
                self._back.copy_(self.host, non_blocking=True)
            self.side_stream.record_use(self._back)
            self._mark = self.side_stream.record_event()

    def wait(self) -> Tensor:
        """Wait for the copy and return the bytes on the device: uint8 [bytes]."""
        self.start_fetch()
        assert self._back is not None and self._mark is not None, "what was fetched is on its way"
        self._mark.wait_on_stream()
        return self._back


@dataclass(frozen=True, slots=True)
class _OffloadedTensor:
    """What autograd saves instead of a tensor: a view into offloaded bytes. offset: in elements."""

    source: OffloadedBuffer
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class _OffloadGroup:
    """The tensors that a part saved in one forward pass. Unpacking one of them also fetches the previous group.

    resident: ids of storages that stay on the device. previous: the group that was saved before.
    """

    def __init__(self, owner: ActivationOffload, resident: set[int], previous: _OffloadGroup | None) -> None:
        self.owner, self.resident, self.previous = owner, resident, previous
        self.members: weakref.WeakSet[OffloadedBuffer] = weakref.WeakSet()  # only saved tensors keep them alive
        self._by_storage: dict[
            tuple[int, int], tuple[weakref.ref[Any], weakref.ref[OffloadedBuffer]]
        ] = {}  # by storage and version

    def pack(self, tensor: Tensor) -> Tensor | _OffloadedTensor:
        """Saved-tensor hook: offload a tensor, unless it is a parameter, too small or resident."""
        if isinstance(tensor, nn.Parameter) or tensor.numel() < max(1, self.owner.smallest):
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self.resident:
            return tensor
        size, first = tensor.element_size(), int(tensor.storage_offset())
        last = (
            first + 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        )
        if storage.nbytes() > 2 * (last - first) * size:  # a small view of a large storage, whose rest may be freed
            offloaded = OffloadedBuffer(_byte_view(tensor, first * size, last * size), self.owner.side_stream)
            offset = 0
        else:
            offloaded, offset = self._offload_storage(tensor), first
        self.members.add(offloaded)
        return _OffloadedTensor(offloaded, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def unpack(self, packed: Tensor | _OffloadedTensor) -> Tensor:
        """Saved-tensor hook: return the tensor, on the device."""
        if isinstance(packed, Tensor):
            return packed
        arrived = packed.source.wait()
        self._start_fetch()
        if self.previous is not None:
            self.previous._start_fetch()
        typed = torch.empty(0, dtype=packed.dtype, device=arrived.device)
        return typed.set_(arrived.untyped_storage(), packed.offset, packed.shape, packed.strides)

    def _start_fetch(self) -> None:
        """Start to copy every tensor of the group back to the device."""
        for offloaded in list(self.members):
            offloaded.start_fetch()

    def _offload_storage(self, tensor: Tensor) -> OffloadedBuffer:
        """Offload the tensor's whole storage, once for each version of its values."""
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        source, cached = self._by_storage.get(key, (None, None))
        offloaded = cached() if cached is not None and source is not None and source() is not None else None
        if offloaded is None:  # also if another storage was allocated at the same address
            offloaded = OffloadedBuffer(_byte_view(tensor, 0, storage.nbytes()), self.owner.side_stream)
            self._by_storage[key] = weakref.ref(storage), weakref.ref(offloaded)
        return offloaded


class ActivationOffload:
    """Offloads the activations that parts of one stage save, of tensors of at least `smallest` elements."""

    def __init__(self, device: torch.device, smallest: int) -> None:
        self.side_stream, self.smallest = SideStream(device), smallest
        self._last: _OffloadGroup | None = None

    def begin_forward(self) -> None:
        """Start a new forward pass: its first group has no previous one to fetch."""
        self._last = None

    @contextmanager
    def offloading(self, *parts: nn.Module) -> Iterator[None]:
        """Context manager: offloads what autograd saves, with gradients enabled and outside of backward passes.

        parts: modules whose weights and main gradients stay on the device, since a compiled layer saves the main
        gradient that its backward pass adds to.
        """
        # Activations that the backward pass recomputes are used at once.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            yield
            return
        stay = {tensor.untyped_storage()._cdata for part in parts for tensor in _param_and_main_grad_tensors(part)}
        self._last = group = _OffloadGroup(self, stay, self._last)
        with torch.autograd.graph.saved_tensors_hooks(group.pack, group.unpack):
            yield


def _param_and_main_grad_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of a module, and the sums (any shape) of their main gradients."""
    for param in module.parameters():
        yield param
        if main_grad := active_main_grad(param):
            yield main_grad.total


@contextmanager
def disable_activation_offload() -> Iterator[None]:
    """Context manager: what autograd saves inside stays on the device, whichever contexts surround it."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


def wrap_forward_in_context(module: nn.Module, make_context: Callable[[], Any]) -> None:
    """Register hooks that run every forward pass of a module inside the context manager that `make_context()` returns."""
    entered: list[Any] = []

    def make_and_enter_context(*_: Any) -> None:
        entered.append(make_context())
        entered[-1].__enter__()

    def exit_last_entered_context(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(make_and_enter_context)
    module.register_forward_hook(exit_last_entered_context, always_call=True)


def _byte_view(tensor: Tensor, low: int, high: int) -> Tensor:
    """Return bytes [low, high) of a tensor's storage as uint8 [high - low]."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), low, (high - low,), (1,)
    )
