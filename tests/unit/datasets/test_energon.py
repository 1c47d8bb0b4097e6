"""Energon's folders and blends, and Megatron's pairs with images: the samples that their own readers see, each found by its number."""

from __future__ import annotations

import io
import json
import logging
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron.cli.commands import preprocess_mmdata
from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import DataConfig
from megatron.core.datasets import images
from megatron.core.datasets.blend import BlendedDataset, build_split_datasets
from megatron.core.datasets.data_splits import plan_data_splits
from megatron.core.datasets.energon import EnergonSplitPart
from megatron.core.datasets.image_conversations import SLOT, ImageConversationTokenSource
from megatron.core.datasets.indexed import DataError, IndexedDatasetBuilder
from megatron.core.datasets.multimodal import make_image_chat_dataset_kind
from megatron.core.datasets.multimodal_bin_idx import image_bytes_to_int32
from megatron.core.datasets.webdataset import read_energon_rows, read_tar_samples
from tests.helpers import tiny
from tests.unit.datasets.test_images import bomb, content, picture
from tests.unit.datasets.test_multimodal import SETTINGS, TOKENIZER, dataset, spans

CAPTIONS = {
    "sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
    "field_map": {"image": "png,jpg", "caption": "json[caption]"},
}


def folder(path: Path, shards: list[list[dict[str, bytes]]], description: Any = CAPTIONS, **split: Any) -> Path:
    """A folder as `energon prepare` leaves it. shards: of each tar the samples, of each sample its members by ending."""
    (path / ".nv-meta").mkdir(parents=True)
    counts, number = {}, 0
    for place, samples in enumerate(shards):
        with tarfile.open(path / f"s-{place}.tar", "w") as tar:
            for sample in samples:
                for ending, data in sample.items():
                    entry = tarfile.TarInfo(f"{number:04d}.{ending}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
                number += 1
        counts[f"s-{place}.tar"] = len(samples)
    (path / ".nv-meta" / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    parts = split or {"train": [f"s-{{0..{len(shards) - 1}}}.tar"], "val": [], "test": []}
    exclude = parts.pop("exclude", [])
    (path / ".nv-meta" / "split.yaml").write_text(yaml.safe_dump({"split_parts": parts, "exclude": exclude}))
    (path / ".nv-meta" / "dataset.yaml").write_text(yaml.safe_dump(description))
    return path


JOINER = {"__module__": "megatron.energon", "__class__": "OCRSample"}


def captions(*names: str) -> list[dict[str, bytes]]:
    return [
        {"png": content(picture(20 + len(name), 30)), "json": json.dumps({"caption": name}).encode()} for name in names
    ]


def seen(path: Path | str, split: str = "train", **changes: Any) -> list[str]:
    """The conversations of a split, # for a slot, in the order of their source."""
    run = tiny.config(**{**SETTINGS, "data_path": (str(path),), "split": None, **changes})
    data = build_split_datasets(
        run.data, make_image_chat_dataset_kind(run, TOKENIZER), (None, 0, 0) if split == "train" else (0, None, 0)
    )
    chosen = data[0 if split == "train" else 1]
    assert chosen is not None
    return sorted({text for index in range(len(chosen)) for text in spans(chosen[index]) if text.strip("#\0")})


def rows(part: EnergonSplitPart) -> list[Any]:
    return list(read_energon_rows(part))


def test_each_member_of_a_tar_is_found_at_its_place(tmp_path: Path) -> None:
    made = captions("a cat", "a dog")
    path = folder(tmp_path / "data", [made[:1], made[1:]])
    for shard, sample in zip(("s-0.tar", "s-1.tar"), made, strict=True):
        (found,) = read_tar_samples(str(path), shard)
        assert list(found.members) == ["png", "json"]
        limits = images.ImageOptions(8, 8, 3, (0.5,) * 3, (0.5,) * 3)
        for ending, data in sample.items():
            assert images.read_image_bytes(path / found.members[ending].name, limits) == data


def test_a_folder_gives_its_parts_to_the_splits_and_leaves_out_what_is_excluded(tmp_path: Path) -> None:
    shards = [captions("one", "two"), captions("three"), captions("four", "five"), captions("six")]
    parts = {"train": ["s-{0..1}.tar", "s-3.tar"], "val": ["s-2.tar"], "exclude": ["s-3.tar", "s-0.tar/0001"]}
    path = folder(tmp_path / "data", shards, **parts)
    end = TOKENIZER.detokenize([TOKENIZER.eod])[:0]
    assert [text.replace(end, "") for text in seen(path)] == ["####one", "####three"]
    assert seen(path, "valid") == ["####five", "####four"]
    assert seen(f"{path}:val", train_data_path=(f"{path}:val",), data_path=None) == ["####five", "####four"]


def test_samples_are_packed_by_their_lengths_with_images_and_hold_the_pixels_of_their_members(tmp_path: Path) -> None:
    made = captions("a cat", "a striped dog")
    data = dataset(folder(tmp_path / "data", [made]), split=None)
    assert [len(data.source.get(number)) for number in range(2)] == [4 + 6, 4 + 14]
    sample = data[0]
    for text, sent in zip(("####a cat", "####a striped dog"), made, strict=True):
        place = spans(sample).index(text)
        expected = images.tile_image(images.decode_image(sent["png"], data.options), data.options)
        assert np.array_equal(sample["images"][place : place + 1], expected)
    ((name, _),) = data.source.image_paths_and_tile_counts(0)
    assert "s-0.tar@" in name and name.endswith("/0000.png")


KINDS: dict[str, tuple[dict[str, str], dict[str, Any], list[str]]] = {
    "VQASample": (
        {"image": "png", "context": "json[0][value]", "answers": "json[1]", "answer_weights": "json[2]"},
        {"json": [{"value": "What?"}, ["cat", "dog"], [0.25, 0.75]]},
        ["<image>\nWhat?", "dog"],
    ),
    "OCRSample": (
        {"image": "png", "text": "txt"},
        {"txt": "EXIT"},
        ["<image>\nTranscribe the text in the image.", "EXIT"],
    ),
    "MultiChoiceVQASample": (
        {"image": "png", "context": "json[q]", "choices": "json[c]", "correct_choice_idx": "json[i]"},
        {"json": {"q": "Which?", "c": ["red", "blue"], "i": 1}},
        ["<image>\nWhich?\nA. red\nB. blue\nAnswer with the option's letter from the given choices directly.", "B"],
    ),
    "SimilarityInterleavedSample": (
        {"images": "png", "texts": "json"},
        {"json": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "yes"}]},
        ["<image>?", "yes"],
    ),
    "InterleavedSample": (
        {"sequence": "json"},
        {"json": ["first", "png", {"type": "image", "value": "png"}, {"type": "text", "value": "both"}, "png"]},
        ["", "first", "<image><image>", "both"],
    ),
    "CrudeWebdataset": (
        {},
        {"json": {"conversations": [{"from": "human", "value": "<image>!"}, {"from": "gpt", "value": "no"}]}},
        ["<image>!", "no"],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sample_becomes_a_conversation(tmp_path: Path, kind: str) -> None:
    fields, members, expected = KINDS[kind]
    encoded = {ending: (value if ending == "txt" else json.dumps(value)).encode() for ending, value in members.items()}
    description = {"__module__": "megatron.energon", "__class__": kind} | ({"field_map": fields} if fields else {})
    path = folder(tmp_path / "data", [[{"png": content(picture(9, 9)), **encoded}]], description)
    (row,) = rows(EnergonSplitPart(str(path), "train"))
    assert [turn["value"] for turn in row["conversations"]] == expected
    assert row["image"] and "0000.png" in str(row["image"])


def blend(path: Path, **node: Any) -> str:
    path.write_text(yaml.safe_dump({"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": node}))
    return str(path)


def planned(path: str, split: int = 0, **changes: Any) -> list[tuple[str, float | None]]:
    """(prefix from the folder's name on, weight) of a split."""
    plan = plan_data_splits(DataConfig(data_path=(path,), **changes))[split]
    assert plan is not None and plan.share == (0.0, 1.0)
    names = [prefix.rpartition("/")[2] for prefix in plan.blend.prefixes]
    return list(zip(names, plan.blend.weights or [None] * len(names), strict=True))


def test_a_blend_is_that_of_its_yaml_file_with_the_weights_of_files_inside_multiplied(tmp_path: Path) -> None:
    for name in "abc":
        folder(tmp_path / name, [captions(*"12345678")], train=["s-0.tar"], val=["s-0.tar"])
    inner = blend(tmp_path / "inner.yaml", train={"blend": [{"path": "a", "weight": 1}, {"path": "b", "weight": 3}]})
    outer = [{"path": inner, "weight": 2}, {"path": "c", "weight": 6, "split_part": "val", "subflavors": {"x": 1}}]
    path = blend(tmp_path / "outer.yaml", train={"blend": outer}, val={"path": "b"})
    assert planned(path) == [("a:train", 0.0625), ("b:train", 0.1875), ("c:val", 0.75)]
    assert planned(path, 1) == [("b:val", None)] and plan_data_splits(DataConfig(data_path=(path,)))[2] is None
    half = blend(tmp_path / "half.yaml", train={"path": "a", "subset": {"range": ["25%", "75%"]}})
    assert planned(half) == [("a:train[2:6]", None)]
    times = [{"path": "a", "repetitions": 2.5}, {"path": "b", "subset": {"range": [3, "end"]}}]
    repeated = blend(tmp_path / "repeated.yaml", train={"blend_epochized": times})
    assert [name for name, _ in planned(repeated)] == ["a:train", "a:train", "a:train[0:4]", "b:train[3:8]"]
    old = tmp_path / "old.yaml"
    old.write_text(yaml.safe_dump({"__class__": "Metadataset", "splits": {"train": {"datasets": [{"path": "a"}]}}}))
    assert planned(str(old)) == [("a:train", None)]


def joined(path: Path, nonmatch: str, **more: Any) -> str:
    """A YAML file that joins pictures with the transcripts of another folder, which lacks that of the second."""
    pictures = [{"png": content(picture(20 + number, 30))} for number in range(3)]
    texts = [{"txt": b"zero"}, {"md": b"of no field"}, {"txt": b"two"}]
    image = {
        "sample_type": {"__module__": "megatron.energon", "__class__": "ImageSample"},
        "field_map": {"image": "png"},
    }
    text = {"sample_type": {"__module__": "megatron.energon", "__class__": "TextSample"}, "field_map": {"text": "txt"}}
    folder(path / "pictures", [pictures[:2], pictures[2:]], image)
    folder(path / "texts", [texts], text, train=["s-0.tar"], exclude=["s-0.tar/0001"])
    nodes = [{"path": "pictures"}, {"path": "texts", "nonmatch": nonmatch}]
    return blend(path / "join.yaml", train={"join": nodes, "joiner": JOINER, **more})


def test_a_join_gives_samples_the_fields_of_those_with_the_same_key(tmp_path: Path) -> None:
    assert seen(joined(tmp_path, "skip")) == ["####two", "####zero"]  # in the plain format questions are left out
    (prefix,) = plan_data_splits(DataConfig(data_path=(str(tmp_path / "join.yaml"),)))[0].blend.prefixes  # type: ignore[union-attr]
    part = EnergonSplitPart.parse_data_path(prefix)
    assert part is not None and part.as_data_path == prefix and part.kind == "OCRSample"
    first, last = rows(part)
    assert first["conversations"][1]["value"] == "zero" and first["image"].endswith("0000.png")
    assert "s-1.tar@" in last["image"]


def test_a_sample_that_a_join_lacks_is_refused_skipped_or_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DataError, match="has no sample 0001, and nonmatch is error"):
        seen(joined(tmp_path / "error", "error"))
    with caplog.at_level(logging.WARNING, "megatron"):
        assert seen(joined(tmp_path / "none", "none")) == ["####two", "####zero"]
    assert "1 of 3 rows are left out" in caplog.text and "0001: it has no text" in caplog.text
    with pytest.raises(ConfigError, match="a subset of a join that skips samples"):
        seen(joined(tmp_path / "subset", "skip", subset={"range": [0, 1]}))
    assert seen(joined(tmp_path / "first", "none", subset={"range": [0, 1]})) == ["####zero"]


def test_samples_of_a_blend_come_in_the_shares_of_its_weights_wherever_it_is_read(tmp_path: Path) -> None:
    for name in "ab":
        folder(tmp_path / name, [captions(*(name * 20 + str(number) for number in range(5)))])
    nodes = [{"path": "a", "weight": 3}, {"path": "b", "weight": 1}]
    path = blend(tmp_path / "blend.yaml", train={"blend": nodes}, val={"blend": nodes})
    run = tiny.config(**{**SETTINGS, "data_path": (path,), "split": None, "seq_length": 24})
    one, other = (
        build_split_datasets(run.data, make_image_chat_dataset_kind(run, TOKENIZER), (40, 0, 0))[0] for _ in range(2)
    )
    assert isinstance(one, BlendedDataset) and isinstance(other, BlendedDataset)
    assert one.samples_per_dataset(40).tolist() == [30, 10]
    assert all(np.array_equal(one[17][name], other[17][name]) for name in one[17])


@pytest.mark.parametrize(
    "node, reason",
    [
        ({"blend": [{"path": "a", "weight": 0}]}, "it is above 0"),
        ({"blend": [{"path": "none"}]}, "is no folder with .nv-meta"),
        ({"blend": [{"path": "self.yaml"}]}, "name each other"),
        ({"join": {"x": {"path": "a"}}}, "a join whose joiner is code of its own is not run"),
        ({"join": [{"path": "a"}], "joiner": {"__module__": "mine", "__class__": "VQASample"}}, "is not run"),
        (
            {"join": [{"path": "a", "nonmatch": "skip"}], "joiner": JOINER},
            "first folder of a join has the nonmatch error",
        ),
        ({"join": [{"path": "a"}, {"path": "a", "nonmatch": "?"}], "joiner": JOINER}, "with a nonmatch of error, skip"),
        ({"path": "a", "split_part": "dev"}, "has no part 'dev'; it has test, train, val"),
        ({"path": "a", "subset": {"range": [1, 9]}}, "leaves nothing of 1 samples"),
    ],
)
def test_what_a_yaml_file_cannot_mean_is_refused(tmp_path: Path, node: Any, reason: str) -> None:
    folder(tmp_path / "a", [captions("one")])
    path = blend(tmp_path / "self.yaml", train=node)
    with pytest.raises((ConfigError, DataError), match=reason):
        run = tiny.config(**{**SETTINGS, "data_path": (path,), "split": None})
        build_split_datasets(run.data, make_image_chat_dataset_kind(run, TOKENIZER), (None, 0, 0))


def test_energon_folders_beside_other_files_need_a_flag_for_each_split(tmp_path: Path) -> None:
    path = str(folder(tmp_path / "a", [captions("one")]))
    for changes in ({"data_path": (path, "b.json")}, {"data_path": (path,), "split": "1,0,0"}):
        with pytest.raises(ConfigError, match="use --train-data-path"):
            plan_data_splits(DataConfig(**changes))  # type: ignore[arg-type]
    plan = plan_data_splits(DataConfig(train_data_path=("0.5", path, "0.5", "b.json")))[0]
    assert plan is not None and plan.blend.prefixes == (f"{path}:train", "b.json")


def test_damaged_samples_are_left_out_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, *others = captions("good", "bomb", "no text", "no image", "not utf-8")
    others[0]["png"] = bomb()
    others[1]["json"] = b'{"caption": 3}'
    del others[2]["png"]
    others[3]["json"] = b"\xff\xfe"
    path = folder(tmp_path / "data", [[good, *others]])
    with caplog.at_level(logging.WARNING, "megatron"):
        assert seen(path) == ["####good"]
    assert "4 of 5 rows are left out" in caplog.text
    for told in ("0001.png: it has", "s-0.tar/0002: a int stands", "s-0.tar/0003: it has no png,jpg", "s-0.tar/0004"):
        assert told in caplog.text


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda path: (path / "s-0.tar").write_bytes((path / "s-0.tar").read_bytes()[:2000]), "cut off|as a tar"),
        (lambda path: (path / "s-0.tar").write_bytes(b"no tar" * 500), "cannot be read as a tar"),
        (
            lambda path: (path / ".nv-meta" / ".info.json").write_text('{"shard_counts": {"s-0.tar": 9}}'),
            "holds 3 samples",
        ),
        (lambda path: (path / ".nv-meta" / "dataset.yaml").write_text("sample_loader: x.py:f"), "code that is not run"),
        (lambda path: (path / ".nv-meta" / "dataset.yaml").write_text("sample_type: Sound"), "kind 'Sound'"),
        (lambda path: (path / ".nv-meta" / "split.yaml").write_text("split_parts: {train: [../x.tar]}"), "outside"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Any, reason: str) -> None:
    path = folder(tmp_path / "data", [captions("one", "two", "three")])
    damage(path)
    with pytest.raises((DataError, ConfigError), match=reason):
        rows(EnergonSplitPart(str(path), "train"))


