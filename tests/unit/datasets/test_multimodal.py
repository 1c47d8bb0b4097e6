"""Conversations about images: where the rows of images stand, what is learnt, and pictures that cannot be used."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.datasets import images
from megatron.core.datasets.blend import build_split_datasets
from megatron.core.datasets.image_conversations import SLOT, ImageTokenLayout
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.multimodal import MOST_IN_A_ROW, ImageChatDataset, Use, make_image_chat_dataset_kind
from megatron.core.datasets.samplers import collate
from megatron.core.tokenizers.build import build_tokenizer
from tests.helpers import tiny
from tests.unit.datasets.test_images import content, picture

ROWS = 4  # 2 x 2 patches
SETTINGS: dict[str, Any] = {
    "vision_model_type": "clip",
    "img_h": 8,
    "img_w": 8,
    "patch_dim": 4,
    "disable_vision_class_token": True,
    "vision_num_layers": 1,
    "vision_hidden_size": 16,
    "vision_num_attention_heads": 2,
    "sft": True,
    "sft_tokenizer_prompt_format": "plain",
    "mock_data": False,
    "seq_length": 48,
    "max_position_embeddings": 48,
    "split": "1,0,0",
}
TOKENIZER = build_tokenizer(TokenizerConfig(tokenizer_type="ByteTokenizer"))


def row(*names: str, question: str = "?", answer: str = "It is a cat.") -> dict[str, Any]:
    turns = [{"from": "human", "value": "<image>" * len(names) + question}, {"from": "gpt", "value": answer}]
    return {"conversations": turns, **({"image": list(names)} if names else {})}


def write(folder: Path, rows: list[dict[str, Any]], **files: bytes | Image.Image) -> Path:
    """A JSON file with its images."""
    for name, file in files.items():
        (folder / f"{name}.png").write_bytes(file if isinstance(file, bytes) else content(file))
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


def dataset(path: Path, use: Use = "pixels", **changes: Any) -> ImageChatDataset:
    """The training samples of a file."""
    run = tiny.config(**{**SETTINGS, "data_path": (str(path),), **changes})
    train, _, _ = build_split_datasets(run.data, make_image_chat_dataset_kind(run, TOKENIZER, use), (None, 0, 0))
    assert isinstance(train, ImageChatDataset)
    return train


def spans(sample: dict[str, np.ndarray]) -> list[str]:
    """Text of each conversation of a sample, # for a slot."""
    slots, tokens = sample["image_slots"], sample["tokens"]
    result = []
    for document in range(int(sample["document_ids"].max()) + 1):
        places = np.flatnonzero(sample["document_ids"] == document)
        result.append("".join("#" if slots[p] >= 0 else TOKENIZER.detokenize([int(tokens[p])]) for p in places))
    return result


def test_an_image_takes_a_slot_for_each_of_its_rows(tmp_path: Path) -> None:
    path = write(tmp_path, [row("a", answer="cat")], a=picture(20, 30))
    (tmp_path / "a.png").rename(tmp_path / "a")
    sample = dataset(path)[0]
    assert spans(sample)[0] == "####cat"
    assert sample["image_slots"][:7].tolist() == [0, 1, 2, 3, -1, -1, -1]
    assert sample["images"].shape == (1, 3, 8, 8) and int(sample["image_rows"]) == ROWS
    options = images.ImageOptions.from_config(tiny.config(**SETTINGS).model, tiny.config(**SETTINGS).data.multimodal)
    expected = images.tile_image(images.decode_image((tmp_path / "a").read_bytes(), options), options)
    assert np.array_equal(sample["images"], expected)


def test_the_last_slot_predicts_what_follows_and_no_slot_is_learnt(tmp_path: Path) -> None:
    path = write(tmp_path, [row("a.png", answer="cat")], a=picture(20, 30))
    sample = dataset(path)[0]
    learnt = np.flatnonzero(sample["loss_mask"]).tolist()
    eod = TOKENIZER.eod if TOKENIZER.eos is None else TOKENIZER.eos
    assert learnt == [3, 4, 5, 6]
    assert sample["labels"][learnt].tolist() == [*TOKENIZER.tokenize("cat"), eod]
    assert not (sample["labels"] == SLOT).any() and not (sample["tokens"] == SLOT).any()
    assert sample["position_ids"][:7].tolist() == list(range(7))


def test_conversations_are_packed_by_their_lengths_with_images(tmp_path: Path) -> None:
    rows = [row("a.png", answer="x" * 10) for _ in range(3)] + [row(answer="y" * 20)]
    data = dataset(write(tmp_path, rows, a=picture(20, 30)), sft_tokenizer_prompt_format="plain")
    assert [len(data.source.get(number)) for number in range(4)] == [15, 15, 15, 21]
    samples = [data[index] for index in range(len(data))]
    assert len(samples) == 2
    for sample in samples:
        shown = [text for text in spans(sample) if "#" in text]
        assert len(sample["images"]) == len(shown) and int(sample["image_rows"]) == ROWS * len(shown)
        slots = sample["image_slots"]
        assert slots[slots >= 0].tolist() == list(range(ROWS * len(shown)))


