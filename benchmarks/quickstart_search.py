#!/usr/bin/env python3
"""Search settings for `examples/quickstart.sh`: bits per byte of the validation text after equal training time.

    python benchmarks/quickstart_search.py                               every candidate below (hours)
    python benchmarks/quickstart_search.py base muon --base-steps 200    some, in the time of 200 steps of the base
    python benchmarks/quickstart_search.py --try "vocab=1024 --lr 3e-3"  one that is not in the list

A candidate is a vocabulary size and the flags in which it differs from BASE. Each trains in one process of one thread. Short runs
measure the CPU-seconds of its steps beside those of the base, in turns, since what else the machine does changes both; so many steps
are trained as fit into the time of `--base-steps` steps of the base. Vocabularies differ in bytes per token, so losses are compared as
bits per byte: loss in nats * tokens / bytes / ln 2.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "examples" / "data"
WORK = ROOT / "runs" / "quickstart_search"

# What the quickstart was before the search.
BASE = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 "
    "--init-method-std 0.05 --global-batch-size 16 --lr 6e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95"
)
_MUON = (
    "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2 --muon-fp32-matmul-prec high "
    "--global-batch-size 8 --lr 1e-2"
)
_NARROW = f"{_MUON} --num-layers 2 --hidden-size 96 --seq-length 256 --init-method-std 0.02"
_UNTIED = f"{_NARROW} --untie-embeddings-and-output-weights --lr-decay-style linear --min-lr 0 --decoupled-min-lr 0"
CANDIDATES: dict[str, str] = {
    "base": "vocab=8000",
    # vocabulary and batch, with Adam
    "batch4": "vocab=8000 --global-batch-size 4",
    "vocab1024": "vocab=1024 --global-batch-size 4",
    "vocab2048": "vocab=2048 --global-batch-size 4",
    "vocab4096": "vocab=4096 --global-batch-size 8",
    # Muon, its rate, and layers
    "muon": f"vocab=8000 {_MUON}",
    "muon-fast": f"vocab=8000 {_MUON} --lr 2e-2",
    "muon4096": f"vocab=4096 {_MUON}",
    "layers2": f"vocab=8000 {_MUON} --num-layers 2",
    "layers2-slow": f"vocab=8000 {_MUON} --num-layers 2 --lr 5e-3",
    "layers1": f"vocab=8000 {_MUON} --num-layers 1",
    "wide": f"vocab=8000 {_MUON} --num-layers 2 --hidden-size 192",
    # initial weights, sequence, width
    "std": f"vocab=8000 {_MUON} --num-layers 2 --init-method-std 0.02",
    "std-smaller": f"vocab=8000 {_MUON} --num-layers 2 --init-method-std 0.01",
    "long": f"vocab=8000 {_MUON} --num-layers 2 --seq-length 256 --global-batch-size 4",
    "vocab12000": f"vocab=12000 {_MUON} --num-layers 2",
    "vocab16000": f"vocab=16000 {_MUON} --num-layers 1 --seq-length 256 --global-batch-size 4",
    "narrow": f"vocab=12000 {_NARROW} --global-batch-size 4",
    "narrower": f"vocab=12000 {_NARROW} --global-batch-size 4 --hidden-size 64",
    # an output layer of its own, rates, decay
    "untied": f"vocab=12000 {_UNTIED} --global-batch-size 4 --decoupled-lr 2e-2",
    "untied-fast": f"vocab=12000 {_UNTIED} --global-batch-size 4 --decoupled-lr 4e-2",
    "untied-faster": f"vocab=12000 {_UNTIED} --global-batch-size 4 --lr 2e-2 --decoupled-lr 2e-2",
    "untied8000": f"vocab=8000 {_UNTIED} --hidden-size 128 --global-batch-size 4 --decoupled-lr 1e-2",
    "batch16": f"vocab=12000 {_UNTIED} --global-batch-size 16 --lr 3e-2 --decoupled-lr 3e-2",
    "one-rate": f"vocab=12000 {_UNTIED} --lr 2e-2 --decoupled-lr 2e-2",
    "chosen": f"vocab=12000 {_UNTIED} --decoupled-lr 2e-2",
}


def vocabulary_and_flags(candidate: str) -> tuple[int, list[str]]:
    """The vocabulary size of `vocab=N --flag value ...`, and BASE with those flags in place of its own."""
    words = shlex.split(f"{BASE} {candidate}")
    size = next((int(word.removeprefix("vocab=")) for word in words if word.startswith("vocab=")), 8000)
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
            flags[name] = []
        elif not word.startswith("vocab="):
            flags[name].append(word)
    flags["--micro-batch-size"] = flags["--global-batch-size"]
    return size, [word for name, values in flags.items() for word in (name, *values)]


def token_files(size: int) -> Path:
    """A folder with a vocabulary of this size, learned from the training text, and both texts as tokens."""
    folder = WORK / f"vocabulary_{size}"
    if not (folder / "valid_text_document.idx").exists():
        tool(
            "tokenizer",
            "train",
            "--input",
            DATA / "demo_train_small.jsonl",
            "--vocab-size",
            size,
            "--output-dir",
            folder,
        )
        for part in ("train_small", "valid"):
            tool(
                *("preprocess-data", "--input", DATA / f"demo_{part}.jsonl", "--append-eod"),
                *("--output-prefix", folder / part.removesuffix("_small"), *tokenizer_flags(folder)),
            )
    return folder


def tokenizer_flags(folder: Path) -> list[str]:
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]


def tool(verb: str, *arguments: object) -> None:
    command = [sys.executable, "-m", "megatron", verb, *map(str, arguments)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def train(folder: Path, flags: list[str], steps: int, *, evaluate: bool) -> tuple[float, float]:
    """CPU-seconds of a run of so many steps, and its validation loss in nats per token."""
    log = WORK / f"log_{os.getpid()}.jsonl"
    log.unlink(missing_ok=True)
    command = [
        *(sys.executable, str(ROOT / "pretrain_gpt.py"), *flags, *tokenizer_flags(folder)),
        *(
            "--train-data-path",
            str(folder / "train_text_document"),
            "--valid-data-path",
            str(folder / "valid_text_document"),
        ),
        *("--train-iters", str(steps), "--log-interval", "100", "--log-jsonl", str(log), "--eval-interval", "1000000"),
        *(["--full-validation"] if evaluate else ["--eval-iters", "0"]),
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    losses = [record["losses"]["lm loss"] for record in records if record["kind"] == "validation"]
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, losses[-1] if losses else math.nan


def tokens_and_bytes(folder: Path) -> tuple[int, int]:
    """Of the validation text."""
    tokens = (folder / "valid_text_document.bin").stat().st_size // 2  # ids of two bytes
    with open(DATA / "demo_valid.jsonl", encoding="utf-8") as lines:
        return tokens, sum(len(json.loads(line)["text"].encode()) for line in lines)


def seconds_per_step(folder: Path, flags: list[str]) -> float:
    """CPU-seconds, from two short runs, so that start-up drops out."""
    few, many = 5, 5 + max(10, 200 // int(flags[flags.index("--global-batch-size") + 1]))
    return (train(folder, flags, many, evaluate=False)[0] - train(folder, flags, few, evaluate=False)[0]) / (many - few)


def steps_in_equal_time(candidate: str, base_steps: int) -> tuple[int, float]:
    """Steps that take the time of `base_steps` steps of the base, and how many times the time of one of its steps one takes."""
    rounds = [
        [
            seconds_per_step(token_files(size), flags)
            for size, flags in map(vocabulary_and_flags, (CANDIDATES["base"], candidate))
        ]
        for _ in range(2)
    ]
    base, cost = (min(times) for times in zip(*rounds, strict=True))
    return round(base_steps * base / cost), cost / base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CANDIDATES)}; none: all")
    parser.add_argument(
        "--try", nargs="+", default=[], dest="others", metavar="FLAGS", help="candidates that have no name"
    )
    parser.add_argument("--base-steps", type=int, default=400, help="length, as steps of the base (default: 400)")
    args = parser.parse_args()
    if unknown := set(args.names) - set(CANDIDATES):
        parser.error(f"no candidate is called {', '.join(sorted(unknown))}")
    WORK.mkdir(parents=True, exist_ok=True)
    for candidate in [*(CANDIDATES[name] for name in args.names or (() if args.others else CANDIDATES)), *args.others]:
        size, flags = vocabulary_and_flags(candidate)
        folder = token_files(size)
        steps, cost = steps_in_equal_time(candidate, args.base_steps)
        loss = train(folder, flags, steps, evaluate=True)[1]
        tokens, text_bytes = tokens_and_bytes(folder)
        print(
            f"{loss * tokens / text_bytes / math.log(2):.4f} bits per byte, {loss:.4f} nats per token, {steps} steps of "
            f"{cost:.2f} times the base's: {candidate}",
            flush=True,
        )


if __name__ == "__main__":
    main()
