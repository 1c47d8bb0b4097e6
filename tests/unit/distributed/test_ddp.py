from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from megatron.core.distributed import ddp
from megatron.core.distributed.ddp import DataParallel
from tests.helpers import tiny
from tests.helpers.world import Worlds
from tests.unit.distributed import ranks
from tests.unit.distributed.ranks import SIZES, alone, factor_of, small_module


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("overlap, bucket_size", [(False, None), (True, 1), (True, 150)])
@pytest.mark.parametrize("average", [False, True])
def test_every_rank_owns_the_sum_over_ranks_and_microbatches(
    world: Worlds, overlap: bool, bucket_size: int | None, sharded: bool, average: bool
) -> None:
    results = world(2).run(ranks.reduce_here, overlap, sharded, average, bucket_size, 3)
    covered = {name: torch.zeros(torch.Size(shape).numel()) for name, shape in SIZES.items()}
    for found in results:
        for path, entries in found.items():
            name = path.removesuffix(".weight")
            total = sum(factor_of(name, rank, m) for rank in range(2) for m in range(3)).view(-1) / (
                2 if average else 1
            )
            for low, high, gradient in entries:
                torch.testing.assert_close(gradient, total[low:high], rtol=1e-12, atol=1e-12)
                covered[name][low:high] += 1
    assert all((count == (1 if sharded else 2)).all() for count in covered.values())


def launches(monkeypatch: pytest.MonkeyPatch, parallel: DataParallel) -> list[int]:
    """The buckets whose reduction has begun, as it happens."""
    begun: list[int] = []
    monkeypatch.setattr(ddp, "_start_bucket_reduction", lambda bucket, op: begun.append(parallel.buckets.index(bucket)))
    return begun


def wrapped(overlap: bool) -> tuple[Any, DataParallel]:
    mesh = alone()
    module = small_module(mesh)
    return module, DataParallel(
        module,
        mesh,
        grad_dtype=torch.float64,
        sharded=False,
        bucket_size=1,
        overlap_reduce=overlap,
        overlap_gather=False,
        average=False,
    )


def test_buckets_leave_during_the_last_backward_pass_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    module, parallel = wrapped(overlap=True)
    begun = launches(monkeypatch, parallel)
    parallel.zero_gradients()
    for child in module.values():
        child(torch.ones(())).backward()
    assert begun == [], "more microbatches are to come"
    parallel.before_last_backward()
    seen = []
    for name in ("third", "fourth", "first"):  # buckets: 0 fourth, 1 third, 2 second, 3 first
        module[name](torch.ones(())).backward()
        seen.append(list(begun))
    assert seen == [[], [0, 1], [0, 1]], "a bucket waits for those before it, since all ranks must agree on the order"
    parallel.start_reduction()
    assert begun == [0, 1, 2, 3], "what never got a gradient is summed all the same"


def test_without_overlap_nothing_leaves_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    module, parallel = wrapped(overlap=False)
    begun = launches(monkeypatch, parallel)
    parallel.zero_gradients()
    parallel.before_last_backward()
    sum(child(torch.ones(())) for child in module.values()).backward()
    assert begun == []
    parallel.start_reduction()
    assert begun == [0, 1, 2, 3]


def test_bf16_gradients_are_accumulated_in_fp32() -> None:
    mesh = alone()
    module = small_module(mesh, torch.bfloat16)
    parallel = DataParallel(
        module,
        mesh,
        grad_dtype=torch.float32,
        sharded=False,
        bucket_size=None,
        overlap_reduce=False,
        overlap_gather=False,
        average=False,
    )
    parallel.zero_gradients()
    for value in (1.0, *[2.0**-9] * 8):  # in bf16, 1 + 2^-9 is 1
        module["third"](torch.tensor(value, dtype=torch.bfloat16)).backward()
    (segment,) = (segment for segment in parallel.owned_segments() if segment.name == "third.weight")
    assert (segment.grad == 1.0 + 8 * 2.0**-9).all() and module["third"].weight.grad is None


def test_parameters_and_gradients_are_let_go_of_with_their_owner() -> None:
    module, parallel = wrapped(overlap=True)
    parallel.zero_gradients()
    sum(child(torch.ones(())) for child in module.values()).backward()
    held = [ref(one) for one in (parallel, *module.parameters())]
    gc.disable()  # at once, and not when the collector comes by
    try:
        del module, parallel
    finally:
        gc.enable()
    assert [one() for one in held] == [None] * len(held)


class Late:
    """A gather whose values arrive only when someone waits for them."""

    def __init__(self, output: Tensor) -> None:
        self.output, self.true = output, output.clone()
        output.fill_(float("nan"))

    def wait(self) -> None:
        self.output.copy_(self.true)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"untie_embeddings_and_output_weights": True, "position_embedding_type": "rope"},
        {"recompute_granularity": "selective", "recompute_modules": ("layernorm",), "qk_layernorm": True},
    ],
    ids=["tied", "untied", "recomputed norms"],
)
def test_every_module_waits_for_its_parameters_before_it_uses_them(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    run = tiny.run_of(
        tiny.config(use_distributed_optimizer=True, overlap_param_gather=True, ddp_bucket_size=1, **changes)
    )
    trainer = tiny.trainer_of(run)
    batch = next(tiny.short_run_batches(run, 0))
    expected = trainer.stages[0](ids=batch.tokens, labels=batch.labels).detach()
    monkeypatch.setattr(ddp.collectives, "start_all_gather", lambda output, piece, axis: Late(output))
    trainer.parallels[0].start_gather()
    assert torch.equal(trainer.stages[0](ids=batch.tokens, labels=batch.labels), expected)


def test_without_overlap_parameters_are_whole_when_the_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(use_distributed_optimizer=True)))
    before = [bucket.data.clone() for bucket in trainer.parallels[0].buckets]
    monkeypatch.setattr(ddp.collectives, "start_all_gather", lambda output, piece, axis: Late(output))
    trainer.parallels[0].start_gather()
    assert all(torch.equal(bucket.data, old) for bucket, old in zip(trainer.parallels[0].buckets, before, strict=True))
