"""config.json of published models as they are found: read, written back the same, refused key by key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.core.families.registry import FAMILIES, differences, family_of, fitting_family, model_of

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "transformers_version": "4.40.0", "use_cache": True}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
          "rope_type": "llama3"}


def kin(name: str, **changes: Any) -> dict[str, Any]:
    """A config.json of the kin of Llama."""
    base = {"architectures": [name], "model_type": name.removesuffix("ForCausalLM").lower(), "vocab_size": 32000, "hidden_size": 4096,
            "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "hidden_act": "silu", "max_position_embeddings": 4096, "initializer_range": 0.02, "rms_norm_eps": 1e-05,
            "tie_word_embeddings": False, "attention_dropout": 0.0, "rope_theta": 10000.0, "rope_scaling": None, **TOKENS}
    return {**base, **changes}


LLAMA_KEYS = {"head_dim": 128, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
PUBLISHED: dict[str, dict[str, Any]] = {
    "GPT-2": {"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
              "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
              "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
              "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
              "summary_type": "cls_index", "summary_use_proj": True,
              "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257},
    "Llama 2 7B": kin("LlamaForCausalLM", num_key_value_heads=32, **LLAMA_KEYS),
    "Llama 3.1 8B": kin("LlamaForCausalLM", **LLAMA_KEYS, vocab_size=128256, intermediate_size=14336, rope_theta=500000.0,
                        rope_scaling=LLAMA3, max_position_embeddings=131072),
    "SmolLM2 135M": kin("LlamaForCausalLM", **{**LLAMA_KEYS, "head_dim": 64}, vocab_size=49152, hidden_size=576, intermediate_size=1536,
                        num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
                        rope_theta=100000, is_llama_config=True, rope_interleaved=False,
                        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}),
    "Mistral 7B v0.3": kin("MistralForCausalLM", head_dim=128, sliding_window=None, rope_theta=1000000.0,
                           intermediate_size=14336, max_position_embeddings=32768),
    "Mistral Nemo": kin("MistralForCausalLM", head_dim=128, hidden_size=5120, sliding_window=131072, max_position_embeddings=131072),
    "Qwen2.5 0.5B": kin("Qwen2ForCausalLM", vocab_size=151936, hidden_size=896, num_attention_heads=14, num_key_value_heads=2,
                        tie_word_embeddings=True, max_window_layers=24, sliding_window=32768, use_sliding_window=False,
                        use_mrope=False, rope_theta=1000000.0),
    "Qwen3 0.6B": kin("Qwen3ForCausalLM", vocab_size=151936, hidden_size=1024, num_attention_heads=16, head_dim=128,
                      attention_bias=False, max_window_layers=28, sliding_window=None, use_sliding_window=False),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_and_comes_back_the_same(name: str) -> None:
    config = json.loads(json.dumps(PUBLISHED[name]))
    family = family_of(config, name)
    settings, problems = family.config_in(config)
    assert problems == []
    model = model_of(settings)
    back = {**family.config_out(model, config)}
    added = {key: value for key, value in back.items() if key not in config}
    assert {key: back.get(key) for key in config if config[key] is not False} == {k: v for k, v in config.items() if v is not False}
    assert all(value in (None, False, True) or key in ("n_inner", "embd_pdrop") for key, value in added.items()), added
    assert differences(model, family) == []
    assert family.config_in(back) == (settings, [])


def test_sizes_of_a_published_config_become_the_settings_of_the_same_network() -> None:
    settings, _ = FAMILIES["llama"].config_in(PUBLISHED["Llama 3.1 8B"])
    model = model_of(settings)
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.kv_channels) == (32, 4096, 14336, 128)
    assert (model.num_attention_heads, model.num_query_groups, model.true_vocab_size) == (32, 8, 128256)
    assert (model.activation, model.gated, model.normalization, model.norm_epsilon) == ("silu", True, "RMSNorm", 1e-5)
    assert (model.ties_embeddings, model.add_bias_linear, model.add_qkv_bias) == (False, False, False)
    rope = model.rope
    assert (rope.position_embedding_type, rope.rotary_base, rope.use_rope_scaling) == ("rope", 500000.0, True)
    assert (rope.rope_scaling_factor, rope.rope_scaling_low_freq_factor, rope.rope_scaling_high_freq_factor,
            rope.rope_scaling_original_length) == (8.0, 1.0, 4.0, 8192)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("name, changes, complaint", [
    ("Llama 2 7B", {"rope_scaling": YARN}, "rope_type: 'yarn' is not built here"),
    ("Llama 2 7B", {"rope_scaling": {"type": "linear"}}, "rotary positions: factor: nothing is not a positive number"),
    ("Llama 2 7B", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1.0}}, "rotary positions: beta: 1.0 is unknown"),
    ("Llama 2 7B", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor must be larger"),
    ("Llama 2 7B", {"rope_scaling": "linear"}, "rope_scaling: 'linear' is not an object"),
    ("Llama 2 7B", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5"),
    ("Llama 2 7B", {"hidden_act": "gelu"}, "hidden_act: 'gelu' has no counterpart here; 'silu' has"),
    ("Llama 2 7B", {"attention_bias": True}, "attention_bias: True with mlp_bias: False"),
    ("Llama 2 7B", {"residual_multiplier": 0.22}, "residual_multiplier: 0.22 is unknown here and may change the network"),
    ("Llama 2 7B", {"num_hidden_layers": "32"}, "num_hidden_layers: '32' is not a positive whole number"),
    ("Llama 2 7B", {"hidden_size": None}, "hidden_size: nothing is not a positive whole number"),
    ("Llama 2 7B", {"rms_norm_eps": float("nan")}, "rms_norm_eps: nan is not a number"),
    ("Mistral 7B v0.3", {"sliding_window": 4096}, "sliding_window: 4096 is shorter than max_position_embeddings, 32768"),
    ("Qwen2.5 0.5B", {"use_sliding_window": True}, "use_sliding_window: True (sliding_window 32768"),
    ("Qwen3 0.6B", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: sliding_attention"),
    ("Qwen3 0.6B", {"attention_bias": True}, "attention_bias: True has no counterpart"),
    ("GPT-2", {"activation_function": "relu"}, "activation_function: 'relu' has no counterpart here"),
    ("GPT-2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True"),
    ("GPT-2", {"add_cross_attention": True}, "add_cross_attention: True"),
    ("GPT-2", {"n_embd": 770}, "n_embd: 770 is not a multiple of n_head, 12"),
])
def test_what_cannot_be_expressed_is_refused_with_the_key_and_its_value(name: str, changes: dict[str, Any], complaint: str) -> None:
    config = {**PUBLISHED[name], **changes}
    _, problems = family_of(config, name).config_in(config)
    assert len(problems) == 1 and complaint in problems[0], problems


def test_all_that_is_wrong_is_listed_at_once() -> None:
    config = {**PUBLISHED["Llama 2 7B"], "hidden_act": "relu", "rope_scaling": YARN, "hidden_size": -1, "logit_scale": 2.0}
    assert len(FAMILIES["llama"].config_in(config)[1]) == 4


@pytest.mark.parametrize("config, complaint", [
    ({"architectures": ["FalconForCausalLM"]}, "architectures: FalconForCausalLM, which is not known here; known are GPT2LMHeadModel"),
    ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, "LlamaForSequenceClassification"),
    ({"model_type": "mamba"}, "model_type: mamba"), ({}, "model_type: None"), ({"architectures": 3}, "model_type: None")])
def test_an_unknown_architecture_is_named_with_those_known(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        family_of(config, "config.json")


BASE = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 12, "num_attention_heads": 2, "true_vocab_size": 10, "max_position_embeddings": 4}
ROTARY = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False}


@pytest.mark.parametrize("changes, family", [
    ({"openai_gelu": True}, "gpt2"), ({}, "gpt2"), (ROTARY, "llama"), ({**ROTARY, "add_bias_linear": True}, "llama"),
    ({**ROTARY, "add_qkv_bias": True}, "qwen2"), ({**ROTARY, "qk_layernorm": True}, "qwen3")])
def test_a_network_of_ours_finds_the_family_that_can_say_it(changes: dict[str, Any], family: str) -> None:
    assert fitting_family(model_of({**BASE, **changes})).name == family


@pytest.mark.parametrize("changes, word", [
    ({"squared_relu": True}, "--squared-relu is True, there False"), ({**ROTARY, "rotary_percent": 0.5}, "--rotary-percent is 0.5"),
    ({**ROTARY, "apply_layernorm_1p": True}, "--apply-layernorm-1p"), ({"kv_channels": 8}, "--kv-channels is 8, there 4"),
    ({**ROTARY, "rotary_interleaved": True}, "--rotary-interleaved"), ({"qk_layernorm": True}, "--qk-layernorm"),
    ({**ROTARY, "use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2.0}, "--rotary-seq-len-interpolation-factor"),
    ({"apply_residual_connection_post_layernorm": True}, "--apply-residual-connection-post-layernorm")])
def test_a_network_that_no_family_computes_is_refused_with_the_settings_that_are_lost(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match="no published architecture") as raised:
        fitting_family(model_of({**BASE, **changes}))
    assert len(raised.value.problems) == len(FAMILIES) and word in str(raised.value)
    with pytest.raises(CheckpointError, match="llama does not compute"):
        fitting_family(model_of({**BASE, **changes}), "llama")
