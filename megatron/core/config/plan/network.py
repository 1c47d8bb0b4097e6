"""Which network a config describes: the settings that make its function, without those that this network does not use.

    role network or adaptable  ->  used by this network?  ->  written in one way  ->  equal values are one function

Two configs are one network when `network_setting_differences` is empty: a resumed run, a published config.json and an export to another
format ask here, and none keeps a list of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from megatron.core.config.flags.declare import config_from_flat_dict, config_to_flat_dict, field_resume_roles
from megatron.core.config.flags.idle import ValueOf, config_fields, idle_names
from megatron.core.config.flags.when import FACTS
from megatron.core.config.mixers.gated_delta_net import DeltaNet
from megatron.core.config.mixers.mamba import Mamba
from megatron.core.config.mixers.table import MIXERS, recurrent_mixers, requested_mixers
from megatron.core.config.plan.layers import all_layer_plans, network_layer_plans
from megatron.core.config.settings.model import ModelConfig, RequestedModel
from megatron.core.config.settings.run import RunConfig


def _mixers(run: RunConfig) -> frozenset[str]:
    return frozenset(mixer.name for plan in all_layer_plans(run.model) for mixer in plan.mixers)


# What the facts of flags' conditions are in a run.
_FACTS: Mapping[str, Callable[[RunConfig], Any]] = {
    "architecture": lambda run: run.model.architecture.name,
    "reward_head": lambda run: run.model.reward_head,
    "attends": lambda run: any(plan.has_attention for plan in all_layer_plans(run.model)),
    "has_mamba_layers": lambda run: Mamba.name in _mixers(run),
    "has_delta_net_layers": lambda run: DeltaNet.name in _mixers(run),
    "mlps": lambda run: frozenset(plan.mlp for plan in all_layer_plans(run.model)),
    "keeps_state": lambda run: bool(recurrent_mixers(run.model)),
    "uses_rotary": lambda run: run.model.uses_rotary,
    "uses_yarn": lambda run: run.model.uses_rotary and run.model.rope.is_yarn,
    "has_gated_mlp": lambda run: run.model.has_gated_mlp,
    "predicts_far": lambda run: (run.model.mtp.mtp_num_layers or 0) > 1,
    "images_in_text": lambda run: run.model.has_vision,
    "reads_images": lambda run: run.model.has_vision or run.model.architecture.classifies_images,
    "low_precision_recipe": lambda run: run.precision.low.recipe_name,
    "update_rules": lambda run: run.optimizer.update_rules,
    "offloads_activations": lambda run: run.offload.offloads_activations,
}
assert _FACTS.keys() == FACTS.keys(), "a fact has a name, what makes it so, and a value in a run"
# Operations whose kernels take part only where a flag asks for them.
USED_IF_REQUESTED = ("bias_activation", "split_qkv", "residual_norm", "low_linear", "quantise", "adamw")


def model_config_from_settings(settings: Mapping[str, Any]) -> ModelConfig:
    """Return the resolved model config of settings by field name, such as a `Source` has."""
    return config_from_flat_dict(RequestedModel, settings).resolve()


def network_fields() -> dict[str, str]:
    """Return field name -> role, `network` or `adaptable`, of every setting that affects what a network computes."""
    return {name: role for name, role in field_resume_roles(RequestedModel).items() if role in ("network", "adaptable")}


def value_of_run(run: RunConfig) -> ValueOf:
    """Return the function that gives the value of a setting or a fact by its name, in a resolved run."""
    fields = config_fields(RunConfig)

    @cache
    def value_of(name: str) -> Any:
        return _FACTS[name](run) if name in _FACTS else fields[name].value(run)

    return value_of


def unused_settings(model: ModelConfig) -> frozenset[str]:
    """Return the names of settings that have no effect in this network, given its other settings. model: resolved."""
    return idle_names(RequestedModel, value_of_run(RunConfig(model=model)))


def unused_kernel_ops(model: ModelConfig) -> set[str]:
    """Return the operations whose kernels a network does not use; optional ones count as used if they are requested."""
    requested, experts = model.kernels.requested_kernels, bool(model.moe.num_experts)
    used = {
        "layer_norm": model.normalization == "LayerNorm",
        "rms_norm": model.normalization == "RMSNorm" or model.qk_l2_norm,
        "gated_activation": model.has_gated_mlp,
        "rotary": model.uses_rotary and not model.rotates_fused_qkv,
        "rotary_qkv": model.rotates_fused_qkv,
        "grouped_linear": experts,
        "moe_flex_dispatcher": experts,
        "permute": experts,
        "paged_attention": False,  # of decoding
        **{op: op in requested for op in USED_IF_REQUESTED},
    }
    of_mixers = {op: False for mixer in MIXERS.values() for op in mixer.kernel_ops}
    of_mixers |= {op: True for mixer in requested_mixers(model) for op in mixer.kernel_ops}
    return {op for op, is_used in (used | of_mixers).items() if not is_used}


def network_setting_differences(a: ModelConfig, b: ModelConfig) -> list[str]:
    """Return the settings by which two resolved networks compute different functions, without those neither uses."""
    idle, given, canonical = (
        unused_settings(a) & unused_settings(b),
        (config_to_flat_dict(a), config_to_flat_dict(b)),
        (canonical_values(a), canonical_values(b)),
    )
    # Equal words that mean two things do so because of another setting, which is named itself.
    return [
        name
        for name in network_fields()
        if name not in idle and canonical[0][name] != canonical[1][name] and given[0][name] != given[1][name]
    ]


def canonical_values(model: ModelConfig) -> dict[str, Any]:
    """Return all settings by field name, with different spellings of the same network made equal."""
    values, rows = config_to_flat_dict(model), network_layer_plans(model)
    values["moe_router_topk_scaling_factor"] = values["moe_router_topk_scaling_factor"] or 1.0
    values["mtp_num_layers"] = values["mtp_num_layers"] or None
    values["moe_layer_freq"] = [plan.mlp for plan in rows]
    values["linear_attention_freq"] = [plan.mixer for plan in rows]
    values["hybrid_layer_pattern"] = (model.hybrid.layer_symbols, model.hybrid.mtp_patterns)
    variant = values["experimental_attention_variant"]
    values["experimental_attention_variant"] = DeltaNet.name if variant == "gdn" else variant
    values["mamba_time_step_limit"] = list(values["mamba_time_step_limit"]) or [0.0, math.inf]
    values["no_rope_freq"] = [plan.rope for plan in rows]
    values["window_attn_skip_freq"] = [plan.window is not None for plan in rows]
    window = model.parsed_window_size
    values["window_size"] = (
        (window[0], -1) if window and model.architecture.is_decoder_only else window
    )  # causality has the right side
    if model.rope.is_yarn and model.rope.position_embedding_type in (
        "rope",
        "yarn",
    ):  # there are two ways to say so, and stretched by one it is none
        values["position_embedding_type"] = "rope"
        values["rope_type"] = "yarn" if model.rope.rotary_scaling_factor > 1 else "rope"
    return values
