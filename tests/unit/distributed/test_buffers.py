from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.buffers import Bucket, default_bucket_size, make_buckets
from tests.unit.distributed.ranks import SIZES, alone, small_module


def buckets(
    ranks: int = 1,
    rank: int = 0,
    *,
    sharded: bool = False,
    bucket_size: int | None = None,
    tied: str = "",
    dtype: torch.dtype = torch.float64,
    grad_dtype: torch.dtype = torch.float64,
) -> list[Bucket]:
    mesh = alone(ranks, rank)
    return make_buckets(
        small_module(mesh, dtype, tied=tied), mesh, grad_dtype=grad_dtype, sharded=sharded, bucket_size=bucket_size
    )


def names(bucket: Bucket) -> list[str]:
    return [param.spec.name.removesuffix(".weight") for param in bucket.params]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("bucket_size", [None, 1, 100])
def test_segments_of_all_ranks_cover_every_parameter_exactly_once(ranks: int, bucket_size: int | None) -> None:
    covered = {name: torch.zeros(torch.Size(shape).numel(), dtype=torch.int64) for name, shape in SIZES.items()}
    for rank in range(ranks):
        for bucket in buckets(ranks, rank, sharded=True, bucket_size=bucket_size):
            values = {
                name: param.detach().reshape(-1) for name, param in zip(names(bucket), bucket.params, strict=True)
            }
            for segment in bucket.owned_segments():
                name = segment.name.removesuffix(".weight")
                covered[name][segment.low : segment.high] += 1
                assert torch.equal(segment.data, values[name][segment.low : segment.high])
                assert segment.grad.numel() == segment.high - segment.low and segment.local_shape == SIZES[name]
    assert all((count == 1).all() for count in covered.values()), covered


def test_without_sharding_every_rank_owns_everything() -> None:
    for bucket in buckets(4, 2):
        assert [segment.data.numel() for segment in bucket.owned_segments()] == [
            param.numel() for param in bucket.params
        ]


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_parameters_and_owned_ranges_start_at_aligned_places(ranks: int) -> None:
    for rank in range(ranks):
        for bucket in buckets(ranks, rank, sharded=True):
            low, high = bucket.owned_range()
            assert all(start % 64 == 0 for start in bucket.starts)
            assert bucket.data.numel() % ranks == 0 and high - low == bucket.data.numel() // ranks
            assert bucket.data.numel() == bucket.grad.numel()
    assert all(bucket.owned_range()[0] % 64 == 0 for bucket in buckets(4, 3, sharded=True))


def test_parameters_become_views_and_keep_their_values() -> None:
    mesh = alone()
    module, again = small_module(mesh), small_module(mesh)
    (bucket,) = make_buckets(module, mesh, grad_dtype=torch.float64, sharded=False, bucket_size=None)
    for name, child in module.items():
        assert torch.equal(child.weight, again[name].weight)
    bucket.data.fill_(3.0)
    assert all((child.weight == 3.0).all() for child in module.values())


def test_buckets_fill_from_the_last_parameter_to_the_first() -> None:
    assert [names(bucket) for bucket in buckets()] == [["fourth", "third", "second", "first"]]
    assert [names(bucket) for bucket in buckets(bucket_size=200)] == [["fourth", "third"], ["second", "first"]]
    assert [names(bucket) for bucket in buckets(bucket_size=1)] == [["fourth"], ["third"], ["second"], ["first"]]


@pytest.mark.parametrize("bucket_size", [None, 1000])
def test_a_tied_matrix_has_a_bucket_of_its_own(bucket_size: int | None) -> None:
    assert [names(bucket) for bucket in buckets(tied="second", bucket_size=bucket_size)] == [
        ["fourth", "third"],
        ["second"],
        ["first"],
    ]


def test_parameters_that_want_no_gradient_stay_outside() -> None:
    mesh = alone()
    module = small_module(mesh)
    module["first"].weight.requires_grad_(False)
    found = make_buckets(module, mesh, grad_dtype=torch.float64, sharded=False, bucket_size=None)
    assert [names(bucket) for bucket in found] == [["fourth", "third", "second"]]


def test_large_worlds_have_larger_buckets() -> None:
    assert (default_bucket_size(1), default_bucket_size(40), default_bucket_size(64)) == (
        40_000_000,
        40_000_000,
        64_000_000,
    )
