from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel.spec import param_spec_of
from tests.helpers import tiny

EMBEDDING = "embedding.word_embeddings.weight"


def stages(**changes: Any) -> list[GPTModel]:
    """All stages of a model in one process; only tensor size one is possible here."""
    run = tiny.run_of(tiny.config(int(changes.get("pipeline_model_parallel_size", 1)), **changes))
    return [GPTModel(spec, run.layer_build_context).materialize(3) for spec in stage_specs_of_run(run.config)]


def named(models: list[GPTModel]) -> dict[str, torch.Tensor]:
    return {param_spec_of(param).name: param.detach() for model in models for param in model.parameters()}


@pytest.mark.parametrize(
    "split",
    [
        {"pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 4},
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
        {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "E|tt|tt|L"},
    ],
)
@pytest.mark.parametrize("untied", [False, True])
def test_names_and_initial_values_do_not_depend_on_the_split(split: dict[str, Any], untied: bool) -> None:
    whole = named(stages(untie_embeddings_and_output_weights=untied))
    parts = stages(untie_embeddings_and_output_weights=untied, **split)
    cut = named(parts)
    assert cut.keys() == whole.keys() and all(torch.equal(cut[name], whole[name]) for name in whole)
    homes = [
        param_spec_of(param)
        for model in parts
        for param in model.parameters()
        if param_spec_of(param).name == EMBEDDING
    ]
    assert len(homes) == (1 if untied else 2) and all(spec.tied == (not untied) for spec in homes)
    assert ("output_layer.weight" in whole) == untied


def test_names_are_megatrons() -> None:
    assert set(named(stages(num_layers=1, qk_layernorm=True))) == {
        EMBEDDING,
        "embedding.position_embeddings.weight",
        "decoder.final_layernorm.weight",
        "decoder.final_layernorm.bias",
        *(
            f"decoder.layers.0.{name}.{kind}"
            for kind in ("weight", "bias")
            for name in (
                "input_layernorm",
                "pre_mlp_layernorm",
                "self_attention.linear_qkv",
                "self_attention.linear_proj",
                "self_attention.q_layernorm",
                "self_attention.k_layernorm",
                "mlp.linear_fc1",
                "mlp.linear_fc2",
            )
        ),
    }


def test_a_chain_of_stages_is_the_whole_network() -> None:
    run = tiny.run_of(tiny.config(fp64=True))
    batch = next(tiny.short_run_batches(run, 0))
    (whole,), parts = stages(fp64=True), stages(fp64=True, pipeline_model_parallel_size=4)
    hidden = None
    for part in parts:
        received, hidden = hidden, part(ids=batch.tokens, hidden=hidden, labels=batch.labels)
        if received is not None:
            assert (tuple(received.shape), received.dtype) == part.hidden_states_spec(*batch.tokens.shape)
    torch.testing.assert_close(hidden, whole(ids=batch.tokens, labels=batch.labels), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "changes, dtype",
    [
        ({}, torch.float32),
        ({"bf16": True}, torch.bfloat16),
        ({"fp64": True}, torch.float64),
        ({"bf16": True, "fp32_residual_connection": True}, torch.float32),
    ],
)
def test_messages_have_the_format_of_the_residual(changes: dict[str, Any], dtype: torch.dtype) -> None:
    first = stages(pipeline_model_parallel_size=2, **changes)[0]
    sent = first(ids=torch.zeros(3, 16, dtype=torch.int64))
    assert (tuple(sent.shape), sent.dtype) == first.hidden_states_spec(3, 16) == ((16, 3, 32), dtype)


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    (model,) = stages(fp64=True)
    batch = next(tiny.short_run_batches(tiny.run_of(tiny.config(fp64=True)), 0))
    logits = model(ids=batch.tokens)[..., : tiny.VOCABULARY]
    expected = F.cross_entropy(logits.permute(1, 2, 0), batch.labels, reduction="none")
    torch.testing.assert_close(model(ids=batch.tokens, labels=batch.labels), expected, rtol=1e-12, atol=1e-12)


def test_no_position_looks_ahead() -> None:
    (model,) = stages(fp64=True, position_embedding_type="rope")
    ids = torch.randint(0, tiny.VOCABULARY, (2, 16))
    changed = ids.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % tiny.VOCABULARY
    before, after = model(ids=ids), model(ids=changed)
    assert torch.equal(before[:10], after[:10]) and not torch.allclose(before[10:], after[10:])


@pytest.mark.parametrize("kind", ["learned_absolute", "rope"])
def test_packed_documents_are_what_they_are_alone(kind: str) -> None:
    (model,) = stages(fp64=True, position_embedding_type=kind)
    ids = torch.randint(0, tiny.VOCABULARY, (1, 16))
    documents, positions = torch.tensor([[0] * 6 + [1] * 10]), torch.tensor([[*range(6), *range(10)]])
    packed = model(ids=ids, documents=documents, positions=positions)
    torch.testing.assert_close(packed[:6], model(ids=ids[:, :6]), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(packed[6:], model(ids=ids[:, 6:]), rtol=1e-11, atol=1e-11)


def test_initial_deviations_are_those_of_the_flags() -> None:
    found = named(
        stages(num_layers=2, hidden_size=128, ffn_hidden_size=512, init_method_std=0.04, embedding_init_method_std=0.3)
    )
    for name, deviation in {
        EMBEDDING: 0.3,
        "embedding.position_embeddings.weight": 0.3,
        "decoder.layers.1.mlp.linear_fc1.weight": 0.04,
        "decoder.layers.1.self_attention.linear_qkv.weight": 0.04,
        "decoder.layers.1.mlp.linear_fc2.weight": 0.02,
        "decoder.layers.1.self_attention.linear_proj.weight": 0.02,
    }.items():
        value = found[name][: tiny.VOCABULARY]
        assert value.std().item() == pytest.approx(deviation, rel=0.05), name
