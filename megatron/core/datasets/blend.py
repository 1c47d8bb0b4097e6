"""From data settings to the training, validation and test datasets of a run.

`paths.py` says which datasets each split is made of; here they are opened, cut into samples and mixed. Every process
may build: the result depends on the settings and the files only, and caches may be raced for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.core.config.data import DataConfig
from megatron.core.config.flags import ConfigError
from megatron.core.datasets.blend_index import blend_order
from megatron.core.datasets.gpt import NO_PAD, GPTDataset, Sample, TokenSource, WindowOptions
from megatron.core.datasets.index_map import IndexCache, load_or_build
from megatron.core.datasets.indexed import DataError, IndexedDataset
from megatron.core.datasets.mock import MockTokens
from megatron.core.datasets.paths import SplitPlan, normalize, plan_splits
from megatron.core.tokenizers.base import Tokenizer

MOST_DATASETS = 32766
COUNTED_AT_ONCE = 2**20

logger = logging.getLogger(__name__)


class BlendedDataset:
    """Samples of several datasets in the order of `blend_order`; each also says which one it is of, as `dataset_id`.

    size: how many samples, drawn by `weights`; the weights sum to 1.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float],
        *,
        size: int,
        split: str,
        cache: IndexCache = IndexCache(None),
    ) -> None:
        if len(datasets) > MOST_DATASETS:
            raise ConfigError(f"a blend of {len(datasets)} datasets; at most {MOST_DATASETS} can be numbered: join "
                              "some with tools/merge_datasets.py")
        self.datasets = tuple(datasets)
        self.description = {
            "class": type(self).__name__,
            "datasets": [dataset.description for dataset in datasets],
            "split": split,
            "weights": list(weights),
            "size": size,
        }
        arrays = load_or_build(
            cache, f"{type(self).__name__}-{split}", self.description,
            {"dataset_index": ((size,), np.int16), "dataset_sample_index": ((size,), np.int64)},
            lambda: dict(zip(("dataset_index", "dataset_sample_index"), blend_order(np.array(weights), size))))
        self.dataset_index, self.dataset_sample_index = arrays["dataset_index"], arrays["dataset_sample_index"]
        # In pieces: counting needs eight bytes for each sample it looks at, and every process does this.
        self.drawn = sum(np.bincount(self.dataset_index[at : at + COUNTED_AT_ONCE], minlength=len(datasets))
                         for at in range(0, size, COUNTED_AT_ONCE))

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


def build_datasets(
    config: DataConfig,
    *,
    sequence_length: int,
    seed: int,
    train_samples: int | None,
    valid_samples: int | None,
    test_samples: int | None,
    tokenizer: Tokenizer,
) -> tuple[GPTDataset | BlendedDataset | None, ...]:
    """The training, validation and test dataset of a run.

    Samples: how many will be drawn; None for one pass over the data, 0 for no dataset. A dataset is None when it has no
    data or no samples.
    """
    options = WindowOptions(
        sequence_length=sequence_length,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        pad=pad_id(tokenizer, config.allow_ambiguous_pad_tokens),
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        eod_mask_loss=config.eod_mask_loss,
    )
    samples = (train_samples, valid_samples, test_samples)
    wanted = [(plan, count) if plan and count != 0 else None for plan, count in zip(plan_splits(config), samples)]
    prefixes = list(dict.fromkeys(prefix for job in wanted if job for prefix in job[0].blend.prefixes))
    with ThreadPoolExecutor(config.num_dataset_builder_threads) as threads:
        sources = dict(zip(prefixes, threads.map(lambda prefix: _open(prefix, config, tokenizer), prefixes)))
        builder = _Builder(config, options, seed, sources, threads.map)
        return tuple(builder.build(*job) if job else None for job in wanted)


def pad_id(tokenizer: Tokenizer, ambiguous: bool) -> int:
    """The padding that is masked out: none when the tokenizer's has another meaning too, unless that is allowed."""
    if tokenizer.pad is None or (tokenizer.pad in tokenizer.special_ids and not ambiguous):
        return NO_PAD
    return tokenizer.pad


def _open(prefix: str, config: DataConfig, tokenizer: Tokenizer) -> TokenSource:
    if config.mock_data:
        return MockTokens(tokenizer.vocab_size, tokenizer.eod)
    return IndexedDataset(prefix, config.mmap_bin_files)


