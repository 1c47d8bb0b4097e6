"""Activation recomputation that replays the random streams.

`recompute(function, streams, *tensors)` runs the function without saving its activations; the backward pass runs it
again from the same inputs and the same random states, then differentiates (Chen et al., 2016).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.parallel import collectives
from megatron.core.parallel.device import storage_id_and_offset
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.rng import RandomStreams


class _Recompute(Function):
    """Autograd function of `recompute`."""

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
        saved = first if axis is None else collectives.local_chunk(first.reshape(-1), axis)
        context.save_for_backward(saved, *others)
        with torch.no_grad():
            return function(first, *others)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        saved = list(context.saved_tensors)
        if context.axis is not None:
            saved[0] = collectives.all_gather(saved[0], context.axis).view(context.shape)
        inputs = [
            None if tensor is None else tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(saved, context.needs_input_grad[3:], strict=True)
        ]
        current = context.streams.state()
        context.streams.load(context.states)
        with torch.enable_grad():
            output = context.function(*inputs)
        context.streams.load(current)
        torch.autograd.backward(output, gradient)
        return (None, None, None, *(None if tensor is None else tensor.grad for tensor in inputs))


def recompute(
    function: Callable[..., Tensor], streams: RandomStreams, *tensors: Tensor | None, axis: Axis | None = None
) -> Tensor:
    """Return function(*tensors), saving only the inputs for the backward pass, which runs the function again.

    tensors: the inputs, of any shape; the function is called with None where None is given. axis: save the first input
    sharded over this axis (`--distribute-saved-activations`), whose size must divide the input's number of elements. If
    no input requires a gradient (everything before is frozen), the first is made to require one, since otherwise the
    function's parameters would get none.
    """
    if torch.is_grad_enabled() and not any(tensor is not None and tensor.requires_grad for tensor in tensors):
        tensors = (None if tensors[0] is None else tensors[0].detach().requires_grad_(), *tensors[1:])
    return _Recompute.apply(function, streams, axis, *tensors)


def recomputable(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x), with a note on it how `apply_recomputing_input` can compute it again. x: any shape.

    For a function that is cheap to repeat, such as a norm, before one that is not and needs its input only, such as a matmul.
    """
    result, source = function(x), x.detach()
    result.compute_again = partial(function, source)  # type: ignore[attr-defined]
    return result


def apply_recomputing_input(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Return function(x); what it saves of x for its backward pass is computed again there, if x (any shape) is `recomputable`."""
    compute_again = getattr(x, "compute_again", None)
    if compute_again is None:
        return function(x)
    position, num_elements = storage_id_and_offset(x), x.numel()

    # By place and size, since a matmul saves its input as a matrix, which is another view of the same elements.
    def pack_saved_tensor(tensor: Tensor) -> Any:
        same = storage_id_and_offset(tensor) == position and tensor.numel() == num_elements and tensor.is_contiguous()
        return tensor.shape if same else tensor

    def unpack_saved_tensor(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return compute_again().view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack_saved_tensor, unpack_saved_tensor):
        return function(x)


def run_recomputing_intermediates(
    first: Callable[..., tuple[Tensor, ...]], second: Callable[..., Tensor], *tensors: Tensor
) -> Tensor:
    """Return second(*first(*tensors)); outputs of `first` are recomputed when the backward pass needs one.

    tensors: any shape. Cheaper than recomputing both: `second` may be costly and needs only its inputs again. `first`
    must draw no random numbers, and its own operations should save little beside their inputs.
    """
    intermediates = first(*tensors)
    indices = {storage_id_and_offset(tensor)[0]: index for index, tensor in enumerate(intermediates)}
    recomputed = _RecomputedOutputs(first, tuple(tensor.detach() for tensor in tensors))

    def pack_saved_tensor(tensor: Tensor) -> Any:
        index = indices.get(storage_id_and_offset(tensor)[0])
        return tensor if index is None else recomputed.unpacker_of(index, tensor)

    def unpack_saved_tensor(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    with torch.autograd.graph.saved_tensors_hooks(pack_saved_tensor, unpack_saved_tensor):
        return second(*intermediates)


class _RecomputedOutputs:
    """The outputs of a function, recomputed once for all saved tensors of them, released after the last use."""

    def __init__(self, make: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...]) -> None:
        self.make, self.tensors = make, tensors
        self.promised = self.open = 0
        self.made: tuple[Tensor, ...] = ()

    def unpacker_of(self, index: int, view: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns a view, strided as `view`, of output `index`, recomputed if needed."""
        shape = (view.size(), view.stride(), view.storage_offset())
        self.promised += 1

        def recomputed_view() -> Tensor:
            if not self.made:
                with torch.no_grad():
                    self.made, self.open = self.make(*self.tensors), self.promised
            result = self.made[index].as_strided(*shape)
            self.open -= 1
            if not self.open:
                self.made = ()
            return result

        return recomputed_view
