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

from megatron.core.kernels.reference import accumulation_dtype

_FEWEST = 512  # tokens a block: of fewer, adding to the words' gradient would take over 2% of a CPU's time
_PARTS = 8  # blocks of a large batch
_Taker = Callable[[Tensor, Tensor | None], None]
_ROWS = 16  # rows handled at a time on a CPU: 16 rows of 50k columns stay in its cache


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The shard of the vocabulary that a rank holds.

    first: id of its first row. valid: number of rows that are words and not padding; 0 or less: none. softcap: logits become cap * tanh(logit / cap). gather:
    all-gathers a tensor over the ranks that share the vocabulary, along dimension 0.
    """

    first: int
    valid: int
    softcap: float | None
    gather: Callable[[Tensor], Tensor]


def linear_cross_entropy(
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
    """Return the cross entropy of every token, [t], in fp32 (fp64 for fp64 states).

    x: [t, h]; weight: [v/tp, h]; bias: [v/tp]; targets: [t] int64, below 0 for tokens to ignore. Gradients of x are this rank's share of a sum over the ranks
    that share the vocabulary. fused: softmax by Triton kernels, for logits without a soft cap. even: the gradients of all losses that are not
    ignored will be equal. into: receives the gradient of the output matrix, which autograd
    then does not get, and a factor for it.
    """
    begin = _fused_softmax_terms if fused and words.softcap is None else _softmax_terms
    return _LinearCrossEntropy.apply(
        x, weight, bias, targets, _LossOptions(words, begin, even, into), torch.is_grad_enabled()
    )


@dataclass(frozen=True, slots=True)
class _TokenBlock:
    """A block of tokens. tokens: which; x: their states; row: of each target among this rank's rows, 0 if elsewhere; here: 1 if it is here, else 0."""

    tokens: slice
    x: Tensor
    row: Tensor
    here: Tensor


@dataclass(frozen=True, slots=True)
class _SoftmaxTerms:
    """The logits of a block, on their way to a softmax, [k] tokens.

    largest: each token's largest logit; sums: of exp(logit - largest); target: logit of the target, 0 if it is on another rank; [k] each. gradient: (factor, hit) ->
    gradient of the logits [k, v] in the dtype of the states: the exponentials times the factor, less `hit` at the target. apart: instead, the exponentials
    and the derivative of the soft cap at the target.
    """

    largest: Tensor
    sums: Tensor
    target: Tensor
    gradient: Callable[[Tensor, Tensor], Tensor] | None = None
    apart: tuple[Tensor, Tensor | None] | None = None


@dataclass(frozen=True, slots=True)
class _LossOptions:
    """What is done with every block. begin: starts a softmax from logits. even: whether all losses will have the same gradient. into: receives the
    gradient of the output matrix, if anybody does.
    """

    words: VocabularyShard
    begin: Callable[[Tensor, _TokenBlock, VocabularyShard], _SoftmaxTerms]
    even: bool
    into: _Taker | None = None


