"""Energon's folders as the real megatron-energon reads them: the same samples, in the same order, with the same images."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatron.core.config.settings.data import DataConfig
from megatron.core.datasets import images
from megatron.core.datasets.data_splits import plan_data_splits
from megatron.core.datasets.energon import EnergonSplitPart
from megatron.core.datasets.webdataset import read_energon_rows
from tests.unit.datasets.test_energon import KINDS, folder, joined
from tests.unit.datasets.test_images import content, options, picture

pytestmark = pytest.mark.nightly
VERSION = "7.4.1"
SCRIPT = Path(__file__).with_name("run_energon.py")
ENERGON = "megatron.energon"
SAMPLES: dict[str, tuple[dict[str, str], list[dict[str, Any]]]] = {
    "CaptioningSample": (
        {"image": "png", "caption": "json[caption]"},
        [{"json": {"caption": f"text {number}"}} for number in range(5)],
    ),
    "VQASample": (
        KINDS["VQASample"][0],
        [KINDS["VQASample"][1], {"json": [{"value": "Who?"}, ["a", "b"], [0.9, 0.1]]}],
    ),
    "OCRSample": (KINDS["OCRSample"][0], [KINDS["OCRSample"][1], {"txt": "WAY OUT"}]),
    "MultiChoiceVQASample": (KINDS["MultiChoiceVQASample"][0], [KINDS["MultiChoiceVQASample"][1]] * 2),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the package is installed: in a folder of its own, since it shares its first name with ours."""
    if given := os.environ.get("MEGATRON_ENERGON"):
        return given
    target = tmp_path_factory.getbasetemp() / f"megatron-energon-{VERSION}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), f"megatron-energon=={VERSION}"]
    if subprocess.run([*pip, "--no-deps"], capture_output=True).returncode:
        pytest.skip("megatron-energon cannot be installed here")
    # Its releases differ in what they need; the package itself would bring torch.
    subprocess.run([*pip[:-1], "multi-storage-client"], check=True)
    more = "attrs braceexpand bracex click deprecation filetype fsspec mfusepy rapidyaml s3fs webdataset"
    subprocess.run([*pip[:-1], *more.split(), "--no-deps"], check=True)
    return str(target)


def run(package: str, where: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        cwd=where,
        env={**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout


def theirs(package: str, where: Path, path: str, part: str = "train") -> list[dict[str, Any]]:
    lines = run(package, where, "read", path, part).splitlines()
    return [json.loads(line.removeprefix("sample ")) for line in lines if line.startswith("sample ")]


def described(path: Path, name: str) -> list[Any]:
    """Size and sum of the image that a row names."""
    image = Image.open(io.BytesIO(images.read_image_bytes(os.path.join(path, name), options()))).convert("RGB")
    return [*image.size, int(np.asarray(image, np.int64).sum())]


def answer_of(sample: dict[str, Any]) -> str:
    """What is learnt of a sample of theirs."""
    if "answers" in sample:
        return str(sample["answers"][int(np.argmax(sample["answer_weights"]))])
    if "choices" in sample:
        return "ABCDEF"[sample["correct_choice_idx"]]
    return str(sample["caption"] if "caption" in sample else sample["text"])


@pytest.mark.parametrize("kind", SAMPLES)
def test_samples_are_those_that_energon_reads(kind: str, package: str, tmp_path: Path) -> None:
    fields, contents = SAMPLES[kind]
    samples = [
        {"png": content(picture(20 + number, 30))}
        | {ending: (value if ending == "txt" else json.dumps(value)).encode() for ending, value in members.items()}
        for number, members in enumerate(contents)
    ]
    description = {"sample_type": {"__module__": ENERGON, "__class__": kind}, "field_map": fields}
    half = len(samples) // 2
    path = folder(tmp_path / "data", [samples[:half], samples[half:]], description)
    split = (path / ".nv-meta" / "split.yaml").read_text()
    run(package, tmp_path, "prepare", str(path), "train=.*")
    (path / ".nv-meta" / "split.yaml").write_text(split)
    read = theirs(package, tmp_path, str(path))
    own = [row for row in read_energon_rows(EnergonSplitPart(str(path), "train")) if not isinstance(row, str)]
    assert len(read) == len(own) == len(samples)
    for sample, row in zip(read, own, strict=True):
        assert row["conversations"][1]["value"] == answer_of(sample)
        assert described(path, row["image"]) == sample["image"]
        assert str(sample.get("context", "")) in row["conversations"][0]["value"]


def test_a_join_is_that_of_energon(package: str, tmp_path: Path) -> None:
    path = joined(tmp_path, "skip")
    for name in ("pictures", "texts"):
        split = (tmp_path / name / ".nv-meta" / "split.yaml").read_text()
        run(package, tmp_path, "prepare", str(tmp_path / name), "train=.*")
        (tmp_path / name / ".nv-meta" / "split.yaml").write_text(split)
    read = theirs(package, tmp_path, path)
    plan = plan_data_splits(DataConfig(data_path=(path,)))[0]
    assert plan is not None
    part = EnergonSplitPart.parse_data_path(plan.blend.prefixes[0])
    assert part is not None
    own = [row for row in read_energon_rows(part) if not isinstance(row, str)]
    assert [row["conversations"][1]["value"] for row in own] == [sample["text"] for sample in read]
    assert [described(tmp_path / "pictures", row["image"]) for row in own] == [sample["image"] for sample in read]
