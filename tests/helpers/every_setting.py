"""Every setting of a run, changed by itself, in networks that between them use all of them."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator
from typing import Any

from megatron.core.config.flags.declare import config_from_flat_dict, config_to_flat_dict, flag_fields
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RequestedRun, RunConfig
from tests.helpers import tiny

Changes = dict[str, Any]
ROTARY = {"position_embedding_type": "rope", "max_position_embeddings": 16}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "init_method_std": 0.3}
# Networks that between them use every setting.
NETWORKS: dict[str, Changes] = {
    "dense": {},
    "gated": {
        **ROTARY,
        "swiglu": True,
        "window_size": "3,0",
        "window_attn_skip_freq": "2",
        "no_rope_freq": "2",
        "use_rope_scaling": True,
    },
    "yarn": {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 4,
        "untie_embeddings_and_output_weights": True,
    },
    "mrope": {"position_embedding_type": "mrope", "mrope_section": (1, 1, 0)},
    "latent": {
        **ROTARY,
        "multi_latent_attention": True,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_layernorm": True,
    },
    "experts": {
        **EXPERTS,
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": 16,
        "moe_layer_freq": "2",
    },
    "groups": {
        **EXPERTS,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_score_function": "sigmoid",
    },
    "states": {
        "hybrid_layer_pattern": "M*-M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 4,
        "mamba_num_groups": 2,
        "mamba_state_dim": 4,
    },
    "delta": {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": "2",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
    },
    "ahead": {"mtp_num_layers": 2},
    "adapters": {"lora_rank": 4, "lora_alpha": 6.0},
    "images": {
        "vision_model_type": "clip",
        "img_h": 8,
        "img_w": 8,
        "patch_dim": 4,
        "vision_num_layers": 2,
        "vision_hidden_size": 16,
        "vision_num_attention_heads": 4,
        "pixel_shuffle": True,
    },
    "classes": {"architecture": "vit", "img_h": 8, "img_w": 8, "patch_dim": 4},
    "bert": {"architecture": "bert"},
    "t5": {
        "architecture": "t5",
        "encoder_num_layers": 4,
        "decoder_seq_length": 8,
        "position_embedding_type": "relative",
        "scale_tied_logits": True,
    },
}
DATA = {
    "dataloader_type": "cyclic",
    "mock_data": False,
    "data_path": ["0.5", "a/one", "0.5", "a/two"],
    "split": "90,5,5",
}
OTHERS: Changes = {  # where no other value follows from the type
    "window_size": "5,0",
    "window_attn_skip_freq": "3",
    "no_rope_freq": "3",
    "moe_layer_freq": "3",
    "hybrid_layer_pattern": "M-*M",
    "linear_attention_freq": "3",
    "mamba_time_step_limit": [0.1, 2.0],
    "mrope_section": [0, 1, 1],
    "lora_targets": ["q_proj"],
    "data_path": ["0.4", "b/one", "0.6", "b/two"],
    "split": "80,10,10",
}


def resolved(changes: Changes) -> RunConfig:
    """The tiny run with these changes."""
    return tiny.config(**{"train_iters": 8, **changes})


def other(name: str, kind: Any, value: Any) -> Any:
    """Another value of a field."""
    if name in OTHERS:
        return OTHERS[name]
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is typing.Literal:
        return next(one for one in kinds if one != value)
    if typing.get_origin(kind) is tuple:
        return [*(value or ()), other(name, kinds[0], None)]
    if any(typing.get_origin(one) in (typing.Literal, tuple) for one in kinds):
        return other(name, next(one for one in kinds if typing.get_origin(one) in (typing.Literal, tuple)), value)
    if bool in kinds:
        return not value
    if str in kinds:
        return f"{value or ''}other"
    return (value or 0) + 1 if int in kinds else (value or 0.0) + 0.5


def fields() -> Iterator[tuple[str, Any]]:
    """(name, type) of every field of a run, flag or not."""
    yield from ((field.name, kind) for field, kind in flag_fields(RequestedRun))
    hints = typing.get_type_hints(ModelConfig)
    yield from (
        (field.name, hints[field.name])
        for field in dataclasses.fields(ModelConfig)
        if "help" not in field.metadata and not dataclasses.is_dataclass(hints[field.name])
    )


def changed(config: RunConfig, name: str, kind: Any) -> tuple[Changes, RunConfig]:
    """What a checkpoint of this run says, as read from its file, and a run that has one setting otherwise."""
    values = config_to_flat_dict(config)
    saved = json.loads(json.dumps(values))
    return saved, config_from_flat_dict(RunConfig, {**values, name: other(name, kind, values[name])})
