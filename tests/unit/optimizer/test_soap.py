"""SOAP against its formulas, against numbers of another implementation, and what rounding makes of singular factors."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.optim import BYTES, OptimizerConfig, PrecisionConfig
from megatron.core.distributed.ddp import DataParallel
from megatron.core.models.flops import estimate_memory_by_pipeline_rank, owned_bytes_per_parameter
from megatron.core.optimizer import soap
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.optimizer.soap import RIDGE, Soap, SoapState, rotated_basis, soap_update, with_ridge
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import (
    FusedWeightSegment,
    ParamSpec,
    ShardedDim,
    normal_initializer,
    set_global_param_names,
)
from tests.helpers import tiny
from tests.helpers.world import Worlds

RATE, DECAY = 1e-2, 0.1
CONFIG = OptimizerConfig(optimizer="soap", clip_grad=0.0)
PLAIN = replace(CONFIG, soap_use_kl_shampoo=False, soap_shampoo_beta=0.8)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def first_state(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> SoapState:
    sides = (torch.eye(size, dtype=dtype) for size in (rows, columns) * 2)
    return SoapState(torch.zeros(rows, columns, dtype=dtype), torch.zeros(rows, columns, dtype=dtype), *sides)


def turned(factor: Tensor, basis: Tensor) -> Tensor:
    """The orthogonal factor of a product, by Cholesky instead of reflections: its triangular factor has a positive diagonal."""
    product = (factor / factor.trace() * len(factor) + RIDGE * torch.eye(len(factor), dtype=factor.dtype)) @ basis
    return product @ torch.linalg.inv(torch.linalg.cholesky(product.mT @ product).mT)


def by_formula(gradients: list[Tensor], config: OptimizerConfig) -> list[Tensor]:
    """The updates of a matrix, with moments that are kept outside of the eigenbasis."""
    rows, columns = gradients[0].shape
    left, right, q, p = (torch.eye(size, dtype=torch.float64) for size in (rows, columns) * 2)
    mean, square, updates = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0]), []
    for step, g in enumerate(gradients, 1):
        newest = (1 - config.soap_shampoo_beta) / (1 - config.soap_shampoo_beta**step)
        new_left, new_right = g @ g.mT, g.mT @ g
        if config.soap_use_kl_shampoo:
            of_left = torch.linalg.inv(q @ torch.diag((q.mT @ with_ridge(left) @ q).diagonal()) @ q.mT)
            of_right = torch.linalg.inv(p @ torch.diag((p.mT @ with_ridge(right) @ p).diagonal()) @ p.mT)
            new_left, new_right = g @ of_right @ g.mT / columns, g.mT @ of_left @ g / rows
        left, right = left + newest * (new_left - left), right + newest * (new_right - right)
        q, p = turned(left, q), turned(right, p)
        mean = 0.9 * mean + 0.1 * g
        square = 0.999 * square + 0.001 * (q.mT @ g @ p) ** 2
        adam = (q.mT @ mean @ p) / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        updates.append(q @ adam @ p.mT)
    return updates


def optimizer_of(params: dict[str, torch.nn.Parameter], config: OptimizerConfig = CONFIG) -> Optimizer:
    mesh, module = Mesh.single_process(), torch.nn.ParameterDict(params)
    set_global_param_names(module)
    parallel = DataParallel(
        module,
        mesh,
        grad_dtype=torch.float64,
        sharded=False,
        bucket_size=None,
        overlap_reduce=False,
        overlap_gather=False,
        average=False,
    )
    return Optimizer([parallel], mesh, config, PrecisionConfig(fp64=True))


def matrix(*shape: int, parts: tuple[int, ...] = (), dim: int = 0, stacked: bool = False) -> torch.nn.Parameter:
    shards = (ShardedDim(dim, "tp", tuple(FusedWeightSegment(size) for size in parts)),) if parts else ()
    found = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    found.spec = ParamSpec(  # type: ignore[attr-defined]
        shape, normal_initializer(1.0), "matrix", shards, stacked=stacked, reduce_over="edp" if stacked else "dp_cp"
    )
    return found


def steps_of(optimizer: Optimizer, gradients: list[Tensor]) -> None:
    for each in gradients:
        for bucket in optimizer.parallels[0].buckets:
            (view,) = bucket.gradient_views()
            view.copy_(each)
        optimizer.set_rates(RATE, DECAY)
        optimizer.step()


@pytest.mark.parametrize("config", [CONFIG, PLAIN], ids=["kl", "plain"])
def test_steps_follow_the_formula(config: OptimizerConfig) -> None:
    gradients, param, expected = [drawn(7, 4, seed=step) for step in range(5)], matrix(7, 4), torch.zeros(7, 4).double()
    steps_of(optimizer_of({"w": param}, config), gradients)
    for update in by_formula(gradients, config):
        expected = (1 - RATE * DECAY) * expected - RATE * update
    torch.testing.assert_close(param.detach(), expected, rtol=1e-9, atol=1e-11)


def test_parts_of_a_fused_matrix_and_experts_are_matrices_of_their_own() -> None:
    gradients = [drawn(3, 8, 5, seed=step) for step in range(3)]
    param = matrix(3, 8, 5, parts=(4, 2, 2), dim=1, stacked=True)
    optimizer = optimizer_of({"w": param})
    steps_of(optimizer, gradients)
    expected = torch.zeros(3, 8, 5, dtype=torch.float64)
    for expert in range(3):
        for low, high in ((0, 4), (4, 6), (6, 8)):
            for update in by_formula([g[expert, low:high] for g in gradients], CONFIG):
                part = expected[expert, low:high]
                part.copy_((1 - RATE * DECAY) * part - RATE * update)
    torch.testing.assert_close(param.detach(), expected, rtol=1e-9, atol=1e-11)
    shapes = {slot: segment.spec.shape for slot, segment, _ in optimizer.checkpoint_state()}
    sides = {"L": (3, 4**2 + 2 * 2**2), "R": (3, 3 * 5**2)}
    assert shapes == {"exp_avg": (3, 8, 5), "exp_avg_sq": (3, 8, 5), **sides, "Q_L": sides["L"], "Q_R": sides["R"]}


@pytest.mark.parametrize("size", [3, 6])
def test_bases_converge_to_the_eigenvectors_of_a_factor_that_stays(size: int) -> None:
    basis, _ = torch.linalg.qr(drawn(size, size, seed=3))
    factor = basis * torch.linspace(1.0, 8.0, size, dtype=torch.float64) @ basis.mT
    found, rest = torch.eye(size, dtype=torch.float64), []
    for _ in range(60):
        found = rotated_basis(factor, found)
        inside = found.mT @ factor @ found
        rest.append(float((inside - torch.diag(inside.diagonal())).norm() / inside.norm()))
    assert rest[-1] < 1e-4 and rest[-1] < rest[20] < rest[5], rest
    torch.testing.assert_close(found.mT @ found, torch.eye(size, dtype=torch.float64))


def largest_difference_by_rounding(config: OptimizerConfig) -> float:
    """Of updates in fp32, by gradients of rank 4 and by copies of them that are off by as much as fp32 rounds. Of a matrix 48 x 12,
    44 and 8 directions have no eigenvalue.
    """
    left, right, worst = 1e-3 * drawn(48, 4, seed=1), drawn(4, 12, seed=2), 0.0
    states = [first_state(48, 12, torch.float32) for _ in range(2)]
    for step in range(1, 9):
        exact = left * drawn(4, seed=10 + step) @ right
        copies = exact, exact * (1 + 2.0**-24 * drawn(48, 12, seed=20 + step))
        one, other = (
            soap_update(copy.float(), state, config, step) for copy, state in zip(copies, states, strict=True)
        )
        worst = max(worst, float((one - other).norm() / one.norm()))
    return worst


@pytest.mark.parametrize("config", [CONFIG, PLAIN], ids=["kl", "plain"])
def test_the_ridge_keeps_rounding_from_choosing_directions(
    config: OptimizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = largest_difference_by_rounding(config)
    monkeypatch.setattr(soap, "RIDGE", 1e-3)
    assert 0 < found < 5e-3 and largest_difference_by_rounding(config) > 0.1


def test_a_gradient_of_zero_changes_nothing_and_leaves_numbers() -> None:
    state = first_state(4, 3)
    assert not soap_update(torch.zeros(4, 3, dtype=torch.float64), state, CONFIG, 1).any()
    assert soap_update(drawn(4, 3), state, CONFIG, 2).isfinite().all()
    assert all(getattr(state, one.name).isfinite().all() for one in fields(state))


def test_the_size_of_gradients_does_not_matter() -> None:
    small, large = first_state(5, 3), first_state(5, 3)
    for step in range(1, 4):
        one = soap_update(1e-3 * drawn(5, 3, seed=step), small, replace(CONFIG, adam_eps=1e-14), step)
        other = soap_update(1e3 * drawn(5, 3, seed=step), large, replace(CONFIG, adam_eps=1e-14), step)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("changes", [{}, {"swiglu": True, "bf16": True}])
def test_the_estimate_of_memory_is_what_matrices_hold(changes: dict[str, object]) -> None:
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(optimizer="soap", **changes)))
    config = trainer.run.config
    held = [(segment, values) for slot, segment, values in trainer.optimizer.checkpoint_state() if slot in Soap.slots]
    of_matrices = [values.nbytes for segment, values in held if segment.spec.kind == "matrix"]
    masters = 4 if changes.get("bf16") else 0
    elements = sum(
        segment.high - segment.low for segment in trainer.optimizer.segments if segment.spec.kind == "matrix"
    )
    assert sum(of_matrices) / elements == pytest.approx(owned_bytes_per_parameter(config) - masters, rel=0.02)


def held_and_estimated(changes: dict[str, Any]) -> tuple[int, float]:
    """Bytes of the optimizer's state on this rank: those of its tensors, and the estimate."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    config = tiny.config(ranks, optimizer="soap", **changes)
    trainer = tiny.trainer_of(tiny.run_of(config))
    (memory,) = estimate_memory_by_pipeline_rank(
        config,
        stage_specs_of_run(config),
        data_parallel_size=config.parallel.data_parallel_size(ranks),
        num_microbatches=1,
    )
    number = BYTES[config.precision.param_dtype_name] + BYTES[config.precision.gradient_dtype_name]
    held = sum(tensor.nbytes for tensor in trainer.optimizer.storage_tensors())
    return held, memory.weights_and_optimizer - number * memory.parameters


EXPERTS: dict[str, Any] = {
    "swiglu": True,
    "num_experts": 4,
    "moe_ffn_hidden_size": 96,
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall",
}


@pytest.mark.parametrize("tp, ep, etp", [(1, 1, 1), (2, 2, 1), (2, 1, 2), (1, 1, 2)])
def test_experts_count_by_the_tensor_ranks_that_share_them(world: Worlds, tp: int, ep: int, etp: int) -> None:
    layout = {
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "bf16": etp == 2,
    }
    for held, estimated in world(max(tp, ep * etp)).run(held_and_estimated, {**EXPERTS, **layout}):
        assert held == pytest.approx(estimated, rel=0.01)
