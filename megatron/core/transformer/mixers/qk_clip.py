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

from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.kernels.ops.reference import max_attention_scores
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import param_spec_of


class MaxAttentionScoreTracker:
    """Tracks the largest attention score of each local head, from one `pop` to the next (for QK-clip)."""

    def __init__(self) -> None:
        self._largest: Tensor | None = None

    @torch.no_grad()
    def update(self, q: Tensor, k: Tensor, mask: AttentionMaskSpec, scale: float | None) -> None:
        """Update the maxima by scores of these queries and keys: pairs that the mask allows, over the whole batch.

        q: [queries, b, n/tp, d]; k: [keys, b, g/tp, d]; scale: of the scores, None for 1/sqrt(d).
        """
        scores = max_attention_scores(q, k, mask, scale)
        self._largest = scores if self._largest is None else torch.maximum(self._largest, scores)

    def pop(self, heads: int, device: torch.device) -> Tensor:
        """Return and reset the largest score of each local head, [heads], in fp32 or wider; -inf without updates."""
        largest, self._largest = self._largest, None
        return torch.full((heads,), float("-inf"), device=device) if largest is None else largest


@runtime_checkable
class QKClipAttention(Protocol):
    """An attention module whose query and key weights QK-clip can shrink."""

    peaks: MaxAttentionScoreTracker | None
    heads: int

    def qk_clip_weight_factors(self, shrink: Tensor, alpha: float) -> dict[nn.Parameter, Tensor]:
        """Return for each of its parameters that shrinks the factor of every local row, [rows].

        shrink: t / S of all heads of the network, [n], at most 1; alpha: share of the factor that queries take.
        """


def qk_clip_row_factors(
    modules: Iterable[nn.Module], mesh: Mesh, *, threshold: float, alpha: float
) -> dict[str, Tensor]:
    """Return for each clipped parameter, by global name, the factor of each local row, [rows]; resets the maxima.

    The maxima are over all microbatches since the last call and all ranks that share a layer (collective). Empty
    without QK-clip.
    """
    clipped = [
        (module, module.peaks) for module in modules if isinstance(module, QKClipAttention) and module.peaks is not None
    ]
    if not clipped:
        return {}
    own = torch.stack([peaks.pop(layer.heads, mesh.device).to(torch.float64) for layer, peaks in clipped], dim=1)
    # Tensor ranks hold other heads of the same layers, data and context ranks the same heads of other tokens.
    largest = collectives.all_gather(collectives.all_reduce(own, mesh.dp_cp, "max"), mesh.tp)
    factors: dict[str, Tensor] = {}
    for (layer, _), shrink in zip(clipped, (threshold / largest.clamp(min=threshold)).unbind(1), strict=True):
        factors |= {
            param_spec_of(param).name: rows for param, rows in layer.qk_clip_weight_factors(shrink, alpha).items()
        }
    return factors
