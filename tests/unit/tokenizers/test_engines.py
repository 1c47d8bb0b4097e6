"""Engines of byte-level BPE: equal to each other on any text, chosen with a reason, refused when they deviate."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2TokenizerFast

from megatron.core.tokenizers import engines
from megatron.core.tokenizers.bpe import GPT2BPETokenizer
from megatron.core.tokenizers.bytelevel import BPEFromMerges, byte_of_character
from megatron.core.tokenizers.difficult_texts import DIFFICULT

DATA = Path(__file__).resolve().parents[3] / "examples" / "data"
GPT2 = (DATA / "gpt2" / "vocab.json", DATA / "gpt2" / "merges.txt")
DEMO = (DATA / "demo-vocab.json", DATA / "demo-merges.txt")
# Letters of many scripts, marks, spaces and contractions close together, beside any character at all.
TRICKY = st.text(
    st.sampled_from(
        "aAzsStTlLrRvVeEdD01239 '\"\n\r\t\u00a0\u3000\u0130\u0301\u0915\u094d\u0e01\u6771\uac00\u05e9\u0627"
        "\u0661\u2167\u00bd\u200d\ufe0f\U0001f469\U0001f1e9<|>_endoftext.,!?-/\x00\x85\u2028"
    )
)
TEXTS = st.lists(st.one_of(TRICKY, st.text(), st.text(alphabet=" \n\tab'st1")), max_size=8)


@lru_cache(None)
def load(files):
    """The tokenizer of two files."""
    return GPT2BPETokenizer(*files)


@lru_cache(None)
def built(files):
    """Every engine of a tokenizer, by the name of its package."""
    source = load(files).source
    here = {name: build for name, build in source.candidates.items() if importlib.util.find_spec(name)}
    return {"tokenizers": source.reference, **{name: build() for name, build in here.items()}}


@lru_cache(None)
def published():
    """The other reader of GPT-2's files."""
    return GPT2TokenizerFast(vocab=str(GPT2[0]), merges=str(GPT2[1]), split_special_tokens=True)


def lists(engine, texts):
    """What an engine gives, as lists; with the types that the protocol asks for."""
    ids, lengths = engine(texts)
    assert ids.ndim == lengths.ndim == 1 and ids.dtype.kind in "iu" and lengths.dtype == np.int64
    assert len(lengths) == len(texts) and lengths.sum() == len(ids)
    ends = np.cumsum(lengths)
    return [ids[end - length : end].tolist() for end, length in zip(ends, lengths)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TEXTS)
def test_all_engines_give_the_published_ids_of_gpt2_for_any_text(texts):
    pytest.importorskip("gigatoken")
    expected = [published()(text, add_special_tokens=False).input_ids for text in texts]
    for name, engine in built(GPT2).items():
        assert lists(engine, texts) == expected, name


@pytest.mark.parametrize("files", [GPT2, DEMO], ids=["gpt2", "demo"])
def test_all_engines_agree_on_documents_and_difficult_text(files):
    with open(DATA / "demo_valid.jsonl", encoding="utf-8") as lines:
        texts = (
            [json.loads(line)["text"] for line in lines] + list(DIFFICULT.values()) + ["x" * 50_000, "\u6771" * 50_000]
        )
    expected = lists(built(files)["tokenizers"], texts)
    assert [load(files).tokenize(text) for text in texts] == expected
    for name, engine in built(files).items():
        assert lists(engine, texts) == expected, name
        assert lists(engine, []) == [] and lists(engine, ["", "a", ""])[::2] == [[], []], name


@pytest.mark.parametrize("name", ["tokenizers", "tiktoken", "gigatoken"])
def test_every_engine_refuses_half_of_a_surrogate_pair(name):
    if name == "gigatoken":
        pytest.importorskip("gigatoken")
    for texts in (["a\ud800b"], ["fine", "\udfff"]):
        with pytest.raises(ValueError, match="surrogates"):
            built(DEMO)[name](texts)


def test_gigatoken_is_preferred_with_its_proof_in_words():
    pytest.importorskip("gigatoken")
    assert load(DEMO).engine.startswith("text is encoded by gigatoken ")
    assert f"its ids equal those of tokenizers on {len(DIFFICULT)} kinds of difficult text" in load(DEMO).engine


def test_without_gigatoken_tiktoken_is_chosen_and_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    tokenizer = GPT2BPETokenizer(*DEMO)
    assert tokenizer.engine.startswith("text is encoded by tiktoken ")
    assert tokenizer.engine.endswith("gigatoken is not installed")
    assert lists(tokenizer.encode_texts_flat, list(DIFFICULT.values())) == [
        tokenizer.tokenize(text) for text in DIFFICULT.values()
    ]


def test_gigatoken_without_the_package_that_it_needs_says_which(monkeypatch):
    pytest.importorskip("gigatoken")
    monkeypatch.setitem(sys.modules, "awkward", None)
    sentence = GPT2BPETokenizer(*DEMO).engine
    assert sentence.startswith("text is encoded by tiktoken ")
    assert sentence.endswith("gigatoken lacks the package awkward, which it needs: pip install awkward")


