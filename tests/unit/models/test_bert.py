"""BERT against the published one of transformers: logits and gradients; and its stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.models.bert import BERTModel
from megatron.core.parallel.spec import param_spec_of
from megatron.training.state.batch import Batch
from pretrain_bert import mlm_and_pair_loss
from tests.helpers import tiny

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
PUBLISHED: dict[str, Any] = {"norm_after_residual": True, "embedding_layernorm": True, "norm_epsilon": 1e-12}
LAYERS = 3


def stages(**changes: Any) -> list[BERTModel]:
    """All stages of a model in one process, with biases and norms away from their first values."""
    settings = {"architecture": "bert", "num_layers": LAYERS, "fp64": True, **changes}
    run = tiny.run_of(tiny.config(int(settings.get("pipeline_model_parallel_size", 1)), **settings))
    models = [BERTModel(spec, run.layer_build_context).materialize(3) for spec in stage_specs_of_run(run.config)]
    with torch.no_grad():
        for model in models:
            for param in model.parameters():
                if param.dim() == 1:
                    generator = torch.Generator().manual_seed(len(param_spec_of(param).name))
                    param.add_(torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype) * 0.1)
    return models


def batch(seed: int = 0) -> Batch:
    """Rows of uneven length."""
    random = torch.Generator().manual_seed(seed)
    shape = (4, 16)
    draw = lambda high: torch.randint(0, high, shape, generator=random)  # noqa: E731
    padding = torch.arange(16) < torch.tensor([16, 9, 3, 12])[:, None]
    hidden = (draw(4) == 0) & padding
    hidden[:, 0] = True
    return Batch(
        tokens=draw(tiny.VOCABULARY),
        labels=draw(tiny.VOCABULARY),
        loss_mask=hidden,
        extras={"types": draw(2), "padding_mask": padding, "is_random": torch.tensor([0, 1, 1, 0])},
    )


def through(models: list[BERTModel], given: Batch, labels: bool = False) -> Any:
    """The batch through a line of stages."""
    hidden = None
    for model in models:
        hidden = model(
            ids=given.tokens,
            types=given.extras["types"],
            hidden=hidden,
            padding=given.extras["padding_mask"],
            labels=given.labels if labels else None,
        )
    return hidden


def as_published(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under transformers' names."""
    pairs = {
        "bert.embeddings.position_embeddings.weight": "embedding.position_embeddings.weight",
        "bert.embeddings.token_type_embeddings.weight": "embedding.tokentype_embeddings.weight",
    }
    both = {
        "bert.embeddings.LayerNorm": "embedding.layernorm",
        "bert.pooler.dense": "pooler.dense",
        "cls.predictions.transform.dense": "lm_head.dense",
        "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
        "cls.seq_relationship": "binary_head",
    }
    for layer in range(LAYERS):
        there, here = f"bert.encoder.layer.{layer}", f"encoder.layers.{layer}"
        both |= {
            f"{there}.attention.output.dense": f"{here}.self_attention.linear_proj",
            f"{there}.attention.output.LayerNorm": f"{here}.post_attention_layernorm",
            f"{there}.intermediate.dense": f"{here}.mlp.linear_fc1",
            f"{there}.output.dense": f"{here}.mlp.linear_fc2",
            f"{there}.output.LayerNorm": f"{here}.post_mlp_layernorm",
        }
    pairs |= {f"{theirs}.{kind}": f"{mine}.{kind}" for theirs, mine in both.items() for kind in ("weight", "bias")}
    found = {theirs: ours[mine] for theirs, mine in pairs.items()}
    for layer in range(LAYERS):
        for kind in ("weight", "bias"):
            parts = ours[f"encoder.layers.{layer}.self_attention.linear_qkv.{kind}"].chunk(3)
            found |= {
                f"bert.encoder.layer.{layer}.attention.self.{name}.{kind}": part
                for name, part in zip(("query", "key", "value"), parts, strict=True)
            }
    found["bert.embeddings.word_embeddings.weight"] = ours["embedding.word_embeddings.weight"][: tiny.VOCABULARY]
    found["cls.predictions.bias"] = ours["output_layer.bias"][: tiny.VOCABULARY]
    return found


