"""Images in files: opened within limits, made a square or cut into tiles, and normalized. Pillow and numpy do the work.

    bytes -> limits -> turned as EXIF says -> RGB on white -> tiles -> [n, channels, height, width], float32

    2 x 1 tiles with a thumbnail:   |  0  |  1  |   and the whole image, as tile 2

What cannot be used raises `ImageError` with the reason; nothing is repaired without a word. Files come from strangers: formats are those
of a list (others of Pillow's start programs), and sizes are compared with the limit before pixels are unpacked and before they are resized.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin

from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.multimodal import MultimodalDataConfig

_PART = re.compile(r"(.+?\.(?:tar|bin))@(\d+)\+(\d+)/")
_ORIENTATION = 0x0112  # the EXIF tag
_BITS_PER_SAMPLE = 258  # the TIFF tag
_SIZE, _TILE_SIZE = (256, 257), (322, 323)  # the TIFF tags
_TURNED = (5, 6, 7, 8)  # its values that let width and height change places
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # by Pillow's names
_MOST_SCANS = 100  # of a JPEG, each of which takes a pass over all pixels; a progressive one has about ten


class ImageError(Exception):
    """An image that cannot be used, and why."""


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How images are read. height, width: of a tile. max_tiles: 1 without tiling. mean, std: by channel, of values in [0, 1].

    whole_side: tiles on the longer side of every image, whose size is then enlarged or reduced to theirs (Idefics3, SmolVLM); 0: as
    many as its size asks for (InternVL).
    """

    height: int
    width: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    aspect_ratio: Literal["square", "pad", "crop"] = "square"
    max_tiles: int = 1
    thumbnail: bool = False
    whole_side: int = 0
    max_pixels: int = 50_000_000
    max_bytes: int = 50_000_000

    @staticmethod
    def from_config(model: ModelConfig, config: MultimodalDataConfig) -> ImageOptions:
        """The options of a run."""
        vision, traits = model.vision, model.vision.encoder_traits
        grey = vision.num_channels == 1
        return ImageOptions(
            height=vision.img_h,
            width=vision.img_w,
            channels=vision.num_channels,
            mean=(sum(traits.mean) / 3,) if grey else traits.mean,
            std=(sum(traits.std) / 3,) if grey else traits.std,
            aspect_ratio=config.image_aspect_ratio,
            max_tiles=config.max_num_tiles if config.use_tiling else 1,
            thumbnail=config.use_thumbnail,
            whole_side=math.isqrt(config.max_num_tiles) if config.cuts_as_smolvlm else 0,
            max_pixels=config.max_image_pixels,
            max_bytes=config.max_image_bytes,
        )


@dataclass(frozen=True, slots=True)
class TileGrid:
    """How an image is cut. thumbnail: whether the whole image follows as one more tile."""

    columns: int = 1
    rows: int = 1
    thumbnail: bool = False

    @property
    def num_tiles(self) -> int:
        """The number of tiles, the thumbnail included."""
        return self.columns * self.rows + self.thumbnail


def read_image_bytes(path: str | Path, options: ImageOptions) -> bytes:
    """Read an image file, or a byte range of one: SHARD.tar@512+20480/1.jpg is 20480 bytes from byte 512 on.

    `ImageError` if it cannot be opened, is above `max_bytes`, or ends early.
    """
    part = _PART.match(str(path))
    name, start, size = (part[1], int(part[2]), int(part[3])) if part else (path, 0, None)
    try:
        with open(name, "rb") as file:
            file.seek(start)
            content = file.read(options.max_bytes + 1 if size is None else min(size, options.max_bytes + 1))
    except OSError as error:
        raise ImageError(f"it cannot be opened: {error.strerror}") from None
    if len(content) > options.max_bytes:
        raise ImageError(f"it has more than {options.max_bytes} bytes")
    if size is not None and len(content) < size:
        raise ImageError(f"{name} ends before it does")
    return content


def _open_image_header(content: bytes, options: ImageOptions) -> Image.Image:
    """Open an image and read its header only. `ImageError` if it is no image of `FORMATS` or has more than `max_pixels` pixels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our limit is told below
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        except Image.DecompressionBombError:
            raise ImageError(f"it has more than {options.max_pixels} pixels") from None
        except Exception as error:  # noqa: BLE001 - a damaged header can make Pillow raise nearly anything
            other = _name_of_other_format(content)
            reason = f"it is no image: {type(error).__name__}"
            read = ", ".join(FORMATS)
            raise ImageError(f"it is of the format {other}, and formats read are {read}" if other else reason) from None
    if image.width * image.height > options.max_pixels:
        raise ImageError(f"it has {image.width} x {image.height} pixels, more than {options.max_pixels}")
    if image.format in ("JPEG", "MPO") and (scans := content.count(b"\xff\xda")) > _MOST_SCANS:
        raise ImageError(f"it has {scans} scans, more than {_MOST_SCANS}")
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        tile = [side for tag in _TILE_SIZE if isinstance(side := image.tag_v2.get(tag), int)]
        if math.prod(tile) > options.max_pixels:
            raise ImageError(
                f"it is stored in tiles of {' x '.join(map(str, tile))} pixels, more than {options.max_pixels}"
            )
    _refuse_unknown_white(image)
    return image


def _name_of_other_format(content: bytes) -> str:
    """Return Pillow's name of the format outside of `FORMATS` that the first bytes are of, or ""."""
    Image.init()
    for name, (_, accepts) in Image.OPEN.items():
        # Of all that a format registers, this alone looks at no more than these bytes.
        if name not in FORMATS and accepts is not None and len(content) > 16 and accepts(content[:16]) is True:
            return name
    return ""


