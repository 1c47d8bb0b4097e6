"""Energon's folders from strangers: what a tar or a YAML file may say to run for ever, or to mean something else, is refused by name."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron.core.datasets.energon import EnergonSplitPart, _expand_braces, read_energon_blend
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.webdataset import read_energon_rows, read_tar_samples
from tests.unit.datasets.test_energon import CAPTIONS, captions, folder

PNG = captions("one")[0]["png"]


def header(name: str, size: bytes | int, kind: bytes = b"0") -> bytes:
    """A header of a tar. size: a number, or the bytes of the field."""
    entry = tarfile.TarInfo(name)
    entry.type = kind
    raw = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    raw[124:136] = b"%011o\0" % size if isinstance(size, int) else size
    raw[148:156] = b"%06o\0 " % (256 + sum(raw[:148]) + sum(raw[156:]))
    return bytes(raw)


def block(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def pax(**values: str) -> bytes:
    lines = b""
    for name, value in values.items():
        line = f" {name.replace('__', '.')}={value}\n"
        size = len(line) + len(str(len(line) + 2))
        lines += f"{size}{line}".encode()
    return header("pax", len(lines), b"x") + block(lines)


GOOD = header("0000.png", len(PNG)) + block(PNG)
END = bytes(1024)
TARS: dict[str, tuple[bytes, str]] = {
    "a negative size": (GOOD + header("0001.png", b"\xff" * 11 + b"\x00") + END, "has -"),
    "a negative size of pax": (GOOD + pax(size="-2048") + header("0001.png", 0) + END, "damaged|as a tar"),
    "a huge size": (GOOD + header("0001.png", b"\x80" + b"\x7f" * 11) + END, "cut off|as a tar"),
    "a huge name": (GOOD + header("././@LongLink", 2**31, b"L") + END, "a header of 2147483648 bytes"),
    "a huge pax header": (GOOD + header("pax", 2**33 - 1, b"x") + END, "a header of"),
    "a sparse file": (GOOD + header("0001.png", 512, b"S") + bytes(512) + END, "without --sparse"),
    "a sparse file of pax": (
        GOOD + pax(GNU__sparse__major="1", GNU__sparse__minor="0") + header("0001.png", 512) + block(b"9" * 512) + END,
        "without --sparse",
    ),
    "names of names": (GOOD + (header("././@LongLink", 4, b"L") + block(b"abc\0")) * 3000 + END, "as a tar"),
    "pax without a number": (GOOD + header("pax", 20, b"x") + block(b"0 size=1\n") + END, "no header"),
    "a header in the middle that is none": (GOOD + b"?" * 512 + GOOD + END, "no header"),
}


@pytest.mark.parametrize("name", TARS)
def test_a_tar_that_would_never_end_is_refused(name: str, tmp_path: Path) -> None:
    content, reason = TARS[name]
    (tmp_path / "s.tar").write_bytes(content)
    with pytest.raises(DataError, match=reason):
        list(read_tar_samples(str(tmp_path), "s.tar"))


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"5", b"6"])
def test_links_and_devices_are_no_images(kind: bytes, tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(GOOD + header("0000.jpg", 0, kind) + END)
    (sample,) = read_tar_samples(str(tmp_path), "s.tar")
    assert list(sample.members) == ["png"]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_of_every_form_are_read(form: int, tmp_path: Path) -> None:
    name = "folder/" * 20 + "0000.png"
    with tarfile.open(tmp_path / "s.tar", "w", format=form) as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(PNG)
        tar.addfile(entry, io.BytesIO(PNG))
    (sample,) = read_tar_samples(str(tmp_path), "s.tar")
    member = sample.members["png"]
    assert (tmp_path / "s.tar").read_bytes()[member.offset : member.offset + member.size] == PNG


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_damaged_tars_are_read_or_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "whole.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(4):
            entry = tarfile.TarInfo(f"{number:04d}-{'long' * 30}.png")
            entry.size = len(PNG)
            entry.pax_headers = {"comment": "x" * 40}
            tar.addfile(entry, io.BytesIO(PNG))
    whole, random = np.frombuffer((tmp_path / "whole.tar").read_bytes(), np.uint8), np.random.default_rng(3)
    for _ in range(300):
        damaged = whole.copy()
        damaged[random.integers(0, len(whole), 3)] = random.integers(0, 256, 3)
        (tmp_path / "s.tar").write_bytes(damaged.tobytes())
        try:
            list(read_tar_samples(str(tmp_path), "s.tar"))
        except DataError:
            pass


@pytest.mark.parametrize(
    "pattern",
    ["{0..999999999999}", "{0..9}" * 9, "{a,b}" * 60, "{0..1000000}", "{" + "9" * 5000 + ".." + "9" * 5001 + "}"],
)
def test_patterns_without_end_are_refused(pattern: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "data", [captions("one")], train=[pattern])
    with pytest.raises(DataError, match="stands for more than"):
        _ = EnergonSplitPart(str(path), "train").shard_sample_counts
    assert _expand_braces(["a-{08..10}-{x,y}"]) == [f"a-{n}-{c}" for n in ("08", "09", "10") for c in "xy"]


RANGES = {  # of the package braceexpand, which Energon calls
    "{0..10}": "0 1 2 3 4 5 6 7 8 9 10",
    "{00..3}": "00 01 02 03",
    "{0..05}": "00 01 02 03 04 05",
    "{3..1}": "3 2 1",
    "{1..-1}": "1 0 -1",
    "{0..6..3}": "0 3 6",
    "{5..5}": "5",
    "{x}{}": "{x}{}",
    "{a,,b}": "a  b",
}


@pytest.mark.parametrize("pattern", RANGES)
def test_patterns_stand_for_the_names_of_braceexpand(pattern: str) -> None:
    assert _expand_braces([pattern]) == RANGES[pattern].split(" ")


@pytest.mark.parametrize(
    "exclude", ["s-0.tar", {"s-0.tar": 1}, [["s-0.tar"]], [3], ["s-{a..c}.tar"], ["s-{0,{1,2}}.tar"]]
)
def test_what_leaves_out_tars_and_cannot_be_read_is_refused(exclude: Any, tmp_path: Path) -> None:
    path = folder(tmp_path / "data", [captions("one"), captions("two")], train=["s-{0..1}.tar"], exclude=exclude)
    with pytest.raises(DataError, match="split.yaml"):
        _ = EnergonSplitPart(str(path), "train").shard_sample_counts


def laughs(deep: int = 9, wide: int = 10) -> str:
    """A YAML file of a few hundred bytes that stands for wide^deep values."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * wide)}]" for n in range(1, deep)]
    return "\n".join(lines)


