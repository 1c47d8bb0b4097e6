"""What decoding puts between the layers of a stage and their attention.

A forward pass over texts whose beginnings have been computed before brings only their new tokens, [t, 1, h], end to end. The
cache gives attention the signature that it always has: it stores the new keys and values, finds the old ones, and runs
the kernel for texts of one shape together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from megatron.core.transformer.state_space import MixerState

Mix = Callable[
    [list[Tensor], MixerState], tuple[Tensor, MixerState]
]  # parts [s, b, ...] and a state to [s, b, ...] and the next


class StatefulMixer(Protocol):
    """A mixer that knows of a text's beginning what a state of constant size holds."""

    def initial_state(self, batch: int) -> MixerState:
        """The state before a text, of so many texts."""


class Cache(Protocol):
    """One forward pass over new tokens of many texts."""

    def attention(self, layer: int, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`kernel` for new tokens of all texts: q: [t, 1, n, d], k: [t, 1, g, d], v: [t, 1, g, dv]; returns [t, 1, n * dv].

        layer: global number of the layer. Where v is the beginning of k, as in latent attention, k alone is stored.
        """

    def scan(self, mixer: StatefulMixer, parts: Sequence[Tensor], mix: Mix) -> Tensor:
        """What a mixer with a state makes of the new tokens of all texts, each from its own state, which goes on.

        parts: each [t, 1, ...], what `mix` takes. Returns [t, 1, ...].
        """

    def cross_attention_memory(self, layer: object, make: Callable[[], Tensor]) -> Tensor:
        """Return what a cross-attention layer computes from the encoder's output, [s, b, ...];

        made in the first pass and kept.
        """

    def select_logit_states(self, x: Tensor) -> Tensor:
        """The hidden states whose logits are asked for. x: [t, 1, h]; returns [w, 1, h]."""
