"""The tokenizer of a published folder, of whatever files it has: ids as transformers gives them, or a clear demand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.families.tokenizer_files import tokenizer_settings_of_folder
from megatron.core.tokenizers.build import build_tokenizer
from tests.helpers.architecture import ROOT

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
DATA = ROOT / "examples/data"
TEXT = "The State of the Union, 1861: caf\u00e9 (whales)!"


def folder(place: Path, files: dict[str, str], **config: Any) -> Path:
    """Files of the demo tokenizers under the names that they have in a published folder."""
    for name, source in files.items():
        shutil.copyfile(DATA / source, place / name)
    if config:
        (place / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return place


PAIR = {"vocab.json": "demo-vocab.json", "merges.txt": "demo-merges.txt"}
WORDS = {"vocab.txt": "demo-bert-vocab.txt"}


@pytest.mark.parametrize(
    "files, config, theirs",
    [
        (PAIR, {}, "GPT2Tokenizer"),
        (PAIR, {"tokenizer_class": "GPT2TokenizerFast"}, "GPT2Tokenizer"),
        (WORDS, {}, "BertTokenizer"),
        (WORDS, {"tokenizer_class": "BertTokenizer", "do_lower_case": False}, "BertTokenizer"),
    ],
)
def test_vocabularies_without_a_tokenizer_json_give_the_ids_of_their_class(
    tmp_path: Path, files: dict[str, str], config: dict[str, Any], theirs: str
) -> None:
    place = folder(tmp_path, files, **config)
    ours = build_tokenizer(TokenizerConfig(**tokenizer_settings_of_folder(place)))
    expected = getattr(transformers, theirs).from_pretrained(
        place, **{"do_lower_case": True, **config} if files is WORDS else {}
    )
    assert ours.tokenize(TEXT) == expected(TEXT, add_special_tokens=False).input_ids


def test_a_sentencepiece_model_is_that_of_llama(tmp_path: Path) -> None:
    place = folder(tmp_path, {"tokenizer.model": "demo-llama.model"})
    ours = build_tokenizer(TokenizerConfig(**tokenizer_settings_of_folder(place)))
    assert type(ours).__name__ == "SentencePieceTokenizer" and ours.tokenize("whale")[0] == ours.bos


@pytest.mark.parametrize("begins", [True, False])
def test_a_begin_of_text_is_put_in_where_the_settings_say_so(tmp_path: Path, begins: bool) -> None:
    place = folder(
        tmp_path, {"tokenizer.model": "demo-llama.model"}, tokenizer_class="LlamaTokenizer", add_bos_token=begins
    )
    ours = build_tokenizer(TokenizerConfig(**tokenizer_settings_of_folder(place)))
    assert ours.tokenize("whale") == transformers.AutoTokenizer.from_pretrained(place)("whale").input_ids


@pytest.mark.parametrize(
    "files, config",
    [
        (PAIR, {"add_prefix_space": True}),
        (PAIR, {"add_bos_token": True}),
        (WORDS, {"strip_accents": False}),
        (WORDS, {"do_lower_case": False, "strip_accents": True}),
        (WORDS, {"tokenize_chinese_chars": False}),
        ({"tokenizer.model": "demo-llama.model"}, {"add_eos_token": True}),
        ({"tokenizer.model": "demo-llama.model"}, {"add_prefix_space": False}),
        ({"tokenizer.model": "demo-llama.model"}, {"sp_model_kwargs": {"enable_sampling": True}}),
    ],
)
def test_settings_of_older_files_that_change_ids_are_refused_by_name(
    tmp_path: Path, files: dict[str, str], config: dict[str, Any]
) -> None:
    *_, name = config
    with pytest.raises(ConfigError, match=f"{name}: .* has no counterpart here without a tokenizer.json"):
        tokenizer_settings_of_folder(folder(tmp_path, files, **config))


@pytest.mark.parametrize(
    "files, config",
    [
        (PAIR, {"tokenizer_class": "Qwen2Tokenizer"}),
        (WORDS, {"tokenizer_class": "MPNetTokenizer"}),
        ({"tokenizer.model": "demo-llama.model"}, {"tokenizer_class": "GemmaTokenizer"}),
    ],
)
def test_files_of_a_class_that_we_do_not_have_are_not_read_by_another_rule(
    tmp_path: Path, files: dict[str, str], config: dict[str, Any]
) -> None:
    found = tokenizer_settings_of_folder(folder(tmp_path, files, **config))
    assert found == {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path)}
    with pytest.raises(ConfigError, match="tokenizer.json cannot be read"):
        build_tokenizer(TokenizerConfig(**found))


def test_a_tokenizer_json_says_everything_and_a_folder_without_files_nothing(tmp_path: Path) -> None:
    assert tokenizer_settings_of_folder(tmp_path) == {}
    (folder(tmp_path, {**PAIR, **WORDS}) / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert tokenizer_settings_of_folder(tmp_path) == {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(tmp_path),
    }
