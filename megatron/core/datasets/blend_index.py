"""Which dataset of a blend each sample comes from: always the one that lags furthest behind its share.

With weights w and c[i] samples drawn so far, step t draws from the first dataset with the largest lag
w[i] * max(t, 1) - c[i], computed in double precision: Megatron's order, bit for bit. For most weights the counts stay
within one sample of the shares, but many equal small weights beside large ones can take them two samples away. The exact
order never lets them: of the datasets that may be drawn without running ahead, it draws from the one whose next sample
is due first (Tijdeman's solution of the chairman assignment problem, which bounds the distance by 1 - 1 / (2n - 2)).

Either rule goes one step after the other, but it forgets quickly: started from slightly wrong counts, it soon makes the
right choices. So the steps are cut into lanes that run side by side as array operations, each from guessed counts:

    lane 0  |t = 0 ...      lane 1  |t = n ...      lane 2  |t = 2n ...

Lanes whose start is not where the lane before ended run again from there, at last one by one; once every lane starts
where the one before it ends, the whole is what a single walk would have given.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# (weights [datasets, 1], step of each lane [lanes], counts [datasets, lanes]) -> the dataset that each lane draws from.
Rule = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

SHORTEST_LANE = 256
MOST_LANES = 4096
PASSES_SIDE_BY_SIDE = 3  # after them few lanes are wrong: those where a tiny weight is due


def blend_order(weights: np.ndarray, size: int, *, exact: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """For each of `size` samples: the dataset it comes from, int16 [size], and its number there, int64 [size].

    weights: double [datasets], summing to 1. With weights in proportion to the datasets' sizes and `size` their sum,
    every sample of every dataset comes exactly once. exact: after any number of samples, less than one from the shares.
    """
    datasets = _draw_dataset_order(
        np.asarray(weights, np.float64), size, _earliest_due_dataset if exact else _most_lagging_dataset
    )
    by_dataset = np.argsort(datasets, kind="stable")
    counts = np.bincount(datasets, minlength=len(weights))
    numbers = np.arange(size, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    samples = np.empty(size, np.int64)
    samples[by_dataset] = numbers
    return datasets, samples


def _most_lagging_dataset(weights: np.ndarray, times: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return for each lane the dataset that lags furthest behind its share (Megatron's rule). [lanes]"""
    return (weights * np.maximum(times, 1).astype(np.float64) - counts).argmax(axis=0)


def _earliest_due_dataset(weights: np.ndarray, times: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return for each lane the dataset, of those allowed, whose next sample is due first (Tijdeman's rule). [lanes]"""
    spare = 1 / max(1, 2 * len(weights) - 2)
    lag = weights * (times + 1).astype(np.float64) - counts
    due = (1 - spare - lag) / weights
    # The lags sum to 1, so that one of them reaches 1 / n, which is at least the spare part.
    due[lag < spare * (1 - 1e-9)] = np.inf
    return due.argmin(axis=0)


def _draw_dataset_order(weights: np.ndarray, size: int, rule: Rule) -> np.ndarray:
    """Return the dataset of each of `size` draws by `rule`, int16 [size]; computed in lanes (see the file's head)."""
    lanes = max(1, min(MOST_LANES, size // SHORTEST_LANE))
    steps = -(-size // lanes)
    times = np.arange(lanes, dtype=np.int64) * steps
    starts = _estimate_drawn_counts(weights, times)
    choices, ends = _draw_datasets_in_parallel(weights, times, starts, steps, rule)
    for _ in range(PASSES_SIDE_BY_SIDE):
        true_starts = np.concatenate([starts[:, :1], ends[:, :-1]], axis=1)
        wrong = np.flatnonzero((true_starts != starts).any(axis=0))
        starts = true_starts
        choices[wrong], ends[:, wrong] = _draw_datasets_in_parallel(
            weights, times[wrong], starts[:, wrong], steps, rule
        )
    for lane in range(1, lanes):
        if (ends[:, lane - 1] != starts[:, lane]).any():
            start = ends[:, lane - 1]
            if rule is _most_lagging_dataset:
                choices[lane], ends[:, lane] = _draw_datasets_one_by_one(weights, int(times[lane]), start, steps)
            else:
                drawn, end = _draw_datasets_in_parallel(weights, times[lane : lane + 1], start[:, None], steps, rule)
                choices[lane], ends[:, lane] = drawn[0], end[:, 0]
    return choices.reshape(-1)[:size]


def _estimate_drawn_counts(weights: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Estimate the draws of each dataset before each time: its share, rounded to sum to the time. [datasets, lanes]"""
    ideal = np.outer(weights, times)
    counts = np.floor(ideal)
    missing = times - counts.sum(axis=0)
    place = np.argsort(np.argsort(counts - ideal, axis=0, kind="stable"), axis=0, kind="stable")
    return counts + (place < missing)


def _draw_datasets_in_parallel(
    weights: np.ndarray, times: np.ndarray, starts: np.ndarray, steps: int, rule: Rule
) -> tuple[np.ndarray, np.ndarray]:
    """Make `steps` draws in every lane, from its time and counts.

    Returns the datasets drawn, int16 [lanes, steps], and the counts afterwards, [datasets, lanes].
    """
    lanes = len(times)
    columns = np.arange(lanes)
    counts = np.array(starts, order="C")
    flat = counts.reshape(-1)
    choices = np.empty((steps, lanes), np.int16)
    for step in range(steps if lanes else 0):
        choices[step] = chosen = rule(weights[:, None], times + step, counts)
        flat[chosen * lanes + columns] += 1
    return np.ascontiguousarray(choices.T), counts


def _draw_datasets_one_by_one(
    weights: np.ndarray, time: int, start: np.ndarray, steps: int
) -> tuple[list[int], list[float]]:
    """Make `steps` draws by Megatron's rule in one lane; Python is faster for one. Returns datasets and counts."""
    shares, counts, choices = weights.tolist(), start.tolist(), []
    for now in range(time, time + steps):
        weight = float(max(now, 1))
        lag = [share * weight - count for share, count in zip(shares, counts)]
        chosen = lag.index(max(lag))
        counts[chosen] += 1
        choices.append(chosen)
    return choices, counts
