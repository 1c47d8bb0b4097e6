#!/usr/bin/env python3
"""How long a run waits for its dataset: open a pair, build the three indices, write the cache, map it; and once more.

    python benchmarks/index.py --tokens 1e9 --documents 2e6 --epochs 1 3
    python benchmarks/index.py --tokens 1e12 --documents 2e7
    python benchmarks/index.py --megatron FOLDER     (where pip install --target put megatron-core, with its helpers)

The .bin file is sparse. Each build is a process of its own, in turn with the peer's; seconds are best and worst of the
rounds, memory is the growth of the resident peak over the import, mapped files included. With --megatron the arrays of
both are compared bit for bit. Recorded figures of Megatron-LM on two cores, 1e9 tokens: 0.118 s for one epoch, 0.384 s
for three.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 3
SEED = 1234


def peak_mb() -> int:
    """The largest resident size so far, MB. Not ru_maxrss, which a process inherits from the one that started it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024 // 10**6


def wanted_samples(tokens: int, length: int, epochs: int) -> int | None:
    """How many samples make so many epochs."""
    return None if epochs == 1 else epochs * (tokens // length) - 1


def build_ours(prefix: str, cache: str, length: int, tokens: int, epochs: int) -> Callable[[], list]:
    """A function that opens and indexes a pair, and returns the three arrays."""
    from megatron.core.datasets.dataset_protocols import SplitRequest
    from megatron.core.datasets.gpt import GPTDataset, GPTSampleOptions
    from megatron.core.datasets.index_map import IndexCacheFolder
    from megatron.core.datasets.indexed import IndexedDataset

    def build() -> list:
        source = IndexedDataset(prefix)
        data = GPTDataset(
            source,
            GPTSampleOptions(length, 50257, 50256),
            SplitRequest(
                range(len(source)), wanted_samples(tokens, length, epochs), "train", IndexCacheFolder(Path(cache))
            ),
            seed=SEED,
        )
        return [data.document_index, data.sample_index, data.shuffle_index]

    return build


def build_megatron(prefix: str, cache: str, length: int, tokens: int, epochs: int) -> Callable[[], list]:
    """The same with megatron-core."""
    import torch.distributed as dist

    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        vocab_size, eod, pad, unique_identifiers = 50257, 50256, 50256, {"class": "null"}

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=length,
        split="100,0,0",
        path_to_cache=cache,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        blend=([prefix], None),
    )

    def build() -> list:
        sizes = [wanted_samples(tokens, length, epochs), 0, 0]
        data = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
        return [data.document_index, data.sample_index, data.shuffle_index]

    return build


def measure(args: argparse.Namespace) -> None:
    """One process: build cold and warm, and print what it took."""
    from xxhash import xxh3_64

    make = build_ours if args.role == "ours" else build_megatron
    build = make(args.prefix, args.cache, args.length, args.total, args.epochs[0])
    import numpy.random  # noqa: F401  its import is not what is measured

    before, began, cpu = peak_mb(), time.perf_counter(), time.process_time()
    arrays = build()
    cold, cpu, grown = time.perf_counter() - began, time.process_time() - cpu, peak_mb() - before
    began = time.perf_counter()
    build()
    warm = time.perf_counter() - began
    print(
        json.dumps(
            {
                "cold": cold,
                "cpu": cpu,
                "warm": warm,
                "mb": grown,
                "samples": len(arrays[2]),
                "cache_mb": sum(path.stat().st_size for path in Path(args.cache).iterdir()) // 10**6,
                "hash": [xxh3_64(array).hexdigest() for array in arrays],
            }
        )
    )


def run(role: str, args: argparse.Namespace, prefix: Path, total: int, epochs: int) -> dict:
    """`measure` in a process of its own, with an empty cache."""
    cache = prefix.with_name("cache")
    shutil.rmtree(cache, ignore_errors=True)
    place = ROOT if role == "ours" else Path(args.megatron).resolve()
    command = [
        sys.executable,
        __file__,
        "--role",
        role,
        "--prefix",
        str(prefix),
        "--cache",
        str(cache),
        "--total",
        str(total),
        "--length",
        str(args.length),
        "--epochs",
        str(epochs),
    ]
    done = subprocess.run(
        command,
        cwd=prefix.parent,
        env={**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure in turn and print a line for each number of epochs and peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=1e9)
    parser.add_argument("--documents", type=float, default=2e6)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--epochs", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--megatron", metavar="FOLDER")
    for name in ("--role", "--prefix", "--cache"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--total", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        measure(args)
        return
    sys.path.insert(0, str(ROOT))
    from benchmarks.sparse import write_pair

    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "sparse"
        total = write_pair(prefix, int(args.documents), int(args.tokens))
        print(f"{total:,} tokens in {int(args.documents):,} documents, samples of {args.length}")
        for epochs in args.epochs:
            roles = ["ours", "megatron"] if args.megatron else ["ours"]
            rounds = [{role: run(role, args, prefix, total, epochs) for role in roles} for _ in range(args.rounds)]
            for role in roles:
                values = [one[role] for one in rounds]
                cold = [one["cold"] for one in values]
                print(
                    f"  {epochs} epochs  {role:9} cold {min(cold):.3f} s (to {max(cold):.3f}; CPU {min(one['cpu'] for one in values):.3f})  "
                    f"warm {min(one['warm'] for one in values):.4f} s  +{values[0]['mb']} MB  cache {values[0]['cache_mb']} MB  "
                    f"{values[0]['samples']:,} samples"
                )
            hashes = {tuple(one[role]["hash"]) for one in rounds for role in roles}
            assert len(hashes) == 1, f"all builds give the same arrays: {hashes}"
            print(f"  {epochs} epochs  all {len(rounds) * len(roles)} builds give the same arrays")


if __name__ == "__main__":
    main()
