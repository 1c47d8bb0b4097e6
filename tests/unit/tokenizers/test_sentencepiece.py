"""SentencePiece kinds against the library's own answers, and against the model file read by its own wire format."""

import random
from pathlib import Path

import pytest
import sentencepiece

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.difficult_texts import DIFFICULT
from megatron.core.tokenizers.sentencepiece import SentencePieceTokenizer

ROOT = Path(__file__).resolve().parents[3]
LLAMA, T5 = ROOT / "examples" / "data" / "demo-llama.model", ROOT / "examples" / "data" / "demo-t5.model"
MISTRAL = ROOT.parent / "shared" / "data" / "tokenizers" / "mistral-v1-spm32k" / "tokenizer.model"
TEXTS = [*DIFFICULT.values(), "Call me Ishmael. </s> <s>", "w" * 50_000]


def build(kind, path, **settings):
    """The tokenizer of a kind and a model."""
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(path), **settings))


def pieces_of(path):
    """(text, type) of every piece, read from the protocol buffer by hand: field 1 of the model, fields 1 and 3 of a piece."""

    def fields(content):
        place = 0
        while place < len(content):
            key, place = number(content, place)
            if key & 7 == 0:
                value, place = number(content, place)
            else:
                size, place = {5: (4, place), 1: (8, place)}.get(key & 7) or number(content, place)
                value, place = content[place : place + size], place + size
            yield key >> 3, value

    def number(content, place):
        value, shift = 0, 0
        while True:
            byte, place = content[place], place + 1
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value, place

    rows = [dict(fields(value)) for key, value in fields(path.read_bytes()) if key == 1]
    return [(row[1].decode(), row.get(3, 1)) for row in rows]


@pytest.mark.parametrize("kind, prefix", [("GPTSentencePieceTokenizer", []), ("Llama2Tokenizer", [1])])
@pytest.mark.parametrize("path", [LLAMA, MISTRAL], ids=["demo", "published"])
def test_ids_are_the_librarys_and_llama_begins_every_text(path, kind, prefix):
    if not path.exists():
        pytest.skip("the published model is not here")
    tokenizer, theirs = build(kind, path), sentencepiece.SentencePieceProcessor(model_file=str(path))
    expected = [prefix + theirs.encode(text) for text in TEXTS]
    assert [tokenizer.tokenize(text) for text in TEXTS] == expected
    ids, lengths = tokenizer.encode_texts_flat(TEXTS)
    assert ids.tolist() == [token for ids in expected for token in ids] and lengths.tolist() == list(map(len, expected))
    assert [len(tokenizer.token_byte_spans(text)) for text in TEXTS] == list(map(len, expected))
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos, tokenizer.eod, tokenizer.pad) == (
        len(theirs),
        1,
        2,
        2,
        None,
    )
    for ids in expected:
        assert tokenizer.detokenize(ids) == theirs.decode(ids)


@pytest.mark.parametrize("path", [LLAMA, T5], ids=["llama", "t5"])
def test_tokens_and_special_tokens_are_those_of_the_file(path):
    tokenizer, rows = build("GPTSentencePieceTokenizer", path), pieces_of(path)
    assert [tokenizer.id_to_token(token) for token in range(tokenizer.vocab_size)] == [text for text, _ in rows]
    assert tokenizer.special == {text: number for number, (text, kind) in enumerate(rows) if kind == 3}


def test_the_named_kind_adds_megatrons_tokens_behind_the_model():
    tokenizer, rows = build("SentencePieceTokenizer", LLAMA, vocab_extra_ids=3), len(pieces_of(LLAMA))
    assert (tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask) == (rows, rows + 1, rows + 2, rows + 3)
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos) == (
        rows + 4,
        1,
        2,
    )  # the model has <s> and </s>, and no padding
    assert (
        tokenizer.additional_special_tokens_ids == (rows + 5, rows + 6, rows + 7) and tokenizer.vocab_size == rows + 8
    )
    text = "Call me"
    assert tokenizer.tokenize_with_special(f"<CLS>{text}<extra_id_1>") == [rows, *tokenizer.tokenize(text), rows + 6]
    assert max(tokenizer.tokenize("<CLS> <EOD> <extra_id_1> </s>")) < rows
    assert tokenizer.detokenize([rows, *tokenizer.tokenize(text), rows + 2, rows + 99]) == "<CLS>Call me<EOD>"


def test_a_model_with_padding_keeps_it():
    tokenizer = build("SentencePieceTokenizer", T5)
    assert (tokenizer.pad, tokenizer.eos, tokenizer.bos) == (0, 1, tokenizer.vocab_size - 1)


def test_a_model_without_a_begin_of_text_is_no_llama():
    with pytest.raises(ConfigError, match="has no begin of text.*choose GPTSentencePieceTokenizer"):
        build("Llama2Tokenizer", T5)


def test_spans_are_the_bytes_of_the_pieces():
    text = "na\u00efve \u6771 whale"
    spans = build("Llama2Tokenizer", LLAMA).token_byte_spans(text)
    assert spans[0] == (0, 0) and spans[-1][1] == len(text.encode())
    assert b"".join(text.encode()[first:last] for first, last in spans) == text.encode()


def test_half_of_a_surrogate_pair_is_refused():
    tokenizer = build("Llama2Tokenizer", LLAMA)
    for call in (
        tokenizer.tokenize,
        tokenizer.tokenize_with_special,
        tokenizer.token_byte_spans,
        lambda text: tokenizer.encode_texts_flat(["a", text]),
    ):
        with pytest.raises(ValueError, match="surrogates"):
            call("a\ud800b")


def test_a_model_cut_or_overwritten_anywhere_is_named(tmp_path):
    content, path, rng = LLAMA.read_bytes(), tmp_path / "tokenizer.model", random.Random(0)
    damaged = [b"", b"{}", b"\x00" * 100, *(content[: rng.randrange(len(content))] for _ in range(10))]
    for wrong in damaged:
        path.write_bytes(wrong)
        with pytest.raises(ConfigError, match=r"--tokenizer-model .* (is not a SentencePiece model|is empty|has no)"):
            SentencePieceTokenizer(path)


def test_a_missing_model_is_named():
    with pytest.raises(ConfigError, match="--tokenizer-model not/there cannot be read: No such file"):
        build("GPTSentencePieceTokenizer", "not/there")