def test_images_of_a_microbatch_are_counted_through(tmp_path: Path) -> None:
    rows = [row("a.png", "b.png", answer="x" * 30), row(answer="y" * 40), row("b.png", answer="z" * 40)]
    data = dataset(write(tmp_path, rows, a=picture(20, 30), b=picture(30, 20)))
    samples = [data[index] for index in range(3)]
    batch = collate(samples)
    assert batch["images"].shape[0] == 3
    for place, sample in enumerate(samples):
        before = sum(len(one["images"]) for one in samples[:place]) * ROWS
        own, slots = sample["image_slots"], batch["image_slots"][place]
        assert (slots[own >= 0] == own[own >= 0] + before).all() and (slots[own < 0] == -1).all()


@pytest.mark.parametrize("length, text, shown", [(7, "####ok<eos>", 1), (9, "####ok<eos>##", 2)])
def test_a_long_conversation_keeps_the_images_of_its_beginning(
    tmp_path: Path, length: int, text: str, shown: int
) -> None:
    turns = [("human", "<image>"), ("gpt", "ok"), ("human", "<image>"), ("gpt", "more")]
    conversation = [{"from": who, "value": value} for who, value in turns]
    rows = [{"conversations": conversation, "image": ["a.png", "b.png"]}]
    files = {"a": picture(20, 30), "b": picture(30, 20)}
    sample = dataset(write(tmp_path, rows, **files), seq_length=length)[0]
    assert spans(sample)[0] == text.replace("<eos>", TOKENIZER.detokenize([TOKENIZER.eod]))
    assert len(sample["images"]) == shown and int(sample["image_rows"]) == ROWS * shown


def test_tiles_stand_behind_their_tags_and_the_thumbnail_comes_last(tmp_path: Path) -> None:
    path = write(tmp_path, [row("a.png", answer="cat")], a=picture(40, 20))
    more = {"use_tiling": True, "max_num_tiles": 2, "use_thumbnail": True, "use_tile_tags": True, "seq_length": 96}
    more |= {"max_position_embeddings": 96, "image_tag_type": "internvl"}
    sample = dataset(path, **more)[0]
    assert spans(sample)[0] == "<img><tile_1>####<tile_2>####<tile_global_thumbnail>####</img>cat"
    assert sample["images"].shape == (3, 3, 8, 8)
    whole = dataset(path, image_tag_type="smolvlm", seq_length=96, max_position_embeddings=96)[0]
    assert spans(whole)[0] == "<fake_token_around_image><global-img>####<fake_token_around_image>cat"


@pytest.mark.nightly
@pytest.mark.parametrize("rows, columns", [(0, 0), (2, 3), (3, 1)])
def test_tags_of_an_image_are_those_of_the_smolvlm_processor(rows: int, columns: int, tmp_path: Path) -> None:
    path = write(tmp_path, [row("a.png", answer="cat")], a=picture(max(1, columns) * 20, max(1, rows) * 20))
    tiling = {"use_tiling": True, "max_num_tiles": 9, "use_thumbnail": True} if rows else {}
    sample = dataset(path, image_tag_type="smolvlm", seq_length=480, max_position_embeddings=480, **tiling)[0]
    names = {"fake_image_token": "<fake_token_around_image>", "global_image_tag": "<global-img>", "image_token": "#"}
    processor = SimpleNamespace(**names, image_seq_len=ROWS)
    theirs = transformers.Idefics3Processor.replace_image_token(
        processor,  # type: ignore[arg-type] # of which it reads these alone
        {"rows": [[rows]], "cols": [[columns]]},
        0,
    )
    assert spans(sample)[0] == f"{theirs}cat"


def test_a_rank_without_the_first_stage_sees_the_same_tokens_and_masks(tmp_path: Path) -> None:
    damaged = content(picture(200, 200), "JPEG")[:3000]
    rows = [row("a.png", answer=f"cat {number}") for number in range(6)] + [row("b.png", answer="broken" * 3)]
    path = write(tmp_path, rows, a=picture(20, 30), b=damaged)
    first, last = dataset(path), dataset(path, "check")
    for index in range(len(first)):
        for name in ("tokens", "labels", "loss_mask", "position_ids", "document_ids"):
            assert np.array_equal(first[index][name], last[index][name])
    assert "images" not in last[0]


