"""Tokens to their experts, and back.

    dispatcher.send(tokens, weights, routing) -> a parcel; parcel.arrive() -> rows of this rank's experts, sorted by expert
    dispatcher.bring_back(outputs, parcel) -> for each token the sum of what its experts said

The rows that leave a rank are its choices sorted by expert; their way back is the same way backwards:

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

from megatron.core.kernels.permute import permute
from megatron.core.kernels.table import Kernels
from megatron.core.parallel import collectives
from megatron.core.parallel.collectives import AsyncExchange
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.transformer.router import Routing

Permute = Callable[[Tensor, Tensor, Tensor, bool, bool], Tensor]  # kernels/permute.py


@dataclass(frozen=True, slots=True)
class Rows:
    """What experts compute on. tokens: [n, h], sorted by expert; weights: [n]; counts: [e of this rank] int64, rows of each."""

    tokens: Tensor
    weights: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class Order:
    """How choices become rows. Places that hold nothing have an index one past the end.

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
    def tokens(self) -> Tensor:
        """[n]: the token that row number i is made of."""
        return self.choices // self.places.shape[1]


@dataclass(frozen=True, slots=True)
class Parcel:
    """Rows on their way. arrive: waits for them. order: of the choices that were sent. way: what the return needs."""

    arrive: Callable[[], Rows]
    order: Order
    way: Any = None


class Dispatcher(Protocol):
    """A way to experts and back."""

    def send(self, tokens: Tensor, routing: Routing, room: int | None) -> Parcel:
        """Start tokens [t, h] on their way. room: rows of each expert, if all are filled up to as many."""

    def bring_back(self, outputs: Tensor, parcel: Parcel) -> Tensor:
        """outputs: [n, h], of the rows that arrived. Returns [t, h], the sum of each token's rows."""


def order_of(
    experts: Tensor,
    kept: Tensor | None,
    num_experts: int,
    *,
    first: int = 0,
    room: int | None = None,
    all_here: bool = False,
    permute: Permute = permute,
) -> Order:
    """The order that sorts choices by expert, and those of one expert by token.

    experts: [t, k]; kept: [t, k] or None. Only choices of `num_experts` experts from `first` on become rows; all_here: there
    are no others. room: every expert gets so many rows, of which the last may be empty.
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
    if room is None:
        # The number of rows is known without asking the device where no choice is left out.
        choices = sorted_choices if all_here and kept is None else sorted_choices[: int(counts.sum())]
        rows = torch.arange(len(choices), device=flat.device)
    else:
        starts = counts.cumsum(0) - counts
        inside = torch.arange(room, device=flat.device)
        slots = (starts[:, None] + inside).clamp(max=len(flat))
        empty = inside >= counts[:, None]
        padded = torch.cat([sorted_choices, sorted_choices.new_full((1,), len(flat))])  # there may be no choice at all
        choices = padded[slots].masked_fill(empty, len(flat)).reshape(-1)
        rows = torch.arange(len(choices), device=flat.device)
        counts = torch.full_like(counts, room)
    places = torch.full((len(flat) + 1,), len(choices), device=flat.device)  # the last is where empty rows point to
    places = places.scatter(0, choices, rows)
    return Order(
        choices,
        places[:-1].view(-1, width),
        counts,
        empties=room is not None,
        losses=not all_here or kept is not None,
        permute=permute,
    )


def spread(tokens: Tensor, order: Order) -> Tensor:
    """The row of every choice. tokens: [t, h]; returns [n, h]."""
    return order.permute(tokens, order.tokens[:, None], order.places, order.empties, order.losses)


def spread_weights(weights: Tensor, order: Order) -> Tensor:
    """The weight of every row. weights: [t, k]; returns [n], zero for empty rows."""
    places = order.places.reshape(-1, 1)
    return permute(weights.reshape(-1, 1), order.choices[:, None], places, order.empties, order.losses).squeeze(1)


def collect(rows: Tensor, order: Order) -> Tensor:
    """Each token's sum over its rows. rows: [n, h]; returns [t, h]."""
    return order.permute(rows, order.places, order.tokens[:, None], order.losses, order.empties)


def rearranged(rows: Tensor, index: Tensor, back: Tensor, permute: Permute = permute) -> Tensor:
    """rows[index], where `back` undoes it."""
    return permute(rows, index[:, None], back[:, None], False, False)


@dataclass(frozen=True, slots=True)
class Local:
    """All experts are here."""

    num_experts: int
    permute: Permute = permute

    def send(self, tokens: Tensor, routing: Routing, room: int | None) -> Parcel:
        """As the protocol says."""
        order = order_of(
            routing.experts, routing.kept, self.num_experts, room=room, all_here=True, permute=self.permute
        )
        rows = Rows(spread(tokens, order), spread_weights(routing.weights, order), order.counts)
        return Parcel(lambda: rows, order)

    def bring_back(self, outputs: Tensor, parcel: Parcel) -> Tensor:
        """As the protocol says."""
        return collect(outputs, parcel.order)


