"""Linear layers whose three matmuls take operands of 8 or 4 bits.

    output         x W^T      x and W rounded for sums over the input size
    input gradient g W        g and W rounded for sums over the output size
    weight gradient g^T x     g and x rounded for sums over the tokens

What shares a scale is rounded alike under every layout: the largest value of a tensor that is cut is the largest of its pieces,
and a piece holds whole blocks of its rows. Under sequence parallelism tokens are rounded before they are gathered, so a quarter
or half of the bytes travels.

Delayed scales come from the largest values of whole steps: of all microbatches and all ranks that hold the layer, so they stay
the same within a step, whatever is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatron.core.kernels.low_precision.fp4 import hadamard_transform
from megatron.core.kernels.low_precision.fp8 import Quantised
from megatron.core.kernels.low_precision.recipes import OPERANDS, Operand, Recipe
from megatron.core.kernels.reference import accumulation_dtype
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.parallel.wgrad import WeightGradStore


@dataclass(frozen=True, slots=True)
class LowPrecision:
    """A recipe, and what it needs of the run. kernel: of a library that multiplies in its place; None: none."""

    recipe: Recipe
    mesh: Mesh
    streams: RandomStreams
    kernel: Callable[..., Tensor] | None = None


class Scaling(nn.Module):
    """The scales of one layer's operands: their own, or delayed ones.

    history: [3, steps], the largest values of inputs, weights and gradients in earlier steps, the newest first; empty if scales
    are not delayed. seen: [3], those of the step that is under way. held, turned: the matrices of the weight, and these transposed,
    where they are kept rounded. caches: a step is under way, in which no weight changes: cached holds those that it rounded,
    by number: the weight's version, the matrix, and its transposed; maxima: largest values [] of those that it will round. handle: [], by which compiled graphs find them (graph_low_linear.py).
    """

    def __init__(self, low: LowPrecision, *, shared: Axis, cut: Axis) -> None:
        """shared: axis of the ranks that work on the same microbatch. cut: axis that the weight is cut over."""
        super().__init__()
        self.recipe, self.streams, self.mesh, self.cut, self.kernel = low.recipe, low.streams, low.mesh, cut, low.kernel
        self.axes = {"input": shared, "weight": cut, "gradient": shared}
        self.held: tuple[Quantised, ...] = ()
        self.turned: tuple[Quantised, ...] = ()
        self.handle: Tensor | None = None
        self.history = torch.zeros(len(OPERANDS), low.recipe.history, device=low.mesh.device)
        self.seen = torch.zeros(len(OPERANDS), device=low.mesh.device)
        self.knows_steps = False
        self.caches = False
        self.cached: dict[int, tuple[int, Quantised, Quantised]] = {}
        self.maxima: dict[int, tuple[int, Tensor]] = {}

    def largest_value(self, operand: Operand, x: Tensor) -> Tensor | None:
        """The value [] that the scale of x is made for, or parts of which it is the largest; None where blocks are scaled by themselves alone.

        All ranks of the operand's axis call it together. The first step has no history: its scales are the tensors' own.
        """
        result, is_known = self._stated(operand, x)
        return result if result is None or is_known else collectives.all_reduce(result, self.axes[operand], "max")

    def largest_of_pair(
        self, x: Tensor, y: Tensor, operands: tuple[Operand, Operand] = ("input", "weight")
    ) -> tuple[Tensor | None, Tensor | None]:
        """`largest_value` of two operands (any shapes), both []; in one collective where they wait for the same ranks."""
        first, second = operands
        if self.axes[first].ranks != self.axes[second].ranks:
            return self.largest_value(first, x), self.largest_value(second, y)
        (mine, is_known), (theirs, _) = self._stated(first, x), self._stated(second, y)
        if mine is None or theirs is None or is_known or self.axes[first].group is None:
            return mine, theirs
        both = collectives.all_reduce(torch.stack((mine, theirs)), self.axes[first], "max")
        return both[0], both[1]

    def _stated(self, operand: Operand, x: Tensor) -> tuple[Tensor | None, bool]:
        """What this rank knows of the largest value, and whether that is all there is to know."""
        if not self.recipe.needs_largest:
            return None, True
        place = OPERANDS.index(operand)
        if (
            self.recipe.kernels is not None and self.knows_steps
        ):  # the kernel that rounds x takes note of its largest value
            past = self.history[place]
            return (past if self.recipe.by_largest else past[:1]), True
        result, axis = self.recipe.largest_of(x), self.axes[operand]
        if self.recipe.kernels is not None and (self.recipe.history or axis.group is not None):
            result = result.amax()
        if self.recipe.history:
            if self.training:
                self.seen[place] = torch.maximum(self.seen[place], result.float())
            if self.knows_steps:
                past = self.history[place]
                return (past.amax() if self.recipe.by_largest else past[0]).to(result.dtype), True
        return result, False

    def quantise(self, operand: Operand, x: Tensor, largest: Tensor | None) -> Quantised:
        """x [m, k] for a sum over k."""
        drawing = self.recipe.is_4_bit and operand == "gradient"
        with self.streams.fork("cut") if drawing else nullcontext():
            return self.recipe.quantise(operand, x, largest)

    def quantise_with_transpose(
        self, operand: Operand, x: Tensor, largest: Tensor | None, *, rows: bool = True, turned: bool = True
    ) -> tuple[Quantised | None, Quantised | None]:
        """x [m, k] for a sum over k, and its transposed for a sum over m; not of 4 bits."""
        notes = self.recipe.history and self.training and self.knows_steps
        seen = self.seen[OPERANDS.index(operand)] if notes else None
        return self.recipe.quantise_with_transpose(operand, x, largest, rows=rows, turned=turned, seen=seen)

    def has_quantized_weight(self, weight: Tensor, number: int) -> bool:
        """Whether a weight (any shape) was rounded in this step already."""
        return self.caches and number in self.cached and self.cached[number][0] == weight._version

    def cached_quantized_weight(
        self, weight: Tensor, number: int, largest: Tensor | None = None
    ) -> tuple[Quantised, Quantised] | None:
        """A weight [out, in] rounded for sums over its inputs, and transposed for those over its outputs, once a step; None outside of one.

        largest: that of the weight []; None: it is asked for, and all ranks of the weight's axis call it together.
        """
        if not self.caches:
            return None
        if not self.has_quantized_weight(weight, number):
            largest = self.maximum_of_step(weight, number) if largest is None else largest
            rows, turned = self.quantise_weight(
                weight, self.largest_value("weight", weight) if largest is None else largest
            )
            self.cached[number] = weight._version, rows, turned
        return self.cached[number][1:]

    def maximum_of_step(self, weight: Tensor, number: int) -> Tensor | None:
        """The largest value [] of a weight (any shape), if it was found when the step began and the weight has not changed since."""
        version, largest = self.maxima.get(number, (-1, None))
        return largest if version == weight._version else None

    def quantise_weight(self, weight: Tensor, largest: Tensor | None) -> tuple[Quantised, Quantised]:
        """A weight [out, in], and its transposed, for a scale made for this value []."""
        if self.recipe.is_4_bit:
            rows = self.quantise("weight", weight, largest)
            return rows, rows.t() if self.recipe.serves_transposed("weight") else self.quantise(
                "weight", weight.t(), largest
            )
        both = self.quantise_with_transpose("weight", weight, largest)
        assert both[0] is not None and both[1] is not None, "both were asked for"
        return both[0], both[1]

    def quantise_tokens(self, gradient: Tensor, x: Tensor) -> tuple[Quantised, Quantised]:
        """A gradient [t, out] and an input [t, in] for the weight's gradient, a sum over their tokens. Returns [out, t], [in, t]."""
        sides = hadamard_transform(gradient.t()), hadamard_transform(x.t())
        largest = self.largest_of_pair(*sides, operands=("gradient", "input"))
        return self.quantise("gradient", sides[0], largest[0]), self.quantise("input", sides[1], largest[1])

    @staticmethod
    def after_step(scalings: Sequence[Scaling], *, stepped: bool) -> None:
        """Close a step: what was largest in it, anywhere, becomes the newest of the history, unless the step was not to be used.

        Weights may change from here on, so none stays rounded.
        """
        for scaling in scalings:
            scaling.caches, scaling.cached, scaling.maxima = False, {}, {}
        delayed = [scaling for scaling in scalings if scaling.recipe.history]
        if not delayed or not stepped:
            for scaling in delayed:
                scaling.seen = torch.zeros_like(scaling.seen)
            return
        result, mesh = torch.stack([scaling.seen for scaling in delayed]), delayed[0].mesh
        result = result.where(result.isfinite(), 0.0)
        Scaling.append_to_history(delayed, collectives.all_reduce(result, mesh.tp_dp_cp, "max"))

    @staticmethod
    def append_to_history(scalings: Sequence[Scaling], largest: Tensor) -> None:
        """Add a step to all layers at once. largest: [layers, 3]; an operand that was all zeros, or had no finite value, is as in the step before."""
        before = torch.stack([scaling.history for scaling in scalings])
        newest = torch.where(largest > 0, largest, before[..., 0])
        histories = torch.cat((newest[..., None], before[..., :-1]), dim=2).unbind(0)
        for scaling, history, seen in zip(scalings, histories, torch.zeros_like(largest).unbind(0), strict=True):
            scaling.history, scaling.seen, scaling.knows_steps = history, seen, True

    def load(self, history: Tensor) -> None:
        """Continue from a history [3, n] of any length."""
        kept = min(history.shape[1], self.history.shape[1])
        self.history = torch.zeros_like(self.history)
        self.history[:, :kept] = history[:, :kept]
        self.knows_steps = bool((self.history[:, 0] > 0).any())


