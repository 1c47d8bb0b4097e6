"""The published architectures that are known here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from megatron.core.config.flags.declare import config_to_flat_dict, flag_name
from megatron.core.config.plan.layers import LayerPlan, network_layer_plans
from megatron.core.config.plan.network import (
    canonical_values,
    model_config_from_settings,
    network_fields,
    unused_settings,
)
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families import (
    bamba,
    bert,
    deepseek,
    gemma,
    gpt2,
    gpt_oss,
    llama,
    mixtral,
    nemotron_h,
    olmo,
    qwen,
    qwen_next,
    t5,
    vision,
)
from megatron.core.families.config_json import architectures_of
from megatron.core.families.llava import DecoderFamilies, vlm_families
from megatron.core.families.parameter_mapping import Family


def _families_in_modules(*modules: ModuleType) -> tuple[Family, ...]:
    return tuple(value for module in modules for value in vars(module).values() if isinstance(value, Family))


# The first that can express a network is the one that it is exported as.
_DECODERS = _families_in_modules(
    gpt2, llama, mixtral, qwen, deepseek, gpt_oss, gemma, olmo, qwen_next, nemotron_h, bamba
)
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *_DECODERS,
        *_families_in_modules(bert, t5, vision),
        *vlm_families(DecoderFamilies(_DECODERS, lambda model, family: not lost_settings(model, family))),
    )
}

_TOLD_FAMILIES = 3  # of those that cannot say all that a network is

# What is told by rows of layers, by the words of a tokenizer and by the tensors' names instead.
_ELSEWHERE = frozenset(
    (
        "window_size",
        "window_attn_skip_freq",
        "no_rope_freq",
        "moe_layer_freq",
        "true_vocab_size",
        "bert_binary_head",
        "reward_head",
    )
)


def config_of_language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the language model alone, where the class holds a vision tower that is not built here beside it."""
    named = architectures_of(config)
    family = next((family for family in FAMILIES.values() if family.holder and family.holder in named), None)
    inner = config.get("text_config")
    if family is None or not isinstance(inner, Mapping):
        return dict(config)
    outer = {name: config[name] for name in ("quantization_config", "tie_word_embeddings") if name in config}
    return {**inner, **outer, "architectures": [family.architecture], "model_type": family.model_type}


def family_of_config(config: Mapping[str, Any], where: str) -> Family:
    """Return the family of a config.json. `CheckpointError`, with the known ones, if none. where: for errors."""
    named = architectures_of(config)
    for family in FAMILIES.values():
        if family.class_for_architectures(named) or (not named and config.get("model_type") == family.model_type):
            return family
    known = ", ".join(variant.architecture for family in FAMILIES.values() for variant in family.variants or (family,))
    what = f"architectures: {', '.join(named)}" if named else f"model_type: {config.get('model_type')}"
    raise CheckpointError(f"{where} holds {what}, which is not known here; known are {known}")


def fitting_family(model: ModelConfig, name: str | None = None) -> Family:
    """Return the first family whose config.json can express all of this network. name: only try this one.

    Raises `CheckpointError` if none can, with the settings that the nearest families cannot express.
    """
    if name is not None and name not in FAMILIES:
        raise CheckpointError(f"the family {name} is not known here; known are {', '.join(FAMILIES)}")
    tried = [FAMILIES[name]] if name else list(FAMILIES.values())
    lost: dict[str, list[str]] = {}
    for family in tried:
        lost[family.name] = lost_settings(model, family)
        if not lost[family.name]:
            return family
    nearest = sorted(lost, key=lambda each: len(lost[each]))[:_TOLD_FAMILIES]
    problems = [f"{each}: {'; '.join(lost[each])}" for each in nearest]
    if len(lost) > len(nearest):
        problems.append(f"{len(lost) - len(nearest)} more families lose as many settings or more")
    raise CheckpointError(
        "no published architecture known here computes what this network does"
        if name is None
        else f"{name} does not compute what this network does",
        problems,
    )


def lost_settings(model: ModelConfig, family: Family) -> list[str]:
    """Return the settings of a network that the family's config.json cannot express, a line each; [] if there are none."""
    restored, problems = family.settings_from_config(family.to_hf_config(model, {}))
    restored["mtp_num_layers"] = model.mtp.mtp_num_layers if family.beyond else None  # those are told by the weights
    again = model_config_from_settings(restored)
    mine, back, silent = config_to_flat_dict(model), config_to_flat_dict(again), _roundtrip_exempt_settings(model)
    meaning = canonical_values(model), canonical_values(again)
    unsaid = [
        f"{flag_name(name)} is {mine[name]}, there {back[name]}"
        for name in mine
        if name not in silent and mine[name] != back[name] and meaning[0][name] != meaning[1][name]
    ]
    layers = [(a, b) for a, b in zip(_canonical_layer_plans(model), _canonical_layer_plans(again)) if a != b]
    unsaid += [f"layer {a.index} is {a}, there {b}" for a, b in layers[:1]]
    return unsaid or problems


def fitting_families(model: ModelConfig) -> Iterator[Family]:
    """Yield the families whose config.json can express all of this network, first that of `fitting_family`, which raises if none can."""
    first = fitting_family(model)
    yield first
    yield from (one for one in FAMILIES.values() if one is not first and not lost_settings(model, one))


def _roundtrip_exempt_settings(model: ModelConfig) -> frozenset[str]:
    """Return the names of settings that need not survive the way through a config.json: unused, or given elsewhere."""
    idle = unused_settings(model) - {"scale_tied_logits"}
    attends = not model.hybrid.layer_symbols or bool({"*", "+"} & set(model.hybrid.layer_symbols))
    if (
        model.rope.position_embedding_type != "relative" and attends
    ):  # a length that is published even where nothing has its size
        idle -= {"max_position_embeddings"}
    if model.moe.moe_router_topk_scaling_factor in (None, 1.0):
        idle |= {"moe_router_topk_scaling_factor"}
    return idle | _ELSEWHERE | (config_to_flat_dict(model).keys() - network_fields().keys())


def _canonical_layer_plans(model: ModelConfig) -> list[LayerPlan]:
    """Return the layer plans of the network with causal windows made open to the right, where they have no effect."""
    return [
        replace(plan, window=(plan.window[0], -1)) if plan.causal and plan.window else plan
        for plan in network_layer_plans(model)
    ]
