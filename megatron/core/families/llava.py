"""Language models that see, in Hugging Face folders: LLaVA (1.5), InternVL (3), and SmolVLM (Idefics3). Each is a row of `SHAPES`.

    LLaVA, InternVL           SmolVLM
    vision_tower.*            model.vision_model.*   an encoder (`vision.py`), of which only the layers that are used are kept
    multi_modal_projector.*   model.connector.*      the projector
    language_model.*          model.text_model.*     a decoder of any family known here, by its own names

LLaVA's and InternVL's features are those after a layer (`vision_feature_layer`), before any norm of the encoder's output. So a folder with
24 layers whose last but one is used becomes an encoder of 23, and is written so. SmolVLM's are those of the whole SigLIP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.vision import VisionConfig
from megatron.core.config.vision import vision_encoder_config
from megatron.core.families.config_json import config_json_keys, preserved_keys
from megatron.core.families.parameter_mapping import BIASED, Family, ParameterMapping, module_mappings
from megatron.core.families.vision import (
    read_vision_encoder_config,
    vision_encoder_config_json,
    vision_encoder_mappings,
    vision_encoder_type_of,
)

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


@dataclass(frozen=True, slots=True)
class VLMCheckpointFormat:
    """How a published class of language models that see is written.

    encoders: types that its encoder can be of. vision_type: `model_type` of its encoder, where the config leaves it out. token: the key
    of the id of an image token. layer: the encoder's layer whose output is used where the config leaves it out; None: the whole
    encoder with its norm. tower: what the encoder's names begin with. projector: our names and theirs. language: the name of a
    decoder's parameter, given its own name and what its family's names begin with. reads, writes: the keys that it alone has, as
    settings and from them. head: the names of the output layer and of the embeddings that it can be a copy of.
    """

    name: str
    architecture: str
    encoders: tuple[str, ...]
    vision_type: str
    token: str
    layer: int | None
    tower: str
    projector: Mapping[str, str]
    language: Callable[[str, str], str]
    reads: Callable[[ForeignMapping, str], dict[str, Any]]
    writes: Callable[[VisionConfig], dict[str, Any]]
    head: tuple[str, str]
    vision_defaults: Mapping[str, Any]


def _read_feature_select_strategy(keys: ForeignMapping, kind: str) -> dict[str, Any]:
    """Read which tokens of the encoder are used; the activation of the projector is checked."""
    strategies = ("full",) if kind == "siglip" else ("default", "full")
    strategy = keys.one_of("vision_feature_select_strategy", strategies, "default")
    keys.one_of("projector_hidden_act", ("gelu",), "gelu")
    return {"disable_vision_class_token": kind != "siglip" and strategy == "default"}


def _read_llava_keys(keys: ForeignMapping, kind: str) -> dict[str, Any]:
    bias = keys.boolean("multimodal_projector_bias", True)
    return {**_read_feature_select_strategy(keys, kind), "vision_projection_bias": bias}


def _read_internvl_keys(keys: ForeignMapping, kind: str) -> dict[str, Any]:
    keys.one_of("downsample_ratio", (0.5,), 0.5)
    return {**_read_feature_select_strategy(keys, kind), "vision_projection_norm": True, "pixel_shuffle": True}


def _read_smolvlm_keys(keys: ForeignMapping, kind: str) -> dict[str, Any]:
    factor = keys.positive_int("scale_factor", 2)
    return {
        "vision_projection_type": "affine",
        "vision_projection_bias": False,
        "pixel_shuffle": True,
        "pixel_shuffle_factor": factor,
    }


def _write_llava_keys(vision: VisionConfig) -> dict[str, Any]:
    return {
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default" if vision.disable_vision_class_token else "full",
        "projector_hidden_act": "gelu",
        "image_seq_length": vision.num_image_embeddings,
    }


_MLP = {"encoder.linear_fc1": "linear_1", "encoder.linear_fc2": "linear_2"}
_PROJECTOR = "multi_modal_projector."
_LLAVA = VLMCheckpointFormat(
    name="llava",
    architecture="LlavaForConditionalGeneration",
    encoders=("clip", "siglip", "dinov2"),
    vision_type="clip_vision_model",
    token="image_token_index",
    layer=-2,
    tower="vision_tower.",
    projector={ours: f"{_PROJECTOR}{theirs}" for ours, theirs in _MLP.items()},
    language=lambda name, base: f"language_model.{name}",
    reads=_read_llava_keys,
    writes=lambda vision: {**_write_llava_keys(vision), "multimodal_projector_bias": vision.vision_projection_bias},
    head=("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
    vision_defaults={},
)
_SMOLVLM = VLMCheckpointFormat(
    name="smolvlm",
    architecture="SmolVLMForConditionalGeneration",
    encoders=("siglip",),
    vision_type="smolvlm_vision",
    token="image_token_id",
    layer=None,
    tower="model.vision_model.",
    projector={"encoder.linear": "model.connector.modality_projection.proj"},
    language=lambda name, base: f"model.text_model.{name.removeprefix(base)}" if name.startswith(base) else name,
    reads=_read_smolvlm_keys,
    writes=lambda vision: {"scale_factor": vision.pixel_shuffle_factor},
    head=("lm_head.weight", "model.text_model.embed_tokens.weight"),
    vision_defaults={
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 32,
    },
)
SHAPES = (
    _LLAVA,
    replace(
        _LLAVA,
        name="internvl",
        architecture="InternVLForConditionalGeneration",
        encoders=("internvit", "internvit300M"),
        vision_type="internvl_vision",
        token="image_token_id",
        layer=-1,
        projector={"layernorm": f"{_PROJECTOR}layer_norm", **_LLAVA.projector},
        reads=_read_internvl_keys,
        writes=lambda vision: {**_write_llava_keys(vision), "downsample_ratio": 0.5},
    ),
    _SMOLVLM,
    replace(_SMOLVLM, name="idefics3", architecture="Idefics3ForConditionalGeneration", vision_type="idefics3_vision"),
)
# Keys that say nothing of the network: of the whole, and those that SmolVLM's files keep of their training in the two parts.
_SAYS_NOTHING = (
    *("image_seq_length", "image_seq_len", "tie_word_embeddings", "ignore_index", "vocab_size", "_pad_token_id"),
    *("is_llama_config", "neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor", "transformers.js_config"),
    *("use_base_siglip", "max_image_size", "size", "_flash_attn_2_enabled"),
)
_SIZES = ("hidden_size", "ffn_hidden_size", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class DecoderFamilies:
    """The families that the language model of a VLM may belong to. fits: whether a family can express a network."""

    families: tuple[Family, ...]
    fits: Callable[[ModelConfig, Family], bool]

    def read_text_config(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the settings of the language model from `text_config`, and what cannot be expressed, a line each."""
        kind = str(config.get("model_type"))
        family = next((one for one in self.families if one.model_type == kind), None)
        if family is None:
            return {"true_vocab_size": 1}, [f"text_config: model_type: {kind} is not known here"]
        settings, problems = family.settings_from_config({**_DEFAULTS.get(kind, {}), **config})
        return settings, [f"text_config: {problem}" for problem in problems]

    def text_family_and_config(self, model: ModelConfig) -> tuple[Family, ModelConfig]:
        """Return the language model's family (the first, if none can express it), and its config without vision."""
        alone = replace(model, vision=VisionConfig())
        return next((one for one in self.families if self.fits(alone, one)), self.families[0]), alone