def test_a_missing_file_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row("good.png", answer="good"), row("missing.png"), row(answer="text only")]
    with caplog.at_level(logging.WARNING, "megatron"):
        data = dataset(write(tmp_path, rows, good=picture(20, 30)))
        samples = [data[index] for index in range(len(data))]
    learnt = {text.replace("#", "") for sample in samples for text in spans(sample)}
    assert not any(text.startswith("It is") for text in learnt)
    assert "1 of 3 rows are left out" in caplog.text and "missing.png: it cannot be opened" in caplog.text


def test_the_order_depends_on_the_seed_alone_and_is_known_without_reading_images(tmp_path: Path) -> None:
    path = write(tmp_path, [row("a.png", answer="x" * (number + 1)) for number in range(9)], a=picture(20, 30))
    one, other = dataset(path), dataset(path, "nothing")
    assert [one.token_sources(index) for index in range(len(one))] == [
        other.token_sources(index) for index in range(len(other))
    ]
    assert [one.token_sources(0)] != [dataset(path, seed=8).token_sources(0)] or len(one) == 1


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"image": "a.png", "conversations": row()["conversations"]}, "says <image> 0 times, and there are 1 images"),
        ({"conversations": row("a")["conversations"]}, "says <image> 1 times, and there are 0 images"),
        ({"conversations": [{"from": "human", "value": "?"}]}, "a conversation without an answer"),
        ({"conversations": [{"from": "robot", "value": "?"}]}, 'turn 1 has no "from" that is human, gpt or system'),
        ({"image": 3, "conversations": row()["conversations"]}, "neither a path nor a list of paths"),
        ({"text": "?"}, 'no list of "conversations"'),
    ],
)
def test_rows_that_are_no_conversations_are_named(tmp_path: Path, wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=f"row 2: .*{reason}"):
        dataset(write(tmp_path, [row(answer="fine"), wrong], a=picture(20, 30)))


def test_an_image_that_changed_its_shape_is_not_used(tmp_path: Path) -> None:
    path = write(tmp_path, [row("a.png", answer="cat")], a=picture(40, 20))
    data = dataset(path, use_tiling=True, max_num_tiles=2)
    (tmp_path / "a.png").write_bytes(content(picture(20, 20)))
    sample = data[0]
    assert sample["loss_mask"].sum() == 0 and "it has 1 tiles, and had 2" in next(iter(data.damaged.names.values()))


def test_a_slot_is_no_id_of_any_vocabulary() -> None:
    written = ImageTokenLayout(3, tags=((7,), (8,)), around=((1,), (2,))).image_tokens(images.TileGrid(2, 1))
    assert (~written).tolist() == [1, 7, SLOT, SLOT, SLOT, 8, SLOT, SLOT, SLOT, 2]
    assert replace(ImageTokenLayout(3), rows=1).image_tokens(images.TileGrid()).tolist() == [~SLOT]


def test_made_up_conversations_each_have_an_image() -> None:
    run = tiny.config(**{**SETTINGS, "mock_data": True, "seq_length": 300, "max_position_embeddings": 300})
    data, _, _ = build_split_datasets(run.data, make_image_chat_dataset_kind(run, TOKENIZER), (None, 0, 0))
    assert isinstance(data, ImageChatDataset)
    sample = data[0]
    conversations = int(sample["document_ids"][sample["image_slots"] >= 0].max()) + 1
    assert len(sample["images"]) == conversations and int(sample["image_rows"]) == ROWS * conversations
    assert sample["image_slots"][:5].tolist() == [0, 1, 2, 3, -1] and not np.array_equal(
        *data[1]["images"][:1], sample["images"][0]
    )


def test_a_folder_that_is_gone_or_images_damaged_one_after_the_other_end_the_run_and_say_so(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    names = [f"{number}" for number in range(MOST_IN_A_ROW + 1)]
    path = write(
        tmp_path / "pictures",
        [row(f"{name}.png", answer="x" * 40) for name in names],
        **dict.fromkeys(names, picture(9, 9)),
    )
    data = dataset(path)
    assert data[0]["loss_mask"].any()
    for name in names[:MOST_IN_A_ROW]:
        (tmp_path / "pictures" / f"{name}.png").write_bytes(b"damaged")
    samples = iter(range(len(data)))
    with pytest.raises(
        DataError, match=f"none of the last {MOST_IN_A_ROW} images can be used, the last .*it is no image"
    ):
        while True:
            index = next(samples)
            if not data.source.image_paths_and_tile_counts(data.token_sources(index)[0].sequence)[0][0].endswith(
                f"{MOST_IN_A_ROW}.png"
            ):
                data[index]
    shutil.rmtree(tmp_path / "pictures")
    with pytest.raises(DataError, match="pictures is gone, which held images when the data were indexed"):
        data[0]
