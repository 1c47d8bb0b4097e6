"""What ranks hold alike is compared, and one flipped bit anywhere is found, named and ends the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.parallel.device import device_rng_state, set_device_rng_state
from megatron.core.parallel.spec import is_replicated_over_tensor, local_shard_boxes, param_spec_of
from megatron.training.health.replica_check import ReplicaCheck, ReplicaMismatchError
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.training import train_on
from tests.helpers.world import Worlds

CPU = torch.device("cpu")


def flip(tensor: Tensor, place: int) -> None:
    """Change the lowest bit of one element; a second time changes it back."""
    flat = tensor.view(-1).view(torch.uint8)
    flat[place * tensor.element_size()] ^= 1


def found(trainer: Trainer, rank: int, change: Callable[[], None], restore: Callable[[], None]) -> str:
    """What the check says when one rank changed something; a run that is whole again is accepted."""
    mine = trainer.run.mesh.world.rank == rank
    if mine:
        change()
    said = ""
    try:
        ReplicaCheck(trainer).require_equal_replicas()
    except ReplicaMismatchError as error:
        said = str(error)
    if mine:
        restore()
    ReplicaCheck(trainer).require_equal_replicas()
    return said


def named(trainer: Trainer, part: str) -> Tensor:
    """A parameter of this rank; an empty tensor where it has none of that name."""
    params = [param for stage in trainer.stages for param in stage.parameters() if part in param_spec_of(param).name]
    return params[0].detach() if params else torch.zeros(0)


def plant(changes: dict[str, Any], rank: int, part: str, place: int, *, slot: str = "") -> str:
    """On every rank: train two steps, look, flip a bit of a parameter or of its optimizer state on one rank, look again."""
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(torch.distributed.get_world_size(), **changes)))
    train_on(trainer, 2)
    ReplicaCheck(trainer).require_equal_replicas()
    value = named(trainer, part)
    if slot:
        value = next(
            tensor
            for name, segment, tensor in trainer.optimizer.checkpoint_state()
            if name == slot and part in segment.name
        )
    return found(trainer, rank, lambda: flip(value, place), lambda: flip(value, place))


def plant_elsewhere(rank: int) -> tuple[str, str]:
    """The same for a counter, and for the random stream that tensor ranks have in common."""
    trainer = tiny.trainer_of(
        tiny.run_of(tiny.config(2, tensor_model_parallel_size=2, sequence_parallel=True, hidden_dropout=0.1))
    )
    train_on(trainer, 1)
    progress, state = trainer.progress, device_rng_state(CPU)

    def count(by: int) -> None:
        progress.consumed_train_samples += by

    return (
        found(trainer, rank, lambda: count(1), lambda: count(-1)),
        found(trainer, rank, lambda: torch.rand(1), lambda: set_device_rng_state(CPU, state)),
    )


@pytest.mark.parametrize(
    "changes, rank, part, place, says",
    [
        ({}, 2, "linear_fc1.weight", 5, "layers.0.mlp.linear_fc1.weight: rank 2 over dp_cp differs from ranks 0, 1, 3"),
        (
            {
                "use_distributed_optimizer": True,
                "overlap_param_gather": True,
                "overlap_grad_reduce": True,
                "bf16": True,
            },
            1,
            "final_layernorm.weight",
            0,
            "final_layernorm.weight: rank 1 over dp_cp differs from ranks 0, 2, 3",
        ),
        (
            {"tensor_model_parallel_size": 4, "sequence_parallel": True},
            3,
            "final_layernorm.weight",
            7,
            "final_layernorm.weight: rank 3 over tp differs from ranks 0, 1, 2",
        ),
        (
            {"pipeline_model_parallel_size": 4},
            3,
            "word_embeddings",
            11,
            "word_embeddings.weight: ranks 0, 3 over embed disagree, and there is no majority",
        ),
        (
            {"pipeline_model_parallel_size": 4, "pipeline_schedule": "zb-v", "num_layers": 8},
            0,
            "word_embeddings",
            11,
            "word_embeddings.weight: rank 0 over embed holds copies that disagree",
        ),
        (
            {"tensor_model_parallel_size": 4, "group_query_attention": True, "num_query_groups": 2},
            1,
            "linear_qkv.weight",
            -1,
            "linear_qkv.weight (shared heads, part 1): ranks 0, 1 over tp disagree",
        ),
    ],
    ids=["dp", "zero1", "tp", "tied", "tied on one rank", "shared heads"],
)
def test_one_flipped_bit_is_found_and_named(
    world: Worlds, changes: dict[str, Any], rank: int, part: str, place: int, says: str
) -> None:
    said = world(4).run(plant, changes, rank, part, place)
    assert len(set(said)) == 1, "all ranks say the same"
    assert says in said[0], said[0]


def test_the_optimizer_state_of_replicas_is_compared(world: Worlds) -> None:
    said = world(2).run(plant, {"num_layers": 2}, 1, "linear_proj.weight", 3, slot="exp_avg_sq")
    assert "exp_avg_sq of" in said[0] and "linear_proj.weight: ranks 0, 1 over dp_cp disagree" in said[0]


def test_shares_of_fsdp2_are_compared_over_tensor_ranks(world: Worlds) -> None:
    changes = {
        "num_layers": 2,
        "use_torch_fsdp2": True,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "bf16": True,
    }
    said = world(4).run(plant, changes, 3, "final_layernorm.weight", 3, slot="master")
    assert "final_layernorm.weight: ranks 2, 3 over tp disagree" in said[0], said[0]


def test_experts_are_compared_where_they_are_replicated(world: Worlds) -> None:
    changes = {
        "num_layers": 2,
        "num_experts": 4,
        "expert_model_parallel_size": 2,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 16,
    }
    said = world(4).run(plant, changes, 2, "experts.linear_fc1", 1)
    assert "ranks 0, 2 over edp disagree" in said[0], said[0]


def test_a_counter_and_a_random_stream_are_compared(world: Worlds) -> None:
    counter, stream = world(2).run(plant_elsewhere, 1)[0]
    assert "counter consumed_train_samples: ranks 0, 1 over world disagree" in counter
    assert "the default random stream: ranks 0, 1 over tp disagree" in stream


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size", [1, 3, 70_001])
def test_every_bit_and_every_place_counts(dtype: torch.dtype, size: int) -> None:
    check = ReplicaCheck(tiny.trainer_of(tiny.run_of(tiny.config(num_layers=1))))
    value = (torch.rand(size, generator=torch.Generator().manual_seed(3)) * 100).to(dtype)
    before = int(check.hash_value(value))
    assert int(check.hash_value(value.clone())) == before
    for place in {0, size // 2, size - 1}:
        for byte in range(value.element_size()):
            for bit in range(8):
                changed = value.clone()
                changed.view(torch.uint8)[place * value.element_size() + byte] ^= 1 << bit
                assert int(check.hash_value(changed)) != before, (place, byte, bit)
    if size > 70_000:  # blocks that change places
        swapped = torch.cat((value[-5:], value[5:-5], value[:5]))
        assert int(check.hash_value(swapped)) != before


def test_parameters_that_are_not_cut_are_items_of_the_tensor_axis() -> None:
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(num_layers=1)))
    shared = {
        param_spec_of(param).name
        for stage in trainer.stages
        for param in stage.parameters()
        if is_replicated_over_tensor(param_spec_of(param))
    }
    listed = {item.name for item in ReplicaCheck(trainer).replicated_states() if item.axis.name == "tp"}
    assert shared and shared <= listed
    assert all(
        piece.replicas == 1
        for stage in trainer.stages
        for param in stage.parameters()
        for piece in local_shard_boxes(param_spec_of(param), trainer.run.mesh)
    )