def scaling_of(low: LowPrecision | None, mesh: Mesh) -> Scaling | None:
    """The scales of a layer that is cut over the tensor ranks; None if it multiplies in its own format."""
    return None if low is None else Scaling(low, shared=mesh.tp_cp, cut=mesh.tp)


def open_step(stages: Iterable[nn.Module], *, weights_stay: bool, weights_wait: bool) -> None:
    """Open a step. weights_stay: weights lie where they are until its end, and are not gathered anew for every microbatch; then the largest values
    of all of them are found together, unless some are not here yet (weights_wait).

    Collective: ranks of a stage call it with the same layers.
    """
    owners: dict[tuple[int, ...], list[tuple[Scaling, Tensor]]] = {}
    for module in (module for stage in stages for module in stage.modules()):
        scaling, weight = getattr(module, "scaling", None), getattr(module, "weight", None)
        if not isinstance(scaling, Scaling) or not isinstance(weight, Tensor):
            continue
        recipe, scaling.cached, scaling.maxima = scaling.recipe, {}, {}
        scaling.caches = weights_stay and not scaling.held
        if scaling.caches and recipe.needs_largest and not (weights_wait or recipe.history or scaling.kernel):
            owners.setdefault(scaling.axes["weight"].ranks, []).append((scaling, weight))
    for layers in owners.values():
        _find_maxima(layers)


