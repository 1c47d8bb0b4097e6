"""The encoder of images as a network of its own: a `ModelConfig` of bidirectional layers, from the settings of a whole network."""

from __future__ import annotations

from functools import lru_cache

from megatron.core.config.settings.architecture import VIT
from megatron.core.config.settings.model import ModelConfig, RequestedModel


@lru_cache(maxsize=64)
def vision_encoder_config(model: ModelConfig) -> ModelConfig:
    """Return the config of the vision encoder of a network that reads images; that of a vision transformer unchanged."""
    if model.architecture.classifies_images:
        return model
    vision = model.vision
    return RequestedModel(
        architecture=VIT,
        num_layers=vision.vision_num_layers,
        hidden_size=vision.vision_hidden_size,
        ffn_hidden_size=vision.vision_ffn_hidden_size,
        num_attention_heads=vision.vision_num_attention_heads,
        vision=vision,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=model.init_method_std,
        init_method_xavier_uniform=model.init_method_xavier_uniform,
        attention_backend=model.attention_backend,
        kernels=model.kernels,
        padded_vocab_size=1,
        true_vocab_size=1,
    ).resolve()


def is_encoder_replicated(model: ModelConfig, tensor_size: int) -> bool:
    """Whether tensor ranks replicate the vision encoder, whose heads or MLP width their number does not divide."""
    encoder = vision_encoder_config(model)
    return bool(encoder.num_attention_heads % tensor_size or encoder.ffn_hidden_size % tensor_size)
