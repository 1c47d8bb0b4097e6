"""Sentences against NLTK's own loading of the same tables, and against a text whose sentences are plain to see."""

import json
import shutil

import nltk
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.tokenize.punkt import PunktTokenizer

from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.ingest import sentences
from megatron.core.datasets.ingest.sentences import TABLES, sentence_splitter
from megatron.core.tokenizers.bpe import GPT2BPETokenizer
from tests.unit.datasets.ingest.conftest import TOOLS
from tests.unit.datasets.ingest.writing import pair_at, pair_of

DATA = TOOLS.parent / "examples" / "data"
PLAIN = ["Dr. Smith went to Washington, D.C. in Jan. 1863.", "He was late!", '"Was he?"', "Yes (by 3.5 hours)."]


@pytest.fixture
def nltk_data(tmp_path, monkeypatch):
    """A folder where NLTK finds our tables, also under the name of another language."""
    for language in ("english", "german"):
        shutil.copytree(TABLES / "english", tmp_path / "nltk" / "tokenizers" / "punkt_tab" / language)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])


def corpus():
    """Pages of real text."""
    return [json.loads(line)["text"] for line in (DATA / "demo_valid.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_plain_text_is_split_where_a_reader_would():
    assert sentence_splitter("english", False)("  ".join(PLAIN)) == PLAIN


def test_real_pages_are_split_as_by_nltk(nltk_data):
    reference, split = PunktTokenizer("english"), sentence_splitter("english", False)
    pages = corpus()[:8]
    assert [split(page) for page in pages] == [reference.tokenize(page) for page in pages]
    assert sum(len(split(page)) for page in pages) > 500


SPLIT = {keep: sentence_splitter("english", keep) for keep in (True, False)}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(st.sampled_from(list(" \n\tab.!?\"')A1-\u201d\u3002")), max_size=60))
def test_with_newlines_kept_the_sentences_are_the_text_without_its_end(text):
    retained, bare = SPLIT[True](text), SPLIT[False](text)
    assert "".join(retained) == text.rstrip()
    assert [sentence.rstrip() for sentence in retained] == [sentence.rstrip() for sentence in bare]


def test_the_newline_after_a_sentence_stays_with_it_on_request():
    assert sentence_splitter("english", True)("He came.\n\nShe went. \n") == ["He came.\n\n", "She went."]


def test_long_texts_are_split_window_by_window(monkeypatch):
    monkeypatch.setattr(sentences, "WINDOW", 10)
    assert sentence_splitter("english", False)("He was. I am. So.") == ["He was.", "I", "am.", "So."]
    assert sentence_splitter("english", True)("He was. I \nam. So. ") == ["He was. ", "I ", "\nam. ", "So."]


def test_other_languages_come_from_nltk(nltk_data):
    assert sentence_splitter("german", False)("So. Es war. Ja!") == PunktTokenizer("german").tokenize("So. Es war. Ja!")


@pytest.mark.parametrize("language", ["dutch", "..", "", "english/../english"])
def test_a_language_without_tables_is_named(nltk_data, language):
    with pytest.raises(ConfigError, match="NLTK_DATA"):
        sentence_splitter(language, False)


@pytest.mark.parametrize("append_eod", [True, False])
def test_sentences_are_sequences_and_the_last_one_has_the_end_of_document(tool, nltk_data, tmp_path, append_eod):
    pages = [*corpus()[:2], "", "  \n ", "One."]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    files = [str(DATA / "demo-vocab.json"), str(DATA / "demo-merges.txt")]
    tokenizer, reference = GPT2BPETokenizer(*files), PunktTokenizer("english")
    documents = [[tokenizer.tokenize(sentence) for sentence in reference.tokenize(page) if sentence] for page in pages]
    for document in documents:
        if document and append_eod:
            document[-1] = [*document[-1], tokenizer.eod]
    assert documents[2] == [] and len(documents[0]) > 30
    for workers in ["1", "2"][: 1 + append_eod]:
        tool.main(
            [
                "--input",
                str(source),
                "--output-prefix",
                str(tmp_path / workers),
                "--split-sentences",
                "--workers",
                workers,
                "--tokenizer-type",
                "GPT2BPETokenizer",
                "--vocab-file",
                files[0],
                "--merge-file",
                files[1],
                *["--append-eod"] * append_eod,
            ]
        )
        assert pair_at(tmp_path / f"{workers}_text_sentence") == pair_of(documents)
    assert json.loads((tmp_path / "1_text_sentence.json").read_text())["level"] == "sentence"
