"""Draws against the distributions they promise: formulas written out by hand, and chi-squared tests at fixed seeds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.core.config.flags.declare import ConfigError
from megatron.inference.sampling import (
    SamplingParams,
    apply_repetition_penalty,
    draw_tokens,
    sample_by_uniform_numbers,
    sampling_probabilities,
    uniform_random,
)

DRAWS = 20_000
LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, -3.0, 0.0, 1.0])


def softmax(values: list[float]) -> list[float]:
    """By hand."""
    powers = [math.exp(value) for value in values]
    return [power / sum(powers) for power in powers]


def reserved(sampling: SamplingParams) -> list[float]:
    """The distribution of LOGITS under these settings, from its definition, in plain Python."""
    values = [value / sampling.temperature for value in LOGITS.tolist()]
    order = sorted(range(len(values)), key=lambda token: -values[token])
    if sampling.top_k:
        for token in order[sampling.top_k :]:
            values[token] = -math.inf
    shares = softmax(values)
    if sampling.top_p:
        reached, kept = 0.0, set()
        for token in order:
            if reached >= sampling.top_p:
                break
            kept.add(token)
            reached += shares[token]
        shares = [share if token in kept else 0.0 for token, share in enumerate(shares)]
    shares = [share if share >= sampling.min_p * max(shares) else 0.0 for share in shares]
    return [share / sum(shares) for share in shares]


def chi_squared(counts: list[int], shares: list[float]) -> tuple[float, int]:
    """(the statistic, its degrees of freedom) over the tokens that can come."""
    total = sum(counts)
    terms = [
        (count - total * share) ** 2 / (total * share) for count, share in zip(counts, shares, strict=True) if share > 0
    ]
    return sum(terms), len(terms) - 1


def picked(sampling: SamplingParams, seed: int = 1) -> list[int]:
    """How often each token came, by a request's own numbers."""
    numbers = [uniform_random(seed, number) for number in range(DRAWS)]
    return torch.bincount(
        sample_by_uniform_numbers(LOGITS.expand(DRAWS, -1), [sampling] * DRAWS, numbers), minlength=len(LOGITS)
    ).tolist()


def drawn(sampling: SamplingParams, seed: int = 1) -> list[int]:
    """How often each token came, by a generator."""
    generator = torch.Generator().manual_seed(seed)
    tokens = draw_tokens(LOGITS.expand(DRAWS, -1), sampling, generator)
    return torch.bincount(tokens, minlength=len(LOGITS)).tolist()


SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=3),
    SamplingParams(top_k=2, temperature=3.0),
    SamplingParams(top_p=0.7),
    SamplingParams(top_p=0.35),
    SamplingParams(top_p=0.99, temperature=1.5),
    SamplingParams(top_k=5, top_p=0.8),
    SamplingParams(min_p=0.2),
    SamplingParams(min_p=0.5, temperature=2.0),
    SamplingParams(top_k=6, top_p=0.9, min_p=0.3),
]


@pytest.mark.parametrize("source", [picked, drawn])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_draws_follow_the_distribution_that_the_settings_promise(
    sampling: SamplingParams, source: Callable[[SamplingParams], list[int]]
) -> None:
    shares, counts = reserved(sampling), source(sampling)
    assert all(count == 0 for count, share in zip(counts, shares, strict=True) if share == 0), counts
    statistic, freedom = chi_squared(counts, shares)
    # Wilson and Hilferty's approximation of the quantile that chance exceeds once in 10,000 times
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    assert statistic <= limit, f"{statistic:.1f} over {limit:.1f}: {counts} of {shares}"


def test_the_chi_squared_test_can_tell_settings_apart() -> None:
    for wrong in (SamplingParams(temperature=1.1), SamplingParams(top_k=6), SamplingParams(top_p=0.97)):
        for source in (picked, drawn):
            statistic, freedom = chi_squared(source(wrong), reserved(SamplingParams()))
            assert statistic > 5 * freedom, wrong


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_probabilities_are_the_definition(sampling: SamplingParams) -> None:
    torch.testing.assert_close(
        sampling_probabilities(LOGITS.double(), sampling), torch.tensor(reserved(sampling), dtype=torch.float64)
    )


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=1),
        SamplingParams(top_k=1, top_p=0.9, temperature=0.0),
        SamplingParams(top_p=1e-9),
    ],
    ids=str,
)
def test_greedy_takes_the_likeliest_whatever_the_seed(sampling: SamplingParams) -> None:
    rows = torch.randn(50, 11, generator=torch.Generator().manual_seed(3))
    for seed in range(3):
        assert torch.equal(draw_tokens(rows, sampling, torch.Generator().manual_seed(seed)), rows.argmax(dim=-1))


def test_a_tie_of_the_likeliest_is_one_token_when_greedy() -> None:
    assert sampling_probabilities(torch.tensor([1.0, 1.0, 0.0]), SamplingParams(temperature=0.0)).tolist() == [
        1.0,
        0.0,
        0.0,
    ]


def test_limits_that_reach_everything_are_none() -> None:
    plain = sampling_probabilities(LOGITS, SamplingParams())
    for sampling in (SamplingParams(top_k=7), SamplingParams(top_k=100), SamplingParams(top_p=1.0)):
        assert torch.equal(sampling_probabilities(LOGITS, sampling), plain)


