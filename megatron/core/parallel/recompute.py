"""Activation recomputation that replays the random streams.

`recompute(function, streams, *tensors)` runs the function without keeping its activations; the backward pass runs it
again from the same inputs and the same random states, then differentiates (Chen et al., 2016).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.parallel import collectives
from megatron.core.parallel.device import memory_of
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.rng import RandomStreams


class _Recompute(Function):
    @staticmethod
    def forward(
        context: Any,
        function: Callable[..., Tensor],
        streams: RandomStreams,
        axis: Axis | None,
        first: Tensor,
        *others: Tensor | None,
    ) -> Tensor:
        context.function, context.streams, context.axis = function, streams, axis
        context.states = streams.state()
        context.shape = first.shape
        context.save_for_backward(first if axis is None else _own_piece(first, axis), *others)
        with torch.no_grad():
            return function(first, *others)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        kept = list(context.saved_tensors)
        if context.axis is not None:
            kept[0] = collectives.all_gather(kept[0], context.axis).view(context.shape)
        inputs = [
            None if tensor is None else tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(kept, context.needs_input_grad[3:], strict=True)
        ]
        now = context.streams.state()
        context.streams.load(context.states)
        with torch.enable_grad():
            output = context.function(*inputs)
        context.streams.load(now)
        torch.autograd.backward(output, gradient)
        return (None, None, None, *(None if tensor is None else tensor.grad for tensor in inputs))


def _own_piece(tensor: Tensor, axis: Axis) -> Tensor:
    return collectives.cut(tensor.reshape(-1), axis)


def recompute(
    function: Callable[..., Tensor], streams: RandomStreams, *tensors: Tensor | None, axis: Axis | None = None
) -> Tensor:
    """function(*tensors), keeping only the inputs. The function is called with None where None is given.

    axis: keep the first input in pieces over this axis (`--distribute-saved-activations`); its size must divide the
    input's number of elements. Where no input requires a gradient, since all before it is frozen, the first one is given one: without
    it the function's parameters would get none.
    """
    if torch.is_grad_enabled() and not any(tensor is not None and tensor.requires_grad for tensor in tensors):
        tensors = (None if tensors[0] is None else tensors[0].detach().requires_grad_(), *tensors[1:])
    return _Recompute.apply(function, streams, axis, *tensors)


def dropping_output(
    first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Any], x: Tensor
) -> tuple[Any, Tensor]:
    """second(first(x)) and first(x), where `second` does not keep first(x) for its backward pass but asks for it again.

    Cheaper than recomputing both: `first` is a norm, `second` a matmul that needs its input but not its own output.
    """
    middle = first(x)
    place, source = memory_of(middle), x.detach()

    def pack(tensor: Tensor) -> Any:
        same = memory_of(tensor) == place and tensor.numel() == middle_size and tensor.is_contiguous()
        return tensor.shape if same else tensor

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return first(source).view(packed)

    middle_size = middle.numel()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return second(middle), middle


def dropping_outputs(make: Callable[..., tuple[Tensor, ...]], use: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """use(*make(*tensors)), where neither keeps what `make` made: when the backward pass first needs it, it is made again.

    Cheaper than recomputing both: `use` may be costly, and all it needs again is its input. `make` draws no random numbers,
    and its own operations keep little beside their inputs.
    """
    made = make(*tensors)
    places = {memory_of(tensor)[0]: index for index, tensor in enumerate(made)}
    again = _MadeAgain(make, tuple(tensor.detach() for tensor in tensors))

    def pack(tensor: Tensor) -> Any:
        index = places.get(memory_of(tensor)[0])
        return tensor if index is None else again.promise(index, tensor)

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return use(*made)


class _MadeAgain:
    """What a function makes, made once more for all promises together, and let go after the last of them."""

    def __init__(self, make: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...]) -> None:
        self.make, self.tensors = make, tensors
        self.promised = self.open = 0
        self.made: tuple[Tensor, ...] = ()

    def promise(self, index: int, view: Tensor) -> Callable[[], Tensor]:
        """A function that gives a view of the same place in what is made again at `index`."""
        shape = (view.size(), view.stride(), view.storage_offset())
        self.promised += 1

        def keep() -> Tensor:
            if not self.made:
                with torch.no_grad():
                    self.made, self.open = self.make(*self.tensors), self.promised
            result = self.made[index].as_strided(*shape)
            self.open -= 1
            if not self.open:
                self.made = ()
            return result

        return keep
