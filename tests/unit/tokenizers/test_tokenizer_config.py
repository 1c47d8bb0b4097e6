"""The files beside a tokenizer.json: ids and texts are those of transformers' AutoTokenizer, or the file is refused by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from megatron.core.config.flags.declare import ConfigError
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from tests.helpers.tokenizer_kinds import built, byte_level, llama_decoder

TEXTS = (
    "a b",
    " a  the b",
    "don't , he 's .",
    "x<s>y </s> z",
    "a <new> b",
    "<x y>!",
    "\u00e9 \U0001f600",
    "The A",
    "<img>a",
)
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def word_pieces(lowercase: bool = True) -> Tokenizer:
    """A small BERT."""
    words = ["[UNK]", "<s>", "</s>", "a", "b", "the", "##e", "'", "s", "don", "t", ".", ",", "he", "The", "A", "x"]
    library = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer, library.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
    library.add_special_tokens(["<s>", "</s>"])
    return library


def framed() -> Tokenizer:
    """Texts begin and end with special tokens."""
    library = byte_level()
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(name, library.token_to_id(name)) for name in ("<s>", "</s>")]
    )
    return library


def pieces() -> Tokenizer:
    return built(llama_decoder(decoders.Strip(" ", 1, 0)), byte_tokens=True)


def unigram() -> Tokenizer:
    """T5's kind."""
    library = Tokenizer(
        models.Unigram(
            [
                ("<unk>", 0.0),
                ("<s>", 0.0),
                ("</s>", 0.0),
                *((word, -1.0) for word in "\u2581 \u2581a a b the ' s . , e".split()),
            ],
            unk_id=0,
        )
    )
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    library.add_special_tokens(["<s>", "</s>"])
    return library


LIBRARIES = {"bytes": byte_level, "frame": framed, "pieces": pieces, "words": word_pieces, "unigram": unigram}


def folder_of(where: Path, library: Tokenizer, config: dict[str, Any], **files: Any) -> Path:
    library.save(str(where / "tokenizer.json"))
    (where / "tokenizer_config.json").write_text(json.dumps({**NAMES, **config}), encoding="utf-8")
    for name, content in files.items():
        (where / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return where


def compare_with_transformers(folder: Path) -> None:
    """Ids with and without names of special tokens as tokens, and the text of all ids, one by one and together."""
    ours, theirs = HuggingFaceTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert (ours.bos, ours.eos, ours.pad) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    for text in TEXTS:
        ids = theirs(text, split_special_tokens=True).input_ids
        assert ours.tokenize(text) == ids, text
        marked = theirs(text, add_special_tokens=False).input_ids
        if not theirs.split_special_tokens:
            assert ours.tokenize_with_special(text) == marked, text
        for some in (ids, marked):
            assert ours.detokenize(some) == theirs.decode(some), (text, some)


SAID: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bos and eos": {"add_bos_token": True, "add_eos_token": True},
    "neither": {"add_bos_token": False, "add_eos_token": False},
    "a prefix space": {"add_prefix_space": True},
    "legacy": {"legacy": False, "sp_model_kwargs": {}, "use_default_system_prompt": True},
    "cleaned": {"clean_up_tokenization_spaces": True},
    "cleaned by force": {
        "clean_up_tokenization_spaces": True,
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
    },
    "not cleaned": {"clean_up_tokenization_spaces": False},
    "batches": {"model_max_length": 3, "padding_side": "left", "truncation_side": "left", "pad_token": "</s>"},
    "names with flags": {"eos_token": {"content": "</s>", "lstrip": False, "rstrip": False, "normalized": False, "__type": "AddedToken"}},
    "an ordinary token": {"eos_token": "a"},
    "more names": {"additional_special_tokens": ["a"], "image_token": "b"},
    "a dictionary of names": {"extra_special_tokens": {"image_token": "b"}},
    "errors": {"errors": "replace"},
    "no new rule": {"fix_mistral_regex": False},
}  # fmt: skip


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", SAID)
def test_each_setting_gives_the_ids_and_texts_of_transformers(tmp_path: Path, library: str, name: str) -> None:
    compare_with_transformers(folder_of(tmp_path, LIBRARIES[library](), SAID[name]))


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_a_file_counts_where_the_class_of_llama_builds_other_parts(tmp_path: Path, kind: str) -> None:
    """transformers 5 does not read the normalizer of Llama 2's tokenizer.json; SentencePiece and transformers 4 put a space
    before every text, whatever it begins with or stands behind.
    """
    library = pieces()
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    folder = folder_of(tmp_path, library, {"tokenizer_class": "PreTrainedTokenizerFast"})
    compare_with_transformers(folder)
    mine = [HuggingFaceTokenizer(folder).tokenize_with_special(text) for text in TEXTS]
    folder_of(tmp_path, library, {"tokenizer_class": kind, "legacy": False})
    ours, theirs = HuggingFaceTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert [ours.tokenize_with_special(text) for text in TEXTS] == mine
    others = {text for text, ids in zip(TEXTS, mine) if theirs(text, add_special_tokens=False).input_ids != ids}
    assert others == {" a  the b", "x<s>y </s> z"}, "docs/data.md says which texts have other ids there"