@dataclass(frozen=True, slots=True)
class AllGather:
    """Every rank sees all tokens of its experts' group, and computes on those that chose its own experts."""

    num_experts: int
    ep: Axis
    etp: Axis
    permute: Permute = permute

    def send(self, tokens: Tensor, routing: Routing, room: int | None) -> Parcel:
        """As the protocol says."""
        tokens, weights = self._gather(tokens), self._gather(routing.weights)
        experts = self._gather(routing.experts)
        kept = None if routing.kept is None else self._gather(routing.kept.to(torch.uint8)).bool()
        here = self.num_experts // self.ep.size
        room = None if room is None else room * self.ep.size * self.etp.size
        order = order_of(experts, kept, here, first=here * self.ep.rank, room=room, permute=self.permute)
        rows = Rows(spread(tokens, order), spread_weights(weights, order), order.counts)
        return Parcel(lambda: rows, order)

    def bring_back(self, outputs: Tensor, parcel: Parcel) -> Tensor:
        """As the protocol says."""
        shares = collect(outputs, parcel.order)
        summed = collectives.scatter_then_gather(shares, self.ep, self.ep.overlap.switch)
        return collectives.scatter_then_gather(summed, self.etp)

    def _gather(self, values: Tensor) -> Tensor:
        if not values.dtype.is_floating_point:
            return collectives.all_gather(collectives.all_gather(values, self.etp), self.ep)
        gathered = collectives.gather_then_scatter(values, self.etp)
        return collectives.gather_then_scatter(gathered, self.ep, self.ep.overlap.switch)


@dataclass(frozen=True, slots=True)
class _Way:
    """exchange: over ep. gathered: rows of each etp rank. index, back: to the order of own experts, and from it."""

    exchange: AsyncExchange
    gathered: list[int]
    index: Tensor
    back: Tensor


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Rows travel to the ranks that have their experts."""

    num_experts: int
    ep: Axis
    etp: Axis
    permute: Permute = permute

    def send(self, tokens: Tensor, routing: Routing, room: int | None) -> Parcel:
        """As the protocol says."""
        order = order_of(
            routing.experts, routing.kept, self.num_experts, room=room, all_here=True, permute=self.permute
        )
        here = self.num_experts // self.ep.size
        # [etp, ep, ep, here]: by etp rank and sender, and then by receiver and its expert
        whole = collectives.all_gather(collectives.all_gather(order.counts, self.ep), self.etp)
        table = whole.view(self.etp.size, self.ep.size, self.ep.size, here).cpu()
        arriving = table[:, :, self.ep.rank]
        send = table[self.etp.rank, self.ep.rank].sum(-1).tolist()
        way = _Way(
            AsyncExchange(send, arriving[self.etp.rank].sum(-1).tolist(), self.ep, self.ep.overlap.switch),
            arriving.sum((1, 2)).tolist(),
            *(index.to(tokens.device) for index in _by_expert(arriving.reshape(-1, here))),
        )
        beside = AsyncExchange(send, way.exchange.receive, self.ep)  # its waits follow those of the tokens
        weights = collectives.start_async(spread_weights(routing.weights, order)[:, None], beside)
        coming = collectives.start_async(spread(tokens, order), way.exchange)
        counts = arriving.sum((0, 1)).to(tokens.device)

        def arrive() -> Rows:
            arrived = self._sorted(collectives.finish_async(coming, way.exchange), way)
            return Rows(arrived, self._sorted(collectives.finish_async(weights, beside), way).squeeze(1), counts)

        return Parcel(arrive, order, way)

    def bring_back(self, outputs: Tensor, parcel: Parcel) -> Tensor:
        """As the protocol says."""
        way: _Way = parcel.way
        shares = rearranged(outputs, way.back, way.index, self.permute)
        own = collectives.uneven_scatter_then_gather(shares, way.gathered, self.etp)
        forth, switch = way.exchange, self.ep.overlap.switch
        return collect(collectives.exchange(own, forth.receive, forth.send, self.ep, switch), parcel.order)

    def _sorted(self, rows: Tensor, way: _Way) -> Tensor:
        return rearranged(
            collectives.uneven_gather_then_scatter(rows, way.gathered, self.etp), way.index, way.back, self.permute
        )


@dataclass(frozen=True, slots=True)
class ByLibrary:
    """Tokens travel as a library sends them (kernels/external/deep_ep.py). Experts are whole."""

    num_experts: int
    ep: Axis
    library: Any
    permute: Permute = permute

    def send(self, tokens: Tensor, routing: Routing, room: int | None) -> Parcel:
        """As the protocol says."""
        experts = routing.experts if routing.kept is None else routing.experts.masked_fill(~routing.kept, -1)
        arrived, weights, own, handle = self.library.dispatch(tokens, routing.weights, experts, self.num_experts)
        room = None if room is None else room * self.ep.size
        order = order_of(own, None, self.num_experts // self.ep.size, room=room, permute=self.permute)
        rows = Rows(spread(arrived, order), spread_weights(weights, order), order.counts)
        return Parcel(lambda: rows, order, handle)

    def bring_back(self, outputs: Tensor, parcel: Parcel) -> Tensor:
        """As the protocol says."""
        return self.library.combine(collect(outputs, parcel.order), parcel.way)


def _by_expert(counts: Tensor) -> tuple[Tensor, Tensor]:
    """(index, back) that bring blocks by sender and then expert into the order by expert and then sender.

    counts: [senders, experts], rows of each block.
    """
    owners = torch.arange(counts.shape[1]).repeat(counts.shape[0]).repeat_interleave(counts.reshape(-1))
    index = owners.argsort(stable=True)
    return index, index.argsort()


def dispatcher_of(kind: str, num_experts: int, mesh: Mesh, kernels: Kernels = Kernels()) -> Dispatcher:
    """The dispatcher of --moe-token-dispatcher-type for these axes. kernels: with a library for flex, made from the group of ep."""
    library, permute = kernels.moe_flex_dispatcher, kernels.permute
    if mesh.ep.group is None and mesh.etp.group is None:
        return Local(num_experts, permute)
    if kind == "flex" and library is not None and mesh.ep.group is not None:
        return ByLibrary(num_experts, mesh.ep, library(mesh.ep.group), permute)
    return (AllGather if kind == "allgather" else AllToAll)(num_experts, mesh.ep, mesh.etp, permute)
