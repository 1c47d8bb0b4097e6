"""Every kind of sequence mixer by its name, and which of them a network has."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.config.mixers.attention import Attention
from megatron.core.config.mixers.gated_delta_net import DeltaNet
from megatron.core.config.mixers.mamba import Mamba
from megatron.core.config.mixers.mixer import Mixer
from megatron.core.config.mixers.mla import LatentAttention
from megatron.core.config.mixers.recurrent import RecurrentMixer
from megatron.core.config.settings.model import ModelConfig

# In this order messages list their symbols.
MIXERS: Mapping[str, Mixer] = {one.name: one for one in (Mamba(), DeltaNet(), Attention(), LatentAttention())}


def attention_of(model: ModelConfig) -> Mixer:
    """Return which kind of attention a network has where it has any."""
    return MIXERS[LatentAttention.name if model.mla.multi_latent_attention else Attention.name]


def mixer_beside_attention(model: ModelConfig) -> str:
    """Return the name of the mixer that runs in parallel with the first one of every layer, or none."""
    return Mamba.name if model.hybrid.parallel_mamba else "none"


def requested_mixers(model: ModelConfig) -> list[Mixer]:
    """Return the mixers that the settings ask for, by name."""
    return [MIXERS[name] for name in sorted(MIXERS) if MIXERS[name].is_requested(model)]


def recurrent_mixers(model: ModelConfig) -> list[RecurrentMixer]:
    """Return those of them with a recurrent state."""
    return [one for one in requested_mixers(model) if isinstance(one, RecurrentMixer)]