@torch.no_grad()
def _find_maxima(layers: Sequence[tuple[Scaling, Tensor]]) -> None:
    """Find the largest values of weights [.., out, in] that are cut over the same ranks, in a few kernels and one collective."""
    matrices = [matrix for _, weight in layers for matrix in weight.detach().reshape(-1, *weight.shape[-2:]).unbind(0)]
    maxima = torch.stack(torch._foreach_norm(matrices, float("inf"))).to(accumulation_dtype(matrices[0].dtype))
    largest = iter(collectives.all_reduce(maxima, layers[0][0].axes["weight"], "max").unbind(0))
    for scaling, weight in layers:
        scaling.maxima = {number: (weight._version, next(largest)) for number in range(weight.shape[:-2].numel())}


def histories_of(stages: Iterable[nn.Module]) -> dict[str, Scaling]:
    """The layers with delayed scales, by the global name of the layer."""
    return {
        name.removesuffix(".scaling"): module
        for stage in stages
        for name, module in stage.named_modules()
        if isinstance(module, Scaling) and module.recipe.history
    }


@dataclass(frozen=True, slots=True)
class LowLinearOptions:
    """How one layer multiplies. axis: ranks that the input is opened for, by a gather if `gathers`; its gradient is their sum.
    None: the input is of this rank alone. number: of the weight's matrices, which.
    """

    scaling: Scaling
    axis: Axis | None = None
    gathers: bool = False
    wgrad_store: WeightGradStore | None = None
    number: int = 0

    @property
    def rounded_matrix(self) -> Quantised | None:
        """The matrix, where it is kept rounded."""
        return self.scaling.held[self.number] if self.scaling.held else None

    @property
    def transposed_matrix(self) -> Quantised | None:
        """The same transposed, for sums over the output."""
        return self.scaling.turned[self.number] if self.scaling.turned else None


