"""What the data settings say: of which datasets each split is made, by which weights, and which share of them.

    one blend for all:    --data-path [weight] prefix ...  cut by --split        (or --data-args-path FILE)
    a blend a split:      --train-data-path ... --valid-data-path ... --test-data-path ...
                          (or --per-split-data-args-path FILE); every split uses its data whole
    no files:             --mock-data, cut in thirds whatever --split says

A weight is a share of the samples drawn, whatever the datasets' sizes. Without weights every dataset is gone through
once, and mixed in proportion to its size.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from megatron.core.config.flags.declare import ConfigError, raise_config_error_if
from megatron.core.config.settings.data import DataConfig
from megatron.core.datasets.energon import DatasetBlendSpec, EnergonSplitPart, is_energon_path, read_energon_blend
from megatron.core.datasets.storage import DataError, file_or_object_size, is_remote_path
from megatron.core.tokenizers.base import read_flag_file_json, read_flag_file_text

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969, 30, 1"
MOCK_SPLIT = "1, 1, 1"
MOCK_PREFIX = "mock data"

Share = tuple[float, float]  # from where to where of a dataset, as fractions


@dataclass(frozen=True, slots=True)
class SplitBlend:
    """What one split is made of: a blend, and which share of each of its datasets."""

    name: str
    blend: DatasetBlendSpec
    share: Share


def parse_blend(words: Sequence[str], flag: str) -> DatasetBlendSpec:
    """Parse prefixes, or weights (then normalized) and prefixes. `ConfigError`, which names `flag`, if invalid."""
    if not words:
        raise ConfigError(f"{flag} names no dataset")
    weights = [weight for word in words[::2] if (weight := _float_or_none(word)) is not None]
    if len(words) % 2 or not weights:
        return DatasetBlendSpec(tuple(words), None)
    if len(weights) < len(words) // 2:
        word = next(word for word in words[::2] if _float_or_none(word) is None)
        raise ConfigError(
            f"{flag} mixes datasets with and without a weight: {word!r} stands where a weight is "
            "expected; give 'weight prefix weight prefix ...' or prefixes only"
        )
    prefixes = tuple(words[1::2])
    for weight, prefix in zip(weights, prefixes):
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigError(f"{flag} gives {prefix} the weight {weight}; a weight is above 0: leave the dataset out")
    return DatasetBlendSpec(prefixes, normalize_weights(weights))


def _float_or_none(word: str) -> float | None:
    """Return the number that a word stands for, or None if it is none."""
    try:
        return float(word)
    except ValueError:
        return None


def normalize_weights(weights: Sequence[float]) -> tuple[float, ...]:
    """The weights divided by their sum."""
    array = np.array(weights, np.float64)
    return tuple((array / array.sum()).tolist())


def parse_split(text: str) -> list[Share | None]:
    """Parse --split, such as "969, 30, 1", to [first, last) of each split; None: empty. `ConfigError` if invalid."""
    try:
        numbers = [float(number) for number in re.findall(r"[.0-9]+", text)]
    except ValueError:
        numbers = []
    if "-" in text or not 0 < len(numbers) <= len(SPLITS) or sum(numbers) == 0:
        raise ConfigError(f"--split {text!r} is not one to three shares with a sum above 0, such as '969, 30, 1'")
    ends = [0.0, *accumulate(normalize_weights(numbers + [0.0] * (len(SPLITS) - len(numbers))))]
    return [(first, last) if last > first else None for first, last in zip(ends, ends[1:])]


def plan_data_splits(config: DataConfig) -> list[SplitBlend | None]:
    """Return what each split consists of; None: without data. `ConfigError` if settings contradict each other."""
    paths = (config.train_data_path, config.valid_data_path, config.test_data_path)
    source = _data_source_flag(config, any(paths))
    blend = _shared_blend(config, source)
    if blend is not None and any(map(is_energon_path, blend.prefixes)):
        return _plan_energon_splits(config, blend, source)
    if blend is not None:
        shares = parse_split(MOCK_SPLIT if config.mock_data else config.split or DEFAULT_SPLIT)
        return [SplitBlend(name, blend, share) if share else None for name, share in zip(SPLITS, shares)]
    if config.split is not None:
        raise ConfigError(f"--split cuts the data of --data-path; with {source} every split has its own: leave it out")
    words_of = paths if any(paths) else _read_per_split_arguments(config.per_split_data_args_path, source)
    return [
        _plan_separate_split(config, name, words, source) if words else None for name, words in zip(SPLITS, words_of)
    ]


def _suffixes_behind_prefix(prefix: str, config: DataConfig, *, whole_names: bool) -> tuple[str, ...]:
    """Return the endings of the files behind a prefix; empty for a part of an Energon folder, read already."""
    if whole_names:
        return ("",)
    if EnergonSplitPart.parse_data_path(prefix) is not None:
        return ()
    pair = os.path.isfile(f"{prefix}.idx") and not os.path.isfile(prefix)
    return ("",) if (config.chat.sft and not pair) or os.path.isdir(prefix) else (".idx", ".bin")


def _plan_energon_splits(config: DataConfig, blend: DatasetBlendSpec, source: str) -> list[SplitBlend | None]:
    """Plan the splits from Energon's own files. `ConfigError` if other datasets or --split are given too."""
    others = [prefix for prefix in blend.prefixes if not is_energon_path(prefix)]
    if others or config.split is not None:
        wrong = f"{others[0]} beside them" if others else "--split"
        raise ConfigError(
            f"{source}: Energon's folders and YAML files say what they give to each split, and {wrong} does not; use "
            "--train-data-path and --valid-data-path, or leave it out"
        )
    whole = [(name, _expand_energon_blend(config, name, blend, source)) for name in SPLITS]
    return [SplitBlend(name, own, (0.0, 1.0)) if own is not None else None for name, own in whole]


