"""Megatron's own checkpoints of BERT, the published BERT-345M among them, are read; transformers computes the same with them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families import hf_export
from megatron.core.models.bert import BERTModel
from megatron.core.models.describe import global_parameter_shapes
from megatron.core.parallel.boxes import whole_box
from megatron.core.parallel.spec import param_spec_of
from megatron.megatron_lm.checkpoint.export import write_legacy_checkpoint
from megatron.megatron_lm.checkpoint.legacy import open_legacy_checkpoint
from megatron.megatron_lm.checkpoint.open import open_megatron_checkpoint
from tests.helpers import tiny
from tests.unit.families.made import Made, same_tensors
from tests.unit.megatron_lm.megatron_encoders import FIRST, LAST, PADDED, share, write
from tests.unit.megatron_lm.test_megatron_torch_dist import write as write_distributed

SETTINGS: dict[str, Any] = {
    "num_layers": 4,
    "encoder_num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
    "max_position_embeddings": 8,
}
BERT = {
    **{name: value for name, value in SETTINGS.items() if name != "encoder_num_layers"},
    "architecture": "bert",
    "true_vocab_size": 20,
}
IDS = {"true_vocab_size": 20}


def tensors_of(source: Made) -> dict[str, Tensor]:
    """Everything in it by our names."""
    return {
        name.removeprefix("model."): source.read(name, whole_box(one.shape)).clone()
        for name, one in source.formats.items()
    }


@pytest.mark.parametrize(
    ("age", "version", "tp", "pp"),
    [(FIRST, 0, 1, 1), (FIRST, 0, 2, 1), (FIRST, 1, 2, 2), (LAST, 2.0, 2, 2), (LAST, 3.0, 1, 4), (LAST, 3.0, 4, 1)],
)
def test_every_version_and_layout_gives_the_bert_that_was_sharded(
    tmp_path: Path, age: dict[str, str], version: float, tp: int, pp: int
) -> None:
    made = Made(BERT)
    source = open_legacy_checkpoint(
        write(tmp_path, tensors_of(made), SETTINGS, age=age, version=version, tp=tp, pp=pp), IDS
    )
    same_tensors(source, made)
    assert (source.settings["architecture"], source.settings["bert_binary_head"]) == ("bert", True)
    assert global_parameter_shapes(model_config_from_settings(source.settings)) == {
        name.removeprefix("model."): one.shape for name, one in made.formats.items()
    }


def test_a_bert_without_the_head_for_pairs_is_known_as_such(tmp_path: Path) -> None:
    made = Made({**BERT, "bert_binary_head": False})
    source = open_legacy_checkpoint(
        write(tmp_path, tensors_of(made), {**SETTINGS, "bert_binary_head": False}, age=LAST, version=3.0), IDS
    )
    same_tensors(source, made)
    assert source.settings["bert_binary_head"] is False


def test_without_a_tokenizer_the_rows_that_pad_the_vocabulary_count_as_ids(tmp_path: Path) -> None:
    source = open_legacy_checkpoint(write(tmp_path, tensors_of(Made(BERT)), SETTINGS, age=FIRST, version=0))
    assert {
        source.formats[f"model.{name}"].shape[0] for name in ("embedding.word_embeddings.weight", "output_layer.bias")
    } == {PADDED}


def test_a_release_without_arguments_has_the_published_sizes(tmp_path: Path) -> None:
    """BERT-345M has 16 heads, norms before the sublayers, none of the embeddings, and half precision."""
    made = Made(
        {**BERT, "num_layers": 1, "hidden_size": 1024, "num_attention_heads": 16, "ffn_hidden_size": 32}, torch.float16
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    write(
        tmp_path / "release",
        tensors_of(made),
        {"num_layers": 1, "num_attention_heads": 16},
        age=FIRST,
        version=0,
        arguments=False,
    )
    source = open_megatron_checkpoint(tmp_path, IDS)
    same_tensors(source, made)
    model = model_config_from_settings(source.settings)
    assert (
        model.num_attention_heads,
        model.max_position_embeddings,
        model.norm_after_residual,
        model.embedding_layernorm,
    ) == (16, 8, False, False)


def test_transformers_computes_the_same_with_what_is_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    write(tmp_path / "megatron", tensors_of(Made(BERT)), SETTINGS, age=FIRST, version=0, tp=2)
    source = open_megatron_checkpoint(tmp_path / "megatron", IDS)
    assert hf_export.export_hf_folder(source, tmp_path / "out").name == "megatron_bert"
    theirs = transformers.MegatronBertForPreTraining.from_pretrained(tmp_path / "out").eval()
    config = tiny.with_vocabulary(tiny.config(**{**source.settings, "seq_length": 8, "padded_vocab_size": PADDED}), 20)
    (stage,) = stage_specs_of_run(config)
    ours = BERTModel(stage, tiny.run_of(config).layer_build_context).materialize(1).eval()
    ids, padding = torch.arange(16).view(2, 8), torch.arange(8) < torch.tensor([[8], [5]])
    with torch.no_grad():
        for param in ours.parameters():
            shape = param_spec_of(param).shape
            param[tuple(slice(extent) for extent in shape)] = source.read(
                f"model.{param_spec_of(param).name}", whole_box(shape)
            )
        words, pairs = ours(ids=ids, types=ids % 2, padding=padding)
        expected = theirs(ids, attention_mask=padding.long(), token_type_ids=ids % 2)
    for found, value in (
        (words[..., :20].transpose(0, 1), expected.prediction_logits),
        (pairs, expected.seq_relationship_logits),
    ):
        assert float((found - value).abs().max()) <= 1e-5 * float(value.abs().max())


def test_a_bert_in_the_distributed_format_is_read(tmp_path: Path) -> None:
    made = Made(BERT)
    pieces = {
        name: [((0,) * tensor.dim(), share(name, tensor, version=3.0, heads=4, rank=0, ranks=1))]
        for name, tensor in tensors_of(made).items()
    }
    source = open_megatron_checkpoint(
        write_distributed(tmp_path, pieces, common={"args": argparse.Namespace(**SETTINGS)}), IDS
    )
    same_tensors(source, made)
    assert (source.settings["architecture"], source.settings["max_position_embeddings"]) == ("bert", 8)


@pytest.mark.parametrize(("tp", "pp", "fused"), [(1, 1, True), (2, 2, True), (2, 1, False)])
def test_what_is_written_is_read_back(tmp_path: Path, tp: int, pp: int, fused: bool) -> None:
    made = Made(BERT)
    write_legacy_checkpoint(made, tmp_path, iteration=7, tensor_size=tp, pipeline_size=pp, fused_norms=fused)
    same_tensors(open_megatron_checkpoint(tmp_path, IDS), made)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        (
            {"norm_after_residual": True, "embedding_layernorm": True},
            "--norm-after-residual: Megatron builds no such network",
        ),
        ({"architecture": "t5", "decoder_num_layers": 2}, "a T5 is read from Megatron's files, and not written"),
    ],
)
def test_networks_that_megatron_does_not_build_are_not_written(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        write_legacy_checkpoint(Made({**BERT, **changes}), tmp_path)
    assert not list(tmp_path.iterdir())
