"""Small networks with strong opinions, and what they say when the whole text is computed anew for every token."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import NullTokenizer
from megatron.inference.engine import Engine
from megatron.inference.requests import GenerationRequest, Ids
from megatron.inference.sampling import SamplingParams
from tests.helpers import tiny

GREEDY = SamplingParams(temperature=0.0)
POSITIONS = 64
BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "init_method_std": 0.5,
    "fp64": True,
    "position_embedding_type": "rope",
    "max_position_embeddings": POSITIONS,
    "seq_length": POSITIONS,
    "hidden_dropout": 0.3,
    "attention_dropout": 0.3,
    "untie_embeddings_and_output_weights": True,
}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "kv_lora_rank": 8,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_layer_freq": "2"}
HYBRID: dict[str, Any] = {
    "num_layers": None,
    "hybrid_layer_pattern": "M*|G-",
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_state_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
KINDS: dict[str, dict[str, Any]] = {
    "rope": {},
    "learned": {"position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False},
    "none": {"position_embedding_type": "none"},
    "grouped": {"group_query_attention": True, "num_query_groups": 2, "qk_layernorm": True},
    "one group": {
        "group_query_attention": True,
        "num_query_groups": 1,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
    },
    "window": {"window_size": "5,0"},
    "rotations of windows": {
        "window_size": "3,0",
        "window_attn_skip_freq": "2",
        "position_embedding_type": "rope",
        "rotary_base": 500.0,
        "rotary_base_local": 20.0,
    },
    "windows by turns": {"window_size": "3,0", "window_attn_skip_freq": "2"},
    "sinks and windows": {
        "window_size": "4,0",
        "window_attn_skip_freq": "2",
        "softmax_type": "learnable",
        "group_query_attention": True,
        "num_query_groups": 2,
    },
    "caps and gates": {
        "attention_logit_softcap": 3.0,
        "final_logit_softcap": 9.0,
        "attention_output_gate": True,
        "qk_l2_norm": True,
        "softmax_type": "off-by-one",
    },
    "yarn": {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 16,
        "no_rope_freq": "2",
    },
    "latent": LATENT,
    "compressed latent and window": {**LATENT, "q_lora_rank": 12, "window_size": "5,0"},
    "experts": EXPERTS,
    "latent and experts": {
        **LATENT,
        **EXPERTS,
        "moe_router_score_function": "sigmoid",
        "moe_shared_expert_intermediate_size": 16,
    },
    "ahead": {"mtp_num_layers": 2},
}


def stages_on(world_size: int, vocabulary: int = tiny.VOCABULARY, seed: int = 7, **changes: Any) -> list[GPTModel]:
    """This rank's stages of an untrained network, in evaluation mode."""
    settings = tiny.config(world_size, **{**BASE, **changes})
    unpadded = dataclasses.replace(settings, model=dataclasses.replace(settings.model, padded_vocab_size=None))
    run = tiny.run_of(tiny.with_vocabulary(unpadded, vocabulary))
    return [
        tiny.gpt(run, spec).materialize(seed).eval()
        for spec in stage_specs_of_run(run.config)
        if spec.rank == run.mesh.pp.rank
    ]


@cache
def network(kind: str = "rope", *, vocabulary: int = tiny.VOCABULARY, seed: int = 7) -> GPTModel:
    """A whole network of a kind."""
    return stages_on(1, vocabulary, seed, **KINDS[kind])[0]


def engine_of(
    model: GPTModel, tokenizer: Tokenizer | None = None, *, draft: GPTModel | None = None, **changes: Any
) -> Engine:
    """An engine with some settings by the names of their fields."""
    short = {
        "block": "inference_dynamic_batching_block_size",
        "tokens": "inference_dynamic_batching_max_tokens",
        "together": "inference_max_requests",
        "waiting": "inference_max_waiting_requests",
        "gb": "inference_dynamic_batching_buffer_size_gb",
        "sharing": "inference_dynamic_batching_prefix_caching",
        "length": "inference_max_seq_length",
        "guesses": "num_speculative_tokens",
    }
    config = InferenceConfig(**{short.get(name, name): value for name, value in changes.items()})
    return Engine([model], tokenizer or NullTokenizer(tiny.VOCABULARY), config, draft=[] if draft is None else [draft])


def gigabytes(model: GPTModel, tokens: int) -> float:
    """The size of a cache for so many tokens: keys and values of each layer and head."""
    settings = model.build.model
    return (
        2
        * settings.num_layers
        * settings.num_query_groups
        * settings.kv_channels
        * model.build.dtype.itemsize
        * tokens
        / 1e9
        * 1.0001
    )


def prompts(count: int, *, shortest: int = 1, longest: int = 30, seed: int = 1) -> list[Ids]:
    """Random ones of many lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [tuple(torch.randint(0, tiny.VOCABULARY - 1, (length,), generator=generator).tolist()) for length in lengths]


def scores(model: GPTModel, ids: Ids) -> Tensor:
    """log-probabilities [s, v] of what follows every place, from one pass over the whole text."""
    with torch.no_grad():
        return model(ids=torch.tensor([ids]))[:, 0, : model.build.model.true_vocab_size].double().log_softmax(-1)


def slowly(model: GPTModel, prompt: Ids, count: int) -> tuple[list[int], list[float]]:
    """The likeliest continuation and its log-probabilities, the whole text computed anew for every token."""
    ids, logprobs = list(prompt), []
    for _ in range(count):
        last = scores(model, tuple(ids))[-1]
        ids.append(int(last.argmax()))
        logprobs.append(float(last[ids[-1]]))
    return ids[len(prompt) :], logprobs


def greedy(prompt: Ids, count: int, **changes: Any) -> GenerationRequest:
    """The likeliest continuation of just so many tokens."""
    return GenerationRequest(prompt, count, **{"sampling": GREEDY, "ignore_eod": True, **changes})
