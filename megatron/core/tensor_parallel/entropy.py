"""The entropy of each token's distribution over a vocabulary that is cut over the tensor ranks, from hidden states and the output matrix.

    H = -sum p log p = log Z - sum exp(l) l / Z      of logits l with their maximum subtracted, Z = sum exp(l)
    dH/dl_j = -p_j (log p_j + H)

Logits exist for a block of tokens at a time, in the forward pass and again in the backward pass; the ranks exchange each token's maximum and two
sums. So nothing of the size of tokens x vocabulary is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.core.tensor_parallel.region import TensorParallelRegion

_TOKENS = 512  # of a block


@dataclass(frozen=True, slots=True)
class _LogitOptions:
    """What logits are made with. valid: columns of this rank that are words and not padding. softcap: logits become cap * tanh(logit / cap)
    before they are multiplied by `factor`, one over the temperature. into: receives the gradient of the output matrix, if anybody does.
    """

    axis: Axis
    valid: int
    softcap: float | None
    factor: float
    into: Callable[[Tensor, Tensor | None], None] | None


def fused_linear_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    region: TensorParallelRegion,
    true_vocab_size: int,
    softcap: float | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Return each token's entropy over the vocabulary in nats, [s, b] in fp32 or wider, equal on all tensor ranks.

    x: [s or s/tp, b, h]; weight: [v/tp, h]; bias: [v/tp]. factor: multiplies the logits, after the soft cap.
    """
    into = region.main_grad_of(weight)
    valid = true_vocab_size - region.axis.rank * len(weight)
    words = _LogitOptions(region.axis, valid, softcap, factor, None if into is None else into.add)
    whole = region.copy_to_region(x)
    return _FusedLinearEntropy.apply(whole.flatten(0, 1), weight, bias, words).view(whole.shape[:2])


class _FusedLinearEntropy(Function):
    """Autograd function of `fused_linear_entropy`, for x [t, h] and entropies [t]."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, words: _LogitOptions) -> Tensor:
        entropies, scales = [], []
        for tokens in _token_chunk_slices(x):
            logits, _ = _block_logits(x[tokens], weight, bias, words)
            top = collectives.all_reduce(logits.amax(dim=1), words.axis, "max")
            logits = logits.sub_(top[:, None])
            shares = logits.exp()
            # exp(-inf) times -inf is no number: columns without a word count nothing
            products = (shares * logits.masked_fill(logits.isinf(), 0.0)).sum(dim=1)
            totals = collectives.all_reduce(torch.stack((shares.sum(dim=1), products)), words.axis)
            entropies.append(totals[0].log() - totals[1] / totals[0])
            scales.append(top + totals[0].log())
        entropy, log_total = torch.cat(entropies), torch.cat(scales)
        context.save_for_backward(x, weight, bias, entropy, log_total)
        context.words = words
        return entropy

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, entropy, log_total = context.saved_tensors
        words: _LogitOptions = context.words
        of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=entropy.dtype)
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=entropy.dtype)
        for tokens in _token_chunk_slices(x):
            logits, slope = _block_logits(x[tokens], weight, bias, words)
            logs = logits.sub_(log_total[tokens, None])
            change = logs.exp().mul_(logs.masked_fill(logs.isinf(), 0.0).add_(entropy[tokens, None]))
            change.mul_(-words.factor * gradient[tokens, None])
            change = change if slope is None else change.mul_(slope)
            of_x[tokens] = change.to(x.dtype) @ weight
            of_weight += change.t() @ x[tokens].to(change.dtype)
            if of_bias is not None:
                of_bias += change.sum(0)
        shift = None if bias is None or of_bias is None else of_bias.to(bias.dtype)
        if words.into is None:
            return of_x, of_weight.to(weight.dtype), shift, None
        words.into(of_weight, None)
        return of_x, None, shift, None


def _token_chunk_slices(x: Tensor) -> Iterator[slice]:
    """Yield slices of `_TOKENS` tokens."""
    for start in range(0, len(x), _TOKENS):
        yield slice(start, min(start + _TOKENS, len(x)))


def _block_logits(x: Tensor, weight: Tensor, bias: Tensor | None, words: _LogitOptions) -> tuple[Tensor, Tensor | None]:
    """Return the logits of tokens, [t, v/tp] in fp32 or wider, -inf for padding, and the soft cap's slope or None."""
    logits = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
    logits = logits if logits.dtype == torch.float64 else logits.float()
    slope = None
    if words.softcap is not None:
        capped = torch.tanh(logits / words.softcap)
        logits, slope = words.softcap * capped, 1.0 - capped.square()
    logits = logits * words.factor
    if words.valid < logits.shape[1]:
        logits[:, max(0, words.valid) :] = float("-inf")
    return logits, slope
