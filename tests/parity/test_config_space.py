"""A config.json whose keys have other values is refused, or is the network that transformers makes of it.

Every key of a tiny network's file is left out, made null, and given other values; keys of other families are put in. The
weights stay. Where transformers loads the folder and we do too, the logits must be equal, so that no key is passed over.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.config.flags.declare import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from tests.parity.test_families import CASES, Said, ids, logits_here, published, said

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TOLERANCE = 1e-4  # of the largest logit: a key that is passed over changes more, and delta nets round more
FEW = 24  # mutations of a case in the default suite
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "tanh", "quick_gelu")
NAMES = ("architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path")
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.7, "mscale_all_dim": 0.9},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "attention_factor": 1.3},
    {"partial_rotary_factor": 0.5},
    {"type": "linear", "factor": 2.0},
)
# Keys of some family or of an older release, and values that they have there.
ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "rope_theta": (500.0,),
    "rope_scaling": (None, *ROPES),
    "rope_parameters": (None,),
    "partial_rotary_factor": (0.5, 1.0),
    "sliding_window": (4, None),
    "max_window_layers": (1,),
    "use_sliding_window": (True,),
    "layer_types": (["full_attention", "sliding_attention"],),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "alibi", "scale_embedding", "qk_norm"), (True,)),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm", "is_decoder", "add_cross_attention"), (True,)),
    **dict.fromkeys(("tie_word_embeddings", "rope_interleave", "norm_topk_prob", "is_causal"), (True, False)),
    "head_dim": (8, 16),
    "num_key_value_heads": (None, 4),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), (0.1,)),
    "hidden_act": ("gelu",),
    "hidden_activation": ("gelu", None),
    **dict.fromkeys(("logit_scale", "embedding_multiplier", "residual_multiplier", "logits_scaling"), (2.0,)),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "attention_multiplier"), (0.3,)),
    "query_pre_attn_scalar": (9,),
    "clip_qkv": (0.1,),
    "routed_scaling_factor": (2.5,),
    "scoring_func": ("sigmoid", "softmax"),
    "topk_method": ("greedy", "noaux_tc"),
    **dict.fromkeys(("n_group", "topk_group", "moe_layer_freq", "decoder_sparse_step"), (1, 2)),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), (4,)),
    "shared_expert_intermediate_size": (0,),
    "time_step_limit": ([0.0, 0.05],),
    "time_step_min": (0.2,),
    "attention_chunk_size": (4,),
    "no_rope_layers": ([1, 0],),
    "use_bidirectional_attention": (True,),
    "scale_attn_weights": (False,),
    "scale_attn_by_inverse_layer_idx": (True,),
    "quantization_config": ({"quant_method": "awq", "bits": 4},),
    "position_embedding_type": ("relative_key",),
}
# transformers rescales weights that it has loaded, by a key about first values.
ITS_OWN_SLIPS = {("mamba2", "rescale_prenorm_residual"), ("mamba2 tied", "rescale_prenorm_residual")}


def other_values(key: str, value: Any) -> Iterator[Any]:
    """Values of the same kind, and null."""
    yield None
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from {value + 1, max(value - 1, 0), 0, value * 2} - {value}
    elif isinstance(value, float):
        yield from {value * 2, 0.0, value * 0.5 + 0.25} - {value}
    elif isinstance(value, str):
        yield from (one for one in (ACTIVATIONS if "act" in key else (f"{value}_x",)) if one != value)
    elif isinstance(value, list):
        yield from (value[::-1], value[:-1], [])
    elif isinstance(value, dict):
        yield {}
        for name, inner in value.items():
            yield {other: one for other, one in value.items() if other != name}
            yield from ({**value, name: one} for one in other_values(name, inner))
        yield from ({**value, **rope} for rope in ROPES)


def mutations(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, the file with another value of it)."""
    for key, value in config.items():
        if key not in NAMES:
            yield key, {other: one for other, one in config.items() if other != key}
            yield from ((key, {**config, key: one}) for one in other_values(key, value))
    for key, values in ELSEWHERE.items():
        yield from ((key, {**config, key: one}) for one in values if config.get(key, ids) != one)


def theirs(folder: Path) -> Said | None:
    """What transformers says with the folder; None where it does not load all of it, and only it."""
    (named,) = json.loads((folder / "config.json").read_text())["architectures"]
    try:
        model, found = getattr(transformers, named).from_pretrained(
            folder, output_loading_info=True, dtype=torch.float32
        )
        whole = not any(found[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
        return said(model.eval()) if whole else None
    except Exception:  # noqa: BLE001  it raises whatever its code stumbles over
        return None


def is_same(ours: Said, others: Said) -> bool:
    """Within the tolerance of transformers', relative to the largest; where theirs are no numbers there is nothing to compare."""
    return ours.keys() == others.keys() and all(
        bool(not values.isfinite().all() or (ours[name] - values).abs().max() <= TOLERANCE * values.abs().max())
        for name, values in others.items()
    )


@pytest.mark.parametrize(
    "case, few",
    [
        *((case, FEW) for case in ("llama3", "deepseek v3", "nemotron h experts")),
        *(pytest.param(case, 0, marks=pytest.mark.nightly) for case in CASES),
    ],
)
def test_another_value_is_refused_or_is_transformers_network(case: str, few: int, tmp_path: Path) -> None:
    """few: so many mutations, drawn at random; 0: all of them."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    published(case).save_pretrained(tmp_path / "whole")
    config = json.loads((tmp_path / "whole/config.json").read_text())
    tried = list(mutations(config))
    compared, wrong = 0, []
    for number, (key, changed) in enumerate(random.Random(case).sample(tried, few) if few else tried):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file in (tmp_path / "whole").glob("*.safetensors"):
            os.symlink(file, folder / file.name)
        (folder / "config.json").write_text(json.dumps(changed))
        with contextlib.suppress(CheckpointError, ConfigError):
            ours, others = logits_here(folder, {}), theirs(folder)
            if ours is not None and others is not None and (case, key) not in ITS_OWN_SLIPS:
                compared += 1
                wrong += [] if is_same(ours, others) else [f"{key}: {changed.get(key, 'left out')}"]
    assert not wrong, wrong
    assert compared > len(tried) // 20 if not few else compared


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_language_model_of_a_qwen_with_a_vision_tower_is_read(kind: str, tmp_path: Path) -> None:
    text = {**CASES["qwen3.5" if kind == "Qwen3_5" else "qwen3.5 experts"][1]}
    tower = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=tower, tie_word_embeddings=False)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = {"words": model(input_ids=ids()).logits}
    found = logits_here(tmp_path, {})
    assert found is not None and is_same(found, expected)
