from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.rng import RandomStreams, derive_seed

CPU = torch.device("cpu")


def streams() -> RandomStreams:
    return RandomStreams(CPU, {"default": 1, "cut": 2})


def drawn_from(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def test_each_stream_continues_where_it_stopped_whatever_the_other_does() -> None:
    own, default, cut = streams(), [], []
    for turn in range(3):
        default.append(torch.rand(2))
        with own.fork("cut"):
            cut.append(torch.rand(3))
    assert torch.equal(torch.cat(default), drawn_from(1, 6))
    assert torch.equal(torch.cat(cut), drawn_from(2, 9))


def test_the_default_stream_is_the_devices_own_generator() -> None:
    own = streams()
    with own.fork("default"):
        first = torch.rand(2)
    assert torch.equal(torch.cat((first, torch.rand(2))), drawn_from(1, 4))


def test_an_error_inside_a_stream_gives_the_default_stream_back() -> None:
    own = streams()
    with pytest.raises(ValueError), own.fork("cut"):
        torch.rand(5)
        raise ValueError
    assert torch.equal(torch.rand(2), drawn_from(1, 2))


def test_a_loaded_state_draws_the_same_again() -> None:
    own = streams()
    torch.rand(3)

    def draw() -> list[torch.Tensor]:
        with own.fork("cut"):
            inside = torch.rand(4)
        return [torch.rand(4), inside]

    state = own.state()
    first, second = draw(), draw()
    own.load(state)
    assert all(torch.equal(a, b) for a, b in zip(draw(), first, strict=True))
    assert not torch.equal(first[1], second[1])
    own.load(state)  # a state can be loaded more than once
    assert torch.equal(draw()[1], first[1])


def at(**places: int) -> Mesh:
    return replace(Mesh.single_process(), **{name: Axis(name, 4, rank, (0, 1, 2, 3)) for name, rank in places.items()})


def first_draws(mesh: Mesh, **keywords: bool) -> tuple[float, float]:
    own = RandomStreams.build(mesh, 5, **keywords)
    with own.fork("cut"):
        inside = float(torch.rand(()))
    return float(torch.rand(())), inside


def test_tensor_ranks_share_the_default_stream_and_not_the_cut_one() -> None:
    a, b = first_draws(at(tp=0)), first_draws(at(tp=1))
    assert a[0] == b[0] and a[1] != b[1]


def test_stages_differ_in_both_streams_and_data_ranks_only_on_demand() -> None:
    first, stage, data = at(pp=0, dp=0), at(pp=1, dp=0), at(pp=0, dp=1)
    assert all(a != b for a, b in zip(first_draws(first), first_draws(stage), strict=True))
    assert first_draws(first) == first_draws(data)
    apart = first_draws(first, per_data_rank=True), first_draws(data, per_data_rank=True)
    assert all(a != b for a, b in zip(*apart, strict=True))


def test_seeds_are_spread_and_do_not_run_words_together_by_chance() -> None:
    seeds = {
        derive_seed("initial", seed, name) for seed in range(30) for name in ("a", "b", "a.b", "layers.1", "layers.11")
    }
    assert len(seeds) == 150 and all(0 <= seed < 2**63 for seed in seeds)
