from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from tests.helpers.world import Worlds
from tests.unit.parallel import ranks
from tests.unit.parallel.ranks import raw_flag_value

ALONE = Axis("tp")

# pair: (shape of the input, whether ranks hold the same input, shape of the output, whether the output is the same),
# and the function of all ranks' inputs that the outputs are.
PAIRS = {
    "identity_with_reduce_backward": ((4, 3), True, (4, 3), False, lambda xs: [xs[0], xs[0]]),
    "reduce_with_identity_backward": ((4, 3), False, (4, 3), True, lambda xs: [xs[0] + xs[1]]),
    "gather_with_scatter_backward": ((2, 3), False, (4, 3), False, lambda xs: [torch.cat(xs), torch.cat(xs)]),
    "scatter_with_gather_backward": ((4, 3), False, (2, 3), False, lambda xs: [*(xs[0] + xs[1]).chunk(2)]),
    "gather_with_split_backward": ((2, 3), False, (4, 3), True, lambda xs: [torch.cat(xs)]),
    "split_with_gather_backward": ((4, 3), True, (2, 3), False, lambda xs: [*xs[0].chunk(2)]),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_has_the_gradient_of_the_function_that_it_is_over_all_ranks(world: Worlds, pair: str) -> None:
    shape, replicated, out, same, function = PAIRS[pair]
    results = world(2).run(ranks.differentiate, pair, shape, replicated, out, same)
    xs = [raw_flag_value(rank, *shape).requires_grad_() for rank in range(1 if replicated else 2)]
    ys = function(xs)
    sum((y * raw_flag_value(50 + rank, *out)).sum() for rank, y in enumerate(ys)).backward()
    for rank, (y, gradient) in enumerate(results):
        torch.testing.assert_close(y, ys[0 if same else rank].detach(), rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(gradient, xs[0 if replicated else rank].grad, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("pair", PAIRS)
def test_on_one_rank_a_pair_is_its_input(pair: str) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    assert getattr(collectives, pair)(x, ALONE) is x


def test_collectives_run_over_their_axis_only(world: Worlds) -> None:
    def values(rank: int) -> Tensor:
        return raw_flag_value(rank, 4, 3)

    for name, combine in {
        "sum": torch.add,
        "max": torch.maximum,
        "min": torch.minimum,
        "avg": lambda a, b: (a + b) / 2,
    }.items():
        for rank, found in enumerate(world(4).run(ranks.plain, name)):
            torch.testing.assert_close(found, combine(values(rank % 2), values(rank % 2 + 2)))
    for rank, found in enumerate(world(4).run(ranks.plain, "all_gather")):
        assert torch.equal(found, torch.cat((values(rank % 2).t(), values(rank % 2 + 2).t())))
    for rank, found in enumerate(world(4).run(ranks.plain, "reduce_scatter")):
        torch.testing.assert_close(found, (values(rank % 2) + values(rank % 2 + 2)).chunk(2)[rank // 2])
    for rank, found in enumerate(world(4).run(ranks.plain, "cut")):
        assert torch.equal(found, values(9).chunk(2)[rank // 2])
    for rank, found in enumerate(world(4).run(ranks.plain, "broadcast")):
        assert torch.equal(found, values(rank % 2 + 2))
    assert world(4).run(ranks.plain, "broadcast_object") == [{"rank": 2}, {"rank": 3}] * 2
    assert world(4).run(ranks.plain, "gather_objects") == [[("rank", 0), ("rank", 2)], [("rank", 1), ("rank", 3)]] * 2


def test_a_piece_may_be_a_slice_of_the_whole(world: Worlds) -> None:
    for rank, (gathered, reduced) in enumerate(world(4).run(ranks.plain, "in place")):
        whole = torch.cat((raw_flag_value(rank % 2, 4, 3)[:2], raw_flag_value(rank % 2 + 2, 4, 3)[:2]))
        assert torch.equal(gathered, whole)
        assert torch.equal(reduced, 2 * whole.chunk(2)[rank // 2])


def test_on_one_rank_every_collective_gives_back_what_it_got() -> None:
    x = torch.randn(4, 3)
    assert collectives.all_reduce(x, ALONE) is x and collectives.all_gather(x, ALONE) is x
    assert collectives.reduce_scatter(x, ALONE) is x and collectives.local_chunk(x, ALONE) is x
    assert collectives.broadcast(x, ALONE) is x and collectives.gather_objects("x", ALONE) == ["x"]
    output = torch.zeros(4, 3)
    assert collectives.start_all_gather(output, x, ALONE) is None and torch.equal(output, x)
    output.zero_()
    assert collectives.start_reduce_scatter(output, x, ALONE) is None and torch.equal(output, x)
    collectives.barrier(ALONE)


SIZES = {0: [2, 0, 3, 1], 1: [0, 0, 1, 2], 2: [4, 1, 0, 0], 3: [0, 0, 0, 0]}  # rows that each rank sends to each


def test_an_exchange_brings_every_piece_to_its_rank_and_its_gradient_home(world: Worlds) -> None:
    for rank, (found, gradient) in enumerate(world(4).run(ranks.exchange_pieces, SIZES)):
        pieces = [raw_flag_value(sender, sum(SIZES[sender]), 3).split(SIZES[sender])[rank] for sender in range(4)]
        assert torch.equal(found, torch.cat(pieces))
        weights = [
            raw_flag_value(50 + to, sum(SIZES[sender][to] for sender in range(4)), 3).split(
                [SIZES[sender][to] for sender in range(4)]
            )[rank]
            for to in range(4)
        ]
        assert torch.equal(gradient, torch.cat(weights))


def test_an_exchange_lets_other_work_run_between_departure_and_arrival(world: Worlds) -> None:
    for events in world(2).run(ranks.watch_an_exchange):
        assert events == ["start", "other", "wait", "start", "other backward", "wait"]


@pytest.mark.parametrize("sizes", [[2, 0, 3, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
def test_uneven_pieces_are_gathered_and_scattered_with_the_gradients_of_what_they_do(
    world: Worlds, sizes: list[int]
) -> None:
    total = sum(sizes)
    weights = [raw_flag_value(50 + rank, total, 3) for rank in range(4)]
    for rank, (whole, gathered, piece, scattered) in enumerate(world(4).run(ranks.uneven, sizes)):
        assert torch.equal(whole, torch.cat([raw_flag_value(other, sizes[other], 3) for other in range(4)]))
        torch.testing.assert_close(gathered, sum(weights).split(sizes)[rank])
        torch.testing.assert_close(piece, sum(raw_flag_value(other, total, 3) for other in range(4)).split(sizes)[rank])
        assert torch.equal(scattered, torch.cat([raw_flag_value(70 + other, sizes[other], 3) for other in range(4)]))
