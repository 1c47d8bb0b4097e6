"""Checkpoints of adapters alone: they go on bit for bit, under any layout, on their own base and on no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adapters.files import BASE
from megatron.adapters.saved import base_weights_hash
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.training import held_weights, train_on
from tests.helpers.world import Worlds
from tests.parity.table import MODELS

LORA = {"lora_rank": 4, "lora_alpha": 8.0}
PARTS = {**LORA, "lora_modules_to_save": ("*final_layernorm*",)}


def build(**changes: Any) -> Trainer:
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return tiny.trainer_of(tiny.run_of(tiny.config(world_size, **{**MODELS["llama"], **changes})))


def base_in(folder: Path, **changes: Any) -> None:
    trainer = build(save=str(folder), **changes)
    train_on(trainer, 2)
    Checkpointer(trainer).save()


@pytest.mark.parametrize("kind", [PARTS, {**LORA, "dora": True}])
def test_a_run_goes_on_from_its_adapters_and_their_base(tmp_path: Path, kind: dict[str, Any]) -> None:
    base_in(tmp_path / "base")
    flags = {
        **kind,
        "pretrained_checkpoint": str(tmp_path / "base"),
        "load": str(tmp_path / "run"),
        "save": str(tmp_path / "run"),
    }
    first = build(**flags)
    checkpoint = Checkpointer(first)
    checkpoint.resume()
    train_on(first, 2)
    checkpoint.save()
    saved = open_native_checkpoint(tmp_path / "run" / "iter_0000002")
    names = [name for name in saved.formats if name.startswith("model.")]
    assert names and all(".adapter." in name or "final_layernorm" in name for name in names)
    assert saved.values[BASE]["hash"]
    second = build(**flags)
    assert Checkpointer(second).resume() and second.progress.iteration == 2
    assert train_on(second, 2) == train_on(first, 2)
    assert all(torch.equal(a[3], b[3]) for a, b in zip(held_weights(first), held_weights(second), strict=True))


def test_a_base_under_new_adapters_is_no_other_function(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Adapters add nothing at first. What else differs is said."""
    base_in(tmp_path / "base")
    caplog.set_level("INFO")
    for kind, words in (({**LORA, "lora_rslora": True}, ""), ({**LORA, "rotary_base": 77}, "another function")):
        caplog.clear()
        assert Checkpointer(build(**kind, pretrained_checkpoint=str(tmp_path / "base"))).resume()
        notes = [one for one in caplog.messages if "another function" in one]
        assert bool(notes) == bool(words) and not any("lora" in one for one in notes), notes


def test_adapters_of_another_base_are_refused(tmp_path: Path) -> None:
    for seed in (7, 8):
        base_in(tmp_path / f"base{seed}", seed=seed)
    flags = {**LORA, "load": str(tmp_path / "run"), "save": str(tmp_path / "run")}
    first = build(**flags, pretrained_checkpoint=str(tmp_path / "base7"))
    Checkpointer(first).resume()
    Checkpointer(first).save()
    for changes in ({"pretrained_checkpoint": str(tmp_path / "base8")}, {}):
        with pytest.raises(CheckpointError, match="another base"):
            Checkpointer(build(**flags, **changes)).resume()
    with pytest.raises(CheckpointError, match="another network|without their network"):
        Checkpointer(build(load=str(tmp_path / "run"))).resume()


def test_lengths_of_rows_begin_as_those_of_the_base_that_is_loaded(tmp_path: Path) -> None:
    base_in(tmp_path / "base", seed=8)
    trainer = build(**LORA, dora=True, pretrained_checkpoint=str(tmp_path / "base"), bf16=True)
    Checkpointer(trainer).resume()
    linear = trainer.stages[0].decoder.layers["1"].self_attention.linear_qkv
    expected = linear.weight.float().norm(dim=1).split(linear.adapter.sizes)[0]
    torch.testing.assert_close(linear.adapter.pairs["q"].magnitude.float(), expected, rtol=1e-2, atol=0.0)
    named = {
        segment.name: main
        for segment, main in zip(trainer.optimizer.segments, trainer.optimizer.main_weights, strict=True)
    }
    length = named["decoder.layers.1.self_attention.linear_qkv.adapter.pairs.q.magnitude"]
    torch.testing.assert_close(length, expected, rtol=1e-2, atol=0.0)


def hash_here(changes: dict[str, Any]) -> str:
    trainer = build(**changes)
    return base_weights_hash(trainer.stages, trainer.run.mesh, trainer.run.config.model.adapter)


def test_the_hash_of_a_base_is_that_of_its_values_under_any_layout(world: Worlds) -> None:
    serial = hash_here(LORA)
    layouts: tuple[dict[str, Any], ...] = (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
        {"use_torch_fsdp2": True},
        {"context_parallel_size": 2},
    )
    assert all(found == serial for layout in layouts for found in world(2).run(hash_here, {**LORA, **layout}))
    assert hash_here({**LORA, "bf16": True}) == serial == hash_here({**LORA, "dora": True})
    assert hash_here({**LORA, "seed": 8}) != serial


def test_adapter_state_takes_a_small_share_of_the_optimizers_memory() -> None:
    whole, few = (
        sum(one.nbytes for one in build(**changes).optimizer.storage_tensors()) for changes in ({}, {"lora_rank": 1})
    )
    assert few < whole / 10


def resumed_here(changes: dict[str, Any]) -> tuple[list[float], list[float]]:
    trainer = build(**changes)
    Checkpointer(trainer).resume()
    return train_on(trainer, 2)


def test_adapters_load_under_another_layout(tmp_path: Path, world: Worlds) -> None:
    base_in(tmp_path / "base", fp64=True)
    flags = {
        **PARTS,
        "fp64": True,
        "pretrained_checkpoint": str(tmp_path / "base"),
        "load": str(tmp_path / "run"),
        "save": str(tmp_path / "run"),
    }
    first = build(**flags)
    checkpoint = Checkpointer(first)
    checkpoint.resume()
    train_on(first, 2)
    checkpoint.save()
    expected = train_on(first, 2)
    for layout in (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
        {"use_distributed_optimizer": True},
    ):
        for found in world(2).run(resumed_here, {**flags, **layout}):
            assert found[0] == pytest.approx(expected[0], rel=1e-10) and found[1] == pytest.approx(
                expected[1], rel=1e-9
            )
