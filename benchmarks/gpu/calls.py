#!/usr/bin/env python3
"""The four calls of benchmarks/gpu/run.sh: steps in the order of their value, each of which gets its share of what is left of the call's time.

A step is a process. What it prints goes to the terminal and into a file of its own as it comes; a step that takes longer than its limit
is ended with all that it started, as it is by Ctrl-C or SIGTERM. What came to its end without a failure is noted, and left out when the
call is made again; a step that was ended or failed begins with what it lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import results
from benchmarks.gpu.goals import verdict

SECONDS = 520.0  # of a call: below nine minutes with what comes after its last step
SHORTEST = 10.0  # a step that gets less is left for the next time
STARTS = 3  # of a step whose process breaks the GPU's context
HERE = "benchmarks/gpu"
# Rows of the parity table, each of another axis, that show the right calls, groups and orders of NCCL.
PARITY = (
    "tp2 sp / gpt",
    "dp2 overlap-reduce bucket500 / gpt",
    "pp2 / gpt",
    "pp2 vpp2 / gpt",
    "ep2 dp2 / moe",
    "cp2 / gpt",
    "dp2 fsdp / gpt",
    "pp2 zbv / gpt",
)
TEST = "tests/parity/test_layouts.py::test_a_row_of_the_table_equals_the_serial_run"
ALONE = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 "
    "--bf16 --tensor-model-parallel-size 2 --sequence-parallel --eval-iters 0 --distributed-timeout-minutes 1"
).split()
RANKS = ("--nproc-per-node", "2", "--no-python", "bash", f"{HERE}/one_gpu_rank.sh")
COMPILED = ("--flags=--compile", "--flags=--compile --cross-entropy-fusion-impl triton")


@dataclass(frozen=True, slots=True)
class Step:
    """One process. words: after the interpreter, "{seconds}" for those it has; limit: seconds that it wants of SECONDS; gpu: whether it needs one;
    device: of tests; path: for Python.
    """

    name: str
    words: tuple[str, ...]
    limit: float
    gpu: bool = True
    device: str = "cpu"
    path: str = ""

    def environment(self, out: Path) -> dict[str, str]:
        """That of its process; nothing is asked of a network."""
        paths = (self.path and str(ROOT / self.path), os.environ.get("PYTHONPATH", ""), str(ROOT))
        return {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "TORCHINDUCTOR_CACHE_DIR": str(ROOT / "runs" / "inductor"),
            "TRITON_CACHE_DIR": str(ROOT / "runs" / "triton"),
            "HF_HUB_OFFLINE": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "4",  # of each of the processes that run tests
            "MEGATRON_TEST_DEVICE": self.device,
            "PYTHON": sys.executable,  # of the shell scripts
            "BENCHMARK_RESULTS": str(out / results.FILE),
            "BENCHMARK_STEP": self.name,
        }


def pieces(*names: str, limit: float) -> Step:
    """Sections of pieces.py."""
    return Step(f"pieces {' '.join(names)}", (f"{HERE}/pieces.py", *names), limit)


def pytest(*words: str) -> tuple[str, ...]:
    """Tests, with what failed in words."""
    return "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.each_test", *words


CALLS: Mapping[int, tuple[Step, ...]] = {
    0: (
        Step("compile for sm_90", (f"{HERE}/triton_to_sm90.py",), 200, gpu=False),
        Step("graph breaks", (f"{HERE}/graph_breaks.py",), 120, gpu=False),
        Step("roofline", (f"{HERE}/roofline.py",), 30, gpu=False),
        Step("decoding, computed", ("benchmarks/decode_gpu.py", "--computed"), 60, gpu=False),
    ),
    1: (
        Step("tests", pytest("-n", "8", "-m", "gpu", "tests/gpu", "--durations", "15"), 400),
        pieces("masks", "plans", "nccl", limit=110),
    ),
    2: (pieces("rates", limit=80), pieces("attention", limit=100), Step("layers", (f"{HERE}/layers.py",), 330)),
    3: (
        Step(
            "train",
            ("benchmarks/train_gpu.py", "--only", "1.3b", "llama", "llama fp8", "--seconds", "{seconds}", *COMPILED),
            390,
        ),
        pieces("optimizer", limit=30),
        Step("kernels", ("benchmarks/kernels.py", "--compile", "--rounds", "5", "--calls", "10"), 100),
    ),
    4: (
        Step("two ranks on one GPU", ("-m", "torch.distributed.run", *RANKS, *ALONE), 60),
        Step(
            "parity",
            pytest("--maxfail", "2", "-m", "nightly or not nightly", *(f"{TEST}[{row}-fp64]" for row in PARITY)),
            260,
            device="cuda",
            path=f"{HERE}/hostid",
        ),
        Step("decode", ("benchmarks/decode_gpu.py",), 200),
        Step("experts", ("benchmarks/experts.py",), 120),
    ),
}


def ended(step: Step, out: Path) -> bool:
    """Whether it came to its end without a failure in an earlier call."""
    return any(
        line["section"] == "step" and line["step"] == step.name and line["ended"] and not line["code"]
        for line in results.read(out / results.FILE)
    )


def run(step: Step, seconds: float, out: Path) -> tuple[int, bool]:
    """(exit code, whether it ended by itself). What it prints is shown and kept. A process that breaks the GPU's context is started anew."""
    stop, token = time.monotonic() + seconds, f"{os.getpid()}-{time.time_ns()}"
    for _ in range(STARTS):
        code, by_itself = _start(step, stop, out, token)
        if code != results.AGAIN or stop - time.monotonic() < SHORTEST:
            break
    return code, by_itself


