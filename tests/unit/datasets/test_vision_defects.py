"""Mistakes in how images and their conversations are read, planted, each of which a test of this folder must notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatron.core.datasets import images
from megatron.core.datasets.image_conversations import SLOT, ImageTokenLayout
from megatron.core.datasets.multimodal import ImageChatDataset
from tests.unit.datasets.test_images import test_a_stretched_image_is_that_of_the_siglip_processor as pixels_equal
from tests.unit.datasets.test_images import (
    test_tiles_with_the_thumbnail_last_are_those_of_internvls_processor as tiles_equal,
)
from tests.unit.datasets.test_multimodal import (
    test_the_last_slot_predicts_what_follows_and_no_slot_is_learnt as slots_right,
)

_decode, _tiles, _write, _sample = (
    images.decode_image,
    images.tile_image,
    ImageTokenLayout.image_tokens,
    ImageChatDataset.__getitem__,
)


def _blue_first(content: bytes, options: Any) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(np.asarray(_decode(content, options))[..., ::-1]))


def _as_they_are(pictures: list[Image.Image], options: Any) -> np.ndarray:
    return np.stack([np.moveaxis(np.asarray(picture, np.float32) / 255, -1, 0) for picture in pictures])


def _thumbnail_first(image: Image.Image, options: Any) -> np.ndarray:
    found = _tiles(image, options)
    return np.roll(found, 1, axis=0) if len(found) > 1 else found


def _learnt_slots(self: ImageTokenLayout, grid: images.TileGrid) -> np.ndarray:
    ids = _write(self, grid)
    return np.where(ids == ~SLOT, np.int32(SLOT), ids)


def _last_slot_masked(self: ImageChatDataset, index: int) -> dict[str, np.ndarray]:
    sample = _sample(self, index)
    sample["loss_mask"][sample["image_slots"] >= 0] = 0
    return sample


def _later_positions(self: ImageChatDataset, index: int) -> dict[str, np.ndarray]:
    sample = _sample(self, index)
    return {**sample, "position_ids": sample["position_ids"] + 1}


DEFECTS: dict[str, tuple[tuple[Any, str, Callable[..., Any]], Callable[[Path], None]]] = {
    "blue first": ((images, "decode_image", _blue_first), lambda path: pixels_equal((40, 28))),
    "pixels are not normalized": ((images, "normalize_images", _as_they_are), lambda path: pixels_equal((40, 28))),
    "the thumbnail comes first": ((images, "tile_image", _thumbnail_first), lambda path: tiles_equal((96, 24), 6)),
    "slots of images are learnt": ((ImageTokenLayout, "image_tokens", _learnt_slots), slots_right),
    "the label behind an image's last slot is masked": (
        (ImageChatDataset, "__getitem__", _last_slot_masked),
        slots_right,
    ),
    "positions are shifted by one": ((ImageChatDataset, "__getitem__", _later_positions), slots_right),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_mistake_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (owner, attribute, replacement), check = DEFECTS[name]
    check(tmp_path)  # green without it
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, replacement)
        with pytest.raises(AssertionError):
            (tmp_path / "planted").mkdir()
            check(tmp_path / "planted")
