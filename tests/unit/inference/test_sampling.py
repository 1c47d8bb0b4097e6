"""Draws against the distributions they promise: formulas written out by hand, and chi-squared tests at fixed seeds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron.inference.sampling import Sampling, draw, probabilities

DRAWS = 20_000
LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, -3.0, 0.0, 1.0])


def softmax(values: list[float]) -> list[float]:
    """By hand."""
    powers = [math.exp(value) for value in values]
    return [power / sum(powers) for power in powers]


def promised(sampling: Sampling) -> list[float]:
    """The distribution of LOGITS under these settings, from its definition, in plain Python."""
    values = [value / sampling.temperature for value in LOGITS.tolist()]
    order = sorted(range(len(values)), key=lambda token: -values[token])
    if sampling.top_k:
        for token in order[sampling.top_k:]:
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
    return [share / sum(shares) for share in shares]


def chi_squared(counts: list[int], shares: list[float]) -> tuple[float, int]:
    """(the statistic, its degrees of freedom) over the tokens that can come."""
    total = sum(counts)
    terms = [(count - total * share) ** 2 / (total * share) for count, share in zip(counts, shares, strict=True) if share > 0]
    return sum(terms), len(terms) - 1


def drawn(sampling: Sampling, seed: int = 1) -> list[int]:
    """How often each token came."""
    generator = torch.Generator().manual_seed(seed)
    tokens = draw(LOGITS.expand(DRAWS, -1), sampling, generator)
    return torch.bincount(tokens, minlength=len(LOGITS)).tolist()


SETTINGS = [Sampling(), Sampling(temperature=0.5), Sampling(temperature=2.0), Sampling(top_k=3), Sampling(top_k=2, temperature=3.0),
            Sampling(top_p=0.7), Sampling(top_p=0.35), Sampling(top_p=0.99, temperature=1.5), Sampling(top_k=5, top_p=0.8)]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_draws_follow_the_distribution_that_the_settings_promise(sampling: Sampling) -> None:
    shares, counts = promised(sampling), drawn(sampling)
    assert all(count == 0 for count, share in zip(counts, shares, strict=True) if share == 0), counts
    statistic, freedom = chi_squared(counts, shares)
    # Wilson and Hilferty's approximation of the quantile that chance exceeds once in 10,000 times
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    assert statistic <= limit, f"{statistic:.1f} over {limit:.1f}: {counts} of {shares}"


def test_the_chi_squared_test_can_tell_settings_apart() -> None:
    for wrong in (Sampling(temperature=1.1), Sampling(top_k=6), Sampling(top_p=0.97)):
        statistic, freedom = chi_squared(drawn(wrong), promised(Sampling()))
        assert statistic > 5 * freedom, wrong


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_probabilities_are_the_definition(sampling: Sampling) -> None:
    torch.testing.assert_close(probabilities(LOGITS.double(), sampling), torch.tensor(promised(sampling), dtype=torch.float64))


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(top_k=1), Sampling(top_k=1, top_p=0.9, temperature=0.0),
                                      Sampling(top_p=1e-9)], ids=str)
def test_greedy_takes_the_likeliest_whatever_the_seed(sampling: Sampling) -> None:
    rows = torch.randn(50, 11, generator=torch.Generator().manual_seed(3))
    for seed in range(3):
        assert torch.equal(draw(rows, sampling, torch.Generator().manual_seed(seed)), rows.argmax(dim=-1))


def test_a_tie_of_the_likeliest_is_one_token_when_greedy() -> None:
    assert probabilities(torch.tensor([1.0, 1.0, 0.0]), Sampling(temperature=0.0)).tolist() == [1.0, 0.0, 0.0]


def test_limits_that_reach_everything_are_none() -> None:
    plain = probabilities(LOGITS, Sampling())
    for sampling in (Sampling(top_k=7), Sampling(top_k=100), Sampling(top_p=1.0)):
        assert torch.equal(probabilities(LOGITS, sampling), plain)


def test_rows_are_drawn_by_themselves() -> None:
    rows: Tensor = torch.full((4, 4), -100.0) + 200.0 * torch.eye(4)[[2, 0, 3, 1]]
    assert draw(rows, Sampling(), torch.Generator().manual_seed(0)).tolist() == [2, 0, 3, 1]


def test_a_seed_gives_the_same_draws_again() -> None:
    assert drawn(Sampling(), seed=5) == drawn(Sampling(), seed=5) != drawn(Sampling(), seed=6)
