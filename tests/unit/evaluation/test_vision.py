"""Scores of answers about images: numbers worked out by hand, and those of the programs that define them.

official_scores.json holds drawn answers with what these programs gave: VQA's vqaEval.py and its version before March 2021, MMF's
evaluator of TextVQA, DocVQA's and Pix2Struct's, MMMU's, and the tokenizer of pycocoevalcap 1.2 (Stanford's 3.4.1).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from megatron.evaluation import vision_metrics
from megatron.evaluation.caption_tokens import tokenize_caption_for_metrics
from megatron.evaluation.mmmu_answers import open_answer_score, parse_chosen_option
from megatron.evaluation.vqa_accuracy import (
    VQA_ACCURACIES,
    normalize_vqa_answer,
    official_vqa_accuracy,
    textvqa_accuracy,
    vqa_accuracy_of_all_ten,
    vqa_accuracy_until_2021,
)

OFFICIAL: dict[str, list[Any]] = json.loads(
    (Path(__file__).with_name("official_scores.json")).read_text(encoding="utf-8")
)

WORDS = "a the man dog red ball horse rides on with two people street of and".split()
# Of pycocoevalcap 1.2 for `captions()`.
PUBLISHED = {"cider": 1.2810847565448469, "bleu": 0.2723370320129817, "mean_rouge_l": 0.5760394040986585}


def captions() -> tuple[list[list[str]], list[list[list[str]]]]:
    """Twelve made-up captions, half of which are nearly one of their references."""
    random.seed(1)

    def sentence() -> list[str]:
        return [random.choice(WORDS) for _ in range(random.randint(3, 12))]

    given = [sentence() for _ in range(12)]
    references = [[sentence() for _ in range(random.randint(1, 5))] for _ in range(12)]
    given[:6] = [[*references[place][0][:-1], "dog"] for place in range(6)]
    return given, references


@pytest.mark.parametrize("name", PUBLISHED)
def test_scores_of_captions_are_those_of_pycocoevalcap(name: str) -> None:
    assert getattr(vision_metrics, name)(*captions()) == pytest.approx(PUBLISHED[name], abs=1e-9)


@pytest.mark.parametrize(
    "caption, tokens",
    [
        ("A Man, riding (a) horse!", "a man riding -lrb- a -rrb- horse"),
        ("It's a dog's well-known red/blue ball; isn't it?", "it 's a dog 's well-known red/blue ball is n't it"),
        ('don\'t "quote" me... 3.5 km & 1,000 people - yes', "do n't quote me 3.5 km & 1,000 people yes"),
        ("two men -- one's hat: U.S. flag at 10:30 a.m.", "two men one 's hat u.s. flag at 10:30 a.m."),
        (
            "a man's t-shirt, size x-large (#5) costs $4.50!",
            "a man 's t-shirt size x-large -lrb- # 5 -rrb- costs $ 4.50",
        ),
    ],
)
def test_captions_are_cut_into_the_tokens_of_the_penn_treebank(caption: str, tokens: str) -> None:
    assert " ".join(tokenize_caption_for_metrics(caption)) == tokens  # of the tokenizer that pycocoevalcap runs


def test_every_caption_has_the_tokens_of_the_official_tokenizer() -> None:
    for caption, tokens in OFFICIAL["tokens"]:
        assert " ".join(tokenize_caption_for_metrics(caption)) == tokens, caption


def test_accuracies_of_vqa_are_those_of_the_official_programs() -> None:
    """vqaEval.py before and after March 2021, which round to two places of a percent, and TextVQA's evaluator."""
    for answer, references, official, before, textvqa in OFFICIAL["vqa"]:
        about = (answer, references)
        assert official_vqa_accuracy(*about) == pytest.approx(official, abs=6e-5), about
        assert vqa_accuracy_until_2021(*about) == pytest.approx(before, abs=6e-5), about
        assert textvqa_accuracy(*about) == pytest.approx(textvqa, abs=6e-5), about
    for answer, normalized in OFFICIAL["normalized"]:
        assert normalize_vqa_answer(answer) == normalized


def test_scores_of_charts_and_documents_are_those_of_the_official_programs() -> None:
    for answer, reference, score in OFFICIAL["relaxed"]:
        assert vision_metrics.relaxed_accuracy(answer, reference) == score, (answer, reference)
    for answer, references, score in OFFICIAL["anls"]:
        assert vision_metrics.anls_score(answer, references) == pytest.approx(score, abs=1e-6), (answer, references)


def test_answers_of_mmmu_are_read_as_the_official_program_does() -> None:
    for answer, options, letter in OFFICIAL["choice"]:
        assert parse_chosen_option(answer, options) == letter, (answer, options)
    for answer, references, score in OFFICIAL["open"]:
        assert open_answer_score(answer, references) == score, (answer, references)


@pytest.mark.parametrize(
    "people, official, of_all", [(0, 0.0, 0.0), (1, 0.3, 1 / 3), (2, 0.6, 2 / 3), (3, 0.9, 1.0), (4, 1.0, 1.0)]
)
def test_both_accuracies_of_vqa_count_people(people: int, official: float, of_all: float) -> None:
    references = ["cat"] * people + [f"other {number}" for number in range(10 - people)]
    assert official_vqa_accuracy("A cat.", references) == pytest.approx(official)
    assert vqa_accuracy_of_all_ten("A cat.", references) == pytest.approx(of_all)


def test_where_all_people_agree_the_official_programs_differ() -> None:
    agreed = ["t-shirt"] * 10
    assert [rule("t-shirt", agreed) for rule in VQA_ACCURACIES.values()] == [1.0, 0.0, 1.0]
    assert [rule("t shirt", agreed) for rule in VQA_ACCURACIES.values()] == [0.0, 0.0, 1.0]
    assert [rule("T-Shirt", agreed) for rule in VQA_ACCURACIES.values()] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "answer, reference, score",
    [
        ("10.4", "10", 1),
        ("10.6", "10", 0),
        ("-9.6", "-10", 1),
        ("52%", "50%", 1),
        ("50%", "50", 0),
        ("50%", "0.5", 1),
        ("Blue", "blue", 1),
        ("blue", "red", 0),
        ("0", "0", 1),
    ],
)
def test_numbers_of_charts_may_be_five_per_cent_off(answer: str, reference: str, score: float) -> None:
    assert vision_metrics.relaxed_accuracy(answer, reference) == score


def test_anls_is_nothing_below_half_the_characters() -> None:
    assert vision_metrics.anls_score("Paris", ["paris", "london"]) == 1.0
    assert vision_metrics.anls_score("pariz", ["paris"]) == pytest.approx(0.8)
    assert vision_metrics.anls_score("abcd", ["abxy"]) == 0.5
    assert vision_metrics.anls_score("abris", ["xyzis"]) == 0.0
    assert vision_metrics.edit_distance("kitten", "sitting") == 3
