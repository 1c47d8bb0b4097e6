"""What an answer to a question of MMMU chooses or says, by the rules of its official program (Yue et al., 2024).

Where that program finds no choice it takes one at random; here such an answer is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_AROUND = tuple(",.!?;:'")
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)
_BEFORE_RESULTS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_SHORT_SENTENCE = 5  # words up to which an option's text is not looked for


def parse_chosen_option(answer: str, options: Mapping[str, str]) -> str | None:
    """Return the letter that an answer chooses, or None: the letter in brackets, else by itself, else an option's text
    in a longer answer; if several occur, the last.
    """
    for sign in _AROUND:
        answer = answer.strip(sign)
    text = f" {answer} "
    ways: list[dict[str, int]] = [
        {letter: text.rfind(f"({letter})") for letter in options},
        {letter: text.rfind(f" {letter} ") for letter in options},
    ]
    if len(text.split()) > _SHORT_SENTENCE:
        ways.append({letter: text.lower().rfind(option.lower()) for letter, option in options.items()})
    for places in ways:
        if named := [letter for letter, place in places.items() if place >= 0]:
            return max(named, key=lambda letter: places[letter])
    return None


def open_answer_score(answer: str, references: Sequence[str]) -> float:
    """Return 1 if what an answer states is a reference, a number rounded to two places or a part of its text; else 0."""
    stated = _stated_results(answer)
    values = [value for text in stated for value in _normalized(text)]
    values += [
        value for text in stated for kind in _NUMBERS for one in kind.findall(text) for value in _normalized(one)
    ]
    right = [value for reference in references for value in _normalized(reference)]
    texts = [value for value in right if isinstance(value, str)]
    return float(
        any(any(text in value for text in texts) if isinstance(value, str) else value in right for value in values)
    )


def _stated_results(answer: str) -> list[str]:
    """Return the shortest ends of sentences behind words such as `is` and `so` (in the last also `=`), or all of it."""
    whole = answer.strip().strip(".").lower()
    *others, last = whole.split("\n")  # in lower case no sentence begins with a capital
    results = []
    for sentence, words in (*((one, _BEFORE_RESULTS) for one in others), (last, (*_BEFORE_RESULTS, "="))):
        ends = [sentence.split(word)[-1].strip() for word in words if word in sentence]
        shortest = ""
        for end in ends:  # an empty end gives way to any other
            shortest = end if not shortest or len(end) < len(shortest) else shortest
        if shortest and shortest not in _AROUND:
            results.append(shortest)
    return results or [whole]


def _normalized(text: str) -> list[str | float]:
    """Return a number rounded to two places, or the text in lower case; a single letter with a space on either side."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lowered = text.lower()
        return [f" {lowered}", f"{lowered} "] if len(lowered) == 1 else [lowered]
