"""Scores of answers about images, as their benchmarks define them.

vqa        share of people who gave the answer: at least 3 of 10 count as all (Antol et al., 2015); two ways to count, named
relaxed    numbers within 5 %, other answers equal (ChartQA, Masry et al., 2022)
anls       1 - normalized edit distance, 0 from a half on, of the best reference (Biten et al., 2019)
mmmu       the letter, option or number that an answer gives (Yue et al., 2024); an answer without one is wrong
bleu, mean_rouge_l, cider    captions against several references, on tokens (Papineni 2002, Lin 2004, Vedantam et al. 2015)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

_SHORT = (
    "aren't can't couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd how'll how's I'd I'm I've isn't it'd it'll "
    "let's ma'am might've mightn't mustn't needn't o'clock shan't she's should've shouldn't someone's something's that's "
    "there'd there're there's they'd they'll they're they've wasn't we've weren't what'll what're what's what've when's where'd "
    "where's where've who'd who'll who's who've why'll why're why's won't would've wouldn't y'all you'd you'll you're you've"
)
_CONTRACTIONS = {word.replace("'", "").lower(): word for word in _SHORT.split()}
_NUMBERS = dict(zip("none zero one two three four five six seven eight nine ten".split(), ["0", *map(str, range(11))]))
_ARTICLES = frozenset(("a", "an", "the"))
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_FULL_STOP = re.compile(r"\.(?!\d)")
_LEFT_OUT = frozenset(("'", '"', "''", "`", "``", ".", "?", "!", ",", ":", "-", "--", "...", ";"))
_TOKEN = re.compile(
    r"\.\.\.|--|-lrb-|-rrb-|n't\b|'(?:s|m|d|re|ve|ll)\b"  # marks, and the second half of a contraction
    r"|\d+(?:[.,:/]\d+)+|(?:[a-z]\.){2,}"  # numbers, abbreviations
    r"|[^\W_]+(?:[-/][^\W_]+)*?(?=n't\b)|[^\W_]+(?:[-/][^\W_]+)*|[^\w\s]|_"  # words, and what is left
)


def normalize_vqa_answer(answer: str) -> str:
    """Normalize an answer as VQA's evaluation does: lower case, no punctuation or articles, digits for number words,
    contractions with apostrophes.
    """
    text = answer.replace("\n", " ").replace("\t", " ").strip()
    result = text
    for sign in _PUNCTUATION:
        apart = f"{sign} " in text or f" {sign}" in text or _COMMA_IN_NUMBER.search(text)
        result = result.replace(sign, "" if apart else " ")
    words = _FULL_STOP.sub("", result).lower().split()
    words = [_NUMBERS.get(word, word) for word in words]
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def vqa_accuracy(answer: str, references: Sequence[str], *, leave_one_out: bool = True) -> float:
    """Return the VQA accuracy of an answer, 0 to 1. references: what the annotators answered.

    leave_one_out: the official mean over all sets of the other nine; else min(1, matches / 3) over all.
    """
    given, theirs = normalize_vqa_answer(answer), [normalize_vqa_answer(reference) for reference in references]
    same = sum(reference == given for reference in theirs)
    if not leave_one_out:
        return min(1.0, same / 3)
    return sum(min(1.0, (same - (reference == given)) / 3) for reference in theirs) / len(theirs)


def relaxed_accuracy(answer: str, reference: str) -> float:
    """1 for a number within 5 % of the reference, or an equal text; else 0. A percent sign is left out."""
    numbers = [_parse_number(text) for text in (answer, reference)]
    if numbers[0] is not None and numbers[1]:
        return float(abs(numbers[0] - numbers[1]) <= 0.05 * abs(numbers[1]))
    return float(answer.strip().lower() == reference.strip().lower())


def _parse_number(text: str) -> float | None:
    """Return the number in a text, without a percent sign; None if it is none."""
    try:
        return float(text.strip().rstrip("%"))
    except ValueError:
        return None


def anls_score(answer: str, references: Sequence[str]) -> float:
    """Return the ANLS of an answer: normalized Levenshtein similarity to the best reference, 0 below one half."""
    given = " ".join(answer.lower().split())
    best = 0.0
    for reference in references:
        expected = " ".join(reference.lower().split())
        distance = edit_distance(given, expected) / max(len(given), len(expected), 1)
        best = max(best, 1.0 - distance if distance < 0.5 else 0.0)
    return best


def edit_distance(a: str, b: str) -> int:
    """Return the Levenshtein distance: fewest characters to insert, delete or change."""
    row = list(range(len(b) + 1))
    for place, mine in enumerate(a, 1):
        before, row[0] = row[0], place
        for at, theirs in enumerate(b, 1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (mine != theirs))
    return row[-1]


def parse_chosen_option(answer: str, options: Mapping[str, str]) -> str | None:
    """Return the letter that an answer chooses, or None: the letter in brackets, else by itself, else the option's
    text; if several occur, the last.
    """
    text = f" {answer.strip().strip('.,:;!?') if len(answer) < 4 else answer} "
    for spelled in ("({})", " {} ", "{}."):
        places = {letter: text.rfind(spelled.format(letter)) for letter in options}
        if (last := max(places, key=lambda letter: places[letter])) and places[last] >= 0:
            return last
    places = {letter: text.lower().rfind(option.lower()) for letter, option in options.items()}
    last = max(places, key=lambda letter: places[letter])
    return last if places[last] >= 0 else None


def contains_reference_score(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the answer contains a reference (a number rounded to two places, or a text), else 0."""
    text = answer.lower().replace(",", "")
    numbers = {round(float(one), 2) for one in re.findall(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", text)}
    for reference in references:
        number = _parse_number(reference.replace(",", ""))
        if number is not None and round(number, 2) in numbers or number is None and reference.lower().strip() in text:
            return 1.0
    return 0.0


def tokenize_caption_for_metrics(text: str) -> list[str]:
    """Return the tokens of a caption by the Penn Treebank's rules, in lower case, without punctuation."""
    text = text.lower().replace("(", " -lrb- ").replace(")", " -rrb- ").replace("\n", " ")
    return [token for token in _TOKEN.findall(text) if token not in _LEFT_OUT]


Tokens = Sequence[str]


def _count_ngrams(tokens: Tokens, longest: int = 4) -> Counter[tuple[str, ...]]:
    """Count the n-grams of 1 to `longest` tokens."""
    return Counter(
        tuple(tokens[start : start + size]) for size in range(1, longest + 1) for start in range(len(tokens) - size + 1)
    )


def cider(captions: Sequence[Tokens], references: Sequence[Sequence[Tokens]], *, sigma: float = 6.0) -> float:
    """CIDEr-D of captions, each with its references; usually given times 100.

    The weight of an n-gram follows from the number of images among whose references it is, so a subset of the images has other weights.
    """
    counted = [[_count_ngrams(reference) for reference in group] for group in references]
    images: Counter[tuple[str, ...]] = Counter(gram for group in counted for gram in set().union(*group))
    total = math.log(len(captions))

    def ngram_tfidf(counts: Counter[tuple[str, ...]]) -> dict[tuple[str, ...], float]:
        return {gram: count * (total - math.log(max(1.0, images[gram]))) for gram, count in counts.items()}

    def norms_by_ngram_length(values: Mapping[tuple[str, ...], float]) -> list[float]:
        return [math.sqrt(sum(v * v for gram, v in values.items() if len(gram) == n)) for n in range(1, 5)]

    scores = []
    for caption, group in zip(captions, counted, strict=True):
        mine = ngram_tfidf(_count_ngrams(caption))
        norm, score = norms_by_ngram_length(mine), 0.0
        for counts in group:
            theirs = ngram_tfidf(counts)
            other, products = norms_by_ngram_length(theirs), [0.0] * 4
            for gram, value in mine.items():
                weight = theirs.get(gram, 0.0)
                products[len(gram) - 1] += min(value, weight) * weight
            words = sum(count for gram, count in counts.items() if len(gram) == 2)
            own = sum(count for gram, count in _count_ngrams(caption).items() if len(gram) == 2)
            penalty = math.exp(-((own - words) ** 2) / (2 * sigma**2))
            pairs = zip(products, norm, other, strict=True)
            score += sum((product / (a * b) if a and b else product) * penalty for product, a, b in pairs) / 4
        scores.append(10.0 * score / len(group))
    return sum(scores) / len(scores)


def bleu(captions: Sequence[Tokens], references: Sequence[Sequence[Tokens]], longest: int = 4) -> float:
    """Return corpus BLEU of all captions, n-grams up to `longest`; the closest reference length counts for brevity."""
    right, guessed, length, closest = [0] * longest, [0] * longest, 0, 0
    for caption, group in zip(captions, references, strict=True):
        best: Counter[tuple[str, ...]] = Counter()
        for reference in group:
            best |= _count_ngrams(reference, longest)
        counts = _count_ngrams(caption, longest)
        for gram, count in counts.items():
            right[len(gram) - 1] += min(count, best[gram])
            guessed[len(gram) - 1] += count
        length += len(caption)
        closest += min((abs(len(one) - len(caption)), len(one)) for one in group)[1]
    precision = math.prod((one + 1e-15) / (all_ + 1e-9) for one, all_ in zip(right, guessed, strict=True))
    ratio = (length + 1e-15) / (closest + 1e-9)
    return precision ** (1 / longest) * (math.exp(1 - 1 / ratio) if ratio < 1 else 1.0)


def mean_rouge_l(captions: Sequence[Tokens], references: Sequence[Sequence[Tokens]], beta: float = 1.2) -> float:
    """Mean over captions of the F-measure of longest common subsequences, best precision and best recall of all references."""
    scores = []
    for caption, group in zip(captions, references, strict=True):
        common = [_longest_common_subsequence(caption, reference) for reference in group]
        precision = max((one / len(caption) for one in common), default=0.0) if caption else 0.0
        recall = max(one / max(1, len(reference)) for one, reference in zip(common, group, strict=True))
        both = precision and recall
        scores.append((1 + beta**2) * precision * recall / (recall + beta**2 * precision) if both else 0.0)
    return sum(scores) / len(scores)


def _longest_common_subsequence(a: Tokens, b: Tokens) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for mine in a:
        before = 0
        for at, theirs in enumerate(b, 1):
            before, row[at] = row[at], before + 1 if mine == theirs else max(row[at], row[at - 1])
    return row[-1]
