"""Rotary tables: which angle each position turns each pair by.

A position is one number, or three (time, height, width) of which each pair turns by one: `mrope`, for text among pictures.
Networks grow into longer texts by slower turns: of all pairs (interpolation), or of those alone that do not come round within
the original length (Llama 3.1; YaRN, which also makes the rotated sizes larger).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron.core.config.settings.model import PositionConfig
from megatron.core.transformer.context.layer_build_context import LayerBuildContext


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin of every position, [s, b or 1, 1, r] in fp32 (fp64 for fp64 runs). windowed: of layers with a window, if
    theirs are others.
    """

    cos: Tensor
    sin: Tensor
    windowed: RotaryTable | None = None


def rotary_frequencies(config: PositionConfig, head_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the angle per position of each rotated pair, [r/2], scaled if configured (Su et al., 2021)."""
    size = int(head_size * config.rotary_percent) // 2 * 2
    steps = torch.arange(0, size, 2, device=device, dtype=dtype) / size
    result = 1.0 / config.rotary_base**steps  # rounded as the published networks round it
    if config.is_yarn:
        return _yarn_scaled_frequencies(result, config)
    return _llama3_scaled_frequencies(result, config) if config.use_rope_scaling else result


def _llama3_scaled_frequencies(frequencies: Tensor, config: PositionConfig) -> Tensor:
    """Divide low frequencies by the scaling factor, keep high ones, and blend those between (Llama 3.1)."""
    turns = config.rope_scaling_original_length * frequencies / (2 * math.pi)
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / config.rope_scaling_factor + blend * frequencies


def _yarn_scaled_frequencies(frequencies: Tensor, config: PositionConfig) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, blend linearly by index between (Peng et al., 2023)."""
    size = 2 * len(frequencies)

    def rotary_pair_index(turns: float) -> float:  # of the pair that turns so often over the original length
        length = config.yarn_original_max_position_embeddings
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rotary_base))

    first, last = rotary_pair_index(config.yarn_beta_fast), rotary_pair_index(config.yarn_beta_slow)
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    pairs = torch.arange(len(frequencies), device=frequencies.device, dtype=frequencies.dtype)
    slowed = ((pairs - first) / (last - first if last != first else 0.001)).clamp(0.0, 1.0)
    return slowed * frequencies / config.rotary_scaling_factor + (1 - slowed) * frequencies


def yarn_mscale(config: PositionConfig, share: float) -> float:
    """Return YaRN's magnitude factor 0.1 * share * log(scaling) + 1; 1 without it. share: a --mscale flag's value."""
    if not config.is_yarn or config.rotary_scaling_factor <= 1.0:
        return 1.0
    return 0.1 * share * math.log(config.rotary_scaling_factor) + 1.0


def rotary_table(
    positions: Tensor, config: PositionConfig, head_size: int, *, dtype: torch.dtype, pairs: bool
) -> RotaryTable:
    """Return cos and sin for these positions.

    positions: [b or 1, s], or [3, b or 1, s] by time, height and width (M-RoPE). pairs: rotate neighbouring channels
    together (interleaved), else the two halves of a head.
    """
    turns = rotary_frequencies(config, head_size, positions.device, dtype)
    places = positions.transpose(-1, -2).to(dtype)[..., None, None]
    if positions.dim() == 3:
        axis = [i % 3 for i, count in enumerate(config.mrope_section or ()) for _ in range(count)]
        assert len(axis) == len(turns), "--mrope-section says for every pair what it turns by"
        places = torch.cat([places[i] for i in axis], dim=-1)
    if config.rotary_seq_len_interpolation_factor:
        places = places / config.rotary_seq_len_interpolation_factor
    angles = places * turns
    doubled = angles.repeat_interleave(2, dim=-1) if pairs else torch.cat((angles, angles), dim=-1)
    # What scores as a whole grow by is no business of the rotation: latent attention takes it back with its scale.
    growth = yarn_mscale(config, config.mscale) / yarn_mscale(config, config.mscale_all_dim)
    return RotaryTable(doubled.cos() * growth, doubled.sin() * growth)


def rotary_table_for(build: LayerBuildContext, hidden: Tensor, positions: Tensor | None = None) -> RotaryTable | None:
    """Return the rotary table for a stage's hidden states, or None if the network has no rotary positions.

    hidden: [s or s/tp, b, h]; positions: [b or 1, s] or [3, b or 1, s]; None: this rank's positions of 0, 1, 2, ...
    """
    if not build.model.uses_rotary:
        return None
    length = build.tp_region.whole_sequence_length(hidden.shape[0])
    make = partial(
        rotary_table,
        build.local_positions(length)[None] if positions is None else positions,
        head_size=build.model.head_size_before_rotary_percent,
        dtype=torch.float64 if build.dtype == torch.float64 else torch.float32,
        pairs=build.model.has_interleaved_rotary,
    )
    rope = build.model.rope
    if rope.rotary_base_local is None:
        return make(config=rope)
    windowed = replace(
        rope,
        rotary_base=rope.rotary_base_local,
        rotary_seq_len_interpolation_factor=None,
        use_rope_scaling=False,
        rope_type="rope",
    )
    return replace(make(config=rope), windowed=make(config=windowed))
