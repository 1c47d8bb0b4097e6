"""Cross entropy of every token directly from hidden states and the output matrix, without the full matrix of logits.

    states [t, h]  x  words [v, h]  ->  logits of a block of tokens [block, v]  ->  their losses, and at once their gradients

The logits of a batch are often larger than everything else a network keeps. Here only a block of them exists at a time: it is turned into its
softmax in place, and its contributions to the gradients of states and output matrix are added before the next block reuses the memory ("Liger Kernel",
Hsu et al., 2024; "Cut Your Losses in Large-Vocabulary Language Models", Wijmans et al., 2024). So the forward pass computes the gradient of the sum of all
losses, and a backward pass that weighs all tokens equally, as that of a mean does, only multiplies it by one number. If it weighs tokens differently,
the blocks are computed again, which is exact too and slower. A CPU looks whether it does; a GPU would have to be waited for, so there the caller says it
(`even`), and the device only asserts it.

A token whose target is below 0 is ignored: its loss is 0, and on a CPU no time or memory is spent on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.kernels.ops.reference import accumulation_dtype_of

_FEWEST = 512  # tokens a block: of fewer, adding to the words' gradient would take over 2% of a CPU's time
_PARTS = 8  # blocks of a large batch
_Taker = Callable[[Tensor, Tensor | None], None]
_ROWS = 16  # rows handled at a time on a CPU: 16 rows of 50k columns stay in its cache


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The rows of the output matrix that this tensor rank holds.

    first: token id of its first row. valid: how many of its rows are tokens and not padding; 0 or less: none.
    softcap: logits become softcap * tanh(logit / softcap); None: no cap. gather: all-gathers a tensor along dimension 0
    over the ranks that share the vocabulary.
    """

    first: int
    valid: int
    softcap: float | None
    gather: Callable[[Tensor], Tensor]


def blockwise_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    words: VocabularyShard,
    *,
    fused: bool = False,
    even: bool = False,
    into: _Taker | None = None,
) -> Tensor:
    """Return the cross entropy of every token, [t], in fp32 (fp64 for fp64 states), without holding all logits at once.

    x: hidden states [t, h]; weight: output matrix [v/tp, h]; bias: [v/tp]; targets: int64 [t], below 0 for tokens to
    ignore, whose loss is 0. The gradient of x is this rank's term of a sum over the tensor ranks.
    fused: use Triton kernels for the softmax, if there is no soft cap. even: the caller promises that the gradients of
    all losses not ignored will be equal. into: called with the gradient of the output matrix and a factor for it,
    instead of returning that gradient to autograd.
    """
    begin = _triton_softmax_terms if fused and words.softcap is None else _torch_softmax_terms
    return _LinearCrossEntropy.apply(
        x, weight, bias, targets, _LinearLossOptions(words, begin, even, into), torch.is_grad_enabled()
    )


@dataclass(frozen=True, slots=True)
class _LossTokenBlock:
    """A block of k tokens. tokens: their range; x: their hidden states [k, h]; row: [k], index of each target among
    this rank's rows, 0 if another rank holds it; here: [k], 1 if this rank holds the target, else 0.
    """

    tokens: slice
    x: Tensor
    row: Tensor
    here: Tensor


@dataclass(frozen=True, slots=True)
class _SoftmaxTerms:
    """What the softmax of a block of k tokens needs from this rank's logits.

    largest: each token's largest logit; sums: of exp(logit - largest); target: logit of the target, 0 if it is on
    another rank; [k] each. gradient: (factor, hit) -> gradient of the logits [k, v] in the dtype of the
    states: factor times the exponentials, less `hit` at the target. apart: given instead of `gradient`: the
    exponentials [k, v], and the derivative of the soft cap at the target [k], or None.
    """

    largest: Tensor
    sums: Tensor
    target: Tensor
    gradient: Callable[[Tensor, Tensor], Tensor] | None = None
    apart: tuple[Tensor, Tensor | None] | None = None