def test_without_both_the_library_that_defines_the_ids_is_left(monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    sentence = GPT2BPETokenizer(*DEMO).engine
    assert sentence.startswith("text is encoded by tokenizers ") and "it defines the ids; gigatoken is not" in sentence


@pytest.mark.parametrize("kind", [kind for kind, text in DIFFICULT.items() if text])
def test_an_engine_that_deviates_on_one_kind_of_text_is_refused_by_its_name(kind):
    reference = built(DEMO)["tokenizers"]

    def deviating(texts):
        ids, lengths = reference(texts)
        wrong = np.repeat([text == DIFFICULT[kind] for text in texts], lengths)
        return ids + wrong, lengths

    engine, sentence = engines.choose_tokenizer_engine({"gigatoken": lambda: deviating}, reference, "tokenizers")
    assert engine is reference and sentence.endswith(f"gigatoken gives other ids for {kind}")


def test_an_engine_that_cannot_be_built_is_passed_over():
    def broken():
        raise RuntimeError("no such pattern")

    _, sentence = engines.choose_tokenizer_engine({"gigatoken": broken}, built(DEMO)["tokenizers"], "tokenizers")
    assert sentence.endswith("gigatoken cannot be used: no such pattern")


@st.composite
def merges_of_few_letters(draw):
    """Merges over three letters, each of two tokens that exist by then, in an order of their making or in any."""
    tokens, merges = ["a", "b", "c"], []
    for _ in range(draw(st.integers(1, 12))):
        left, right = draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens))
        merges.append((left, right))
        tokens += [left + right] if left + right not in tokens else []
    return draw(st.permutations(merges)) if draw(st.booleans()) else merges


@settings(max_examples=300, deadline=None, derandomize=True)
@given(merges_of_few_letters(), st.lists(st.text("abc", max_size=20), min_size=1, max_size=8))
def test_ranks_stand_for_merges_only_when_they_give_the_same_ids(merges, texts):
    merges = list(dict.fromkeys(merges))
    vocab = {
        token: number for number, token in enumerate([*byte_of_character(), *dict.fromkeys(a + b for a, b in merges)])
    }
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    source = BPEFromMerges(made, vocab, merges, pattern="gpt2")
    if source.ranks is not None:
        assert lists(engines.tiktoken_engine(source.ranks), texts) == lists(source.reference, texts)
    else:
        with pytest.raises(ValueError, match="the merges cannot be written as ranks"):
            source.candidates["tiktoken"]()


def test_trained_merges_have_ranks():
    assert load(DEMO).source.ranks is not None and load(GPT2).source.ranks is not None


def test_a_token_that_its_merges_cannot_reach_keeps_ranks_out():
    # b c is joined first, so that a b c never becomes abc, as ranks would have it.
    vocab = {letter: number for number, letter in enumerate(byte_of_character())}
    vocab |= {"bc": 256, "ab": 257, "abc": 258, "<|endoftext|>": 259}
    tokenizer = _written(vocab, ["b c", "a b", "ab c"])
    assert tokenizer.source.ranks is None
    assert tokenizer.tokenize("abc") == [vocab["a"], vocab["bc"]] == tokenizer.encode_texts_flat(["abc"])[0].tolist()


def _written(vocab, merges):
    """The tokenizer of a vocabulary and merges, by way of files."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        files[0].write_text(json.dumps(vocab), "utf-8")
        files[1].write_text("\n".join(["#version: 0.2", *merges, ""]), "utf-8")
        return GPT2BPETokenizer(*files)


@pytest.mark.parametrize(
    "merges, text, expected",
    [
        # abc is made late, as a bc; had it the rank of its first line, it would come before bcd.
        (["b c", "a b", "ab c", "bc d", "a bc"], "abcd", ["a", "bcd"]),
        # abc stands before the ab that it is made of; the proof that ranks give the same ids does not hold then.
        (["ab c", "a b"], "abc", ["abc"]),
    ],
)
def test_merges_that_the_proof_leaves_out_keep_ranks_out(merges, text, expected):
    made = [merge.replace(" ", "") for merge in merges]
    vocab = {
        token: number for number, token in enumerate(dict.fromkeys([*byte_of_character(), *made, "<|endoftext|>"]))
    }
    tokenizer = _written(vocab, merges)
    assert tokenizer.source.ranks is None and not tokenizer.engine.startswith("text is encoded by tiktoken")
    assert [tokenizer.id_to_token(token) for token in tokenizer.tokenize(text)] == expected
    assert tokenizer.encode_texts_flat([text])[0].tolist() == tokenizer.tokenize(text)


def test_the_sample_is_the_same_text_after_its_ids():
    tokenizer = load(GPT2)
    for kind, text in DIFFICULT.items():
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text, kind
        spans = tokenizer.token_byte_spans(text)
        assert b"".join(text.encode()[first:last] for first, last in spans) == text.encode(), kind


def test_importing_the_room_loads_no_library_of_tokens():
    code = (
        "import sys; import megatron.core.tokenizers.build, megatron.core.tokenizers.check, megatron.core.tokenizers.train; "
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'tiktoken', 'sentencepiece', 'gigatoken', 'awkward') "
        "if name in sys.modules])"
    )
    formatted = subprocess.run(
        [sys.executable, "-c", code], cwd=DATA.parents[1], capture_output=True, text=True, check=True
    )
    assert formatted.stdout == "[]\n"
