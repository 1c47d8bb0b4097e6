"""Parameters and FLOPs of BERT and T5 from the config, against the networks themselves and torch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.models import flops
from megatron.core.models.describe import count_rank_parameters
from megatron.core.models.stage_model import StageModel
from megatron.core.parallel.spec import param_spec_of
from tests.helpers import tiny
from tests.parity.table import MODELS

KINDS = ("bert", "bert-published", "bert-words", "t5", "t5-v1.0", "t5-v1.1", "t5-rope")


def built(kind: str, **changes: Any) -> tuple[tiny.RunConfig, list[StageModel]]:
    """The config and the stages of a network, without memory."""
    settings = tiny.config(
        int(changes.get("pipeline_model_parallel_size", 1)), **MODELS[kind], **changes, attention_backend="unfused"
    )
    run = tiny.run_of(settings)
    return settings, [
        tiny.PROVIDERS[settings.model.architecture.name][0](run, spec) for spec in stage_specs_of_run(settings)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_counted_parameters_of_every_rank_are_those_of_its_stages(kind: str) -> None:
    settings, models = built(kind, pipeline_model_parallel_size=2, padded_vocab_size=tiny.VOCABULARY)
    specs = stage_specs_of_run(settings)
    for rank, model in enumerate(models):
        assert count_rank_parameters(settings.model, [specs[rank]]).total == sum(
            param.numel() for param in model.parameters()
        )
    (first, second) = flops.estimate_memory_by_pipeline_rank(settings, specs, data_parallel_size=1, num_microbatches=4)
    assert first.activations > 0 and second.activations > 0


@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_those_that_torch_counts(kind: str) -> None:
    settings, (model,) = built(kind, padded_vocab_size=tiny.VOCABULARY)
    model.materialize(1)
    batch, train = next(tiny.short_run_batches(tiny.run_of(settings), 0)), settings.train
    with FlopCounterMode(display=False) as counter:
        if settings.model.architecture.predicts_masked_words:
            model(
                ids=batch.tokens, types=batch.extras["types"], padding=batch.extras["padding_mask"].bool()
            ).words.sum().backward()
        else:
            model(encoder_ids=batch.tokens, decoder_ids=batch.extras["text_dec"], encoder_padding=None).sum().backward()
    expected = flops.flops_per_sample(
        settings.model, train.seq_length, "square", decoder_length=train.decoder_seq_length
    )
    # The pair head looks at one token, and no gradient goes back to ids: both are small, and not counted.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)
    assert {param_spec_of(param).name for param in model.parameters() if param.grad is None} <= {
        "pooler.dense.weight",
        "pooler.dense.bias",
        "binary_head.weight",
        "binary_head.bias",
    }


def test_causal_attention_is_half_in_a_decoder_only() -> None:
    bert, _ = built("bert")
    assert flops.flops_per_sample(bert.model, 16, "causal") == flops.flops_per_sample(bert.model, 16, "square")
    t5, _ = built("t5")
    gap = flops.flops_per_sample(t5.model, 16, "square", decoder_length=8) - flops.flops_per_sample(
        t5.model, 16, "causal", decoder_length=8
    )
    assert gap == 2 * 6 * 8 * 8 * t5.model.query_projection_width
