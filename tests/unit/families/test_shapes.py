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


@pytest.mark.parametrize("changes", [
    {}, {"untie_embeddings_and_output_weights": True, "kv_channels": 6, "ffn_hidden_size": 40}, GATED,
    {**GATED, "group_query_attention": True, "num_query_groups": 2, "add_qkv_bias": True},
    {**GATED, "qk_layernorm": True, "quick_geglu": True, "swiglu": False}, {"qk_layernorm": True, "position_embedding_type": "none"},
])
def test_parameters_are_those_of_the_network(changes: dict[str, Any]) -> None:
    config = tiny.config(**changes)
    (stage,) = stages_of(config)
    model = GPTModel(stage, tiny.run_of(config).build)
    assert {spec_of(param).name: spec_of(param).shape for param in model.parameters()} == parameter_shapes(config.model)
