"""What keeps the choice of experts even.

A balancing loss is E * sum_i f_i P_i, 1 when all is even: f_i is the share of all choices that fell on expert i, P_i the mean
score that tokens gave it (Fedus et al., 2022). They differ in whose tokens are counted:

    aux_loss          those of the microbatch
    seq_aux_loss      those of one sequence; the mean over the sequences (DeepSeek-V3, 2024)
    global_aux_loss   f: those of all microbatches of the step so far, of all data-parallel ranks; P: those of the microbatch

Tokens are what is not padding: places behind a text, of empty samples and of rows that fill up a rank are left out.

A microbatch lies in pieces on the tensor and context ranks. f is a count, which they sum; P has gradients, and each rank
joins only its own tokens' share of it. So the shares add up to the loss, and their gradients to its gradient.

Sinkhorn's way needs no loss: it chooses by scores that were made even before (Clark et al., 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis

_TOLERANCE, _TINY, _MOST_ROUNDS = 1e-4, 1e-8, 10_000


def count_expert_choices(
    experts: Tensor, num_experts: int, num_groups: int = 1, *, is_token: Tensor | None = None
) -> Tensor:
    """Count how often each expert was chosen, int64 [groups, e].

    experts: int64 [t, k]; token i belongs to group i % num_groups (a sequence, where tokens are [s, b]). is_token: bool
    [t], False for padding, which is not counted; None: all are tokens.
    """
    group = torch.arange(experts.shape[0], device=experts.device)[:, None] % num_groups
    place = (group * num_experts + experts).flatten()
    counts = torch.zeros(num_groups * num_experts, dtype=torch.int64, device=experts.device)
    one = torch.ones_like(place) if is_token is None else is_token[:, None].expand_as(experts).flatten().to(place.dtype)
    return counts.scatter_add_(0, place, one).view(num_groups, num_experts)  # bincount would wait for a GPU


def local_balancing_loss(
    scores: Tensor, chosen: Tensor, *, num_tokens: Tensor, is_token: Tensor | None = None
) -> Tensor:
    """Return this rank's share of a balancing loss, a scalar, not yet multiplied by its coefficient: the mean over the
    groups that have tokens.

    scores: [t, e] of this rank's tokens, normalized; token i belongs to group i % groups. chosen: [groups, e], the
    choices that f is computed from. num_tokens: of each group, on all ranks, [groups]. is_token: bool [t], False for
    padding; None: all are tokens.
    """
    num_groups, num_experts = chosen.shape
    fractions = chosen.to(scores.dtype) / chosen.sum(1, keepdim=True).clamp(min=1).to(scores.dtype)
    scores = scores if is_token is None else scores * is_token[:, None]
    mean_scores = scores.view(-1, num_groups, num_experts).sum(0) / num_tokens.clamp(min=1)[:, None]
    groups_with_tokens = (num_tokens > 0).sum().clamp(min=1).to(scores.dtype)
    return num_experts / groups_with_tokens * (fractions * mean_scores).sum()


def local_router_z_loss(scores: Tensor, *, num_tokens: Tensor, is_token: Tensor | None = None) -> Tensor:
    """Return this rank's share of the mean squared log-sum-exp of logits [t, e] (z-loss, Zoph et al., 2022).

    num_tokens: a scalar, on all ranks. is_token: as in `local_balancing_loss`.
    """
    squares = torch.logsumexp(scores, dim=-1).square()
    return (squares if is_token is None else squares * is_token).sum() / num_tokens.clamp(min=1)


def sinkhorn(scores: Tensor, axis: Axis) -> Tensor:
    """Return exp(scores) scaled by rows and columns until all tokens, and all experts, have about the same sum.

    scores: router logits [t, e], which get no gradient; returns the same shape. Tokens of all ranks of the axis are
    balanced together.
    """
    whole = collectives.all_gather(scores.detach(), axis)
    whole = (whole - whole.amax(1, keepdim=True)).exp()  # rows are scaled anyway, and large scores would overflow
    num_tokens, num_experts = whole.shape
    rows, columns = whole.new_ones(num_tokens), whole.new_ones(num_experts)
    for _ in range(_MOST_ROUNDS):
        rows = 1.0 / num_tokens / ((whole * columns).sum(1) + _TINY)
        before, columns = columns, 1.0 / num_experts / ((rows[:, None] * whole).sum(0) + _TINY)
        if float((before - columns).abs().mean()) <= _TOLERANCE:
            break
    return collectives.local_chunk(whole * columns * rows[:, None], axis)


def updated_expert_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """Return the expert bias after a step: raised by `rate` below the mean load, else lowered (Wang et al., 2024).

    bias: [..., e]; load: int64 [..., e], choices of each expert.
    """
    missing = load.sum(-1, keepdim=True) - load * load.shape[-1]  # e times (mean - load), in whole numbers
    return bias + rate * missing.sign().to(bias.dtype)
