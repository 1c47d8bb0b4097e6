"""Vision transformers (Dosovitskiy et al., 2020), and how a language model takes in what they see (Liu et al., 2023).

    images -> patches -> layers, bidirectional attention -> (norm) -> class token -> head -> scores of classes      VisionModel
                                                                   \\-> projector -> rows                             a GPTModel with images

    ids     A  picture  :  [image] [image] [image]  .          slots   -1 -1 -1  0  1  2  -1
    hidden  e  e        e  row 0   row 1   row 2    e

CLIP, SigLIP, InternViT and DINOv2 are one module; `config/settings/vision.py` says how they differ. An image's tokens are not
divided over sequence or context ranks: each of those encodes the whole image.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.plan import StageSpec, network_layer_plans, partition
from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RecomputeConfig, TrainConfig
from megatron.core.config.vision import is_whole_on_every_rank, vision_encoder
from megatron.core.kernels.mask import MaskSpec
from megatron.core.kernels.reference import accumulation_dtype
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.rng import materialize
from megatron.core.parallel.spec import (
    FusedSegment,
    ParamSpec,
    meta_parameter,
    normal_initializer,
    set_global_names,
    spec_of,
)
from megatron.core.tensor_parallel.linear import ColumnLinear, Linear, RowLinear
from megatron.core.tensor_parallel.overlapped_matmul import OverlappedMatmuls
from megatron.core.transformer.build import BuildContext
from megatron.core.transformer.passing import ForwardContext
from megatron.core.transformer.stack import Stack


class PatchEmbedding(nn.Module):
    """Patches of an image to vectors, with class tokens before them and learned positions; with CLIP normed."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        self.vision, hidden = build.model.vision, build.model.hidden_size
        traits, (height, width) = self.vision.traits, self.vision.position_grid
        self.patches = Linear(
            self.vision.num_channels * self.vision.patch_dim**2,
            hidden,
            init=build.init_method(),
            mesh=build.mesh,
            dtype=build.dtype,
            bias=traits.patch_bias,
        )
        initial = normal_initializer(build.model.init_method_std)
        tokens = ParamSpec((traits.class_tokens, hidden), initial, "table")
        positions = ParamSpec((traits.class_tokens + height * width, hidden), initial, "table")
        self.class_token = meta_parameter(tokens, build.mesh, build.dtype) if traits.class_tokens else None
        self.position_embeddings = meta_parameter(positions, build.mesh, build.dtype)
        self.layernorm = build.norm(hidden) if traits.pre_norm else None

    def forward(self, images: Tensor) -> Tensor:
        """images: [b, channels, height, width], normalized. Returns [class tokens + patches, b, h]."""
        patches = self._to_patches(images.to(self.patches.weight.dtype))
        x = self.patches(patches).transpose(0, 1)
        if self.class_token is not None:
            x = torch.cat((self.class_token[:, None].expand(-1, x.shape[1], -1), x))
        x = x + self._position_embeddings()[:, None]
        return x if self.layernorm is None else self.layernorm(x)

    def _to_patches(self, images: Tensor) -> Tensor:
        """[b, c, height, width] to patches row by row, [b, patches, c * p * p]."""
        size, (rows, columns) = self.vision.patch_dim, self.vision.patch_grid
        cut = images.view(*images.shape[:2], rows, size, columns, size)
        return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def _position_embeddings(self) -> Tensor:
        """The learned positions, interpolated to the patches of an image, [class tokens + patches, h]."""
        table, source, grid = self.position_embeddings, self.vision.position_grid, self.vision.patch_grid
        if source == grid:
            return table
        first, square = table.split((self.vision.traits.class_tokens, source[0] * source[1]))
        plane = square.view(1, *source, -1).permute(0, 3, 1, 2).to(accumulation_dtype(table.dtype))
        resized = F.interpolate(plane, size=grid, mode="bicubic", align_corners=False).to(table.dtype)
        return torch.cat((first, resized[0].flatten(1).t()))


