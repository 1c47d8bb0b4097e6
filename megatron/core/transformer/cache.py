"""What decoding puts between the layers of a stage and their attention.

A forward pass over texts whose beginnings have been computed before brings only their new tokens, [t, 1, h], end to end. The
cache gives attention the signature that it always has: it stores the new keys and values, finds the old ones, and runs
the kernel for texts of one shape together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Cache(Protocol):
    """One forward pass over new tokens of many texts."""

    def attention(self, layer: int, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`kernel` for new tokens of all texts: q: [t, 1, n, d], k: [t, 1, g, d], v: [t, 1, g, dv]; returns [t, 1, n * dv].

        layer: global number of the layer. Where v is the beginning of k, as in latent attention, k alone is stored.
        """

    def memory(self, layer: object, make: Callable[[], Tensor]) -> Tensor:
        """Return what a cross-attention layer computes from the encoder's output, [s, b, ...];

        made in the first pass and kept.
        """

    def for_logits(self, x: Tensor) -> Tensor:
        """The hidden states whose logits are asked for. x: [t, 1, h]; returns [w, 1, h]."""
