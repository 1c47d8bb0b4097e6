"""Language models that see, in Hugging Face folders: LLaVA (1.5), and InternVL (3) with pixel shuffle and a norm before its projector.

    vision_tower.*            an encoder (`vision.py`), of which only the layers that are used are kept
    multi_modal_projector.*   the projector
    language_model.*          a decoder of any family known here, by its own names

The features are those after a layer (`vision_feature_layer`), before any norm of the encoder's output. So a folder with 24 layers
whose last but one is used becomes an encoder of 23, and is written so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.vision import VisionConfig
from megatron.core.config.vision import vision_encoder
from megatron.core.families.rules import Family, Row, same
from megatron.core.families.settings import Keys, passed_through
from megatron.core.families.vision import encoder_rows, kind_of, sizes_in, sizes_out

# What transformers' configs mean where a folder leaves sizes out, as LLaVA 1.5 does.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
    },
}
_TOWER, _PROJECTOR, _LANGUAGE = "vision_tower.", "multi_modal_projector.", "language_model."


@dataclass(frozen=True, slots=True)
class Decoders:
    """The families that a language model may be of. fits: whether a family can say all that a network is."""

    families: tuple[Family, ...]
    fits: Callable[[ModelConfig, Family], bool]

    def settings(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Settings of the language model from `text_config`, and what cannot be expressed."""
        kind = str(config.get("model_type"))
        family = next((one for one in self.families if one.model_type == kind), None)
        if family is None:
            return {"true_vocab_size": 1}, [f"text_config: model_type: {kind} is not known here"]
        settings, problems = family.config_in({**_DEFAULTS.get(kind, {}), **config})
        return settings, [f"text_config: {problem}" for problem in problems]

    def of(self, model: ModelConfig) -> tuple[Family, ModelConfig]:
        """The family of the language model, and it alone; where none fits, the first, which loses some of its settings."""
        alone = replace(model, vision=VisionConfig())
        return next((one for one in self.families if self.fits(alone, one)), self.families[0]), alone


def _settings_of_config(
    config: Mapping[str, Any], *, decoders: Decoders, internvl: bool
) -> tuple[dict[str, Any], list[str]]:
    keys = Keys(config)
    text, vision = (keys.pop(name) or {} for name in ("text_config", "vision_config"))
    settings, problems = decoders.settings({"model_type": "llama", **text})
    vision = {"model_type": "internvl_vision" if internvl else "clip_vision_model", **vision}
    kind = kind_of(vision)
    allowed = ("internvit", "internvit300M") if internvl else ("clip", "siglip", "dinov2")
    if kind is None or kind not in allowed:
        return settings, [*problems, f"vision_config: model_type: {vision.get('model_type')} has no counterpart here"]
    inner = Keys(vision)
    sizes = sizes_in(inner, kind)
    problems += [f"vision_config: {problem}" for problem in inner.finish()]
    depth = sizes.pop("num_layers")
    layer = keys.pop("vision_feature_layer")
    layer = (-1 if internvl else -2) if layer is None else layer
    if not isinstance(layer, int) or not -depth <= layer <= depth:
        keys.problems.append(f"vision_feature_layer: {layer} has no counterpart here; one of {depth} layers has")
        layer = -1
    renamed = {f"vision_{name}" if name in _SIZES else name: value for name, value in sizes.items()}
    has_class = kind != "siglip"
    strategies = ("default", "full") if has_class else ("full",)
    strategy = keys.one_of("vision_feature_select_strategy", strategies, "default")
    keys.one_of("projector_hidden_act", ("gelu",), "gelu")
    for name in ("image_seq_length", "tie_word_embeddings", "ignore_index", "vocab_size"):
        keys.pop(name)
    result = {
        **settings,
        **renamed,
        "vision_num_layers": depth + 1 + layer if layer < 0 else layer,
        "vision_final_norm": "no",
        "disable_vision_class_token": has_class and strategy == "default",
        "vision_projection_hidden_size": settings.get("hidden_size"),
        "vision_projection_norm": internvl,
        "pixel_shuffle": internvl,
        "image_token_index": keys.whole("image_token_id" if internvl else "image_token_index"),
    }
    if internvl:
        keys.one_of("downsample_ratio", (0.5,), 0.5)
    else:
        result["vision_projection_bias"] = keys.switch("multimodal_projector_bias", True)
    return result, [*problems, *keys.finish()]


_SIZES = ("hidden_size", "ffn_hidden_size", "num_attention_heads")


