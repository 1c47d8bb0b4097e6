"""Settings to tokenizer, the kinds without files, and the padding of the vocabulary."""

import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.flags.declare import ConfigError, flag_text
from megatron.core.config.settings.data import TokenizerConfig, resumed_null_vocab_size
from megatron.core.config.settings.model import ModelConfig
from megatron.core.tokenizers.base import add_prefix_and_suffix_ids, flatten_ids, tokenize_around_special
from megatron.core.tokenizers.build import (
    KINDS,
    ByteTokenizer,
    NullTokenizer,
    build_tokenizer,
    expected_vocab_size,
    settings_of_kind,
)


@pytest.mark.parametrize("text", ["", "Hello", "na\u00efve \u6771\u4eac \U0001f30d\n\x00"])
def test_bytes_are_ids(text):
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="ByteTokenizer"))
    assert bytes(tokenizer.tokenize(text)) == text.encode("utf-8")
    assert tokenizer.detokenize([*tokenizer.tokenize(text), tokenizer.eod]) == text
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (257, 256, None)


def test_cut_characters_of_bytes_become_replacement_characters():
    assert ByteTokenizer().detokenize([0xE6, 0x9D]) == "\ufffd"


def test_the_null_tokenizer_reads_numbers_and_ends_documents_with_the_last_of_its_ids():
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (100, 99, None)
    assert tokenizer.tokenize("5 0\n 98  99") == [5, 0, 98, 99]
    assert tokenizer.tokenize("") == []
    assert tokenizer.detokenize([5, 99]) == "5 99"


@pytest.mark.parametrize(
    "text, message", [("1 two", "two"), ("100", "id 100 is outside the vocabulary of 100"), ("-1", "id -1")]
)
def test_the_null_tokenizer_refuses_other_text(text, message):
    with pytest.raises(ValueError, match=message):
        NullTokenizer(100).tokenize(text)


@pytest.mark.parametrize("kind", [None, "MultimodalTokenizer", "gpt2bpetokenizer"])
def test_an_unknown_kind_names_the_known_ones(kind):
    with pytest.raises(ConfigError, match=f"--tokenizer-type.*choose one of {', '.join(KINDS)}"):
        build_tokenizer(TokenizerConfig(tokenizer_type=kind))


@pytest.mark.parametrize(
    "config, flag",
    [
        (TokenizerConfig(tokenizer_type="GPT2BPETokenizer", merge_file="m"), "--vocab-file"),
        (TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file="v"), "--merge-file"),
        *((TokenizerConfig(tokenizer_type=f"BertWordPiece{case}"), "--vocab-file") for case in ("Case", "LowerCase")),
        *(
            (TokenizerConfig(tokenizer_type=f"{name}Tokenizer"), "--tokenizer-model")
            for name in ("SentencePiece", "GPTSentencePiece", "Llama2", "HuggingFace")
        ),
        (TokenizerConfig(tokenizer_type="TikTokenizer"), "--tokenizer-model"),
        (TokenizerConfig(tokenizer_type="NullTokenizer"), "--vocab-size"),
        (TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=0), "--vocab-size"),
    ],
)
def test_what_a_kind_needs_is_named(config, flag):
    with pytest.raises(ConfigError, match=f"--tokenizer-type {config.tokenizer_type} needs {flag}"):
        build_tokenizer(config)


@pytest.mark.parametrize(
    "size, divisor, tp, rows",
    [(50257, 128, 1, 50304), (50257, 128, 8, 51200), (50304, 128, 1, 50304), (1, 128, 2, 256), (257, 1, 1, 257)],
)
def test_the_vocabulary_is_padded_to_what_the_ranks_divide(size, divisor, tp, rows):
    assert ModelConfig(make_vocab_size_divisible_by=divisor).with_vocabulary(size, tp).padded_vocab_size == rows


def test_settings_that_a_tokenizer_does_not_read_are_refused_together():
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9, tokenizer_model="m", vocab_file="v")
    with pytest.raises(ConfigError, match="(?s)--vocab-file v has no effect.*--tokenizer-model m has no effect"):
        build_tokenizer(config)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_which_settings_it_reads(kind):
    names = {field.name for field in fields(TokenizerConfig)} - {"tokenizer_type", "chat_template"}
    assert set(KINDS[kind].needs) <= settings_of_kind(kind) <= names
    unread = dict(
        vocab_file="v",
        merge_file="m",
        tokenizer_model="t",
        vocab_size=7,
        vocab_extra_ids=3,
        tiktoken_pattern="v1",
        tiktoken_num_special_tokens=9,
        tokenizer_special_tokens=("<s>",),
        tokenizer_hf_include_special_tokens=False,
        null_tokenizer_eod_id=1,
        null_tokenizer_pad_id=1,
    )
    assert unread.keys() == names
    for field in fields(TokenizerConfig):
        if (name := field.name) not in unread or name in settings_of_kind(kind):
            continue
        message = f"{flag_text(field, unread[name])} has no effect; give --tokenizer-type"
        with pytest.raises(ConfigError, match=re.escape(message)):
            build_tokenizer(TokenizerConfig(tokenizer_type=kind, **{name: unread[name]}))


