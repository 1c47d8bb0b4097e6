"""Muon against singular values, against torch's own, and the division of its work."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.config.settings.optim import OptimizerConfig, PrecisionConfig
from megatron.core.distributed.buffers import ParamOwnership
from megatron.core.distributed.ddp import DataParallel
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.optimizer.orthogonal import (
    COEFFICIENTS,
    NewtonSchulzSettings,
    muon_update_scale,
    newton_schulz_cost,
    orthogonalize,
)
from megatron.core.optimizer.rule import is_updated_as_matrix
from megatron.core.optimizer.whole_matrix import MatrixTask, assign_matrix_owners, matrix_tasks_of_param
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import (
    FusedWeightSegment,
    ParamSpec,
    ShardedDim,
    meta_parameter,
    normal_initializer,
    set_global_param_names,
)
from megatron.training.state.step import train_step
from tests.helpers import tiny

RATE, DECAY, BETA = 1e-2, 0.1, 0.9


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_singular_values(x: Tensor, how: NewtonSchulzSettings) -> Tensor:
    """What the iteration is in theory: an odd polynomial of each singular value of the normed matrix."""
    u, values, v = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for a, b, c in how.coefficients():
        values = a * values + b * values**3 + c * values**5
    return u @ torch.diag(values) @ v


@pytest.mark.parametrize("kind", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(6, 6), (5, 12), (12, 5), (1, 7)])
def test_newton_schulz_is_a_polynomial_of_the_singular_values(kind: str, shape: tuple[int, int]) -> None:
    x, how = drawn(*shape), NewtonSchulzSettings(7, kind)
    torch.testing.assert_close(orthogonalize(x, how), by_singular_values(x, how), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "kind, steps, low, high", [("simple", 5, 0.65, 1.25), ("quintic", 5, 0.7, 1.25), ("polar_express", 8, 0.99, 1.01)]
)
def test_an_update_is_nearly_orthogonal(kind: str, steps: int, low: float, high: float) -> None:
    # Singular values down to a hundredth of the norm.
    u, _, v = torch.linalg.svd(drawn(24, 40), full_matrices=False)
    x = u @ torch.diag(torch.linspace(0.02, 1.0, 24, dtype=torch.float64)) @ v
    found = torch.linalg.svdvals(orthogonalize(x, NewtonSchulzSettings(steps, kind)))
    assert low < float(found.min()) and float(found.max()) < high, found
    half = torch.linalg.svdvals(orthogonalize(x.float(), NewtonSchulzSettings(steps, kind, is_half=True)).double())
    assert float((half - found).abs().max()) < 0.05, "bf16 is near"


def test_a_stack_of_matrices_is_each_of_them() -> None:
    stack = drawn(3, 4, 9)
    for one, found in zip(stack, orthogonalize(stack, NewtonSchulzSettings()), strict=True):
        torch.testing.assert_close(found, orthogonalize(one, NewtonSchulzSettings()), rtol=1e-12, atol=1e-12)


def test_nothing_stays_nothing() -> None:
    assert not orthogonalize(torch.zeros(3, 5), NewtonSchulzSettings()).any()


def optimizer_of(
    params: dict[str, torch.nn.Parameter], dtype: torch.dtype = torch.float64, **settings: Any
) -> Optimizer:
    mesh = Mesh.single_process()
    module = torch.nn.ParameterDict(params)
    set_global_param_names(module)
    wide = dtype == torch.float64
    parallel = DataParallel(
        module,
        mesh,
        grad_dtype=dtype,
        sharded=False,
        bucket_size=None,
        overlap_reduce=False,
        overlap_gather=False,
        average=False,
    )
    config = OptimizerConfig(optimizer="muon", clip_grad=0.0, muon_momentum=BETA, **settings)
    return Optimizer([parallel], mesh, config, PrecisionConfig(fp64=wide))


def made(spec: ParamSpec, dtype: torch.dtype = torch.float64, *, like: Tensor) -> torch.nn.Parameter:
    found = torch.nn.Parameter(like.to(dtype).clone())
    found.spec = spec  # type: ignore[attr-defined]
    assert meta_parameter(spec, Mesh.single_process(), dtype).shape == found.shape
    return found


def steps_of(optimizer: Optimizer, gradients: list[dict[str, Tensor]]) -> None:
    for each in gradients:
        for bucket in optimizer.parallels[0].buckets:
            for param, view in zip(bucket.params, bucket.gradient_views(), strict=True):
                view.copy_(each[param.spec.name])
        optimizer.set_rates(RATE, DECAY)
        optimizer.step()


def matrix(*shape: int, parts: tuple[int, ...] = (), dim: int = 0, stacked: bool = False) -> ParamSpec:
    shards = (ShardedDim(dim, "tp", tuple(FusedWeightSegment(size) for size in parts)),) if parts else ()
    return ParamSpec(
        shape, normal_initializer(1.0), "matrix", shards, stacked=stacked, reduce_over="edp" if stacked else "dp_cp"
    )


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_steps_are_torchs_where_modes_coincide(shape: tuple[int, int], nesterov: bool) -> None:
    start, gradients = drawn(*shape, seed=1), [{"w": drawn(*shape, seed=2 + step)} for step in range(3)]
    param = made(matrix(*shape), torch.float32, like=start)
    steps_of(
        optimizer_of(
            {"w": param},
            torch.float32,
            muon_nesterov=nesterov,
            muon_coefficient_type="simple",
            muon_scale_mode="shape_scaling",
        ),
        gradients,
    )
    theirs = torch.nn.Parameter(start.float().clone())
    muon = torch.optim.Muon([theirs], lr=RATE, weight_decay=DECAY, momentum=BETA, nesterov=nesterov)
    for each in gradients:
        theirs.grad = each["w"].float()
        muon.step()
    moved = float((theirs.detach() - start.float()).abs().max())
    assert float((param.detach() - theirs.detach()).abs().max()) < 0.06 * moved, (
        "bf16 rounds here and there in other places"
    )


@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
def test_steps_follow_the_formula(mode: str) -> None:
    start, gradients = drawn(8, 5, seed=1), [{"w": drawn(8, 5, seed=2 + step)} for step in range(3)]
    param = made(matrix(8, 5), like=start)
    steps_of(optimizer_of({"w": param}, muon_scale_mode=mode, muon_extra_scale_factor=0.3), gradients)
    expected, momentum = start.clone(), torch.zeros_like(start)
    factor = 0.3 * {"spectral": 8**0.5, "unit_rms_norm": (8 / 5) ** 0.5, "shape_scaling": (8 / 5) ** 0.5}[mode]
    for each in gradients:
        momentum = BETA * momentum + (1 - BETA) * each["w"]
        expected = (1 - RATE * DECAY) * expected - RATE * factor * by_singular_values(momentum, NewtonSchulzSettings())
    torch.testing.assert_close(param.detach(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("split", [True, False])
def test_parts_of_a_fused_matrix_are_matrices_of_their_own_unless_told(split: bool) -> None:
    spec, gradient = matrix(12, 7, parts=(6, 3, 3)), drawn(12, 7, seed=2)
    param = made(spec, like=torch.zeros(12, 7))
    optimizer = optimizer_of({"linear_qkv": param}, muon_split_qkv=split)
    steps_of(optimizer, [{"linear_qkv": gradient}])
    rows = gradient.split([6, 3, 3]) if split else [gradient]
    expected = torch.cat(
        [by_singular_values(part, NewtonSchulzSettings()) * muon_update_scale(*part.shape, "spectral") for part in rows]
    )
    torch.testing.assert_close(param.detach(), -RATE * expected, rtol=1e-10, atol=1e-10)


def test_experts_are_matrices_of_their_own_and_so_are_their_parts() -> None:
    gradient = drawn(3, 8, 5, seed=2)
    param = made(matrix(3, 8, 5, parts=(4, 4), dim=1, stacked=True), like=torch.zeros(3, 8, 5))
    steps_of(optimizer_of({"w": param}), [{"w": gradient}])
    expected = torch.stack(
        [
            torch.cat([by_singular_values(part, NewtonSchulzSettings()) * 5**0.5 for part in expert.split(4)])
            for expert in gradient
        ]
    )
    torch.testing.assert_close(param.detach(), -RATE * expected, rtol=1e-10, atol=1e-10)


def test_embeddings_tables_and_vectors_are_left_to_adam() -> None:
    muon = OptimizerConfig(optimizer="muon")
    kinds = {
        kind: is_updated_as_matrix(ParamSpec((4, 4), normal_initializer(1.0), kind), muon)
        for kind in ("matrix", "table", "vector", "embedding", "qk_norm")
    }
    assert kinds == {"matrix": True, "table": False, "vector": False, "embedding": False, "qk_norm": False}
    assert not is_updated_as_matrix(matrix(4, 4), OptimizerConfig())
    start, gradient = drawn(4, 4, seed=3), drawn(4, 4, seed=4)
    table = made(ParamSpec((4, 4), normal_initializer(1.0), "table"), like=start)
    optimizer = optimizer_of({"table": table, "w": made(matrix(4, 4), like=start)})
    steps_of(optimizer, [{"table": gradient, "w": gradient}])
    theirs = torch.nn.Parameter(start.clone())
    theirs.grad = gradient
    torch.optim.AdamW([theirs], lr=RATE, weight_decay=DECAY, betas=(0.9, 0.999), eps=1e-8).step()
    torch.testing.assert_close(table.detach(), theirs.detach(), rtol=1e-12, atol=1e-12)
    assert {(slot, segment.name) for slot, segment, _ in optimizer.checkpoint_state()} == {
        ("exp_avg", "table"),
        ("exp_avg_sq", "table"),
        ("momentum_buffer", "w"),
    }


def test_dist_muon_is_muon_with_the_distributed_optimizer() -> None:
    config = tiny.config(2, optimizer="dist_muon")
    assert (config.optimizer.optimizer, config.parallel.use_distributed_optimizer) == ("muon", True)
    config = tiny.config(2, optimizer="dist_muon", use_torch_fsdp2=True)
    assert (config.optimizer.optimizer, config.parallel.use_distributed_optimizer) == ("muon", False)


def slabs(costs: list[float], ranks: int) -> list[MatrixTask]:
    return [
        MatrixTask(str(place), matrix(2, 2), (2, 2), 0, 4, ((0, 4), *((4, 4),) * (ranks - 1)), cost)
        for place, cost in enumerate(costs)
    ]


def test_work_is_divided_within_grahams_bound() -> None:
    chance = random.Random(0)
    for _ in range(200):
        ranks, costs = (
            chance.randint(1, 8),
            [chance.choice([1.0, 2.0, 3.0, 8.0]) * chance.random() for _ in range(chance.randint(1, 40))],
        )
        found = assign_matrix_owners(slabs(costs, ranks), ranks)
        load = [sum(slab.cost for slab in found if slab.owner == rank) for rank in range(ranks)]
        ordered = sorted(costs, reverse=True)
        pair = (
            sum(ordered[ranks - 1 : ranks + 1]) if len(costs) > ranks else 0.0
        )  # two of the ranks + 1 dearest must share a rank
        least = max(sum(costs) / ranks, ordered[0], pair)
        assert max(load) <= (4 / 3) * least * (1 + 1e-12) or max(load) - min(load) <= ordered[0], (costs, load)
        assert sum(load) == pytest.approx(sum(costs))


def test_the_layers_of_a_network_are_divided_evenly() -> None:
    # 24 layers, 1024 wide: qkv, projection, and a gated MLP; over 8 ranks.
    specs = [
        matrix(3072, 1024, parts=(1024, 1024, 1024)),
        matrix(1024, 1024),
        matrix(5632, 1024, parts=(2816, 2816)),
        matrix(1024, 2816),
    ] * 24
    owned = [ParamOwnership(spec, spec.shape, tuple((0, 0) for _ in range(8))) for spec in specs]
    found = assign_matrix_owners(
        [slab for one in owned for slab in matrix_tasks_of_param(one, lambda spec: True, newton_schulz_cost)], 8
    )
    load = [sum(task.cost for task in found if task.owner == rank) for rank in range(8)]
    assert max(load) * 8 / sum(load) < 1.02


def test_a_rank_works_on_what_it_holds_anyway_if_nobody_has_less_to_do() -> None:
    spec = matrix(4, 4)
    owned = [ParamOwnership(spec, (4, 4), ((0, 4), (4, 16))), ParamOwnership(spec, (4, 4), ((0, 16), (16, 16)))]
    assert [
        slab.owner
        for slab in assign_matrix_owners(
            [matrix_tasks_of_param(one, lambda spec: True, newton_schulz_cost)[0] for one in owned], 2
        )
    ] == [1, 0]


class _NumbersRead(TorchDispatchMode):
    """Counts the numbers that the host reads, for each of which it would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "is_nonzero", "nonzero")
        return func(*args, **(kwargs or {}))


def numbers_read(changes: dict[str, Any]) -> int:
    """On a rank: the numbers that an update reads."""
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(2, **changes)))
    train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    trainer.optimizer.set_rates(RATE, DECAY, None)
    with _NumbersRead() as read:
        trainer.optimizer.step()
    return read.count


@pytest.mark.parametrize("mode", ["distributed", "blockwise", "duplicated"])
@pytest.mark.parametrize("groups", [None, 1], ids=["all rows counted", "copies of key heads"])
def test_no_number_is_read_by_an_update_over_tensor_ranks(world: Any, mode: str, groups: int | None) -> None:
    changes = {"tensor_model_parallel_size": 2, "optimizer": "muon", "muon_tp_mode": mode, "clip_grad": 0.0}
    if groups is not None:
        changes |= {"group_query_attention": True, "num_query_groups": groups}
    assert world(2).run(numbers_read, changes) == [0, 0]