@dataclass(frozen=True, slots=True)
class _Builder:
    """What the datasets of all splits have in common, and how one split's is made of it."""

    config: DataConfig
    options: WindowOptions
    seed: int
    sources: dict[str, TokenSource]
    each: Callable  # the built-in `map`, over the threads that build

    def build(self, plan: SplitPlan, samples: int | None) -> GPTDataset | BlendedDataset | None:
        """One split's dataset of (at least) so many samples; None where the default shares leave nothing for it."""
        prefixes, weights = plan.blend.prefixes, plan.blend.weights
        if self.config.split is None and plan.name != "train" and any(self._is_empty(plan, p) for p in prefixes):
            logger.info("%s: no data, since the default --split leaves none of %s for it", plan.name, " ".join(prefixes))
            return None
        if weights is None and len(prefixes) == 1:
            return self._single(plan, prefixes[0], samples)
        if weights is None:
            return self._once_each(plan, samples)
        if samples is None:
            raise ConfigError(f"one pass over the {plan.name} data is not defined for weights; leave the weights out")
        targets = [math.ceil(samples * weight) for weight in weights]
        prepared = [math.ceil(target * (1 + self.config.mid_level_dataset_surplus)) for target in targets]
        datasets = list(self.each(lambda prefix, count: self._single(plan, prefix, count), prefixes, prepared))
        # Normalised twice, as Megatron does: the last bit of a weight can decide a tie.
        blended = self._blended(plan, datasets, normalize(weights), sum(targets))
        for prefix, dataset, target, drawn in zip(prefixes, datasets, targets, blended.drawn.tolist()):
            if drawn > len(dataset):
                surplus = math.ceil((drawn / target - 1) * 1000) / 1000
                raise DataError(f"the {plan.name} blend draws {drawn} samples of {prefix}, which was prepared for "
                                f"{target} and has {len(dataset)}; give --mid-level-dataset-surplus {surplus} or more")
        return blended

    def _once_each(self, plan: SplitPlan, samples: int | None) -> BlendedDataset:
        datasets = list(self.each(lambda prefix: self._single(plan, prefix, None), plan.blend.prefixes))
        sizes = [len(dataset) for dataset in datasets]
        size = sum(sizes)
        if samples is not None and samples > size and self.config.dataloader_type == "single":
            raise ConfigError(f"{samples} {plan.name} samples are asked for, but the blend without weights goes "
                              f"through its {len(sizes)} datasets once and has {size}; give weights, which repeat "
                              "datasets as needed, or ask for fewer samples")
        return self._blended(plan, datasets, normalize(sizes), size if samples is None else min(samples, size))

    def _sequences(self, plan: SplitPlan, prefix: str) -> range:
        count = len(self.sources[prefix].sequence_lengths)
        return range(*(round(end * float(count)) for end in plan.share))

    def _is_empty(self, plan: SplitPlan, prefix: str) -> bool:
        """Whether a split is too small for a single sample."""
        own = self._sequences(plan, prefix)
        tokens = self.sources[prefix].sequence_lengths[own.start:own.stop].sum()
        return bool(tokens <= self.options.sequence_length)

    def _single(self, plan: SplitPlan, prefix: str, samples: int | None) -> GPTDataset:
        source, sequences = self.sources[prefix], self._sequences(plan, prefix)
        return GPTDataset(source, self.options, sequences=sequences, num_samples=samples, seed=self.seed,
                          split=plan.name, cache=self._cache(prefix))

    def _blended(
        self, plan: SplitPlan, datasets: Sequence[GPTDataset], weights: Sequence[float], size: int
    ) -> BlendedDataset:
        chosen = self.config.data_cache_path
        cache = IndexCache(Path(chosen) if chosen else None)
        blended = BlendedDataset(datasets, weights, size=size, split=plan.name, cache=cache)
        for dataset, drawn in zip(datasets, blended.drawn.tolist()):
            logger.info("%s: %d of %d samples come from %s", plan.name, drawn, size, dataset.source.prefix)
        return blended

    def _cache(self, prefix: str) -> IndexCache:
        if self.config.data_cache_path:
            return IndexCache(Path(self.config.data_cache_path))
        beside = None if self.config.mock_data else Path(prefix) / "cache" / "GPTDataset_indices"
        return IndexCache(beside, chosen=False)
