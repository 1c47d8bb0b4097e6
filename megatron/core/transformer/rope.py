"""Rotary tables: which angle each position turns each pair by."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.config.model import RopeConfig

_LLAMA3_ORIGINAL_LENGTH, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin of every position, [s, b or 1, 1, r] in fp32 (fp64 for fp64 runs)."""

    cos: Tensor
    sin: Tensor


def frequencies(config: RopeConfig, head_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Angle per position of each pair, [r/2] (Su et al., 2021)."""
    size = int(head_size * config.rotary_percent) // 2 * 2
    steps = torch.arange(0, size, 2, device=device, dtype=dtype) / size
    found = config.rotary_base**-steps
    return _llama3(found, config.rope_scaling_factor) if config.use_rope_scaling else found


def _llama3(found: Tensor, factor: float) -> Tensor:
    """Slow turns are slowed by `factor`, fast ones kept, those between blended (Llama 3.1)."""
    turns = _LLAMA3_ORIGINAL_LENGTH * found / (2 * math.pi)
    blend = ((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)).clamp(0.0, 1.0)
    return (1 - blend) * found / factor + blend * found


def rotary_table(positions: Tensor, config: RopeConfig, head_size: int, *, dtype: torch.dtype) -> RotaryTable:
    """The table for these positions, [b or 1, s]."""
    places = positions.t().to(dtype)
    if config.rotary_seq_len_interpolation_factor:
        places = places / config.rotary_seq_len_interpolation_factor
    angles = places[:, :, None, None] * frequencies(config, head_size, positions.device, dtype)
    doubled = angles.repeat_interleave(2, dim=-1) if config.rotary_interleaved else torch.cat((angles, angles), dim=-1)
    return RotaryTable(doubled.cos(), doubled.sin())
