"""A training step on a GPU against the same step on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers import tiny
from tests.helpers.training import train_on

pytestmark = pytest.mark.gpu

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "ffn_hidden_size": 64,
        "add_bias_linear": False,
        "group_query_attention": True,
        "num_query_groups": 2,
        "untie_embeddings_and_output_weights": True,
    },
    "packed": {"reset_position_ids": True, "reset_attention_mask": True},
    "windows and sinks": {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 8,
        "group_query_attention": True,
        "num_query_groups": 2,
        "window_size": "5,0",
        "window_attn_skip_freq": "2",
        "softmax_type": "learnable",
        "reset_position_ids": True,
        "reset_attention_mask": True,
    },
    "caps and clips": {
        "attention_logit_softcap": 0.5,
        "final_logit_softcap": 2.0,
        "qk_clip": True,
        "qk_clip_threshold": 0.3,
    },
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform"},
}


def losses_on(device: str, **changes: Any) -> list[float]:
    """Four steps from values drawn on the CPU, which are the same everywhere."""
    settings = tiny.config(use_cpu_initialization=True, **changes)
    return train_on(tiny.trainer_of(tiny.run_of(settings, torch.device(device))), 4)[0]


@pytest.mark.parametrize("name", MODELS)
def test_fp32_training_on_a_gpu_equals_the_cpu(name: str) -> None:
    assert losses_on("cuda", **MODELS[name]) == pytest.approx(losses_on("cpu", **MODELS[name]), rel=1e-4)


@pytest.mark.parametrize("numbers", [{"bf16": True}, {"fp16": True, "initial_loss_scale": 2.0**16}])
@pytest.mark.parametrize("backend", ["auto", "flash", "unfused"])
def test_half_precision_training_on_a_gpu_stays_near_fp32(numbers: dict[str, Any], backend: str) -> None:
    assert losses_on("cuda", attention_backend=backend, **numbers) == pytest.approx(losses_on("cpu"), rel=3e-2)


def test_dropout_on_a_gpu_is_replayed_by_recomputation() -> None:
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    assert losses_on("cuda", **dropout, **MODELS["recomputed"]) == pytest.approx(losses_on("cuda", **dropout), rel=1e-4)
