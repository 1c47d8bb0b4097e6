"""Fill in the middle: what is rearranged reads as before, as often as asked, and follows from the sample's number alone."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import LlamaTokenizer

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import DataConfig, FIMConfig, TokenizerConfig
from megatron.core.datasets.blend import build_gpt_datasets
from megatron.core.datasets.fim import FillInTheMiddle, build_fill_in_middle
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.datasets.special_tokens import count_ids_around_text
from megatron.core.tokenizers.build import ByteTokenizer, NullTokenizer, build_tokenizer
from tests.helpers.tokenizer_kinds import SHARED
from tests.helpers.toytext import toy_tokenizer

PREFIX, MIDDLE, SUFFIX = "<fim_prefix>", "<fim_middle>", "<fim_suffix>"
NAMES = {"fim_prefix_token": PREFIX, "fim_middle_token": MIDDLE, "fim_suffix_token": SUFFIX}
PSM = re.compile(f"{PREFIX}(.*){SUFFIX}(.*){MIDDLE}(.*)", re.DOTALL)
SPM = re.compile(f"{PREFIX}{SUFFIX}(.*){MIDDLE}(.*)", re.DOTALL)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


def fill(tokenizer: Any, *, seed: int = 5, **changes: Any) -> FillInTheMiddle:
    return build_fill_in_middle(FIMConfig(fim_data=True, **{**NAMES, **changes}), tokenizer, seed=seed, pad=-1)


def ids_of(tokenizer: Any, *documents: str) -> np.ndarray:
    """Documents with an end of document between."""
    ids: list[int] = []
    for number, document in enumerate(documents):
        ids += ([tokenizer.eod] if number else []) + tokenizer.tokenize(document)
    return np.array(ids, np.int64)


def read_back(text: str, original: str) -> str:
    """How a document was rearranged: "", "psm" or "spm"; it must hold the original text."""
    if PREFIX not in text:
        assert text == original
        return ""
    if text.startswith(PREFIX + SUFFIX):
        suffix, rest = SPM.fullmatch(text).groups()
        if rest + suffix == original:
            return "spm"
    prefix, suffix, middle = PSM.fullmatch(text).groups()
    assert prefix + middle + suffix == original
    return "psm"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd"), min_size=1, max_size=12),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 10**9),
)
def test_the_parts_of_a_rearranged_document_are_its_text(tokenizer: Any, documents: list[str], index: int) -> None:
    result = tokenizer.detokenize(fill(tokenizer, fim_rate=1.0)(ids_of(tokenizer, *documents), index))
    parts = result.split("<|endoftext|>")
    assert len(parts) == len(documents)
    assert all(read_back(part, document) for part, document in zip(parts, documents))


@pytest.mark.parametrize("kind", ["GPTSentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer"])
def test_parts_have_no_space_that_the_document_lacks(kind: str, tmp_path: Path) -> None:
    """SentencePiece and its kind put one before every text: "iden" and "tity" are not "iden tity"."""
    model = SHARED / "demo-trained" / "llama_bpe_8k.model"
    if not model.exists():
        pytest.skip("the trained tokenizer is not here")
    if kind == "HuggingFaceTokenizer":
        (tmp_path / "tokenizer.model").write_bytes(model.read_bytes())
        made = LlamaTokenizer.from_pretrained(tmp_path)
        made._tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        made._tokenizer.save(str(tmp_path / "tokenizer.json"))
        model = tmp_path
    words = build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(model)))
    before, middle, after = (words.vocab_size - place for place in (3, 2, 1))  # rare characters
    marks = [words.id_to_token(token) for token in (before, middle, after)]
    text = "Call me Ishmael. Some years ago, never mind how long precisely, \u00e9t\u00e9 and  two.\n\nThe identity"
    ids = np.array(words.tokenize(text), np.int64)
    begin = 0 if kind == "GPTSentencePieceTokenizer" else 1
    rearrange = fill(words, fim_rate=1.0, **dict(zip(NAMES, marks, strict=True)))
    for index in range(60):
        window = ids if index % 2 else ids[begin + index % 7 :]
        given = int(window[0] == words.bos)
        result = rearrange(window, index).tolist()
        assert result[:given] == ids[:given].tolist()
        parts = np.split(np.array(result[given:]), np.flatnonzero(np.isin(result[given:], (before, middle, after))))
        named = {int(part[0]): part[1:].tolist() for part in parts if len(part)}
        order = [named[before], named[middle], named[after]]
        joined = [token for part in order for token in part]
        assert words.detokenize(joined) == words.detokenize(window[given:].tolist()), index


def test_documents_are_rearranged_and_turned_round_at_the_given_rates(tokenizer: Any) -> None:
    documents = [f"one {number:04d} two" for number in range(40)]
    rearrange, ids = fill(tokenizer, fim_rate=0.7, fim_spm_rate=0.2), ids_of(tokenizer, *documents)
    kinds = [
        read_back(part, document)
        for index in range(100)
        for part, document in zip(tokenizer.detokenize(rearrange(ids, index)).split("<|endoftext|>"), documents)
    ]
    count, chosen = len(kinds), sum(kind != "" for kind in kinds)
    assert abs(chosen - 0.7 * count) < 3 * (count * 0.7 * 0.3) ** 0.5
    # With an empty prefix, for which one of two draws from 13 places must be the first, both kinds read alike: as spm.
    share = 0.2 + 0.8 * (1 - (12 / 13) ** 2)
    turned = sum(kind == "spm" for kind in kinds)
    assert abs(turned - share * chosen) < 3 * (chosen * share * (1 - share)) ** 0.5


def test_cuts_fall_on_every_character_alike(tokenizer: Any) -> None:
    rearrange, ids = fill(tokenizer, fim_rate=1.0, fim_spm_rate=0.0), ids_of(tokenizer, "xyz")
    seen = np.zeros((4, 4))
    for index in range(4000):
        prefix, _, middle = PSM.fullmatch(tokenizer.detokenize(rearrange(ids, index))).groups()
        seen[len(prefix), len(prefix) + len(middle)] += 1
    # Two draws from four places, put in order: equal places have one way, others two.
    expected = 4000 / 16 * (np.triu(np.ones((4, 4)), 1) * 2 + np.eye(4))
    error = 3.5 * np.sqrt(expected * (1 - expected / 4000))
    assert (abs(seen - expected) <= error).all(), seen


@pytest.mark.parametrize(
    "rate, fragment, expected", [(1.0, None, 1.0), (1.0, 0.25, 0.25), (0.5, 0.5, 0.25), (0.0, 1.0, 0.0)]
)
def test_fragments_are_rearranged_instead_of_a_document_that_is_cut(
    tokenizer: Any, rate: float, fragment: float | None, expected: float
) -> None:
    rearrange = fill(tokenizer, fim_rate=rate, fim_fragment_rate=fragment, fim_split_sample="<cut>")
    cut = np.array([tokenizer.special["<cut>"]])
    pieces = [f"piece {number}" for number in range(8)]
    joined = np.concatenate([part for piece in pieces for part in (ids_of(tokenizer, piece), cut)])
    kinds = [
        read_back(part, piece)
        for index in range(300)
        for part, piece in zip(tokenizer.detokenize(rearrange(joined, index)).split("<cut>"), [*pieces, ""])
    ]
    whole, count = 300 * 8, sum(kind != "" for kind in kinds)
    # Fragments of a document share its draw: at worst, the standard deviation is that of 300 documents.
    assert (
        abs(count - expected * whole)
        <= 3 * (300 * rate * (1 - rate)) ** 0.5 * 8 + 3 * (whole * expected * (1 - expected)) ** 0.5
    )
    uncut = tokenizer.detokenize(rearrange(ids_of(tokenizer, "no cut here"), 1))
    assert read_back(uncut, "no cut here") if rate == 1 else True


def test_text_that_is_spared_stays(tokenizer: Any) -> None:
    rearrange = fill(tokenizer, fim_rate=1.0, fim_no_prefix="#!")
    ids = ids_of(tokenizer, "#!keep", "change", "#!keep too")
    retained, changed, kept_too = tokenizer.detokenize(rearrange(ids, 3)).split("<|endoftext|>")
    assert (retained, kept_too) == ("#!keep", "#!keep too") and PREFIX in changed


def test_empty_documents_and_ends_stay_where_they_are(tokenizer: Any) -> None:
    eod = tokenizer.eod
    ids = np.array([eod, eod, *tokenizer.tokenize("text"), eod, eod], np.int64)
    assert fill(tokenizer, fim_rate=0.0)(ids, 0).tolist() == ids.tolist()
    parts = tokenizer.detokenize(fill(tokenizer, fim_rate=1.0)(ids, 0)).split("<|endoftext|>")
    assert [bool(part) for part in parts] == [False, False, True, False, False]


def test_what_is_drawn_follows_from_the_seed_and_the_number_of_the_sample(tokenizer: Any) -> None:
    ids = ids_of(tokenizer, *["some text"] * 5)
    in_order = [fill(tokenizer)(ids, index).tolist() for index in range(30)]
    rearrange = fill(tokenizer)
    with ThreadPoolExecutor(4) as threads:
        shuffled = dict(
            zip(reversed(range(30)), threads.map(lambda index: rearrange(ids, index).tolist(), reversed(range(30))))
        )
    assert [shuffled[index] for index in range(30)] == in_order
    assert len({tuple(ids) for ids in in_order}) > 25
    assert (
        fill(tokenizer, seed=6)(ids, 0).tolist() != in_order[0]
        or fill(tokenizer, seed=6)(ids, 1).tolist() != in_order[1]
    )


def test_pieces_of_a_character_that_the_window_cut_are_left_out(tokenizer: Any) -> None:
    whole = tokenizer.tokenize("\U0001f600mid\u20ac")
    window = np.array(whole[3:-1], np.int64)  # the last byte of a smile, and two of the three bytes of a Euro
    result = tokenizer.detokenize(fill(tokenizer, fim_rate=1.0)(window, 2))
    assert "\ufffd" not in result and read_back(result, "mid")


def test_a_tokenizer_without_the_tokens_is_refused_by_their_names() -> None:
    with pytest.raises(ConfigError) as error:
        fill(ByteTokenizer(), fim_pad_token="<pad>")
    for flag in (
        "--fim-prefix-token '<fim_prefix>'",
        "--fim-middle-token",
        "--fim-suffix-token",
        "--fim-pad-token '<pad>'",
    ):
        assert flag in str(error.value)


def test_the_three_tokens_must_differ(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="three different tokens"):
        fill(tokenizer, fim_suffix_token=PREFIX)


def test_what_a_tokenizer_puts_around_text_is_found() -> None:
    class Framed(ByteTokenizer):
        def tokenize(self, text: str) -> list[int]:
            return [1, 2, *text.encode(), 1]

    class Strange(ByteTokenizer):
        def tokenize(self, text: str) -> list[int]:
            return [len(text), *text.encode()]

    assert count_ids_around_text(ByteTokenizer()) == count_ids_around_text(NullTokenizer(50)) == (0, 0)
    assert count_ids_around_text(Framed()) == (2, 1)
    with pytest.raises(ConfigError, match="cannot tokenize a text in pieces"):
        count_ids_around_text(Strange())


def build(tokenizer: Any, prefix: Path, length: int, **changes: Any) -> Any:
    config = DataConfig(data_path=(str(prefix),), split="1", fill=FIMConfig(fim_data=True, **{**NAMES, **changes}))
    train, _, _ = build_gpt_datasets(
        config, sequence_length=length, seed=3, train_samples=40, valid_samples=0, test_samples=0, tokenizer=tokenizer
    )
    return train


def test_samples_of_a_run_are_rearranged_windows_of_the_full_length(tokenizer: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    documents = ["".join(random.choice(list("abcdef ton"), random.integers(1, 40))) for _ in range(30)]
    with IndexedDatasetBuilder(tmp_path / "data", np.int32) as builder:
        for document in documents:
            builder.add_sequence([*tokenizer.tokenize(document), tokenizer.eod])
            builder.end_document()
    plain, marked = (
        build(tokenizer, tmp_path / "data", 32, fim_rate=0.0),
        build(tokenizer, tmp_path / "data", 32, fim_rate=1.0),
    )
    rearrange = fill(tokenizer, seed=3, fim_rate=1.0)
    for index in (*range(40), 7):
        window = np.append(plain[index]["tokens"], plain[index]["labels"][-1])
        expected = rearrange(window, index)[:33].tolist()
        assert len(expected) == 33
        sample = marked[index]
        assert sample["tokens"].tolist() == expected[:-1] and sample["labels"].tolist() == expected[1:]
        assert sample["loss_mask"].tolist() == [1.0] * 32
    assert marked.token_sources(4) == plain.token_sources(4)


def test_what_falls_short_is_padding_without_loss(tokenizer: Any, tmp_path: Path) -> None:
    # Written letter by letter, "abc" is one token when tokenized anew.
    letters = [token for letter in "abc" * 20 for token in tokenizer.tokenize(letter)]
    with IndexedDatasetBuilder(tmp_path / "data", np.int32) as builder:
        builder.add_sequence(letters)
        builder.end_document()
    pad = tokenizer.special["<fim_pad>"]
    for changes, fed in (({}, 0), ({"fim_pad_token": "<fim_pad>"}, 0)):
        sample = build(tokenizer, tmp_path / "data", 50, fim_rate=1.0, **changes)[0]
        real = int(sample["loss_mask"].sum())
        assert 15 < real < 35 and sample["loss_mask"].tolist() == [1.0] * real + [0.0] * (50 - real)
        assert set(sample["tokens"][real + 1 :].tolist()) == {fed} and pad not in sample["tokens"]
        assert set(sample["labels"][real:].tolist()) == {0}
        assert sample["padding_mask"].tolist() == [1] * (real + 1) + [0] * (49 - real)


def test_made_up_data_can_be_rearranged(tokenizer: Any) -> None:
    config = DataConfig(mock_data=True, fill=FIMConfig(fim_data=True, fim_rate=1.0, **NAMES))
    train, _, _ = build_gpt_datasets(
        config, sequence_length=64, seed=3, train_samples=4, valid_samples=0, test_samples=0, tokenizer=tokenizer
    )
    assert all(tokenizer.special[PREFIX] in train[index]["tokens"] for index in range(4))
