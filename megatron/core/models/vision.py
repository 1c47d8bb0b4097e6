"""Vision transformers (Dosovitskiy et al., 2020), and how a language model takes in what they see (Liu et al., 2023).

    images -> patches -> layers, bidirectional attention -> (norm) -> class token -> head -> scores of classes      ImageClassifierModel
                                                                   \\-> projector -> rows                             a VisionLanguageModel

    ids     A  picture  :  [image] [image] [image]  .          slots   -1 -1 -1  0  1  2  -1
    hidden  e  e        e  row 0   row 1   row 2    e

CLIP, SigLIP, InternViT and DINOv2 are one module; `config/settings/vision.py` says how they differ. An image's tokens are not
divided over sequence or context ranks: each of those encodes the whole image.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.plan.layers import LayerPlan, StageSpec, network_layer_plans, partition_into_stages
from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RecomputeConfig, TrainConfig
from megatron.core.config.vision import is_encoder_replicated, vision_encoder_config
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.kernels.ops.reference import accumulation_dtype_of
from megatron.core.models.stage_model import StageModel
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import (
    FusedWeightSegment,
    ParamSpec,
    constant_initializer,
    meta_parameter,
    normal_initializer,
    param_spec_of,
    set_global_param_names,
)
from megatron.core.tensor_parallel.overlapped_matmul import MatmulOverlapOptions
from megatron.core.transformer.blocks import PreNorm, make_layer
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.stack import TransformerStack


class PatchEmbedding(nn.Module):
    """Embed image patches, with class tokens before them, learned positions, and for some encoders (CLIP) a norm."""

    def __init__(self, build: LayerBuildContext) -> None:
        super().__init__()
        self.vision, hidden = build.model.vision, build.model.hidden_size
        traits, (height, width) = self.vision.encoder_traits, self.vision.learned_position_grid
        self.patches = build.make_replicated_linear(
            self.vision.num_channels * self.vision.patch_dim**2, hidden, bias=traits.patch_bias
        )
        initial = normal_initializer(build.model.init_method_std)
        tokens = ParamSpec((traits.class_tokens, hidden), initial, "table")
        positions = ParamSpec((traits.class_tokens + height * width, hidden), initial, "table")
        self.class_token = meta_parameter(tokens, build.mesh, build.dtype) if traits.class_tokens else None
        self.position_embeddings = meta_parameter(positions, build.mesh, build.dtype)
        self.layernorm = build.make_norm(hidden) if traits.pre_norm else None

    def forward(self, images: Tensor) -> Tensor:
        """Embed images [b, channels, height, width], normalized. Returns [class tokens + patches, b, h]."""
        patches = self._flatten_patches(images.to(self.patches.weight.dtype))
        x = self.patches(patches).transpose(0, 1)
        if self.class_token is not None:
            x = torch.cat((self.class_token[:, None].expand(-1, x.shape[1], -1), x))
        x = x + self._resized_position_embeddings()[:, None]
        return x if self.layernorm is None else self.layernorm(x)

    def _flatten_patches(self, images: Tensor) -> Tensor:
        """Cut images [b, c, height, width] into patches of p x p pixels, row by row: [b, patches, c * p * p]."""
        size, (rows, columns) = self.vision.patch_dim, self.vision.patch_grid
        cut = images.view(*images.shape[:2], rows, size, columns, size)
        return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def _resized_position_embeddings(self) -> Tensor:
        """Return the learned positions, resized (bicubic) to the images' grid of patches, [class tokens + patches, h]."""
        table, source, grid = self.position_embeddings, self.vision.learned_position_grid, self.vision.patch_grid
        if source == grid:
            return table
        first, square = table.split((self.vision.encoder_traits.class_tokens, source[0] * source[1]))
        plane = square.view(1, *source, -1).permute(0, 3, 1, 2).to(accumulation_dtype_of(table.dtype))
        resized = F.interpolate(plane, size=grid, mode="bicubic", align_corners=False).to(table.dtype)
        return torch.cat((first, resized[0].flatten(1).t()))


