"""A disk that is full: the message names the file, and nothing half written stands under a name that is read."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.cli.commands.bert_embedding import NpyWriter
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.files import DISK
from megatron.core.families.hf_export import folder_written_whole
from megatron.evaluation.vision_benchmarks import BenchmarkQuestion, write_official_answer_file
from tests.helpers.architecture import ROOT

LIMIT = "import resource, runpy, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\nsys.argv = sys.argv[1:]\n"


@pytest.fixture
def full() -> Iterator[None]:
    """A disk that takes no file above 5,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_pair_that_the_disk_does_not_hold_is_removed_and_its_file_named(full: None, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large: '.*pair.bin."):
        with IndexedDatasetBuilder(tmp_path / "pair", np.int32) as builder:
            for _ in range(100_000):
                builder.add_sequence(np.arange(10))
                builder.end_document()
    assert not list(tmp_path.iterdir())


def run_with_limit(limit: int, code: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program whose files may have so many bytes."""
    return subprocess.run(
        [sys.executable, "-c", LIMIT.format(limit=limit) + code, *words],
        cwd=folder,
        # Compiled files would be cut short, too, and stop every later program.
        env={
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "MPLCONFIGDIR": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


def tool(name: str) -> str:
    return f"runpy.run_path({str(ROOT / 'tools' / name)!r}, run_name='__main__')"


def test_preprocessing_names_the_file_and_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": "words " * 500}) + "\n" for _ in range(60)))
    words = "--input in.jsonl --output-prefix out --tokenizer-type ByteTokenizer --append-eod --workers 1".split()
    done = run_with_limit(100_000, tool("preprocess_data.py"), "preprocess_data.py", *words, folder=tmp_path)
    assert done.returncode and "Traceback" not in done.stderr
    assert "File too large: '" in done.stderr and "out_text_document.bin" in done.stderr
    assert [path.name for path in tmp_path.glob("out*")] == []


def test_a_page_and_a_plot_are_whole_or_not_there(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\nfrom megatron.core.datasets.storage import atomic_file, write_file\n"
        "try:\n    write_file('page.html', 'x' * 5000)\nexcept OSError as error:\n    print(error)\n"
        "from matplotlib.figure import Figure\n"
        "try:\n    with atomic_file('plot.png') as file:\n        Figure().savefig(file, format='png')\n"
        "except OSError as error:\n    print(error)"
    )
    done = run_with_limit(1000, code, "x", folder=tmp_path)
    assert "File too large: 'page.html'" in done.stdout and "File too large: 'plot.png'" in done.stdout, done.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("page", "plot"))]


def test_answers_and_vectors_are_whole_or_not_there(full: None, tmp_path: Path) -> None:
    rows = [("answer" * 100, BenchmarkQuestion(number, ["x"])) for number in range(100)]
    with pytest.raises(OSError, match="answers.json"):
        write_official_answer_file("vqav2", rows, tmp_path / "answers.json")
    with pytest.raises(OSError, match=r"vectors.npy.tmp"), NpyWriter(str(tmp_path / "vectors.npy"), 8) as writer:
        for _ in range(100_000):
            writer.add(np.zeros((10, 8), np.float32))
    assert not list(tmp_path.iterdir())


def test_a_rank_names_the_checkpoint_file_that_it_cannot_write(full: None, tmp_path: Path) -> None:
    file = DISK.create(tmp_path / "rank_00000.safetensors")
    with pytest.raises(OSError, match=r"File too large: '.*rank_00000.safetensors'"):
        for _ in range(3):
            file.write(memoryview(bytes(3000)))
    file.close()


def test_a_folder_that_cannot_be_written_whole_is_not_there(full: None, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="adapter cannot be written: .*File too large"):
        with folder_written_whole(tmp_path / "adapter") as made:
            (made / "adapter_config.json").write_text("{}")
            (made / "adapter_model.safetensors").write_bytes(bytes(6000))
    assert not list(tmp_path.iterdir())
    with folder_written_whole(tmp_path / "adapter") as made:
        (made / "adapter_config.json").write_text("{}")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file() and len(list(tmp_path.iterdir())) == 1
