from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.training import whole_gradient
from tests.helpers.world import Worlds
from tests.unit.distributed import ranks

GROUPED = {"fp64": True, "group_query_attention": True, "qk_layernorm": True, "num_layers": 2}
BETWEEN = (
    "layernorm",
    "linear_proj.bias",
    "linear_fc2.bias",
    "position_embeddings",
)  # used between tensor-parallel regions


def check(world: Worlds, size: int, changes: dict[str, Any], factor_of) -> None:
    """Rank r's gradient is r + 1 times the known one; factor_of says how often it must be there after finalize.

    factor_of(name, tp rank, pp rank) -> a number, or a tensor of one number a row.
    """
    for tp, pp, gradients in world(size).run(ranks.finalize_here, changes):
        for name, found in gradients.items():
            held = ~found.isnan()
            factor = torch.as_tensor(factor_of(name, tp, pp), dtype=torch.float64)
            rows = factor.view(-1, *[1] * (found.dim() - 1)) if factor.dim() else factor
            expected = (whole_gradient(name, tuple(found.shape)) * rows)[held]
            torch.testing.assert_close(
                found[held], expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{name} on tp {tp}: {text}"
            )


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_replicas_and_shared_heads_are_summed_over_the_ranks_that_hold_them(
    world: Worlds, groups: int, sequence_parallel: bool
) -> None:
    def factor(name: str, tp: int, pp: int):
        if (
            "q_layernorm" in name
            or "k_layernorm" in name
            or (sequence_parallel and any(part in name for part in BETWEEN))
        ):
            return 1 + 2 + 3 + 4
        if "linear_qkv" in name and groups < 4:
            size, sharing = 4, 4 // groups
            first = tp // sharing * sharing
            shared = sum(range(first + 1, first + sharing + 1))
            return torch.tensor([tp + 1.0] * 32 + [float(shared)] * (2 * groups * size))
        return tp + 1

    check(
        world,
        4,
        {
            **GROUPED,
            "num_query_groups": groups,
            "tensor_model_parallel_size": 4,
            "sequence_parallel": sequence_parallel,
        },
        factor,
    )


def test_the_tied_matrix_is_summed_over_its_two_stages(world: Worlds) -> None:
    def factor(name: str, tp: int, pp: int) -> int:
        rank = 2 * pp + tp
        return (tp + 1) + (tp + 3) if "word_embeddings" in name else rank + 1

    check(world, 4, {"fp64": True, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, factor)


def test_an_untied_matrix_is_left_alone(world: Worlds) -> None:
    check(
        world,
        2,
        {"fp64": True, "untie_embeddings_and_output_weights": True, "pipeline_model_parallel_size": 2},
        lambda name, tp, pp: pp + 1,
    )
