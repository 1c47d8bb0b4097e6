"""What comes out of a network."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.parallel.spec import parameter
from megatron.core.tensor_parallel.embedding import vocabulary_spec
from megatron.core.tensor_parallel.linear import enter_linear
from megatron.core.tensor_parallel.loss import cross_entropy
from megatron.core.transformer.build import Build


class LanguageModelHead(nn.Module):
    """Hidden states to logits over the vocabulary, or to the loss of every token.

    shared: the embedding's matrix, when it lives on this stage; left out, the head makes its own, tied by name or not.
    """

    def __init__(self, build: Build, *, shared: nn.Parameter | None, tied_name: str) -> None:
        super().__init__()
        model = build.model
        self.build = build
        if shared is None:
            spec = vocabulary_spec(
                model.true_vocab_size, model.padded_vocab_size, model.hidden_size,
                build.initial_embedding() if tied_name else build.initial(), tied=bool(tied_name), name=tied_name)
            self.weight = parameter(spec, build.mesh, build.dtype)

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss of every token, or the logits without labels. Called, not its parts, so that its hooks see it."""
        return self.logits(x, weight) if labels is None else self.loss(x, weight, labels)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """x: [s or s/tp, b, h]. Returns [s, b, v/tp], padded columns included."""
        return enter_linear(x, weight, None, self.build.region)

    def loss(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """labels: [b, s]. Returns the loss of every token, [b, s]."""
        logits = self.logits(x, weight)
        losses = cross_entropy(logits, labels.t().contiguous(), self.build.mesh.tp, self.build.model.true_vocab_size)
        return losses.t()
