"""The next token from logits.

Which number is drawn for a token depends on the request's seed and the token's number alone: not on the batch, the rank, or
what was tried and taken back. A token is where that number falls in the running sum of the probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron.core.config.flags.declare import raise_config_error_if
from megatron.core.parallel.device import copy_arrays_to_device


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. temperature 0 or top_k 1: greedy. top_k 0, top_p 0 and min_p 0: no limit. min_p: excludes
    tokens less likely than this share of the likeliest. repetition_penalty: logits of tokens in the text are divided by
    it, or multiplied if negative (Keskar et al., 2019). presence_penalty, frequency_penalty: of the logits of tokens that
    were generated, once and for each time (OpenAI's). top_p_decay: factor of top_p after every token, 0 for none;
    top_p_bound: lower limit of that (Lee et al., 2022).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0

    def __post_init__(self) -> None:
        # Written so that a number that is none (NaN) breaks each rule.
        raise_config_error_if(
            (
                "" if self.temperature >= 0.0 else f"temperature {self.temperature} is negative; give 0 or more",
                "" if self.top_k >= 0 else f"top-k {self.top_k} is negative; give 0 or more",
                "" if 0.0 <= self.top_p <= 1.0 else f"top-p {self.top_p} is no probability; give a number from 0 to 1",
                "" if 0.0 <= self.min_p <= 1.0 else f"min-p {self.min_p} is no probability; give a number from 0 to 1",
                ""
                if self.repetition_penalty > 0.0
                else f"repetition penalty {self.repetition_penalty} is not positive; 1 is none",
                *(
                    ""
                    if -2.0 <= penalty <= 2.0
                    else f"{name} penalty {penalty} is not a number from -2 to 2; 0 is none"
                    for name, penalty in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty))
                ),
                "" if 0.0 <= self.top_p_decay <= 1.0 else f"top-p decay {self.top_p_decay} is no factor from 0 to 1",
                ""
                if 0.0 <= self.top_p_bound <= self.top_p or not self.top_p_bound
                else f"top-p bound {self.top_p_bound} is above top-p {self.top_p}; give a smaller one",
                ""
                if self.top_p or not (self.top_p_decay or self.top_p_bound)
                else "top-p decay and bound need a top-p",
            )
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def penalizes_generated(self) -> bool:
        """Whether logits depend on how often tokens were generated."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def depends_on_ids(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition_penalty != 1.0 or self.penalizes_generated

    def params_for_token(self, number: int) -> SamplingParams:
        """Return the parameters for a request's token of this number, from 0, with top_p decayed."""
        if not self.top_p_decay:
            return self
        return replace(
            self, top_p=max(self.top_p * self.top_p_decay**number, self.top_p_bound), top_p_decay=0.0, top_p_bound=0.0
        )


def sampling_probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the distribution to sample from. logits: [..., v] in fp32 or fp64, after penalties; returns [..., v].
    top_k keeps the k most likely tokens; top_p the fewest of them whose probabilities reach p (Holtzman et al., 2020).
    """
    if sampling.is_greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature  # never above 0, however cold
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < smallest, float("-inf"))
    probabilities = scaled.softmax(dim=-1)
    if 0.0 < sampling.top_p < 1.0:
        ordered, places = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(-1, places, ordered)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    if sampling.min_p > 0.0:
        probabilities = probabilities.masked_fill(
            probabilities < sampling.min_p * probabilities.amax(dim=-1, keepdim=True), 0.0
        )
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return probabilities


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Return the logits with those of the ids `seen` made less likely. logits: [v]; seen: [n]."""
    scores = logits[seen]
    return logits.index_copy(0, seen, torch.where(scores > 0, scores / penalty, scores * penalty))


def apply_presence_and_frequency_penalty(
    logits: Tensor, ids: Tensor, counts: Tensor, *, presence: float, frequency: float
) -> Tensor:
    """Return the logits lowered for each id by `presence`, and by `frequency` times its count. logits: [v]; ids: [n],
    different ones; counts: [n], above 0.
    """
    return logits.index_add(0, ids, -(presence + frequency * counts.to(logits.dtype)))


def uniform_random(seed: int, number: int) -> float:
    """Return a number in [0, 1) for a request's token: Philox (Salmon et al., 2011) keyed by seed and number."""
    key = np.array((seed % 2**64, number), np.uint64)
    # So far below 1 that no product rounds up to 1.
    return (int(np.random.Philox(key=key).random_raw()) >> 12) * 2.0**-52


def sample_by_uniform_numbers(logits: Tensor, settings: Sequence[SamplingParams], numbers: Sequence[float]) -> Tensor:
    """Return for each row the token at which the cumulative probability passes its number; -1 if the row's largest
    logit is not finite. logits: [w, v] after penalties; numbers: [w] in [0, 1). Returns [w].
    """
    rows: dict[SamplingParams, list[int]] = {}
    for row, sampling in enumerate(settings):
        rows.setdefault(sampling, []).append(row)
    best, tokens = logits.max(dim=-1)
    for sampling, mine in rows.items():
        if not sampling.is_greedy:
            (places,) = copy_arrays_to_device([np.array(mine, np.int64)], logits.device)
            (drawn,) = copy_arrays_to_device([np.array([numbers[row] for row in mine])], logits.device)
            # fp64: in fp32 the running sum over a large vocabulary stops short of rare tokens
            sums = sampling_probabilities(logits[places], sampling).double().cumsum(dim=-1)
            tokens[places] = torch.searchsorted(sums, drawn[:, None] * sums[:, -1:], right=True)[:, 0]
    return tokens.masked_fill(~best.isfinite(), -1)


def draw_tokens(logits: Tensor, sampling: SamplingParams, generator: torch.Generator | None = None) -> Tensor:
    """Sample one token of each row. logits: [b, v]; returns [b]."""
    return torch.multinomial(sampling_probabilities(logits, sampling), 1, generator=generator)[:, 0]
