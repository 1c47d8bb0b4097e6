"""From data settings to the training, validation and test datasets of a run.

`data_splits.py` says which datasets each split is made of; here they are opened, cut into samples by a `DatasetKind` and
mixed. Every process may build: the result depends on the settings and the files only, and caches may be raced for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import DataConfig
from megatron.core.datasets.blend_index import blend_order
from megatron.core.datasets.data_splits import SplitBlend, normalize_weights, plan_data_splits
from megatron.core.datasets.dataset_protocols import DatasetKind, Sample, SplitDataset, SplitRequest, TokenSpan
from megatron.core.datasets.index_map import IndexCacheFolder, load_or_build_arrays
from megatron.core.datasets.storage import is_remote_path
from megatron.core.datasets.text_kinds import make_gpt_dataset_kind
from megatron.core.tokenizers.base import Tokenizer

MOST_DATASETS = 32766
COUNTED_AT_ONCE = 2**20

Samples = tuple[int | None, int | None, int | None]

logger = logging.getLogger(__name__)


class BlendedDataset:
    """Samples of several datasets in the order of `blend_order`; each also says which one it is of, as `dataset_id`.

    size: how many samples, drawn by `weights`; the weights sum to 1. exact: in the exact order of `blend_order`.
    """

    def __init__(
        self,
        datasets: Sequence[SplitDataset],
        weights: Sequence[float],
        *,
        size: int,
        split: str,
        exact: bool = False,
        cache: IndexCacheFolder = IndexCacheFolder(None),
    ) -> None:
        if len(datasets) > MOST_DATASETS:
            raise ConfigError(
                f"a blend of {len(datasets)} datasets; at most {MOST_DATASETS} can be numbered: join "
                "some with tools/merge_datasets.py"
            )
        self.datasets, self.weights = tuple(datasets), tuple(weights)
        self.description = {
            "class": type(self).__name__,
            "datasets": [dataset.description for dataset in datasets],
            "split": split,
            "weights": list(weights),
            "size": size,
        } | ({"order": "exact"} if exact else {})
        arrays = load_or_build_arrays(
            cache,
            f"{type(self).__name__}-{split}",
            self.description,
            {"dataset_index": ((size,), np.int16), "dataset_sample_index": ((size,), np.int64)},
            lambda: dict(
                zip(("dataset_index", "dataset_sample_index"), blend_order(np.array(weights), size, exact=exact))
            ),
        )
        self.dataset_index, self.dataset_sample_index = arrays["dataset_index"], arrays["dataset_sample_index"]
        self.drawn = self.samples_per_dataset(size)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> Sample:
        """The index-th sample of the blend."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = self.dataset_index[index]
        sample = self.datasets[number][int(self.dataset_sample_index[index])]
        return {**sample, "dataset_id": np.array(number, np.int64)}

    def samples_per_dataset(self, samples: int) -> np.ndarray:
        """How many of the first `samples` samples come from each dataset. int64 [datasets]"""
        # In pieces: counting needs eight bytes for each sample it looks at, and every process does this.
        ends = [*range(0, samples, COUNTED_AT_ONCE), samples]
        return sum(
            (np.bincount(self.dataset_index[at:end], minlength=len(self.datasets)) for at, end in zip(ends, ends[1:])),
            np.zeros(len(self.datasets), np.int64),
        )

    def token_sources(self, index: int) -> list[TokenSpan]:
        """Where the tokens of the index-th sample came from."""
        return self.datasets[self.dataset_index[index]].token_sources(int(self.dataset_sample_index[index]))

    def positions_of_dataset_samples(self, number: int, samples: np.ndarray) -> np.ndarray:
        """Return the positions in the blend, ascending, of these samples of dataset `number`. int64 [positions]"""
        places = np.flatnonzero(self.dataset_index == number)
        return places[np.isin(self.dataset_sample_index[places], samples)]


Splits = tuple[
    SplitDataset | BlendedDataset | None, SplitDataset | BlendedDataset | None, SplitDataset | BlendedDataset | None
]


def build_gpt_datasets(
    config: DataConfig,
    *,
    sequence_length: int,
    seed: int,
    train_samples: int | None,
    valid_samples: int | None,
    test_samples: int | None,
    tokenizer: Tokenizer,
) -> Splits:
    """Build a GPT run's training, validation and test datasets; arguments and result as in `build_split_datasets`."""
    kind = make_gpt_dataset_kind(config, sequence_length=sequence_length, seed=seed, tokenizer=tokenizer)
    return build_split_datasets(config, kind, (train_samples, valid_samples, test_samples))


