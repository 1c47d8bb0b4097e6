#!/usr/bin/env python3
"""Training on one GPU: whole runs of pretrain_gpt.py beside a plain compiled loop of the same network, in one call under ten minutes.

    python benchmarks/train_gpu.py                      GPT 1.3B, Llama-8B's layers, the same in fp8, experts
    python benchmarks/train_gpu.py --only 1.3b --seconds 240
    python benchmarks/train_gpu.py --only 1.3b --flags=--compile --flags="--cross-entropy-fusion-impl triton --kernel layer_norm=triton"
                                                              ours as it is, and with these and those flags beside it
    python benchmarks/train_gpu.py --only tiny          the same on a CPU, to try the script

First what the machine itself reaches: a product of 8192 x 8192 matrices of random numbers, and a copy. A run is bf16 on real
text, with AdamW, clipping and a report a step; its figure is the median over the steps after the first three, of as many as its
share of --seconds allows. Both ways to count MFU are given (attention over the causal half, and over the whole square); the causal
one is to be quoted. Memory stands beside what tools/plan.py predicts.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "runs" / "benchmarks" / "gpu"
PEAK = 989.0  # TFLOP/s in bf16, H100 and H200
GPT2 = ROOT / "examples" / "data" / "gpt2"


@dataclass(frozen=True, slots=True)
class Job:
    """One network. flags: of the run; plain: the same for plain_loop.py; share: of the time."""

    name: str
    flags: str
    plain: str
    share: float


_GPT = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 8 --global-batch-size 128"
)
_LLAMA = (
    "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--global-batch-size 64"
)
_LLAMA_PLAIN = "--layers 8 --hidden 4096 --ffn 14336 --heads 32 --groups 8 --gated --batch 64"
JOBS = (
    Job(
        "1.3b", f"{_GPT} --bf16", "--layers 24 --hidden 2048 --heads 16 --length 2048 --micro-batch 8 --batch 128", 0.4
    ),
    Job(
        "llama",
        f"{_LLAMA} --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 4 --bf16",
        f"{_LLAMA_PLAIN} --length 4096 --micro-batch 4",
        0.3,
    ),
    Job(
        "llama fp8",
        f"{_LLAMA} --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 2 --bf16 --fp8-format hybrid "
        "--fp8-recipe tensorwise",
        "",
        0.2,
    ),
    Job(
        "tiny",
        "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 "
        "--micro-batch-size 2 --global-batch-size 4",
        "--layers 2 --hidden 64 --heads 2 --length 64 --micro-batch 2 --batch 4 --eager",
        0.5,
    ),
)


def rates(device: torch.device) -> tuple[float, float]:
    """(TFLOP/s of a bf16 product on random numbers, TB/s of a copy, reads and writes)."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(size * size * 8, device=device)
    target = torch.empty_like(source)
    return 2 * size**3 / _fastest(lambda: a @ b, device) / 1e12, 2 * source.nbytes / _fastest(
        lambda: target.copy_(source), device
    ) / 1e12


def _fastest(work, device: torch.device) -> float:
    """Median seconds of one call."""
    times = []
    for turn in range(30):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= 5:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def data() -> Path:
    """The bundled text as ids of GPT-2's vocabulary."""
    prefix = WORK / "text"
    if not Path(f"{prefix}_text_document.idx").exists():
        WORK.mkdir(parents=True, exist_ok=True)
        _run(
            [
                sys.executable,
                "tools/preprocess_data.py",
                "--input",
                "examples/data/demo_train_small.jsonl",
                "--output-prefix",
                str(prefix),
                *_tokenizer(),
                "--append-eod",
            ]
        )
    return Path(f"{prefix}_text_document")


def _tokenizer() -> list[str]:
    return [
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        str(GPT2 / "vocab.json"),
        "--merge-file",
        str(GPT2 / "merges.txt"),
    ]


def flags_of(job: Job, iterations: int, extra: list[str]) -> list[str]:
    """The whole command line of a run."""
    return [
        *job.flags.split(),
        "--hidden-dropout",
        "0",
        "--attention-dropout",
        "0",
        "--lr",
        "1e-4",
        "--weight-decay",
        "0.1",
        "--clip-grad",
        "1",
        "--train-iters",
        str(iterations),
        "--data-path",
        str(data()),
        "--split",
        "100,0,0",
        *_tokenizer(),
        "--eval-iters",
        "0",
        "--log-interval",
        "1",
        "--log-throughput",
        *extra,
    ]


