"""Token dispatch: tokens go to the ranks of their experts, outputs come back.

    dispatched = dispatcher.dispatch(tokens, routing, capacity)    starts the exchange
    inputs = dispatched.wait()                                     inputs of this rank's experts, sorted by expert
    dispatcher.combine(outputs, dispatched)                        for each token the sum of its experts' outputs

The rows that leave a rank are its choices sorted by expert; combining undoes every step of dispatching:

    local       no one else has experts: sort, compute, sum
    alltoall    sort by expert | rows to the ranks of ep that have their experts | gather over etp | sort by own expert
    allgather   gather all tokens over etp and ep | sort the choices of own experts; back: sum over ep and etp, cut
    library     tokens, each once, to the ranks of ep that have experts of theirs | sort the choices of own experts

Every rank's tokens are its own: no two ranks of a stage send the same. A row takes its weight along, and the experts apply
it, so that what comes back need only be summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.kernels.choice.table import Kernels
from megatron.core.kernels.ops.host_read_permission import host_may_read
from megatron.core.kernels.ops.permute import permute
from megatron.core.parallel import collectives
from megatron.core.parallel.collectives import AsyncAllToAll
from megatron.core.parallel.device import DeviceToHostCopy
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.transformer.router import ExpertRouting

Permute = Callable[[Tensor, Tensor, Tensor, bool, bool], Tensor]  # kernels/ops/permute.py


@dataclass(frozen=True, slots=True)
class ExpertInputs:
    """What this rank's experts compute on. tokens: [n, h], sorted by expert; weights: [n]; counts: [e of this rank] int64, rows of each."""

    tokens: Tensor
    weights: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class ExpertPermutation:
    """The permutation that sorts the t * k choices of tokens by expert. Places that hold nothing have an index one past the end.

    choices: [n], the choice that row number i is, of all t * k. places: [t, k], the row that a choice is. counts: [experts].
    empties: whether there may be rows without a choice. losses: whether there may be choices without a row. permute: the kernel.
    """

    choices: Tensor
    places: Tensor
    counts: Tensor
    empties: bool
    losses: bool
    permute: Permute = permute

    @property
    def token_indices(self) -> Tensor:
        """Index of the token that each row is a copy of, [n]."""
        return self.choices // self.places.shape[1]


@dataclass(frozen=True, slots=True)
class PendingTokenDispatch:
    """Tokens on their way to their experts. wait: finishes the exchange and returns the inputs of this rank's experts.

    permutation: order in which the choices were sent. handle: what `combine` needs besides.
    """

    wait: Callable[[], ExpertInputs]
    permutation: ExpertPermutation
    handle: Any = None


class TokenDispatcher(Protocol):
    """Sends tokens to the ranks that hold their experts, and the outputs back (--moe-token-dispatcher-type)."""

    def dispatch(self, tokens: Tensor, routing: ExpertRouting, capacity: int | None) -> PendingTokenDispatch:
        """Start to send tokens [t, h] to their experts; `PendingTokenDispatch.wait` finishes it.

        capacity: number of rows that every expert is padded or cut to; None: as many as chose it.
        """

    def combine(self, outputs: Tensor, dispatched: PendingTokenDispatch) -> Tensor:
        """Send the experts' outputs back to the ranks of their tokens and sum them.

        outputs: [n, h], one for each row that `wait` returned. Returns [t, h], the sum of each token's rows.
        """