class _LowLinear(Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, way: LowLinearOptions) -> Tensor:
        form = form_of(way.scaling.recipe, gathers=way.gathers)
        output, kept, scales, theirs = forward_product(x, weight, form, way)
        context.way, context.bias, context.shape, context.form = way, bias, x.shape, form
        context.learns_bias = bias is not None and bias.requires_grad
        context.save_for_backward(weight, theirs, kept, scales)
        return output if bias is None else output + bias

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        weight, largest, kept, scales = context.saved_tensors
        way, scaling, recipe = context.way, context.way.scaling, context.way.scaling.recipe
        later = way.wgrad_store is not None and way.wgrad_store.is_delaying and context.needs_input_grad[1]
        gathering = None
        if context.form != "turned":
            kept = kept.reshape(-1, kept.shape[-1])
            if way.gathers and not later:
                kept, gathering = _start_gather(kept, way.axis)
        flat = gradient.reshape(-1, gradient.shape[-1])
        rounded, across = _rounded_gradient(scaling, flat)
        input_gradient = recipe.product(rounded, _transposed_quantized_weight(way, weight, largest), gradient.dtype)
        collectives.wait(gathering)
        own, sending = _start_gradient_reduction(input_gradient, way, context.shape)
        compute = partial(_weight_gradients, scaling, context.form, scales, flat, across, bias=context.learns_bias)
        gradients: tuple[Tensor | None, ...] = (None,)
        if later:
            parameters = [weight, context.bias] if context.learns_bias else [weight]
            way.wgrad_store.put(parameters, partial(_delayed_weight_gradients, compute, kept, way))
        else:
            gradients = compute(kept)
        if way.axis is not None:
            collectives.wait_with_overlap(sending, way.axis)
        return own, gradients[0], gradients[1] if len(gradients) > 1 else None, None


# What is kept of an input: the "whole" of it; its "rows", of 8 bits; or these "turned", [in, t], as the weight's gradient wants them.
Form = Literal["whole", "rows", "turned"]


def form_of(recipe: Recipe, *, gathers: bool = False) -> Form:
    """What a layer keeps of its input: 8 bits where they serve the backward pass, turned where no other rank's tokens are missing."""
    if not recipe.wgrad or recipe.is_4_bit or (gathers and not recipe.one_scale):
        return "whole"
    return "rows" if gathers else "turned"