def build_split_datasets(config: DataConfig, kind: DatasetKind, samples: Samples) -> Splits:
    """Build a run's training, validation and test datasets, of any kind.

    samples: the number to draw from each; None: one epoch; 0: no dataset. Returns None in the place of a split without
    data or samples. `ConfigError` or `DataError` if the settings or files do not allow it.
    """
    requested = [
        (plan, count) if plan and count != 0 else None for plan, count in zip(plan_data_splits(config), samples)
    ]
    prefixes = list(dict.fromkeys(prefix for job in requested if job for prefix in job[0].blend.prefixes))
    with ThreadPoolExecutor(config.num_dataset_builder_threads) as threads:
        sources = dict(zip(prefixes, threads.map(kind.open, prefixes)))
        builder = _SplitDatasetBuilder(config, kind, sources, threads.map)
        built = [builder.build(*job) if job is not None else None for job in requested]
    for dataset, job in zip(built, requested):
        if dataset is not None and job is not None:
            _log_data_sources(dataset, *job, most_epochs=config.warn_epochs)
    train, valid, test = built
    return train, valid, test


@dataclass(frozen=True, slots=True)
class DataSourceUsage:
    """What a run draws from one source: samples, the tokens they hold, and how often that goes through the source."""

    prefix: str
    weight: float
    samples: int
    tokens: int
    epochs: float


def data_source_usage(dataset: SplitDataset | BlendedDataset, samples: int | None) -> list[DataSourceUsage]:
    """Return what each source gives to the first `samples` samples (None: to all; more than there are: again)."""
    count = len(dataset) if samples is None else samples
    parts: tuple[SplitDataset, ...]
    weights: Sequence[float]
    if isinstance(dataset, BlendedDataset):
        parts, weights = dataset.datasets, dataset.weights
        rounds, rest = divmod(count, len(dataset))
        drawn = (rounds * dataset.samples_per_dataset(len(dataset)) + dataset.samples_per_dataset(rest)).tolist()
    else:
        parts, weights, drawn = (dataset,), (1.0,), (count,)
    epochs = [number / part.samples_per_epoch for number, part in zip(drawn, parts)]
    return [
        DataSourceUsage(part.prefix, weight, number, round(times * part.tokens_per_epoch), times)
        for part, weight, number, times in zip(parts, weights, drawn, epochs)
    ]


def _log_data_sources(
    dataset: SplitDataset | BlendedDataset, plan: SplitBlend, samples: int | None, *, most_epochs: float
) -> None:
    """Log a table of what the run draws from each source; warn of sources used for more than `most_epochs` epochs."""
    uses = data_source_usage(dataset, samples)
    total = sum(use.samples for use in uses)
    width = max(len("source"), *(len(use.prefix) for use in uses))
    logger.info("%s: %d samples from %d source%s", plan.name, total, len(uses), "" if len(uses) == 1 else "s")
    logger.info("  %s %11s %12s %9s %16s %9s", "source".ljust(width), "weight", "samples", "share", "tokens", "epochs")
    for use in uses:
        logger.info(
            "  %s %11.6g %12d %8.4f%% %16d %9.4g",
            use.prefix.ljust(width),
            use.weight,
            use.samples,
            100 * use.samples / max(1, total),
            use.tokens,
            use.epochs,
        )
    furthest = max(abs(use.samples - use.weight * total) for use in uses)
    if furthest > 1:
        logger.info(
            "  counts are up to %.2f samples from the weights' shares; --blend-order exact keeps them within one",
            furthest,
        )
    for use in uses:
        if use.epochs > most_epochs:
            # All ranks know it, and one says it: lines below a warning come from the first rank alone.
            logger.info(
                "WARNING: %s: %s is gone through %.1f times, more than --warn-epochs %g: give it a smaller weight, or more "
                "text",
                plan.name,
                use.prefix,
                use.epochs,
                most_epochs,
            )