def permutation_by_expert(
    experts: Tensor,
    kept: Tensor | None,
    num_experts: int,
    *,
    first: int = 0,
    capacity: int | None = None,
    all_here: bool = False,
    permute: Permute = permute,
) -> ExpertPermutation:
    """Return the permutation that sorts choices by expert, and those of one expert by token.

    experts: [t, k], the chosen experts; kept: [t, k], False for a dropped choice; None: all are kept. Only choices of
    `num_experts` experts from `first` on become rows; all_here: there are no others. capacity: every expert gets so
    many rows, of which the last may be empty.
    """
    flat, width = experts.reshape(-1), experts.shape[1]
    key = flat - first
    outside = (key < 0) | (key >= num_experts)
    if kept is not None:
        outside |= ~kept.reshape(-1)
    key = key.masked_fill(outside, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device).scatter_add_(
        0, key, torch.ones_like(key)
    )
    sorted_choices, counts = key.argsort(stable=True), counts[:-1]
    complete = all_here and kept is None
    if capacity is None and not complete and not host_may_read():
        # Choices that are left out become empty rows at the end, which the last expert computes and nobody reads.
        rows = torch.arange(len(flat), device=flat.device)
        choices = sorted_choices.masked_fill(rows >= counts.sum(), len(flat))
        counts = torch.cat((counts[:-1], len(flat) - counts[:-1].sum(0, keepdim=True)))
    elif capacity is None:
        # The number of rows is known without asking the device where no choice is left out.
        choices = sorted_choices if complete else sorted_choices[: int(counts.sum())]
        rows = torch.arange(len(choices), device=flat.device)
    else:
        starts = counts.cumsum(0) - counts
        inside = torch.arange(capacity, device=flat.device)
        slots = (starts[:, None] + inside).clamp(max=len(flat))
        empty = inside >= counts[:, None]
        padded = torch.cat([sorted_choices, sorted_choices.new_full((1,), len(flat))])  # there may be no choice at all
        choices = padded[slots].masked_fill(empty, len(flat)).reshape(-1)
        rows = torch.arange(len(choices), device=flat.device)
        counts = torch.full_like(counts, capacity)
    places = torch.full((len(flat) + 1,), len(choices), device=flat.device)  # the last is where empty rows point to
    places = places.scatter(0, choices, rows)
    return ExpertPermutation(
        choices,
        places[:-1].view(-1, width),
        counts,
        empties=capacity is not None or not complete and not host_may_read(),
        losses=not complete,
        permute=permute,
    )


def permute_tokens(tokens: Tensor, permutation: ExpertPermutation) -> Tensor:
    """Copy each token to the row of every choice. tokens: [t, h]; returns [n, h]."""
    return permutation.permute(
        tokens, permutation.token_indices[:, None], permutation.places, permutation.empties, permutation.losses
    )


def permute_routing_weights(weights: Tensor, permutation: ExpertPermutation) -> Tensor:
    """Return the routing weight of every row, [n], zero for empty rows. weights: [t, k]."""
    places = permutation.places.reshape(-1, 1)
    return permute(
        weights.reshape(-1, 1), permutation.choices[:, None], places, permutation.empties, permutation.losses
    ).squeeze(1)


def unpermute_tokens(rows: Tensor, permutation: ExpertPermutation) -> Tensor:
    """Sum the rows of each token. rows: [n, h]; returns [t, h]."""
    return permutation.permute(
        rows, permutation.places, permutation.token_indices[:, None], permutation.losses, permutation.empties
    )


def reorder_token_rows(rows: Tensor, index: Tensor, back: Tensor, permute: Permute = permute) -> Tensor:
    """Return rows[index]. rows: [n, h]; index, back: [n], permutations that are inverse to each other."""
    return permute(rows, index[:, None], back[:, None], False, False)


