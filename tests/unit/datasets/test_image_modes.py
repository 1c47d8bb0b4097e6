"""Every mode of pixels and every shape, through every way of resizing: the numbers of transformers' processors, or a refusal that says why."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image, ImageOps

from megatron.core.datasets import images
from megatron.core.datasets.images import ImageError, ImageOptions
from tests.unit.datasets.test_images import CLIP, IMAGENET, SIGLIP, close, content, options, theirs

SIDE = {"height": 24, "width": 24}
SHORT = {"shortest_edge": 24}
# Our way to resize -> options, and the processor that does the same.
WAYS: dict[str, tuple[ImageOptions, Callable[[], Any]]] = {
    "square, SigLIP": (options(SIGLIP), lambda: transformers.SiglipImageProcessorPil(size=SIDE, do_convert_rgb=True)),
    "square, ViT": (
        options(SIGLIP),
        lambda: transformers.ViTImageProcessorPil(size=SIDE, resample=3, do_convert_rgb=True),
    ),
    "square, LLaVA-OneVision": (
        options(SIGLIP),
        lambda: transformers.SiglipImageProcessorPil(size=SIDE, do_convert_rgb=True, image_mean=(0.5,) * 3),
    ),
    "crop, CLIP": (
        options(aspect_ratio="crop"),
        lambda: transformers.CLIPImageProcessorPil(size=SHORT, crop_size=SIDE),
    ),
    "crop, DINOv2": (
        options(IMAGENET, aspect_ratio="crop"),
        lambda: transformers.BitImageProcessorPil(
            size=SHORT, crop_size=SIDE, image_mean=IMAGENET.mean, image_std=IMAGENET.std
        ),
    ),
    "pad, LLaVA": (
        options(aspect_ratio="pad"),
        lambda: transformers.LlavaImageProcessorPil(size=SHORT, crop_size=SIDE, do_pad=True),
    ),
    "tiles, InternVL": (
        options(IMAGENET, max_tiles=4, thumbnail=True),
        lambda: transformers.GotOcr2ImageProcessorPil(
            size=SIDE,
            crop_to_patches=True,
            min_patches=1,
            max_patches=4,
            image_mean=IMAGENET.mean,
            image_std=IMAGENET.std,
        ),
    ),
    "tiles, SmolVLM": (
        options(SIGLIP, max_tiles=9, thumbnail=True, whole_side=3),
        lambda: transformers.SmolVLMImageProcessorPil(size={"longest_edge": 72}, max_image_size={"longest_edge": 24}),
    ),
}


def shades(width: int, height: int) -> np.ndarray:
    """Four channels of numbers that all differ. uint8 [height, width, 4]"""
    return np.random.default_rng((width, height)).integers(0, 256, (height, width, 4), np.uint8)


def palette(width: int, height: int, **info: Any) -> bytes:
    return content(Image.fromarray(shades(width, height)[..., :3]).quantize(16), "PNG", **info)


def tiff_with_alpha(width: int, height: int, associated: bool) -> bytes:
    """A TIFF whose colours are, or are not, multiplied by alpha."""
    return content(Image.fromarray(shades(width, height), "RGBA"), "TIFF", tiffinfo={338: 1 if associated else 2})


def frames(width: int, height: int, kind: str) -> bytes:
    """An animation whose second frame is black."""
    first = Image.fromarray(shades(width, height), "RGBA")
    first = first if kind == "PNG" else first.convert("P")
    return content(first, kind, save_all=True, append_images=[Image.new(first.mode, first.size)])


def with_profile(width: int, height: int) -> bytes:
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return content(Image.fromarray(shades(width, height)[..., :3]), "PNG", icc_profile=profile)


def turned(width: int, height: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return content(Image.fromarray(shades(width, height)), "PNG", exif=exif)


def in_mode(mode: str, kind: str = "PNG", **given: Any) -> Callable[[int, int], bytes]:
    """Return what writes a file with pixels of a mode."""

    def write(width: int, height: int) -> bytes:
        pixels = shades(width, height)
        channels = {1: pixels[..., 0], 2: pixels[..., :2], 3: pixels[..., :3], 4: pixels}
        bands = len(Image.new(mode, (1, 1)).getbands())
        if mode in ("1", "P"):
            return content(Image.fromarray(pixels[..., :3]).convert(mode), kind, **given)
        return content(
            Image.frombytes(mode, (width, height), np.ascontiguousarray(channels[bands]).tobytes()), kind, **given
        )

    return write


MODES: dict[str, Callable[[int, int], bytes]] = {
    "1": in_mode("1"),
    "1 with a transparent value": in_mode("1", transparency=0),
    "L": in_mode("L"),
    "L with a transparent grey": in_mode("L", transparency=7),
    "LA": in_mode("LA"),
    "P": palette,
    "P with a transparent entry": lambda width, height: palette(width, height, transparency=3),
    "P with alpha for each entry": lambda width, height: palette(width, height, transparency=bytes(range(0, 240, 15))),
    "P of a GIF with a transparent entry": in_mode("P", "GIF", transparency=2),
    "RGB": in_mode("RGB"),
    "RGB with a transparent colour": lambda width, height: content(
        Image.fromarray(shades(width, height)[..., :3] // 128 * 128), "PNG", transparency=(128, 0, 128)
    ),
    "RGBA": in_mode("RGBA"),
    "RGBA of a WebP": in_mode("RGBA", "WEBP", lossless=True),
    "RGBA of a TIFF": lambda width, height: tiff_with_alpha(width, height, False),
    "RGBa of a TIFF": lambda width, height: tiff_with_alpha(width, height, True),
    "RGBX": in_mode("RGBX", "TIFF"),
    "CMYK": in_mode("CMYK", "JPEG"),
    "CMYK of a TIFF": in_mode("CMYK", "TIFF"),
    "YCbCr": in_mode("YCbCr", "JPEG"),
    "LAB": in_mode("LAB", "TIFF"),
    "BMP": in_mode("RGB", "BMP"),
    "PPM": in_mode("RGB", "PPM"),
    "animated PNG": lambda width, height: frames(width, height, "PNG"),
    "animated GIF": lambda width, height: frames(width, height, "GIF"),
    "with a profile": with_profile,
    "turned": turned,
}
SIZES = [(40, 28), (1, 1), (23, 61), (1, 90), (500, 3), (3, 170), (24, 24), (73, 24), (49, 98)]


def compare(way: str, mode: str, size: tuple[int, int]) -> None:
    """Compare tiles and their number with those of the processor."""
    chosen, make = WAYS[way]
    file = MODES[mode](*size)
    found = images.tile_image(images.decode_image(file, chosen), chosen)
    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
    expected = theirs(make(), picture)
    expected = expected[0] if expected.ndim == 5 else expected
    assert close(found, expected), (way, mode, size, found.shape, expected.shape)
    assert images.tile_grid_of_image_bytes(file, chosen).num_tiles == len(found)


@pytest.mark.parametrize("mode", MODES)
def test_pixels_of_every_mode_are_those_of_the_processors(mode: str) -> None:
    for number, (way, _) in enumerate(WAYS.items()):
        compare(way, mode, SIZES[(number + list(MODES).index(mode)) % len(SIZES)])


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_every_mode_and_every_shape_give_the_pixels_of_the_processor(way: str) -> None:
    more = [tuple(np.random.default_rng(seed).integers(1, 200, 2).tolist()) for seed in range(40)]
    for mode, size in itertools.product(MODES, [*SIZES, *more]):
        compare(way, mode, size)


@pytest.mark.parametrize("transparent", [False, True])
def test_sixteen_bits_become_eight_whatever_the_brightest_is(transparent: bool) -> None:
    values = np.arange(600, dtype=np.uint16).reshape(20, 30)  # a dark picture: no value is above 1 % of white
    info = {"transparency": 300} if transparent else {}
    result = np.asarray(images.decode_image(content(Image.fromarray(values), **info), options()))[..., 0].astype(int)
    expected = np.where(values == 300, 255, values // 257) if transparent else values // 257
    assert np.array_equal(result, expected)
    grey = content(Image.fromarray(values), "TIFF")
    assert np.array_equal(np.asarray(images.decode_image(grey, options()))[..., 0], values // 257)
    maximum = b"P5 30 20 65535\n" + values.byteswap().tobytes()
    assert np.array_equal(np.asarray(images.decode_image(maximum, options()))[..., 0], values // 257)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_without_a_white_are_refused_by_name(mode: str) -> None:
    values = np.linspace(0, 1, 600).reshape(20, 30).astype(np.int32 if mode == "I" else np.float32)
    with pytest.raises(ImageError, match=f"mode {mode}"):
        images.decode_image(content(Image.fromarray(values), "TIFF"), options())


def test_premultiplied_greys_stand_on_white() -> None:
    pixels = np.array([[[100, 200], [0, 0]]], np.uint8)
    image = Image.frombytes("La", (2, 1), Image.frombytes("LA", (2, 1), pixels.tobytes()).convert("La").tobytes())
    expected = Image.new("RGBA", (2, 1), "white")
    expected.alpha_composite(Image.frombytes("LA", (2, 1), pixels.tobytes()).convert("RGBA"))
    found = np.asarray(images._convert_to_rgb_on_white(image)).astype(int)
    assert np.abs(found - np.asarray(expected.convert("RGB"))).max() <= 1


def test_one_channel_is_the_grey_of_the_picture_on_white() -> None:
    chosen = ImageOptions(24, 24, 1, (CLIP.mean[0],), (CLIP.std[0],))
    for mode, write in MODES.items():
        grey, colour = (images.decode_image(write(9, 7), one) for one in (chosen, options()))
        assert grey.mode == "L" and np.array_equal(np.asarray(grey), np.asarray(colour.convert("L"))), mode
