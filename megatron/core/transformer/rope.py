"""Rotary tables: which angle each position turns each pair by."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.config.model import RopeConfig
from megatron.core.transformer.build import Build


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin of every position, [s, b or 1, 1, r] in fp32 (fp64 for fp64 runs)."""

    cos: Tensor
    sin: Tensor


def frequencies(config: RopeConfig, head_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Angle per position of each pair, [r/2] (Su et al., 2021)."""
    size = int(head_size * config.rotary_percent) // 2 * 2
    steps = torch.arange(0, size, 2, device=device, dtype=dtype) / size
    found = 1.0 / config.rotary_base**steps  # rounded as the published networks round it
    return _llama3(found, config) if config.use_rope_scaling else found


def _llama3(found: Tensor, config: RopeConfig) -> Tensor:
    """Slow turns are slowed by a factor, fast ones kept, those between blended (Llama 3.1)."""
    turns = config.rope_scaling_original_length * found / (2 * math.pi)
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * found / config.rope_scaling_factor + blend * found


def rotary_table(positions: Tensor, config: RopeConfig, head_size: int, *, dtype: torch.dtype) -> RotaryTable:
    """The table for these positions, [b or 1, s]."""
    places = positions.t().to(dtype)
    if config.rotary_seq_len_interpolation_factor:
        places = places / config.rotary_seq_len_interpolation_factor
    angles = places[:, :, None, None] * frequencies(config, head_size, positions.device, dtype)
    doubled = angles.repeat_interleave(2, dim=-1) if config.rotary_interleaved else torch.cat((angles, angles), dim=-1)
    return RotaryTable(doubled.cos(), doubled.sin())


def rotary_of(build: Build, hidden: Tensor, positions: Tensor | None = None) -> RotaryTable | None:
    """The table for hidden states [s or s/tp, b, h] between regions, if positions are rotations; positions: [b or 1, s]
    when they do not simply count.
    """
    if not build.model.rope.rotates:
        return None
    length = build.region.whole_length(hidden.shape[0])
    places = torch.arange(length, device=hidden.device)[None] if positions is None else positions
    wide = torch.float64 if build.dtype == torch.float64 else torch.float32
    return rotary_table(places, build.model.rope, build.model.kv_channels, dtype=wide)
