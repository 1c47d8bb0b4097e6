#!/usr/bin/env python3
"""Training steps on the CPU: ours, eager and compiled, against loops around other implementations, in turn.

    python benchmarks/train_cpu.py tiny --install FOLDER        (once: litgpt, megatron-core and torchtitan from PyPI, a folder each)
    python benchmarks/train_cpu.py tiny --rounds 6 --beside FOLDER

A step is everything from the zeroed gradient to the updated weights (fp32, fused AdamW, dropout off, the same shapes). Each
implementation is a process of its own, since two of them are called megatron; they stay, and take turns step by step, so
that a machine whose speed drifts is fair to all. Without --beside, or on request, only some take part (--peers); what does
not fit into memory together is run with fewer. Tokens per CPU-second are compared, round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "megatron-core": ("megatron-core==0.16.1",),
    "litgpt": (
        "litgpt==0.5.13",
        "lightning==2.6.6",
        "lightning-utilities==0.15.3",
        "torchmetrics==1.9.0",
        "jsonargparse==4.53.0",
        "psutil==7.2.2",
    ),
    "torchtitan": ("torchtitan==0.2.0", "tyro==1.0.17", "docstring_parser==0.18.0", "torchdata==0.11.0"),
}
NAMES = (
    "plain",
    "plain+compile",
    "transformers",
    "transformers+compile",
    "litgpt",
    "litgpt+compile",
    "megatron-core",
    "torchtitan",
    "torchtitan+compile",
    "ours",
    "ours+compile",
)


class Peer:
    """One implementation in a process that waits for its turn."""

    def __init__(self, name: str, size: str, threads: int, beside: Path | None) -> None:
        package = name.partition("+")[0]
        path = beside / package if package in PACKAGES else ROOT  # one of the two packages called megatron, never both
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(path),
            "HF_HUB_OFFLINE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }  # waiting threads must not count as work
        self.process = subprocess.Popen(
            [sys.executable, __file__, size, "--serve", name, "--threads", str(threads)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.problem = ""
        self.first = self._turn().get("wall", 0.0)

    def step(self) -> None:
        """One step."""
        if not self.problem:
            report = self._turn()
            if not self.problem:
                self.cpu.append(report["cpu"])
                self.wall.append(report["wall"])

    def _turn(self) -> dict[str, float]:
        try:
            self.process.stdin.write("step\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        report = json.loads(line) if line.startswith("{") else {"problem": "its process ended"}
        self.problem = report.get("problem", "")
        return report


def serve(name: str, size_name: str, threads: int) -> None:
    """Be one implementation: a line of JSON for every line read, of a step each."""
    sys.path.append(sys.path.pop(0))  # the folder of this script, of which files may be called as libraries are
    speaker, sys.stdout = sys.stdout, sys.stderr  # libraries print
    try:
        import torch
        from models import SIZES, peers_of

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        size = SIZES[size_name]
        generator = torch.Generator().manual_seed(1)
        x, y = (
            torch.randint(0, size.vocabulary - 64, (size.batch, size.length), generator=generator) for _ in range(2)
        )
        kind, _, how = name.partition("+")
        step = peers_of(size)[kind](size, compiled=how == "compile")
        for _ in sys.stdin:
            began, spent = time.perf_counter(), time.process_time()
            loss = step(x, y)
            assert loss == loss, "it lost its way"
            print(
                json.dumps({"cpu": time.process_time() - spent, "wall": time.perf_counter() - began, "loss": loss}),
                file=speaker,
                flush=True,
            )
    except Exception as error:  # noqa: BLE001 - whatever it is, the table says it
        print(json.dumps({"problem": f"{type(error).__name__}: {error}"[:200]}), file=speaker, flush=True)


def install(folder: Path) -> None:
    """Put the peers that share names or versions with nobody else into folders of their own."""
    for package, words in PACKAGES.items():
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / package), *words],
            check=True,
        )


def show(peers: dict[str, Peer], size_name: str, options: argparse.Namespace) -> None:
    """The table, and the line that counts."""
    from models import SIZES

    done = {name: peer for name, peer in peers.items() if peer.cpu and not peer.problem}
    if not done:
        return print("  nothing was measured")
    size, rounds = SIZES[size_name], max(len(peer.cpu) for peer in done.values())
    print(
        f"{size_name}: {size.tokens} tokens and {size.flops / 1e9:.0f} GFLOP a step, {rounds} rounds, {options.threads} threads of "
        f"{os.cpu_count()} ({platform.processor() or platform.machine()}), load {os.getloadavg()[0]:.1f}"
    )
    base = next(iter(done))
    print(f"  {'':22} tokens/CPU-s (slowest .. fastest)   tokens/s   x {base} (smallest .. largest)   first step")
    for name, peer in peers.items():
        if name not in done:
            print(f"  {name:22} {peer.problem or 'no round'}")
            continue
        speeds, ratios = sorted(size.tokens / spent for spent in peer.cpu), compared(peer, done[base])
        print(
            f"  {name:22} {statistics.median(speeds):8.1f} ({speeds[0]:.1f} .. {speeds[-1]:.1f})   "
            f"{size.tokens / statistics.median(peer.wall):8.1f}   {statistics.median(ratios):.3f} ({ratios[0]:.3f} .. {ratios[-1]:.3f})   "
            f"{peer.first:5.1f} s"
        )
    ours = {name: peer for name, peer in done.items() if name.startswith("ours")}
    others = {name: peer for name, peer in done.items() if name not in ours}
    if ours and others:
        (best, us), (rival, them) = (
            min(group.items(), key=lambda pair: statistics.median(pair[1].cpu)) for group in (ours, others)
        )
        ratios = compared(us, them)
        print(
            f"ratio: {best} trains {statistics.median(ratios):.3f} x ({ratios[0]:.3f} .. {ratios[-1]:.3f}) the tokens per CPU-second of "
            f"{rival}, the best of the others"
        )


def compared(peer: Peer, other: Peer) -> list[float]:
    """Speed over that of another, round by round, sorted."""
    return sorted(
        b / a for a, b in zip(peer.cpu, other.cpu, strict=False)
    )  # one may be a step ahead where it was stopped


def main() -> None:
    """Measure and print one line an implementation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=("10m", "tiny", "llama", "124m"))
    parser.add_argument("--peers", nargs="+", choices=NAMES)
    parser.add_argument("--beside", type=Path, help="folder of --install")
    parser.add_argument(
        "--install",
        type=Path,
        metavar="FOLDER",
        help="fetch litgpt, megatron-core and torchtitan into this folder, and end",
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.size, options.threads)
    if options.install:
        return install(options.install)
    from models import SIZES, peers_of

    there = [name for name in NAMES if name.partition("+")[0] in peers_of(SIZES[options.size])]
    names = options.peers or [name for name in there if options.beside or name.partition("+")[0] not in PACKAGES]
    if unfit := [name for name in names if name not in there]:
        parser.error(f"{' and '.join(unfit)} cannot be had for {options.size}; choose of {', '.join(there)}")
    if lacking := [
        name
        for name in names
        if name.partition("+")[0] in PACKAGES and not (options.beside and options.beside.is_dir())
    ]:
        parser.error(f"{' and '.join(lacking)}: give --beside, the folder of an earlier --install")
    peers: dict[str, Peer] = {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for name in names:
            print(f"starting {name}", file=sys.stderr)
            peers[name] = Peer(name, options.size, options.threads, options.beside)
            peers[name].step()  # the first steps of a compiled network are not yet those of all
            peers[name].cpu.clear()
            peers[name].wall.clear()
        for turn in range(options.rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                peers[name].step()
    except KeyboardInterrupt:
        print("stopped early: what was measured so far", file=sys.stderr)
    finally:
        for peer in peers.values():
            peer.process.kill()
            peer.process.wait()
    show(peers, options.size, options)


if __name__ == "__main__":
    main()