@dataclass(frozen=True, slots=True)
class AllGatherTokenDispatcher:
    """Token dispatch by all-gather: every rank of ep and etp gets all tokens, and keeps those of its experts."""

    num_experts: int
    ep: Axis
    etp: Axis
    permute: Permute = permute

    def dispatch(self, tokens: Tensor, routing: ExpertRouting, capacity: int | None) -> PendingTokenDispatch:
        """See `TokenDispatcher.dispatch`."""
        tokens, weights = self._gather_over_ranks(tokens), self._gather_over_ranks(routing.weights)
        experts = self._gather_over_ranks(routing.experts)
        kept = None if routing.kept is None else self._gather_over_ranks(routing.kept.to(torch.uint8)).bool()
        here = self.num_experts // self.ep.size
        capacity = None if capacity is None else capacity * self.ep.size * self.etp.size
        permutation = permutation_by_expert(
            experts,
            kept,
            here,
            first=here * self.ep.rank,
            capacity=capacity,
            all_here=self.ep.size == 1,
            permute=self.permute,
        )
        rows = ExpertInputs(
            permute_tokens(tokens, permutation), permute_routing_weights(weights, permutation), permutation.counts
        )
        return PendingTokenDispatch(lambda: rows, permutation)

    def combine(self, outputs: Tensor, dispatched: PendingTokenDispatch) -> Tensor:
        """See `TokenDispatcher.combine`."""
        shares = unpermute_tokens(outputs, dispatched.permutation)
        summed = collectives.scatter_with_gather_backward(shares, self.ep, self.ep.overlap.yield_to_other_microbatch)
        return collectives.scatter_with_gather_backward(summed, self.etp)

    def _gather_over_ranks(self, values: Tensor) -> Tensor:
        """Gather values [t, ...] of etp, then ep, along dimension 0; floating-point ones with a gradient."""
        if not values.dtype.is_floating_point:
            return collectives.all_gather(collectives.all_gather(values, self.etp), self.ep)
        gathered = collectives.gather_with_scatter_backward(values, self.etp)
        return collectives.gather_with_scatter_backward(gathered, self.ep, self.ep.overlap.yield_to_other_microbatch)


@dataclass(frozen=True, slots=True)
class _ExpertExchangeState:
    """exchange: over ep. gathered: rows of each etp rank. index, back: to the order of own experts, and from it."""

    exchange: AsyncAllToAll
    gathered: list[int]
    index: Tensor
    back: Tensor


@dataclass(frozen=True, slots=True)
class AllToAllTokenDispatcher:
    """Token dispatch by all-to-all: each row is sent to the rank that holds its expert."""

    num_experts: int
    ep: Axis
    etp: Axis
    permute: Permute = permute

    def dispatch(self, tokens: Tensor, routing: ExpertRouting, capacity: int | None) -> PendingTokenDispatch:
        """See `TokenDispatcher.dispatch`."""
        permutation = permutation_by_expert(
            routing.experts, routing.kept, self.num_experts, capacity=capacity, all_here=True, permute=self.permute
        )
        here = self.num_experts // self.ep.size
        # [etp, ep, ep, here]: by etp rank and sender, and then by receiver and its expert
        whole = collectives.all_gather(collectives.all_gather(permutation.counts, self.ep), self.etp)
        whole = whole.view(self.etp.size, self.ep.size, self.ep.size, here)
        known = DeviceToHostCopy([whole], whole.device)
        # The device permutes while the host waits for the counts, the only wait here.
        own_weights = permute_routing_weights(routing.weights, permutation)[:, None]
        own = permute_tokens(tokens, permutation)
        (table,) = known.wait()
        arriving, there = table[:, :, self.ep.rank], whole[:, :, self.ep.rank]
        send, gathered = table[self.etp.rank, self.ep.rank].sum(-1).tolist(), arriving.sum((1, 2)).tolist()
        handle = _ExpertExchangeState(
            AsyncAllToAll(
                send, arriving[self.etp.rank].sum(-1).tolist(), self.ep, self.ep.overlap.yield_to_other_microbatch
            ),
            gathered,
            *_sender_to_expert_order(there.reshape(-1, here), sum(gathered)),
        )
        beside = AsyncAllToAll(send, handle.exchange.receive, self.ep)  # its waits follow those of the tokens
        weights = collectives.start_autograd_all_to_all(own_weights, beside)
        coming = collectives.start_autograd_all_to_all(own, handle.exchange)
        counts = there.sum((0, 1))

        def receive_expert_inputs() -> ExpertInputs:
            arrived = collectives.finish_autograd_all_to_all(coming, handle.exchange)
            inputs = self._gather_and_sort_by_expert(arrived, handle)
            arrived = collectives.finish_autograd_all_to_all(weights, beside)
            return ExpertInputs(inputs, self._gather_and_sort_by_expert(arrived, handle).squeeze(1), counts)

        return PendingTokenDispatch(receive_expert_inputs, permutation, handle)

    def combine(self, outputs: Tensor, dispatched: PendingTokenDispatch) -> Tensor:
        """See `TokenDispatcher.combine`."""
        handle: _ExpertExchangeState = dispatched.handle
        shares = reorder_token_rows(outputs, handle.back, handle.index, self.permute)
        own = collectives.uneven_scatter_with_gather_backward(shares, handle.gathered, self.etp)
        forth, switch = handle.exchange, self.ep.overlap.yield_to_other_microbatch
        return unpermute_tokens(
            collectives.all_to_all(own, forth.receive, forth.send, self.ep, switch), dispatched.permutation
        )

    def _gather_and_sort_by_expert(self, rows: Tensor, handle: _ExpertExchangeState) -> Tensor:
        """Gather rows that arrived over etp, and sort them by local expert."""
        return reorder_token_rows(
            collectives.uneven_gather_with_scatter_backward(rows, handle.gathered, self.etp),
            handle.index,
            handle.back,
            self.permute,
        )


