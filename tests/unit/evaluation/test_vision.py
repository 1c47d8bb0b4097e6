"""Scores of answers about images: numbers worked out by hand, and those of the packages that define them."""

from __future__ import annotations

import random

import pytest

from megatron.evaluation import vision_metrics

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
    assert (
        " ".join(vision_metrics.tokenize_caption_for_metrics(caption)) == tokens
    )  # of the tokenizer that pycocoevalcap runs


@pytest.mark.parametrize(
    "people, official, of_all", [(0, 0.0, 0.0), (1, 0.3, 1 / 3), (2, 0.6, 2 / 3), (3, 0.9, 1.0), (4, 1.0, 1.0)]
)
def test_both_accuracies_of_vqa_count_people(people: int, official: float, of_all: float) -> None:
    references = ["cat"] * people + [f"other {number}" for number in range(10 - people)]
    assert vision_metrics.vqa_accuracy("A cat.", references) == pytest.approx(official)
    assert vision_metrics.vqa_accuracy("A cat.", references, leave_one_out=False) == pytest.approx(of_all)


@pytest.mark.parametrize(
    "answer, expected",
    [
        ("The Red, ball!", "red ball"),
        ("two", "2"),
        ("dont know", "don't know"),
        ("1,000", "1000"),
        ("3.5", "3.5"),
        ("yes.", "yes"),
        ("t-shirt", "t shirt"),
    ],
)
def test_answers_are_compared_in_one_spelling(answer: str, expected: str) -> None:
    assert vision_metrics.normalize_vqa_answer(answer) == expected


@pytest.mark.parametrize(
    "answer, reference, score",
    [
        ("10.4", "10", 1),
        ("10.6", "10", 0),
        ("-9.6", "-10", 1),
        ("52%", "50", 1),
        ("Blue", "blue ", 1),
        ("blue", "red", 0),
        ("0", "0", 1),
    ],
)
def test_numbers_of_charts_may_be_five_per_cent_off(answer: str, reference: str, score: float) -> None:
    assert vision_metrics.relaxed_accuracy(answer, reference) == score


def test_anls_is_nothing_from_half_the_characters_on() -> None:
    assert vision_metrics.anls_score("Paris", ["paris", "london"]) == 1.0
    assert vision_metrics.anls_score("pariz", ["paris"]) == pytest.approx(0.8)
    assert vision_metrics.anls_score("prrrs", ["paris"]) == pytest.approx(0.6)
    assert vision_metrics.anls_score("abris", ["xyzis"]) == 0.0
    assert vision_metrics.edit_distance("kitten", "sitting") == 3


@pytest.mark.parametrize(
    "answer, letter",
    [
        ("(B)", "B"),
        ("The answer is (A), no, (C).", "C"),
        ("B", "B"),
        ("I think B is right", "B"),
        ("it is a green cat", "C"),
        ("C.", "C"),
        ("none", None),
    ],
)
def test_a_choice_is_the_letter_or_the_option_that_an_answer_names(answer: str, letter: str | None) -> None:
    assert vision_metrics.parse_chosen_option(answer, {"A": "red dog", "B": "blue bird", "C": "green cat"}) == letter


def test_open_answers_hold_a_number_or_a_text() -> None:
    assert vision_metrics.contains_reference_score("about 3.141 metres", ["3.14"]) == 1.0
    assert vision_metrics.contains_reference_score("It is the Cell Wall.", ["cell wall"]) == 1.0
    assert vision_metrics.contains_reference_score("It is 31", ["3.14", "pi"]) == 0.0
