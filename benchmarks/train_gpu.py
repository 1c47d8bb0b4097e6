#!/usr/bin/env python3
"""Training on one GPU: whole runs of pretrain_gpt.py beside a plain compiled loop of the same network, within --seconds in all.

    python benchmarks/train_gpu.py                      GPT 1.3B, Llama-8B's layers, the same in fp8, experts
    python benchmarks/train_gpu.py --only 1.3b --seconds 240
    python benchmarks/train_gpu.py --only 1.3b --flags=--compile --flags="--cross-entropy-fusion-impl triton --kernel layer_norm=triton"
                                                              ours as it is, and with these and those flags beside it
    python benchmarks/train_gpu.py --only tiny          the same on a CPU, to try the script

First what the machine itself reaches: a product of 8192 x 8192 matrices of random numbers, and a copy. A run is bf16 on real
text, with AdamW, clipping and a report a step; its figure is the median over the steps after the first few. Both ways to count MFU are
given (attention over the causal half, and over the whole square); the causal one is to be quoted. One step is profiled: launches, the
share of it in which the GPU is busy, and the kernels that take longest. Memory stands beside what `megatron plan` predicts, which is
computed meanwhile. --seconds holds for everything that is started: each run gets a share of what is left, start-up included, and is
ended when it is over. Figures are printed and written (benchmarks/gpu/results.py) when they are there; a verdict comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.gpu import results
from benchmarks.gpu.goals import verdict
from benchmarks.gpu.roofline import PEAK
from benchmarks.gpu.timing import timed

WORK = ROOT / "runs" / "benchmarks" / "gpu"
FIRST = 4  # steps that do not count: kernels are compiled and captured in them, and one is profiled
PROFILED = 2  # steps before the profiled one
# Seconds without which a run shows little: as it is, compiled, and the plain loop, which is compiled too.
LEAST, LEAST_COMPILED, LEAST_PLAIN = 60.0, 85.0, 95.0
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
    "--micro-batch-size 8 --global-batch-size 64"
)
_LLAMA = (
    "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--global-batch-size 32"
)
_LLAMA_PLAIN = "--layers 8 --hidden 4096 --ffn 14336 --heads 32 --groups 8 --gated --batch 32"
JOBS = (
    Job("1.3b", f"{_GPT} --bf16", "--layers 24 --hidden 2048 --heads 16 --length 2048 --micro-batch 8 --batch 64", 0.4),
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
    product, copy = timed(lambda: a @ b, device), timed(lambda: target.copy_(source), device)
    return 2 * size**3 / product.device / 1e12, 2 * source.nbytes / copy.device / 1e12


class Deadline:
    """The moment at which everything has ended."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then."""
        return self._end - time.monotonic()


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
            ],
            120.0,
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


@dataclass(frozen=True, slots=True)
class Profiled:
    """One step. launches: kernels; busy: seconds in which at least one ran; seconds: of the step; longest: (name, seconds, launches)."""

    launches: int
    busy: float
    seconds: float
    longest: Sequence[tuple[str, float, int]]

    def table(self) -> str:
        """The kernels that take longest."""
        rows = (
            f"    {100 * took / self.seconds:5.1f} %  {many:5} x  {name[:110]}" for name, took, many in self.longest
        )
        return "\n".join(rows)


