"""Sources that are made up, and compared."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.dist_checkpointing.source import ShapeAndDtype
from megatron.core.models.describe import global_parameter_shapes
from megatron.core.parallel.boxes import Box, whole_box

LLAMA = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
    "true_vocab_size": 20,
    "max_position_embeddings": 8,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
GPT2 = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "true_vocab_size": 20,
    "max_position_embeddings": 8,
    "openai_gelu": True,
}


class Made:
    """A `Source` of random tensors; every read makes a new one. held: those that someone still has."""

    def __init__(self, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        self.where, self.values, self.settings = "memory", {}, settings
        self.formats = {
            f"model.{name}": ShapeAndDtype(shape, dtype)
            for name, shape in global_parameter_shapes(model_config_from_settings(settings)).items()
        }
        self.held: list[weakref.ref] = []
        self.most = 0

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor."""
        self.most = max(self.most, sum(one() is not None for one in self.held))
        seed = sum(name.encode())
        tensor = torch.randn(self.formats[name].shape, generator=torch.Generator().manual_seed(seed)).to(
            self.formats[name].dtype
        )
        self.held.append(weakref.ref(tensor))
        return tensor[box.slices()]


def same_tensors(found: Any, expected: Any) -> None:
    """Both sources hold the same, bit for bit."""
    assert found.formats == expected.formats
    for name, format in expected.formats.items():
        box = whole_box(format.shape)
        assert torch.equal(found.read(name, box), expected.read(name, box)), name