def _expand_energon_blend(
    config: DataConfig, name: str, blend: DatasetBlendSpec, source: str
) -> DatasetBlendSpec | None:
    """Return the blend with each Energon folder or file replaced by its parts for split `name`; None if they are none."""
    given: list[tuple[DatasetBlendSpec, float | None]] = []
    for prefix, weight in zip(blend.prefixes, blend.weights or [None] * len(blend.prefixes)):
        try:
            inner = read_energon_blend(prefix, name) if is_energon_path(prefix) else DatasetBlendSpec((prefix,), None)
        except DataError as error:
            raise ConfigError(str(error)) from None
        given += [(inner, weight)] if inner is not None else []
    prefixes = tuple(prefix for inner, _ in given for prefix in inner.prefixes)
    if not prefixes:
        return None
    weights = _flatten_blend_weights(given, source)
    if weights is None or len(prefixes) == 1 or name != "train" and config.full_validation:
        return DatasetBlendSpec(prefixes, None)
    return DatasetBlendSpec(prefixes, normalize_weights(weights))


def _flatten_blend_weights(given: Sequence[tuple[DatasetBlendSpec, float | None]], source: str) -> list[float] | None:
    """Return outer times inner weight of each part; None if there are none. `ConfigError` where some lack a weight."""
    if all(inner.weights is None and weight is None for inner, weight in given):
        return None
    if len(given) == 1 and given[0][1] is None:
        return list(given[0][0].weights or ())
    result = []
    for inner, weight in given:
        if weight is None or inner.weights is None and len(inner.prefixes) > 1:
            raise ConfigError(
                f"{source} mixes parts with weights and parts that are gone through as often as a file says: "
                f"{' '.join(inner.prefixes)}; give all of them weights, or none"
            )
        result += [weight * own for own in inner.weights or (1.0,)]
    return result


def _data_source_flag(config: DataConfig, per_split: bool) -> str:
    """Return the flag that says where data comes from; `ConfigError` if not one. per_split: each split has paths."""
    given = {
        "--mock-data": config.mock_data,
        "--data-path": config.data_path,
        "--data-args-path": config.data_args_path,
        "--train-data-path, --valid-data-path, --test-data-path": per_split,
        "--per-split-data-args-path": config.per_split_data_args_path,
    }
    sources = [name for name, value in given.items() if value]
    if len(sources) != 1:
        raise ConfigError(
            f"the data comes from {' and '.join(sources) or 'nowhere'}; give exactly one of " + "; ".join(given)
        )
    return sources[0]


def _shared_blend(config: DataConfig, source: str) -> DatasetBlendSpec | None:
    """Return the blend that --split divides; None if each split has its own data."""
    if config.mock_data:
        return DatasetBlendSpec((MOCK_PREFIX,), None)
    if config.data_args_path:
        return parse_blend(read_flag_file_text(config.data_args_path, source).split(), source)
    return parse_blend(config.data_path, source) if config.data_path else None


def check_data_files(config: DataConfig, *, whole_names: bool = False) -> None:
    """Raise `ConfigError` with all local files of the data settings that cannot be opened; remote objects are not
    tried.

    whole_names: paths are file names, not prefixes of indexed datasets.
    """
    plans = [] if config.mock_data else plan_data_splits(config)
    prefixes = dict.fromkeys(
        prefix for plan in plans if plan is not None for prefix in plan.blend.prefixes if not is_remote_path(prefix)
    )
    problems = []
    for path in (
        f"{prefix}{ending}"
        for prefix in prefixes
        for ending in _suffixes_behind_prefix(prefix, config, whole_names=whole_names)
    ):
        if whole_names and os.path.isdir(path):
            problems.append(f"{path} is a folder; name its files")
            continue
        try:
            file_or_object_size(path)
        except DataError as error:
            problems.append(str(error))
    raise_config_error_if(problems)


def _plan_separate_split(config: DataConfig, name: str, words: Sequence[str], source: str) -> SplitBlend:
    """Plan one split from its own blend. `ConfigError` if it gives nothing to the split."""
    blend = parse_blend(words, f"{source} ({name})")
    if any(map(is_energon_path, blend.prefixes)):
        expanded = _expand_energon_blend(config, name, blend, source)
        if expanded is None:
            raise ConfigError(f"{source} ({name}): {' '.join(words)} has nothing for this split")
        blend = expanded
    if len(blend.prefixes) == 1:
        blend = DatasetBlendSpec(blend.prefixes, None)  # the weight of the only dataset says nothing
    return SplitBlend(name, blend, (0.0, 1.0))


def _read_per_split_arguments(path: str | None, flag: str) -> list[Sequence[str] | None]:
    """Read the JSON file of `--per-split-data-args-path`: return the words (weights and prefixes) of each split."""
    assert path is not None, "a source that was given has a path"
    content = read_flag_file_json(path, flag)
    if not isinstance(content, dict) or not content or set(content) - set(SPLITS):
        raise ConfigError(f"{flag} {path} is not an object with some of the keys {', '.join(SPLITS)}")
    words = [content.get(name) for name in SPLITS]
    return [given.split() if isinstance(given, str) else [str(word) for word in given or ()] for given in words]
