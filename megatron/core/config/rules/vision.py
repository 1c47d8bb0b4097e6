"""Rules about images: encoders, projectors, tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.core.config.flags.declare import flag_name
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule, divisors_text
from megatron.core.config.settings.vision import VisionConfig


def _reads_images(s: ConfigRuleInput) -> bool:
    return s.run.model.has_vision or s.run.model.architecture.classifies_images


@config_rule("image-sizes", needs_sizes=True)
def _image_size_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Images are cut into whole patches, and the encoder's width into whole heads."""
    if not _reads_images(s):
        return
    vision = s.run.model.vision
    yield from (bad_sizes := list(_image_side_problems(vision)))
    factor = vision.pixel_shuffle_factor
    if not bad_sizes and vision.pixel_shuffle and (factor < 1 or any(side % factor for side in vision.patch_grid)):
        rows, columns = vision.patch_grid
        yield (
            f"--pixel-shuffle-factor {factor} does not divide the {rows} x {columns} patches of an image; choose a number "
            "that does, or another --img-h and --img-w"
        )
    if s.run.model.has_vision:
        hidden, heads = vision.vision_hidden_size or 0, vision.vision_num_attention_heads or 0
        if heads < 1 or hidden % heads:
            yield (
                f"--vision-num-attention-heads {heads} does not divide --vision-hidden-size {hidden}; choose one of "
                f"{divisors_text(hidden)}"
            )
        if (vision.vision_num_layers or 0) < 1:
            yield f"--vision-num-layers {vision.vision_num_layers} is not a positive number"


def _image_side_problems(vision: VisionConfig) -> Iterator[str]:
    """Yield problems of the height, width and number of channels of images."""
    for name, size in (("--img-h", vision.img_h), ("--img-w", vision.img_w)):
        if vision.patch_dim < 1 or size < 1 or size % vision.patch_dim:
            yield (
                f"{name} {size} is not a multiple of --patch-dim {vision.patch_dim}; choose "
                f"{max(1, size // max(1, vision.patch_dim)) * max(1, vision.patch_dim)}"
            )
    if vision.num_channels not in (1, 3):
        yield f"--num-channels {vision.num_channels}: images have 3 channels, or 1 if they are grey"


@config_rule("images-in-text", needs_sizes=True)
def _image_sequence_problems(s: ConfigRuleInput) -> Iterator[str]:
    """A sequence has room for an image and an answer."""
    model = s.run.model
    if not model.has_vision:
        return
    if model.vision.patch_dim > 0 and model.vision.num_image_embeddings >= s.run.train.seq_length:
        yield (
            f"an image takes {model.vision.num_image_embeddings} places of --seq-length {s.run.train.seq_length}, and no text has room; give a "
            "longer one, --pixel-shuffle, or smaller images"
        )
    if model.mtp.mtp_num_layers:
        yield "--mtp-num-layers predicts tokens from tokens, which images are not; leave it out"
    if s.run.parallel.hybrid_context_parallel:
        yield "--hybrid-context-parallel regroups texts without their images; leave it out"
    if model.vision.vision_projection_type == "affine" and (
        model.vision.vision_projection_hidden_size != model.hidden_size
    ):
        yield "--vision-projection-hidden-size is the width between two matrices; affine has one, so leave it out"


@config_rule("image-tiles", needs_sizes=True)
def _tile_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Tiles are as their tags need them, and limits of images leave some in."""
    data = s.run.data.multimodal
    if not _reads_images(s):
        return
    if data.max_num_tiles < 1:
        yield f"--max-num-tiles {data.max_num_tiles} is not a positive number"
    if data.use_tiling and data.image_aspect_ratio != "square":
        yield (
            f"--use-tiling stretches an image to its tiles, and --image-aspect-ratio {data.image_aspect_ratio} does not "
            "stretch it; keep one"
        )
    yield from _smolvlm_tile_problems(s) if data.cuts_as_smolvlm else []
    for name, value in (("max_image_pixels", data.max_image_pixels), ("max_image_bytes", data.max_image_bytes)):
        if value < 1:
            yield f"{flag_name(name)} {value} leaves every image out; give a positive number"


def _smolvlm_tile_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Yield problems of cutting images as SmolVLM does: a square number of tiles, square tiles, a thumbnail."""
    data, vision = s.run.data.multimodal, s.run.model.vision
    side = math.isqrt(max(1, data.max_num_tiles))
    if side < 2 or side * side != data.max_num_tiles:
        yield (
            f"--image-tag-type smolvlm with --max-num-tiles {data.max_num_tiles}: SmolVLM cuts the longer side of every image into a "
            "fixed number of tiles, and --max-num-tiles is its square; choose 4, 9 or 16 (as published)"
        )
    if vision.img_h != vision.img_w:
        yield f"--img-h {vision.img_h} --img-w {vision.img_w}: SmolVLM's tiles are squares; make them equal"
    if not data.use_thumbnail:
        yield "--image-tag-type smolvlm: the whole image follows the tiles; add --use-thumbnail"
    if data.use_tile_tags:
        yield "--use-tile-tags: SmolVLM's tiles have tags of their own; leave it out"


@config_rule("image-classifier", needs_sizes=True)
def _image_classifier_problems(s: ConfigRuleInput) -> Iterator[str]:
    """An image classifier keeps each image whole on every rank."""
    if s.run.model.architecture.classifies_images and s.run.parallel.sequence_parallel:
        yield "--sequence-parallel cuts texts; an image's tokens are whole on every rank, so leave it out"