@pytest.mark.parametrize("library", ["bytes", "pieces", "words"])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"lstrip": True},
        {"rstrip": True},
        {"single_word": True},
        {"normalized": True},
        {"special": False},
        {"lstrip": True, "rstrip": True},
    ],
    ids=str,
)
def test_flags_of_added_tokens_are_those_of_the_config(tmp_path: Path, library: str, flags: dict[str, bool]) -> None:
    made = LIBRARIES[library]()
    ends, new = made.token_to_id("</s>"), made.get_vocab_size()
    decoder = {
        str(ends): {"content": "</s>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True, **flags},
        str(new): {"content": "<new>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True, **flags},
    }  # fmt: skip
    compare_with_transformers(folder_of(tmp_path, made, {"added_tokens_decoder": decoder}))


def test_older_files_of_names_and_added_tokens_count_where_the_config_lists_none(tmp_path: Path) -> None:
    made = byte_level()
    new = made.get_vocab_size()
    folder = folder_of(
        tmp_path,
        made,
        {},
        special_tokens_map={"eos_token": "<s>", "pad_token": {"content": "</s>", "lstrip": True, "rstrip": False}},
        added_tokens={"<new>": new, "</s>": made.token_to_id("</s>")},
    )
    compare_with_transformers(folder)
    listed = {str(made.token_to_id("<s>")): {"content": "<s>", "special": True}}
    compare_with_transformers(folder_of(tmp_path, made, {"added_tokens_decoder": listed}))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "split": ({"split_special_tokens": True}, "split_special_tokens: True"),
    "a new rule": ({"fix_mistral_regex": True}, "fix_mistral_regex: True"),
    "errors": ({"errors": "ignore"}, "errors: 'ignore'"),
    "a stranger": ({"src_lang": "deu_Latn"}, "src_lang: 'deu_Latn' is unknown here and may change ids or texts"),
    "dropout": ({"dropout": 0.1}, "dropout: 0.1"),
    "gpt-2 with a space": ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, "add_prefix_space: True"),
    "another id": ({"added_tokens_decoder": {"7": {"content": "<new>"}}}, "'<new>' has the id 7"),
    "no token": ({"added_tokens_decoder": {"x": 3}}, "is not an id and a token"),
    "flags": ({"added_tokens_decoder": {"7": {"content": "a", "lstrip": 1}}}, "is not an id and a token"),
    "no name": ({"image_token": "<img>"}, "names '<img>' as a special token"),
    "no text": ({"clean_up_tokenization_spaces": "yes"}, "clean_up_tokenization_spaces: 'yes'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_ids_or_texts_is_refused_by_name(tmp_path: Path, name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        HuggingFaceTokenizer(folder_of(tmp_path, byte_level(), config))


def test_a_bert_whose_class_overrules_its_file_is_refused(tmp_path: Path) -> None:
    cased = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    with pytest.raises(ConfigError, match="do_lower_case: False of the class BertTokenizer overrules True"):
        HuggingFaceTokenizer(folder_of(tmp_path, word_pieces(), cased))
    HuggingFaceTokenizer(folder_of(tmp_path, word_pieces(lowercase=False), cased))
    compare_with_transformers(
        folder_of(tmp_path, word_pieces(), {**cased, "tokenizer_class": "PreTrainedTokenizerFast"})
    )


@pytest.mark.parametrize(
    "change, message",
    [({"new_part": {"type": "x"}}, "new_part: .* is unknown here"), ({"model": 3}, "it has no model")],
)
def test_parts_of_tokenizer_json_that_nobody_knows_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    parsed = {**json.loads(byte_level().to_str()), **change}
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        HuggingFaceTokenizer(tmp_path)


def test_a_model_that_encodes_at_random_is_refused(tmp_path: Path) -> None:
    parsed = json.loads(byte_level().to_str())
    parsed["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed), encoding="utf-8")
    with pytest.raises(ConfigError, match="model.dropout: 0.1 encodes a text otherwise each time"):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize("form", ["a text", "a list", "an object", "a file", "a file of several"])
def test_a_chat_template_in_every_form_is_that_of_transformers(tmp_path: Path, form: str) -> None:
    template, other = "{{ messages[0].content }}", "{{ 1 }}"
    several = {"default": template, "tool_use": other}
    config: dict[str, Any] = {
        "a text": {"chat_template": template},
        "a list": {"chat_template": [{"name": name, "template": text} for name, text in several.items()]},
        "an object": {"chat_template": several},
    }.get(form, {"chat_template": other})
    folder = folder_of(tmp_path, byte_level(), config)
    if form == "a file":
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if form == "a file of several":
        (folder / "additional_chat_templates").mkdir()
        for name, text in several.items():
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text, encoding="utf-8")
    assert (
        HuggingFaceTokenizer(folder).chat_template
        == AutoTokenizer.from_pretrained(folder).get_chat_template()
        == template
    )
