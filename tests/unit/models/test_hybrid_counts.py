"""The estimate of what a mixer with a state keeps for its backward pass, against what autograd saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.models import flops
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import set_global_param_names
from megatron.core.transformer.blocks import make_layer
from megatron.core.transformer.context.forward_context import ForwardContext
from tests.helpers import tiny

S = 1200  # three spans of chunks, the last of which is short
SIZES: dict[str, Any] = {
    "num_layers": None,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "seq_length": S,
    "max_position_embeddings": S,
    "position_embedding_type": "none",
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "mamba_num_groups": 2,
    "mamba_state_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
}


@pytest.mark.parametrize("mixer, symbol", [("mamba", "M"), ("gated_delta_net", "G")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_a_mixer_keeps_what_the_planner_counts(mixer: str, symbol: str, dtype: str) -> None:
    settings = tiny.config(**SIZES, hybrid_layer_pattern=symbol, **({} if dtype == "fp32" else {dtype: True}))
    run = tiny.run_of(settings)
    layer = make_layer(network_layer_plans(settings.model)[0], run.layer_build_context)
    set_global_param_names(layer)
    materialize_parameters(layer, run.mesh, seed=1)
    x = torch.randn(S, 1, 64, dtype=run.layer_build_context.dtype, requires_grad=True)
    own, kept = {one.untyped_storage().data_ptr() for one in (x, *layer.parameters())}, dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer.token_mixer(x, ForwardContext(AttentionMaskSpec()))
    del output
    norm = 2 * 64 * run.layer_build_context.dtype.itemsize  # its input and output
    estimate = flops.layer_activation_bytes_per_token(settings, mlp="none", mixer=mixer) - norm
    assert sum(kept.values()) / S == pytest.approx(estimate, rel=0.05)
