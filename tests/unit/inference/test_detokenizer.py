"""Text while it comes: the same as decoding everything at once, and nothing is taken back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import ByteTokenizer, NullTokenizer, build_tokenizer
from megatron.inference.detokenizer import Detokenizer, IncrementalTokenTexts
from megatron.inference.generate import decode_following
from tests.helpers.architecture import ROOT

DATA = ROOT / "examples" / "data"
WORDS = ("the state", "naive", "\u00e9t\u00e9", "\u4f60\u597d", "\U0001f600\U0001f680", "a b  c", "\n\n", "x:")


def bpe() -> Tokenizer:
    files = {
        name: str(DATA / f"demo-{file}") for name, file in (("vocab_file", "vocab.json"), ("merge_file", "merges.txt"))
    }
    return build_tokenizer(TokenizerConfig(tokenizer_type="GPT2BPETokenizer", **files))


TOKENIZERS = {"bytes": ByteTokenizer(), "numbers": NullTokenizer(1000), "bpe": bpe()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_are_the_text_of_all_ids_whatever_the_ids(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    numbers = st.lists(st.integers(0, tokenizer.vocab_size - 2), max_size=40)
    prompt, new = data.draw(numbers.filter(bool)), data.draw(numbers)
    text = Detokenizer(tokenizer, prompt)
    pieces = [text.add([token]) for token in new]
    assert "".join(pieces) + text.finish() == text.full_text == decode_following(tokenizer, prompt[-8:], new)


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_no_piece_ends_in_the_middle_of_a_character(name: str, words: str) -> None:
    tokenizer = TOKENIZERS[name]
    text = Detokenizer(tokenizer, tokenizer.tokenize("so "))
    pieces = [text.add([token]) for token in tokenizer.tokenize(words)]
    assert "".join(pieces) == words and text.finish() == "" and "\ufffd" not in "".join(pieces)


def test_bytes_that_never_make_a_character_are_not_held_back_for_ever() -> None:
    text = Detokenizer(TOKENIZERS["bytes"], [97])
    told = "".join(text.add([0xE4]) for _ in range(500))
    assert len(told) > 400 and len(told + text.finish()) == 500


@pytest.mark.parametrize("keep", [False, True])
@settings(max_examples=200, deadline=None)
@given(
    content=st.text("abc\u00e9", max_size=30),
    stop=st.lists(st.text("abc\u00e9", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_text_is_cut_at_its_first_stop_word_and_never_shows_more(keep: bool, content: str, stop: list[str]) -> None:
    tokenizer = TOKENIZERS["bytes"]
    text, told = Detokenizer(tokenizer, [120], stop, keep_stop=keep), ""
    for count, token in enumerate(tokenizer.tokenize(content), start=1):
        told += text.add([token])
        if text.ended:
            break
    told += text.finish()
    read = tokenizer.detokenize(tokenizer.tokenize(content)[:count]) if content else ""
    found = [(read.index(word), len(word)) for word in stop if word in read]
    assert text.ended == bool(found) == any(word in content for word in stop)
    # of words that begin at one place, the shortest is seen first
    expected = read[: min(found)[0] + min(found)[1] * keep] if found else content
    assert told == text.full_text == expected


def test_what_may_become_a_stop_word_is_held_back() -> None:
    text = Detokenizer(TOKENIZERS["bytes"], [120], ["\n\nUser:"])
    assert [text.add([token]) for token in b"ok\n\nUs and"] == ["o", "k", "", "", "", "", "\n\nUs ", "a", "n", "d"]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_segments_make_the_whole_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 2), max_size=60))
    found = IncrementalTokenTexts(tokenizer).texts_of_next_ids(ids, last=True)
    assert len(found) == len(ids) and "".join(found) == tokenizer.detokenize(ids)
