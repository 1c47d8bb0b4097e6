"""Accuracy of an answer about an image against what ten people answered, as the official programs count it.

    answer -> punctuation -> digits, articles, contractions -> how many of nine people agree, at least 3 as all; mean over the nines

Texts are normalized by fixed steps, whose quirks are part of the score: which texts go through them differs between the programs.

    official        VQA's vqaEval.py since March 2021: all texts, unless all people gave the same answer; then none
    until 2021      before: the answer always; people's answers by punctuation alone, unless all are the same
    TextVQA         M4C's evaluator: all texts, after commas and question marks are taken out
    all ten         min(1, people who agree / 3) over all ten, which many report: all texts
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

AccuracyRule = Callable[[str, Sequence[str]], float]  # (answer, what people answered) -> 0 to 1

# A word without one of the apostrophes here gets it back.
_CONTRACTIONS = (
    "'ow's'at 'twas ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't "
    "he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't "
    "needn't not've o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's "
    "someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're "
    "there's they'd they'd've they'll they're they've wasn't we'd've we've weren't what'll what're what's what've when's "
    "where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've "
    "y'all y'all'd've y'all'll you'd you'd've you'll you're you've"
)
_WITHOUT_APOSTROPHE: Mapping[str, str] = MappingProxyType(
    {
        "somebody'd": "somebodyd",  # as the official table has it
        **{
            word[:place] + word[place + 1 :]: word
            for word in _CONTRACTIONS.split()
            for place, character in enumerate(word)
            if character == "'"
        },
    }
)
_NUMBERS = dict(zip("none zero one two three four five six seven eight nine ten".split(), ["0", *map(str, range(11))]))
_ARTICLES = frozenset(("a", "an", "the"))
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_FULL_STOP = re.compile(r"\.(?!\d)")
_MOST_FULL_STOPS = 32  # the official programs give a flag (re.UNICODE) in the place of the count


def official_vqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """Return the accuracy that VQA's vqaEval.py computes since March 2021, 0 to 1. references: what people answered."""
    given, theirs = _on_one_line(answer), list(map(_on_one_line, references))
    if len(set(theirs)) > 1:
        given, theirs = normalize_vqa_answer(given), list(map(normalize_vqa_answer, theirs))
    return _mean_over_nines(given, theirs)


def vqa_accuracy_until_2021(answer: str, references: Sequence[str]) -> float:
    """Return the accuracy that vqaEval.py computed before March 2021, 0 to 1. references: what people answered."""
    theirs = list(references)
    if len(set(theirs)) > 1:
        theirs = list(map(_without_punctuation, theirs))
    return _mean_over_nines(normalize_vqa_answer(answer), theirs)


def textvqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """Return the accuracy that TextVQA's evaluator computes, 0 to 1. references: what people answered."""
    given, *theirs = (normalize_vqa_answer(_split_words(text)) for text in (answer, *references))
    return _mean_over_nines(given, theirs)


def vqa_accuracy_of_all_ten(answer: str, references: Sequence[str]) -> float:
    """Return min(1, people who agree / 3), all texts normalized. references: what people answered."""
    given = normalize_vqa_answer(answer)
    return min(1.0, sum(normalize_vqa_answer(reference) == given for reference in references) / 3)


VQA_ACCURACIES: Mapping[str, AccuracyRule] = MappingProxyType(
    {
        "official, nine of ten": official_vqa_accuracy,
        "official until 2021": vqa_accuracy_until_2021,
        "all ten": vqa_accuracy_of_all_ten,
    }
)
TEXTVQA_ACCURACIES: Mapping[str, AccuracyRule] = MappingProxyType(
    {"official, nine of ten": textvqa_accuracy, "all ten": vqa_accuracy_of_all_ten}
)


def normalize_vqa_answer(answer: str) -> str:
    """Return an answer in lower case without punctuation and articles, with digits for number words and apostrophes."""
    words = _without_punctuation(_on_one_line(answer)).lower().split()
    words = [_NUMBERS.get(word, word) for word in words]
    return " ".join(_WITHOUT_APOSTROPHE.get(word, word) for word in words if word not in _ARTICLES)


def _on_one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()


def _without_punctuation(text: str) -> str:
    """Return a text with each sign as a space, or left out if it stands beside a space (or any number has a comma)."""
    result = text
    for sign in _PUNCTUATION:
        apart = f"{sign} " in text or f" {sign}" in text or _COMMA_IN_NUMBER.search(text)
        result = result.replace(sign, "" if apart else " ")
    return _FULL_STOP.sub("", result, count=_MOST_FULL_STOPS)


def _split_words(text: str) -> str:
    return text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()


def _mean_over_nines(given: str, theirs: Sequence[str]) -> float:
    """Return the mean over all people of min(1, how many of the others agree / 3)."""
    same = sum(reference == given for reference in theirs)
    return sum(min(1.0, (same - (reference == given)) / 3) for reference in theirs) / len(theirs)
