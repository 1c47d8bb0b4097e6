"""A network with experts that begins as a dense checkpoint says what the dense one said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.parallel.boxes import Box, whole_box
from megatron.core.parallel.rng import derive_seed
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.checkpoint.upcycling import UpcycledSource
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.training import assemble, held_weights, train_on
from tests.helpers.world import Worlds

DENSE: dict[str, Any] = {"fp64": True, "ffn_hidden_size": 48, "num_layers": 2, "lr": 0.05}
GATED: dict[str, Any] = {"swiglu": True, "add_bias_linear": False}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "copies": ({}, {"num_experts": 4, "moe_ffn_hidden_size": 48}),
    "gated halves": (
        GATED,
        {"num_experts": 8, "moe_ffn_hidden_size": 24, "moe_upcycling_granularity": 2, "moe_router_topk": 4},
    ),
    "halves with biases": ({}, {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_upcycling_granularity": 2}),
    "thirds, sigmoid, scaled": (
        GATED,
        {
            "num_experts": 6,
            "moe_ffn_hidden_size": 16,
            "moe_upcycling_granularity": 3,
            "moe_router_topk": 3,
            "moe_router_score_function": "sigmoid",
            "moe_router_topk_scaling_factor": 2.5,
            "moe_router_enable_expert_bias": True,
        },
    ),
    "one layer of two": (
        {"squared_relu": True},
        {"num_experts": 4, "moe_ffn_hidden_size": 48, "moe_layer_freq": "[0]+[1]"},
    ),
}


def start(changes: dict[str, Any]) -> tuple[Trainer, Checkpointer]:
    """A trainer on this process's ranks, and its checkpoint."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(ranks, **changes)))
    return trainer, Checkpointer(trainer)


def dense_run(folder: Path, changes: dict[str, Any]) -> torch.Tensor:
    """Train a dense network for a step, save it, and return its logits."""
    trainer, checkpoint = start({**DENSE, **changes, "save": str(folder)})
    train_on(trainer, 1)
    checkpoint.save()
    return logits(trainer)


def logits(trainer: Trainer) -> torch.Tensor:
    """What the network says of one batch."""
    ids = torch.from_numpy(tiny.random_global_batch(trainer.run.config, 5)["tokens"][:2])
    trainer.set_train_mode(False)
    with torch.no_grad():
        return trainer.stages[0](ids=ids)


@pytest.mark.parametrize("case", CASES)
def test_the_network_says_the_same_right_after_upcycling(tmp_path: Path, case: str) -> None:
    dense, experts = CASES[case]
    expected = dense_run(tmp_path, dense)
    fresh, checkpoint = start({**DENSE, **dense, **experts, "moe_use_upcycling": True, "load": str(tmp_path)})
    before = logits(fresh)
    assert checkpoint.resume() and fresh.progress.iteration == 0, "an upcycled network is a new run"
    assert (before - expected).abs().max() > 0.01, "the weights of the checkpoint matter"
    torch.testing.assert_close(logits(fresh), expected, rtol=1e-10, atol=1e-10)


def test_shares_among_all_experts_are_scaled_for_a_router_that_prefers_none(tmp_path: Path) -> None:
    changes = {
        "num_experts": 8,
        "moe_ffn_hidden_size": 24,
        "moe_upcycling_granularity": 2,
        "moe_router_topk": 4,
        "moe_router_pre_softmax": True,
    }
    expected = dense_run(tmp_path, GATED)
    trainer, checkpoint = start({**DENSE, **GATED, **changes, "moe_use_upcycling": True, "load": str(tmp_path)})
    checkpoint.resume()
    for name, param in trainer.stages[0].named_parameters():
        if name.endswith("router.weight"):
            param.data.zero_()
    torch.testing.assert_close(logits(trainer), expected, rtol=1e-10, atol=1e-10)


