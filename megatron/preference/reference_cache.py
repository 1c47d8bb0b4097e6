"""What a reference says of the answers of a file, kept on disk: a run then needs no second network.

    FOLDER/pairs.jsonl.1f0c9a2b.npz    logprobs [rows, documents]; and of which answers, tokenizer and weights they are, by hashes

A file of other answers, another tokenizer or other weights is refused with what differs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from megatron.adapters.quantized_base import without_adapters
from megatron.adapters.saved import source_base_hash
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.datasets.data_splits import plan_data_splits
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.storage import atomic_file
from megatron.core.parallel import collectives
from megatron.core.tokenizers.base import tokenizer_fingerprint_fields
from megatron.preference.dataset import PreferenceDataset, PreferenceDatasetKind, PreferenceRowSource
from megatron.preference.settings import PreferenceConfig
from megatron.preference.step import compute_answer_logprobs, mismatched_answers_batch
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.checkpoint.resuming import decide_on_first_rank
from megatron.training.data.sample_order import FILL, stages_read_data
from megatron.training.loader import single_pass_microbatches
from megatron.training.state.batch import Batch
from megatron.training.state.trainer import Trainer

_EVERYTHING = AdapterConfig(lora_rank=1)  # of whose base all weights are hashed
_WORDS = {
    "answers": "other answers",
    "tokenizer": "another tokenizer",
    "reference": "another reference network",
    "task": "another task",
}

Identity = Mapping[str, str]


def load_or_cache_reference_logprobs(
    trainer: Trainer, config: PreferenceConfig, kind: PreferenceDatasetKind, network: Callable[[], Trainer | None]
) -> None:
    """Attach the reference's log-probabilities to the run's data files (in `kind.opened`): read from the cache folder,
    or computed and cached there. Collective.

    network: loads the reference; returns None if it is the base under adapters. `DataError` for a stale cache.
    """
    run = trainer.run
    folder = Path(str(config.preference_reference_cache))
    prefixes = dict.fromkeys(
        prefix for plan in plan_data_splits(run.config.data) if plan is not None for prefix in plan.blend.prefixes
    )
    weights = decide_on_first_rank(
        run.mesh.world, lambda: _reference_weights_hash(config, run.config.checkpoint.pretrained_checkpoint)
    )
    loaded: list[Trainer | None] = []
    for prefix in prefixes:
        source = kind.open(prefix)
        identity = _reference_cache_identity(source, kind, weights)
        file = reference_cache_path(folder, prefix)
        values = decide_on_first_rank(run.mesh.world, partial(read_reference_cache, file, identity))
        if values is None:
            loaded = loaded or [network()]
            values = _compute_reference_logprobs(trainer, loaded[0], kind, source)
            if run.mesh.world.is_first:
                _write_reference_cache(file, values, identity)
            run.print_rank_0(
                f"the reference's log-probabilities of {values.shape[0]} rows of {prefix} are kept in {file}"
            )
        else:
            run.print_rank_0(f"{file}: the reference's log-probabilities of {values.shape[0]} rows of {prefix}")
        kind.opened[prefix] = PreferenceRowSource(source.prefix, source.rows, values)


def reference_cache_path(folder: Path, prefix: str) -> Path:
    """Return the path of a data file's reference cache."""
    place = hashlib.sha256(os.path.abspath(prefix).encode()).hexdigest()[:8]
    return folder / f"{Path(prefix).name}.{place}.npz"


def read_reference_cache(file: Path, identity: Identity) -> np.ndarray | None:
    """Return the cached log-probabilities, float64 [rows, answers]; None without a cache. `DataError` if it is of other
    data.
    """
    if not file.is_file():
        return None
    try:
        with np.load(file, allow_pickle=False) as content:
            values, there = content["logprobs"], json.loads(str(content["identity"]))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(f"{file} cannot be read: {error}; remove it") from None
    unlike = [
        f"{_WORDS[name]} ({there.get(name)} there, {mine} here)"
        for name, mine in identity.items()
        if there.get(name) != mine
    ]
    if unlike:
        raise DataError(
            f"the reference cache {file} is stale: it was made with {' and '.join(unlike)}; remove it, or give another "
            "--preference-reference-cache"
        )
    return values


