"""Folders of T5: v1.0 and v1.1, the two ways in which they are told apart, and what cannot be expressed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families import hf, hf_export
from megatron.core.families.registry import FAMILIES, family_of_config, fitting_family, lost_settings
from megatron.core.models.describe import global_parameter_shapes
from megatron.core.models.t5 import T5Model
from megatron.core.parallel.boxes import whole_box
from megatron.core.parallel.spec import param_spec_of
from tests.helpers import tiny
from tests.unit.families.made import Made, same_tensors
from tests.unit.families.test_hf import edit, rewrite

SHARED = {
    "architecture": "t5",
    "num_layers": 2,
    "decoder_num_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "kv_channels": 6,
    "ffn_hidden_size": 24,
    "true_vocab_size": 20,
    "max_position_embeddings": 512,
    "position_embedding_type": "relative",
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "add_bias_linear": False,
    "softmax_scale": 1.0,
}
FIRST = {**SHARED, "relu": True, "scale_tied_logits": True}
LATER = {**SHARED, "geglu": True, "openai_gelu": True, "untie_embeddings_and_output_weights": True}
TOKENS = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "output_past": True, "use_cache": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "T5 small": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "d_ff": 2048,
        "d_kv": 64,
        "d_model": 512,
        "dropout_rate": 0.1,
        "feed_forward_proj": "relu",
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "layer_norm_epsilon": 1e-06,
        "n_positions": 512,
        "num_decoder_layers": 6,
        "num_heads": 8,
        "num_layers": 6,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "task_specific_params": {"summarization": {"max_length": 200}},
        "vocab_size": 32128,
        **TOKENS,
    },
    "Flan T5 small": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "d_ff": 1024,
        "d_kv": 64,
        "d_model": 512,
        "dense_act_fn": "gelu_new",
        "dropout_rate": 0.1,
        "feed_forward_proj": "gated-gelu",
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "is_gated_act": True,
        "layer_norm_epsilon": 1e-06,
        "n_positions": 512,
        "num_decoder_layers": 8,
        "num_heads": 6,
        "num_layers": 8,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "tie_word_embeddings": False,
        "tokenizer_class": "T5Tokenizer",
        "vocab_size": 32128,
        **TOKENS,
    },
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "position_embedding_type": "relative",
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "decoder_num_layers": 2,
            "geglu": True,
        },
        {
            "untie_embeddings_and_output_weights": True,
            "add_qkv_bias": True,
            "add_bias_linear": False,
            "position_embedding_type": "rope",
        },
        {"group_query_attention": True, "num_query_groups": 2, "qk_layernorm": True},
    ],
)
def test_parameters_are_those_of_the_network(changes: dict[str, Any]) -> None:
    config = tiny.config(architecture="t5", decoder_seq_length=8, **changes)
    (stage,) = stage_specs_of_run(config)
    model = T5Model(stage, tiny.run_of(config).layer_build_context)
    assert {
        param_spec_of(param).name: param_spec_of(param).shape for param in model.parameters()
    } == global_parameter_shapes(config.model)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_read_and_comes_back_the_same(name: str) -> None:
    config = json.loads(json.dumps(CONFIGS[name]))
    settings, problems = FAMILIES["t5"].settings_from_config(config)
    assert problems == []
    model = model_config_from_settings(settings)
    back = {**FAMILIES["t5"].to_hf_config(model, config), "model_type": "t5"}
    assert back.pop("tie_word_embeddings") is config.pop("tie_word_embeddings", True)
    assert back == config
    assert lost_settings(model, FAMILIES["t5"]) == []


def test_sizes_of_a_published_config_become_the_settings_of_the_same_network() -> None:
    first, later = (
        model_config_from_settings(FAMILIES["t5"].settings_from_config(config)[0]) for config in CONFIGS.values()
    )
    assert (first.activation_name, first.has_gated_mlp, first.ties_embeddings, first.scale_tied_logits) == (
        "relu",
        False,
        True,
        True,
    )
    assert (later.activation_name, later.has_gated_mlp, later.ties_embeddings, later.scale_tied_logits) == (
        "gelu_tanh",
        True,
        False,
        False,
    )
    assert (
        later.encoder_num_layers,
        later.decoder_num_layers,
        later.num_attention_heads,
        later.query_projection_width,
    ) == (8, 8, 6, 384)
    assert (later.softmax_scale, later.normalization, later.norm_epsilon, later.add_bias_linear) == (
        1.0,
        "RMSNorm",
        1e-6,
        False,
    )


@pytest.mark.parametrize(
    "name, changes, complaint",
    [
        (
            "T5 small",
            {"feed_forward_proj": "gated-relu"},
            "feed_forward_proj: 'gated-relu' has no counterpart here; 'relu' or",
        ),
        ("Flan T5 small", {"dense_act_fn": "gelu"}, "dense_act_fn: 'gelu' has no counterpart here; 'gelu_new' has"),
        ("Flan T5 small", {"is_gated_act": False}, "is_gated_act: False has no counterpart here; True has"),
        (
            "Flan T5 small",
            {"scale_decoder_outputs": True},
            "tie_word_embeddings: False with scale_decoder_outputs: True",
        ),
        ("T5 small", {"is_encoder_decoder": False}, "is_encoder_decoder: False has no counterpart"),
        ("T5 small", {"num_heads": None}, "num_heads: nothing is not a positive whole number"),
        ("T5 small", {"local_radius": 127}, "local_radius: 127 is unknown here and may change the network"),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_the_key_and_its_value(
    name: str, changes: dict[str, Any], complaint: str
) -> None:
    config = {**CONFIGS[name], **changes}
    _, problems = family_of_config(config, name).settings_from_config(config)
    assert any(complaint in problem for problem in problems), problems


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"openai_gelu": False}, "--openai-gelu is False, there True"),
        ({"softmax_scale": None}, "--softmax-scale is None, there 1.0"),
        (
            {"position_embedding_type": "learned_absolute"},
            "--position-embedding-type is learned_absolute, there relative",
        ),
        ({"add_bias_linear": True}, "--add-bias-linear is True, there False"),
        ({"scale_tied_logits": True}, "--scale-tied-logits"),
    ],
)
def test_a_network_that_is_no_published_t5_is_refused_with_the_settings_that_are_lost(
    changes: dict[str, Any], word: str
) -> None:
    assert fitting_family(model_config_from_settings(LATER)).name == "t5"
    with pytest.raises(CheckpointError, match="t5 does not compute") as raised:
        fitting_family(model_config_from_settings({**LATER, **changes}), "t5")
    assert word in str(raised.value)


@pytest.mark.parametrize(
    "settings",
    [FIRST, LATER, {**FIRST, "scale_tied_logits": False}, {**SHARED, "swiglu": True, "scale_tied_logits": True}],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_what_is_read(settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    source = Made(settings, dtype)
    assert hf_export.export_hf_folder(source, tmp_path / "out").name == "t5"
    found = hf.open_hf_folder(tmp_path / "out")
    same_tensors(found, source)
    assert model_config_from_settings(found.settings) == model_config_from_settings({**settings, "num_query_groups": 4})


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """A folder of the later kind."""
    hf_export.export_hf_folder(Made(LATER), tmp_path / "t5")
    return tmp_path / "t5"


def test_folders_saved_later_are_told_apart_by_their_files(later: Path) -> None:
    """Which say tie_word_embeddings: true whatever they hold."""
    edit(later / "config.json", tie_word_embeddings=True, scale_decoder_outputs=False)
    found = hf.open_hf_folder(later)
    same_tensors(found, Made(LATER))
    assert found.settings["untie_embeddings_and_output_weights"] is True
    assert hf.hf_model_settings(later)["untie_embeddings_and_output_weights"] is True
    hf_export.export_hf_folder(found, later.with_name("back"))
    assert {path.name: path.read_bytes() for path in later.with_name("back").iterdir()}.keys() == {
        "config.json",
        "model.safetensors",
    }
    assert json.loads((later.with_name("back") / "config.json").read_text()) == json.loads(
        (later / "config.json").read_text()
    )
    rewrite(later / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    assert hf.open_hf_folder(later).settings["untie_embeddings_and_output_weights"] is False


def test_an_output_layer_of_its_own_where_the_config_says_that_there_is_none_is_refused(tmp_path: Path) -> None:
    hf_export.export_hf_folder(Made(FIRST), tmp_path / "t5")
    path = tmp_path / "t5" / "model.safetensors"
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": tensors["shared.weight"].clone()}))
    same_tensors(hf.open_hf_folder(tmp_path / "t5"), Made(FIRST))
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": tensors["shared.weight"] + 1}))
    with pytest.raises(
        CheckpointError, match="lm_head.weight differs from the embedding, shared.weight, and config.json says"
    ):
        hf.open_hf_folder(tmp_path / "t5")


def test_a_promised_output_layer_that_is_missing_is_named(later: Path) -> None:
    rewrite(later / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match="lm_head.weight is missing"):
        hf.open_hf_folder(later)


def test_the_embedding_by_its_other_names_and_a_table_that_nobody_reads_are_read(later: Path) -> None:
    def copies(tensors: dict[str, Tensor]) -> None:
        tensors |= {f"{half}.embed_tokens.weight": tensors["shared.weight"].clone() for half in ("encoder", "decoder")}
        tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(8, 4)

    edit(later / "config.json", architectures=["T5WithLMHeadModel"])
    rewrite(later / "model.safetensors", copies)
    same_tensors(hf.open_hf_folder(later), Made(LATER))
    rewrite(later / "model.safetensors", lambda tensors: tensors.pop("shared.weight"))
    same_tensors(hf.open_hf_folder(later), Made(LATER))
    rewrite(later / "model.safetensors", lambda tensors: tensors["decoder.embed_tokens.weight"].add_(1))
    with pytest.raises(CheckpointError, match="coder.embed_tokens.weight differs from the embedding, shared.weight,"):
        hf.open_hf_folder(later)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"num_decoder_layers": 4}, "decoder.block.3.layer.1.EncDecAttention.q.weight is missing"),
        ({"num_decoder_layers": 2}, "decoder.block.2.layer.0.SelfAttention.k.weight is unknown"),
        ({"num_decoder_layers": 2_000_000_000}, "too few for 2000000000 layers"),
        (
            {"relative_attention_num_buckets": 16},
            r"relative_attention_bias.weight has shape \[8, 4\], and the config says \[16, 4\]",
        ),
    ],
)
def test_a_folder_that_contradicts_its_config_is_refused(later: Path, changes: dict[str, Any], complaint: str) -> None:
    edit(later / "config.json", **changes)
    with pytest.raises(CheckpointError, match=complaint):
        hf.open_hf_folder(later)


def test_a_tokenizer_with_fewer_ids_takes_the_first_rows(later: Path) -> None:
    source, full = hf.open_hf_folder(later, {"true_vocab_size": 17}), Made(LATER)
    for name in ("model.embedding.word_embeddings.weight", "model.output_layer.weight"):
        assert torch.equal(source.read(name, whole_box((17, 16))), full.read(name, whole_box((17, 16))))