class VisionEncoder(nn.Module):
    """The layers of one pipeline stage of a vision transformer, with the patches before them on the first. build: of a "vit"."""

    def __init__(self, stage: StageSpec, build: BuildContext) -> None:
        super().__init__()
        vision = build.model.vision
        self.embedding = PatchEmbedding(build) if stage.has_embedding else None
        self.encoder = Stack(stage.layers, build, final_norm=stage.has_output and vision.has_final_norm)

    def forward(self, images: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """images: [b, channels, height, width], used by the first stage; hidden: [tokens, b, h], by later ones.

        Returns [tokens, b, h].
        """
        if self.embedding is not None:
            assert images is not None, "the first stage reads images"
            hidden = self.embedding(images)
        assert hidden is not None, "a later stage receives the output of the previous stage"
        return self.encoder(hidden, ForwardContext(MaskSpec(causal=False)))


class VisionProjection(nn.Module):
    """Rows of the encoder's width to rows of the language model's: linear, GELU, linear; or one linear layer (affine)."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        model, vision = build.model, build.model.vision
        encoder = vision_encoder(model)
        inputs, width = projection_sizes(model)
        self.kernels = build.kernels
        normed = replace(build, model=replace(encoder, normalization="LayerNorm", norm_epsilon=1e-5))
        self.layernorm = normed.norm(inputs, sum_over=()) if vision.vision_projection_norm else None
        self.encoder = nn.Module()
        shared: dict[str, Any] = {"mesh": build.mesh, "dtype": build.dtype}
        if vision.vision_projection_type == "affine":
            self.encoder.linear = Linear(
                inputs, model.hidden_size, init=build.init_method(), bias=vision.vision_projection_bias, **shared
            )
            return
        shared |= {"region": build.region, "bias": vision.vision_projection_bias}
        self.encoder.linear_fc1 = ColumnLinear(inputs, (FusedSegment(width),), init=build.init_method(), **shared)
        self.encoder.linear_fc2 = RowLinear(width, model.hidden_size, init=build.init_method(), **shared)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, b, inputs]. Returns [tokens, b, h]."""
        x = x if self.layernorm is None else self.layernorm(x)
        layers = dict(self.encoder.named_children())
        if "linear" in layers:
            return layers["linear"](x)
        bias, fused = layers["linear_fc1"].bias, self.kernels.bias_activation
        if bias is None or fused is None:
            return layers["linear_fc2"](self.kernels.activation(layers["linear_fc1"](x), "gelu"))
        return layers["linear_fc2"](fused(layers["linear_fc1"](x, skip_bias_add=True), bias, "gelu"))


def projection_sizes(model: ModelConfig) -> tuple[int, int]:
    """Width of what enters the projector, and between its two matrices."""
    vision = model.vision
    factor = vision.pixel_shuffle_factor**2 if vision.pixel_shuffle else 1
    return vision_encoder(model).hidden_size * factor, vision.vision_projection_hidden_size or model.hidden_size


def pixel_shuffle(x: Tensor, grid: tuple[int, int], factor: int) -> Tensor:
    """Put squares of factor x factor patches side by side (InternVL's second version of the order).

    x: [patches, b, c], row by row. Returns [patches / factor^2, b, c * factor^2].
    """
    rows, columns = grid[0] // factor, grid[1] // factor
    cut = x.view(rows, factor, columns, factor, *x.shape[1:])
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(rows * columns, x.shape[1], -1)


class IdsWithImages(NamedTuple):
    """The input of a language model that sees: ids, images and slots as `ImageEmbedder` takes them; ids at slots say nothing."""

    ids: Tensor
    images: Tensor
    slots: Tensor


class ImageEmbedder(nn.Module):
    """What the first stage of a language model has for images: the encoder and the projector."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        self.build, self.vision = build, build.model.vision
        encoder = vision_encoder(build.model)
        (stage,) = partition(network_layer_plans(encoder), pp=1)
        whole = is_whole_on_every_rank(build.model, build.mesh.tp.size)
        self.vision_model = VisionEncoder(stage, _encoder_build(build, encoder, whole))
        width = projection_sizes(build.model)[1]
        divides = self.vision.vision_projection_type == "affine" or width % build.mesh.tp.size == 0
        self.vision_projection = VisionProjection(_encoder_build(build, build.model, not divides))
        for module, is_whole in ((self.vision_model, whole), (self.vision_projection, not divides)):
            for param in module.parameters() if is_whole else ():
                param.spec = replace(spec_of(param), shards=(), sum_over=())  # type: ignore[attr-defined]
        # vision_model.* and vision_projection.*, as they are called in an encoder that stands alone
        set_global_names(self)

    def encode_images(self, images: Tensor) -> Tensor:
        """images: [n, channels, height, width]. Returns the rows of all images one after the other, [n * rows, h]."""
        x = self.vision_model(images)[self.vision.traits.class_tokens - self.vision.kept_class_tokens :]
        if self.vision.pixel_shuffle:
            x = pixel_shuffle(x, self.vision.patch_grid, self.vision.pixel_shuffle_factor)
        return self.vision_projection(x).transpose(0, 1).flatten(0, 1)

    def forward(self, hidden: Tensor, images: Tensor, slots: Tensor) -> Tensor:
        """Put rows of images into a sequence.

        hidden: [s or s/tp, b, h], embedded text. images: [n, channels, height, width], or what `encode_images` gave of them, [r, h]; without
        any, a black one is encoded and used nowhere, so that all data ranks do the same work and have the same gradients. slots: [b, s], the row of all images
        that stands at a position, -1 where there is text. Returns the shape of hidden.
        """
        region = self.build.region
        if images.shape[0] == 0:
            images = images.new_zeros((1, *images.shape[1:]))
        rows = images if images.dim() == 2 else self.encode_images(images)
        if region.sequence_parallel:  # each rank puts in the rows of its positions, so the gradient is a sum over ranks
            rows = collectives.identity_then_reduce(rows, region.axis)
        places = region.scatter_to_sequence(slots.t().contiguous())
        chosen = F.embedding(places.clamp(min=0), rows.to(hidden.dtype))
        return torch.where((places >= 0)[..., None], chosen, hidden)


def _encoder_build(build: BuildContext, model: ModelConfig, whole: bool) -> BuildContext:
    """The choices for the encoder or the projector: no sequence or context parallelism; whole: no tensor parallelism either."""
    single: dict[str, Axis] = {
        name: replace(getattr(Mesh.single_process(), name)) for name in ("cp", "cp_inner", "cp_outer")
    }
    if whole:
        single["tp"] = Mesh.single_process().tp
    return replace(
        build,
        model=model,
        mesh=build.mesh.with_axes(single),
        sequence_parallel=False,
        recompute=build.recompute if build.model.vision.recompute_vision else RecomputeConfig(),
        low_precision=LowPrecisionConfig(),
        overlapped=OverlappedMatmuls(),
    )


class VisionModel(nn.Module):
    """One pipeline stage of a vision transformer that classifies images, by its class token or the mean of its patches."""

    def __init__(self, stage: StageSpec, build: BuildContext) -> None:
        super().__init__()
        self.stage, self.build, self.vision = stage, build, build.model.vision
        self.vision_model = VisionEncoder(stage, build)
        hidden = build.model.hidden_size
        self.head = (
            Linear(hidden, self.vision.num_classes, init=build.init_method(), mesh=build.mesh, dtype=build.dtype)
            if stage.has_output and self.vision.num_classes
            else None
        )
        set_global_names(self)

    def materialize(self, seed: int, *, draw_on: torch.device | None = None) -> VisionModel:
        """Allocate the parameters and set their initial values. Returns the model."""
        materialize(self, self.build.mesh, seed, draw_on=draw_on)
        return self

    def input_specs(self, train: TrainConfig) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return shape and dtype of each tensor that a stage receives from the previous one."""
        shape = (self.vision.tokens, train.micro_batch_size, self.build.model.hidden_size)
        return ((shape, self.build.residual_dtype),)

    def forward(self, *, images: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """images: [b, channels, height, width], used by the first stage; hidden: the output of the previous one, [tokens, b, h].

        Returns the input of the next stage; on the last the scores of the classes, [b, classes], or without classes the output
        of all tokens.
        """
        x = self.vision_model(images, hidden)
        if self.head is None:
            return x
        pooled = x[0] if self.vision.traits.class_tokens else x.mean(0)
        return self.head(pooled.to(self.head.weight.dtype))
