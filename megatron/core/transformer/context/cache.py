"""What decoding puts between the layers of a stage and their attention.

A forward pass over texts whose beginnings have been computed before brings only their new tokens, [t, 1, h], end to end. The
cache gives attention the signature that it always has: it stores the new keys and values, finds the old ones, and runs
the kernel for texts of one shape together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class MixerState:
    """What a mixer has to know of a text's beginning. conv: [width - 1, b, c/tp], its last inputs; scan: [b, n/tp, .., ..], in fp32 or wider."""

    conv: Tensor
    scan: Tensor


# parts [s, b, ...] and a state to [s, b, ...] and the next
Mix = Callable[[list[Tensor], MixerState], tuple[Tensor, MixerState]]


@runtime_checkable
class StatefulMixer(Protocol):
    """A sequence mixer whose past is a state of constant size: every module with `initial_state`."""

    def initial_state(self, batch: int) -> MixerState:
        """Return the state of `batch` sequences of which no token has been processed (zeros)."""


class DecodingCache(Protocol):
    """The cached keys, values and states that a forward pass over new tokens of sequences reads and extends."""

    def wrap_attention_kernel(self, layer: int, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `kernel` wrapped so that it stores the new keys and values and attends to the cached ones too.

        The result takes q: [t, 1, n, d], k: [t, 1, g, d], v: [t, 1, g, dv] of the new tokens of all sequences and
        returns [t, 1, n * dv]. layer: global index. If v is the beginning of k, as in latent attention, only k is
        stored.
        """

    def run_from_states(self, mixer: StatefulMixer, parts: Sequence[Tensor], mix: Mix) -> Tensor:
        """Run `mix` on the new tokens of each sequence from its state, and store the state that it ends with.

        parts: arguments of `mix`, each [t, 1, ...]. Returns the outputs of all tokens, [t, 1, ...].
        """

    def cached_cross_attention_kv(self, layer: object, make: Callable[[], Tensor]) -> Tensor:
        """Return the keys and values [s, b, ...] of cross-attention module `layer`: `make()` at first, then stored."""

    def select_logit_states(self, x: Tensor) -> Tensor:
        """Return the hidden states of the tokens whose logits are needed, [w, 1, h]. x: [t, 1, h]."""