@dataclass(frozen=True, slots=True)
class _SplitDatasetBuilder:
    """Builds the dataset of each split. sources: by prefix, opened. each: `map` over a thread pool."""

    config: DataConfig
    kind: DatasetKind
    sources: dict[str, Any]
    each: Callable  # the built-in `map`, over the threads that build

    def build(self, plan: SplitBlend, samples: int | None) -> SplitDataset | BlendedDataset | None:
        """Return one split's dataset, of at least `samples` samples (None: one epoch). None if the default --split
        leaves the split too little for a sample. `ConfigError` for weights without a number of samples.
        """
        prefixes, weights = plan.blend.prefixes, plan.blend.weights
        if (
            self.config.split is None
            and plan.name != "train"
            and any(self._split_has_no_sample(plan, p) for p in prefixes)
        ):
            logger.info(
                "%s: no data, since the default --split leaves none of %s for it", plan.name, " ".join(prefixes)
            )
            return None
        if weights is None and len(prefixes) == 1:
            return self._build_source_dataset(plan, prefixes[0], samples)
        if weights is None:
            return self._build_one_epoch_blend(plan, samples)
        if samples is None:
            raise ConfigError(f"one pass over the {plan.name} data is not defined for weights; leave the weights out")
        targets = [math.ceil(samples * weight) for weight in weights]
        prepared = [math.ceil(target * (1 + self.config.mid_level_dataset_surplus)) for target in targets]
        for _ in range(2):
            datasets = list(
                self.each(lambda prefix, count: self._build_source_dataset(plan, prefix, count), prefixes, prepared)
            )
            # Normalised twice, as Megatron does: the last bit of a weight can decide a tie.
            blended = self._build_blended(plan, datasets, normalize_weights(weights), sum(targets))
            drawn = blended.drawn.tolist()
            if all(count <= len(dataset) for count, dataset in zip(drawn, datasets)):
                return blended
            # Rounding up the shares of many small weights makes the blend longer, and takes more of the large ones.
            prepared = [max(pair) for pair in zip(prepared, drawn)]
        raise AssertionError("datasets of as many samples as are drawn are large enough")

    def _build_one_epoch_blend(self, plan: SplitBlend, samples: int | None) -> BlendedDataset:
        """Blend a split's sources, each once, up to `samples`. `ConfigError` if --dataloader-type single lacks some."""
        datasets = list(self.each(lambda prefix: self._build_source_dataset(plan, prefix, None), plan.blend.prefixes))
        sizes = [len(dataset) for dataset in datasets]
        size = sum(sizes)
        if samples is not None and samples > size and self.config.dataloader_type == "single":
            raise ConfigError(
                f"{samples} {plan.name} samples are asked for, but the blend without weights goes "
                f"through its {len(sizes)} datasets once and has {size}; give weights, which repeat "
                "datasets as needed, or ask for fewer samples"
            )
        return self._build_blended(
            plan, datasets, normalize_weights(sizes), size if samples is None else min(samples, size)
        )

    def _split_range(self, plan: SplitBlend, prefix: str) -> range:
        """Return the range of the source's sequences (or documents, as the kind counts) that belongs to the split."""
        count = self.kind.num_split_units(self.sources[prefix])
        return range(*(round(end * float(count)) for end in plan.share))

    def _split_has_no_sample(self, plan: SplitBlend, prefix: str) -> bool:
        """Whether a split is too small for a single sample."""
        return not self.kind.split_has_any_sample(self.sources[prefix], self._split_range(plan, prefix))

    def _build_source_dataset(self, plan: SplitBlend, prefix: str, samples: int | None) -> SplitDataset:
        """Build one source's dataset for a split: at least `samples` samples, or one epoch if None."""
        request = SplitRequest(self._split_range(plan, prefix), samples, plan.name, self._index_cache(prefix))
        return self.kind.build_one_split(self.sources[prefix], request)

    def _build_blended(
        self, plan: SplitBlend, datasets: Sequence[SplitDataset], weights: Sequence[float], size: int
    ) -> BlendedDataset:
        cache = IndexCacheFolder.from_flag(self.config.data_cache_path, otherwise=None)
        return BlendedDataset(
            datasets, weights, size=size, split=plan.name, exact=self.config.blend_order == "exact", cache=cache
        )

    def _index_cache(self, prefix: str) -> IndexCacheFolder:
        """Return where a source's index is cached: --data-cache-path, else beside local files."""
        nowhere = self.config.mock_data or is_remote_path(prefix)
        beside = None if nowhere else Path(prefix) / "cache" / f"{self.kind.name}_indices"
        return IndexCacheFolder.from_flag(self.config.data_cache_path, otherwise=beside)