@pytest.mark.parametrize("split", [{}, {"pipeline_model_parallel_size": 3}])
def test_logits_and_gradients_are_those_of_the_published_model(split: dict[str, Any]) -> None:
    models, given = stages(**PUBLISHED, **split), batch()
    config = transformers.BertConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        intermediate_size=128,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
        pad_token_id=None,
    )
    theirs = transformers.BertForPreTraining(config).double()
    values = {param_spec_of(param).name: param for model in models for param in model.parameters()}
    state = {name: value.detach().clone() for name, value in as_published(values).items()}
    lacking = theirs.load_state_dict(state, strict=False)
    assert not lacking.unexpected_keys and all(
        "decoder" in name or "position_ids" in name for name in lacking.missing_keys
    )
    theirs.tie_weights()
    out = theirs(given.tokens, attention_mask=given.extras["padding_mask"].long(), token_type_ids=given.extras["types"])
    words, pairs = through(models, given)
    real = given.extras["padding_mask"]
    logits = words[..., : tiny.VOCABULARY].transpose(0, 1)
    torch.testing.assert_close(logits[real], out.prediction_logits[real], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(pairs, out.seq_relationship_logits, rtol=1e-10, atol=1e-10)
    hidden = F.cross_entropy(out.prediction_logits[given.loss_mask], given.labels[given.loss_mask])
    (hidden + F.cross_entropy(out.seq_relationship_logits, given.extras["is_random"])).backward()
    total, count, report = mlm_and_pair_loss(through(models, given, labels=True), given, per_token=False)
    assert float(report["lm loss"][0] / report["lm loss"][1]) == pytest.approx(hidden.item(), rel=1e-10)
    (total / count).backward()
    gradients: dict[str, Tensor] = {}
    for model in models:  # a tied matrix has two homes
        for param in model.parameters():
            name = param_spec_of(param).name
            gradients[name] = gradients[name] + param.grad if name in gradients else param.grad
    expected = dict(theirs.named_parameters())
    for name, found in as_published(gradients).items():
        torch.testing.assert_close(
            found, expected[name].grad, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_padded_token_changes_nothing_for_the_others() -> None:
    (model,), given = stages(), batch()
    words, pairs = through([model], given)
    other = Batch(
        tokens=torch.where(given.extras["padding_mask"], given.tokens, (given.tokens + 7) % tiny.VOCABULARY),
        extras=given.extras,
    )
    words_again, pairs_again = through([model], other)
    real = given.extras["padding_mask"].t()
    assert torch.equal(words[real], words_again[real]) and torch.equal(pairs, pairs_again)
    assert not torch.equal(words[~real], words_again[~real])


@pytest.mark.parametrize(
    "changes", [{}, PUBLISHED, {"bert_binary_head": False}, {"untie_embeddings_and_output_weights": True}]
)
def test_a_chain_of_stages_is_the_whole_network_with_megatrons_names(changes: dict[str, Any]) -> None:
    whole, parts, given = stages(**changes), stages(**changes, pipeline_model_parallel_size=3), batch()
    for found, expected in zip(through(parts, given), through(whole, given), strict=True):
        assert (
            (found is None) == (expected is None) == (changes.get("bert_binary_head", True) is False and found is None)
        )
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    names = {param_spec_of(param).name for model in whole for param in model.parameters()}
    assert names == {param_spec_of(param).name for model in parts for param in model.parameters()}
    if not changes:
        assert names == {
            "embedding.word_embeddings.weight",
            "embedding.position_embeddings.weight",
            "embedding.tokentype_embeddings.weight",
            "output_layer.bias",
            *(
                f"{name}.{kind}"
                for kind in ("weight", "bias")
                for name in (
                    "encoder.final_layernorm",
                    "lm_head.dense",
                    "lm_head.layer_norm",
                    "pooler.dense",
                    "binary_head",
                    *(
                        f"encoder.layers.{layer}.{part}"
                        for layer in range(LAYERS)
                        for part in (
                            "input_layernorm",
                            "self_attention.linear_qkv",
                            "self_attention.linear_proj",
                            "pre_mlp_layernorm",
                            "mlp.linear_fc1",
                            "mlp.linear_fc2",
                        )
                    ),
                )
            ),
        }


def test_the_loss_of_a_step_does_not_depend_on_its_cut_into_microbatches() -> None:
    (model,), given = stages(), batch()
    total, count, report = mlm_and_pair_loss(through([model], given, labels=True), given, per_token=True)
    parts = [
        Batch(
            **{name: getattr(given, name)[row : row + 1] for name in ("tokens", "labels", "loss_mask")},
            extras={name: value[row : row + 1] for name, value in given.extras.items()},
        )
        for row in range(4)
    ]
    losses = [mlm_and_pair_loss(through([model], part, labels=True), part, per_token=True) for part in parts]
    torch.testing.assert_close(sum(loss[0] for loss in losses), total, rtol=1e-12, atol=0.0)
    assert sum(int(loss[1]) for loss in losses) == int(count)
    for name in ("lm loss", "sop loss"):
        torch.testing.assert_close(sum(loss[2][name] for loss in losses), report[name], rtol=1e-12, atol=0.0)


def test_a_pair_weighs_as_much_as_the_hidden_words_of_its_sample() -> None:
    (model,), given = stages(), batch()
    total, count, _ = mlm_and_pair_loss(through([model], given, labels=True), given, per_token=True)
    words, pairs = through([model], given)
    terms = [
        F.cross_entropy(words[place, row, : tiny.VOCABULARY], given.labels[row, place])
        + F.cross_entropy(pairs[row], given.extras["is_random"][row])
        for row, place in given.loss_mask.nonzero().tolist()
    ]
    torch.testing.assert_close(total / count, torch.stack(terms).mean(), rtol=1e-12, atol=0.0)


def test_a_sample_without_hidden_words_has_no_part_in_the_loss() -> None:
    (model,), given = stages(), batch()
    mask = given.loss_mask.clone()
    mask[1] = False
    without = Batch(tokens=given.tokens, labels=given.labels, loss_mask=mask, extras=given.extras)
    report = mlm_and_pair_loss(through([model], without, labels=True), without, per_token=True)[2]
    assert report["sop loss"][1] == 3
