"""A folder of strange images through every form of data: none stops a run, and none passes silently."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron.core.datasets import images
from megatron.core.datasets.multimodal import ImageChatDataset
from tests.unit.datasets.test_energon import folder, pair
from tests.unit.datasets.test_images import bomb, content, picture
from tests.unit.datasets.test_multimodal import dataset, row, spans, write

LONG = {"seq_length": 256, "max_position_embeddings": 256}


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return content(picture(40, 20), exif=exif)


USED: dict[str, bytes] = {
    "plain": content(picture(20, 30)),
    "cmyk": content(picture(30, 20, "CMYK"), "JPEG"),
    "rotated": rotated(),
    "one bit": content(picture(30, 20, "1")),
    "palette": content(picture(30, 20, "P"), "GIF"),
    "sixteen bits": content(Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100)),
    "narrow": content(picture(1, 3000)),
}
DAMAGED: dict[str, bytes] = {"truncated": content(picture(200, 200), "JPEG")[:3000]}  # its header is sound
LEFT_OUT: dict[str, tuple[bytes, str]] = {
    "bomb": (bomb(), "more than"),
    "text": (b"this is no image", "it is no image"),
    "empty": (b"", "it is no image"),
}
STRANGE = {**USED, **DAMAGED, **{name: file for name, (file, _) in LEFT_OUT.items()}}


def as_json(path: Path) -> ImageChatDataset:
    rows = [row(f"{name}.png", answer=f"<{name}>") for name in STRANGE]
    return dataset(write(path, rows, **STRANGE), **LONG)


def as_tars(path: Path) -> ImageChatDataset:
    samples = [{"png": file, "json": json.dumps({"caption": f"<{name}>"}).encode()} for name, file in STRANGE.items()]
    return dataset(folder(path / "energon", [samples[:4], samples[4:]]), split=None, **LONG)


def as_pair(path: Path) -> ImageChatDataset:
    return dataset(Path(pair(path / "pair", [(f"<{name}>", file) for name, file in STRANGE.items()])), **LONG)


@pytest.mark.parametrize("form", [as_json, as_tars, as_pair], ids=lambda form: form.__name__)
def test_strange_images_neither_stop_a_run_nor_pass_silently(
    form: Callable[[Path], ImageChatDataset], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "megatron"):
        data = form(tmp_path)
        samples = [data[index] for index in range(len(data))]
    learnt, shown = dict[str, float](), dict[str, np.ndarray]()
    for sample in samples:
        place = 0
        for document, text in enumerate(spans(sample)):
            if name := next((one for one in STRANGE if f"<{one}>" in text), None):
                learnt[name] = sample["loss_mask"][sample["document_ids"] == document].sum()
                shown[name] = sample["images"][place]
                place += 1
    assert learnt.keys() == {*USED, *DAMAGED}
    for name, file in USED.items():
        assert learnt[name] > 0, name
        assert np.array_equal(
            shown[name], images.tile_image(images.decode_image(file, data.options), data.options)[0]
        ), name
    assert learnt["truncated"] == 0 and not shown["truncated"].any()
    assert list(data.damaged.names.values()) and caplog.text.count("its conversation has no loss (1 so far)") == 1
    assert f"{len(LEFT_OUT)} of {len(STRANGE)} rows are left out" in caplog.text
    for name, (_, reason) in LEFT_OUT.items():
        number = list(STRANGE).index(name) + 1
        assert any(f"row {number}: " in line and reason in line for line in caplog.text.splitlines()), name