def _read_vlm_config(keys: ForeignMapping, *, decoders: DecoderFamilies, shape: VLMCheckpointFormat) -> dict[str, Any]:
    """Read our settings of a vision-language model from the keys of its config.json: of the language model, the encoder
    and the projector. decoders: families of the language model; shape: the format of the folder.
    """
    text, vision = _text_and_vision_configs(keys, shape)
    settings, problems = decoders.read_text_config({"model_type": "llama", **text})
    vision = {"model_type": shape.vision_type, **shape.vision_defaults, **vision}
    kind = vision_encoder_type_of(vision)
    keys.problems += problems
    if kind is None or kind not in shape.encoders:
        keys.problems.append(f"vision_config: model_type: {vision.get('model_type')} has no counterpart here")
        keys.ignore_keys()
        return settings
    inner = config_json_keys(vision)
    sizes = read_vision_encoder_config(inner, kind)
    keys.problems += [f"vision_config: {problem}" for problem in inner.all_problems()]
    depth = sizes.pop("num_layers")
    renamed = {f"vision_{name}" if name in _SIZES else name: value for name, value in sizes.items()}
    keys.ignore_keys(*_SAYS_NOTHING)
    return {
        **settings,
        **renamed,
        "vision_num_layers": depth if shape.layer is None else _num_used_encoder_layers(keys, depth, shape.layer),
        "vision_final_norm": "yes" if shape.layer is None else "no",
        "vision_projection_hidden_size": settings.get("hidden_size"),
        "image_token_index": keys.positive_int(shape.token),
        **shape.reads(keys, kind),
    }


