"""The entropy over a vocabulary that is cut over ranks is torch's, and so are its gradients; nothing of vocabulary size is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.parallel.mesh import Axis
from megatron.core.tensor_parallel import entropy
from megatron.core.tensor_parallel.region import TensorParallelRegion
from tests.helpers.world import Worlds
from tests.unit.tensor_parallel import ranks
from tests.unit.tensor_parallel.ranks import B, H, S, V, data


def expected(padded: int, softcap: float | None) -> tuple[Tensor, ...]:
    """torch's entropy of a categorical distribution with a temperature of 0.7."""
    states, words, biases = data("states", S, B, H), data("words", padded, H), data("biases", padded)
    leaves = [one.clone().requires_grad_() for one in (states, words, biases)]
    logits = leaves[0] @ leaves[1].t() + leaves[2]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    found = torch.distributions.Categorical(logits=logits[..., :V] / 0.7).entropy()
    return found.detach(), *torch.autograd.grad((found * data("weights", S, B)).sum(), leaves)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    "tp, padded, sequence_parallel", [(1, V, False), (2, 24, False), (2, 24, True), (4, 64, False)]
)
def test_entropy_and_gradients_are_torchs_over_the_true_vocabulary(
    world: Worlds, monkeypatch: pytest.MonkeyPatch, tp: int, padded: int, sequence_parallel: bool, softcap: float | None
) -> None:
    monkeypatch.setattr(entropy, "_TOKENS", 7)  # several blocks, on one rank
    arguments = (tp, padded, sequence_parallel, softcap)
    results = [ranks.run_entropy(*arguments)] if tp == 1 else world(tp).run(ranks.run_entropy, *arguments)
    values, *gradients = expected(padded, softcap)
    for found, of_states, _, _ in results:
        torch.testing.assert_close(found, values, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_states, gradients[0], rtol=1e-11, atol=1e-12)
    for place in (2, 3):
        whole = torch.cat([result[place] for result in results])
        torch.testing.assert_close(whole, gradients[place - 1], rtol=1e-11, atol=1e-12)


def test_nothing_of_the_size_of_the_vocabulary_is_kept() -> None:
    states, words = torch.randn(2048, 1, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = entropy.fused_linear_entropy(
            states, words, None, region=TensorParallelRegion(Axis("tp")), true_vocab_size=1000
        )
    assert found.shape == (2048, 1) and max(tensor.numel() for tensor in kept) <= 2048 * 4
