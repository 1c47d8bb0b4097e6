"""What one forward pass is given and what it returns: plain data, which the first rank sends to all others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.inference.cache import SequenceSpan
from megatron.inference.recurrent_states import StateReadWriteSlots
from megatron.inference.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingState:
    """How the next tokens of a sequence are sampled.

    first: number of the first of them, which selects its random number. seen: ids that the repetition penalty applies to.
    generated: ids that the penalties by presence and frequency count.
    after: (id, id) pairs of which the second is never sampled after the first.
    """

    sampling: SamplingParams
    seed: int
    first: int
    seen: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    after: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of a prompt. images: float32 [n, channels, height, width], normalized. slots: for each token of the
    prompt the index of the image embedding that replaces it, -1 for text. digest: hash of the images.
    """

    images: np.ndarray
    slots: tuple[int, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """New tokens of one sequence. start: position of the first of them. blocks: its block table in the KV cache.
    num_logits: number of last positions whose logits are computed. targets: known next tokens at the first of these, to
    be scored; at the others a token is sampled as `sampling_state` says. scored: whether log-probabilities are
    returned, with those of the `top` likeliest tokens. temperature: divides the logits before these log-probabilities.
    adapter: number of the sequence's adapter, 0 for none. awaits: the only id is known on the device only, as the token
    of this index sampled by the step before. images: of its prompt, if embeddings of them are among its new tokens.
    states: slots of its recurrent states.
    """

    ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    num_logits: int = 0
    targets: tuple[int, ...] = ()
    sampling_state: SamplingState | None = None
    scored: bool = False
    top: int = 0
    temperature: float = 1.0
    adapter: int = 0
    awaits: int | None = None
    images: PromptImages | None = None
    states: StateReadWriteSlots = StateReadWriteSlots()

    @property
    def image_slots(self) -> tuple[int, ...]:
        """The index of the image embedding at each of the new tokens, -1 for none."""
        given = () if self.images is None else self.images.slots[self.start : self.start + len(self.ids)]
        return (*given, *(-1 for _ in range(len(self.ids) - len(given))))

    @property
    def num_sampled(self) -> int:
        """Number of tokens to sample."""
        return self.num_logits - len(self.targets)

    @property
    def cache_span(self) -> SequenceSpan:
        """Its new tokens and blocks, as the KV cache takes them."""
        return SequenceSpan(len(self.ids), self.start, self.blocks)


@dataclass(frozen=True, slots=True)
class SequenceStepOutput:
    """Next tokens at a sequence's positions with logits: ids (targets first), and log-probabilities if requested.
    routes: experts of each of its new tokens in all MoE layers, if the engine records them.
    """

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    routes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class StepInput:
    """One forward pass of one network. network: its index in the runner. rows: of each data-parallel replica.
    depth: the depth of multi-token prediction to run, whose ids are so many positions ahead of `start`; 0: the network.
    """

    network: int
    rows: tuple[tuple[SequenceInput, ...], ...]
    depth: int = 0
