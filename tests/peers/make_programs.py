"""Write the fixtures of Megatron-LM's own programs, out of a git clone of its sources.

    python -m tests.peers.make_programs --clone CLONE --python PYTHON --release 0.16.1 [--cases pp2 fp16] [--to FIXTURES]

PYTHON is an interpreter with torch, einops, psutil, sentencepiece, six, tiktoken and nltk, which the programs import. A fixture is
`FIXTURES/pretrain-RELEASE/CASE.tar.xz`: the checkpoint of iteration 3, the tokens, and `losses.json` with what the program logged.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed import IndexedDatasetBuilder
from tests.peers.dump_arguments import sources
from tests.peers.make_fixtures import FIXTURES, pack
from tests.peers.programs import PROGRAMS, SAVED

HERE = Path(__file__).resolve().parent
IDS = 30  # of words; the next one ends documents


def write_tokens(prefix: Path) -> None:
    """A pair of .bin and .idx: every document counts on from a random id, with slips."""
    draws = np.random.RandomState(5)
    with IndexedDatasetBuilder(prefix, np.uint16) as writer:
        for _ in range(60):
            steps = np.where(draws.rand(draws.randint(8, 40)) < 0.2, draws.randint(0, IDS), 1)
            writer.add_sequence([*(draws.randint(0, IDS) + np.cumsum(steps)) % IDS, IDS])
            writer.end_document()


def write_sentences(folder: Path) -> None:
    """A pair of sentences that count on from a random word, and the vocabulary `vocab.txt` of a WordPiece tokenizer."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(27))]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    draws = np.random.RandomState(3)
    with IndexedDatasetBuilder(folder / "tokens", np.uint16, level="sentence") as writer:
        for _ in range(60):
            for _ in range(draws.randint(2, 6)):
                first, length = draws.randint(0, 27), draws.randint(3, 9)
                writer.add_sequence([5 + (first + place) % 27 for place in range(length)])
            writer.end_document()


def run_programs(names: Sequence[str], release: str, *, clone: Path, python: Path, folder: Path) -> None:
    """Run cases in folders of their names. Raises `CalledProcessError` if the release cannot be started."""
    root, jobs = sources(clone, release, folder / "sources"), []
    for name in names:
        case = PROGRAMS[name]
        (folder / name).mkdir()
        if case.program == "pretrain_t5.py":
            write_sentences(folder / name)
        else:
            write_tokens(folder / name / "tokens")
        arguments = case.command_line(release)
        jobs.append(
            {"folder": str(folder / name), "program": case.program, "arguments": arguments, "ranks": case.ranks}
        )
    (folder / "jobs.json").write_text(json.dumps(jobs))
    given = {
        "PYTHONPATH": str(root),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    subprocess.run(
        [python, HERE / "run_pretrain.py", root, folder / "jobs.json"],
        check=True,
        cwd=folder,
        env={**os.environ, **given},
    )


def pack_program(folder: Path, file: Path) -> None:
    """Write the fixture of a run: of its checkpoints the first alone. Raises `RuntimeError` for one that did not end."""
    steps = json.loads((folder / "losses.json").read_text()) if (folder / "losses.json").exists() else []
    if len(steps) != 8:
        raise RuntimeError(f"{folder} has {len(steps)} of 8 steps; see its rank logs")
    for later in (folder / "checkpoints").glob("iter_*"):
        if later.name != f"iter_{SAVED:07d}":
            shutil.rmtree(later)
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    pack(folder, file)


def main() -> None:
    """Make the fixtures of one release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--clone", "--python", "--release"):
        parser.add_argument(name, required=True)
    parser.add_argument("--cases", nargs="+", choices=PROGRAMS, metavar="CASE", help="default: those of the release")
    parser.add_argument("--to", type=Path, default=FIXTURES, help="folder of the fixtures")
    asked = parser.parse_args()
    names = asked.cases or [name for name, case in PROGRAMS.items() if asked.release in case.releases]
    with tempfile.TemporaryDirectory() as folder:
        run_programs(names, asked.release, clone=Path(asked.clone), python=Path(asked.python), folder=Path(folder))
        for name in names:
            pack_program(Path(folder) / name, asked.to / f"pretrain-{asked.release}" / f"{name}.tar.xz")


if __name__ == "__main__":
    main()