def ours(job: Job, seconds: float, extra: list[str]) -> tuple[list[dict], float]:
    """(reports of the steps after the first three, GB allocated at most) of a run that is asked to end after so many seconds."""
    journal, log = (WORK / f"{job.name.replace(' ', '_')}.{ending}" for ending in ("jsonl", "log"))
    journal.unlink(missing_ok=True)
    command = [
        sys.executable,
        "pretrain_gpt.py",
        *flags_of(job, 10**4, extra),
        "--log-jsonl",
        str(journal),
        "--exit-signal-handler",
    ]
    with log.open("w") as log_file:
        run = subprocess.Popen(command, cwd=ROOT, stdout=log_file, stderr=subprocess.STDOUT)
        began = None
        while run.poll() is None and (began is None or time.perf_counter() - began < seconds):
            time.sleep(0.2)
            if began is None and len(_reports(journal)) > 3:  # what is compiled or captured has been
                began = time.perf_counter()
        run.terminate()
        run.wait()
    reports, text = _reports(journal)[3:], log.read_text()
    if not reports:
        sys.exit(f"{job.name}: the run did not come to its fourth step:\n{text[-4000:]}")
    peak = re.findall(r"max allocated: ([0-9.]+)", text)
    return reports, float(peak[-1]) * 2**20 / 1e9 if peak else float("nan")


def _reports(journal: Path) -> list[dict]:
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [line for line in map(json.loads, lines) if line["kind"] == "report"]


def plain(job: Job, seconds: float) -> list[float]:
    """Seconds of each step of the plain loop."""
    output = _run([sys.executable, "benchmarks/plain_loop.py", *job.plain.split(), "--seconds", str(seconds)])
    return json.loads(output.splitlines()[-1])["seconds"]


def predicted(job: Job, extra: list[str]) -> float:
    """GB that the dry run expects at the peak."""
    command = [
        sys.executable,
        "tools/plan.py",
        *flags_of(job, 10, extra),
        "--world-size",
        "1",
        "--gpu",
        "h200",
        "--json",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        return max(rank["peak"] for rank in json.loads(done.stdout)["ranks"]) / 1e9
    except (ValueError, KeyError):
        return float("nan")


def measure(job: Job, seconds: float, variants: list[list[str]]) -> None:
    """Run ours, with each of these flags, and the peer, and print what came out."""
    share = seconds * (0.6 if job.plain else 1.0) / len(variants)
    fastest = min(printed_step_seconds(job, share, extra) for extra in variants)
    if job.plain:
        peer = statistics.median(plain(job, seconds * 0.4))
        print(
            f"  {job.name:10} plain compiled loop: {peer:.3f} s a step; ours is {peer / fastest:.2f} x as fast",
            flush=True,
        )


def printed_step_seconds(job: Job, seconds: float, extra: list[str]) -> float:
    """Seconds of a step of ours, of which all is printed."""
    if extra:
        print(f"  {job.name:10} with {' '.join(extra)}", flush=True)
    reports, peak = ours(job, seconds, extra)
    times = [report["seconds_per_iteration"] for report in reports]
    step = statistics.median(times)
    middle = reports[times.index(min(times, key=lambda t: abs(t - step)))]["throughput"]
    causal, square = middle["causal_tflops"], middle["square_tflops"]
    print(
        f"  {job.name:10} ours: {middle['tokens_per_second']:9.0f} tokens/s, {causal:6.1f} TFLOP/s causal = {100 * causal / PEAK:.1f} % of {PEAK:.0f} "
        f"({square:.1f} = {100 * square / PEAK:.1f} % square), median of {len(times)} steps of {step:.3f} s "
        f"({min(times):.3f} .. {max(times):.3f})",
        flush=True,
    )
    print(f"  {job.name:10} memory: {peak:.2f} GB at the peak, predicted {predicted(job, extra):.2f}", flush=True)
    return step


def _run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(
            f"{' '.join(command[:3])} ... failed with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done.stdout + done.stderr


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*(job.name for job in JOBS), "experts"],
        default=[*(job.name for job in JOBS if job.name != "tiny"), "experts"],
    )
    parser.add_argument("--seconds", type=float, default=450.0, help="for all runs together")
    parser.add_argument(
        "--flags", action="append", default=[], help="one more run of ours, with these flags, as in --flags=--compile"
    )
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    product, copy = rates(device)
    print(
        f"  {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}: product {product:.1f} TFLOP/s, copy {copy:.2f} TB/s, "
        f"torch {torch.__version__}",
        flush=True,
    )
    chosen = [job for job in JOBS if job.name in options.only]
    total = sum(job.share for job in chosen)
    if "experts" in options.only:
        print(_run([sys.executable, "benchmarks/experts.py"]), end="", flush=True)
    for job in chosen:
        measure(job, options.seconds * job.share / total, [flags.split() for flags in ("", *options.flags)])


if __name__ == "__main__":
    main()
