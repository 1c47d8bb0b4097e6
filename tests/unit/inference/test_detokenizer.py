"""Text while it comes: the same as decoding everything at once, and nothing is taken back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import ByteTokenizer, NullTokenizer, build_tokenizer
from megatron.core.tokenizers.incremental import REPLACEMENT
from megatron.inference.detokenizer import Detokenizer, IncrementalTokenTexts
from megatron.inference.generate import decode_following
from megatron.inference.requests import TokenLogprob
from megatron.inference.server.openai import _LogprobFormatter
from tests.helpers.architecture import ROOT
from tests.helpers.tokenizer_kinds import KINDS, id_sequences, tokenizer_of

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


@pytest.fixture(scope="module", params=KINDS)
def any_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(request.param, tmp_path_factory.getbasetemp())


def compare_streams_with_the_whole(tokenizer: Tokenizer, count: int) -> None:
    """Pieces of a stream, of its log-probabilities and of the segments; with and without stop words."""
    for ids in id_sequences(tokenizer, count):
        whole = tokenizer.detokenize(ids)
        stream = Detokenizer(tokenizer, [])
        assert "".join(stream.add([token]) for token in ids) + stream.finish() == stream.full_text == whole
        assert "".join(IncrementalTokenTexts(tokenizer).texts_of_next_ids(ids, last=True)) == (whole if ids else "")
        places = sorted(len(whole) * part // 7 for part in (2, 3, 5, 6))
        words = [word for word in (whole[slice(*places[:2])], whole[slice(*places[2:])]) if word]
        stopped, told = Detokenizer(tokenizer, [], words), ""
        for token in ids:
            told += stopped.add([token])
            assert not any(word in told for word in words)
            if stopped.ended:
                break
        told += stopped.finish()
        assert told == stopped.full_text == whole[: min((whole.index(word) for word in words), default=len(whole))]


def test_streams_join_to_the_whole_for_every_kind_of_tokenizer(any_tokenizer: Tokenizer) -> None:
    compare_streams_with_the_whole(any_tokenizer, 12)


@pytest.mark.nightly
def test_streams_join_to_the_whole_for_thousands_of_texts(any_tokenizer: Tokenizer) -> None:
    compare_streams_with_the_whole(any_tokenizer, 5000)


def test_a_model_that_ends_inside_a_character_leaves_what_stands_for_it() -> None:
    text = Detokenizer(TOKENIZERS["bytes"], [120])
    assert [text.add([byte]) for byte in b"a\xf0\x9f\x98"] == ["a", "", "", ""] and text.finish() == "\ufffd"


def test_a_byte_that_can_belong_to_no_character_is_told_at_once() -> None:
    text = Detokenizer(TOKENIZERS["bytes"], [120])
    assert [text.add([byte]) for byte in b"\xff\xe4\xbda"] == ["\ufffd", "", "", "\ufffda"]


@pytest.mark.parametrize("chat", [False, True])
def test_log_probabilities_name_every_token_as_the_text_does(any_tokenizer: Tokenizer, chat: bool) -> None:
    for ids in id_sequences(any_tokenizer, 8):
        known = [token for token in ids if token < any_tokenizer.vocab_size]
        tokens = [
            TokenLogprob(
                token,
                -0.5,
                tuple({token: -0.5, **{other: -2.0 for other in (2, 9, token ^ 1) if other != token}}.items()),
            )
            for token in known
        ]
        told = _LogprobFormatter(None, chat, IncrementalTokenTexts(any_tokenizer))  # type: ignore[arg-type]
        fields = [told.format_tokens([token], last=False) for token in tokens]
        fields.append(told.format_tokens([], last=True))
        whole = any_tokenizer.detokenize(known)
        if chat:
            entries = [entry for field in fields for entry in field["content"]]
            assert "".join(entry["token"] for entry in entries) == whole and len(entries) == len(tokens)
            spelled = b"".join(bytes(entry["bytes"]) for entry in entries)
            if not any_tokenizer.cleans_up_spaces and REPLACEMENT not in whole:
                assert spelled.decode() == whole
            continue
        pieces = [piece for field in fields for piece in field["tokens"]]
        offsets = [offset for field in fields for offset in field["text_offset"]]
        assert "".join(pieces) == whole and offsets == [len("".join(pieces[:n])) for n in range(len(pieces))]
        for piece, top, token in zip(
            pieces, [top for field in fields for top in field["top_logprobs"]], tokens, strict=True
        ):
            assert len(top) == len(token.top) and max(top, key=top.__getitem__) == piece and top[piece] == -0.5


def test_likely_tokens_of_one_text_keep_names_of_their_own() -> None:
    """Where nothing precedes, a piece with and one without its space are the same text."""
    pieces = tokenizer_of("Llama2Tokenizer", None)  # type: ignore[arg-type]
    number = {pieces.id_to_token(token): token for token in range(pieces.vocab_size)}
    with_space, without = number["\u2581the"], number["the"]
    top = ((with_space, -0.1), (without, -3.0))

    def names(*before: int) -> tuple[list[str], dict[str, float]]:
        told = _LogprobFormatter(None, False, IncrementalTokenTexts(pieces, before))  # type: ignore[arg-type]
        field = told.format_tokens([TokenLogprob(with_space, -0.1, top)])
        return field["tokens"], field["top_logprobs"][0]

    assert names(with_space) == ([" the"], {" the": -0.1, "the": -3.0})
    assert names() == (["the"], {"the": -0.1, "token_id:%d" % without: -3.0})