def pair(prefix: Path, documents: list[tuple[str, bytes]]) -> str:
    """A pair as Megatron's own tool writes it: texts filled up with ends."""
    with IndexedDatasetBuilder(str(prefix), np.int32, multimodal=True) as builder:
        for text, image in documents:
            ids = TOKENIZER.tokenize(text)
            builder.add_sequence(np.array(ids + [TOKENIZER.eod] * (20 - len(ids)), np.int32), 0)
            builder.add_sequence(image_bytes_to_int32(image), 1)
            builder.end_document()
    return str(prefix)


def test_pairs_with_images_are_read_with_one_end_and_all_text_learnt(tmp_path: Path) -> None:
    files = [content(picture(20 + number, 30)) for number in range(5)]
    assert len({len(file) % 4 for file in files}) > 1  # of several paddings
    prefix = pair(tmp_path / "mm", [(f"text {number}", file) for number, file in enumerate(files)])
    data = dataset(Path(prefix), seq_length=300, max_position_embeddings=300)
    assert isinstance(data.source, ImageConversationTokenSource) and len(data.source.sequence_lengths) == 5
    for number, file in enumerate(files):
        ids = data.source.get(number)
        assert (ids[:4] == ~SLOT).all() and TOKENIZER.detokenize(ids[4:-1].tolist()) == f"text {number}"
        assert ids[-1] == TOKENIZER.eod
        ((name, _),) = data.source.image_paths_and_tile_counts(number)
        assert images.read_image_bytes(name, data.options) == file


def test_the_tool_writes_pairs_of_lines_and_images(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number in range(3):
        (tmp_path / "images" / f"{number}.png").write_bytes(content(picture(20, 30 + number)))
    lines = [{"text": "zero"}, {"text": "one"}, {"text": "two"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--input", str(tmp_path / "in.jsonl"), "--input-image", str(tmp_path / "images"), "--pad-length", "6"]
    flags += ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--output-prefix", str(tmp_path / "out")]
    preprocess_mmdata.main(flags)
    data = dataset(tmp_path / "out", seq_length=99, max_position_embeddings=99)
    assert sorted(text for text in spans(data[0]) if "#" in text) == ["####one", "####two", "####zero"]
    (tmp_path / "images" / "3.png").write_bytes(b"")
    with pytest.raises(SystemExit):
        preprocess_mmdata.main(flags)
