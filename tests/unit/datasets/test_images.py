"""Images: the numbers of transformers' processors, tiles, and files that are not what they should be."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from megatron.core.config.settings.vision import TRAITS
from megatron.core.datasets import images
from megatron.core.datasets.images import ImageError, ImageOptions

CLIP, SIGLIP, IMAGENET = (TRAITS[kind] for kind in ("clip", "siglip", "dinov2"))
SHAPES = [(40, 28), (28, 40), (23, 61), (224, 17), (1, 90)]


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A picture whose colours and places all differ."""
    random = np.random.default_rng((width, height))
    rows, columns = np.mgrid[0:height, 0:width]
    values = np.stack((rows * 5 + 7, columns * 3 + 11, rows + columns), axis=-1) % 200
    return Image.fromarray((values + random.integers(0, 50, values.shape)).astype(np.uint8)).convert(mode)


def content(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def options(traits: Any = CLIP, side: int = 24, **changes: Any) -> ImageOptions:
    return ImageOptions(side, side, 3, traits.mean, traits.std, **changes)


def ours(image: Image.Image, chosen: ImageOptions) -> np.ndarray:
    return images.tile_image(images.decode_image(content(image), chosen), chosen)


def theirs(processor: Any, image: Image.Image) -> np.ndarray:
    return np.asarray(processor(image, return_tensors="np")["pixel_values"])


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.abs(a - b).max() < 2e-6)


@pytest.mark.parametrize("size", SHAPES)
def test_a_stretched_image_is_that_of_the_siglip_processor(size: tuple[int, int]) -> None:
    processor = transformers.SiglipImageProcessorPil(size={"height": 24, "width": 24})
    assert close(ours(picture(*size), options(SIGLIP)), theirs(processor, picture(*size)))


@pytest.mark.parametrize("size", SHAPES)
def test_a_cropped_image_is_that_of_the_clip_processor(size: tuple[int, int]) -> None:
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    assert close(ours(picture(*size), options(aspect_ratio="crop")), theirs(processor, picture(*size)))


@pytest.mark.parametrize("size", SHAPES)
def test_a_padded_image_is_that_of_the_llava_processor(size: tuple[int, int]) -> None:
    processor = transformers.LlavaImageProcessorPil(
        size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24}, do_pad=True
    )
    assert close(ours(picture(*size), options(aspect_ratio="pad")), theirs(processor, picture(*size)))


@pytest.mark.parametrize("size", [*SHAPES, (96, 24), (50, 50), (25, 75)])
@pytest.mark.parametrize("most", [2, 6])
def test_tiles_with_the_thumbnail_last_are_those_of_internvls_processor(size: tuple[int, int], most: int) -> None:
    processor = transformers.GotOcr2ImageProcessorPil(
        size={"height": 24, "width": 24},
        crop_to_patches=True,
        min_patches=1,
        max_patches=most,
        image_mean=IMAGENET.mean,
        image_std=IMAGENET.std,
    )
    chosen = options(IMAGENET, max_tiles=most, thumbnail=True)
    result = ours(picture(*size), chosen)
    assert close(result, theirs(processor, picture(*size)))
    assert len(result) == images.tile_grid_of_image_bytes(content(picture(*size)), chosen).num_tiles


@pytest.mark.parametrize("size", [*SHAPES, (50, 50), (1, 300), (1000, 30), (73, 24), (96, 96)])
def test_tiles_with_the_whole_image_last_are_those_of_smolvlms_processor(size: tuple[int, int]) -> None:
    processor = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 72}, max_image_size={"longest_edge": 24})
    chosen = options(SIGLIP, max_tiles=9, thumbnail=True, whole_side=3)
    grid = images.tile_grid_of_image_bytes(content(picture(*size)), chosen)
    found = processor(picture(*size), return_tensors="np", return_row_col_info=True)
    assert (grid.rows, grid.columns) == (found["rows"][0][0], found["cols"][0][0])
    result = ours(picture(*size), chosen)
    assert len(result) == grid.num_tiles and close(result, found["pixel_values"][0])


@pytest.mark.parametrize("change", ["blue first", "not normalized", "thumbnail first"])
def test_what_a_wrong_image_would_be_is_told_from_the_right_one(change: str) -> None:
    chosen = options(max_tiles=4, thumbnail=True)
    right = ours(picture(48, 24), chosen)
    wrong = {
        "blue first": right[:, ::-1],
        "not normalized": right * np.reshape(CLIP.std, (1, 3, 1, 1)) + np.reshape(CLIP.mean, (1, 3, 1, 1)),
        "thumbnail first": np.roll(right, 1, axis=0),
    }[change]
    assert len(right) == 3 and not close(right, wrong.astype(np.float32))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_data_say(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = content(picture(40, 24), "PNG", exif=exif)
    chosen = options(max_tiles=6)
    image = images.decode_image(file, chosen)
    assert image.size == ((40, 24) if orientation < 5 else (24, 40))
    assert images.upright_image_size(file, chosen) == image.size
    assert images.tile_grid_of_image_bytes(file, chosen).num_tiles == len(images.tile_image(image, chosen))
    turned = {3: np.rot90(np.asarray(picture(40, 24)), 2), 6: np.rot90(np.asarray(picture(40, 24)), -1)}
    if orientation in turned:
        assert np.array_equal(np.asarray(image), turned[orientation])


@pytest.mark.parametrize(
    "kind, mode",
    [("JPEG", "CMYK"), ("PNG", "P"), ("PNG", "1"), ("PNG", "L"), ("PNG", "LA"), ("PNG", "RGBA"), ("GIF", "P")],
)
def test_every_kind_of_pixel_becomes_red_green_and_blue(kind: str, mode: str) -> None:
    image = picture(30, 20, mode)
    result = images.decode_image(content(image, kind), options())
    assert result.mode == "RGB"
    reference = Image.open(io.BytesIO(content(image, kind))).convert("RGB")
    assert np.array_equal(np.asarray(result), np.asarray(reference))


def test_sixteen_bits_a_pixel_keep_their_shades() -> None:
    shades = np.linspace(0, 65535, 600, dtype=np.uint16).reshape(20, 30)
    result = np.asarray(images.decode_image(content(Image.fromarray(shades)), options()))[..., 0]
    assert np.abs(result.astype(float) - shades / 257).max() <= 1


def bomb() -> bytes:
    """A small file of a large image."""
    return content(Image.new("1", (20_000, 20_000)))


@pytest.mark.parametrize(
    "name, file, reason",
    [
        ("truncated", content(picture(200, 200), "JPEG")[:3000], "damaged"),
        ("text", b"this is no picture", "no image"),
        ("empty", b"", "no image"),
        ("bomb", None, "pixels"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(name: str, file: bytes | None, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        images.decode_image(bomb() if file is None else file, options())


def test_files_have_a_limit_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(bytes(1000))
    with pytest.raises(ImageError, match="more than 999 bytes"):
        images.read_image_bytes(tmp_path / "large.png", options(max_bytes=999))
    with pytest.raises(ImageError, match="cannot be opened: No such file"):
        images.read_image_bytes(tmp_path / "missing.png", options())


def test_an_image_of_one_by_three_thousand_pixels_is_used() -> None:
    for shape in ((1, 3000), (3000, 1)):
        assert ours(picture(*shape), options(max_tiles=6, thumbnail=True)).shape == (7, 3, 24, 24)
        assert np.isfinite(ours(picture(*shape), options(aspect_ratio="pad"))).all()