def forward_product(
    x: Tensor, weight: Tensor, form: Form, way: LowLinearOptions
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """x W^T, [.., out], and for the backward pass what is kept of x, its scales, and the weight's largest value []. x: [.., in]; weight: [out, in]."""
    scaling, recipe = way.scaling, way.scaling.recipe
    flat = x.reshape(-1, x.shape[-1])
    matrix, theirs = way.rounded_matrix, None
    if matrix is not None or scaling.has_quantized_weight(weight, way.number):
        largest = scaling.largest_value("input", flat)
    elif (theirs := scaling.maximum_of_step(weight, way.number)) is not None:
        largest = scaling.largest_value("input", flat)
    else:
        largest, theirs = scaling.largest_of_pair(flat, weight)
    own, turned = _rounded_input(scaling, flat, form, largest)
    whole = _gather_quantized(own, way.axis) if way.gathers and way.axis is not None else own
    if matrix is None and (ready := scaling.cached_quantized_weight(weight, way.number, theirs)) is not None:
        matrix, theirs = ready[0], None
    if matrix is None:
        matrix = scaling.quantise("weight", weight, theirs)
    output = recipe.product(whole, matrix, x.dtype, fast=True)
    kept, scales, held = x, None, own if turned is None else turned
    if form != "whole":
        kept, scales = held.values, held.scale if recipe.one_scale else held.blocks
    middle = x.shape[1:-1]
    return output.view(output.shape[0] // math.prod(middle), *middle, output.shape[-1]), kept, scales, theirs


def backward_products(
    gradient: Tensor, weight: Tensor, kept: Tensor, scales: Tensor | None, way: LowLinearOptions
) -> tuple[Tensor, Tensor]:
    """The gradients of x, [t, in], and of the weight, for a layer of this rank alone. gradient: [.., out]; kept, scales: as `forward_product` returned them.

    The weight's largest value is looked for again if the weight is not rounded yet.
    """
    scaling, recipe = way.scaling, way.scaling.recipe
    flat, form = gradient.reshape(-1, gradient.shape[-1]), form_of(recipe)
    ready = way.transposed_matrix is not None or scaling.caches
    largest = None if ready else scaling.largest_value("weight", weight)
    rounded, across = _rounded_gradient(scaling, flat)
    own = recipe.product(rounded, _transposed_quantized_weight(way, weight, largest), gradient.dtype)
    kept = kept if form == "turned" else kept.reshape(-1, kept.shape[-1])
    return own, _weight_gradients(scaling, form, scales, flat, across, kept, bias=False)[0]


def _rounded_input(
    scaling: Scaling, flat: Tensor, form: Form, largest: Tensor | None
) -> tuple[Quantised, Quantised | None]:
    """An input [t, in], and its transposed where that is what is kept. largest: what its scale is made for."""
    if scaling.recipe.is_4_bit:
        return scaling.quantise("input", flat, largest), None
    rows, turned = scaling.quantise_with_transpose("input", flat, largest, turned=form == "turned")
    assert rows is not None, "it was asked for"
    return rows, turned


def _rounded_gradient(scaling: Scaling, flat: Tensor) -> tuple[Quantised, Quantised | None]:
    """A gradient [t, out], and its transposed where the weight's gradient is a product of 8 bits."""
    recipe, largest = scaling.recipe, scaling.largest_value("gradient", flat)
    if recipe.is_4_bit:
        return scaling.quantise("gradient", flat, largest), None
    rows, turned = scaling.quantise_with_transpose("gradient", flat, largest, turned=recipe.wgrad)
    assert rows is not None, "it was asked for"
    return rows, turned


def _transposed_quantized_weight(way: LowLinearOptions, weight: Tensor, largest: Tensor | None) -> Quantised:
    """The weight rounded for sums over its outputs, [in, out]."""
    scaling, recipe = way.scaling, way.scaling.recipe
    if way.transposed_matrix is not None:
        return way.transposed_matrix
    if (ready := scaling.cached_quantized_weight(weight, way.number)) is not None:
        return ready[1]
    if recipe.serves_transposed("weight"):
        return scaling.quantise("weight", weight, largest).t()
    return scaling.quantise("weight", weight.t(), largest)


def _weight_gradients(
    scaling: Scaling,
    form: Form,
    scales: Tensor | None,
    gradient: Tensor,
    across: Quantised | None,
    kept: Tensor,
    *,
    bias: bool,
) -> tuple[Tensor, ...]:
    """dW, and db if there is a bias. gradient: [t, out]; across: rounded, [out, t]; kept: [t, in] or [in, t], of the input, in a form of these scales."""
    recipe = scaling.recipe
    if not recipe.wgrad:
        result = gradient.t().matmul(kept)
    elif recipe.is_4_bit:
        result = recipe.product(*scaling.quantise_tokens(gradient, kept), gradient.dtype)
    else:
        assert across is not None, "the gradient was rounded for both sums"
        right: Quantised | None
        if form == "whole":
            _, right = scaling.quantise_with_transpose("input", kept, None, rows=False)
        elif recipe.one_scale:
            right = Quantised(kept if form == "turned" else kept.t(), scales)
        else:
            right = Quantised(kept, None, scales, recipe.block_of("input"))
        assert right is not None, "it was asked for"
        result = recipe.product(across, right, gradient.dtype)
    return (result, gradient.sum(0)) if bias else (result,)


def _delayed_weight_gradients(compute: Any, kept: Tensor, way: LowLinearOptions) -> tuple[Tensor, ...]:
    """The gradients that were left for later; the tokens of other ranks are fetched only now."""
    if way.gathers and way.axis is not None:
        kept, gathering = _start_gather(kept, way.axis)
        collectives.wait(gathering)
    return compute(kept)


def _start_gradient_reduction(
    gradient: Tensor, way: LowLinearOptions, shape: torch.Size
) -> tuple[Tensor, collectives.Work]:
    """Begin to sum an input's gradient [t, in] over the ranks that it was opened for; returns what will hold it, like the input."""
    if way.axis is None:
        return gradient.view(shape), None
    if not way.gathers:
        return gradient.view(shape), collectives.start_all_reduce(gradient, way.axis)
    own = gradient.new_empty(shape)
    return own, collectives.start_reduce_scatter(own.view(-1, shape[-1]), gradient, way.axis)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Numbers of 8 bits as what every transport carries."""
    return tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor.contiguous()


def _start_gather(rows: Tensor, axis: Axis) -> tuple[Tensor, collectives.Work]:
    """Begin to fetch the rows of all ranks."""
    piece = _as_bytes(rows)
    whole = piece.new_empty((piece.shape[0] * axis.size, *piece.shape[1:]))
    return whole.view(rows.dtype), collectives.start_all_gather(whole, piece, axis)


def _gather_quantized(x: Quantised, axis: Axis) -> Quantised:
    """The rows of all ranks. A block lies in one row."""
    values, arriving = _start_gather(x.values, axis)
    blocks, others = (None, None) if x.blocks is None else _start_gather(x.blocks, axis)
    collectives.wait(arriving)
    collectives.wait(others)
    return replace(x, values=values, blocks=blocks)


def low_linear(x: Tensor, weight: Tensor, bias: Tensor | None, way: LowLinearOptions) -> Tensor:
    """x W^T + b, of rounded operands. x: [.., in]; weight: [out, in]. Returns [.., out], of all positions where the way gathers."""
    scaling = way.scaling
    if (
        scaling.kernel is not None and x.numel()
    ):  # libraries have no scale for nothing, such as an expert's that no token chose
        return scaling.kernel(x, weight, bias, scaling.recipe.backward, emulated=not scaling.recipe.native)
    return _LowLinear.apply(x, weight, bias, way)


def low_grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
    """`reference.grouped_linear` of rounded operands: each expert's own. x: [n, in]; weight: [e, out, in]. Returns [n, out].

    Experts have scales of their own, or delayed ones in common.
    """
    rows, matrices = x.split(counts.tolist()), weight.unbind(0)
    biases = [None] * len(matrices) if bias is None else bias.unbind(0)
    ways = (LowLinearOptions(scaling, number=number) for number in range(len(matrices)))
    return torch.cat(
        [
            low_linear(own, matrix, shift, way)
            for own, matrix, shift, way in zip(rows, matrices, biases, ways, strict=True)
        ]
    )
