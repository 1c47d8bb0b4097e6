"""Cross entropy over a vocabulary that is cut over the tensor ranks. A target below 0 takes no part: its loss is 0.

No rank ever sees another's logits: the ranks exchange each token's largest logit, sum of exponentials and target logit.
Padded columns take no part. Of logits that are there, the memory becomes the gradient, so that one buffer of vocabulary size
is live; `fused_linear_cross_entropy` has them made in blocks, by a kernel that knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.kernels.ops.linear_loss import VocabularyShard
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.core.tensor_parallel.region import TensorParallelRegion

_ROWS = 16  # rows handled at a time on a CPU: 16 rows of 50k columns stay in its cache


class _VocabParallelCrossEntropy(Function):
    """Autograd function of `cross_entropy`; backward writes the gradient over the saved exponentials.

    valid: number of local columns that are no padding.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor, axis: Axis, valid: int) -> Tensor:
        columns = logits.shape[-1]
        first = axis.rank * columns
        flat = logits.detach().view(-1, columns)
        if flat.dtype in (torch.float16, torch.bfloat16):
            flat = flat.float()
        if valid < columns:
            flat[:, max(0, valid) :] = float("-inf")
        largest = collectives.all_reduce(flat.amax(dim=-1), axis, "max")
        local = targets.reshape(-1) - first
        here = (local >= 0) & (local < columns)
        local = local.masked_fill(~here, 0)
        target_logit = flat.gather(1, local[:, None])[:, 0].sub_(largest).masked_fill_(~here, 0.0)
        sums = torch.empty_like(largest)
        for rows, shift, total in zip(_row_blocks(flat), _row_blocks(largest), _row_blocks(sums), strict=True):
            torch.sum(rows.sub_(shift[:, None]).exp_(), dim=-1, out=total)
        totals = collectives.all_reduce(torch.stack((sums, target_logit)), axis)
        context.save_for_backward(totals[0], local, here)
        context.flat, context.dtype = flat, logits.dtype  # not `saved`: backward writes into it
        context.counts = targets >= 0
        return (totals[0].log() - totals[1]).view(targets.shape).masked_fill_(~context.counts, 0.0)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sums, local, here = context.saved_tensors
        flat, context.flat = context.flat, None
        weight = gradient.masked_fill(~context.counts, 0.0).reshape(-1)
        scale = weight / sums
        for rows, factor in zip(_row_blocks(flat), _row_blocks(scale), strict=True):
            rows.mul_(factor[:, None])
        flat.scatter_add_(1, local[:, None], -(weight * here)[:, None].to(flat.dtype))
        return flat.view(*gradient.shape, -1).to(context.dtype), None, None, None


def _row_blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor by rows into blocks that fit the cache of a CPU; on other devices return it whole."""
    return tensor.split(_ROWS) if tensor.device.type == "cpu" else (tensor,)


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, axis: Axis, true_vocab_size: int) -> Tensor:
    """Return the cross entropy of every token, [s, b] in fp32 (fp64 for fp64 logits). Overwrites the logits.

    logits: [s, b, v/tp], padded columns included; targets: [s, b], global ids, below 0 to ignore (loss 0).
    """
    valid = true_vocab_size - axis.rank * logits.shape[-1]
    return _VocabParallelCrossEntropy.apply(logits, targets, axis, valid)


def fused_linear_cross_entropy(
    kernel: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    region: TensorParallelRegion,
    true_vocab_size: int,
    softcap: float | None = None,
) -> Tensor:
    """Return each token's cross entropy, [s, b] in fp32 or wider, by a kernel that never holds all logits.

    x: [s or s/tp, b, h]; weight: [v/tp, h]; bias: [v/tp]; targets: [s, b]. Gradients of weights are computed
    with those of states: no schedule delays them.
    """
    first = region.axis.rank * len(weight)
    words = VocabularyShard(first, true_vocab_size - first, softcap, partial(collectives.all_gather, axis=region.axis))
    whole, into = region.copy_to_region(x), region.main_grad_of(weight)
    losses = kernel(
        whole.flatten(0, 1), weight, bias, targets.reshape(-1), words, into=None if into is None else into.add
    )
    return losses.view(targets.shape)
