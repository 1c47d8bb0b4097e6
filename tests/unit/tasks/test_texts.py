"""Texts as rows of ids: as transformers builds them for a pair, and what is said of those that are too long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.datasets.indexed import DataError
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import ByteTokenizer, build_tokenizer
from megatron.tasks.glue import GlueSample
from megatron.tasks.race import RaceQuestion
from megatron.tasks.texts import MultipleChoiceSamples, PairSamples, TextPairTokenizer, truncation_warning
from tests.helpers.architecture import ROOT

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
VOCABULARY = ROOT / "examples/data/demo-bert-vocab.txt"
PAIRS = [
    ("The state of the union", "is strong ."),
    ("It rains", "It is wet outside , and cold , and the wind blows hard ."),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Word pieces of the demo corpus."""
    return build_tokenizer(TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(VOCABULARY)))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The same vocabulary in transformers."""
    folder = tmp_path_factory.mktemp("bert")
    Path(folder / "vocab.txt").write_bytes(VOCABULARY.read_bytes())
    return transformers.BertTokenizer.from_pretrained(folder, do_lower_case=True)


def texts() -> list[GlueSample]:
    """The pairs as samples of two classes."""
    return [
        GlueSample(str(number), first, second, number, f"dev.tsv:{number + 2}")
        for number, (first, second) in enumerate(PAIRS)
    ]


@pytest.mark.parametrize("second", [True, False])
def test_rows_are_those_of_transformers(tokenizer: Tokenizer, theirs: object, second: bool) -> None:
    given = texts() if second else [GlueSample(text.uid, text.first, None, text.label, text.place) for text in texts()]
    samples = PairSamples(given, TextPairTokenizer(tokenizer, 24))
    for number, text in enumerate(given):
        expected = theirs(text.first, text.second, padding="max_length", max_length=24, return_tensors="np")
        sample = samples[number]
        assert np.array_equal(sample["tokens"], expected["input_ids"][0])
        assert np.array_equal(sample["types"], expected["token_type_ids"][0])
        assert np.array_equal(sample["padding_mask"], expected["attention_mask"][0])
        assert (
            sample["labels"].tolist() == [number]
            and sample["loss_mask"].tolist() == [1.0]
            and sample["index"].tolist() == [number]
        )


def test_a_tokenizer_that_frames_texts_gives_the_rows_of_one_that_does_not(
    tokenizer: Tokenizer, theirs: object, tmp_path: Path
) -> None:
    theirs.save_pretrained(tmp_path)
    framing = build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    assert framing.tokenize("rain")[0] == tokenizer.cls and framing.tokenize("rain")[-1] == tokenizer.sep
    pairs, question = texts(), RaceQuestion("q", "It rained .", ("What fell ? rain", "What fell ? snow"), 0, "1.txt:1")
    for given in (
        PairSamples(pairs, TextPairTokenizer(framing, 24)),
        MultipleChoiceSamples([question], TextPairTokenizer(framing, 24)),
    ):
        expected = (
            PairSamples(pairs, TextPairTokenizer(tokenizer, 24))
            if isinstance(given, PairSamples)
            else MultipleChoiceSamples([question], TextPairTokenizer(tokenizer, 24))
        )
        for number in range(len(given)):
            found, wanted = given[number], expected[number]
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    assert (
        PairSamples(pairs, TextPairTokenizer(framing, 12)).cut
        == PairSamples(pairs, TextPairTokenizer(tokenizer, 12)).cut
    )


def test_a_sample_without_a_label_has_no_loss(tokenizer: Tokenizer) -> None:
    sample = PairSamples([GlueSample("0", "a", "b", None, "x:1")], TextPairTokenizer(tokenizer, 8))[0]
    assert sample["loss_mask"].tolist() == [0.0]


def test_what_is_too_long_loses_its_end_and_is_named(tokenizer: Tokenizer) -> None:
    samples = PairSamples(texts(), TextPairTokenizer(tokenizer, 12))
    whole = PairSamples(texts(), TextPairTokenizer(tokenizer, 40))[1]
    sample = samples[1]
    assert sample["tokens"].tolist() == [*whole["tokens"][:11], tokenizer.sep] and sample["padding_mask"].all()
    assert samples.cut == [f"dev.tsv:3 ({int(whole['padding_mask'].sum())} tokens)"]
    assert "1 of 2 samples are longer than --seq-length 12: dev.tsv:3" in truncation_warning(
        samples, "dev", 12, refuse=False
    )
    with pytest.raises(DataError, match="dev.tsv:3"):
        truncation_warning(samples, "dev", 12, refuse=True)
    assert truncation_warning(PairSamples(texts(), TextPairTokenizer(tokenizer, 40)), "dev", 40, refuse=True) == ""


def test_answers_share_their_article_and_missing_ones_have_no_chance(tokenizer: Tokenizer) -> None:
    question = RaceQuestion(
        "q", "It rained all day .", ("What fell ? rain", "What fell ? snow", "What fell ? ash"), 2, "1.txt:1"
    )
    sample = MultipleChoiceSamples([question], TextPairTokenizer(tokenizer, 32))[0]
    assert sample["tokens"].shape == sample["types"].shape == sample["padding_mask"].shape == (4, 32)
    assert sample["choices"].tolist() == [0.0, 0.0, 0.0, -np.inf] and sample["labels"].tolist() == [2]
    for row, answer in enumerate(question.answers):
        kept = sample["tokens"][row][sample["padding_mask"][row] == 1].tolist()
        expected = [
            tokenizer.cls,
            *tokenizer.tokenize(answer),
            tokenizer.sep,
            *tokenizer.tokenize(question.article),
            tokenizer.sep,
        ]
        assert kept == expected


def test_a_long_question_leaves_room_for_the_article(tokenizer: Tokenizer) -> None:
    question = RaceQuestion("q", "wet", ("rain " * 300, "snow"), 0, "1.txt:1")
    sample = MultipleChoiceSamples([question], TextPairTokenizer(tokenizer, 200))[0]
    first = sample["types"][0].tolist()
    assert sum(1 for kind, mask in zip(first, sample["padding_mask"][0]) if kind == 0 and mask) == 128 + 2


def test_a_tokenizer_without_separators_is_refused() -> None:
    with pytest.raises(ConfigError, match="cls, sep, pad"):
        TextPairTokenizer(ByteTokenizer(), 8)
