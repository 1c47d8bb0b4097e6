"""How a network sees images: the encoder, what becomes of its output, and which parts are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from megatron.core.config.flags.declare import flag
from megatron.core.config.flags.when import When

IMAGES = When("reads_images")
LANGUAGE = When("images_in_text", instead="freeze the encoder with --freeze-ViT")
PROJECTED = (IMAGES, When("images_in_text", idle="noted"))


VisionType = Literal["vit", "clip", "siglip", "internvit", "internvit300M", "dinov2"]


@dataclass(frozen=True, slots=True)
class VisionEncoderTraits:
    """Constants of a type of vision encoder, whatever its size.

    layer: fields of `ModelConfig` that hold for every layer. sizes: those of the published encoder, by field.
    mean, std: of the images that it was trained on, for red, green and blue in [0, 1].
    """

    layer: Mapping[str, Any]
    sizes: Mapping[str, int]
    class_tokens: int = 1
    pre_norm: bool = False
    final_norm: bool = True
    patch_bias: bool = True
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)


def _size_fields(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, int]:
    return {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "ffn_hidden_size": ffn}


_INTERNVIT_6B = {
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "layer_scale": 0.1,
    "qk_layernorm": True,
    "qk_layernorm_across_heads": True,
    "qkv_without_bias": True,
}
TRAITS: Mapping[str, VisionEncoderTraits] = MappingProxyType(
    {
        "vit": VisionEncoderTraits({"norm_epsilon": 1e-5}, _size_fields(12, 768, 12, 3072)),
        "clip": VisionEncoderTraits(
            {"quick_gelu": True, "norm_epsilon": 1e-5},
            _size_fields(24, 1024, 16, 4096),
            pre_norm=True,
            final_norm=False,
            patch_bias=False,
            mean=(0.48145466, 0.4578275, 0.40821073),
            std=(0.26862954, 0.26130258, 0.27577711),
        ),
        "siglip": VisionEncoderTraits(
            {"openai_gelu": True, "norm_epsilon": 1e-6},
            _size_fields(27, 1152, 16, 4304),
            class_tokens=0,
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
        ),
        "internvit": VisionEncoderTraits(_INTERNVIT_6B, _size_fields(45, 3200, 25, 12800), final_norm=False),
        "internvit300M": VisionEncoderTraits(
            {"norm_epsilon": 1e-6, "layer_scale": 0.1}, _size_fields(24, 1024, 16, 4096), final_norm=False
        ),
        "dinov2": VisionEncoderTraits({"norm_epsilon": 1e-6, "layer_scale": 1.0}, _size_fields(12, 384, 6, 1536)),
    }
)
_ACTIVATIONS = {"gelu_tanh": "openai_gelu", "quick_gelu": "quick_gelu"}  # our name -> the field that chooses it


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Images. A vision transformer encodes images, a projector brings its output to the width of the language
    model, and the rows that come out stand in the sequence in the place of image tokens (LLaVA, 2023).
    """

    USED_WITH: ClassVar[When] = IMAGES

    vision_model_type: VisionType | None = flag(
        None,
        "encoder of images: CLIP (ViT-L/14), SigLIP (so400m), InternViT (6B, 300M), DINOv2 (ViT-S/14), or a plain vit; left out: none",
        role="network",
        used_with=When("architecture", ("gpt", "vit")),
    )
    vision_num_layers: int | None = flag(
        None, "layers of the encoder; left out: as published. Fewer give features of an earlier layer", role="network"
    )
    vision_hidden_size: int | None = flag(None, "width of the encoder; left out: as published", role="network")
    vision_ffn_hidden_size: int | None = flag(
        None, "width of the encoder's MLPs; left out: as published", role="network"
    )
    vision_num_attention_heads: int | None = flag(None, "heads of the encoder; left out: as published", role="network")
    vision_activation: Literal["gelu", "gelu_tanh", "quick_gelu"] | None = flag(
        None, "activation of the encoder's MLPs; left out: as published", role="network"
    )
    vision_norm_epsilon: float | None = flag(
        None, "epsilon of the encoder's norms; left out: as published", role="adaptable"
    )
    vision_final_norm: Literal["yes", "no"] | None = flag(
        None,
        "norm of the encoder's output; left out: yes with SigLIP, DINOv2 and vit, no with the others",
        role="network",
    )
    vision_position_grid: int | None = flag(
        None,
        "side of the square of learned positions, which are interpolated to the patches of an image; left out: its patches",
        role="network",
    )
    img_h: int = flag(224, "height of an image, or of a tile of one, in pixels", role="network")
    img_w: int = flag(224, "width of an image, or of a tile of one, in pixels", role="network")
    patch_dim: int = flag(16, "side of a patch in pixels", role="network")
    num_channels: int = flag(3, "channels of an image: 3, or 1 for grey", role="network")
    disable_vision_class_token: bool = flag(
        False,
        "the class token of the encoder gives no row to the language model",
        role="adaptable",
        used_with=PROJECTED,
    )
    pixel_shuffle: bool = flag(
        False,
        "every square of --pixel-shuffle-factor patches becomes one row, side by side",
        role="network",
        used_with=PROJECTED,
    )
    pixel_shuffle_factor: int = flag(
        2,
        "--pixel-shuffle: patches on a side of a square",
        role="network",
        used_with=(*PROJECTED, When("pixel_shuffle", idle="noted")),
    )
    vision_projection_type: Literal["mlp", "affine"] = flag(
        "mlp",
        "projector of the encoder's output: two matrices with a GELU between them, or one",
        role="network",
        used_with=PROJECTED,
    )
    vision_projection_hidden_size: int | None = flag(
        None, "mlp: width between the two matrices; left out: --hidden-size", role="network", used_with=PROJECTED
    )
    vision_projection_bias: bool = flag(True, "the projector has no biases", role="network", used_with=PROJECTED)
    vision_projection_norm: bool = flag(
        False, "norm before the projector (InternVL)", role="network", used_with=PROJECTED
    )
    freeze_LM: bool = flag(False, "the language model is not trained", role="training", used_with=(IMAGES, LANGUAGE))
    freeze_ViT: bool = flag(False, "the encoder of images is not trained", role="training")
    freeze_vision_projection: bool = flag(
        False, "the projector is not trained", role="training", used_with=(IMAGES, LANGUAGE)
    )
    recompute_vision: bool = flag(False, "recomputation covers the encoder of images too", role="free")
    num_classes: int = flag(
        1000,
        "pretrain_vision_classify.py: classes of images; 0: no head",
        role="network",
        used_with=(IMAGES, When("architecture", ("vit",), idle="noted")),
    )
    image_token_index: int | None = flag(
        None,
        "id that stands for a row of an image in prompts and in exported folders; left out: that of <image>, if the tokenizer has it",
        role="free",
    )

    def resolve(self, hidden_size: int | None, *, alone: bool) -> VisionConfig:
        """Fill in settings of the encoder's type. hidden_size: of the language model. alone: there is none."""
        if self.vision_model_type is None and not alone:
            return self
        layer, sizes = self.encoder_traits.layer, self.encoder_traits.sizes
        published = {
            "vision_activation": next((name for name, own in _ACTIVATIONS.items() if layer.get(own)), "gelu"),
            "vision_norm_epsilon": layer["norm_epsilon"],
            "vision_final_norm": "yes" if self.encoder_traits.final_norm else "no",
            "vision_position_grid": self.patch_grid[0] if self.patch_grid[0] == self.patch_grid[1] else None,
        }
        if not alone:
            published |= {f"vision_{name}": size for name, size in sizes.items()}
            published["vision_projection_hidden_size"] = hidden_size
        given: dict[str, Any] = {name: value for name, value in published.items() if getattr(self, name) is None}
        return replace(self, **given)

    @property
    def encoder_layer_fields(self) -> dict[str, Any]:
        """Fields of `ModelConfig`, with values, for the layers of the encoder."""
        layer = {name: value for name, value in self.encoder_traits.layer.items() if name not in _ACTIVATIONS.values()}
        if self.vision_activation in _ACTIVATIONS:
            layer[_ACTIVATIONS[self.vision_activation]] = True
        return {**layer, "norm_epsilon": self.vision_norm_epsilon}

    @property
    def encoder_traits(self) -> VisionEncoderTraits:
        """Constants of the encoder's type."""
        return TRAITS[self.vision_model_type or "vit"]

    @property
    def has_final_norm(self) -> bool:
        """Whether the encoder's output is normed."""
        return self.vision_final_norm == "yes"

    @property
    def patch_grid(self) -> tuple[int, int]:
        """Number of patches of an image as (rows, columns)."""
        size = max(1, self.patch_dim)  # a rule refuses others, after sizes are known
        return self.img_h // size, self.img_w // size

    @property
    def learned_position_grid(self) -> tuple[int, int]:
        """Size of the grid of learned positions as (rows, columns)."""
        side = self.vision_position_grid
        return self.patch_grid if side is None else (side, side)

    @property
    def num_encoder_tokens(self) -> int:
        """Number of tokens of an image in the encoder, class tokens included."""
        return self.patch_grid[0] * self.patch_grid[1] + self.encoder_traits.class_tokens

    @property
    def num_kept_class_tokens(self) -> int:
        """Number of class tokens that are passed on to the language model."""
        dropped = self.disable_vision_class_token or self.pixel_shuffle
        return 0 if dropped else self.encoder_traits.class_tokens

    @property
    def num_image_embeddings(self) -> int:
        """Number of positions that an image (or a tile) takes in the sequence of the language model."""
        factor = self.pixel_shuffle_factor if self.pixel_shuffle else 1
        return (self.patch_grid[0] // factor) * (self.patch_grid[1] // factor) + self.num_kept_class_tokens

    @property
    def frozen_patterns(self) -> tuple[str, ...]:
        """Name patterns of the parameters that the --freeze-... flags of vision exclude from training."""
        names: tuple[str, ...] = ()
        if self.freeze_LM:
            names += ("embedding.*", "decoder.*", "mtp.*", "output_layer.*")
        if self.freeze_ViT:
            names += ("vision_model.*",)
        return (*names, "vision_projection.*") if self.freeze_vision_projection else names
