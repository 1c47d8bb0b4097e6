"""FSDP2: what a rank holds, when it holds more, and what it sends. That the numbers are right is shown in tests/parity."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.core.models.flops import training_state_bytes_per_param
from megatron.core.transformer.blocks import Block
from megatron.training.state.evaluate import evaluate_loss
from megatron.training.state.step import train_step
from tests.helpers import tiny
from tests.helpers.training import differences, train_alone
from tests.helpers.world import Worlds

SHAPE: dict[str, Any] = {"hidden_size": 64, "num_layers": 4, "untie_embeddings_and_output_weights": True}
FSDP: dict[str, Any] = {**SHAPE, "use_torch_fsdp2": True}
_OLD_NAMES = "all_gather_into_tensor", "reduce_scatter_tensor"  # of torch before 2.13
NARROW_TAIL: dict[str, Any] = {
    "make_vocab_size_divisible_by": 1,
    "ffn_hidden_size": 33,
}  # rows that no number of ranks divides


def held_here(changes: dict[str, Any]) -> tuple[int, list[int]]:
    """Parameters of the tensor rank, and bytes that a run holds: at first, after steps, and after an evaluation."""
    gc.collect()
    gc.freeze()  # what was there before is nobody's business
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(dist.get_world_size(), **changes)))
    found = []
    for action in (
        lambda: None,
        lambda: [train_step(trainer, tiny.short_run_batches(trainer.run, place)) for place in range(2)],
        lambda: evaluate_loss(trainer, tiny.short_run_batches(trainer.run, 2), 1),
    ):
        action()
        gc.collect()
        tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor) and not isinstance(one, DTensor)]
        found.append(
            sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())
        )
    gc.unfreeze()
    return sum(param.numel() for param in trainer.stages[0].parameters()), found


@pytest.mark.parametrize("ranks, numbers", [(2, {"bf16": True}), (4, NARROW_TAIL)])
def test_between_steps_a_rank_holds_its_share_of_weights_gradients_and_optimizer_state(
    world: Worlds, ranks: int, numbers: dict[str, Any]
) -> None:
    changes = {**FSDP, **numbers}
    for parameters, held in world(ranks).run(held_here, changes):
        share = parameters * training_state_bytes_per_param(tiny.config(ranks, **changes), ranks)
        assert all(share * 0.99 < found < share * 1.1 for found in held), (held, share)


def whole_here(changes: dict[str, Any]) -> list[list[bool]]:
    """For each time that an MLP ends in a step, and then in an evaluation: which layers are whole, and last the embedding."""
    trainer = tiny.trainer_of(
        tiny.run_of(tiny.config(dist.get_world_size(), **{**FSDP, "global_batch_size": 2, **changes}))
    )
    mlps, seen = [part.mlp for part in trainer.stages[0].modules() if isinstance(part, Block)], []
    weights = [mlp.linear_fc1 for mlp in mlps] + [trainer.stages[0].embedding.word_embeddings]

    def look(*_: Any) -> None:
        seen.append([not isinstance(owner.weight, DTensor) for owner in weights])

    for mlp in mlps:
        mlp.register_forward_hook(look)
    train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    look()
    evaluate_loss(trainer, tiny.short_run_batches(trainer.run, 1), 1)
    look()
    return seen


NONE, FIRST, SECOND = [False] * 3, [True, False, True], [False, True, True]


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, [FIRST, SECOND, NONE, FIRST, SECOND, NONE]),
        ({"torch_fsdp2_no_reshard_after_forward": True}, [FIRST, [True] * 3, NONE, FIRST, [True] * 3, NONE]),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform"},
            [FIRST, SECOND, SECOND, FIRST, NONE, FIRST, SECOND, NONE],
        ),
    ],
)
def test_a_layer_is_whole_only_while_it_works(
    world: Worlds, changes: dict[str, Any], expected: list[list[bool]]
) -> None:
    for seen in world(2).run(whole_here, {"num_layers": 2, **changes}):
        assert seen == expected


def evaluated_here(fully_sharded: bool) -> list[float]:
    """Losses of steps with an evaluation between them, and of the evaluation."""
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(dist.get_world_size(), fp64=True, use_torch_fsdp2=fully_sharded)))
    found = []
    for iteration in range(3):
        step = train_step(trainer, tiny.short_run_batches(trainer.run, iteration))
        found += [float(step.grad_norm), evaluate_loss(trainer, tiny.short_run_batches(trainer.run, 7), 1)["lm loss"]]
    return found


def test_an_evaluation_sees_the_new_weights_and_leaves_no_old_ones_behind(world: Worlds) -> None:
    expected = world(2).run(evaluated_here, False)
    assert len(set(expected[0])) == 6, "every step moves the weights"
    assert world(2).run(evaluated_here, True) == [pytest.approx(one, rel=1e-10) for one in expected]


def sent_here(changes: dict[str, Any]) -> tuple[dict[str, int], int, int]:
    """Elements that come with gathers and go with sums in a step; parameters of the layers, and of the rest."""
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(dist.get_world_size(), **{**FSDP, "vocab_size": 48, **changes})))
    sent = {"gathered": 0, "summed": 0}

    def counted(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def through(output: Tensor, input: Tensor, **options: Any) -> Any:
            sent[name] += max(output.numel(), input.numel())
            return call(output, input, **options)

        return through

    gather, scatter = (
        ("all_gather_single", "reduce_scatter_single") if hasattr(dist, "all_gather_single") else _OLD_NAMES
    )
    with (
        patch.object(dist, gather, counted(getattr(dist, gather), "gathered")),
        patch.object(dist, scatter, counted(getattr(dist, scatter), "summed")),
    ):
        train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    inside = sum(
        param.numel() for part in trainer.stages[0].modules() if isinstance(part, Block) for param in part.parameters()
    )
    return sent, inside, sum(param.numel() for param in trainer.stages[0].parameters()) - inside


@pytest.mark.parametrize(
    "changes, gathers",
    [
        ({}, 2),
        ({"torch_fsdp2_no_reshard_after_forward": True}, 1),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, 2),
    ],
)
def test_a_microbatch_gathers_a_layer_twice_and_sums_its_gradients_once(
    world: Worlds, changes: dict[str, Any], gathers: int
) -> None:
    for sent, inside, rest in world(2).run(sent_here, changes):
        microbatches = 8 // 2
        assert sent == {"gathered": microbatches * (gathers * inside + rest), "summed": microbatches * (inside + rest)}


def test_one_rank_has_nobody_to_share_with() -> None:
    assert (
        differences(train_alone({"use_torch_fsdp2": True, "bf16": True}, 2), train_alone({"bf16": True}, 2), 0.0) == []
    )
