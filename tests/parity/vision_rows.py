"""Rows of the table of layouts for language models that read images.

Every other sample has one or two images, so that with two data-parallel ranks one has none, and a microbatch of two has those of one
sample. `vlm-odd` has three heads in its encoder, which no number of tensor ranks here divides.
"""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 48,
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 4,
    "untie_embeddings_and_output_weights": True,
}
_IMAGES: dict[str, Any] = {
    "img_h": 8,
    "img_w": 8,
    "patch_dim": 4,
    "vision_num_layers": 2,
    "vision_hidden_size": 24,
    "vision_ffn_hidden_size": 40,
    "vision_num_attention_heads": 4,
}
_CLIP: dict[str, Any] = {**_LLAMA, **_IMAGES, "vision_model_type": "clip", "vision_projection_hidden_size": 20}
_INTERN: dict[str, Any] = {
    **_IMAGES,
    "vision_model_type": "internvit",
    "pixel_shuffle": True,
    "vision_projection_norm": True,
}

MODELS: dict[str, dict[str, Any]] = {
    "vlm": {**_CLIP, "disable_vision_class_token": True},
    "vlm-tied": {**_IMAGES, "vision_model_type": "siglip", "vision_projection_type": "affine"},
    "vlm-internvit": _INTERN,
    "vlm-dinov2": {**_LLAMA, **_IMAGES, "vision_model_type": "dinov2", "vision_position_grid": 3},
    "vlm-odd": {**_CLIP, "vision_num_attention_heads": 3},
    "vlm-moe": {**_CLIP, "num_experts": 4, "moe_ffn_hidden_size": 24},
    "vlm-packed": {**_CLIP, "reset_position_ids": True, "reset_attention_mask": True},
    "vlm-projector": {**_CLIP, "freeze_LM": True, "freeze_ViT": True},
    "vlm-frozen-vit": {**_CLIP, "freeze_ViT": True},
    "vlm-frozen-lm": {**_CLIP, "freeze_LM": True},
    "vlm-frozen-projector": {**_CLIP, "freeze_vision_projection": True},
    "vlm-mean": {**_CLIP, "calculate_per_token_loss": False},
    "vit": {
        "architecture": "vit",
        "img_h": 8,
        "img_w": 8,
        "patch_dim": 4,
        "num_classes": 5,
        "seq_length": 1,
        "vision_model_type": "dinov2",
    },
}
ROWS: tuple[tuple[str, str], ...] = (
    ("tp2", "vlm"),
    ("tp2 sp", "vlm"),
    ("pp2", "vlm"),
    ("pp3 first-layers1 last-layers1", "vlm"),
    ("cp2", "vlm"),
    ("dp2", "vlm"),
    ("dp2 fsdp", "vlm"),
    ("dp2 zero mb4", "vlm"),
    ("mb4", "vlm"),
    ("tp2 sp cp2 pp2", "vlm"),
    ("tp2 sp recompute-uniform recompute-vision", "vlm"),
    ("tp2 sp pp2", "vlm-tied"),
    ("tp2", "vlm-internvit"),
    ("tp4 sp", "vlm-internvit"),
    ("tp2 sp", "vlm-dinov2"),
    ("tp2", "vlm-odd"),
    ("tp2 sp dp2 zero", "vlm-odd"),
    ("ep2 dp2", "vlm-moe"),
    ("tp2 sp", "vlm-packed"),
    ("cp2", "vlm-packed"),
    ("dp2", "vlm-projector"),
    ("pp2", "vlm-projector"),
    ("tp2 sp", "vlm-projector"),
    ("dp2 fsdp", "vlm-projector"),
    ("dp2 fsdp", "vlm-frozen-vit"),
    ("pp2 zb", "vlm-frozen-vit"),
    ("tp2 sp pp2", "vlm-frozen-lm"),
    ("dp2 zero overlap-reduce overlap-gather bucket200", "vlm-frozen-projector"),
    ("pp2 zb", "vlm"),
    ("dp2", "vlm-mean"),
    ("tp2", "vit"),
    ("pp2", "vit"),
    ("dp2 zero mb2", "vit"),
    ("dp2 fsdp", "vit"),
)
WORDS: dict[str, dict[str, Any]] = {"recompute-vision": {"recompute_vision": True}}
