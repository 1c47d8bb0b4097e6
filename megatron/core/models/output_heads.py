"""What comes out of a network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.models.embedding import Embedding
from megatron.core.parallel.spec import FusedSegment, ParamSpec, Shard, constant, parameter
from megatron.core.tensor_parallel.embedding import vocabulary_spec
from megatron.core.tensor_parallel.linear import Linear, enter_linear
from megatron.core.tensor_parallel.loss import cross_entropy, linear_cross_entropy
from megatron.core.transformer.build import Build


def output_matrix(output_layer: nn.Module | None, embedding: Embedding | None) -> Tensor:
    """The matrix of the output layer [v/tp, h]: its own, or with tied embeddings that of the input."""
    own = getattr(output_layer, "weight", None)
    if own is None:
        assert output_layer is not None and embedding is not None, "only the last stage has an output layer"
        return embedding.word_embeddings.weight
    return own


class LanguageModelHead(nn.Module):
    """Hidden states to logits over the vocabulary, or to the loss of every token.

    shared: the embedding's matrix, when it lives on this stage; left out, the head makes its own, tied by name or not.
    bias: a number for each word, added to its logit. temperature: the loss is that of the logits over this, as text is sampled.
    """

    def __init__(self, build: Build, *, shared: nn.Parameter | None, tied_name: str, bias: bool = False) -> None:
        super().__init__()
        model = build.model
        self.build, self.temperature = build, 1.0
        if shared is None:
            spec = vocabulary_spec(
                model.true_vocab_size,
                model.padded_vocab_size,
                model.hidden_size,
                build.initial_embedding() if tied_name else build.initial(),
                tied=bool(tied_name),
                name=tied_name,
            )
            self.weight = parameter(spec, build.mesh, build.dtype)
        cut = Shard(0, "tp", (FusedSegment(model.true_vocab_size, padded=model.padded_vocab_size),))
        words = ParamSpec((model.true_vocab_size,), constant(0.0), "vector", (cut,))
        self.bias = parameter(words, build.mesh, build.dtype) if bias else None
        self.scale = model.hidden_size**-0.5 if model.scale_tied_logits and model.ties_embeddings else None

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss of every token, or the logits without labels. Called, not its parts, so that its hooks see it."""
        return self.logits(x, weight) if labels is None else self.loss(x, weight, labels)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """x: [s or s/tp, b, h]. Returns [s, b, v/tp], padded columns included."""
        cap = self.build.model.final_logit_softcap
        logits = enter_linear(x if self.scale is None else x * self.scale, weight, self.bias, self.build.region)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def loss(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """labels: [b, s], below 0 where a token takes no part. Returns the loss of every token, [b, s]."""
        build, targets, kernel = self.build, labels.t().contiguous(), self.build.kernels.cross_entropy
        if kernel is None or self.temperature != 1.0 and (build.model.final_logit_softcap or self.bias is not None):
            logits = self.logits(x, weight) / self.temperature
            return cross_entropy(logits, targets, build.mesh.tp, build.model.true_vocab_size).t()
        factor = (1.0 if self.scale is None else self.scale) / self.temperature
        x = x if factor == 1.0 else x * factor
        return linear_cross_entropy(
            kernel,
            x,
            weight,
            self.bias,
            targets,
            region=build.region,
            softcap=build.model.final_logit_softcap,
            true_vocab_size=build.model.true_vocab_size,
        ).t()


class MaskedWordTransform(nn.Module):
    """What BERT does to a hidden state before words are predicted from it: norm(gelu(dense(x)))."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.build, size = build, build.model.hidden_size
        self.dense = Linear(
            size, size, init=build.initial(), mesh=build.mesh, dtype=build.dtype, sum_over=build.region.outside_sums
        )
        self.layer_norm = build.norm(size)
        self.act = "gelu_tanh" if build.model.openai_gelu else "gelu"

    def forward(self, x: Tensor) -> Tensor:
        """x: [s or s/tp, b, h]. Returns the same shape."""
        return self.layer_norm(self.build.kernels.activation(self.dense(x.to(self.dense.weight.dtype)), self.act))


class Pooler(nn.Module):
    """One vector a sample: tanh(dense(x)) of its first position."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.region, size = build.region, build.model.hidden_size
        self.dense = Linear(size, size, init=build.initial(), mesh=build.mesh, dtype=build.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x: [s or s/tp, b, h]. Returns [b, h] on every rank."""
        return self.dense(self.region.first(x).to(self.dense.weight.dtype)).tanh()
