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

from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.paths import plan_splits
from megatron.core.datasets.storage import atomic_file
from megatron.core.parallel import collectives
from megatron.core.tokenizers.base import fingerprint
from megatron.core.transformer.adapters import without_adapters
from megatron.preference.asking import logprobs, mismatched_batch
from megatron.preference.dataset import PreferenceDataset, PreferenceKind, RowSource
from megatron.preference.settings import PreferenceConfig
from megatron.training.checkpoint.adapters import source_hash
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.checkpoint.resuming import decide_on_first_rank
from megatron.training.data.batch import Batch
from megatron.training.data.sample_order import FILL, needs_text
from megatron.training.loader import single_pass_microbatches
from megatron.training.trainer import Trainer

_EVERYTHING = AdapterConfig(lora_rank=1)  # of whose base all weights are hashed
_WORDS = {
    "answers": "other answers",
    "tokenizer": "another tokenizer",
    "reference": "another reference network",
    "task": "another task",
}

Identity = Mapping[str, str]


def attach_reference_logprobs(
    trainer: Trainer, config: PreferenceConfig, kind: PreferenceKind, network: Callable[[], Trainer | None]
) -> None:
    """Let the files of a run say what the reference gives their answers; computed and kept where that is not known yet.

    network: loads the reference; None: it is the base under adapters. All ranks call this together.
    """
    run = trainer.run
    folder = Path(str(config.preference_reference_cache))
    prefixes = dict.fromkeys(
        prefix for plan in plan_splits(run.config.data) if plan is not None for prefix in plan.blend.prefixes
    )
    weights = decide_on_first_rank(
        run.mesh.world, lambda: _reference_weights_hash(config, run.config.checkpoint.pretrained_checkpoint)
    )
    loaded: list[Trainer | None] = []
    for prefix in prefixes:
        source = kind.open(prefix)
        identity = _identity(source, kind, weights)
        file = cache_file(folder, prefix)
        values = decide_on_first_rank(run.mesh.world, partial(read_cache, file, identity))
        if values is None:
            loaded = loaded or [network()]
            values = _compute_logprobs(trainer, loaded[0], kind, source)
            if run.mesh.world.is_first:
                _write(file, values, identity)
            run.print_rank_0(
                f"the reference's log-probabilities of {values.shape[0]} rows of {prefix} are kept in {file}"
            )
        else:
            run.print_rank_0(f"{file}: the reference's log-probabilities of {values.shape[0]} rows of {prefix}")
        kind.opened[prefix] = RowSource(source.prefix, source.rows, values)


def cache_file(folder: Path, prefix: str) -> Path:
    """Where the values of a data file are kept."""
    place = hashlib.sha256(os.path.abspath(prefix).encode()).hexdigest()[:8]
    return folder / f"{Path(prefix).name}.{place}.npz"


def read_cache(file: Path, identity: Identity) -> np.ndarray | None:
    """The values of a cache, float64 [rows, documents]; None where there is none. Raises `DataError` for one of something else."""
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


def _write(file: Path, values: np.ndarray, identity: Identity) -> None:
    """Write a cache, complete or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file, durable=False) as out:
        np.savez(out, logprobs=values, identity=np.array(json.dumps(dict(identity))))


def _reference_weights_hash(config: PreferenceConfig, pretrained: str | None) -> str:
    """A hash of the reference's weights, the same in every format of a checkpoint."""
    folder = config.preference_reference or pretrained
    assert folder is not None, "a rule asks for a checkpoint"
    return source_hash(open_checkpoint(folder), _EVERYTHING)


def _identity(source: RowSource, kind: PreferenceKind, weights: str) -> Identity:
    digest = hashlib.sha256()
    for row in source.rows:
        for ids in row.answers:
            digest.update(np.int64(len(ids)).tobytes() + ids.astype(np.int32).tobytes())
    return {
        "answers": digest.hexdigest()[:16],
        "tokenizer": str(fingerprint(kind.tokenizer)["hash"])[:16],
        "reference": weights,
        "task": kind.config.finetune_task,
    }


def _compute_logprobs(
    trainer: Trainer, reference: Trainer | None, kind: PreferenceKind, source: RowSource
) -> np.ndarray:
    """What the reference gives each answer, float64 [rows, documents]; NaN for rows that fit into no sample."""
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
    reads = needs_text(run.config, trainer.specs)
    batches = single_pass_microbatches(run, dataset, full_batch=train.global_batch_size, reads=reads, split="reference")
    rounds = -(-len(dataset) // train.global_batch_size)
    sums: dict[tuple[int, int], float] = defaultdict(float)
    for _ in range(rounds):
        mine = [next(batches) for _ in range(train.global_batch_size // (train.micro_batch_size * mesh.dp.size))]
        requested = [mine] if task == "dpo" else [mine, [mismatched_batch(batch, mesh.cp) for batch in mine]]
        for first, part in enumerate(requested):
            with nullcontext() if reference is not None else without_adapters(*trainer.stages):
                result = logprobs(trainer, reference or trainer, part)
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
    """Add the sums over this rank's tokens of each answer of a microbatch. first: number of a row's first document. values: [b, s]."""
    assert batch.samples is not None, "samples of files have numbers"
    numbers: Any = batch.extras["preference"]
    totals = torch.zeros(len(values), int(numbers.max()) + 1, dtype=torch.float64, device=values.device)
    totals.scatter_add_(1, numbers, values.double())
    for row, sample in zip(totals.tolist(), batch.samples, strict=True):
        if sample == FILL:
            continue
        for place, (number, document) in enumerate(dataset.documents(sample)):
            sums[number, first + document] += row[place] if place < len(row) else 0.0
