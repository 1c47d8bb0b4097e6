"""The next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.config.flags import refuse


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 or top_k 1: the most likely token. top_k 0 and top_p 0: no limit."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0

    def __post_init__(self) -> None:
        refuse(filter(None, (
            "" if self.temperature >= 0.0 else f"temperature {self.temperature} is negative; give 0 or more",
            "" if self.top_k >= 0 else f"top-k {self.top_k} is negative; give 0 or more",
            "" if 0.0 <= self.top_p <= 1.0 else f"top-p {self.top_p} is no probability; give a number from 0 to 1")))


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution to draw from. logits: [..., v] in fp32; returns [..., v].

    top_k keeps the k most likely tokens; top_p the fewest whose probabilities reach p (Holtzman et al., 2020).
    """
    if sampling.temperature == 0.0 or sampling.top_k == 1:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    scaled = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < smallest, float("-inf"))
    found = scaled.softmax(dim=-1)
    if 0.0 < sampling.top_p < 1.0:
        ordered, places = found.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
        found = torch.zeros_like(found).scatter_(-1, places, ordered)
        found = found / found.sum(dim=-1, keepdim=True)
    return found


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """One token of each distribution. logits: [b, v]; returns [b]."""
    return torch.multinomial(probabilities(logits, sampling), 1, generator=generator)[:, 0]
