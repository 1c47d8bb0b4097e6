"""Dropout from a named random stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.parallel.rng import RandomStreams


class Dropout(nn.Module):
    """Dropout that draws from a named random stream, in training only. share: probability of zeroing an element."""

    def __init__(self, share: float, streams: RandomStreams, stream: str) -> None:
        super().__init__()
        self.share, self.streams, self.stream = share, streams, stream

    def forward(self, x: Tensor) -> Tensor:
        """Zero elements and scale the rest by 1 / (1 - share). x: any shape; returns the same shape."""
        if self.share == 0.0 or not self.training:
            return x
        with self.streams.fork(self.stream):
            # keeps a byte an element; on CPUs F.dropout keeps a number
            return torch.native_dropout(x, self.share, True)[0]