def decode_image(content: bytes, options: ImageOptions) -> Image.Image:
    """Decode an image's first frame, rotated as EXIF says, to RGB (one channel: grey); what is transparent shows white.

    `ImageError` if it is damaged or too large, or its white is unknown.
    """
    image = _open_image_header(content, options)
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
    except Exception as error:  # noqa: BLE001 - as above
        raise ImageError(f"it is damaged: {error}") from None
    _refuse_large_resizes(*image.size, options)
    if image.mode.startswith("I"):
        image = _reduce_to_8_bits(image)
    try:
        image = _convert_to_rgb_on_white(image)
    except Exception as error:  # noqa: BLE001 - as above
        raise ImageError(f"its pixels of mode {image.mode} cannot be converted: {error}") from None
    return image.convert("L") if options.channels == 1 else image


def _convert_to_rgb_on_white(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB, on white where it is transparent, as transformers' processors do."""
    if image.mode == "La":  # with colours multiplied by alpha, which Pillow converts to LA alone
        image = image.convert("LA")
    if {"A", "a"}.isdisjoint(image.getbands()) and image.info.get("transparency") is None:
        return image.convert("RGB")
    result = Image.new("RGBA", image.size, "white")
    result.alpha_composite(image.convert("RGBA"))
    return result.convert("RGB")


def _reduce_to_8_bits(image: Image.Image) -> Image.Image:
    """Return a grey image of 16 bits a pixel in 8 bits, which Pillow would cut off at 255; with alpha if one grey is transparent."""
    values = np.asarray(image)
    result = Image.fromarray((values // 257).astype(np.uint8))
    transparent = image.info.get("transparency")
    if transparent is not None:
        result.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return result


def _refuse_unknown_white(image: Image.Image) -> None:
    """Raise `ImageError` for 32 bits and floating point, as no file says which of their values is white."""
    bits = image.tag_v2.get(_BITS_PER_SAMPLE, (8,)) if isinstance(image, TiffImagePlugin.TiffImageFile) else (16,)
    sixteen = image.mode.startswith("I;16") or image.mode == "I" and image.format in ("PNG", "PPM")
    if image.mode == "F" or image.mode.startswith("I") and not (sixteen and bits == (16,)):
        raise ImageError(
            f"its pixels have the mode {image.mode}, whose white is unknown; write it with 8 or 16 bits a channel"
        )


def upright_image_size(content: bytes, options: ImageOptions) -> tuple[int, int]:
    """Return (width, height) after EXIF rotation, from the header alone. `ImageError` if it cannot be used."""
    image = _open_image_header(content, options)
    try:
        turned = image.getexif().get(_ORIENTATION) in _TURNED
    except Exception:  # noqa: BLE001 - damaged EXIF data turn nothing
        turned = False
    width, height = image.size
    if isinstance(image, TiffImagePlugin.TiffImageFile):  # whose size newer releases of Pillow have turned already
        width, height = (int(image.tag_v2[tag]) for tag in _SIZE)
    width, height = (height, width) if turned else (width, height)
    _refuse_large_resizes(width, height, options)
    return width, height


def _refuse_large_resizes(width: int, height: int, options: ImageOptions) -> None:
    """Raise `ImageError` if an image of this size has more than `max_pixels` pixels at some step of its resizes."""
    for wide, high in _planned_sizes(width, height, options):
        if wide * high > options.max_pixels:
            raise ImageError(
                f"it has {width} x {height} pixels and is resized by way of {wide} x {high}, more than {options.max_pixels}"
            )


def _planned_sizes(width: int, height: int, options: ImageOptions) -> list[tuple[int, int]]:
    """Return each (width, height) that an image takes on its way to tiles. Pillow resizes all rows first, then columns."""
    if options.max_tiles > 1:
        grid = choose_tile_grid(width, height, options)
        large, first = (grid.columns * options.width, grid.rows * options.height), (width, height)
        if options.whole_side:
            first = _size_for_longer_side_grid(width, height, options)
        return [(first[0], height), first, (large[0], first[1]), large]
    if options.aspect_ratio == "crop":
        larger = _size_that_covers_tile(width, height, options)
        return [(larger[0], height), larger]
    side = max(width, height)
    return [(side, side), (options.width, side)] if options.aspect_ratio == "pad" else [(options.width, height)]


def choose_tile_grid(width: int, height: int, options: ImageOptions) -> TileGrid:
    """Choose how an image of this size is cut into tiles."""
    if options.max_tiles == 1:
        return TileGrid()
    columns, rows = (
        _longer_side_grid(width, height, options)
        if options.whole_side
        else _nearest_aspect_grid(width, height, options)
    )
    return TileGrid(columns, rows, options.thumbnail and columns * rows > 1)


def _nearest_aspect_grid(width: int, height: int, options: ImageOptions) -> tuple[int, int]:
    """Columns and rows of the grid whose shape is nearest to the image's.

    Of grids of one shape the largest whose area the image covers by half (InternVL 1.5, Chen et al., 2024).
    """
    grids = [
        (columns, rows)
        for columns in range(1, options.max_tiles + 1)
        for rows in range(1, options.max_tiles // columns + 1)
    ]
    best, smallest = (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(width / height - columns / rows)
        covers = width * height > 0.5 * options.width * options.height * columns * rows
        if difference < smallest or difference == smallest and covers:
            best, smallest = (columns, rows), difference
    return best


def _longer_side_grid(width: int, height: int, options: ImageOptions) -> tuple[int, int]:
    """Return (columns, rows) with `whole_side` tiles on the image's longer side (Idefics3, Laurencon et al., 2024)."""
    width, height = _size_for_longer_side_grid(width, height, options)
    side, ratio = options.width, width / height
    if width >= height:
        columns = math.ceil(width / side)
        return columns, math.ceil(int(columns * side / ratio) / side)
    rows = math.ceil(height / side)
    return math.ceil(int(rows * side * ratio) / side), rows


def _size_for_longer_side_grid(width: int, height: int, options: ImageOptions) -> tuple[int, int]:
    """Return the (width, height) to resize an image to: the longer side `whole_side` tiles, the shorter even."""
    longest, ratio = options.whole_side * options.width, width / height
    if width >= height:
        shorter = int(longest / ratio)
        return longest, max(1, shorter + shorter % 2)
    shorter = int(longest * ratio)
    return max(1, shorter + shorter % 2), longest


def tile_grid_of_image_bytes(content: bytes, options: ImageOptions) -> TileGrid:
    """Choose how an image is cut into tiles, from its header alone."""
    return choose_tile_grid(*upright_image_size(content, options), options)


def tile_image(image: Image.Image, options: ImageOptions) -> np.ndarray:
    """Cut an image into normalized tiles, row by row, with the thumbnail last. float32 [n, channels, height, width]"""
    if options.max_tiles == 1:
        return normalize_images([_resize_to_tile(image, options)], options)
    grid, width, height = choose_tile_grid(*image.size, options), options.width, options.height
    whole, filter = image, Image.Resampling.BICUBIC
    if options.whole_side:
        filter = Image.Resampling.LANCZOS
        whole = image.resize(_size_for_longer_side_grid(*image.size, options), filter)
    large = whole.resize((grid.columns * width, grid.rows * height), filter)
    cut = [
        large.crop((column * width, row * height, (column + 1) * width, (row + 1) * height))
        for row in range(grid.rows)
        for column in range(grid.columns)
    ]
    if grid.thumbnail:
        cut.append((large if options.whole_side else image).resize((width, height), filter))
    return normalize_images(cut, options)


def _resize_to_tile(image: Image.Image, options: ImageOptions) -> Image.Image:
    """Resize an image to one tile: stretched, padded to a square or cropped, as `aspect_ratio` says."""
    size = (options.width, options.height)
    if options.aspect_ratio == "crop":
        larger = _size_that_covers_tile(*image.size, options)
        image = image.resize(larger, Image.Resampling.BICUBIC)
        left, top = (larger[0] - options.width) // 2, (larger[1] - options.height) // 2
        return image.crop((left, top, left + options.width, top + options.height))
    if options.aspect_ratio == "pad" and image.width != image.height:
        side = max(image.size)
        colour = tuple(int(value * 255) for value in options.mean)
        padded = Image.new(image.mode, (side, side), colour[0] if len(colour) == 1 else colour)
        padded.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        image = padded
    return image.resize(size, Image.Resampling.BICUBIC)


def _size_that_covers_tile(width: int, height: int, options: ImageOptions) -> tuple[int, int]:
    """Return the smallest (width, height) of the image's shape that covers a tile."""
    if width * options.height <= height * options.width:
        return options.width, int(options.width * height / width)
    return int(options.height * width / height), options.height


def normalize_images(images: list[Image.Image], options: ImageOptions) -> np.ndarray:
    """Convert images of one size to normalized values, (value / 255 - mean) / std. float32 [n, channels, height, width]"""
    pixels = np.stack([np.asarray(image).reshape(options.height, options.width, -1) for image in images])
    factor = 1.0 / (255.0 * np.asarray(options.std))
    shift = np.asarray(options.mean) / np.asarray(options.std)
    return np.moveaxis(pixels * factor.astype(np.float32) - shift.astype(np.float32), -1, 1).astype(np.float32)


def empty_image_batch(options: ImageOptions) -> np.ndarray:
    """The images of a sample without any. float32 [0, channels, height, width]"""
    return np.empty((0, options.channels, options.height, options.width), np.float32)
