"""The preprocessor_config.json of a folder of transformers: how its images become tiles, as settings of ours, or refused key by key.

{"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336}, "crop_size": ..., ...}  ->  --image-aspect-ratio crop
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.core.config.foreign.mapping import ForeignMapping, short_value
from megatron.core.config.settings.vision import VisionConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families.hf_folder import read_json

FILES = ("preprocessor_config.json", "processor_config.json")
_HARMLESS = MappingProxyType(
    {
        **dict.fromkeys(
            ("image_processor_type", "feature_extractor_type", "processor_class", "auto_map", "_processor_class"),
            "names of classes, the first two of which are read before",
        ),
        **dict.fromkeys(("device", "return_tensors", "disable_grouping"), "how a call computes, not what"),
        **dict.fromkeys(("data_format", "input_data_format"), "the order of axes, which the network fixes"),
        "default_to_square": "what a number as size means, which the class tells",
    }
)
_ON = MappingProxyType(dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True))
_CROPPING = ("CLIPImageProcessor", "LlavaImageProcessor", "BitImageProcessor")
_STRETCHING = ("SiglipImageProcessor", "ViTImageProcessor")
_SPLITTING = ("SmolVLMImageProcessor", "Idefics3ImageProcessor")
_TILING = ("GotOcr2ImageProcessor",)
_BILINEAR, _LANCZOS, _BICUBIC = 2, 1, 3  # filters, as Pillow numbers them


def image_settings_of_folder(folder: str | Path, vision: VisionConfig) -> dict[str, Any]:
    """Return how a folder's processor cuts images, as settings of `MultimodalDataConfig`; {} if it has none.

    Raises `CheckpointError` that names every key which has no counterpart here. vision: of the folder's network.
    """
    place, content = next(
        ((name, content) for name in FILES if (content := _processor_values(Path(folder) / name))), ("", {})
    )
    if not content:
        return {}
    named = str(content.get("image_processor_type") or content.get("feature_extractor_type") or "")
    kind = named.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    keys = ForeignMapping(content, harmless=_HARMLESS, defaults=_ON)
    settings: dict[str, Any] = {}
    if kind in _SPLITTING:
        settings = _read_splitting_keys(keys, vision.img_h)
    elif kind in _TILING:
        settings = _read_tiling_keys(keys, vision.img_h)
    elif kind in (*_CROPPING, *_STRETCHING):
        settings = _read_aspect_keys(keys, vision.img_h, kind)
    else:
        keys.problems.append(f"image_processor_type: {short_value(named)} is not built here")
        keys.ignore_keys()
    traits = vision.encoder_traits
    for name, ours in (("image_mean", traits.mean), ("image_std", traits.std)):
        values = keys.pop_or_none(name)
        if values is not None and not _are_close(values, ours):
            keys.problems.append(f"{name}: {short_value(values)} has no counterpart here; {list(ours)} has")
    if not _are_close([keys.pop_or_none("rescale_factor") or 1 / 255], [1 / 255]):
        keys.problems.append("rescale_factor: only 1/255 has a counterpart here")
    if problems := keys.all_problems():
        raise CheckpointError(
            f"{Path(folder) / place} says how images are prepared, and not all of it is done here", problems
        )
    return settings


def _processor_values(path: Path) -> Mapping[str, Any]:
    """Return the keys of an image processor's file, or of its part of a whole processor's."""
    content = read_json(path) if path.is_file() else {}
    part = content.get("image_processor") if path.name == FILES[1] else content
    return part if isinstance(part, Mapping) else {}


def _read_aspect_keys(keys: ForeignMapping, side: int, kind: str) -> dict[str, Any]:
    """Read how an image becomes one square: stretched, cropped or padded."""
    keys.one_of("resample", (_BICUBIC,), _BILINEAR if kind == "ViTImageProcessor" else _BICUBIC)
    size, crop = keys.pop_or_none("size"), keys.pop_or_none("crop_size")
    crops, pads = keys.boolean("do_center_crop", kind in _CROPPING), keys.boolean("do_pad", False)
    if isinstance(size, int):
        size = {"shortest_edge": size} if kind in _CROPPING else {"height": size, "width": size}
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    square = {"height": side, "width": side}
    if size == square and (not crops or crop == square):
        return {"image_aspect_ratio": "square"}
    if size == {"shortest_edge": side} and crops and crop == square:
        return {"image_aspect_ratio": "pad" if pads else "crop"}
    keys.problems.append(
        f"size: {short_value(size)} with crop_size {short_value(crop)} has no counterpart here for an encoder of {side} x {side}; "
        f"{square}, or a shortest_edge of {side} with that crop, has"
    )
    return {}


def _read_tiling_keys(keys: ForeignMapping, side: int) -> dict[str, Any]:
    """Read InternVL's way: tiles by the image's shape, the whole image last. Its processor cuts whatever the file says of it."""
    keys.one_of("resample", (_BICUBIC,), _BICUBIC)
    keys.one_of("size", ({"height": side, "width": side},), {"height": side, "width": side})
    keys.one_of("min_patches", (1,), 1)
    keys.ignore_keys("crop_to_patches")
    most = keys.positive_int("max_patches", 12)
    return {"use_tiling": True, "max_num_tiles": most, "use_thumbnail": True, "image_tag_type": "internvl"}


def _read_splitting_keys(keys: ForeignMapping, side: int) -> dict[str, Any]:
    """Read SmolVLM's way: so many tiles on the longer side, the whole image last."""
    keys.one_of("resample", (_LANCZOS,), _LANCZOS)
    keys.one_of("max_image_size", ({"longest_edge": side},), {"longest_edge": side})
    keys.one_of("do_image_splitting", (True,), True)
    keys.ignore_keys("do_pad", "video_sampling")  # of batches, and of videos, which are not read
    size = keys.pop_or_none("size")
    longest = size.get("longest_edge") if isinstance(size, Mapping) else None
    if not isinstance(longest, int) or longest < 2 * side or longest % side:
        keys.problems.append(f"size: {short_value(size)} is no longest_edge of several tiles of {side}")
        return {}
    tiles = (longest // side) ** 2
    return {"use_tiling": True, "max_num_tiles": tiles, "use_thumbnail": True, "image_tag_type": "smolvlm"}


def _are_close(values: Any, ours: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) == len(ours)
        and all(
            isinstance(one, (int, float)) and math.isclose(one, mine, abs_tol=1e-6) for one, mine in zip(values, ours)
        )
    )
