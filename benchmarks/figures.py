#!/usr/bin/env python3
"""Run benchmarks and put what they print into `docs/benchmarks.md`: `bash benchmarks/run.sh [NAME ...]`.

The page holds a place for each question, between two comments; what stands there is replaced by the command, the machine, and
the script's own words. Text around the places is written by hand.

    <!-- figures: startup -->
    ...
    <!-- end of figures -->
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
WORK = Path("runs/benchmarks")
PEERS = WORK / "peers"
BESIDE = WORK / "beside"
CORPUS = WORK / "corpus.jsonl"
_PLACE = "<!-- figures: {} -->\n{}<!-- end of figures -->"


@dataclass(frozen=True, slots=True)
class Question:
    """One script. before: commands that must have succeeded; makes: what they leave, so that they run once. on: cpu, gpu or any."""

    name: str
    command: str
    on: str = "cpu"
    before: tuple[str, ...] = ()
    makes: Path | None = None

    def unfit(self, gpu: bool) -> str:
        """Why this machine cannot answer it, or nothing."""
        return "it needs a GPU" if self.on == "gpu" and not gpu else ""


_MEGATRON = f"{sys.executable} -m pip install --quiet --no-deps --target {PEERS} megatron-core==0.16.1"
_LARGE = "plain+compile megatron-core ours ours+compile"  # four of this size fit into 24 GiB
_BESIDE = f"{sys.executable} benchmarks/train_cpu.py tiny --install {BESIDE}"
_CORPUS = f"{sys.executable} benchmarks/corpus.py {WORK / 'corpus'} {CORPUS}"

QUESTIONS = (
    Question("startup", "benchmarks/startup.py --rounds 5"),
    Question(
        "train tiny",
        f"benchmarks/train_cpu.py tiny --rounds 6 --beside {BESIDE}",
        before=(_BESIDE,),
        makes=BESIDE / "litgpt",
    ),
    Question(
        "train llama",
        f"benchmarks/train_cpu.py llama --rounds 6 --beside {BESIDE}",
        before=(_BESIDE,),
        makes=BESIDE / "torchtitan",
    ),
    Question(
        "train 124m",
        f"benchmarks/train_cpu.py 124m --rounds 7 --beside {BESIDE} --peers {_LARGE}",
        before=(_BESIDE,),
        makes=BESIDE / "litgpt",
    ),
    Question("loop", "benchmarks/loop.py"),
    Question("preprocess", f"benchmarks/preprocess.py {CORPUS} --rounds 3", before=(_CORPUS,), makes=CORPUS),
    Question(
        "index", f"benchmarks/index.py --epochs 1 3 --megatron {PEERS}", before=(_MEGATRON,), makes=PEERS / "megatron"
    ),
    Question("loader", f"benchmarks/loader.py --megatron {PEERS}", before=(_MEGATRON,), makes=PEERS / "megatron"),
    Question("checkpoint", f"benchmarks/checkpoint.py {WORK / 'checkpoint'} --gigabytes 2 --repeats 7"),
    Question("convert", "benchmarks/convert.py --gigabytes 2"),
    Question("bytes", "benchmarks/bytes.py", on="any"),
    Question("kernels", "benchmarks/kernels.py", on="any"),
    Question("attention", "benchmarks/attention.py", on="any"),
    Question("ring", "benchmarks/ring.py --ranks 2"),
    Question("overlap", "benchmarks/overlap.py"),
    Question("ranks", "benchmarks/ranks.py"),
    Question("many ranks", "benchmarks/many_ranks.py"),
    Question("planning", "benchmarks/planning.py --rounds 3"),
    Question("experts", "benchmarks/experts.py", on="any"),
    Question("replica_check", "benchmarks/replica_check.py"),
    Question("failure", "benchmarks/failure.py --rounds 3"),
    Question("decode", "benchmarks/decode.py 124m --rounds 3"),
    Question("rollouts", "benchmarks/rollouts.py 10m --rounds 3"),
    Question("adapters", "benchmarks/adapters.py --rounds 7"),
    Question("decode on a GPU", "benchmarks/decode_gpu.py", on="gpu"),
    Question("gpu", "benchmarks/train_gpu.py", on="gpu"),
)


def machine() -> str:
    """This machine in a line."""
    cpu = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    if info.exists() and (match := re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)):
        cpu = match[1].strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = (
        subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
        ).stdout
        if has_gpu()
        else ""
    )
    parts = [
        f"{cores} cores of {cpu}",
        f"{memory:.0f} GiB",
        *gpu.strip().splitlines()[:1],
        f"Python {platform.python_version()}",
    ]
    for package in ("torch", "transformers", "triton"):
        try:
            parts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(parts)


def has_gpu() -> bool:
    """Whether a driver is there."""
    return Path("/dev/nvidia0").exists()


def written(page: str, name: str, text: str) -> str:
    """The page with another text in one of its places. Raises `ValueError` if it has no such place, or several."""
    pattern = re.compile(
        re.escape(f"<!-- figures: {name} -->\n") + ".*?" + re.escape("<!-- end of figures -->"), re.DOTALL
    )
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"docs/benchmarks.md has {len(pattern.findall(page))} places for {name}; it needs one")
    return pattern.sub(lambda _: _PLACE.format(name, text), page)


def formatted(question: Question, output: str, load: float) -> str:
    """What the page says of an answer."""
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return f"`python {question.command}`, {today}, {machine()}, load {load:.1f} before it began:\n\n```\n{output.rstrip()}\n```\n"


def answer(question: Question) -> bool:
    """Run one script and write its figures into the page; whether it succeeded."""
    if question.makes is None or not (ROOT / question.makes).exists():
        for command in question.before:
            if subprocess.run(shlex.split(command), cwd=ROOT, check=False).returncode:
                print(f"  {question.name}: left out, since its preparation failed: {command}")
                return False
    load = os.getloadavg()[0]
    print(f"  {question.name}: python {question.command}", flush=True)
    done = subprocess.run(
        [sys.executable, *shlex.split(question.command)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout, flush=True)
    if done.returncode:
        print(f"  {question.name}: failed with {done.returncode}; its figures are left as they were")
        return False
    PAGE.write_text(written(PAGE.read_text(), question.name, formatted(question, done.stdout, load)))
    return True


def main() -> int:
    """Answer the questions that are asked, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="questions, or the first words of their names (default: all)")
    parser.add_argument("--list", action="store_true", help="list the questions and run nothing")
    options = parser.parse_args()
    gpu = has_gpu()
    questions = [q for q in QUESTIONS if not options.names or any(q.name.startswith(name) for name in options.names)]
    if missing := [name for name in options.names if not any(q.name.startswith(name) for q in QUESTIONS)]:
        parser.error(f"no question is called {', '.join(missing)}; there are: {', '.join(q.name for q in QUESTIONS)}")
    (ROOT / WORK).mkdir(parents=True, exist_ok=True)
    failed = []
    for question in questions:
        reason = question.unfit(gpu)
        if options.list:
            print(f"  {question.name:12} python {question.command}{f'   ({reason})' if reason else ''}")
        elif reason:
            print(f"  {question.name}: left out, {reason}")
        elif not answer(question):
            failed.append(question.name)
    if failed:
        print(f"  {len(failed)} of {len(questions)} failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