def profile_of(trace: Path) -> Profiled | None:
    """What a trace of torch's profiler says of the GPU; None if it holds no kernels."""
    try:
        events = json.loads(trace.read_text())["traceEvents"]
    except (OSError, ValueError, KeyError):
        return None
    kernels = sorted(
        ((one["ts"], one["ts"] + one["dur"], one["name"]) for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    )  # fmt: skip
    if not kernels:
        return None
    busy, end = 0.0, 0.0
    took, many = Counter[str](), Counter[str]()
    for start, stop, name in kernels:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        took[name] += stop - start
        many[name] += 1
    longest = [(name, micro / 1e6, many[name]) for name, micro in took.most_common(12)]
    return Profiled(len(kernels), busy / 1e6, (end - kernels[0][0]) / 1e6, longest)


def ours(job: Job, seconds: float, extra: list[str]) -> tuple[list[dict], float, Profiled | None]:
    """(reports of the steps that count, GB allocated at most, a profile) of a run that ends within so many seconds, start-up included."""
    journal, log = (WORK / f"{job.name.replace(' ', '_')}.{ending}" for ending in ("jsonl", "log"))
    journal.unlink(missing_ok=True)
    folder = WORK / "profile"
    trace = folder / f"profile_rank0_iterations{PROFILED}-{PROFILED + 1}.json"
    trace.unlink(missing_ok=True)
    window = ["--profile", "--profile-step-start", str(PROFILED), "--profile-step-end", str(PROFILED + 1)]
    command = [
        sys.executable,
        "pretrain_gpt.py",
        *flags_of(job, 10**4, extra),
        "--log-jsonl",
        str(journal),
        *window,
        "--tensorboard-dir",
        str(folder),
    ]
    stop = time.monotonic() + seconds
    with log.open("w") as log_file:
        run = subprocess.Popen(command, cwd=ROOT, stdout=log_file, stderr=subprocess.STDOUT)
        while run.poll() is None and time.monotonic() < stop - 5:  # it has five seconds to end
            time.sleep(0.2)
        run.terminate()
        try:
            run.wait(timeout=max(1.0, stop - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
    reports, text = _reports(journal)[FIRST:], log.read_text()
    if not reports:
        raise RuntimeError(f"the run did not come to its step {FIRST + 1} in {seconds:.0f} s:\n{text[-2000:]}")
    peak = re.findall(r"max allocated: ([0-9.]+)", text)
    return reports, float(peak[-1]) * 2**20 / 1e9 if peak else float("nan"), profile_of(trace)


def _reports(journal: Path) -> list[dict]:
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [line for line in map(json.loads, lines) if line["kind"] == "report"]


def plain(job: Job, seconds: float) -> list[float]:
    """Seconds of each step of the plain loop, which ends within so many, compilation included."""
    measured = max(5.0, seconds - 12)
    command = [sys.executable, "benchmarks/plain_loop.py", *job.plain.split(), "--seconds", str(measured)]
    lines = [line for line in _run(command, seconds, partly=True).splitlines() if line.startswith('{"seconds"')]
    times = json.loads(lines[-1])["seconds"] if lines else []
    if not times:
        raise RuntimeError(f"it did not come to its third step in {seconds:.0f} s")
    return times


def plan(job: Job, extra: list[str]) -> subprocess.Popen[str]:
    """Begin to compute what the dry run expects, beside the run itself."""
    command = [
        sys.executable,
        "-m",
        "megatron",
        "plan",
        *flags_of(job, 10, extra),
        "--world-size",
        "1",
        "--gpu",
        "h200",
        "--json",
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def predicted(planning: subprocess.Popen[str]) -> float:
    """GB that the dry run expects at the peak."""
    try:
        output, _ = planning.communicate(timeout=20)
        return max(rank["peak"] for rank in json.loads(output)["ranks"]) / 1e9
    except (ValueError, KeyError, subprocess.TimeoutExpired):
        planning.kill()
        return float("nan")


def measure(job: Job, extra: list[str], seconds: float, gpu: str) -> None:
    """One run of ours: print and write what came out."""
    flags, planning = " ".join(extra), plan(job, extra)
    try:
        reports, peak, profiled = ours(job, seconds, extra)
    except RuntimeError as error:
        print(f"  {job.name:10} {flags} failed: {error}", flush=True)
        results.keep("train", network=job.name, flags=flags, failed=str(error)[:300])
        planning.kill()
        return
    times = [report["seconds_per_iteration"] for report in reports]
    step = statistics.median(times)
    middle = reports[times.index(min(times, key=lambda t: abs(t - step)))]["throughput"]
    causal, square = middle["causal_tflops"], middle["square_tflops"]
    print(
        f"  {job.name:10} ours{flags and f' with {flags}'}: {middle['tokens_per_second']:9.0f} tokens/s, {causal:6.1f} TFLOP/s causal = "
        f"{100 * causal / PEAK:.1f} % of {PEAK:.0f} ({square:.1f} = {100 * square / PEAK:.1f} % square), median of {len(times)} steps of "
        f"{step:.3f} s ({min(times):.3f} .. {max(times):.3f})",
        flush=True,
    )
    planned = predicted(planning)
    print(f"  {job.name:10} memory: {peak:.2f} GB at the peak, predicted {planned:.2f}", flush=True)
    figures = {"step_s": step, "tflops": causal, "mfu": 100 * causal / PEAK, "memory_gb": peak, "planned_gb": planned}
    if profiled is not None:
        busy = profiled.busy / profiled.seconds
        print(
            f"  {job.name:10} a profiled step: {profiled.launches} launches, the GPU busy for {100 * busy:.1f} % of it",
            flush=True,
        )
        print(profiled.table(), flush=True)
        figures |= {"launches": profiled.launches, "busy": busy}
    results.keep("train", network=job.name, flags=flags, gpu=gpu, **figures)


def beside_plain(job: Job, seconds: float) -> None:
    """The plain loop, and ours beside it by the fastest of its flags."""
    lines = [line for line in results.read(results.path()) if line["section"] == "train" and "step_s" in line]
    steps = [line["step_s"] for line in lines if line["network"] == job.name]
    if not steps:
        return
    try:
        peer = statistics.median(plain(job, seconds))
    except RuntimeError as error:
        print(f"  {job.name:10} plain compiled loop: {error}", flush=True)
        results.keep("plain", network=job.name, failed=str(error)[:300])
        return
    ratio = peer / min(steps)  # the verdict takes the fastest at its time
    print(f"  {job.name:10} plain compiled loop: {peer:.3f} s a step; ours is {ratio:.2f} x as fast", flush=True)
    results.keep("plain", network=job.name, step_s=peer, ratio=ratio)


def _run(command: list[str], seconds: float, *, partly: bool = False) -> str:
    """What a command prints. Raises `RuntimeError` if it fails or takes longer. partly: in that case what it printed until then."""
    name = " ".join(command[1:3])
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired as error:
        if partly:
            return error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        raise RuntimeError(f"{name} took longer than {seconds:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"{name} failed with {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    return done.stdout + done.stderr


@dataclass(frozen=True, slots=True)
class Work:
    """One thing to measure. share: of the time; names: how its result is found again."""

    job: Job
    share: float
    extra: list[str] | None  # flags of a run of ours; None: the plain loop

    @property
    def least(self) -> float:
        """Seconds without which it shows little."""
        if self.extra is None:
            return LEAST_PLAIN
        return LEAST_COMPILED if "--compile" in self.extra else LEAST

    @property
    def is_done(self) -> bool:
        """Whether an earlier call measured it."""
        if self.extra is None:
            return results.done("plain", network=self.job.name)
        return results.done("train", network=self.job.name, flags=" ".join(self.extra))


def works(jobs: Sequence[Job], variants: list[list[str]]) -> list[Work]:
    """Everything, in the order of its value: each network as it is, the first beside the plain loop; with the last flags; the rest."""

    def ours_of(job: Job, extra: list[str]) -> Work:
        return Work(job, 0.6 * job.share / len(variants), extra)

    first, *more = variants
    plains = [Work(job, 0.4 * job.share, None) for job in jobs if job.plain]
    result = [ours_of(jobs[0], first), *plains[:1], *(ours_of(job, first) for job in jobs[1:])] if jobs else []
    for place, extra in enumerate(reversed(more)):
        result += [ours_of(job, extra) for job in jobs] + (plains[1:] if place == 0 else [])
    result += [] if more else plains[1:]
    return [work for work in result if not work.is_done]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*(job.name for job in JOBS), "experts"],
        default=[*(job.name for job in JOBS if job.name != "tiny"), "experts"],
    )
    parser.add_argument("--seconds", type=float, default=380.0, help="for all that is started together")
    parser.add_argument(
        "--flags", action="append", default=[], help="one more run of ours, with these flags, as in --flags=--compile"
    )
    options = parser.parse_args()
    deadline = Deadline(options.seconds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    if results.path() is None:  # called by itself: it measures all anew
        file = WORK / results.FILE
        file.unlink(missing_ok=True)
        os.environ["BENCHMARK_RESULTS"] = str(file)
    product, copy = rates(device)
    print(f"  {gpu}: product {product:.1f} TFLOP/s, copy {copy:.2f} TB/s, torch {torch.__version__}", flush=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the memory is the runs' now
    left = works([job for job in JOBS if job.name in options.only], [flags.split() for flags in ("", *options.flags)])
    failed = False
    while left:
        work, total = left[0], sum(one.share for one in left)
        least = work.least if device.type == "cuda" else 15.0
        if least > (remaining := deadline.left()):
            print(f"  {len(left)} runs are left: {remaining:.0f} s remain. Call again to go on", flush=True)
            break
        seconds = max(remaining * work.share / total, least)
        left.pop(0)
        if work.extra is None:
            beside_plain(work.job, seconds)
        else:
            measure(work.job, work.extra, seconds, gpu)
        failed = failed or not work.is_done
    if "experts" in options.only and deadline.left() > LEAST:
        try:
            print(_run([sys.executable, "benchmarks/experts.py"], deadline.left()), end="", flush=True)
        except RuntimeError as error:
            print(f"  experts: {error}", flush=True)
    if device.type == "cuda":
        print(verdict(results.read(results.path())), flush=True)
    sys.exit(int(bool(left) or failed))


if __name__ == "__main__":
    main()