class LayerScale(nn.Module):
    """x times a learned factor for each channel of the residual stream (Touvron et al., 2021). initial: of all factors."""

    def __init__(self, build: LayerBuildContext, initial: float) -> None:
        super().__init__()
        size, axes = build.model.hidden_size, build.tp_region.gradient_sum_axes
        spec = ParamSpec((size,), constant_initializer(initial), "vector", sum_over=axes)
        self.weight = meta_parameter(spec, build.mesh, build.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the learned factor of each channel. x: [s or s/tp, b, h]."""
        return x * self.weight


class ScaledPreNorm(PreNorm):
    """x + scale * attention(norm(x)), then x + scale * mlp(norm(x)), each with a scale of its own: InternViT, DINOv2."""

    def __init__(self, plan: LayerPlan, build: LayerBuildContext) -> None:
        super().__init__(plan, build)
        assert build.model.layer_scale is not None, "an encoder without scales has plain layers"
        self.attention_scale = LayerScale(self.build, build.model.layer_scale)
        self.mlp_scale = LayerScale(self.build, build.model.layer_scale)

    def attention_block(self, x: Tensor, context: ForwardContext, bias: Tensor | None = None) -> Tensor:
        """Return x + scale * attention(norm(x)). See `Block.forward`."""
        return x + self.dropout(self.attention_scale(self.token_mixer(self.input_layernorm(x), context, bias)))

    def mlp_block(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return x + scale * mlp(norm(x)). x: [s or s/tp, b, h]."""
        return x + self.dropout(self.mlp_scale(self.mlp(self.pre_mlp_layernorm(x), context)))


class VisionEncoder(nn.Module):
    """One stage of a headless vision transformer: patch embedding (first stage), layers. build: of a "vit"."""

    def __init__(self, stage: StageSpec, build: LayerBuildContext) -> None:
        super().__init__()
        vision = build.model.vision
        self.embedding = PatchEmbedding(build) if stage.has_embedding else None
        self.encoder = TransformerStack(
            stage.layers,
            build,
            final_norm=stage.has_output and vision.has_final_norm,
            make_layer=make_layer if build.model.layer_scale is None else ScaledPreNorm,
        )

    def forward(self, images: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """Return states [tokens, b, h] of images [b, channels, height, width] (first stage), or of hidden states."""
        if self.embedding is not None:
            assert images is not None, "the first stage reads images"
            hidden = self.embedding(images)
        assert hidden is not None, "a later stage receives the output of the previous stage"
        return self.encoder(hidden, ForwardContext(AttentionMaskSpec(causal=False)))


class VisionProjection(nn.Module):
    """Projector from the encoder's width to the language model's: linear, GELU, linear; or one linear (affine)."""

    def __init__(self, build: LayerBuildContext) -> None:
        super().__init__()
        model, vision = build.model, build.model.vision
        encoder = vision_encoder_config(model)
        inputs, width = vision_projection_widths(model)
        self.kernels = build.kernels
        normed = replace(build, model=replace(encoder, normalization="LayerNorm", norm_epsilon=1e-5))
        self.layernorm = normed.make_norm(inputs, sum_over=()) if vision.vision_projection_norm else None
        self.encoder = nn.Module()
        bias = vision.vision_projection_bias
        if vision.vision_projection_type == "affine":
            self.encoder.linear = build.make_replicated_linear(inputs, model.hidden_size, bias=bias)
            return
        self.encoder.linear_fc1 = build.make_column_linear(inputs, (FusedWeightSegment(width),), bias=bias)
        self.encoder.linear_fc2 = build.make_row_linear(width, bias=bias, init=build.init_method())

    def forward(self, x: Tensor) -> Tensor:
        """Project x [tokens, b, inputs] to [tokens, b, h]."""
        x = x if self.layernorm is None else self.layernorm(x)
        layers = dict(self.encoder.named_children())
        if "linear" in layers:
            return layers["linear"](x)
        bias, fused = layers["linear_fc1"].bias, self.kernels.bias_activation
        if bias is None or fused is None:
            return layers["linear_fc2"](self.kernels.activation(layers["linear_fc1"](x), "gelu"))
        return layers["linear_fc2"](fused(layers["linear_fc1"](x, skip_bias_add=True), bias, "gelu"))


def vision_projection_widths(model: ModelConfig) -> tuple[int, int]:
    """Return the projector's input width (after pixel shuffle), and the width between its two matrices."""
    vision = model.vision
    factor = vision.pixel_shuffle_factor**2 if vision.pixel_shuffle else 1
    return vision_encoder_config(model).hidden_size * factor, vision.vision_projection_hidden_size or model.hidden_size


def pixel_shuffle(x: Tensor, grid: tuple[int, int], factor: int) -> Tensor:
    """Concatenate the channels of each square of factor x factor patches (InternVL's second version of the order).

    x: [patches, b, c], row by row; grid: (rows, columns). Returns [patches / factor^2, b, c * factor^2].
    """
    rows, columns = grid[0] // factor, grid[1] // factor
    cut = x.view(rows, factor, columns, factor, *x.shape[1:])
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(rows * columns, x.shape[1], -1)


class ImageEmbedder(nn.Module):
    """The vision encoder and projector on the first stage of a language model."""

    def __init__(self, build: LayerBuildContext) -> None:
        super().__init__()
        self.build, self.vision = build, build.model.vision
        encoder = vision_encoder_config(build.model)
        (stage,) = partition_into_stages(network_layer_plans(encoder), pp=1)
        whole = is_encoder_replicated(build.model, build.mesh.tp.size)
        self.vision_model = VisionEncoder(stage, _vision_build_context(build, encoder, whole))
        width = vision_projection_widths(build.model)[1]
        divides = self.vision.vision_projection_type == "affine" or width % build.mesh.tp.size == 0
        self.vision_projection = VisionProjection(_vision_build_context(build, build.model, not divides))
        for module, is_whole in ((self.vision_model, whole), (self.vision_projection, not divides)):
            for param in module.parameters() if is_whole else ():
                param.spec = replace(param_spec_of(param), shards=(), sum_over=())  # type: ignore[attr-defined]
        # vision_model.* and vision_projection.*, as they are called in an encoder that stands alone
        set_global_param_names(self)

    def encode_images(self, images: Tensor) -> Tensor:
        """Encode and project images [n, channels, height, width]; return all embeddings in order, [n * rows, h]."""
        x = self.vision_model(images)[self.vision.encoder_traits.class_tokens - self.vision.num_kept_class_tokens :]
        if self.vision.pixel_shuffle:
            x = pixel_shuffle(x, self.vision.patch_grid, self.vision.pixel_shuffle_factor)
        return self.vision_projection(x).transpose(0, 1).flatten(0, 1)

    def forward(self, hidden: Tensor, images: Tensor, slots: Tensor) -> Tensor:
        """Replace the hidden states at positions of images by image embeddings; return the shape of hidden.

        hidden: [s or s/tp, b, h], embedded text. images: [n, channels, height, width], or embeddings from
        `encode_images`, [r, h]; with n = 0 a black image is encoded and not used, so that all data ranks do the same
        work and have the same gradients. slots: [b, s], index of the image embedding at each position, -1 for text.
        """
        region = self.build.tp_region
        if images.shape[0] == 0:
            images = images.new_zeros((1, *images.shape[1:]))
        rows = images if images.dim() == 2 else self.encode_images(images)
        if region.sequence_parallel:  # each rank puts in the rows of its positions, so the gradient is a sum over ranks
            rows = collectives.identity_with_reduce_backward(rows, region.axis)
        places = region.scatter_to_sequence(slots.t().contiguous())
        chosen = F.embedding(places.clamp(min=0), rows.to(hidden.dtype))
        return torch.where((places >= 0)[..., None], chosen, hidden)


def _vision_build_context(build: LayerBuildContext, model: ModelConfig, whole: bool) -> LayerBuildContext:
    """Return the build context without sequence and context parallelism; whole: without tensor parallelism too."""
    alone = Mesh.single_process()
    single = {name: alone.axis(name) for name in ("cp", "cp_inner", "cp_outer", *(("tp",) if whole else ()))}
    return replace(
        build,
        model=model,
        mesh=build.mesh.with_axes(single),
        sequence_parallel=False,
        recompute=build.recompute if build.model.vision.recompute_vision else RecomputeConfig(),
        low_precision=LowPrecisionConfig(),
        overlapped=MatmulOverlapOptions(),
    )


class ImageClassifierModel(StageModel):
    """One pipeline stage of a vision transformer that classifies images, by its class token or the mean of its patches.

    Without classes the last stage returns the states of all tokens.
    """

    def __init__(self, stage: StageSpec, build: LayerBuildContext) -> None:
        super().__init__()
        self.stage, self.build, self.vision = stage, build, build.model.vision
        self.vision_model = VisionEncoder(stage, build)
        hidden = build.model.hidden_size
        has_head = stage.has_output and self.vision.num_classes
        self.head = build.make_replicated_linear(hidden, self.vision.num_classes) if has_head else None
        set_global_param_names(self)

    def received_tensor_specs(self, train: TrainConfig) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return (shape, dtype) of each tensor that a pipeline stage receives from the previous one."""
        shape = (self.vision.num_encoder_tokens, train.micro_batch_size, self.build.model.hidden_size)
        return ((shape, self.build.residual_dtype),)

    def forward(self, *, images: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """Run this stage.

        images: [b, channels, height, width], used by the first stage; hidden: the output of the previous one, [tokens,
        b, h]. Returns the input of the next stage; on the last, class scores [b, classes], or without classes all
        states [tokens, b, h].
        """
        x = self.vision_model(images, hidden)
        if self.head is None:
            return x
        pooled = x[0] if self.vision.encoder_traits.class_tokens else x.mean(0)
        return self.head(pooled.to(self.head.weight.dtype))