@dataclass(slots=True)
class _Gradients:
    """Gradients of the states [t, h], the output matrix [v, h] and its bias [v], as far as needed, accumulated in fp32."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @staticmethod
    def allocate(x: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> _Gradients:
        """Allocate them before the first block, which overwrites that of the output matrix; the others add to it."""
        words = torch.empty_like if len(x) else torch.zeros_like
        return _Gradients(
            torch.empty_like(x) if needed[0] else None,
            words(weight, dtype=accumulation_dtype(x.dtype)) if needed[1] else None,
            torch.zeros_like(bias, dtype=accumulation_dtype(x.dtype)) if bias is not None and needed[2] else None,
        )

    def add(
        self, block: _TokenBlock, shares: _SoftmaxTerms, weight: Tensor, factor: Tensor, weights: Tensor | float
    ) -> None:
        """Add a block's contribution. factor: [k], turns exponentials into probabilities, times `weights`, the gradient of each token's loss."""
        hit = block.here * weights
        if shares.gradient is None:
            assert shares.apart is not None, "a block has its gradients, or what they are made of"
            self._add_apart(block, shares.apart, weight, factor, hit)
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

    def _add_apart(
        self, block: _TokenBlock, apart: tuple[Tensor, Tensor | None], weight: Tensor, factor: Tensor, hit: Tensor
    ) -> None:
        """The same without another pass over the block: factor and hit are applied to the much smaller states and rows."""
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

    def scaled_by(self, factor: Tensor | None, dtype: torch.dtype, into: _Taker | None) -> tuple[Tensor | None, ...]:
        """Return all of them times a factor, in this dtype; None for that of the output matrix if `into` receives it."""
        if into is not None and self.weight is not None:
            into(self.weight, factor)
            self.weight = None
        return tuple(
            None if one is None else (one if factor is None else one.mul_(factor)).to(dtype)
            for one in (self.x, self.weight, self.bias)
        )


class _LinearCrossEntropy(Function):
    """The autograd function of `linear_cross_entropy`."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, task: _LossOptions, learns: bool
    ) -> Tensor:
        counts, on_cpu = targets >= 0, x.device.type == "cpu"
        rows = None if not on_cpu or bool(counts.all()) else counts.nonzero()[:, 0]
        some, some_targets = _select_rows(rows, x, targets)
        # In fp16 the shares of rare words would vanish without the loss scale: there gradients wait for their true weights.
        learns = learns and x.dtype != torch.float16 and (on_cpu or task.even)
        made = _Gradients.allocate(some, weight, bias, context.needs_input_grad) if learns else None
        totals = some.new_empty((2, len(some)), dtype=accumulation_dtype(x.dtype))
        losses = torch.empty_like(totals[0])
        each = None if on_cpu else counts.to(totals.dtype)
        for block, shares in _logit_blocks(some, some_targets, weight, bias, task):
            top, total, target = _over_ranks(shares, task.words)
            losses[block.tokens] = total.log() - (target - top)
            totals[0, block.tokens], totals[1, block.tokens] = top, total
            if made is not None:
                factor = (shares.largest - top).exp_() / total
                own = 1.0 if each is None else each[block.tokens]
                made.add(block, shares, weight, factor * own, own)
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
        factor = None if made is None else _common_factor(weights, targets)
        if made is not None and (factor is not None or not len(weights)):
            gradients = made.scaled_by(factor, x.dtype, context.task.into)
        else:
            some, some_targets = _select_rows(rows, x, targets)
            again = _Gradients.allocate(some, weight, bias, context.needs_input_grad)
            for block, shares in _logit_blocks(some, some_targets, weight, bias, context.task):
                (top, total), mine = totals[:, block.tokens], weights[block.tokens]
                again.add(block, shares, weight, (shares.largest - top).exp_() / total * mine, mine)
            gradients = again.scaled_by(None, x.dtype, context.task.into)
        of_x, of_weight, of_bias = gradients
        if rows is not None and of_x is not None:
            of_x = torch.zeros_like(x).index_copy_(0, rows, of_x)
        return of_x, of_weight, of_bias, None, None, None


def _common_factor(weights: Tensor, targets: Tensor) -> Tensor | None:
    """Return the number that all tokens weigh, []; None if they differ, or if there are none. A GPU is not waited for: there the caller said that they do not."""
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
    """Select these rows of tensors; None: all rows."""
    return tensors if rows is None else tuple(tensor.index_select(0, rows) for tensor in tensors)


def _logit_blocks(
    x: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, task: _LossOptions
) -> Iterator[tuple[_TokenBlock, _SoftmaxTerms]]:
    """Yield all tokens in blocks; the logits of a block are lost with the next one."""
    size = max(_FEWEST, -(-len(x) // _PARTS))
    memory = x.new_empty((min(size, len(x)), len(weight)))
    for start in range(0, len(x), size):
        tokens = slice(start, min(start + size, len(x)))
        row = targets[tokens] - task.words.first
        here = (row >= 0) & (row < len(weight))
        block = _TokenBlock(tokens, x[tokens], row.masked_fill(~here, 0), here.to(accumulation_dtype(x.dtype)))
        logits = memory[: len(block.x)]
        if bias is None:
            torch.mm(block.x, weight.t(), out=logits)
        else:
            torch.addmm(bias, block.x, weight.t(), out=logits)
        yield block, task.begin(logits, block, task.words)


def _softmax_terms(logits: Tensor, block: _TokenBlock, words: VocabularyShard) -> _SoftmaxTerms:
    """Compute the softmax terms of a block's logits [k, v], which are replaced by their exponentials in place, or in a wider copy."""
    dtype, slope = logits.dtype, None
    logits = logits.to(accumulation_dtype(dtype))
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

    def gradient(factor: Tensor, hit: Tensor) -> Tensor:
        hit = hit if hit_slope is None else hit * hit_slope
        return logits.mul_(factor[:, None]).scatter_add_(1, row, -hit[:, None]).to(dtype)

    return _SoftmaxTerms(largest, sums, target, gradient)


def _fused_softmax_terms(logits: Tensor, block: _TokenBlock, words: VocabularyShard) -> _SoftmaxTerms:
    """The same by Triton kernels, which leave the logits in their dtype."""
    kernels = import_module("megatron.core.kernels.triton.loss")
    largest, sums, target = kernels.logit_statistics(logits, block.row, words.valid)
    return _SoftmaxTerms(
        largest,
        sums,
        target.masked_fill_(block.here == 0, 0.0),
        lambda factor, hit: kernels.gradient(logits, block.row, largest, factor, hit, words.valid),
    )


def _over_ranks(shares: _SoftmaxTerms, words: VocabularyShard) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's largest logit, sum of exponentials and target logit over the whole vocabulary; [k] each."""
    largest, sums, target = words.gather(torch.stack((shares.largest, shares.sums, shares.target))[None]).unbind(1)
    top = largest.amax(0)
    return top, (sums * (largest - top).exp()).sum(0), target.sum(0)
