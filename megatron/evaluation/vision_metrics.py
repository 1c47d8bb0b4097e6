"""Scores of answers about images, as their benchmarks define them.

relaxed    numbers within 5 %, other answers equal (ChartQA, Masry et al., 2022)
anls       1 - normalized edit distance, 0 below one half, of the best reference (Biten et al., 2019)
bleu, mean_rouge_l, cider    captions against several references, on tokens (Papineni 2002, Lin 2004, Vedantam et al. 2015)

Those of VQA are in `vqa_accuracy.py`, of MMMU in `mmmu_answers.py`; `caption_tokens.py` cuts captions into tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence


def relaxed_accuracy(answer: str, reference: str) -> float:
    """Return 1 for a number within 5 % of the reference, or a text that is equal but for case; else 0.

    A number with a percent sign is a hundredth: 50% is 0.5, as Pix2Struct's program for ChartQA counts, which most use.
    """
    given, right = _parse_number_or_percentage(answer), _parse_number_or_percentage(reference)
    if given is not None and right:
        return float(abs(given - right) / abs(right) <= 0.05)
    return float(answer.lower() == reference.lower())


def _parse_number_or_percentage(text: str) -> float | None:
    """Return the number in a text, of a percentage its hundredth; None if it is none."""
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def anls_score(answer: str, references: Sequence[str]) -> float:
    """Return the ANLS of an answer: normalized Levenshtein similarity to the best reference, 0 below one half.

    As DocVQA's official program, distances are those of texts in lower case with single spaces, lengths those of the texts as they are.
    """
    given = " ".join(answer.lower().split())
    best = 0.0
    for reference in references:
        length = max(len(answer.upper()), len(reference.upper()))
        distance = edit_distance(given, " ".join(reference.lower().split()))
        best = max(best, 1.0 - distance / length if length else 1.0)
    return best if best >= 0.5 else 0.0


def edit_distance(a: str, b: str) -> int:
    """Return the Levenshtein distance: fewest characters to insert, delete or change."""
    row = list(range(len(b) + 1))
    for place, mine in enumerate(a, 1):
        before, row[0] = row[0], place
        for at, theirs in enumerate(b, 1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (mine != theirs))
    return row[-1]


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
