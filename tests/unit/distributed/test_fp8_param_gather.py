"""Weights that are kept in 8 bits: what a rank holds of them, and that they are its main weights, rounded once."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron.core.distributed.fp8_param_gather import LowPrecisionBucket
from megatron.core.parallel.spec import param_spec_of
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.training import train_here
from tests.helpers.world import Worlds


def trainer_of(**changes: Any) -> Trainer:
    return tiny.trainer_of(
        tiny.run_of(
            tiny.config(
                bf16=True,
                fp8_format="hybrid",
                fp8_recipe="delayed",
                fp8_param_gather=True,
                use_distributed_optimizer=True,
                **changes,
            )
        )
    )


def test_a_rank_holds_main_weights_and_bytes_and_no_other_weights() -> None:
    trainer = trainer_of(first_last_layers_bf16=True)
    (bucket,) = (bucket for bucket in trainer.parallels[0].buckets if isinstance(bucket, LowPrecisionBucket))
    names = {param_spec_of(param).name for param in bucket.params}
    assert names == {
        f"decoder.layers.{layer}.{part}.weight"
        for layer in (1, 2)
        for part in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
    assert bucket.data.dtype == torch.uint8 and bucket.main.dtype == torch.float32
    assert all(param.untyped_storage().nbytes() == param.element_size() for param in bucket.params), (
        "a place, not values"
    )
    assert {param_spec_of(param).name for param in trainer.parallels[0].whole_params}.isdisjoint(names)
    assert {segment.name for segment in trainer.parallels[0].sharded_segments} == names
    assert all(
        slot.data_ptr() == segment.data.data_ptr()
        for name, segment, slot in trainer.optimizer.checkpoint_state()
        if name == "master" and segment.name in names
    ), "masters are what is stepped and saved"


@pytest.mark.parametrize("steps", [0, 2])
def test_a_layers_weight_is_its_master_rounded_once(steps: int) -> None:
    trainer = trainer_of(num_layers=1)
    for step in range(steps):
        train_step(trainer, tiny.short_run_batches(trainer.run, step))
    masters = {segment.name: segment.data for segment in trainer.parallels[0].sharded_segments}
    layer = trainer.stages[0].decoder.layers["0"]
    for linear in (layer.self_attention.linear_qkv, layer.mlp.linear_fc2):
        master = masters[param_spec_of(linear.weight).name].view(linear.weight.shape).numpy()
        scale = np.float32(448.0) / np.abs(master).max()
        values = (master * scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        (held,) = linear.scaling.held
        assert np.array_equal(held.values.float().numpy(), values)
        assert float(held.scale) == pytest.approx(1.0 / float(scale), rel=1e-6)


def with_and_without(changes: dict[str, Any]) -> list[tuple[list[float], list[float]]]:
    """On every rank: losses and norms with weights that are kept in 4 bits, and with weights that are rounded when they are used."""
    return [
        train_here(
            {
                **changes,
                "fp4_format": "e2m1",
                "fp64": True,
                "use_distributed_optimizer": True,
                "fp4_param_gather": kept,
            },
            2,
        )[:2]
        for kept in (True, False)
    ]


def test_weights_that_are_kept_in_4_bits_are_those_that_would_be_rounded_when_they_are_used(world: Worlds) -> None:
    # Chance rounds gradients by the rank: a layout is compared with itself.
    experts = {"num_experts": 2, "moe_ffn_hidden_size": 48, "expert_model_parallel_size": 2, "num_layers": 2}
    for (losses, norms), (losses_rounded, norms_rounded) in world(2).run(with_and_without, experts):
        assert losses == pytest.approx(losses_rounded, rel=1e-12) and norms == pytest.approx(norms_rounded, rel=1e-12)
