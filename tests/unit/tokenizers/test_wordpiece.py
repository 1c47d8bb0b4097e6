"""BERT's word pieces against transformers, and against the published rule of the longest piece first."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertTokenizerFast

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.difficult_texts import DIFFICULT
from megatron.core.tokenizers.wordpiece import BertWordPieceTokenizer

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "examples" / "data" / "demo-bert-vocab.txt"
REAL = ROOT.parent / "shared" / "data" / "tokenizers" / "bert-uncased" / "vocab.txt"
TEXTS = [
    *DIFFICULT.values(),
    "The Whale's UNAFFABLE caf\u00e9, re-embarked; [SEP] [MASK]",
    "x" * 50_000,
    "x" * 100 + " " + "x" * 101,
    "a\u0000b \ufffd",
]


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("path", [DEMO, REAL], ids=["demo", "published"])
def test_ids_are_those_of_transformers(path, lower):
    if not path.exists():
        pytest.skip("the published vocabulary is not here")
    tokenizer = BertWordPieceTokenizer(path, lower_case=lower)
    theirs = BertTokenizerFast(vocab=str(path), do_lower_case=lower, split_special_tokens=True)
    expected = [theirs(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert [tokenizer.tokenize(text) for text in TEXTS] == expected
    ids, lengths = tokenizer.encode_texts_flat(TEXTS)
    assert ids.tolist() == [token for ids in expected for token in ids] and lengths.tolist() == list(map(len, expected))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(alphabet="whaletrsing", min_size=1, max_size=30))
def test_a_word_is_taken_apart_into_the_longest_pieces(word):
    tokenizer = BertWordPieceTokenizer(DEMO, lower_case=True)
    vocab = DEMO.read_text(encoding="utf-8").split("\n")
    pieces, first = [], 0
    while first < len(word):
        mark = "##" if first else ""
        last = next((last for last in range(len(word), first, -1) if mark + word[first:last] in vocab), None)
        if last is None:
            pieces = ["[UNK]"]
            break
        pieces.append(mark + word[first:last])
        first = last
    assert [tokenizer.id_to_token(token) for token in tokenizer.tokenize(word)] == pieces


def test_begin_end_and_sentinels_follow_the_vocabulary():
    size = len(DEMO.read_text(encoding="utf-8").splitlines())
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="BertWordPieceCase", vocab_file=str(DEMO), vocab_extra_ids=100)
    )
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 2, 3, 4)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eod) == (size, size + 1, size + 1)
    assert tokenizer.additional_special_tokens_ids == tuple(range(size + 2, size + 102))
    assert tokenizer.vocab_size == size + 102 and tokenizer.id_to_token(size + 101) == "<extra_id_99>"
    assert tokenizer.tokenize_with_special("[CLS]a<extra_id_7>[SEP]") == [2, *tokenizer.tokenize("a"), size + 9, 3]
    assert not {2, 3, 4} & set(tokenizer.tokenize("[CLS] [SEP] [MASK]"))


def test_lower_case_and_case_differ_where_letters_do():
    lower, case = (BertWordPieceTokenizer(DEMO, lower_case=flag) for flag in (True, False))
    assert lower.tokenize("THE Caf\u00e9") == lower.tokenize("the cafe")
    assert lower.unique_identifiers != case.unique_identifiers
    assert case.detokenize(lower.tokenize("the whale")) == "the whale"


def test_spans_are_the_bytes_of_the_pieces():
    tokenizer, text = BertWordPieceTokenizer(DEMO, lower_case=True), "\u00e9t\u00e9, the WHALE"
    result = [text.encode()[first:last].decode() for first, last in tokenizer.token_byte_spans(text)]
    assert result[-2:] == ["the", "WHALE"] and result[0].startswith("\u00e9")


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda text: text.replace("[MASK]\n", "").replace("[CLS]\n", ""), r"it has no \[CLS\], \[MASK\]"),
        (lambda text: text + "[PAD]\n", r"the token '\[PAD\]' on several lines"),
        (lambda text: "", "is not a vocabulary of BERT"),
        (lambda text: '{"a": 1}', "is not a vocabulary of BERT"),
    ],
)
def test_damaged_vocabularies_are_named(tmp_path, edit, message):
    path = tmp_path / "vocab.txt"
    path.write_text(edit(DEMO.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"--vocab-file .*{message}"):
        BertWordPieceTokenizer(path, lower_case=True)


def test_a_vocabulary_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        BertWordPieceTokenizer(path, lower_case=True)


def test_half_of_a_surrogate_pair_is_refused():
    tokenizer = BertWordPieceTokenizer(DEMO, lower_case=True)
    for call in (
        tokenizer.tokenize,
        tokenizer.tokenize_with_special,
        tokenizer.token_byte_spans,
        lambda text: tokenizer.encode_texts_flat(["a", text]),
    ):
        with pytest.raises(ValueError, match="surrogates"):
            call("a\ud800b")
