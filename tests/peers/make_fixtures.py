"""Write the fixtures with the real Megatron Core, installed from PyPI into a folder of its own.

    python tests/peers/make_fixtures.py --package PACKAGES                  install there, run every case, write the fixtures
    python tests/peers/make_fixtures.py --package PACKAGES --version 0.14.0 --cases dense gqa --to FIXTURES

A fixture is `FIXTURES/VERSION/CASE.tar.xz`: the folder of a checkpoint as Megatron-LM leaves it, the tokens that the run is
trained on, and `losses.json`, the losses of all its iterations, those after the checkpoint included.
"""

from __future__ import annotations

import argparse
import io
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from cases import CASES, RELEASES  # noqa: E402

FIXTURES = HERE / "fixtures"
VERSION = "0.16.1"
SECONDS = 300  # of a case
NEWER_PYTHON = ("--python-version", "3.12", "--only-binary=:all:")  # releases since 0.17 are for none older


def install(folder: Path, version: str) -> Path:
    """Megatron Core of a version, and what its checkpoints need, in a folder that no environment knows of."""
    target = folder / f"megatron-core-{version}"
    if not (target / "megatron" / "core").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
        # What a release has compiled is for some versions of Python; `releases.py` does without it.
        found = subprocess.run([*pip, "--no-deps", f"megatron-core=={version}"], capture_output=True)
        if found.returncode:
            subprocess.run(
                [*pip, "--no-deps", *NEWER_PYTHON, "--ignore-requires-python", f"megatron-core=={version}"], check=True
            )
        subprocess.run([*pip, "psutil"], check=True)
    return target


def newest_version() -> str:
    """The newest release of Megatron Core on PyPI."""
    answer = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "megatron-core", *NEWER_PYTHON[:2]],
        check=True,
        capture_output=True,
        text=True,
    )
    return answer.stdout.split("(", 1)[1].split(")", 1)[0]


def run_case(name: str, package: Path, folder: Path) -> None:
    """All ranks of a case. Raises `RuntimeError` with the end of a failing log."""
    started_together([str(HERE / "run_peer.py"), name, str(folder)], CASES[name].ranks, package, folder)


def started_together(command: Sequence[str], ranks: int, package: Path, folder: Path, seconds: float = SECONDS) -> None:
    """A script's ranks, each a process for which `megatron` is NVIDIA's. Raises `RuntimeError` with the end of a failing log."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    processes = []
    for rank in range(ranks):
        place = {
            "PYTHONPATH": str(package),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        with (folder / f"rank{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *command], cwd=folder, stdout=log, stderr=subprocess.STDOUT, env={**given, **place}
                )
            )
    try:
        codes = [process.wait(seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        log = (folder / f"rank{next(rank for rank, code in enumerate(codes) if code)}.log").read_text(errors="replace")
        raise RuntimeError(f"{' '.join(command)} failed in Megatron Core:\n{log[-3000:]}")


def pack(folder: Path, file: Path) -> None:
    """What belongs to a fixture, packed, without times and owners."""
    file.parent.mkdir(parents=True, exist_ok=True)
    names = sorted(
        path
        for part in ("checkpoints", "tokens.bin", "tokens.idx", "losses.json")
        for path in ([folder / part] if (folder / part).is_file() else (folder / part).rglob("*"))
        if path.is_file()
    )
    with tarfile.open(file, "w:xz") as archive:
        for path in names:
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            content = path.read_bytes()
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))


def unpack(name: str, folder: Path, *, version: str = VERSION, fixtures: Path = FIXTURES) -> Path:
    """A fixture's content in a folder; returns the folder."""
    with tarfile.open(fixtures / version / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def cases_of(version: str) -> Sequence[str]:
    """The cases of which there are fixtures of a release."""
    return RELEASES.get(version, tuple(CASES))


def make(names: Sequence[str], package: Path, to: Path, version: str) -> None:
    """Run cases and write their fixtures."""
    target = install(package, version)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            run_case(name, target, Path(folder))
            pack(Path(folder), to / version / f"{name}.tar.xz")
        print(f"{name}: {(to / version / f'{name}.tar.xz').stat().st_size} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True, help="folder to install Megatron Core into")
    parser.add_argument("--version", default=VERSION, help="its version on PyPI")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, metavar="CASE", help=f"{', '.join(CASES)} (default: those of the version)"
    )
    parser.add_argument("--to", type=Path, default=FIXTURES, help="folder of the fixtures")
    asked = parser.parse_args()
    make(asked.cases or cases_of(asked.version), asked.package.resolve(), asked.to.resolve(), asked.version)
