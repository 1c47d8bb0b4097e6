"""Rows lose nothing: every element of both sides is used exactly once, for every family and many sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.families.parameter_mapping import (
    ParameterMapping,
    ReversibleTensorConversion,
    Shape,
    concat_conversion,
    hf_shapes,
    per_expert_conversion,
    same,
    transpose,
)
from megatron.core.families.registry import FAMILIES
from megatron.core.models.describe import global_parameter_shapes

KIN = {"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "add_bias_linear": False}
LATENT = {
    **KIN,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "kv_lora_rank": 5,
    "qk_head_dim": 3,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
    "num_experts": 3,
    "moe_ffn_hidden_size": 2,
}
_VIT = {"architecture": "vit", "img_h": 6, "img_w": 6, "patch_dim": 3, "num_classes": 0}
_IMAGES = {
    "img_h": 6,
    "img_w": 6,
    "patch_dim": 3,
    "vision_num_layers": 2,
    "vision_hidden_size": 4,
    "vision_ffn_hidden_size": 3,
    "vision_num_attention_heads": 2,
}
_SMOLVLM: dict[str, Any] = {
    **KIN,
    **_IMAGES,
    "vision_model_type": "siglip",
    "pixel_shuffle": True,
    "vision_projection_type": "affine",
    "vision_projection_bias": False,
}
_STATES: dict[str, Any] = {
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "none",
    "squared_relu": True,
    "mamba_num_heads": 4,
    "mamba_head_dim": 3,
    "mamba_num_groups": 2,
    "mamba_state_dim": 5,
}
_DELTA: dict[str, Any] = {
    **KIN,
    "qk_layernorm": True,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": "2",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}
KINDS: dict[str, dict[str, Any]] = {
    "mamba2": {**_STATES, "hybrid_layer_pattern": "M"},
    "nemotron_h": {
        **_STATES,
        "hybrid_layer_pattern": "EM*-",
        "num_experts": 3,
        "moe_ffn_hidden_size": 2,
        "moe_shared_expert_intermediate_size": 3,
        "moe_router_enable_expert_bias": True,
    },
    "qwen3_next": {
        **_DELTA,
        "num_experts": 3,
        "moe_ffn_hidden_size": 2,
        "moe_shared_expert_intermediate_size": 3,
        "moe_shared_expert_gate": True,
    },
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {
        **_DELTA,
        "num_experts": 3,
        "moe_ffn_hidden_size": 2,
        "moe_shared_expert_intermediate_size": 3,
        "moe_shared_expert_gate": True,
    },
    "olmo_hybrid": {
        **_DELTA,
        "attention_output_gate": False,
        "norm_after_sublayer": True,
        "linear_norm_before_sublayer": True,
        "qk_layernorm_across_heads": True,
    },
    "falcon_h1": {**_STATES, **KIN, "parallel_mamba": True, "mamba_output_norm": "none"},
    "bamba": {**_STATES, **KIN, "hybrid_layer_pattern": "M-*-"},
    "vit": {**_VIT, "num_classes": 3},
    "clip": {**_VIT, "vision_model_type": "clip"},
    "siglip": {**_VIT, "vision_model_type": "siglip"},
    "internvit": {**_VIT, "vision_model_type": "internvit"},
    "dinov2": {**_VIT, "vision_model_type": "dinov2", "vision_final_norm": "no"},
    "llava": {**KIN, **_IMAGES, "vision_model_type": "clip"},
    "internvl": {
        **KIN,
        **_IMAGES,
        "vision_model_type": "internvit300M",
        "pixel_shuffle": True,
        "vision_projection_norm": True,
    },
    **dict.fromkeys(("smolvlm", "idefics3"), _SMOLVLM),
    "gpt2": {},
    "llama": {"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope"},
    "mistral": KIN,
    "qwen2": {**KIN, "add_qkv_bias": True},
    "qwen3": {**KIN, "qk_layernorm": True},
    "mixtral": {**KIN, "num_experts": 3, "moe_ffn_hidden_size": 2},
    "qwen2_moe": {
        **KIN,
        "add_qkv_bias": True,
        "num_experts": 3,
        "moe_ffn_hidden_size": 2,
        "moe_shared_expert_intermediate_size": 3,
        "moe_shared_expert_gate": True,
        "moe_layer_freq": "2",
    },
    "qwen3_moe": {**KIN, "qk_layernorm": True, "num_experts": 3, "moe_layer_freq": "2"},
    "deepseek_v2": {**LATENT, "moe_shared_expert_intermediate_size": 3},
    "deepseek_v3": {
        **LATENT,
        "q_lora_rank": 4,
        "moe_shared_expert_intermediate_size": 3,
        "moe_router_enable_expert_bias": True,
        "moe_layer_freq": "2",
        "mtp_num_layers": 2,
    },
    "gemma": {**KIN, "swiglu": False, "geglu": True},
    "gemma2": {**KIN, "swiglu": False, "geglu": True, "sandwich_norm": True},
    "gemma3": {**KIN, "swiglu": False, "geglu": True, "sandwich_norm": True, "qk_layernorm": True},
    "olmo2": {**KIN, "norm_after_sublayer": True, "qk_layernorm": True, "qk_layernorm_across_heads": True},
    "gpt_oss": {
        "normalization": "RMSNorm",
        "quick_geglu": True,
        "position_embedding_type": "yarn",
        "softmax_type": "learnable",
        "num_experts": 3,
        "moe_ffn_hidden_size": 2,
    },
    "bert": {"architecture": "bert", "norm_after_residual": True, "embedding_layernorm": True},
    "megatron_bert": {"architecture": "bert"},
    "t5": {
        "architecture": "t5",
        "decoder_num_layers": 2,
        "position_embedding_type": "relative",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "geglu": True,
        "relative_attention_num_buckets": 4,
    },
}
ALONE = (
    "gpt2",
    "bert",
    "megatron_bert",
    "t5",
    "deepseek_v2",
    "deepseek_v3",
)  # every query head has a key head of its own


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    layers=st.integers(1, 3),
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    size=st.integers(1, 5),
    hidden=st.integers(1, 7),
    width=st.integers(1, 6),
    untied=st.booleans(),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_is_used_exactly_once_in_both_directions(
    family: str, layers: int, groups: int, share: int, size: int, hidden: int, width: int, untied: bool
) -> None:
    alone = family in ALONE or KINDS[family].get("architecture") == "vit"
    heads, untied = groups * share if not alone else groups, untied and "bert" not in family
    symbols = KINDS[family].get("hybrid_layer_pattern")
    model = model_config_from_settings(
        {
            **KINDS[family],
            **({"hybrid_layer_pattern": (symbols * layers)[:layers]} if symbols else {}),
            "num_layers": layers,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "group_query_attention": heads != groups,
            "kv_channels": size,
            "hidden_size": hidden,
            "ffn_hidden_size": width,
            "true_vocab_size": 11,
            "max_position_embeddings": 5,
            "untie_embeddings_and_output_weights": untied,
        }
    )
    assert mapping_errors(FAMILIES[family].rows(model), global_parameter_shapes(model)) == []


def mapping_errors(rows: Sequence[ParameterMapping], shapes: Mapping[str, Shape]) -> list[str]:
    """What is wrong with (expanded) rows, a line each; nothing when every element of both sides is used exactly once.

    shapes: of all our parameters. Runs the ops on tensors of indices, so it is meant for tiny sizes.
    """
    problems = [f"{name} is in no row" for name in shapes if name not in {row.ours for row in rows}]
    for side, names in (
        ("ours", [row.ours for row in rows]),
        ("theirs", [name for row in rows for name in row.theirs]),
    ):
        problems += [f"{side}: {name} is in {count} rows" for name, count in Counter(names).items() if count > 1]
    for row in rows:
        problems += (
            _mapping_problems(row, shapes[row.ours])
            if row.ours in shapes
            else [f"{row.ours} is not a parameter of the network"]
        )
    return problems


def _mapping_problems(row: ParameterMapping, shape: Shape) -> list[str]:
    problems = []
    whole = torch.arange(math.prod(shape)).view(shape)
    parts = row.op.theirs(whole)
    if len(parts) != len(row.theirs):
        problems.append(f"{row.ours} makes {len(parts)} of theirs, and the row names {len(row.theirs)}")
    used = torch.cat([part.reshape(-1) for part in parts])
    if not torch.equal(used.sort().values, whole.view(-1)):
        problems.append(f"{row.ours}: not every element goes to exactly one of theirs")
    elif not torch.equal(row.op.ours(parts), whole):
        problems.append(f"{row.ours}: there and back is not where it was")
    return problems


@pytest.mark.parametrize(
    "op, shape, theirs",
    [
        (same, (3, 4), [(3, 4)]),
        (transpose, (3, 4), [(4, 3)]),
        (concat_conversion(2, 1, 3), (6, 2), [(2, 2), (1, 2), (3, 2)]),
        (per_expert_conversion(concat_conversion(2, 2), 2), (3, 4, 5), [(2, 5)] * 6),
        (per_expert_conversion(same, 1), (2, 3), [(3,)] * 2),
    ],
)
def test_ops_make_the_shapes_of_theirs_and_come_back(
    op: ReversibleTensorConversion, shape: tuple[int, ...], theirs: list[tuple[int, ...]]
) -> None:
    names = tuple(f"part{place}" for place in range(len(theirs)))
    rows = [ParameterMapping("weight", names, op)]
    assert list(hf_shapes(rows, {"weight": shape}).values()) == theirs
    assert mapping_errors(rows, {"weight": shape}) == []


SHAPES = {"a": (4, 3), "b": (4,)}
WHOLE = [ParameterMapping("a", ("x", "y"), concat_conversion(1, 3)), ParameterMapping("b", ("z",), same)]


@pytest.mark.parametrize(
    "rows, complaint",
    [
        (WHOLE[:1], "b is in no row"),
        ([*WHOLE, WHOLE[1]], "ours: b is in 2 rows"),
        ([WHOLE[0], ParameterMapping("b", ("y",), same)], "theirs: y is in 2 rows"),
        ([*WHOLE, ParameterMapping("c", ("w",), same)], "c is not a parameter"),
        ([ParameterMapping("a", ("x",), concat_conversion(1, 3)), WHOLE[1]], "makes 2 of theirs, and the row names 1"),
        (
            [
                ParameterMapping(
                    "a", ("x",), ReversibleTensorConversion(lambda parts: parts[0], lambda whole: (whole[:3],))
                ),
                WHOLE[1],
            ],
            "exactly one of theirs",
        ),
        (
            [
                ParameterMapping(
                    "a",
                    ("x", "y"),
                    ReversibleTensorConversion(lambda parts: parts[0], lambda whole: (whole, whole[:1])),
                ),
                WHOLE[1],
            ],
            "exactly one of theirs",
        ),
        (
            [
                ParameterMapping(
                    "a",
                    ("x", "y"),
                    ReversibleTensorConversion(
                        lambda parts: torch.cat(list(parts[::-1])), lambda whole: whole.split([1, 3])
                    ),
                ),
                WHOLE[1],
            ],
            "there and back",
        ),
    ],
)
def test_rows_that_lose_double_or_move_elements_are_found(rows: list[ParameterMapping], complaint: str) -> None:
    assert any(complaint in fault for fault in mapping_errors(rows, SHAPES)), mapping_errors(rows, SHAPES)
    assert mapping_errors(WHOLE, SHAPES) == []
