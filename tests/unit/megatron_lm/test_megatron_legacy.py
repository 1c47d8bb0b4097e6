"""Megatron's old format: every version, layout and naming gives the tensors that were sharded; what is damaged is named."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.parallel.boxes import Box, whole_box
from megatron.megatron_lm.checkpoint.arguments_to_settings import settings_of_megatron_args
from megatron.megatron_lm.checkpoint.export import write_legacy_checkpoint
from megatron.megatron_lm.checkpoint.folders import find_megatron_checkpoint
from megatron.megatron_lm.checkpoint.legacy import open_legacy_checkpoint
from megatron.megatron_lm.checkpoint.open import open_megatron_checkpoint
from tests.unit.megatron_lm.megatron_files import LOCAL, OLD, V2, V5, Whole

IDS = {"true_vocab_size": 10}


def contents(source: CheckpointSource) -> dict[str, Tensor]:
    """Everything in a source."""
    return {
        name.removeprefix("model."): source.read(name, whole_box(entry.shape)) for name, entry in source.formats.items()
    }


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names, same bits."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("names", "version", "tp", "pp", "vpp", "groups", "gated"),
    [
        (OLD, 0, 1, 1, 1, 4, False),
        (OLD, 0, 2, 1, 1, 4, False),
        (OLD, 1.0, 2, 2, 1, 4, False),
        (V2, 2.0, 2, 2, 1, 4, False),
        (V5, 3.0, 2, 1, 1, 4, True),
        (V2, 3.0, 2, 2, 2, 2, True),
        (LOCAL, 3.0, 1, 2, 2, 4, False),
        (LOCAL, 3.0, 2, 4, 1, 2, True),
    ],
)
def test_every_version_and_layout_gives_the_model_that_was_sharded(
    tmp_path: Path, names: dict[str, str], version: float, tp: int, pp: int, vpp: int, groups: int, gated: bool
) -> None:
    model = Whole(groups=groups, gated=gated)
    source = open_legacy_checkpoint(model.write(tmp_path, names, version=version, tp=tp, pp=pp, vpp=vpp), IDS)
    equal(contents(source), model.ours())
    assert {
        name: source.settings[name] for name in model.settings() if name != "num_query_groups"
    }.items() <= model.settings().items()


def test_files_from_before_torch_1_6_are_read(tmp_path: Path) -> None:
    model = Whole()
    equal(contents(open_legacy_checkpoint(model.write(tmp_path, OLD, version=0, old_file=True), IDS)), model.ours())


def test_a_release_without_arguments_has_the_published_head_size(tmp_path: Path) -> None:
    model = Whole(layers=1, heads=16, groups=16, size=64)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    model.write(tmp_path / "release", OLD, version=0, arguments=False)
    source = open_megatron_checkpoint(tmp_path, IDS)
    equal(contents(source), model.ours())
    assert source.settings["num_attention_heads"] == 16


def test_without_arguments_the_number_of_heads_must_be_given(tmp_path: Path) -> None:
    model = Whole()
    model.write(tmp_path, OLD, version=0, arguments=False)
    with pytest.raises(CheckpointError, match="--num-attention-heads"):
        open_legacy_checkpoint(tmp_path, IDS)
    equal(contents(open_legacy_checkpoint(tmp_path, {**IDS, "num_attention_heads": 4})), model.ours())


def test_a_box_is_that_part_of_the_whole(tmp_path: Path) -> None:
    model = Whole()
    source = open_legacy_checkpoint(model.write(tmp_path, V2, version=3.0, tp=2), IDS)
    box = Box((5, 2), (9, 3))
    found = source.read("model.decoder.layers.1.self_attention.linear_qkv.weight", box)
    assert torch.equal(found, model.ours()["decoder.layers.1.self_attention.linear_qkv.weight"][5:14, 2:5])


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    folder = Whole().write(tmp_path, V2, version=3.0, tp=2, pp=2)
    (folder / "mp_rank_01_000" / "model_optim_rng.pt").unlink()
    (folder / "mp_rank_01_000").rmdir()
    with pytest.raises(CheckpointError, match="tensor rank 1, pipeline rank 0 is missing"):
        open_legacy_checkpoint(folder, IDS)


def test_a_missing_last_rank_is_known_from_the_arguments(tmp_path: Path) -> None:
    folder = Whole().write(tmp_path, V2, version=3.0, tp=2)
    (folder / "mp_rank_01" / "model_optim_rng.pt").unlink()
    (folder / "mp_rank_01").rmdir()
    with pytest.raises(CheckpointError, match="tensor size 2, and there are files of 1 tensor ranks"):
        open_legacy_checkpoint(folder, IDS)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = Whole().write(tmp_path, V2, version=3.0) / "mp_rank_00" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match="mp_rank_00.*cannot be read"):
        open_legacy_checkpoint(tmp_path, IDS)


def test_a_null_tokenizer_had_an_id_more_before_it_could_be_told_its_end_of_document() -> None:
    older = {"tokenizer_type": "NullTokenizer", "vocab_size": 9}
    assert settings_of_megatron_args(older, {})["null_tokenizer_ids"] == 10
    assert settings_of_megatron_args({**older, "null_tokenizer_eod_id": None}, {})["null_tokenizer_ids"] == 9
    assert "null_tokenizer_ids" not in settings_of_megatron_args({**older, "tokenizer_type": "GPT2BPETokenizer"}, {})


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    folder = Whole().write(tmp_path, V2, version=3.0)
    with pytest.raises(CheckpointError, match="12 rows of word embeddings, fewer than the tokenizer's 13"):
        open_legacy_checkpoint(folder, {"true_vocab_size": 13})


@pytest.mark.parametrize(("tp", "pp", "fused"), [(1, 1, True), (2, 2, True), (2, 1, False)])
def test_what_is_written_is_read_back(tmp_path: Path, tp: int, pp: int, fused: bool) -> None:
    model = Whole(groups=2, gated=True)
    source = open_legacy_checkpoint(model.write(tmp_path / "in", LOCAL, version=3.0), IDS)
    written = write_legacy_checkpoint(
        source, tmp_path / "out", iteration=7, tensor_size=tp, pipeline_size=pp, fused_norms=fused
    )
    assert find_megatron_checkpoint(tmp_path / "out") == written
    equal(contents(open_megatron_checkpoint(tmp_path / "out", IDS)), model.ours())


def test_what_is_written_has_megatrons_rows(tmp_path: Path) -> None:
    model = Whole(groups=2, gated=True)
    source = open_legacy_checkpoint(model.write(tmp_path / "in", V2, version=3.0), IDS)
    write_legacy_checkpoint(source, tmp_path / "out", tensor_size=2, pipeline_size=2, fused_norms=False)
    file = tmp_path / "out" / "iter_0000000" / "mp_rank_01_001" / "model_optim_rng.pt"
    with torch.serialization.safe_globals([types.SimpleNamespace]):
        state = torch.load(file, weights_only=True)["model"]
    expected = model.stage(LOCAL, range(2, 4), version=3.0, rank=1, ranks=2, first=False, last=True)
    words = expected.pop("output_layer.weight"), state.pop("output_layer.weight")
    equal({name: tensor for name, tensor in state.items() if not name.endswith("._extra_state")}, expected)
    assert words[1].shape[0] == 128, "the vocabulary of 10 is padded to a multiple of 128 x 2"
    assert torch.equal(words[1][0], model.ours()["embedding.word_embeddings.weight"][-1]), (
        "padding is the last row again"
    )


def test_ranks_that_cannot_share_the_heads_are_refused(tmp_path: Path) -> None:
    source = open_legacy_checkpoint(Whole(groups=2).write(tmp_path / "in", V2, version=3.0), IDS)
    with pytest.raises(CheckpointError, match="2 key heads cannot be divided over 4 tensor ranks"):
        write_legacy_checkpoint(source, tmp_path / "out", tensor_size=4)
