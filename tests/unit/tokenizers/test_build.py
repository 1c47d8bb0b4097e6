"""Settings to tokenizer, the kinds without files, and the padding of the vocabulary."""

import pytest

from megatron.core.config.data import TokenizerConfig
from megatron.core.config.model import ModelConfig
from megatron.core.config.flags import ConfigError
from megatron.core.tokenizers.build import KINDS, ByteTokenizer, NullTokenizer, build_tokenizer


@pytest.mark.parametrize("text", ["", "Hello", "na\u00efve \u6771\u4eac \U0001f30d\n\x00"])
def test_bytes_are_ids(text):
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="ByteTokenizer"))
    assert bytes(tokenizer.tokenize(text)) == text.encode("utf-8")
    assert tokenizer.encode_batch([text, "x"]) == [tokenizer.tokenize(text), [120]]
    assert tokenizer.detokenize([*tokenizer.tokenize(text), tokenizer.eod]) == text
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (257, 256, None)


def test_cut_characters_of_bytes_become_replacement_characters():
    assert ByteTokenizer().detokenize([0xE6, 0x9D]) == "\ufffd"


def test_the_null_tokenizer_reads_numbers_and_ends_documents_with_the_size_given():
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (101, 100, None)
    assert tokenizer.tokenize("5 0\n 99  100") == [5, 0, 99, 100]
    assert tokenizer.tokenize("") == []
    assert tokenizer.encode_batch(["1", "2 3"]) == [[1], [2, 3]]
    assert tokenizer.detokenize([5, 100]) == "5 100"


@pytest.mark.parametrize("text, message", [
    ("1 two", "two"), ("101", "id 101 is outside the vocabulary of 101"), ("-1", "id -1")])
def test_the_null_tokenizer_refuses_other_text(text, message):
    with pytest.raises(ValueError, match=message):
        NullTokenizer(100).tokenize(text)


@pytest.mark.parametrize("kind", [None, "SentencePieceTokenizer", "gpt2bpetokenizer"])
def test_an_unknown_kind_names_the_known_ones(kind):
    with pytest.raises(ConfigError, match=f"--tokenizer-type.*choose one of {', '.join(KINDS)}"):
        build_tokenizer(TokenizerConfig(tokenizer_type=kind))


@pytest.mark.parametrize("config, flag", [
    (TokenizerConfig(tokenizer_type="GPT2BPETokenizer", merge_file="m"), "--vocab-file"),
    (TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file="v"), "--merge-file"),
    (TokenizerConfig(tokenizer_type="NullTokenizer"), "--vocab-size"),
    (TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=0), "--vocab-size"),
])
def test_what_a_kind_needs_is_named(config, flag):
    with pytest.raises(ConfigError, match=f"--tokenizer-type {config.tokenizer_type} needs {flag}"):
        build_tokenizer(config)


@pytest.mark.parametrize("size, divisor, tp, rows", [
    (50257, 128, 1, 50304), (50257, 128, 8, 51200), (50304, 128, 1, 50304), (1, 128, 2, 256), (257, 1, 1, 257)])
def test_the_vocabulary_is_padded_to_what_the_ranks_divide(size, divisor, tp, rows):
    assert ModelConfig(make_vocab_size_divisible_by=divisor).with_vocabulary(size, tp).padded_vocab_size == rows


def test_settings_that_a_tokenizer_does_not_read_are_refused_together():
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9, tokenizer_model="m", vocab_file="v")
    with pytest.raises(ConfigError, match="(?s)--vocab-file v is not read.*--tokenizer-model m is not read"):
        build_tokenizer(config)
