"""Names and shapes told from the settings are those of the network that is built from them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.config.rules import stages_of
from megatron.core.families.shapes import parameter_shapes
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel.spec import spec_of
from tests.helpers import tiny

GATED = {"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "add_bias_linear": False}

EXPERTS = {"num_experts": 3, "moe_ffn_hidden_size": 10}
LATENT = {"multi_latent_attention": True, "kv_lora_rank": 7, "qk_head_dim": 5, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}


@pytest.mark.parametrize("changes", [
    {}, {"untie_embeddings_and_output_weights": True, "kv_channels": 6, "ffn_hidden_size": 40}, GATED,
    {**GATED, "group_query_attention": True, "num_query_groups": 2, "add_qkv_bias": True},
    {**GATED, "qk_layernorm": True, "quick_geglu": True, "swiglu": False}, {"qk_layernorm": True, "position_embedding_type": "none"},
    {**GATED, "sandwich_norm": True}, {"attention_output_gate": True, "softmax_type": "learnable"},
    {**GATED, "attention_output_gate": True, "softmax_type": "off-by-one", "window_size": "3,0"},
    {**GATED, **EXPERTS, "moe_layer_freq": "2"}, {**EXPERTS, "num_experts": 4, "moe_shared_expert_intermediate_size": 12},
    {**GATED, **EXPERTS, "moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True, "moe_router_enable_expert_bias": True,
     "moe_router_score_function": "sigmoid"},
    {**GATED, **LATENT}, {**GATED, **LATENT, "q_lora_rank": 9, "qk_layernorm": True}, {**GATED, **LATENT, **EXPERTS, "mtp_num_layers": 2},
    {**GATED, "mtp_num_layers": 2, "mtp_use_repeated_layer": True}, {"mtp_num_layers": 1},
])
def test_parameters_are_those_of_the_network(changes: dict[str, Any]) -> None:
    config = tiny.config(**changes)
    (stage,) = stages_of(config)
    model = GPTModel(stage, tiny.run_of(config).build)
    assert {spec_of(param).name: spec_of(param).shape for param in model.parameters()} == parameter_shapes(config.model)
