"""T5 against the published ones of transformers (v1.0 and v1.1): logits and gradients; and its stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.model import PositionConfig
from megatron.core.models.t5 import T5Model
from megatron.core.parallel.spec import param_spec_of
from megatron.core.transformer.relative import relative_position_buckets
from tests.helpers import tiny

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
ENCODER, DECODER = 3, 2
SHARED: dict[str, Any] = {
    "position_embedding_type": "relative",
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "add_bias_linear": False,
    "softmax_scale": 1.0,
    "kv_channels": 6,
}
VERSIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "v1.0": ({"relu": True, "scale_tied_logits": True}, {"feed_forward_proj": "relu", "tie_word_embeddings": True}),
    "v1.1": (
        {"geglu": True, "openai_gelu": True, "untie_embeddings_and_output_weights": True},
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}
SPLITS = {
    "whole": {},
    "pp5": {"pipeline_model_parallel_size": 5},
    "mixed": {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 2},
    "late": {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 4},
    "ends": {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "E|ttt|tt|L"},
}


def stages(**changes: Any) -> list[T5Model]:
    """All stages of a model in one process."""
    settings = {
        "architecture": "t5",
        "num_layers": None,
        "encoder_num_layers": ENCODER,
        "decoder_num_layers": DECODER,
        "fp64": True,
        "decoder_seq_length": 8,
        "ffn_hidden_size": 48,
        **changes,
    }
    run = tiny.run_of(tiny.config(int(settings.get("pipeline_model_parallel_size", 1)), **settings))
    models = [T5Model(spec, run.layer_build_context).materialize(3) for spec in stage_specs_of_run(run.config)]
    with torch.no_grad():
        for param in (param for model in models for param in model.parameters() if param.dim() == 1):
            generator = torch.Generator().manual_seed(len(param_spec_of(param).name))
            param.add_(torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype) * 0.1)
    return models


def given() -> dict[str, Tensor]:
    """A batch with rows of uneven length; labels are apart."""
    random = torch.Generator().manual_seed(1)
    draw = lambda length: torch.randint(1, tiny.VOCABULARY, (3, length), generator=random)  # noqa: E731
    return {
        "encoder_ids": draw(16),
        "decoder_ids": draw(8),
        "encoder_padding": torch.arange(16) < torch.tensor([16, 5, 11])[:, None],
    }


LABELS = torch.randint(0, tiny.VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(2))


def through(models: list[T5Model], batch: dict[str, Tensor], labels: Tensor | None = None) -> Tensor:
    """The batch through a line of stages."""
    message = None
    for model in models:
        message = model(**batch, message=message, labels=labels)
    return message


def as_published(ours: Mapping[str, Tensor], gated: bool, tied: bool) -> dict[str, Tensor]:
    """Our tensors under transformers' names."""
    found = {"shared.weight": ours["embedding.word_embeddings.weight"][: tiny.VOCABULARY]}
    if not tied:
        found["lm_head.weight"] = ours["output_layer.weight"][: tiny.VOCABULARY]
    for half, depth in (("encoder", ENCODER), ("decoder", DECODER)):
        found[f"{half}.final_layer_norm.weight"] = ours[f"{half}.final_layernorm.weight"]
        found[f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = ours[
            f"{half}_relative_pos_emb.relative_attention_bias.weight"
        ]
        for layer in range(depth):
            here, there = f"{half}.layers.{layer}", f"{half}.block.{layer}.layer"
            last = 1 if half == "encoder" else 2
            parts = dict(zip("qkv", ours[f"{here}.self_attention.linear_qkv.weight"].chunk(3)))
            parts["o"] = ours[f"{here}.self_attention.linear_proj.weight"]
            found |= {f"{there}.0.SelfAttention.{name}.weight": value for name, value in parts.items()}
            found[f"{there}.0.layer_norm.weight"] = ours[f"{here}.input_layernorm.weight"]
            found[f"{there}.{last}.layer_norm.weight"] = ours[f"{here}.pre_mlp_layernorm.weight"]
            wide = ours[f"{here}.mlp.linear_fc1.weight"]
            names = ("wi_0", "wi_1") if gated else ("wi",)
            found |= {
                f"{there}.{last}.DenseReluDense.{name}.weight": part
                for name, part in zip(names, wide.chunk(len(names)))
            }
            found[f"{there}.{last}.DenseReluDense.wo.weight"] = ours[f"{here}.mlp.linear_fc2.weight"]
            if half == "decoder":
                cross = dict(zip("kv", ours[f"{here}.cross_attention.linear_kv.weight"].chunk(2)))
                cross |= {
                    "q": ours[f"{here}.cross_attention.linear_q.weight"],
                    "o": ours[f"{here}.cross_attention.linear_proj.weight"],
                }
                found |= {f"{there}.1.EncDecAttention.{name}.weight": value for name, value in cross.items()}
                found[f"{there}.1.layer_norm.weight"] = ours[f"{here}.pre_cross_attn_layernorm.weight"]
    return found


@contextmanager
def taken_in_fp64() -> Iterator[None]:
    """Inside, the published model takes in fp64 what it otherwise takes in fp32."""
    module = transformers.models.t5.modeling_t5
    wide = ModuleType("torch")
    wide.__dict__.update({**torch.__dict__, "float32": torch.float64, "float": torch.float64})
    with patch.object(module, "torch", wide), patch.object(Tensor, "float", Tensor.double):
        yield


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("version", VERSIONS)
def test_logits_and_gradients_are_those_of_the_published_model(version: str, split: str) -> None:
    (mine, published), batch = VERSIONS[version], given()
    models = stages(**SHARED, **mine, **SPLITS[split])
    gated, tied = "geglu" in mine, "scale_tied_logits" in mine
    config = transformers.T5Config(
        vocab_size=tiny.VOCABULARY,
        d_model=32,
        d_kv=6,
        d_ff=48,
        num_layers=ENCODER,
        num_decoder_layers=DECODER,
        num_heads=8,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        dropout_rate=0.0,
        attn_implementation="eager",
        pad_token_id=None,
        **published,
    )
    with taken_in_fp64():
        theirs = transformers.T5ForConditionalGeneration(config).double()
        if not tied:  # the class ties whatever the config says, and leaves it to loading to untie
            theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
        values = {param_spec_of(param).name: param for model in models for param in model.parameters()}
        state = {name: value.detach().clone() for name, value in as_published(values, gated, tied).items()}
        lacking = theirs.load_state_dict(state, strict=False)
        assert not lacking.unexpected_keys and set(lacking.missing_keys) <= {
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "lm_head.weight",
        }, lacking
        logits = theirs(
            input_ids=batch["encoder_ids"],
            attention_mask=batch["encoder_padding"].long(),
            decoder_input_ids=batch["decoder_ids"],
        ).logits
        F.cross_entropy(logits.transpose(1, 2), LABELS).backward()
    found = through(models, batch)[..., : tiny.VOCABULARY].transpose(0, 1)
    torch.testing.assert_close(found, logits, rtol=1e-9, atol=1e-10)
    through(models, batch, LABELS).mean().backward()
    gradients: dict[str, Tensor] = {}
    for param in (param for model in models for param in model.parameters()):
        name = param_spec_of(param).name
        gradients[name] = gradients[name] + param.grad if name in gradients else param.grad
    expected = dict(theirs.named_parameters())
    for name, gradient in as_published(gradients, gated, tied).items():
        torch.testing.assert_close(
            gradient, expected[name].grad, rtol=1e-8, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count, distance", [(32, 128), (8, 20), (16, 512)])
def test_buckets_are_those_of_the_published_model(causal: bool, count: int, distance: int) -> None:
    offsets = torch.arange(-700, 701)
    attention = transformers.models.t5.modeling_t5.T5Attention
    expected = attention._relative_position_bucket(
        offsets, bidirectional=not causal, num_buckets=count, max_distance=distance
    )
    config = PositionConfig(relative_attention_num_buckets=count, relative_attention_max_distance=distance)
    assert torch.equal(relative_position_buckets(offsets, config, causal=causal), expected)


KINDS: dict[str, dict[str, Any]] = {
    "learned": {},
    "relative": SHARED,
    "rope": {"position_embedding_type": "rope", "swiglu": True},
}


@pytest.mark.parametrize("split", [name for name in SPLITS if name != "whole"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_line_of_stages_is_the_whole_network(kind: str, split: str) -> None:
    whole, parts, batch = stages(**KINDS[kind]), stages(**KINDS[kind], **SPLITS[split]), given()
    expected, message = through(whole, batch, LABELS), None
    for part in parts:
        if message is not None:
            told = part.received_tensor_specs(
                tiny.config(5, architecture="t5", decoder_seq_length=8, micro_batch_size=3, global_batch_size=15).train
            )
            assert tuple((tuple(tensor.shape), tensor.dtype) for tensor in message) == told
        message = part(**batch, message=message, labels=LABELS)
    torch.testing.assert_close(message, expected, rtol=1e-12, atol=1e-12)
    names = lambda models: sorted({param_spec_of(param).name for model in models for param in model.parameters()})  # noqa: E731
    assert names(whole) == names(parts)


def test_names_are_megatrons() -> None:
    (model,) = stages(**SHARED, encoder_num_layers=1, decoder_num_layers=1)
    sublayers = (
        "input_layernorm",
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "pre_mlp_layernorm",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    )
    cross = (
        "pre_cross_attn_layernorm",
        "cross_attention.linear_q",
        "cross_attention.linear_kv",
        "cross_attention.linear_proj",
    )
    assert {name for name, _ in model.named_parameters()} == {
        "embedding.word_embeddings.weight",
        "encoder.final_layernorm.weight",
        "decoder.final_layernorm.weight",
        *(f"{half}_relative_pos_emb.relative_attention_bias.weight" for half in ("encoder", "decoder")),
        *(f"encoder.layers.0.{name}.weight" for name in sublayers),
        *(f"decoder.layers.0.{name}.weight" for name in (*sublayers, *cross)),
    }


def test_padding_of_the_text_changes_nothing_and_later_words_change_no_earlier_ones() -> None:
    (model,), batch = stages(**SHARED), given()
    before = through([model], batch)
    padded = torch.where(batch["encoder_padding"], batch["encoder_ids"], (batch["encoder_ids"] + 3) % tiny.VOCABULARY)
    assert torch.equal(through([model], {**batch, "encoder_ids": padded}), before)
    later = batch["decoder_ids"].clone()
    later[:, 5:] = (later[:, 5:] + 1) % tiny.VOCABULARY
    after = through([model], {**batch, "decoder_ids": later})
    assert torch.equal(after[:5], before[:5]) and not torch.equal(after[5:], before[5:])