def test_rows_are_drawn_by_themselves() -> None:
    rows: Tensor = torch.full((4, 4), -100.0) + 200.0 * torch.eye(4)[[2, 0, 3, 1]]
    assert draw_tokens(rows, SamplingParams(), torch.Generator().manual_seed(0)).tolist() == [2, 0, 3, 1]


def test_a_seed_gives_the_same_draws_again() -> None:
    assert drawn(SamplingParams(), seed=5) == drawn(SamplingParams(), seed=5) != drawn(SamplingParams(), seed=6)


@pytest.mark.parametrize("bins", [7, 100])
def test_numbers_are_uniform_along_a_text_and_across_seeds(bins: int) -> None:
    for numbers in (
        [uniform_random(5, place) for place in range(DRAWS)],
        [uniform_random(seed, 3) for seed in range(DRAWS)],
        [uniform_random(2**63 + seed, seed % 5) for seed in range(DRAWS)],
    ):
        assert 0.0 <= min(numbers) and max(numbers) < 1.0
        counts = torch.histc(torch.tensor(numbers, dtype=torch.float64), bins, 0.0, 1.0).tolist()
        statistic, freedom = chi_squared(counts, [1 / bins] * bins)
        assert statistic <= freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def test_neighbouring_numbers_of_a_text_and_of_seeds_are_independent() -> None:
    for pairs in (
        [(uniform_random(5, place), uniform_random(5, place + 1)) for place in range(DRAWS)],
        [(uniform_random(seed, 0), uniform_random(seed + 1, 0)) for seed in range(DRAWS)],
    ):
        correlation = float(torch.corrcoef(torch.tensor(pairs, dtype=torch.float64).T)[0, 1])
        assert abs(correlation) < 4 / math.sqrt(DRAWS)


@pytest.mark.parametrize("number", [0.0, 0.3, 0.7, 1.0 - 2.0**-52])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_a_token_is_where_the_number_falls_in_the_running_sum(sampling: SamplingParams, number: float) -> None:
    shares = reserved(sampling)
    token = int(sample_by_uniform_numbers(LOGITS[None].double(), [sampling], [number]))
    assert shares[token] > 0 and sum(shares[:token]) <= number + 1e-12 and number < sum(shares[: token + 1]) + 1e-12


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-52])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(top_k=2), SamplingParams(top_p=0.3), SamplingParams(min_p=0.9)], ids=str
)
def test_no_number_falls_on_a_token_that_is_left_out(sampling: SamplingParams, number: float) -> None:
    rows = torch.tensor([[0.0, 0.0, 5.0, 5.1, 0.0, 0.0]])
    assert sampling_probabilities(rows, sampling)[0, int(sample_by_uniform_numbers(rows, [sampling], [number]))] > 0


def test_rows_are_picked_each_with_its_own_settings() -> None:
    settings = [
        SamplingParams(0.0),
        SamplingParams(top_k=2),
        SamplingParams(0.0),
        SamplingParams(0.5),
        SamplingParams(top_k=2),
    ]
    rows = torch.randn(5, 11, generator=torch.Generator().manual_seed(3))
    numbers = [uniform_random(1, place) for place in range(5)]
    alone = [
        int(sample_by_uniform_numbers(rows[place : place + 1], settings[place : place + 1], numbers[place : place + 1]))
        for place in range(5)
    ]
    assert sample_by_uniform_numbers(rows, settings, numbers).tolist() == alone


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_no_numbers_have_no_token_and_spoil_no_other(bad: float) -> None:
    rows = torch.stack((LOGITS, LOGITS.index_fill(0, torch.tensor([2]), bad), LOGITS))
    for sampling in (SamplingParams(0.0), SamplingParams(), SamplingParams(top_k=3, top_p=0.9)):
        first, none, last = sample_by_uniform_numbers(rows, [sampling] * 3, [0.5] * 3).tolist()
        assert none == -1 and first == last >= 0


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-10])
def test_the_coldest_draw_is_the_likeliest_token(temperature: float) -> None:
    logits = torch.randn(2, 257, dtype=torch.float64)
    assert (
        sample_by_uniform_numbers(logits, [SamplingParams(temperature)] * 2, [0.0, 0.999]).tolist()
        == logits.argmax(dim=-1).tolist()
    )


def test_the_penalty_moves_logits_of_seen_tokens_down() -> None:
    found = apply_repetition_penalty(LOGITS, torch.tensor([0, 1, 5]), 2.0)
    assert found.tolist() == [1.0, -2.0, 0.5, 1.5, -3.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"temperature": -1.0}, "temperature -1.0 is negative"),
        ({"top_k": -1}, "top-k -1"),
        ({"top_p": 1.5}, "top-p 1.5"),
        ({"min_p": 2.0}, "min-p 2.0"),
        ({"repetition_penalty": 0.0}, "repetition penalty 0.0"),
        ({"top_p": 0.5, "top_p_bound": 0.6}, "bound 0.6 is above"),
        ({"temperature": -1.0, "top_k": -1}, "2 settings"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SamplingParams(**changes)