def _config_of_settings(
    model: ModelConfig, like: Mapping[str, Any], *, decoders: Decoders, internvl: bool
) -> dict[str, Any]:
    vision = model.vision
    if not model.has_vision:
        return {}
    family, alone = decoders.of(model)
    text_like, vision_like = like.get("text_config") or {}, like.get("vision_config") or {}
    text = {**family.config_out(alone, text_like), "model_type": family.model_type}
    text["architectures"] = [family.architecture]
    config = {
        **passed_through(like, "ignore_index", "tie_word_embeddings"),
        "text_config": text,
        "vision_config": sizes_out(vision_encoder(model), vision_like),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default" if vision.disable_vision_class_token else "full",
        "projector_hidden_act": "gelu",
        "image_seq_length": vision.rows,
        "tie_word_embeddings": model.ties_embeddings,
    }
    token = {"image_token_id" if internvl else "image_token_index": vision.image_token_index}
    extra = {"downsample_ratio": 0.5} if internvl else {"multimodal_projector_bias": vision.vision_projection_bias}
    return {**config, **extra, **(token if vision.image_token_index is not None else {})}


def _parameter_rows(model: ModelConfig, *, decoders: Decoders) -> tuple[Row, ...]:
    family, alone = decoders.of(model)
    rows = encoder_rows(vision_encoder(model), _TOWER)
    kinds = ("weight", "bias") if model.vision.vision_projection_bias else ("weight",)
    if model.vision.vision_projection_norm:
        rows += [
            Row(f"vision_projection.layernorm.{kind}", (f"{_PROJECTOR}layer_norm.{kind}",), same)
            for kind in ("weight", "bias")
        ]
    for ours, theirs in (("linear_fc1", "linear_1"), ("linear_fc2", "linear_2")):
        rows += [
            Row(f"vision_projection.encoder.{ours}.{kind}", (f"{_PROJECTOR}{theirs}.{kind}",), same) for kind in kinds
        ]
    decoder = [Row(row.ours, tuple(_LANGUAGE + name for name in row.theirs), row.op) for row in family.rows(alone)]
    return (*rows, *decoder)


def _is_unused_encoder_layer(model: ModelConfig, name: str) -> bool:
    """Whether a tensor belongs to a layer of the encoder behind the one whose output is used."""
    layer = re.match(r"vision_tower\.encoder\.layers?\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= vision_encoder(model).num_layers


def _unused_final_norm(model: ModelConfig) -> dict[str, tuple[tuple[int, ...], float]]:
    """The norm that CLIP and SigLIP have behind their last layer, and that a language model does not use."""
    if model.vision.vision_model_type not in ("clip", "siglip", "dinov2"):
        return {}
    norm = "layernorm" if model.vision.vision_model_type == "dinov2" else "post_layernorm"
    width = (vision_encoder(model).hidden_size,)
    return {f"{_TOWER}{norm}.weight": (width, 1.0), f"{_TOWER}{norm}.bias": (width, 0.0)}


_SKIPPED = re.compile(
    r"vision_tower\.(post_layernorm|layernorm|head)\..*|vision_tower\.embeddings\.(position_ids|mask_token)|"
    r"language_model\.model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
)
# Names of transformers 4: an encoder was a part of a class with a text encoder, and later the whole a part of `model`.
_RESPELLED = (
    (r"^vision_tower\.vision_model\.", _TOWER),
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^model\.language_model\.", f"{_LANGUAGE}model."),
    (r"^lm_head\.", f"{_LANGUAGE}lm_head."),
)


def _vlm_family(name: str, architecture: str, decoders: Decoders, *, internvl: bool) -> Family:
    return Family(
        name,
        architecture,
        name,
        partial(_settings_of_config, decoders=decoders, internvl=internvl),
        partial(_config_of_settings, decoders=decoders, internvl=internvl),
        partial(_parameter_rows, decoders=decoders),
        base="",
        skipped=_SKIPPED,
        copies=(("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),),
        respelled=_RESPELLED,
        unused=_is_unused_encoder_layer,
        constants=_unused_final_norm,
    )


def readers_of_images(decoders: Decoders) -> tuple[Family, ...]:
    """The families of language models that see, with a decoder of one of these families."""
    return (
        _vlm_family("llava", "LlavaForConditionalGeneration", decoders, internvl=False),
        _vlm_family("internvl", "InternVLForConditionalGeneration", decoders, internvl=True),
    )