def _start(step: Step, stop: float, out: Path, token: str) -> tuple[int, bool]:
    seconds = stop - time.monotonic()
    words = [word.replace("{seconds}", str(int(seconds - 8))) for word in step.words]  # eight to end by itself
    with (out / f"{step.name.replace(' ', '_').replace(',', '')}.txt").open("a") as kept:
        # In the group of this process: what ends that ends all.
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env={**step.environment(out), "BENCHMARK_TOKEN": token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

        def tee() -> None:
            assert process.stdout is not None, "it is a pipe"
            for line in process.stdout:
                print(line, end="", flush=True)
                kept.write(line)
                kept.flush()

        reader = threading.Thread(target=tee, daemon=True)
        reader.start()
        try:
            code, by_itself = process.wait(timeout=max(0.0, seconds)), True
        except subprocess.TimeoutExpired:
            code, by_itself = 124, False
        finally:
            end_all(process, token)
        reader.join(timeout=5)
    return code, by_itself


def end_all(process: subprocess.Popen[str], token: str) -> None:
    """End a process and all that it started, also in sessions of their own as torchrun's ranks are: they inherit the token."""
    process.kill()
    process.wait()
    while left := started_with(token):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def started_with(token: str) -> list[int]:
    """Processes in whose environment the token is."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if f"BENCHMARK_TOKEN={token}".encode() in (folder / "environ").read_bytes():
                processes.append(int(folder.name))
    return processes


def call(number: int, out: Path, *, gpu: bool, seconds: float, again: bool) -> int:
    """Do the steps of a call; returns how many of them are still to do."""
    stop, left, todo = time.monotonic() + seconds, 0, list[Step]()
    for step in CALLS[number]:
        if step.gpu and not gpu:
            print(f"-- {step.name}: left out, there is no GPU", flush=True)
        elif ended(step, out) and not again:
            print(f"-- {step.name}: done in an earlier call", flush=True)
        else:
            todo.append(step)
    for place, step in enumerate(todo):
        began = time.monotonic()
        share = (stop - began) * step.limit / sum(one.limit for one in todo[place:])
        if share < SHORTEST:
            print(f"-- {step.name}: left for the next call, {max(0.0, stop - began):.0f} s remain", flush=True)
            left += 1
            continue
        print(f"-- {step.name}: at most {share:.0f} s: {' '.join(step.words)}", flush=True)
        code, by_itself = run(step, share, out)
        took = time.monotonic() - began
        line = {"step": step.name, "call": number, "code": code, "ended": by_itself}
        results.append(out / results.FILE, "step", **line, seconds=round(took, 1))
        state = ("done" if not code else f"exit code {code}") if by_itself else "ended at its limit"
        print(f"-- {step.name}: {state} after {took:.0f} s", flush=True)
        left += bool(code) or not by_itself
    return left


def dry_run(numbers: Sequence[int]) -> None:
    """Print the steps of calls."""
    for number in numbers:
        print(f"call {number}: {sum(step.limit for step in CALLS[number]):.0f} s wanted, {SECONDS:.0f} s at most")
        for step in CALLS[number]:
            needs = "" if step.gpu else "  (needs no GPU)"
            print(f"  {step.name:22} {step.limit:4.0f} s  python {' '.join(step.words)}{needs}")


def has_gpu() -> tuple[bool, str]:
    """Whether torch sees one, and which. Raises `SystemExit` where there is no torch, or where it does not answer."""
    words = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", words], capture_output=True, text=True, check=False, timeout=120
        )
    except subprocess.TimeoutExpired:
        sys.exit("torch did not say within 120 s whether there is a GPU; look at nvidia-smi")
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:]
        sys.exit(
            f"{sys.executable} has no torch that works ({' '.join(why)}); give one that has: PYTHON=... bash benchmarks/gpu/run.sh"
        )
    name = done.stdout.strip()
    return bool(name), name or "no GPU"


def main() -> int:
    """One call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", type=int, choices=list(CALLS), help="which; left out: with --dry-run all")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of the results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the call")
    parser.add_argument("--dry-run", action="store_true", help="print the steps and do nothing")
    parser.add_argument("--again", action="store_true", help="do what is done once more")
    options = parser.parse_args()
    if options.dry_run:
        dry_run(list(CALLS) if options.call is None else [options.call])
        return 0
    if options.call is None:
        parser.error("--call is missing: 1, 2, 3 or 4 (0: what needs no GPU)")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    began, out = time.monotonic(), options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    gpu, name = has_gpu()
    print(f"call {options.call} on {name}, at most {options.seconds:.0f} s; results in {out}", flush=True)
    results.append(out / results.FILE, "machine", call=options.call, gpu=name)
    try:
        seconds = options.seconds - (time.monotonic() - began)
        left, code = call(options.call, out, gpu=gpu, seconds=seconds, again=options.again), 0
        rest = f"\n{left} steps are left or failed: make call {options.call} again to do what they lack" if left else ""
    except KeyboardInterrupt:
        code, rest = 130, f"\nstopped: make call {options.call} again to go on"
    message = verdict(results.read(out / results.FILE))
    (out / "verdict.txt").write_text(message + "\n")
    print(message + rest, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
