"""Small networks of the Gemma family, whose layers differ by windows, caps and rotary bases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def cases(sizes: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return name -> (class of transformers, its sizes)."""
    return {
        "gemma": ("Gemma", {**sizes, "head_dim": 12, "pad_token_id": None}),
        "gemma2": (
            "Gemma2",
            {
                **sizes,
                "pad_token_id": None,
                "num_hidden_layers": 4,
                "head_dim": 12,
                "query_pre_attn_scalar": 9,
                "sliding_window": 5,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 3.0,
                "attn_implementation": "eager",
            },
        ),
        "gemma2 uncapped": (
            "Gemma2",
            {
                **sizes,
                "head_dim": 12,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 3,
            },
        ),
        "gemma3": (
            "Gemma3",
            {
                **sizes,
                "pad_token_id": None,
                "num_hidden_layers": 4,
                "head_dim": 12,
                "query_pre_attn_scalar": 9,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                },
                "attn_implementation": "eager",
            },
        ),
        "gemma3 capped yarn": (
            "Gemma3",
            {
                **sizes,
                "pad_token_id": None,
                "head_dim": 12,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
                "final_logit_softcapping": 3.0,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
                    "full_attention": {
                        "rope_type": "yarn",
                        "factor": 4.0,
                        "original_max_position_embeddings": 8,
                        "rope_theta": 500.0,
                    },
                },
                "attn_implementation": "eager",
            },
        ),
    }