@pytest.mark.parametrize("content", [laughs(), "subflavors: &a [*a]", "x: " + "[" * 2000 + "]" * 2000])
def test_yaml_that_grows_without_end_is_refused(content: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "data", [captions("one")])
    (path / ".nv-meta" / "dataset.yaml").write_text(content)
    with pytest.raises(DataError, match="values|cannot be read"):
        list(read_energon_rows(EnergonSplitPart(str(path), "train")))


@pytest.mark.parametrize(
    "nodes",
    [
        {"blend_epochized": [{"path": "a", "repetitions": 1e12}]},
        {"blend": [{"path": "self.yaml"}, {"path": "self.yaml"}]},
    ],
)
def test_blends_without_end_are_refused(nodes: Any, tmp_path: Path) -> None:
    folder(tmp_path / "a", [captions("one")])
    (tmp_path / "self.yaml").write_text(yaml.safe_dump({"splits": {"train": nodes}}))
    with pytest.raises(DataError, match="more than|name each other"):
        read_energon_blend(str(tmp_path / "self.yaml"), "train")


def in_blend(**keys: Any) -> Any:
    return {"splits": {"train": {"blend": [{"path": "a", **keys}]}}}


REFUSED: dict[str, tuple[Any, str]] = {
    "an unknown key of the file": ({"splits": {"train": {"path": "a"}}, "seed": 3}, "seed: 3 is not read"),
    "another class": ({"__class__": "Other", "splits": {"train": {"path": "a"}}}, "'Other'"),
    "another module": ({"__module__": "mine", "splits": {"train": {"path": "a"}}}, "__module__: 'mine'"),
    "an unknown key of a data set": (in_blend(sampling="heavy"), "sampling: 'heavy' is not read"),
    "repetitions in a blend": (in_blend(repetitions=2), "repetitions: 2 is not read"),
    "auxiliary data": (in_blend(aux={"x": "y"}), "aux: "),
    "another dataset.yaml": (in_blend(dataset_config="crude.yaml"), "dataset_config: 'crude.yaml'"),
    "two ways at once": (
        {"splits": {"train": {"blend": [{"path": "a"}], "blend_epochized": [{"path": "a"}]}}},
        "blend_epochized: ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_blend_says_besides_is_refused_by_name(name: str, tmp_path: Path) -> None:
    content, reason = REFUSED[name]
    folder(tmp_path / "a", [captions("one")])
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(DataError, match=reason):
        read_energon_blend(str(tmp_path / "blend.yaml"), "train")


def test_what_changes_nothing_is_read_over(tmp_path: Path) -> None:
    kept = {"subflavors": {"a": 1}, "shuffle_over_epochs_multiplier": 4, "dataset_config": "dataset.yaml", "aux": {}}
    description = {**CAPTIONS, "subflavors": {"x": "y"}, "image_decode": "pil", "part_filter": None}
    folder(tmp_path / "a", [captions("one")], description)
    content = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", **in_blend(**kept)}
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump(content))
    spec = read_energon_blend(str(tmp_path / "blend.yaml"), "train")
    assert spec is not None and spec.prefixes == (f"{tmp_path}/a:train",)
    assert len(list(read_energon_rows(EnergonSplitPart(str(tmp_path / "a"), "train")))) == 1


DATASETS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an unknown key": (lambda kept: {**kept, "part_filter": "mine:f"}, "part_filter: 'mine:f' is not read"),
    "a field without a path": (lambda kept: {**kept, "field_map": {"image": 3}}, "no mapping of fields"),
    "a field that no text is made of": (
        lambda kept: {**kept, "field_map": {**kept["field_map"], "video": "mp4"}},
        "the fields video of Captioning",
    ),
    "a kind of one's own": (
        lambda kept: {**kept, "sample_type": {"__module__": "mine", "__class__": "VQASample"}},
        "code that is not run",
    ),
}


@pytest.mark.parametrize("name", DATASETS)
def test_what_a_folder_says_besides_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, reason = DATASETS[name]
    path = folder(tmp_path / "a", [captions("one")], change(CAPTIONS))
    with pytest.raises(DataError, match=reason):
        list(read_energon_rows(EnergonSplitPart(str(path), "train")))
    path = folder(tmp_path / "b", [captions("one")])
    (path / ".nv-meta" / "split.yaml").write_text("split_parts: {train: [s-0.tar]}\nshuffle: true")
    with pytest.raises(DataError, match="shuffle: True is not read"):
        list(read_energon_rows(EnergonSplitPart(str(path), "train")))
