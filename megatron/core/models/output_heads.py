"""Output heads: the language-model head with its loss, and BERT's masked-word transform and pooler."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.models.embedding import Embedding
from megatron.core.models.parameter_names import WORD_EMBEDDING
from megatron.core.parallel import collectives
from megatron.core.parallel.spec import (
    FusedWeightSegment,
    Initial,
    ParamSpec,
    ShardedDim,
    constant_initializer,
    meta_parameter,
)
from megatron.core.tensor_parallel.cross_entropy import fused_linear_cross_entropy, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.embedding import vocabulary_matrix_spec
from megatron.core.tensor_parallel.entropy import fused_linear_entropy
from megatron.core.tensor_parallel.linear import ReplicatedLinear, column_parallel_linear
from megatron.core.transformer.context.layer_build_context import LayerBuildContext, multiply_unless_one


def output_layer_weight(output_layer: nn.Module | None, embedding: Embedding | None) -> Tensor:
    """Return the matrix of the output layer [v/tp, h]: its own, or with tied embeddings that of the embedding."""
    weight = getattr(output_layer, "weight", None)
    if weight is None:
        assert output_layer is not None and embedding is not None, "only the last stage has an output layer"
        return embedding.word_embeddings.weight
    return weight


class LanguageModelHead(nn.Module):
    """Maps hidden states to logits over the vocabulary, or to the loss of every token.

    embedding: of this stage; with tied embeddings its matrix serves, and a stage without one has a tied copy.
    bias: add a bias for each word. temperature: divides the logits in the loss, as in sampling.
    even: every token that counts weighs the same in the loss. wants_entropy: `loss` also leaves the entropy of each token's distribution in
    `entropy`, [b, s]; it is overwritten by the next loss.
    """

    def __init__(self, build: LayerBuildContext, embedding: Embedding | None, *, bias: bool = False) -> None:
        super().__init__()
        model = build.model
        self.build, self.temperature, self.even = build, 1.0, True
        self.wants_entropy = False
        self.entropy: Tensor | None = None
        ties = model.ties_embeddings
        if not ties or embedding is None:
            init = build.embedding_init_method() if ties else build.init_method()
            spec = vocabulary_matrix_spec(model, init, tied=ties, name=WORD_EMBEDDING if ties else "")
            self.weight = meta_parameter(spec, build.mesh, build.dtype)
        vocabulary_shard = ShardedDim(
            0, "tp", (FusedWeightSegment(model.true_vocab_size, padded=model.padded_vocab_size),)
        )
        bias_spec = ParamSpec((model.true_vocab_size,), constant_initializer(0.0), "vector", (vocabulary_shard,))
        self.bias = meta_parameter(bias_spec, build.mesh, build.dtype) if bias else None
        tied = model.hidden_size**-0.5 if model.scale_tied_logits and model.ties_embeddings else 1.0
        self.scale = tied * model.multipliers.lm_head_multiplier

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss of every token [b, s], or without labels the logits [s, b, v/tp].

        x: [s or s/tp, b, h]; weight: [v/tp, h]; labels: [b, s]. Call the module rather than its methods, so that its
        hooks run.
        """
        return self.logits(x, weight) if labels is None else self.loss(x, weight, labels)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the logits [s, b, v/tp], including padded columns. x: [s or s/tp, b, h]; weight: [v/tp, h]."""
        cap = self.build.model.final_logit_softcap
        logits = column_parallel_linear(multiply_unless_one(x, self.scale), weight, self.bias, self.build.tp_region)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def loss(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of every token, [b, s]; with `wants_entropy` also set `entropy`.

        x: [s or s/tp, b, h]; weight: [v/tp, h]; labels: [b, s], below 0 for tokens to ignore.
        """
        build, targets, kernel = self.build, labels.t().contiguous(), self.build.kernels.cross_entropy
        if self.wants_entropy:
            self.entropy = self._token_entropies(x, weight)
        if kernel is None or self.temperature != 1.0 and (build.model.final_logit_softcap or self.bias is not None):
            logits = self.logits(x, weight)
            logits = logits if self.temperature == 1.0 else logits / self.temperature
            return vocab_parallel_cross_entropy(logits, targets, build.mesh.tp, build.model.true_vocab_size).t()
        x = multiply_unless_one(x, self.scale / self.temperature)
        return fused_linear_cross_entropy(
            partial(kernel, even=self.even),
            x,
            weight,
            self.bias,
            targets,
            region=build.tp_region,
            softcap=build.model.final_logit_softcap,
            true_vocab_size=build.model.true_vocab_size,
        ).t()

    def _token_entropies(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return each token's entropy, [b, s], at the temperature. x: [s or s/tp, b, h]; weight: [v/tp, h]."""
        return fused_linear_entropy(
            multiply_unless_one(x, self.scale),
            weight,
            self.bias,
            region=self.build.tp_region,
            true_vocab_size=self.build.model.true_vocab_size,
            softcap=self.build.model.final_logit_softcap,
            factor=1.0 / self.temperature,
        ).t()


class ScalarHead(ReplicatedLinear):
    """Linear layer from hidden states to one number for each token: a value, or the score of the text up to there."""

    def __init__(self, build: LayerBuildContext, *, init: Initial, bias: bool) -> None:
        super().__init__(
            build.model.hidden_size,
            1,
            init=init,
            mesh=build.mesh,
            dtype=build.dtype,
            sum_over=build.tp_region.gradient_sum_axes,
            bias=bias,
        )
        self.region = build.tp_region

    def forward(self, x: Tensor) -> Tensor:
        """Return one number for each token, [b, s], the same on all tensor ranks. x: [s or s/tp, b, h]."""
        values = super().forward(x.to(self.weight.dtype))
        if self.region.sequence_parallel:
            values = collectives.gather_with_split_backward(values, self.region.axis)
        return values[..., 0].t()


class MaskedLMHeadTransform(nn.Module):
    """BERT's transform of hidden states before the output layer: norm(gelu(dense(x)))."""

    def __init__(self, build: LayerBuildContext) -> None:
        super().__init__()
        self.build, size = build, build.model.hidden_size
        self.dense = build.make_replicated_linear(size, size, sum_over=build.tp_region.gradient_sum_axes)
        self.layer_norm = build.make_norm(size)
        self.act = "gelu_tanh" if build.model.openai_gelu else "gelu"

    def forward(self, x: Tensor) -> Tensor:
        """Transform hidden states. x: [s or s/tp, b, h]; returns the same shape."""
        return self.layer_norm(self.build.kernels.activation(self.dense(x.to(self.dense.weight.dtype)), self.act))


class Pooler(nn.Module):
    """BERT's pooler: tanh(dense(x)) of the first position of each sample."""

    def __init__(self, build: LayerBuildContext) -> None:
        super().__init__()
        self.region, size = build.tp_region, build.model.hidden_size
        self.dense = build.make_replicated_linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Pool hidden states. x: [s or s/tp, b, h]; returns [b, h] on every rank."""
        return self.dense(self.region.replicate_first_position(x).to(self.dense.weight.dtype)).tanh()
