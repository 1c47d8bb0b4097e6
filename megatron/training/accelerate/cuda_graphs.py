"""--cuda-graph-impl local: layers are recorded as CUDA graphs, a forward and a backward pass each, and repeated. Launching the
kernels of a small layer one by one takes longer than the kernels.

    forward    inputs are copied in | repeat | the output, which stays where it is
    backward   its gradient is copied in | repeat | gradients of the inputs; those of weights are added into the buckets

A recording is of one microbatch at a time: what it keeps for its backward pass is good until it is repeated. So a part of the
network has as many recordings as microbatches of it are under way at once; a microbatch takes one that is free, and gives it
back behind its backward pass. Whatever order the schedule has, nobody needs to know it. The first microbatches make them.

                      recording a        recording b
    layer 0           input -> output    input -> output     An output is the next layer's input in the same place: what follows
                           |                  |              a recording is always the same one, and copies nothing. The same
    layer 1            output <-+         output <-+         is true of gradients, the other way.

Memory is never given back between two recordings, so they may be repeated in any order. What waits for the host, or depends on
more than the tensors that go in, is refused (config/rules/cuda_graphs.py); experts are left out, and so is evaluation.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.config.flags.declare import ConfigError
from megatron.core.distributed.ddp import DataParallel
from megatron.core.kernels.ops.packed_document_starts import PackedDocumentStarts
from megatron.core.parallel import device as devices
from megatron.core.parallel.device import storage_id_and_offset
from megatron.core.parallel.main_grad import active_main_grad
from megatron.core.transformer.blocks import Block
from megatron.core.transformer.context.forward_context import MicrobatchContext
from megatron.training.state.hooks import StepHooks
from megatron.training.state.trainer import Trainer

# Records what it is given without a change to any tensor; returns what does it, and the tensors that it will have made.
Recorder = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
_NAMES = {"forward": "whole", "attention_block": "its attention", "mlp_block": "its MLP"}


class _CapturedLayer:
    """The captured forward and backward CUDA graphs of a layer or half of it, with their static tensors.
    weights: the parameters that got a gradient in the last backward pass.
    """

    def __init__(self, part: _GraphedMethod, given: Any, tensors: Sequence[Tensor]) -> None:
        self._part, self._lasts, self._record = part, part.recordings.lasts, part.recordings.record
        self._inputs = tuple(self._static_buffer(tensor).requires_grad_(tensor.requires_grad) for tensor in tensors)
        places = iter(self._inputs)
        args, named = _map_tensors(given, lambda _: next(places))
        self._forward, self._output = self._record_or_refuse(lambda: part.call(*args, **dict(named)))
        self._lasts.add(storage_id_and_offset(self._output))
        self._backward: Callable[[], None] | None = None
        self.weights: list[Tensor] = []

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy the inputs in, replay the forward graph, and return its static output."""
        for place, tensor in zip(self._inputs, tensors, strict=True):
            self._copy_unless_same_memory(place, tensor)
        self._forward()
        return self._output.detach()

    def backward(self, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Replay the backward graph (captured at the first call). Return the gradient of each input, None for one
        without; weight gradients are added into their buckets.
        """
        if self._backward is None:
            self._gradient = self._static_buffer(gradient)
            self._backward, self._found = self._record_or_refuse(self._backward_to_capture)
            self._lasts.update(storage_id_and_offset(one) for one in self._found if one is not None)
        self._copy_unless_same_memory(self._gradient, gradient)
        self._backward()
        return self._found

    def _backward_to_capture(self) -> tuple[Tensor | None, ...]:
        """What the backward graph captures: gradients of the inputs, and those of weights added to their buckets."""
        differentiable = [place for place in self._inputs if place.requires_grad]
        weights = list(self._part.gradients)
        # The graph is kept, since memory that it let go of would be another recording's.
        gradients = torch.autograd.grad(
            self._output, [*differentiable, *weights], self._gradient, retain_graph=True, allow_unused=True
        )
        self.weights = []
        for weight, gradient in zip(weights, gradients[len(differentiable) :], strict=True):
            if gradient is not None:
                self._part.gradients[weight].add_(gradient)
                self.weights.append(weight)
        for weight in weights:  # layers have added what autograd does not return, in their own products
            main_grad = active_main_grad(weight)
            if main_grad is not None and main_grad.has_uncounted:
                main_grad.has_uncounted = False
                self.weights.append(weight)
        remaining = iter(gradients[: len(differentiable)])
        return tuple(next(remaining) if place.requires_grad else None for place in self._inputs)

    def _static_buffer(self, tensor: Tensor) -> Tensor:
        """Return a static tensor for such values: the same memory if a captured graph writes it, else a new copy."""
        return tensor.detach() if storage_id_and_offset(tensor) in self._lasts else tensor.detach().clone()

    def _copy_unless_same_memory(self, place: Tensor, tensor: Tensor) -> None:
        """Copy a tensor into a static one; nothing if both are the same memory."""
        if storage_id_and_offset(place) != storage_id_and_offset(tensor):
            assert storage_id_and_offset(place) not in self._lasts, "what follows a recording is always the same one"
            place.data.copy_(tensor)  # autograd's watch over what it keeps would take it for a mistake

    def _record_or_refuse(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture `work` as a CUDA graph: (function that replays it, its result); `ConfigError` if it cannot be."""
        try:
            return self._record(work)
        except RuntimeError as error:
            raise ConfigError(
                f"--cuda-graph-impl local: {self._part.name} cannot be recorded: {error}; choose other "
                "--cuda-graph-modules, or leave it out"
            ) from error


class _GraphedMethod:
    """Callable that replaces `forward`, `attention_block` or `mlp_block` of a layer and runs it by captured graphs.
    gradients: parameter of the layer -> the view in its bucket where its gradient is summed.
    """

    def __init__(self, layer: Block, method: str, recordings: LayerGraphCapturer, parallel: DataParallel) -> None:
        self.call: Callable[..., Tensor] = getattr(layer, method)
        self.name = f"layer {layer.plan.index + 1}, {_NAMES[method]},"
        self.recordings, self._layer, self._parallel = recordings, layer, parallel
        weights = {id(weight) for weight in layer.parameters()}
        self.gradients = {
            weight: view
            for bucket in parallel.buckets
            for weight, view in zip(bucket.params, bucket.gradient_views(), strict=True)
            if id(weight) in weights
        }
        self._free: dict[Any, list[_CapturedLayer]] = {}

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        if not (self.recordings.on and self._layer.training and torch.is_grad_enabled()):
            return self.call(*args, **named)
        self._parallel.wait_for_params(self.gradients)
        given, tensors = (args, tuple(named.items())), []

        def tensor_capture_key(tensor: Tensor) -> tuple[Any, ...]:
            tensors.append(tensor)
            place = storage_id_and_offset(tensor)
            stays = place if place in self.recordings.lasts else None
            return (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, stays)

        free = self._free.setdefault(_map_tensors(given, tensor_capture_key), [])
        if not free:
            free.append(_CapturedLayer(self, given, tensors))
            self.recordings.count += 1
        return _GraphReplay.apply(self, free, free.pop(), *tensors)

    def release_after_backward(self, free: list[_CapturedLayer], recording: _CapturedLayer) -> None:
        """Free a microbatch's graphs after its backward pass, and report the weights' gradients as arrived."""
        free.append(recording)
        for weight in recording.weights:
            self._parallel.gradient_arrived(weight)


class _GraphReplay(Function):
    """Autograd function that replays the captured graphs of a layer."""

    @staticmethod
    def forward(
        context: Any, part: _GraphedMethod, free: list[_CapturedLayer], recording: _CapturedLayer, *tensors: Tensor
    ) -> Tensor:
        context.part, context.free, context.recording = part, free, recording
        return recording.forward(tensors)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        gradients = context.recording.backward(gradient)
        context.part.release_after_backward(context.free, context.recording)
        return None, None, None, *gradients


class LayerGraphCapturer(StepHooks):
    """CUDA graphs of a trainer's layers, captured after the warm-up steps. on: whether warm-up is over. count: graphs
    captured so far. lasts: storage positions of tensors that captured graphs write.
    """

    def __init__(self, trainer: Trainer, record: Recorder | None = None) -> None:
        self._trainer, self._say, self._config = trainer, trainer.run.print_rank_0, trainer.run.config.graphs
        self.record = record or devices.CudaGraphPool(trainer.run.mesh.device).capture
        self.lasts: set[tuple[int, int]] = set()
        self.on, self.count, self._steps = False, 0, 0
        self._before: tuple[float, int] | None = None  # time and graphs before the step; None between two iterations
        kinds = Counter[tuple[str, ...]]()
        for stage, parallel in zip(trainer.stages, trainer.parallels, strict=True):
            assert isinstance(parallel, DataParallel), "a rule refuses what gathers weights layer by layer"
            for layer in (part for part in stage.modules() if isinstance(part, Block)):
                methods = _capturable_methods(layer, self._config.captured_modules)
                kinds[methods] += 1
                for method in methods:
                    setattr(layer, method, _GraphedMethod(layer, method, self, parallel))
        parts = "; ".join(_captured_parts_text(methods, count) for methods, count in kinds.items())
        self._say(f"CUDA graphs: {parts or 'no layers here'}")

    def begin_step(self, work: Any) -> None:
        """Count warm-up steps: the first pass over a step, and no rerun."""
        if self._before is None:
            self._steps += 1
            self.on = self._steps > self._config.cuda_graph_warmup_steps
            self._before = time.perf_counter(), self.count

    def after_iteration(self, session: Any) -> None:
        """Log how many graphs the step captured."""
        if self._before is None:  # the iteration's data was passed over
            return
        (began, before), self._before = self._before, None
        if self.count > before:
            self._say(
                f"CUDA graphs: iteration {self._trainer.progress.iteration} recorded {self.count - before} forward and backward passes, and took "
                f"{time.perf_counter() - began:.1f} s"
            )


def _capturable_methods(layer: Block, modules: Sequence[str]) -> tuple[str, ...]:
    """Return a layer's methods captured under --cuda-graph-modules; never experts, whose counts the host reads."""
    methods = {
        "attn": "" if layer.token_mixer is None else "attention_block",
        "mlp": "mlp_block" if layer.plan.mlp == "dense" else "",
    }
    chosen = tuple(filter(None, (methods[name] for name in modules)))
    return ("forward",) if len(chosen) == len(methods) else chosen


def _map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return the (nested) value with `change` applied to its tensors. `MicrobatchContext` and `PackedDocumentStarts` become
    None: captured layers report no losses and use no document boundaries.
    """
    if isinstance(value, (MicrobatchContext, PackedDocumentStarts)):
        return None
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_map_tensors(one, change) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return dataclasses.replace(value, **{name: _map_tensors(part, change) for name, part in parts})
    return value


def _captured_parts_text(methods: tuple[str, ...], count: int) -> str:
    """Say which parts of `count` layers are captured."""
    return (
        f"{count} layer{'' if count == 1 else 's'}: {' and '.join(_NAMES[method] for method in methods) or 'nothing'}"
    )
