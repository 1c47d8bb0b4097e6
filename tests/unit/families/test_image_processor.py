"""preprocessor_config.json: the pixels of the processor that it describes, or a refusal that names the key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from megatron.core.config.flags.declare import config_from_flat_dict
from megatron.core.config.settings.multimodal import MultimodalDataConfig
from megatron.core.config.settings.vision import VisionConfig
from megatron.core.datasets import images
from megatron.core.datasets.images import ImageOptions
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families.image_processor import image_settings_of_folder
from tests.helpers import tiny
from tests.unit.datasets.test_images import CLIP, SIGLIP, content, picture

SQUARE, SHORT = {"height": 24, "width": 24}, {"shortest_edge": 24}
MEANS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
SPLIT = {"size": {"longest_edge": 72}, "max_image_size": {"longest_edge": 24}}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "CLIPImageProcessorPil": ("clip", {"size": SHORT, "crop_size": SQUARE}),
    "LlavaImageProcessorPil": ("clip", {"size": SHORT, "crop_size": SQUARE, "do_pad": True}),
    "SiglipImageProcessorPil": ("siglip", {"size": SQUARE, "do_convert_rgb": True}),
    "ViTImageProcessorPil": ("siglip", {"size": SQUARE, "resample": 3, "do_convert_rgb": True}),
    "BitImageProcessorPil": ("dinov2", {"size": SHORT, "crop_size": SQUARE, **MEANS}),
    "GotOcr2ImageProcessorPil": ("internvit300M", {"size": SQUARE, "max_patches": 4, "crop_to_patches": True, **MEANS}),
    "SmolVLMImageProcessorPil": ("siglip", SPLIT),
    "Idefics3ImageProcessorPil": ("siglip", SPLIT),
}


def vision(kind: str) -> VisionConfig:
    return replace(VisionConfig(), vision_model_type=kind, img_h=24, img_w=24)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("size", [(40, 28), (23, 61), (90, 30)])
def test_the_settings_of_a_folder_give_the_pixels_of_its_processor(
    name: str, size: tuple[int, int], tmp_path: Path
) -> None:
    kind, given = PROCESSORS[name]
    processor = getattr(transformers, name)(**given)
    processor.save_pretrained(tmp_path)
    settings = image_settings_of_folder(tmp_path, vision(kind))
    model = replace(tiny.config().model, vision=vision(kind))
    options = ImageOptions.from_config(model, config_from_flat_dict(MultimodalDataConfig, settings))
    found = images.tile_image(images.decode_image(content(picture(*size, "RGBA")), options), options)
    expected = np.asarray(processor(picture(*size, "RGBA"), return_tensors="np")["pixel_values"])
    expected = expected[0] if expected.ndim == 5 else expected
    assert found.shape == expected.shape and np.abs(found - expected).max() < 2e-6


CLIP_FILE: dict[str, Any] = {  # as LLaVA's makers publish it
    "crop_size": 24,
    "do_center_crop": True,
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_mean": list(CLIP.mean),
    "image_std": list(CLIP.std),
    "resample": 3,
    "size": 24,
}


def settings_of(folder: Path, kind: str = "clip", **changes: Any) -> dict[str, Any]:
    (folder / "preprocessor_config.json").write_text(json.dumps({**CLIP_FILE, **changes}))
    return image_settings_of_folder(folder, vision(kind))


def test_older_spellings_are_read(tmp_path: Path) -> None:
    assert settings_of(tmp_path) == {"image_aspect_ratio": "crop"}
    assert settings_of(tmp_path, size=SQUARE, do_center_crop=False) == {"image_aspect_ratio": "square"}
    whole = {"image_processor": {**CLIP_FILE, "do_pad": True}, "processor_class": "LlavaProcessor"}
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    assert image_settings_of_folder(tmp_path, vision("clip")) == {"image_aspect_ratio": "pad"}
    assert image_settings_of_folder(tmp_path / "none", vision("clip")) == {}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"size": {"shortest_edge": 30}}, "size: {'shortest_edge': 30} with crop_size"),
        ({"size": {"longest_edge": 24}}, "size: {'longest_edge': 24}"),
        ({"crop_size": {"height": 24, "width": 20}}, "crop_size"),
        ({"resample": 2}, "resample: 2 has no counterpart"),
        ({"do_normalize": False}, "do_normalize: False is unknown here"),
        ({"do_resize": False}, "do_resize: False"),
        ({"do_convert_rgb": False}, "do_convert_rgb: False"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor: only 1/255"),
        ({"image_mean": list(SIGLIP.mean)}, "image_mean: "),
        ({"image_std": [1, 1]}, "image_std: "),
        ({"image_grid_pinpoints": [[336, 672]]}, "image_grid_pinpoints: "),
        (
            {"feature_extractor_type": "LlavaOnevisionImageProcessor"},
            "'LlavaOnevisionImageProcessor' is not built here",
        ),
        ({"feature_extractor_type": "SmolVLMImageProcessor"}, "no longest_edge of several tiles"),
        ({"feature_extractor_type": "GotOcr2ImageProcessor", "min_patches": 2}, "min_patches: 2"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        settings_of(tmp_path, **changes)
    assert words in str(refused.value), refused.value
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="preprocessor_config.json cannot be read"):
        image_settings_of_folder(tmp_path, vision("clip"))