@dataclass(frozen=True, slots=True)
class FlexTokenDispatcher:
    """Token dispatch by a library (DeepEP, kernels/external/deep_ep.py). Experts are not cut over etp."""

    num_experts: int
    ep: Axis
    library: Any
    permute: Permute = permute

    def dispatch(self, tokens: Tensor, routing: ExpertRouting, capacity: int | None) -> PendingTokenDispatch:
        """See `TokenDispatcher.dispatch`."""
        experts = routing.experts if routing.kept is None else routing.experts.masked_fill(~routing.kept, -1)
        arrived, weights, own, handle = self.library.dispatch(tokens, routing.weights, experts, self.num_experts)
        capacity = None if capacity is None else capacity * self.ep.size
        permutation = permutation_by_expert(
            own, None, self.num_experts // self.ep.size, capacity=capacity, permute=self.permute
        )
        rows = ExpertInputs(
            permute_tokens(arrived, permutation), permute_routing_weights(weights, permutation), permutation.counts
        )
        return PendingTokenDispatch(lambda: rows, permutation, handle)

    def combine(self, outputs: Tensor, dispatched: PendingTokenDispatch) -> Tensor:
        """See `TokenDispatcher.combine`."""
        return self.library.combine(unpermute_tokens(outputs, dispatched.permutation), dispatched.handle)


def _sender_to_expert_order(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(index, back), [total], that bring blocks by sender and then expert into the order by expert and then sender.

    counts: [senders, experts], rows of each block, `total` in all.
    """
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    owners = experts.repeat_interleave(counts.reshape(-1), output_size=total)
    index = owners.argsort(stable=True)
    return index, torch.empty_like(index).scatter_(0, index, torch.arange(total, device=index.device))


def make_token_dispatcher(kind: str, num_experts: int, mesh: Mesh, kernels: Kernels = Kernels()) -> TokenDispatcher:
    """Return the dispatcher of --moe-token-dispatcher-type `kind` for this mesh; without ep and etp all-gather, which is local.

    kernels: its moe_flex_dispatcher makes the library of flex from the group of ep; without one, flex is all-to-all.
    """
    library, permute = kernels.moe_flex_dispatcher, kernels.permute
    if kind == "flex" and library is not None and mesh.ep.group is not None:
        return FlexTokenDispatcher(num_experts, mesh.ep, library(mesh.ep.group), permute)
    alone = mesh.ep.group is None and mesh.etp.group is None  # nothing is gathered: sort, compute, sum
    dispatcher = AllGatherTokenDispatcher if alone or kind == "allgather" else AllToAllTokenDispatcher
    return dispatcher(num_experts, mesh.ep, mesh.etp, permute)
