"""Encoders of images in Hugging Face folders: CLIP, SigLIP, InternViT, DINOv2 and ViT, by themselves.

Each is read as a `vit` of ours (`pretrain_vision_classify.py`, `tools/checkpoint/convert.py`). The names of a type's parameters
are one row of `NAMES`, which families of language models that see use too (`llava.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.config_json import TANH_GELU, preserved_keys
from megatron.core.families.parameter_mapping import (
    BIASED,
    Family,
    HFModelClass,
    ParameterMapping,
    ReversibleTensorConversion,
    concat_conversion,
    module_mappings,
    same,
)

_GELU = {"gelu": "gelu", "quick_gelu": "quick_gelu", **dict.fromkeys(TANH_GELU, "gelu_tanh")}


@dataclass(frozen=True, slots=True)
class VisionEncoderParameterNames:
    """Names of the parameters in the files of a type of vision encoder.

    layer: prefix of those of a layer; scales: of LayerScale, full names within the layer.
    """

    class_token: str
    positions: str
    patches: str
    layer: str
    qkv: tuple[str, ...]
    proj: str
    norms: tuple[str, str]
    mlp: tuple[str, str]
    final_norm: str
    pre_norm: str = ""
    scales: tuple[str, str] | None = None
    qk_norms: tuple[str, str] | None = None


_CLIP = VisionEncoderParameterNames(
    class_token="embeddings.class_embedding",
    positions="embeddings.position_embedding.weight",
    patches="embeddings.patch_embedding",
    layer="encoder.layers.{i}.",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    proj="self_attn.out_proj",
    norms=("layer_norm1", "layer_norm2"),
    mlp=("mlp.fc1", "mlp.fc2"),
    final_norm="post_layernorm",
    pre_norm="pre_layrnorm",
)
_INTERNVIT = VisionEncoderParameterNames(
    class_token="embeddings.cls_token",
    positions="embeddings.position_embeddings",
    patches="embeddings.patch_embeddings.projection",
    layer="encoder.layer.{i}.",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    proj="attention.projection_layer",
    norms=("layernorm_before", "layernorm_after"),
    mlp=("mlp.fc1", "mlp.fc2"),
    final_norm="layernorm",
    scales=("lambda_1", "lambda_2"),
    qk_norms=("attention.q_norm", "attention.k_norm"),
)
_DINOV2 = VisionEncoderParameterNames(
    class_token="embeddings.cls_token",
    positions="embeddings.position_embeddings",
    patches="embeddings.patch_embeddings.projection",
    layer="encoder.layer.{i}.",
    qkv=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    proj="attention.output.dense",
    norms=("norm1", "norm2"),
    mlp=("mlp.fc1", "mlp.fc2"),
    final_norm="layernorm",
    scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
)
_VIT = replace(_DINOV2, norms=_INTERNVIT.norms, mlp=("intermediate.dense", "output.dense"), scales=None)
NAMES: Mapping[str, VisionEncoderParameterNames] = MappingProxyType(
    {
        "vit": _VIT,
        "clip": _CLIP,
        "siglip": _CLIP,
        "internvit": _INTERNVIT,
        "internvit300M": _INTERNVIT,
        "dinov2": _DINOV2,
    }
)


def reshape_conversion(*shape: int, flat: bool = False) -> ReversibleTensorConversion:
    """Return the conversion of this shape to two axes: all but the last as one, or with `flat` all but the first."""

    def to_our_tensor(parts: Any) -> Any:
        whole = parts[0]
        return whole.flatten(1) if flat else whole.reshape(-1, whole.shape[-1])

    return ReversibleTensorConversion(to_our_tensor, lambda whole: (whole.reshape(shape),))


def vision_encoder_mappings(model: ModelConfig, theirs: str) -> list[ParameterMapping]:
    """Return all mappings of a vision encoder. model: of the encoder, a "vit". theirs: prefix of their names."""
    vision, hidden = model.vision, model.hidden_size
    names, traits = NAMES[vision.vision_model_type or "vit"], vision.encoder_traits
    table = names.positions.endswith(".weight")
    grid, size = vision.learned_position_grid, vision.patch_dim
    positions = grid[0] * grid[1] + traits.class_tokens
    ours, rows = "vision_model.", list[ParameterMapping]()
    if traits.class_tokens:
        op = reshape_conversion(hidden) if table else reshape_conversion(1, traits.class_tokens, hidden)
        rows.append(ParameterMapping(f"{ours}embedding.class_token", (f"{theirs}{names.class_token}",), op))
    op = same if table else reshape_conversion(1, positions, hidden)
    rows.append(ParameterMapping(f"{ours}embedding.position_embeddings", (f"{theirs}{names.positions}",), op))
    op = reshape_conversion(hidden, vision.num_channels, size, size, flat=True)
    rows.append(ParameterMapping(f"{ours}embedding.patches.weight", (f"{theirs}{names.patches}.weight",), op))
    if traits.patch_bias:
        rows.append(ParameterMapping(f"{ours}embedding.patches.bias", (f"{theirs}{names.patches}.bias",), same))
    if traits.pre_norm:
        rows += module_mappings(f"{ours}embedding.layernorm", f"{theirs}{names.pre_norm}", kinds=BIASED)
    for index in range(model.num_layers):
        layer = theirs + names.layer.replace("{i}", str(index))
        rows += _vision_layer_mappings(model, names, f"{ours}encoder.layers.{index}.", layer)
    if vision.has_final_norm:
        rows += module_mappings(
            f"{ours}encoder.final_layernorm", f"{theirs}{names.final_norm}", kinds=_norm_parameter_kinds(model)
        )
    return rows


def _vision_layer_mappings(
    model: ModelConfig, names: VisionEncoderParameterNames, ours: str, theirs: str
) -> list[ParameterMapping]:
    size, norm_kinds = model.query_projection_width, _norm_parameter_kinds(model)
    heads, qkv_kinds = [f"{theirs}{part}" for part in names.qkv], ("weight",) if model.qkv_without_bias else BIASED
    rows = module_mappings(f"{ours}input_layernorm", f"{theirs}{names.norms[0]}", kinds=norm_kinds)
    rows += module_mappings(
        f"{ours}self_attention.linear_qkv", *heads, op=concat_conversion(size, size, size), kinds=qkv_kinds
    )
    if model.qk_layernorm and names.qk_norms is not None:
        for part, name in zip("qk", names.qk_norms, strict=True):
            rows += module_mappings(f"{ours}self_attention.{part}_layernorm", f"{theirs}{name}")
    rows += module_mappings(f"{ours}self_attention.linear_proj", f"{theirs}{names.proj}", kinds=BIASED)
    rows += module_mappings(f"{ours}pre_mlp_layernorm", f"{theirs}{names.norms[1]}", kinds=norm_kinds)
    rows += module_mappings(f"{ours}mlp.linear_fc1", f"{theirs}{names.mlp[0]}", kinds=BIASED)
    rows += module_mappings(f"{ours}mlp.linear_fc2", f"{theirs}{names.mlp[1]}", kinds=BIASED)
    if names.scales is not None:
        for part, name in zip(("attention_scale", "mlp_scale"), names.scales, strict=True):
            rows.append(ParameterMapping(f"{ours}{part}.weight", (f"{theirs}{name}",), same))
    return rows


def _norm_parameter_kinds(model: ModelConfig) -> tuple[str, ...]:
    return BIASED if model.normalization == "LayerNorm" else ("weight",)


def read_vision_encoder_config(keys: ForeignMapping, kind: str) -> dict[str, Any]:
    """Read the settings of a vision encoder of a type: sizes by the names of a "vit", and fields of `VisionConfig`."""
    hidden, patch = keys.positive_int("hidden_size"), _read_square_side(keys, "patch_size")
    image, heads = _read_square_side(keys, "image_size"), keys.positive_int("num_attention_heads")
    usual = {"clip": "quick_gelu", "siglip": "gelu_pytorch_tanh"}.get(kind, "gelu")
    activation = keys.one_of("hidden_act", tuple(_GELU), usual)
    for name in sorted({name for names in _DROPOUTS.values() for name in names}):
        keys.one_of(name, (0, 0.0), 0.0)
    for name, value in _PINNED.get(kind, {}).items():
        keys.one_of(name, (value,), _USUAL.get(name, value))
    keys.ignore_keys(*_SAYS_NOTHING)
    if kind == "dinov2":
        ffn = int(hidden * keys.non_negative_float("mlp_ratio", 4.0))
    else:
        ffn = keys.positive_int("intermediate_size")
    epsilon = {"clip": 1e-5, "vit": 1e-12}.get(kind, 1e-6)
    return {
        "num_layers": keys.positive_int("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "vision_model_type": kind,
        "vision_activation": _GELU.get(activation, "gelu"),
        "vision_norm_epsilon": keys.non_negative_float("layer_norm_eps", epsilon),
        "vision_position_grid": image // patch,
        "img_h": image,
        "img_w": image,
        "patch_dim": patch,
        "num_channels": keys.positive_int("num_channels", 3),
    }


# Keys with the one value that is computed here, by type of encoder; what holds where some are left out; and dropouts.
_PINNED: Mapping[str, Mapping[str, Any]] = {
    "vit": {"qkv_bias": True},
    "dinov2": {"qkv_bias": True, "use_swiglu_ffn": False},
    **{
        kind: {
            "attention_bias": kind == "internvit300M",
            "norm_type": norm,
            "use_qk_norm": kind == "internvit",
            "use_mean_pooling": True,
            "use_absolute_position_embeddings": True,
        }
        for kind, norm in (("internvit", "rms_norm"), ("internvit300M", "layer_norm"))
    },
}
_USUAL = {"attention_bias": False, "norm_type": "layer_norm", "use_qk_norm": False}
_INTERNVIT_DROPOUTS = ("hidden_dropout_prob", "projection_dropout", "attention_dropout")
_DROPOUTS = {
    "vit": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "dinov2": ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate"),
    "clip": ("attention_dropout",),
    "siglip": ("attention_dropout",),
    "internvit": _INTERNVIT_DROPOUTS,
    "internvit300M": _INTERNVIT_DROPOUTS,
}
_SAYS_NOTHING = tuple(
    """
    initializer_range initializer_factor projection_dim vocab_size vision_use_head apply_layernorm out_features
    out_indices reshape_hidden_states stage_names use_mask_token layerscale_value layer_scale_init_value encoder_stride
    pooler_act pooler_output_size logit_scale_init_value dropout is_causal
    """.split()
)


def _read_square_side(keys: ForeignMapping, name: str) -> int:
    """Take a side in pixels: a number, or two equal ones."""
    value = keys.pop_or_none(name)
    if isinstance(value, (list, tuple)) and len(set(value)) == 1:
        value = value[0]
    return (
        ForeignMapping({name: value}).positive_int(name)
        if isinstance(value, int) and value > 0
        else keys.positive_int(name)
    )


def vision_encoder_config_json(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a vision encoder, without `architectures`. model: a "vit". like: an earlier one."""
    vision = model.vision
    kind = vision.vision_model_type or "vit"
    size, patch = vision.learned_position_grid[0] * vision.patch_dim, vision.patch_dim
    pairs = isinstance(like.get("image_size"), list) or kind.startswith("internvit")
    activation = {"gelu_tanh": "gelu_pytorch_tanh"}.get(model.activation_name, model.activation_name)
    config = {
        **preserved_keys(like, *_SAYS_NOTHING),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "hidden_act": activation,
        "layer_norm_eps": model.norm_epsilon,
        "image_size": [size, size] if pairs else size,
        "patch_size": [patch, patch] if pairs else patch,
        "num_channels": vision.num_channels,
        "model_type": MODEL_TYPES[kind],
        **_PINNED.get(kind, {}),
        **dict.fromkeys(_DROPOUTS[kind], 0.0),
    }
    ratio = model.ffn_hidden_size / model.hidden_size
    if kind == "dinov2":
        return config | {"mlp_ratio": int(ratio) if ratio.is_integer() else ratio}
    if kind == "siglip":  # the pooling head is not kept
        config["vision_use_head"] = False
    return config | {"intermediate_size": model.ffn_hidden_size}


MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "vit": "vit",
        "clip": "clip_vision_model",
        "siglip": "siglip_vision_model",
        "internvit": "internvl_vision",
        "internvit300M": "internvl_vision",
        "dinov2": "dinov2",
    }
)


def vision_encoder_type_of(config: Mapping[str, Any]) -> str | None:
    """Return the type of vision encoder that a config.json describes, by its model_type; None if it is not known here."""
    if config.get("model_type") == "internvl_vision":
        return "internvit" if config.get("use_qk_norm") else "internvit300M"
    within = {
        "clip": "clip",
        "siglip": "siglip",
        "smolvlm_vision": "siglip",
        **dict.fromkeys(("idefics3", "idefics3_vision"), "siglip"),
    }
    return {**within, **{there: kind for kind, there in MODEL_TYPES.items()}}.get(str(config.get("model_type")))


def _read_standalone_vision_config(keys: ForeignMapping, *, kind: str) -> dict[str, Any]:
    """Read our settings of a vision encoder by itself. kind: its type, unless its model_type says another."""
    kind = vision_encoder_type_of({"model_type": MODEL_TYPES[kind], **keys.mapping}) or kind
    settings = {**read_vision_encoder_config(keys, kind), "architecture": "vit", "true_vocab_size": 1}
    settings |= {"vision_final_norm": "no" if kind.startswith("internvit") else "yes"}
    settings |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    labels = keys.mapping.get("id2label")
    classes = len(labels) if isinstance(labels, Mapping) and labels else 2
    settings["num_classes"] = classes if kind == "vit" else 0
    return settings


