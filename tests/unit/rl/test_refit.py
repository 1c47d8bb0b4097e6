"""Weights in training are copied into a network of another layout, on the same ranks."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.parallel.boxes import Box, intersect
from megatron.core.parallel.spec import param_spec_of
from megatron.rl import refit
from megatron.rl.settings import generation_run_config
from tests.helpers.policy import RL, train_policy_here, trainer_of
from tests.helpers.world import Worlds
from tests.unit.rl.test_policy import LLAMA, MOE, compare

VERIFY: dict[str, Any] = {"rl_verify_model_weights_swap": True}
TP1 = {"rl_inference_tensor_model_parallel_size": 1}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tp2 to dp2": (2, LLAMA, {"tensor_model_parallel_size": 2}, TP1),
    "dp2 to tp2": (2, LLAMA, {"use_distributed_optimizer": True}, {"rl_inference_tensor_model_parallel_size": 2}),
    "cp2 to dp2": (2, LLAMA, {"context_parallel_size": 2}, {}),
    "cp2, packed, gspo twice": (
        2,
        LLAMA,
        {"context_parallel_size": 2},
        {"rl_use_sequence_packing": True, "rl_algorithm": "gspo", "grpo_iterations": 2},
    ),
    "tp2 pp2 to dp4": (
        4,
        {},
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {**TP1, "rl_inference_pipeline_model_parallel_size": 1},
    ),
    "fsdp2 to tp2": (2, LLAMA, {"use_torch_fsdp2": True}, {"rl_inference_tensor_model_parallel_size": 2}),
    "ep2 to ep1": (2, MOE, {"expert_model_parallel_size": 2}, {"rl_inference_expert_model_parallel_size": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_generation_in_another_layout_gives_the_same_training(world: Worlds, case: str) -> None:
    ranks, network, layout, rl = CASES[case]
    results = world(ranks).run(train_policy_here, {**VERIFY, **rl}, {**network, **layout}, 3)
    plain = {name: value for name, value in rl.items() if "inference" not in name}
    serial = train_policy_here(plain, network, 3)
    compare(serial, (*results[0][:2], [held for one in results for held in one[2]], results[0][3]))


def test_a_critic_is_not_copied_into_the_network_that_generates() -> None:
    rl = {"rl_algorithm": "ppo", "grpo_iterations": 2}
    compare(train_policy_here(rl, LLAMA, 2), train_policy_here({**rl, **VERIFY, **TP1}, LLAMA, 2))


def test_a_weight_that_is_left_out_is_found() -> None:
    trainer, _ = trainer_of(RL, **LLAMA)
    generator = refit.GenerationNetworkCopy(
        trainer, generation_run_config(trainer.run.config, (1, None, None, None)), verify=True
    )
    with torch.no_grad():
        for param in trainer.stages[0].parameters():
            param.add_(0.25)
    generator.refit()
    send = refit._exchange_transfers
    with torch.no_grad():
        parameters = {param_spec_of(param).name: param for param in trainer.stages[0].parameters()}
        parameters["decoder.layers.1.mlp.linear_fc2.weight"].add_(0.5)

    def without_the_last(transfers: Any, *rest: Any) -> None:
        send([one for one in transfers if one.name != "decoder.layers.1.mlp.linear_fc2.weight"], *rest)

    with (
        patch.object(refit, "_exchange_transfers", without_the_last),
        pytest.raises(CheckpointError, match="did not copy all of them"),
    ):
        generator.refit()


def test_weights_that_were_released_are_there_again_after_a_refit() -> None:
    changes = {"rl_inference_tensor_model_parallel_size": 1, "rl_offload_inference_model_weights_when_idle": True}
    compare(train_policy_here({}, LLAMA, 2), train_policy_here({**VERIFY, **changes}, LLAMA, 2))
    trainer, data = trainer_of(dataclasses.replace(RL, **changes), **LLAMA)
    data.prepare_step(16)
    assert data._generator is not None
    assert not sum(param.untyped_storage().nbytes() for stage in data._generator.stages for param in stage.parameters())


def test_the_rest_of_a_box_covers_it_once() -> None:
    box, part = Box((2, 0, 1), (4, 3, 5)), Box((3, 1, 0), (9, 1, 4))
    rest = refit.subtract_box(box, part)
    common = intersect(box, part)
    assert common is not None
    counts = torch.zeros(8, 4, 8)
    for one in (*rest, common):
        counts[one.slices()] += 1
    expected = torch.zeros(8, 4, 8)
    expected[box.slices()] = 1
    assert torch.equal(counts, expected) and refit.subtract_box(box, Box((9, 9, 9), (1, 1, 1))) == [box]
