"""QK-clip: weights of queries and keys shrink where a head's scores grew too large (MuonClip; Kimi Team, 2025).

During a step every attention keeps the largest score of each of its heads. After the update, the query rows of a head whose
score S passed the threshold t are multiplied by (t / S)^alpha, and its key rows by (t / S)^(1 - alpha), so that the score
would have been t. Heads that share a key head shrink together, by the largest of their scores.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megatron.core.kernels.mask import MaskSpec
from megatron.core.kernels.reference import largest_scores
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import spec_of


class MaxScoreTracker:
    """The largest score of each head that this rank computes, since last asked."""

    def __init__(self) -> None:
        self._largest: Tensor | None = None

    @torch.no_grad()
    def update(self, q: Tensor, k: Tensor, mask: MaskSpec, scale: float | None) -> None:
        """Raise the largest score of each head to those of these queries and keys: of the pairs that the mask allows, over the whole batch.

        q: [queries, b, n/tp, d]; k: [keys, b, g/tp, d]; scale: of the scores, None for 1/sqrt(d).
        """
        scores = largest_scores(q, k, mask, scale)
        self._largest = scores if self._largest is None else torch.maximum(self._largest, scores)

    def pop(self, heads: int, device: torch.device) -> Tensor:
        """[heads] in fp32 or wider, -inf where nothing was seen; forgets them."""
        largest, self._largest = self._largest, None
        return torch.full((heads,), float("-inf"), device=device) if largest is None else largest


@runtime_checkable
class ClippableAttention(Protocol):
    """An attention that can be clipped."""

    peaks: MaxScoreTracker | None
    heads: int

    def qk_clip_factors(self, shrink: Tensor, alpha: float) -> dict[nn.Parameter, Tensor]:
        """The factor of every row of its parameters that shrink, [rows]. shrink: t / S of all heads of the network, at most 1."""


def clip_factors(modules: Iterable[nn.Module], mesh: Mesh, *, threshold: float, alpha: float) -> dict[str, Tensor]:
    """Return for each parameter, by global name, the factor of each of its local rows, [rows]; then reset the largest
    scores.

    The scores of a step are those of all its microbatches, over all ranks that share a layer.
    """
    clipped = [
        (module, module.peaks)
        for module in modules
        if isinstance(module, ClippableAttention) and module.peaks is not None
    ]
    if not clipped:
        return {}
    own = torch.stack([peaks.pop(layer.heads, mesh.device).to(torch.float64) for layer, peaks in clipped], dim=1)
    # Tensor ranks hold other heads of the same layers, data and context ranks the same heads of other tokens.
    largest = collectives.all_gather(collectives.all_reduce(own, mesh.dp_cp, "max"), mesh.tp)
    factors: dict[str, Tensor] = {}
    for (layer, _), shrink in zip(clipped, (threshold / largest.clamp(min=threshold)).unbind(1), strict=True):
        factors |= {spec_of(param).name: rows for param, rows in layer.qk_clip_factors(shrink, alpha).items()}
    return factors