def _write_standalone_vision_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of an encoder by itself, with a label for each of its classes. like: an earlier one."""
    config = vision_encoder_config_json(model, like)
    classes = model.vision.num_classes
    if model.vision.vision_model_type in (None, "vit") and len(config.get("id2label") or ()) != classes:
        config["id2label"] = {str(index): f"LABEL_{index}" for index in range(classes)}
        config["label2id"] = {f"LABEL_{index}": index for index in range(classes)}
    return config


def _standalone_encoder_mappings(model: ModelConfig, *, base: str) -> tuple[ParameterMapping, ...]:
    head = module_mappings("head", "classifier", kinds=BIASED)
    kind = model.vision.vision_model_type or "vit"
    return (*vision_encoder_mappings(model, base), *(head if kind == "vit" and model.vision.num_classes else ()))


_SKIPPED = (
    r"(vision_model\.)?embeddings\.position_ids|(vision_model\.|vit\.|dinov2\.)?(head|pooler)\..*|text_model\..*|"
    r"(text|visual)_projection\..*|logit_scale|logit_bias|(dinov2\.|vision_tower\.)?embeddings\.mask_token"
)


def _vision_encoder_family(name: str, kind: str, base: str, *architectures: str, bare: bool = True) -> Family:
    first, *others = architectures
    variants = (HFModelClass(first, ("head.",) if kind == "vit" else (), bare=bare), *map(HFModelClass, others))
    if kind == "vit":
        variants = (variants[0], HFModelClass("ViTModel", bare=True))
    return Family(
        name,
        first,
        MODEL_TYPES[kind],
        partial(_read_standalone_vision_config, kind=kind),
        _write_standalone_vision_config,
        partial(_standalone_encoder_mappings, base=base),
        base=base,
        copies=(),
        within="vision_config",
        skipped=re.compile(_SKIPPED),
        variants=variants,
    )


VIT = _vision_encoder_family("vit", "vit", "vit.", "ViTForImageClassification", bare=False)
CLIP = _vision_encoder_family("clip", "clip", "vision_model.", "CLIPVisionModel", "CLIPModel")
SIGLIP = _vision_encoder_family("siglip", "siglip", "vision_model.", "SiglipVisionModel", "SiglipModel")
INTERNVIT = _vision_encoder_family("internvit", "internvit300M", "vision_tower.", "InternVLVisionModel")
DINOV2 = _vision_encoder_family("dinov2", "dinov2", "dinov2.", "Dinov2Model")