@dataclass(frozen=True, slots=True)
class _LinearLossOptions:
    """Settings of one loss call. begin: computes the softmax terms of a block of logits. even: whether all losses will
    have the same gradient. into: receives the gradient of the output matrix instead of autograd; None: autograd gets
    it.
    """

    words: VocabularyShard
    begin: Callable[[Tensor, _LossTokenBlock, VocabularyShard], _SoftmaxTerms]
    even: bool
    into: _Taker | None = None


@dataclass(slots=True)
class _LossGradients:
    """Gradients of the hidden states x [t, h], the output matrix [v, h] and its bias [v], accumulated over blocks; None
    for those not needed. Output matrix and bias in accumulation dtype.
    """

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @staticmethod
    def allocate(x: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> _LossGradients:
        """Allocate the gradients that are `needed` (of x, weight, bias). That of the output matrix is uninitialized:
        the first block overwrites it.
        """
        words = torch.empty_like if len(x) else torch.zeros_like
        return _LossGradients(
            torch.empty_like(x) if needed[0] else None,
            words(weight, dtype=accumulation_dtype_of(x.dtype)) if needed[1] else None,
            torch.zeros_like(bias, dtype=accumulation_dtype_of(x.dtype)) if bias is not None and needed[2] else None,
        )

    def add_block(
        self, block: _LossTokenBlock, shares: _SoftmaxTerms, weight: Tensor, factor: Tensor, weights: Tensor | float
    ) -> None:
        """Add the contribution of a block of k tokens. factor: [k], turns exponentials into probabilities times the
        gradient of each token's loss; weights: gradient of each token's loss, [k] or a number.
        """
        hit = block.here * weights
        if shares.gradient is None:
            assert shares.apart is not None, "a block has its gradients, or what they are made of"
            self._add_block_from_exponentials(block, shares.apart, weight, factor, hit)
            return
        change = shares.gradient(factor, hit)
        if self.x is not None:
            torch.mm(change, weight, out=self.x[block.tokens])
        if self.weight is not None and block.tokens.start == 0:
            self.weight.copy_(change.t() @ block.x)
        elif self.weight is not None:
            self.weight.add_(change.t() @ block.x)
        if self.bias is not None:
            self.bias.add_(change.sum(0, dtype=self.bias.dtype))

    def _add_block_from_exponentials(
        self, block: _LossTokenBlock, apart: tuple[Tensor, Tensor | None], weight: Tensor, factor: Tensor, hit: Tensor
    ) -> None:
        """Add the contribution of a block from its exponentials [k, v] without scaling them: factor and hit [k] are
        applied to the smaller hidden states and results. apart: as in `_SoftmaxTerms`.
        """
        exponentials, slope = apart
        hit = hit if slope is None else hit * slope
        if self.x is not None:
            own = torch.mm(exponentials, weight, out=self.x[block.tokens])
            own.mul_(factor[:, None]).sub_(weight.index_select(0, block.row) * hit[:, None])
        if self.weight is not None:
            torch.addmm(
                self.weight,
                exponentials.t(),
                block.x * factor[:, None],
                beta=min(1, block.tokens.start),
                out=self.weight,
            )
            self.weight.index_add_(0, block.row, block.x * -hit[:, None])
        if self.bias is not None:
            self.bias.addmv_(exponentials.t(), factor).index_add_(0, block.row, -hit)

    def scaled_gradients(
        self, factor: Tensor | None, dtype: torch.dtype, into: _Taker | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias times a factor ([]; None: 1) in this dtype; None for those not
        needed. If `into` is given, it receives the gradient of the output matrix and the factor, and None is returned
        for it.
        """
        if into is not None and self.weight is not None:
            into(self.weight, factor)
            self.weight = None
        return tuple(
            None if one is None else (one if factor is None else one.mul_(factor)).to(dtype)
            for one in (self.x, self.weight, self.bias)
        )


class _LinearCrossEntropy(Function):
    """The autograd function of `blockwise_linear_cross_entropy`."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        task: _LinearLossOptions,
        learns: bool,
    ) -> Tensor:
        counts, on_cpu = targets >= 0, x.device.type == "cpu"
        rows = None if not on_cpu or bool(counts.all()) else counts.nonzero()[:, 0]
        some, some_targets = _select_rows(rows, x, targets)
        # In fp16 the shares of rare words would vanish without the loss scale: there gradients wait for their true weights.
        learns = learns and x.dtype != torch.float16 and (on_cpu or task.even)
        made = _LossGradients.allocate(some, weight, bias, context.needs_input_grad) if learns else None
        totals = some.new_empty((2, len(some)), dtype=accumulation_dtype_of(x.dtype))
        losses = torch.empty_like(totals[0])
        each = None if on_cpu else counts.to(totals.dtype)
        for block, shares in _softmax_terms_by_token_block(some, some_targets, weight, bias, task):
            top, total, target = _softmax_terms_over_ranks(shares, task.words)
            losses[block.tokens] = total.log() - (target - top)
            totals[0, block.tokens], totals[1, block.tokens] = top, total
            if made is not None:
                factor = (shares.largest - top).exp_() / total
                own = 1.0 if each is None else each[block.tokens]
                made.add_block(block, shares, weight, factor * own, own)
        context.save_for_backward(x, weight, bias, targets, rows, totals)
        context.task, context.made = task, made  # not `saved`: backward writes into what is made
        if each is not None:
            return losses.masked_fill_(~counts, 0.0)
        return losses if rows is None else losses.new_zeros(len(x)).index_copy_(0, rows, losses)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, targets, rows, totals = context.saved_tensors
        made, context.made = context.made, None
        if x.device.type != "cpu":
            gradient = gradient.masked_fill(targets < 0, 0.0)
        (weights,) = _select_rows(rows, gradient)
        factor = None if made is None else _common_token_weight(weights, targets)
        if made is not None and (factor is not None or not len(weights)):
            gradients = made.scaled_gradients(factor, x.dtype, context.task.into)
        else:
            some, some_targets = _select_rows(rows, x, targets)
            again = _LossGradients.allocate(some, weight, bias, context.needs_input_grad)
            for block, shares in _softmax_terms_by_token_block(some, some_targets, weight, bias, context.task):
                (top, total), mine = totals[:, block.tokens], weights[block.tokens]
                again.add_block(block, shares, weight, (shares.largest - top).exp_() / total * mine, mine)
            gradients = again.scaled_gradients(None, x.dtype, context.task.into)
        of_x, of_weight, of_bias = gradients
        if rows is not None and of_x is not None:
            of_x = torch.zeros_like(x).index_copy_(0, rows, of_x)
        return of_x, of_weight, of_bias, None, None, None


def _common_token_weight(weights: Tensor, targets: Tensor) -> Tensor | None:
    """Return the loss gradient that all tokens not ignored have in common, []; None if there are no tokens, or on a CPU
    if they differ.

    A GPU is not waited for: the caller promised that they are equal, which the device only asserts. weights: gradient
    of each token's loss, [t].
    """
    if not len(weights):
        return None
    if weights.device.type == "cpu":
        return weights[0] if bool((weights == weights[0]).all()) else None
    low, high = weights.aminmax()
    factor = torch.where(high > -low, high, low)  # ignored tokens weigh 0
    torch._assert_async(
        ((weights == factor) | (targets < 0) | ~factor.isfinite()).all(),
        "tokens weigh differently in the loss; use --cross-entropy-fusion-impl native",
    )
    return factor


def _select_rows(rows: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return these rows of each tensor; rows None: the tensors as they are."""
    return tensors if rows is None else tuple(tensor.index_select(0, rows) for tensor in tensors)


def _softmax_terms_by_token_block(
    x: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, task: _LinearLossOptions
) -> Iterator[tuple[_LossTokenBlock, _SoftmaxTerms]]:
    """Compute the logits of all tokens block by block, and yield each block with its softmax terms. The next block
    reuses the memory of the logits.
    """
    size = max(_FEWEST, -(-len(x) // _PARTS))
    memory = x.new_empty((min(size, len(x)), len(weight)))
    for start in range(0, len(x), size):
        tokens = slice(start, min(start + size, len(x)))
        row = targets[tokens] - task.words.first
        here = (row >= 0) & (row < len(weight))
        block = _LossTokenBlock(tokens, x[tokens], row.masked_fill(~here, 0), here.to(accumulation_dtype_of(x.dtype)))
        logits = memory[: len(block.x)]
        if bias is None:
            torch.mm(block.x, weight.t(), out=logits)
        else:
            torch.addmm(bias, block.x, weight.t(), out=logits)
        yield block, task.begin(logits, block, task.words)


def _torch_softmax_terms(logits: Tensor, block: _LossTokenBlock, words: VocabularyShard) -> _SoftmaxTerms:
    """Compute the softmax terms of a block of logits [k, v] by torch. Logits in fp32 or fp64 are overwritten by their
    exponentials; of half-precision logits a wider copy is made.
    """
    dtype, slope = logits.dtype, None
    logits = logits.to(accumulation_dtype_of(dtype))
    if words.softcap is not None:
        torch.tanh_(logits.div_(words.softcap))
        slope = 1.0 - logits.square()
        logits.mul_(words.softcap)
    if words.valid < logits.shape[1]:
        logits[:, max(0, words.valid) :] = float("-inf")
    row, on_cpu = block.row[:, None], logits.device.type == "cpu"
    target = logits.gather(1, row)[:, 0].masked_fill_(block.here == 0, 0.0)
    largest, sums = torch.empty_like(target), torch.empty_like(target)
    size = _ROWS if on_cpu else len(logits)
    for start in range(0, len(logits), size):
        some, top = logits[start : start + size], largest[start : start + size]
        torch.amax(some, dim=1, out=top)
        top.clamp_(min=torch.finfo(top.dtype).min)  # of no words: less 0 than nothing
        torch.sum(some.sub_(top[:, None]).exp_(), dim=1, out=sums[start : start + size])
    if slope is not None:
        logits.mul_(slope)
    hit_slope = None if slope is None else slope.gather(1, row)[:, 0]
    if on_cpu and logits.dtype == dtype:
        return _SoftmaxTerms(largest, sums, target, apart=(logits, hit_slope))

    def logit_gradient(factor: Tensor, hit: Tensor) -> Tensor:
        """Return the gradient of the logits, as `_SoftmaxTerms.gradient` says."""
        hit = hit if hit_slope is None else hit * hit_slope
        return logits.mul_(factor[:, None]).scatter_add_(1, row, -hit[:, None]).to(dtype)

    return _SoftmaxTerms(largest, sums, target, logit_gradient)


def _triton_softmax_terms(logits: Tensor, block: _LossTokenBlock, words: VocabularyShard) -> _SoftmaxTerms:
    """Compute the softmax terms of a block of logits [k, v] by Triton kernels, which keep the logits in their dtype."""
    kernels = import_module("megatron.core.kernels.triton.loss")
    largest, sums, target = kernels.softmax_statistics(logits, block.row, words.valid)
    return _SoftmaxTerms(
        largest,
        sums,
        target.masked_fill_(block.here == 0, 0.0),
        lambda factor, hit: kernels.logits_to_gradient(logits, block.row, largest, factor, hit, words.valid),
    )


def _softmax_terms_over_ranks(shares: _SoftmaxTerms, words: VocabularyShard) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the ranks' softmax terms: return each token's largest logit, sum of exponentials and target logit over
    the whole vocabulary, [k] each.
    """
    largest, sums, target = words.gather(torch.stack((shares.largest, shares.sums, shares.target))[None]).unbind(1)
    top = largest.amax(0)
    return top, (sums * (largest - top).exp()).sum(0), target.sum(0)