def _text_and_vision_configs(keys: ForeignMapping, shape: VLMCheckpointFormat) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configs of the language model and of the encoder, without keys that say nothing of the network."""
    text, vision = (keys.pop_or_none(name) or {} for name in ("text_config", "vision_config"))
    if shape.layer is not None:
        return text, vision
    silent = set(_SAYS_NOTHING) - {"vocab_size"}
    text, vision = ({name: part[name] for name in part if name not in silent} for part in (text, vision))
    return {
        "rms_norm_eps": 1e-5,
        **text,
        "tie_word_embeddings": keys.mapping.get("tie_word_embeddings") or False,
    }, vision


def _num_used_encoder_layers(keys: ForeignMapping, depth: int, usual: int) -> int:
    """Return the number of the encoder's layers up to the one that is used. usual: default of vision_feature_layer."""
    layer = keys.pop_or_none("vision_feature_layer")
    layer = usual if layer is None else layer
    if not isinstance(layer, int) or not -depth <= layer <= depth:
        keys.problems.append(f"vision_feature_layer: {layer} has no counterpart here; one of {depth} layers has")
        return depth
    return depth + 1 + layer if layer < 0 else layer


def _write_vlm_config(
    model: ModelConfig, like: Mapping[str, Any], *, decoders: DecoderFamilies, shape: VLMCheckpointFormat
) -> dict[str, Any]:
    """Return the config.json of a vision-language model; {} for a network that reads no images. like: an earlier one."""
    vision = model.vision
    if not model.has_vision:
        return {}
    family, alone = decoders.text_family_and_config(model)
    text_like, vision_like = like.get("text_config") or {}, like.get("vision_config") or {}
    text = {**family.to_hf_config(alone, text_like), "model_type": family.model_type}
    text["architectures"] = [family.architecture]
    encoder = vision_encoder_config_json(vision_encoder_config(model), vision_like)
    if shape.layer is None:
        encoder["model_type"] = shape.vision_type
        encoder.pop("vision_use_head", None)
    token = {} if vision.image_token_index is None else {shape.token: vision.image_token_index}
    return {
        **preserved_keys(like, "ignore_index", "tie_word_embeddings"),
        "text_config": text,
        "vision_config": encoder,
        "tie_word_embeddings": model.ties_embeddings,
        **shape.writes(vision),
        **token,
    }


def _vlm_mappings(
    model: ModelConfig, *, decoders: DecoderFamilies, shape: VLMCheckpointFormat
) -> tuple[ParameterMapping, ...]:
    family, alone = decoders.text_family_and_config(model)
    rows = vision_encoder_mappings(vision_encoder_config(model), shape.tower)
    for ours, theirs in shape.projector.items():
        has_bias = model.vision.vision_projection_bias or ours == "layernorm"
        kinds = BIASED if has_bias else ("weight",)
        rows += module_mappings(f"vision_projection.{ours}", theirs, kinds=kinds)
    decoder = [
        ParameterMapping(row.ours, tuple(shape.language(name, family.base) for name in row.theirs), row.op)
        for row in family.rows(alone)
    ]
    return (*rows, *decoder)


def _is_unused_encoder_layer(model: ModelConfig, name: str) -> bool:
    """Whether a tensor belongs to a layer of the encoder behind the one whose output is used."""
    layer = re.match(r"vision_tower\.encoder\.layers?\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= vision_encoder_config(model).num_layers


def _unused_final_norm_constants(model: ModelConfig) -> dict[str, tuple[tuple[int, ...], float]]:
    """Return name -> (shape, value) of the final norm that the encoder's class expects and the whole does not use."""
    if model.vision.vision_model_type not in ("clip", "siglip", "dinov2") or model.vision.has_final_norm:
        return {}
    norm = "layernorm" if model.vision.vision_model_type == "dinov2" else "post_layernorm"
    width = (vision_encoder_config(model).hidden_size,)
    return {f"vision_tower.{norm}.weight": (width, 1.0), f"vision_tower.{norm}.bias": (width, 0.0)}


_SKIPPED = re.compile(
    r"vision_tower\.(post_layernorm|layernorm|head)\..*|vision_tower\.embeddings\.(position_ids|mask_token)|"
    r"language_model\.model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
)
# Names of transformers 4: an encoder was a part of a class with a text encoder, and later the whole a part of `model`.
_RESPELLED = (
    (r"^vision_tower\.vision_model\.", "vision_tower."),
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
)


def _vlm_family(decoders: DecoderFamilies, shape: VLMCheckpointFormat) -> Family:
    is_llava = shape.layer is not None
    return Family(
        shape.name,
        shape.architecture,
        shape.name,
        partial(_read_vlm_config, decoders=decoders, shape=shape),
        partial(_write_vlm_config, decoders=decoders, shape=shape),
        partial(_vlm_mappings, decoders=decoders, shape=shape),
        base="",
        skipped=_SKIPPED,
        copies=(shape.head,),
        respelled=_RESPELLED if is_llava else (),
        unused=_is_unused_encoder_layer,
        constants=_unused_final_norm_constants if is_llava else lambda model: {},
    )


def vlm_families(decoders: DecoderFamilies) -> tuple[Family, ...]:
    """Return the families of vision-language models, with language models of these families."""
    return tuple(_vlm_family(decoders, shape) for shape in SHAPES)
