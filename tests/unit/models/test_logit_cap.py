"""--final-logit-softcap: on logits and on the loss alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.models.gpt import GPTModel
from tests.helpers import tiny


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_losses_are_those_of_capped_logits(tied: bool) -> None:
    plain, capped = (
        tiny.config(fp64=True, untie_embeddings_and_output_weights=not tied, final_logit_softcap=cap)
        for cap in (None, 0.7)
    )
    ids = torch.randint(0, tiny.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(1, 1)
    models = [
        GPTModel(stage_specs_of_run(config)[0], tiny.run_of(config).layer_build_context).materialize(3)
        for config in (plain, capped)
    ]
    expected = 0.7 * torch.tanh(models[0](ids=ids) / 0.7)
    torch.testing.assert_close(models[1](ids=ids), expected, rtol=1e-12, atol=1e-12)
    words = expected[..., : tiny.VOCABULARY].permute(1, 2, 0)  # padded words take no part
    losses, truth = models[1](ids=ids, labels=labels), F.cross_entropy(words, labels, reduction="none")
    torch.testing.assert_close(losses, truth, rtol=1e-11, atol=1e-11)
    found, theirs = (
        torch.autograd.grad(loss.sum(), model.embedding.word_embeddings.weight)[0]
        for loss, model in ((losses, models[1]), (truth, models[0]))
    )
    torch.testing.assert_close(found, theirs, rtol=1e-10, atol=1e-11)
