"""Image files from strangers: refused by name before they cost memory, time or another program; anything else is only a picture."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from megatron.core.datasets import images
from megatron.core.datasets.images import ImageError, ImageOptions
from tests.helpers.architecture import ROOT
from tests.unit.datasets.test_images import content, options, picture

WAYS: dict[str, ImageOptions] = {
    "square": options(),
    "pad": options(aspect_ratio="pad"),
    "crop": options(aspect_ratio="crop"),
    "tiles": options(max_tiles=12, thumbnail=True),
    "SmolVLM": options(max_tiles=16, thumbnail=True, whole_side=4),
}
KINDS = {"PNG": "RGBA", "JPEG": "RGB", "GIF": "P", "WEBP": "RGBA", "BMP": "RGB", "TIFF": "LA", "PPM": "RGB"}


def test_a_format_that_is_not_on_the_list_is_refused_by_name() -> None:
    refused = []
    for kind in ("EPS", "ICNS", "PCX", "SGI", "DDS", "JPEG2000", "AVIF", "ICO", "PDF"):
        try:
            file = content(picture(32, 32), kind)
        except (KeyError, OSError):  # this Pillow was built without it
            continue
        for read in (images.decode_image, images.upright_image_size):
            with pytest.raises(ImageError, match=f"format {kind}|no image" if kind != "PDF" else "no image"):
                read(file, options())
        refused.append(kind)
    assert {"EPS", "ICO", "PCX", "SGI"} <= set(refused)


def test_no_file_starts_ghostscript(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **given: started.append(args))
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **given: started.append(args))
    for comment in (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n",
        b"\xc5\xd0\xd3\xc6" + bytes(30),
    ):
        with pytest.raises(ImageError):
            images.decode_image(comment + b"showpage\n" * 9, options())
    assert not started


@pytest.mark.parametrize("width, height", [(30_000, 1), (1, 30_000), (200_000, 1), (1, 200_000)])
@pytest.mark.parametrize("way", WAYS)
def test_a_line_costs_no_square(way: str, width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = [0]
    for name in ("resize", "crop"):
        plain = getattr(Image.Image, name)

        def watched(self: Image.Image, size: Any, *args: Any, plain: Any = plain, **given: Any) -> Image.Image:
            made = plain(self, size, *args, **given)
            largest[0] = max(largest[0], made.width * made.height, made.width * self.height)
            return made

        monkeypatch.setattr(Image.Image, name, watched)
    chosen, file = WAYS[way], content(Image.new("1", (width, height)))
    try:
        assert images.tile_image(images.decode_image(file, chosen), chosen).dtype == np.float32
        images.tile_grid_of_image_bytes(file, chosen)
    except ImageError as error:
        assert f"{width} x {height} pixels and is resized by way of" in str(error)  # noqa: PT017
        with pytest.raises(ImageError, match="resized by way of"):
            images.upright_image_size(file, chosen)  # when the data are indexed
    else:
        assert way != "pad" and (way != "crop" or max(width, height) == 30_000)
    assert largest[0] <= chosen.max_pixels


def test_a_picture_within_the_limit_is_resized_within_it() -> None:
    for way, chosen in WAYS.items():
        small = ImageOptions(**{name: getattr(chosen, name) for name in chosen.__slots__} | {"max_pixels": 200_000})
        assert images.tile_image(images.decode_image(content(picture(400, 300)), small), small).size, way


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    file = content(picture(64, 64), "JPEG", progressive=True)
    assert images.decode_image(file, options()).size == (64, 64)
    last = file.rindex(b"\xff\xda")
    with pytest.raises(ImageError, match="scans"):
        images.decode_image(file[:last] + file[last:-2] * 200 + file[-2:], options())


def test_a_tile_of_a_tiff_is_no_larger_than_a_picture() -> None:
    """What is unpacked at once is a tile, however small the picture is."""
    tags = {256: 10, 257: 10, 258: 8, 259: 8, 262: 1, 277: 1, 322: 32_768, 323: 32_768, 324: 134, 325: 20}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    file = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + zlib.compress(bytes(100)).ljust(20, b"\0")
    for read in (images.decode_image, images.upright_image_size):
        with pytest.raises(ImageError, match="stored in tiles of 32768 x 32768 pixels"):
            read(file, options())


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_a_header_tells_the_size_that_the_upright_picture_has(kind: str) -> None:
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        more = {"tiffinfo": {0x0112: turn}} if kind == "TIFF" else {"exif": exif}
        file = content(picture(60, 20), kind, **more)
        size = images.decode_image(file, options()).size
        assert images.upright_image_size(file, options()) == size == ((20, 60) if turn > 4 else (60, 20)), turn


def fuzz(seed: int, rounds: int) -> None:
    """Read damaged files of every kind in every way. Anything but a picture or `ImageError` is a failure."""
    random = np.random.default_rng(seed)
    files = {kind: np.frombuffer(content(picture(21, 17, mode), kind), np.uint8) for kind, mode in KINDS.items()}
    for _ in range(rounds):
        kind, chosen = random.choice(list(files)), WAYS[random.choice(list(WAYS))]
        file = files[kind].copy()
        for place in random.integers(0, min(len(file), random.choice([40, len(file)])), random.integers(1, 6)):
            file[place] = random.choice([0, 255, 127, 128, int(random.integers(256))])
        if random.random() < 0.2:
            file = file[: random.integers(len(file))]
        try:
            images.tile_grid_of_image_bytes(file.tobytes(), chosen)
            images.tile_image(images.decode_image(file.tobytes(), chosen), chosen)
        except ImageError:
            pass


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow, about damaged tags
def test_damaged_files_are_refused_or_pictures() -> None:
    fuzz(0, 300)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 5))
def test_damaged_files_cost_bounded_memory_and_time(seed: int) -> None:
    command = f"from tests.unit.datasets.test_hostile_images import fuzz\nfuzz({seed}, 5000)"
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (6 * 2**30,) * 2)\n"  # transformers and torch take four
    subprocess.run([sys.executable, "-W", "ignore", "-c", limit + command], cwd=ROOT, check=True, timeout=1800)