def _write_reference_cache(file: Path, values: np.ndarray, identity: Identity) -> None:
    """Write a cache, complete or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file, durable=False) as out:
        np.savez(out, logprobs=values, identity=np.array(json.dumps(dict(identity))))


def _reference_weights_hash(config: PreferenceConfig, pretrained: str | None) -> str:
    """Return a hash of the reference's weights, equal for every checkpoint format."""
    folder = config.preference_reference or pretrained
    assert folder is not None, "a rule asks for a checkpoint"
    return source_base_hash(open_checkpoint(folder), _EVERYTHING)


def _reference_cache_identity(source: PreferenceRowSource, kind: PreferenceDatasetKind, weights: str) -> Identity:
    """Return what a cache depends on, by name: hashes of answers, tokenizer and weights, and the task."""
    digest = hashlib.sha256()
    for row in source.rows:
        for ids in row.answer_ids:
            digest.update(np.int64(len(ids)).tobytes() + ids.astype(np.int32).tobytes())
    return {
        "answers": digest.hexdigest()[:16],
        "tokenizer": str(tokenizer_fingerprint_fields(kind.tokenizer)["hash"])[:16],
        "reference": weights,
        "task": kind.config.finetune_task,
    }


def _compute_reference_logprobs(
    trainer: Trainer, reference: Trainer | None, kind: PreferenceDatasetKind, source: PreferenceRowSource
) -> np.ndarray:
    """Compute the reference's log-probability of each answer, float64 [rows, 2] (the second of a row of kto is
    mismatched); NaN for rows that fit into no sample. Collective.
    """
    run, task = trainer.run, kind.config.finetune_task
    train, mesh = run.config.train, run.mesh
    dataset = PreferenceDataset(
        source,
        range(len(source.rows)),
        length=kind.sequence_length,
        num_samples=None,
        seed=kind.seed,
        split="reference",
        task=task,
    )
    reads = stages_read_data(run.config, trainer.specs)
    batches = single_pass_microbatches(run, dataset, full_batch=train.global_batch_size, reads=reads, split="reference")
    rounds = -(-len(dataset) // train.global_batch_size)
    sums: dict[tuple[int, int], float] = defaultdict(float)
    for _ in range(rounds):
        mine = [next(batches) for _ in range(train.global_batch_size // (train.micro_batch_size * mesh.dp.size))]
        requested = [mine] if task == "dpo" else [mine, [mismatched_answers_batch(batch, mesh.cp) for batch in mine]]
        for first, part in enumerate(requested):
            with nullcontext() if reference is not None else without_adapters(*trainer.stages):
                result = compute_answer_logprobs(trainer, reference or trainer, part)
            for batch, values in zip(part if result else (), result, strict=True):
                _add_answer_sums(sums, dataset, batch, values, first)
    batches.close()
    everywhere = collectives.gather_objects(dict(sums) if mesh.tp.is_first else {}, mesh.world)
    table = np.full((len(source.rows), 2), np.nan)
    for theirs in everywhere:  # context ranks have parts of the same answers
        for place, value in theirs.items():
            table[place] = value + (0.0 if np.isnan(table[place]) else table[place])
    return table


def _add_answer_sums(
    sums: dict[tuple[int, int], float], dataset: PreferenceDataset, batch: Batch, values: Tensor, first: int
) -> None:
    """Add this rank's sum over the tokens of each answer of a microbatch to `sums`, by (row, answer).

    first: index of the first answer that the batch holds of a row. values: [b, s].
    """
    assert batch.samples is not None, "samples of files have numbers"
    numbers: Any = batch.extras["preference"]
    totals = torch.zeros(len(values), int(numbers.max()) + 1, dtype=torch.float64, device=values.device)
    totals.scatter_add_(1, numbers, values.double())
    for row, sample in zip(totals.tolist(), batch.samples, strict=True):
        if sample == FILL:
            continue
        for place, (number, document) in enumerate(dataset.answer_indices_in_sample(sample)):
            sums[number, first + document] += row[place] if place < len(row) else 0.0
