#!/usr/bin/env python3
"""How many tokens a second one worker reads: our GPTDataset with collate, a plain memory-mapped reader, and Megatron's.

    python benchmarks/loader.py
    python benchmarks/loader.py --megatron FOLDER    (where pip install --target put megatron-core, with its helpers)

A pair of random ids is read in shuffled order; micro batches of 4. The plain reader is a dozen lines that map the file,
join the pieces of a sample and check nothing. Each measurement is a process of its own, the peers in turn. All three
must give the same tokens and labels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, SEED, BATCH = 50257, 1234, 4


def ours(prefix: str, length: int, mmap: bool = True) -> tuple[int, Callable]:
    """(samples, read a micro batch)"""
    from megatron.core.datasets.dataset_protocols import SplitRequest
    from megatron.core.datasets.gpt import GPTDataset, GPTSampleOptions
    from megatron.core.datasets.indexed import IndexedDataset
    from megatron.core.datasets.samplers import collate

    source = IndexedDataset(prefix, mmap)
    data = GPTDataset(
        source,
        GPTSampleOptions(length, VOCABULARY, VOCABULARY - 1),
        SplitRequest(range(len(source)), None, "train"),
        seed=SEED,
    )
    return len(data), lambda numbers: collate([data[number] for number in numbers])


def ours_unmapped(prefix: str, length: int) -> tuple[int, Callable]:
    """The same with --no-mmap-bin-files."""
    return ours(prefix, length, mmap=False)


def plain(prefix: str, length: int) -> tuple[int, Callable]:
    """What one writes in a few minutes: numpy and the indices."""
    from megatron.core.datasets.index_map import build_gpt_indices, plan_epochs

    count = np.fromfile(f"{prefix}.idx", np.int64, 1, offset=18)[0]
    lengths = np.fromfile(f"{prefix}.idx", np.int32, count, offset=34)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    total = int(starts[-1])
    arrays = build_gpt_indices(
        lengths, plan_epochs(total, None, sequence_length=length), first=0, sequence_length=length, seed=SEED
    )
    documents, samples, shuffle = arrays["document_index"], arrays["sample_index"], arrays["shuffle_index"]
    ids = np.memmap(f"{prefix}.bin", np.uint16, mode="r")

    def sample(number: int) -> dict[str, np.ndarray]:
        (first, begin), (last, end) = samples[shuffle[number]], samples[shuffle[number] + 1]
        pieces = []
        for place in range(first, last + 1):
            start = starts[documents[place]]
            pieces.append(
                ids[
                    start + (begin if place == first else 0) : start
                    + (end + 1 if place == last else lengths[documents[place]])
                ]
            )
        window = np.concatenate(pieces).astype(np.int64)
        return {"tokens": window[:-1], "labels": window[1:]}

    def batch(numbers: range) -> dict[str, np.ndarray]:
        samples = [sample(number) for number in numbers]
        return {key: np.stack([one[key] for one in samples]) for key in samples[0]}

    return len(shuffle), batch


def megatron(prefix: str, length: int) -> tuple[int, Callable]:
    """megatron-core's GPTDataset, with torch's collate."""
    import torch.distributed as dist
    from torch.utils.data import default_collate

    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        vocab_size, eod, pad, unique_identifiers = VOCABULARY, VOCABULARY - 1, VOCABULARY - 1, {"class": "null"}

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=length,
        split="100,0,0",
        path_to_cache=f"{prefix}-cache",
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        blend=([prefix], None),
    )
    data = BlendedMegatronDatasetBuilder(GPTDataset, [None, 0, 0], lambda: True, config).build()[0]
    return len(data), lambda numbers: default_collate([data[number] for number in numbers])


READERS = {"ours": ours, "ours, not mapped": ours_unmapped, "plain": plain, "megatron": megatron}


def measure(role: str, prefix: str, length: int, samples: int) -> None:
    """One process: read so many samples, and print tokens a second and a hash of the first ones."""
    from xxhash import xxh3_64

    total, read = READERS[role](prefix, length)
    seen = xxh3_64()
    for at in range(0, 200, BATCH):  # the file's pages come to memory elsewhere; this warms the code
        batch = read(range(at, at + BATCH))
        for key in ("tokens", "labels"):
            seen.update(np.ascontiguousarray(batch[key]))
    began = time.perf_counter()
    for at in range(0, min(samples, total) - BATCH, BATCH):
        read(range(at, at + BATCH))
    seconds = time.perf_counter() - began
    print(
        json.dumps(
            {"rate": (min(samples, total) - BATCH) // BATCH * BATCH * length / seconds, "hash": seen.hexdigest()}
        )
    )


def main() -> None:
    """Measure in turn and print a line a reader."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=1e8)
    parser.add_argument("--documents", type=float, default=2e5)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megatron", metavar="FOLDER")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--prefix", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        measure(args.role, args.prefix, args.length, args.samples)
        return
    sys.path.insert(0, str(ROOT))
    from benchmarks.sparse import write_pair

    roles = [role for role in READERS if role != "megatron" or args.megatron]
    reports: dict[str, list[dict]] = {role: [] for role in roles}
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "random"
        write_pair(prefix, int(args.documents), int(args.tokens), vocabulary=VOCABULARY)
        for role in roles * args.rounds:
            command = [
                sys.executable,
                __file__,
                "--role",
                role,
                "--prefix",
                str(prefix),
                "--length",
                str(args.length),
                "--samples",
                str(args.samples),
            ]
            place = str(Path(args.megatron).resolve() if role == "megatron" else ROOT)
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": place, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            reports[role].append(json.loads(done.stdout.splitlines()[-1]))
    for role, runs in reports.items():
        rates = [run["rate"] / 1e6 for run in runs]
        against = statistics.median(
            run["rate"] / peer["rate"] for run, peer in zip(runs, reports["plain"], strict=True)
        )
        print(
            f"  {role:17} {statistics.median(rates):6.1f} M tokens/s ({min(rates):.1f} .. {max(rates):.1f})   {against:.2f} x plain"
        )
    hashes = {run["hash"] for runs in reports.values() for run in runs}
    assert len(hashes) == 1, f"all readers give the same tokens and labels: {hashes}"


if __name__ == "__main__":
    main()
