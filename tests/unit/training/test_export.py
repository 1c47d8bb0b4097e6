"""Exported folders as transformers reads them: texts end where the network learnt to end them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.tokenizers.build import build_tokenizer
from megatron.training.checkpoint.export import export_hf_with_tokenizer, hf_config_special_token_ids
from tests.helpers.architecture import ROOT
from tests.unit.families.made import GPT2, LLAMA, Made

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
DATA = ROOT / "examples/data"
# Llama's config says by itself that 1 begins a text and 2 ends it, and GPT-2's that 50256 does both: wrong for any other tokenizer.
PAIR = {
    "tokenizer_type": "GPT2BPETokenizer",
    "vocab_file": str(DATA / "demo-vocab.json"),
    "merge_file": str(DATA / "demo-merges.txt"),
}
PIECES = {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(DATA / "demo-llama.model")}


@pytest.mark.parametrize("network", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(
    "tokenizer",
    [PAIR, PIECES, {"tokenizer_type": "NullTokenizer", "vocab_size": 8000}],
    ids=lambda tokenizer: tokenizer["tokenizer_type"],
)
def test_an_exported_network_ends_texts_where_it_learnt_to(
    tmp_path: Path, network: dict[str, Any], tokenizer: dict[str, Any]
) -> None:
    ours = build_tokenizer(TokenizerConfig(**tokenizer))
    export_hf_with_tokenizer(Made({**network, **tokenizer, "true_vocab_size": ours.vocab_size}), tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    for found in (config, generation):
        assert (found.bos_token_id, found.eos_token_id) == (ours.bos, ours.eod)


@pytest.mark.parametrize(
    "tokenizer",
    [
        PAIR,
        PIECES,
        {**PIECES, "tokenizer_type": "GPTSentencePieceTokenizer"},
        {"tokenizer_type": "BertWordPieceLowerCase", "vocab_file": str(DATA / "demo-bert-vocab.txt")},
    ],
    ids=lambda tokenizer: tokenizer["tokenizer_type"],
)
def test_an_exported_folder_holds_the_tokenizer_that_transformers_reads(
    tmp_path: Path, tokenizer: dict[str, Any]
) -> None:
    ours = build_tokenizer(TokenizerConfig(**tokenizer))
    source = Made({**LLAMA, **tokenizer, "true_vocab_size": ours.vocab_size})
    _, said = export_hf_with_tokenizer(source, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "The whale's 12 boats, and  the Sea.\nCall me Ishmael"
    # A BERT's tokenizer puts [CLS] and [SEP] around a text there; the datasets do it here.
    assert theirs.encode(text, add_special_tokens=tokenizer["tokenizer_type"][:4] != "Bert") == ours.tokenize(text)
    assert said.startswith("tokenizer files ")


def test_a_tokenizer_that_transformers_cannot_read_is_said_to_be_missing(tmp_path: Path) -> None:
    source = Made({**LLAMA, "tokenizer_type": "NullTokenizer", "vocab_size": 8000})
    assert export_hf_with_tokenizer(source, tmp_path / "out")[1].startswith("no tokenizer files")


def test_ids_of_a_folder_that_is_like_it_win_over_the_runs_tokenizer(tmp_path: Path) -> None:
    like, source = tmp_path / "like", Made({**LLAMA, **PAIR})
    like.mkdir()
    (like / "config.json").write_text(
        json.dumps({"model_type": "llama", "eos_token_id": [5, 6], "bos_token_id": 4}), encoding="utf-8"
    )
    export_hf_with_tokenizer(source, tmp_path / "out", like=like, family="llama")
    for name in ("config.json", "generation_config.json"):
        found = json.loads((tmp_path / "out" / name).read_text())
        assert (found["bos_token_id"], found["eos_token_id"]) == (4, [5, 6])
    (like / "generation_config.json").write_text('{"eos_token_id": 9}', encoding="utf-8")
    export_hf_with_tokenizer(source, tmp_path / "again", like=like, family="llama")
    assert (tmp_path / "again" / "generation_config.json").read_text() == '{"eos_token_id": 9}'


def test_without_the_tokenizers_files_nothing_is_said_of_its_ids(tmp_path: Path) -> None:
    export_hf_with_tokenizer(
        Made({**LLAMA, "tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(tmp_path / "gone")}),
        tmp_path / "out",
    )
    assert "eos_token_id" not in json.loads((tmp_path / "out/config.json").read_text())
    assert not (tmp_path / "out/generation_config.json").exists()


def test_what_begins_a_t5s_answer_is_said_and_a_bert_has_none() -> None:
    words = {"tokenizer_type": "BertWordPieceLowerCase", "vocab_file": str(DATA / "demo-bert-vocab.txt")}
    ours = build_tokenizer(TokenizerConfig(**words))
    assert hf_config_special_token_ids({**words, "architecture": "t5"}, None, rows=ours.vocab_size) == {
        "bos_token_id": ours.bos,
        "eos_token_id": ours.eod,
        "decoder_start_token_id": ours.bos,
        "pad_token_id": ours.pad,
    }
    assert hf_config_special_token_ids({**words, "architecture": "bert"}, None, rows=ours.vocab_size) == {}
