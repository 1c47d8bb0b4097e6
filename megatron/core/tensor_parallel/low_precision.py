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
from megatron.core.kernels.low_precision.fp8 import QuantizedMatrix
from megatron.core.kernels.low_precision.recipes import OPERANDS, LowPrecisionRecipe, Operand
from megatron.core.kernels.ops.reference import accumulation_dtype_of
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.parallel.wgrad import WeightGradStore


@dataclass(frozen=True, slots=True)
class LowPrecisionSetup:
    """The recipe of low-precision matmuls, and what it needs of the run.

    kernel: of a library that computes the whole linear layer instead; None: none.
    """

    recipe: LowPrecisionRecipe
    mesh: Mesh
    streams: RandomStreams
    kernel: Callable[..., Tensor] | None = None


class LowPrecisionScaling(nn.Module):
    """The scales of one layer's operands: their own, or delayed ones.

    history: [3, steps], the largest values of inputs, weights and gradients in earlier steps, the newest first; empty if scales
    are not delayed. seen: [3], those of the step that is under way. held, turned: the matrices of the weight, and these transposed,
    where they are kept rounded. caches: a step is under way, in which no weight changes: cached holds those that it rounded,
    by number: the weight's version, the matrix, and its transposed; maxima: largest values [] of those that it will round. handle: [], by which compiled graphs find them (compiled_low_precision.py).
    """

    def __init__(self, low: LowPrecisionSetup, *, shared: Axis, cut: Axis) -> None:
        """shared: axis of the ranks that work on the same microbatch. cut: axis that the weight is cut over."""
        super().__init__()
        self.recipe, self.streams, self.mesh, self.cut, self.kernel = low.recipe, low.streams, low.mesh, cut, low.kernel
        self.axes = {"input": shared, "weight": cut, "gradient": shared}
        self.held: tuple[QuantizedMatrix, ...] = ()
        self.turned: tuple[QuantizedMatrix, ...] = ()
        self.handle: Tensor | None = None
        self.history = torch.zeros(len(OPERANDS), low.recipe.history, device=low.mesh.device)
        self.seen = torch.zeros(len(OPERANDS), device=low.mesh.device)
        self.knows_steps = False
        self.caches = False
        self.cached: dict[int, tuple[int, QuantizedMatrix, QuantizedMatrix]] = {}
        self.maxima: dict[int, tuple[int, Tensor]] = {}

    def global_amax(self, operand: Operand, x: Tensor) -> Tensor | None:
        """Return the largest absolute value that the scale of x is made for, [] (or one for each part that the recipe
        scales); None if the recipe only scales blocks by themselves. With delayed scaling it comes from the history,
        except in the first step.

        Collective over the operand's axis.
        """
        result, is_known = self._known_amax(operand, x)
        return result if result is None or is_known else collectives.all_reduce(result, self.axes[operand], "max")

    def global_amax_of_pair(
        self, x: Tensor, y: Tensor, operands: tuple[Operand, Operand] = ("input", "weight")
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return `global_amax` of two operands (any shapes), with one collective where both have the same ranks."""
        first, second = operands
        if self.axes[first].ranks != self.axes[second].ranks:
            return self.global_amax(first, x), self.global_amax(second, y)
        (mine, is_known), (theirs, _) = self._known_amax(first, x), self._known_amax(second, y)
        if mine is None or theirs is None or is_known or self.axes[first].group is None:
            return mine, theirs
        both = collectives.all_reduce(torch.stack((mine, theirs)), self.axes[first], "max")
        return both[0], both[1]

    def _known_amax(self, operand: Operand, x: Tensor) -> tuple[Tensor | None, bool]:
        """Return what this rank knows of the largest value, and whether it needs no reduction over ranks."""
        if not self.recipe.needs_tensor_amax:
            return None, True
        place = OPERANDS.index(operand)
        # the kernel that rounds x takes note of its largest value
        if self.recipe.kernels is not None and self.knows_steps:
            past = self.history[place]
            return (past if self.recipe.by_largest else past[:1]), True
        result, axis = self.recipe.amax_or_partial_amaxes(x), self.axes[operand]
        if self.recipe.kernels is not None and (self.recipe.history or axis.group is not None):
            result = result.amax()
        if self.recipe.history:
            if self.training:
                self.seen[place] = torch.maximum(self.seen[place], result.float())
            if self.knows_steps:
                past = self.history[place]
                return (past.amax() if self.recipe.by_largest else past[0]).to(result.dtype), True
        return result, False

    def quantise(self, operand: Operand, x: Tensor, largest: Tensor | None) -> QuantizedMatrix:
        """Quantize x [m, k] for a sum over k, 4-bit gradients stochastically. largest: from `global_amax`."""
        drawing = self.recipe.is_4_bit and operand == "gradient"
        with self.streams.fork("cut") if drawing else nullcontext():
            return self.recipe.quantise(operand, x, largest)

    def quantise_with_transpose(
        self, operand: Operand, x: Tensor, largest: Tensor | None, *, turned: bool = True
    ) -> tuple[QuantizedMatrix, QuantizedMatrix | None]:
        """Quantize x [m, k] for a sum over k, if `turned` (and not of 4 bits) also its transpose, for a sum over m."""
        if self.recipe.is_4_bit:
            return self.quantise(operand, x, largest), None
        notes = self.recipe.history and self.training and self.knows_steps
        seen = self.seen[OPERANDS.index(operand)] if notes else None
        rows, across = self.recipe.quantise_with_transpose(operand, x, largest, turned=turned, seen=seen)
        assert rows is not None, "it was asked for"
        return rows, across

    def is_weight_cached(self, weight: Tensor, number: int) -> bool:
        """Whether this weight (any shape), matrix `number` of the layer, was quantized this step and is unchanged."""
        return self.caches and number in self.cached and self.cached[number][0] == weight._version

    def cached_quantized_weight(
        self, weight: Tensor, number: int, largest: Tensor | None = None
    ) -> tuple[QuantizedMatrix, QuantizedMatrix] | None:
        """Return a weight [out, in] quantized for sums over its inputs, and its transpose for sums over its outputs,
        computed once a step; None outside of a step.

        number: which matrix of the layer. largest: of the weight []; None: found here, which is collective over the
        weight's axis.
        """
        if not self.caches:
            return None
        if not self.is_weight_cached(weight, number):
            largest = self.cached_weight_amax(weight, number) if largest is None else largest
            rows, turned = self.quantise_weight_and_transpose(
                weight, self.global_amax("weight", weight) if largest is None else largest
            )
            self.cached[number] = weight._version, rows, turned
        return self.cached[number][1:]

    def cached_weight_amax(self, weight: Tensor, number: int) -> Tensor | None:
        """Return a weight's largest absolute value, [], found when the step began; None if it changed since."""
        version, largest = self.maxima.get(number, (-1, None))
        return largest if version == weight._version else None

    def quantise_weight_and_transpose(
        self, weight: Tensor, largest: Tensor | None
    ) -> tuple[QuantizedMatrix, QuantizedMatrix]:
        """Quantize a weight [out, in], and its transpose, for sums over inputs and outputs. largest: for the scale."""
        if self.recipe.is_4_bit:
            rows = self.quantise("weight", weight, largest)
            return rows, rows.t() if self.recipe.transpose_reuses_quantized("weight") else self.quantise(
                "weight", weight.t(), largest
            )
        rows, across = self.quantise_with_transpose("weight", weight, largest)
        assert across is not None, "it was asked for"
        return rows, across

    def quantise_for_weight_gradient(self, gradient: Tensor, x: Tensor) -> tuple[QuantizedMatrix, QuantizedMatrix]:
        """Quantize a gradient [t, out] and an input [t, in] to 4 bits for the weight gradient, a sum over tokens, after
        a Hadamard transform. Returns [out, t] and [in, t].
        """
        sides = hadamard_transform(gradient.t()), hadamard_transform(x.t())
        largest = self.global_amax_of_pair(*sides, operands=("gradient", "input"))
        return self.quantise("gradient", sides[0], largest[0]), self.quantise("input", sides[1], largest[1])

    @staticmethod
    def after_step(scalings: Sequence[LowPrecisionScaling], *, stepped: bool) -> None:
        """Finish a step: append its largest values over ranks to the histories if it `stepped`; drop cached weights.

        Collective if there are delayed scales and `stepped`.
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
        LowPrecisionScaling.append_to_amax_history(delayed, collectives.all_reduce(result, mesh.tp_dp_cp, "max"))

    @staticmethod
    def append_to_amax_history(scalings: Sequence[LowPrecisionScaling], largest: Tensor) -> None:
        """Append the largest values of a step to the histories of all layers. largest: [layers, 3].

        A value of 0 (all zeros, or nothing finite) is replaced by that of the step before.
        """
        before = torch.stack([scaling.history for scaling in scalings])
        newest = torch.where(largest > 0, largest, before[..., 0])
        histories = torch.cat((newest[..., None], before[..., :-1]), dim=2).unbind(0)
        for scaling, history, seen in zip(scalings, histories, torch.zeros_like(largest).unbind(0), strict=True):
            scaling.history, scaling.seen, scaling.knows_steps = history, seen, True

    def load_amax_history(self, history: Tensor) -> None:
        """Continue from a history [3, n] of largest values, cut or filled with zeros to the length of this one."""
        kept = min(history.shape[1], self.history.shape[1])
        self.history = torch.zeros_like(self.history)
        self.history[:, :kept] = history[:, :kept]
        self.knows_steps = bool((self.history[:, 0] > 0).any())


def make_tp_scaling(low: LowPrecisionSetup | None, mesh: Mesh) -> LowPrecisionScaling | None:
    """Return the scaling of a layer that is cut over the tensor ranks; None without low precision."""
    return None if low is None else LowPrecisionScaling(low, shared=mesh.tp_cp, cut=mesh.tp)


def begin_low_precision_step(stages: Iterable[nn.Module], *, weights_stay: bool, weights_wait: bool) -> None:
    """Begin a step in all low-precision layers.

    weights_stay: weights do not move or change until the step ends, so quantized ones are cached, and their largest
    values are found together, except where weights_wait: some have not been gathered yet. Collective over the ranks of
    a stage.
    """
    owners: dict[tuple[int, ...], list[tuple[LowPrecisionScaling, Tensor]]] = {}
    for module in (module for stage in stages for module in stage.modules()):
        scaling, weight = getattr(module, "scaling", None), getattr(module, "weight", None)
        if not isinstance(scaling, LowPrecisionScaling) or not isinstance(weight, Tensor):
            continue
        recipe, scaling.cached, scaling.maxima = scaling.recipe, {}, {}
        scaling.caches = weights_stay and not scaling.held
        if scaling.caches and recipe.needs_tensor_amax and not (weights_wait or recipe.history or scaling.kernel):
            owners.setdefault(scaling.axes["weight"].ranks, []).append((scaling, weight))
    for layers in owners.values():
        _compute_weight_amaxes(layers)


@torch.no_grad()
def _compute_weight_amaxes(layers: Sequence[tuple[LowPrecisionScaling, Tensor]]) -> None:
    """Find and store the largest values of weights [.., out, in] that are cut over the same ranks, with one collective."""
    matrices = [matrix for _, weight in layers for matrix in weight.detach().reshape(-1, *weight.shape[-2:]).unbind(0)]
    maxima = torch.stack(torch._foreach_norm(matrices, float("inf"))).to(accumulation_dtype_of(matrices[0].dtype))
    largest = iter(collectives.all_reduce(maxima, layers[0][0].axes["weight"], "max").unbind(0))
    for scaling, weight in layers:
        scaling.maxima = {number: (weight._version, next(largest)) for number in range(weight.shape[:-2].numel())}


def delayed_scalings_by_layer(stages: Iterable[nn.Module]) -> dict[str, LowPrecisionScaling]:
    """Return the scalings with delayed scales, by the global name of their layer."""
    return {
        name.removesuffix(".scaling"): module
        for stage in stages
        for name, module in stage.named_modules()
        if isinstance(module, LowPrecisionScaling) and module.recipe.history
    }


@dataclass(frozen=True, slots=True)
class LowPrecisionLinearOptions:
    """How one low-precision linear layer multiplies.

    axis: over whose ranks the input is gathered (if `gathers`) and its gradient summed; None: no communication.
    number: which matrix of a grouped layer.
    """

    scaling: LowPrecisionScaling
    axis: Axis | None = None
    gathers: bool = False
    wgrad_store: WeightGradStore | None = None
    number: int = 0

    @property
    def held_quantized_weight(self) -> QuantizedMatrix | None:
        """The quantized weight if it is stored that way (--fp8-param-gather), else None."""
        return self.scaling.held[self.number] if self.scaling.held else None

    @property
    def held_transposed_weight(self) -> QuantizedMatrix | None:
        """The transpose of the stored quantized weight, for sums over the output, or None."""
        return self.scaling.turned[self.number] if self.scaling.turned else None


class _LowPrecisionLinear(Function):
    """Autograd function of `low_linear`."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, way: LowPrecisionLinearOptions) -> Tensor:
        form = saved_input_form(way.scaling.recipe, gathers=way.gathers)
        output, kept, scales, theirs = low_precision_forward(x, weight, form, way)
        context.way, context.bias, context.shape, context.form = way, bias, x.shape, form
        context.learns_bias = bias is not None and bias.requires_grad
        context.save_for_backward(weight, theirs, kept, scales)
        return output if bias is None else output + bias

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        weight, largest, kept, scales = context.saved_tensors
        way, scaling = context.way, context.way.scaling
        later = way.wgrad_store is not None and way.wgrad_store.is_delaying and context.needs_input_grad[1]
        gathering = None
        if context.form != "turned":
            kept = kept.reshape(-1, kept.shape[-1])
            if way.gathers and not later:
                kept, gathering = _start_row_gather(kept, way.axis)
        flat = gradient.reshape(-1, gradient.shape[-1])
        input_gradient, across = _input_gradient(flat, weight, largest, way)
        collectives.wait(gathering)
        own, sending = _start_input_gradient_reduction(input_gradient, way, context.shape)
        compute = partial(
            _weight_and_bias_gradients, scaling, context.form, scales, flat, across, bias=context.learns_bias
        )
        gradients: tuple[Tensor | None, ...] = (None,)
        if later:
            parameters = [weight, context.bias] if context.learns_bias else [weight]
            way.wgrad_store.put(parameters, partial(_gather_then_weight_gradients, compute, kept, way))
        else:
            gradients = compute(kept)
        if way.axis is not None:
            collectives.wait_with_overlap(sending, way.axis)
        return own, gradients[0], gradients[1] if len(gradients) > 1 else None, None


# What is kept of an input: the "whole" of it; its "rows", of 8 bits; or these "turned", [in, t], as the weight's gradient wants them.
Form = Literal["whole", "rows", "turned"]


def saved_input_form(recipe: LowPrecisionRecipe, *, gathers: bool = False) -> Form:
    """Return in which form a layer saves its input for the backward pass: "whole" unless 8-bit values serve there;
    "turned" unless rows of other ranks must be gathered.
    """
    if not recipe.wgrad or recipe.is_4_bit or (gathers and not recipe.has_single_tensor_scale):
        return "whole"
    return "rows" if gathers else "turned"


def low_precision_forward(
    x: Tensor, weight: Tensor, form: Form, way: LowPrecisionLinearOptions
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return x W^T, [.., out], what is saved of x, its scales or None, and the weight's largest value [] or None.

    x: [.., in]; weight: [out, in]; form: of what is saved.
    """
    scaling, recipe = way.scaling, way.scaling.recipe
    flat = x.reshape(-1, x.shape[-1])
    matrix, theirs = way.held_quantized_weight, None
    if matrix is not None or scaling.is_weight_cached(weight, way.number):
        largest = scaling.global_amax("input", flat)
    elif (theirs := scaling.cached_weight_amax(weight, way.number)) is not None:
        largest = scaling.global_amax("input", flat)
    else:
        largest, theirs = scaling.global_amax_of_pair(flat, weight)
    own, turned = scaling.quantise_with_transpose("input", flat, largest, turned=form == "turned")
    whole = _gather_quantized_rows(own, way.axis) if way.gathers and way.axis is not None else own
    if matrix is None and (ready := scaling.cached_quantized_weight(weight, way.number, theirs)) is not None:
        matrix, theirs = ready[0], None
    if matrix is None:
        matrix = scaling.quantise("weight", weight, theirs)
    output = recipe.quantized_matmul(whole, matrix, x.dtype, fast=True)
    kept, scales, held = x, None, own if turned is None else turned
    if form != "whole":
        kept, scales = held.values, held.scale if recipe.has_single_tensor_scale else held.blocks
    middle = x.shape[1:-1]
    return output.view(output.shape[0] // math.prod(middle), *middle, output.shape[-1]), kept, scales, theirs


def low_precision_backward(
    gradient: Tensor, weight: Tensor, kept: Tensor, scales: Tensor | None, way: LowPrecisionLinearOptions
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, [t, in], and of the weight, for a layer without communication of activations.

    gradient: [.., out]; kept, scales: as `low_precision_forward` returned them. The weight's largest value is found
    again if the weight is not quantized yet.
    """
    scaling, recipe = way.scaling, way.scaling.recipe
    flat, form = gradient.reshape(-1, gradient.shape[-1]), saved_input_form(recipe)
    ready = way.held_transposed_weight is not None or scaling.caches
    largest = None if ready else scaling.global_amax("weight", weight)
    own, across = _input_gradient(flat, weight, largest, way)
    kept = kept if form == "turned" else kept.reshape(-1, kept.shape[-1])
    return own, _weight_and_bias_gradients(scaling, form, scales, flat, across, kept, bias=False)[0]


def _input_gradient(
    gradient: Tensor, weight: Tensor, largest: Tensor | None, way: LowPrecisionLinearOptions
) -> tuple[Tensor, QuantizedMatrix | None]:
    """Return g W for a gradient g [t, out], and g transposed and quantized if the weight gradient is an 8-bit product."""
    scaling, recipe = way.scaling, way.scaling.recipe
    amax = scaling.global_amax("gradient", gradient)
    rounded, across = scaling.quantise_with_transpose("gradient", gradient, amax, turned=recipe.wgrad)
    matrix = _transposed_quantized_weight(way, weight, largest)
    return recipe.quantized_matmul(rounded, matrix, gradient.dtype), across


def _transposed_quantized_weight(
    way: LowPrecisionLinearOptions, weight: Tensor, largest: Tensor | None
) -> QuantizedMatrix:
    """Return the weight quantized for sums over its outputs, [in, out]: stored, cached, or computed here."""
    scaling, recipe = way.scaling, way.scaling.recipe
    if way.held_transposed_weight is not None:
        return way.held_transposed_weight
    if (ready := scaling.cached_quantized_weight(weight, way.number)) is not None:
        return ready[1]
    if recipe.transpose_reuses_quantized("weight"):
        return scaling.quantise("weight", weight, largest).t()
    return scaling.quantise("weight", weight.t(), largest)


def _weight_and_bias_gradients(
    scaling: LowPrecisionScaling,
    form: Form,
    scales: Tensor | None,
    gradient: Tensor,
    across: QuantizedMatrix | None,
    kept: Tensor,
    *,
    bias: bool,
) -> tuple[Tensor, ...]:
    """Return dW, and with `bias` also db.

    gradient: [t, out]; across: its quantized transpose [out, t]; kept: of the input, [t, in] or [in, t], in `form`,
    with `scales`.
    """
    recipe = scaling.recipe
    if not recipe.wgrad:
        result = gradient.t().matmul(kept)
    elif recipe.is_4_bit:
        result = recipe.quantized_matmul(*scaling.quantise_for_weight_gradient(gradient, kept), gradient.dtype)
    else:
        assert across is not None, "the gradient was rounded for both sums"
        right: QuantizedMatrix | None
        if form == "whole":
            _, right = recipe.quantise_with_transpose("input", kept, None, rows=False)
        elif recipe.has_single_tensor_scale:
            right = QuantizedMatrix(kept if form == "turned" else kept.t(), scales)
        else:
            right = QuantizedMatrix(kept, None, scales, recipe.block_shape_of("input"))
        assert right is not None, "it was asked for"
        result = recipe.quantized_matmul(across, right, gradient.dtype)
    return (result, gradient.sum(0)) if bias else (result,)


def _gather_then_weight_gradients(compute: Any, kept: Tensor, way: LowPrecisionLinearOptions) -> tuple[Tensor, ...]:
    """Compute weight gradients later than their backward pass; inputs of other ranks are gathered only now."""
    if way.gathers and way.axis is not None:
        kept, gathering = _start_row_gather(kept, way.axis)
        collectives.wait(gathering)
    return compute(kept)


def _start_input_gradient_reduction(
    gradient: Tensor, way: LowPrecisionLinearOptions, shape: torch.Size
) -> tuple[Tensor, collectives.Work]:
    """Start to sum an input's gradient [t, in] over `way.axis`; return the result, of `shape`, and the work."""
    if way.axis is None:
        return gradient.view(shape), None
    if not way.gathers:
        return gradient.view(shape), collectives.start_all_reduce(gradient, way.axis)
    own = gradient.new_empty(shape)
    return own, collectives.start_reduce_scatter(own.view(-1, shape[-1]), gradient, way.axis)


def _view_as_uint8(tensor: Tensor) -> Tensor:
    """Return 8-bit values viewed as uint8, which every backend can send; others unchanged, contiguous."""
    return tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor.contiguous()


def _start_row_gather(rows: Tensor, axis: Axis) -> tuple[Tensor, collectives.Work]:
    """Start to all-gather rows; return the tensor that will hold those of all ranks and what to wait for."""
    piece = _view_as_uint8(rows)
    whole = piece.new_empty((piece.shape[0] * axis.size, *piece.shape[1:]))
    return whole.view(rows.dtype), collectives.start_all_gather(whole, piece, axis)


def _gather_quantized_rows(x: QuantizedMatrix, axis: Axis) -> QuantizedMatrix:
    """All-gather the rows of a quantized matrix, values and block scales."""
    values, arriving = _start_row_gather(x.values, axis)
    blocks, others = (None, None) if x.blocks is None else _start_row_gather(x.blocks, axis)
    collectives.wait(arriving)
    collectives.wait(others)
    return replace(x, values=values, blocks=blocks)


def low_precision_linear(x: Tensor, weight: Tensor, bias: Tensor | None, way: LowPrecisionLinearOptions) -> Tensor:
    """Return x W^T + b with operands rounded to 8 or 4 bits, [.., out]; of the positions of all ranks if `way.gathers`.

    x: [.., in]; weight: [out, in].
    """
    scaling = way.scaling
    # libraries have no scale for nothing, such as an expert's that no token chose
    if scaling.kernel is not None and x.numel():
        return scaling.kernel(x, weight, bias, scaling.recipe.backward, emulated=not scaling.recipe.native)
    return _LowPrecisionLinear.apply(x, weight, bias, way)


def low_precision_grouped_linear(
    x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None, scaling: LowPrecisionScaling
) -> Tensor:
    """`reference.grouped_linear` in 8 or 4 bits. x: [n, in]; weight: [e, out, in]. Returns [n, out].

    Each expert is scaled by itself; delayed scales are shared by all. Reads `counts` on the host.
    """
    rows, matrices = x.split(counts.tolist()), weight.unbind(0)
    biases = [None] * len(matrices) if bias is None else bias.unbind(0)
    ways = (LowPrecisionLinearOptions(scaling, number=number) for number in range(len(matrices)))
    return torch.cat(
        [
            low_precision_linear(own, matrix, shift, way)
            for own, matrix, shift, way in zip(rows, matrices, biases, ways, strict=True)
        ]
    )
