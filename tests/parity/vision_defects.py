"""Mistakes around images in a language model, for the table of `defects.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.adapters import quantized_base
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.vision import vision_encoder_config
from megatron.core.datasets.samplers import collate
from megatron.core.models import vision
from megatron.core.models.vision import ImageEmbedder, VisionEncoder
from megatron.core.parallel.mesh import Axis
from megatron.training.state import trainer
from megatron.verify.parity import short_run
from tests.parity.defect import Defect, collectives_with

_encode, _forward, _rows, _is_trained = (
    VisionEncoder.forward,
    ImageEmbedder.forward,
    ImageEmbedder.encode_images,
    quantized_base.is_trained_parameter,
)


def _count_from_zero(samples: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    together = collate(samples)
    return {**together, "image_slots": np.stack([sample["image_slots"] for sample in samples])}


def _later(self: ImageEmbedder, hidden: Tensor, images: Tensor, slots: Tensor) -> Tensor:
    return _forward(self, hidden, images, slots.roll(1, dims=1))


def _last_slot_is_text(self: ImageEmbedder, hidden: Tensor, images: Tensor, slots: Tensor) -> Tensor:
    follows = torch.cat((slots[:, 1:], torch.full_like(slots[:, :1], -1)), dim=1)
    return _forward(self, hidden, images, slots.masked_fill((slots >= 0) & (follows < 0), -1))


def _black_image_everywhere(self: ImageEmbedder, hidden: Tensor, images: Tensor, slots: Tensor) -> Tensor:
    if images.shape[0]:
        return _forward(self, hidden, images, slots)
    return hidden + self.encode_images(images.new_zeros((1, *images.shape[1:]))).mean()


def _rows_without_gradient(self: ImageEmbedder, images: Tensor) -> Tensor:
    return _rows(self, images).detach()


def _rows_with_twice_the_gradient(self: ImageEmbedder, images: Tensor) -> Tensor:
    rows = _rows(self, images)
    if rows.requires_grad:
        rows.register_hook(lambda gradient: 2 * gradient)
    return rows


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x


def _with_gelu(model: ModelConfig) -> ModelConfig:
    return replace(vision_encoder_config(model), quick_gelu=False)


def _columns_first(x: Tensor, grid: tuple[int, int], factor: int) -> Tensor:
    rows, columns = grid[0] // factor, grid[1] // factor
    cut = x.view(rows, factor, columns, factor, *x.shape[1:])
    return cut.permute(0, 2, 4, 3, 1, 5).reshape(rows * columns, x.shape[1], -1)


def _the_tower_too(name: str, config: Any) -> bool:
    return name.startswith("vision_model.") or _is_trained(name, config)


def _detached(self: VisionEncoder, images: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
    return _encode(self, images, hidden).detach()


def _freeze_all_but_the_encoder(network: nn.Module, config: Any, mesh: Any) -> None:
    for param in network.parameters():
        name = param.spec.name  # type: ignore[attr-defined]
        param.requires_grad_(_the_tower_too(name, config))


VISION: tuple[Defect, ...] = (
    Defect(
        "images of one sample are given to another of its microbatch",
        (("mb4", "vlm"), ("dp2 zero mb4", "vlm")),
        ((short_run, "collate", _count_from_zero),),
    ),
    Defect(
        "rows of images stand one place later", (("tp2", "vlm"), ("pp2", "vlm")), ((ImageEmbedder, "forward", _later),)
    ),
    Defect(
        "the last slot of an image keeps the embedding of its id",
        (("tp2", "vlm"), ("cp2", "vlm")),
        ((ImageEmbedder, "forward", _last_slot_is_text),),
    ),
    Defect(
        "a rank without images adds what its encoder sees in a black one",
        (("dp2", "vlm"), ("dp2 fsdp", "vlm")),
        ((ImageEmbedder, "forward", _black_image_everywhere),),
    ),
    Defect(
        "with half of the ranks without images, the gradients of the others count twice",
        (("dp2", "vlm"), ("dp2 fsdp", "vlm")),
        ((ImageEmbedder, "encode_images", _rows_with_twice_the_gradient),),
    ),
    Defect(
        "the gradient of rows is that of a rank's piece of the sequence",
        (("tp2 sp", "vlm"), ("tp2 sp pp2", "vlm-tied")),
        ((vision, "collectives", collectives_with(identity_with_reduce_backward=_same)),),
    ),
    Defect(
        "rows of images give no gradient to the projector",
        (("dp2", "vlm"), ("dp2", "vlm-projector")),
        ((ImageEmbedder, "encode_images", _rows_without_gradient),),
    ),
    Defect(
        "CLIP's layers have GELU instead of quick GELU",
        (("tp2", "vlm"), ("pp2", "vlm")),
        ((vision, "vision_encoder_config", _with_gelu),),
    ),
    Defect(
        "pixel shuffle puts columns before rows",
        (("tp2", "vlm-internvit"), ("tp4 sp", "vlm-internvit")),
        ((vision, "pixel_shuffle", _columns_first),),
    ),
    Defect(
        "a frozen encoder is trained",
        (("dp2 fsdp", "vlm-frozen-vit"), ("pp2 zb", "vlm-frozen-vit")),
        ((trainer, "freeze_untrained", _freeze_all_but_the_encoder),),
    ),
    Defect(
        "a frozen encoder without gradient is moved by weight decay",
        (("dp2", "vlm-projector"), ("tp2 sp", "vlm-projector")),
        ((trainer, "freeze_untrained", _freeze_all_but_the_encoder), (VisionEncoder, "forward", _detached)),
    ),
)