def test_the_null_tokenizer_takes_other_ids_for_end_and_padding():
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10, null_tokenizer_eod_id=0, null_tokenizer_pad_id=9)
    )
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad, tokenizer.special_ids) == (10, 0, 9, (0,))
    with pytest.raises(ConfigError, match="ids below --vocab-size, from 0 to 9; not 10"):
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10, null_tokenizer_pad_id=10))
    assert (
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10, null_tokenizer_pad_id=-1)).pad
        is None
    )


def test_a_checkpoint_of_before_keeps_its_null_tokenizer_with_an_id_more():
    before = {"tokenizer_type": "NullTokenizer", "vocab_size": 30, "true_vocab_size": 31}
    assert resumed_null_vocab_size(30, before) == resumed_null_vocab_size(31, before) == 31
    assert (
        resumed_null_vocab_size(30, {"null_tokenizer_ids": 31}) == 31
        and resumed_null_vocab_size(30, {"null_tokenizer_ids": 30}) == 30
    )
    assert resumed_null_vocab_size(50, before) == 50 and resumed_null_vocab_size(None, before) is None
    assert resumed_null_vocab_size(30, {**before, "tokenizer_type": "ByteTokenizer"}) == 30


@pytest.mark.parametrize("text", ["a\ud800", "\udfff"])
def test_bytes_of_half_a_surrogate_pair_are_refused(text):
    for call in (ByteTokenizer().tokenize, lambda text: ByteTokenizer().encode_texts_flat(["a", text])):
        with pytest.raises(ValueError, match="surrogates"):
            call(text)


@pytest.mark.parametrize(
    "config, texts",
    [
        (TokenizerConfig(tokenizer_type="ByteTokenizer"), ["", "a\u6771", ""]),
        (TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100), ["7 8", "", " 1\n99 "]),
    ],
)
def test_flat_ids_of_kinds_without_files_are_those_of_each_text(config, texts):
    tokenizer = build_tokenizer(config)
    ids, lengths = tokenizer.encode_texts_flat(texts)
    expected = [tokenizer.tokenize(text) for text in texts]
    assert ids.tolist() == [token for ids in expected for token in ids] and lengths.tolist() == list(map(len, expected))
    assert np.can_cast(np.min_scalar_type(tokenizer.vocab_size), ids.dtype)
    assert [tokenizer.encode_texts_flat([])[place].tolist() for place in (0, 1)] == [[], []]
    for text, ids in zip(texts, expected):
        spans = [text.encode()[first:last] for first, last in tokenizer.token_byte_spans(text)]
        assert spans == [bytes([token]) if config.vocab_size is None else str(token).encode() for token in ids]


def test_a_chat_template_is_given_as_text_or_as_a_file(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}", encoding="utf-8")
    for template in ("{{ messages }}", str(tmp_path / "chat.jinja")):
        assert (
            build_tokenizer(TokenizerConfig(tokenizer_type="ByteTokenizer", chat_template=template)).chat_template
            == "{{ messages }}"
        )
    assert build_tokenizer(TokenizerConfig(tokenizer_type="ByteTokenizer")).chat_template is None
    with pytest.raises(ConfigError, match="--chat-template chatml is neither a file nor a Jinja template"):
        build_tokenizer(TokenizerConfig(tokenizer_type="ByteTokenizer", chat_template="chatml"))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5),
    st.lists(st.integers(10, 19), max_size=2),
    st.lists(st.integers(20, 29), max_size=2),
)
def test_what_is_put_around_texts_stands_around_each(texts, before, after):
    ids, lengths = add_prefix_and_suffix_ids(before, *flatten_ids(texts), after)
    expected = [[*before, *text, *after] for text in texts]
    assert ids.tolist() == [token for text in expected for token in text] and lengths.tolist() == list(
        map(len, expected)
    )


@pytest.mark.parametrize(
    "text, expected",
    [("", []), ("ab", [1, 2]), ("<e>", [9]), ("a<e>b<e>f", [1, 9, 2, 8]), ("<e>f<e>e", [8, 9, 5]), ("<e", [60, 5])],
)
def test_names_of_special_tokens_are_found_the_longest_first(text, expected):
    def spell(part):
        return [60 if letter == "<" else ord(letter) - 96 for letter in part]

    assert tokenize_around_special(text, {"<e>": 9, "<e>f": 8, "e>b": 7}, spell) == expected


def test_before_a_run_the_size_is_that_of_the_files_or_gpt_2s(tmp_path: Path) -> None:
    data = Path(__file__).resolve().parents[3] / "examples" / "data"
    files = {"vocab_file": str(data / "demo-vocab.json"), "merge_file": str(data / "demo-merges.txt")}
    assert expected_vocab_size(TokenizerConfig(tokenizer_type="GPT2BPETokenizer", **files)) == (
        len(json.loads((data / "demo-vocab.json").read_text())),
        "",
    )
    assert expected_vocab_size(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=99)) == (99, "")
    for config, word in (
        (TokenizerConfig(), "no file"),
        (TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file="away.json"), "away.json: not here"),
        (
            TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(data / "demo-vocab.json")),
            "demo-vocab.json",
        ),
    ):
        size, doubt = expected_vocab_size(config)
        assert size == 50257 and word in doubt