def test_experts_are_slices_of_copies_and_slices_share_a_row_of_the_router(tmp_path: Path) -> None:
    dense_run(tmp_path, GATED)
    changes = {**DENSE, **GATED, **CASES["gated halves"][1], "moe_use_upcycling": True, "load": str(tmp_path)}
    trainer, checkpoint = start(changes)
    dense, plain = start({**DENSE, **GATED, "load": str(tmp_path)})
    checkpoint.resume()
    plain.resume()
    mlp, theirs = trainer.stages[0].decoder.layers["1"].mlp, dense.stages[0].decoder.layers["1"].mlp
    gate, up = theirs.linear_fc1.weight.chunk(2)
    for expert in range(8):
        piece = slice(0, 24) if expert % 2 == 0 else slice(24, 48)
        assert torch.equal(mlp.experts.linear_fc1.weight[expert], torch.cat((gate[piece], up[piece])))
        assert torch.equal(mlp.experts.linear_fc2.weight[expert], 2.0 * theirs.linear_fc2.weight[:, piece])
    name = "decoder.layers.1.mlp.router.weight"
    generator = torch.Generator().manual_seed(derive_seed("initial", 7, name))
    drawn = torch.empty(8, 32).normal_(0.0, 0.1, generator=generator)
    assert torch.equal(mlp.router.weight.float(), drawn[[0, 0, 1, 1, 2, 2, 3, 3]])


def test_any_box_can_be_read_of_an_upcycled_checkpoint(tmp_path: Path) -> None:
    dense_run(tmp_path, GATED)
    trainer, checkpoint = start(
        {**DENSE, **GATED, **CASES["gated halves"][1], "moe_use_upcycling": True, "load": str(tmp_path)}
    )
    checkpoint.resume()
    source = UpcycledSource(open_checkpoint(tmp_path), trainer.run.config)
    for param in trainer.stages[0].decoder.parameters():
        shape = tuple(param.shape)
        assert source.formats[f"model.{param.spec.name}"].shape == shape
        for box in (
            whole_box(shape),
            Box(tuple(n // 4 for n in shape), tuple(n // 2 for n in shape)),
        ):  # across gate and up too
            assert torch.equal(source.read(f"model.{param.spec.name}", box).to(param.dtype), param[box.slices()]), (
                param.spec.name,
                box,
            )


def upcycled_here(folder: Path, changes: dict[str, Any]) -> list[Any]:
    """On every rank: upcycle, and return this rank's weights."""
    trainer, checkpoint = start({**changes, "moe_use_upcycling": True, "load": str(folder)})
    checkpoint.resume()
    return held_weights(trainer)


def test_every_layout_upcycles_to_the_same_weights(world: Worlds, tmp_path: Path) -> None:
    dense_run(tmp_path, GATED)
    changes = {**DENSE, **GATED, **CASES["gated halves"][1]}
    serial = assemble([upcycled_here(tmp_path, changes)])
    layout = {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "sequence_parallel": True,
    }
    cut = assemble(world(4).run(upcycled_here, tmp_path, {**changes, **layout}))
    assert cut.keys() == serial.keys()
    assert [name for name in serial if not torch.equal(cut[name], serial[name])] == []


def test_a_checkpoint_that_has_experts_is_resumed_and_another_width_refused(tmp_path: Path) -> None:
    dense_run(tmp_path / "dense", GATED)
    changes = {**DENSE, **GATED, **CASES["gated halves"][1], "moe_use_upcycling": True}
    trainer, checkpoint = start({**changes, "load": str(tmp_path / "dense"), "save": str(tmp_path / "sparse")})
    checkpoint.resume()
    train_on(trainer, 2)
    checkpoint.save()
    again, checkpoint = start({**changes, "load": str(tmp_path / "sparse")})
    assert checkpoint.resume() and again.progress.iteration == 2 and again.optimizer.num_steps == 2
    assert torch.equal(logits(again), logits(trainer))
    wider = {**changes, "ffn_hidden_size": 64, "moe_ffn_hidden_size": 32, "load": str(tmp_path / "dense")}
    with pytest.raises(CheckpointError) as caught:
        start(wider)[1].resume()
    assert list(caught.value.problems) == ["--ffn-hidden-size: 48 in the checkpoint, 64 in this run"]
