"""config.json of published models as they are found: read, written back the same, refused key by key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families.registry import FAMILIES, family_of_config, fitting_family, lost_settings

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
SPARSE_KEYS = {"attention_bias": False, "ep_size": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
               "moe_layer_freq": 1, "seq_aux": True}
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
    "Qwen3 0.6B": kin("Qwen3ForCausalLM", vocab_size=151936, num_hidden_layers=28, hidden_size=1024, num_attention_heads=16, head_dim=128,
                      attention_bias=False, max_window_layers=28, sliding_window=None, use_sliding_window=False),
    "Mistral 7B v0.1": kin("MistralForCausalLM", head_dim=128, sliding_window=4096, intermediate_size=14336, max_position_embeddings=32768),
    "Qwen2.5 7B, long": kin("Qwen2ForCausalLM", num_hidden_layers=28, hidden_size=3584, num_attention_heads=28, num_key_value_heads=4,
                            max_position_embeddings=131072, rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
                            max_window_layers=20, sliding_window=32768, use_sliding_window=True, use_mrope=False),
    "Mixtral 8x7B": kin("MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2, intermediate_size=14336, sliding_window=None,
                        max_position_embeddings=32768, rope_theta=1000000.0, output_router_logits=False, router_aux_loss_coef=0.02),
    "Qwen1.5 MoE-A2.7B": kin("Qwen2MoeForCausalLM", model_type="qwen2_moe", hidden_size=2048, num_hidden_layers=24, num_attention_heads=16,
                             num_key_value_heads=16, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
                             shared_expert_intermediate_size=5632, norm_topk_prob=False, decoder_sparse_step=1, max_window_layers=21,
                             sliding_window=32768, use_sliding_window=False, output_router_logits=False, router_aux_loss_coef=0.001),
    "Qwen3 30B-A3B": kin("Qwen3MoeForCausalLM", model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, head_dim=128,
                         num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
                         decoder_sparse_step=1, mlp_only_layers=[], max_window_layers=48, sliding_window=None, use_sliding_window=False,
                         attention_bias=False, output_router_logits=False, router_aux_loss_coef=0.001),
    "DeepSeek V2 Lite": kin(
        "DeepseekV2ForCausalLM", model_type="deepseek_v2", **SPARSE_KEYS, hidden_size=2048, intermediate_size=10944, num_hidden_layers=27,
        num_attention_heads=16, num_key_value_heads=16, rms_norm_eps=1e-6, max_position_embeddings=163840, moe_intermediate_size=1408,
        n_routed_experts=64, n_shared_experts=2, n_group=1, topk_group=1, topk_method="greedy", num_experts_per_tok=6, q_lora_rank=None,
        norm_topk_prob=False, scoring_func="softmax", routed_scaling_factor=1.0, first_k_dense_replace=1, aux_loss_alpha=0.001,
        rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                      "original_max_position_embeddings": 4096, "type": "yarn"}),
    "DeepSeek V2": kin(
        "DeepseekV2ForCausalLM", model_type="deepseek_v2", **SPARSE_KEYS, hidden_size=5120, intermediate_size=12288, num_hidden_layers=60,
        num_attention_heads=128, num_key_value_heads=128, rms_norm_eps=1e-6, max_position_embeddings=163840, moe_intermediate_size=1536,
        n_routed_experts=160, n_shared_experts=2, n_group=8, topk_group=3, topk_method="group_limited_greedy", num_experts_per_tok=6,
        q_lora_rank=1536, norm_topk_prob=False, scoring_func="softmax", routed_scaling_factor=16.0, first_k_dense_replace=1,
        aux_loss_alpha=0.001,
        rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                      "original_max_position_embeddings": 4096, "type": "yarn"}),
    "DeepSeek V3": kin(
        "DeepseekV3ForCausalLM", model_type="deepseek_v3", **SPARSE_KEYS, vocab_size=129280, hidden_size=7168, intermediate_size=18432,
        num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, rms_norm_eps=1e-6, max_position_embeddings=163840,
        moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, n_group=8, topk_group=4, topk_method="noaux_tc",
        num_experts_per_tok=8, q_lora_rank=1536, norm_topk_prob=True, scoring_func="sigmoid", routed_scaling_factor=2.5,
        first_k_dense_replace=3, num_nextn_predict_layers=1,
        rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                      "original_max_position_embeddings": 4096, "type": "yarn"}),
    "Kimi K2": kin(
        "DeepseekV3ForCausalLM", model_type="kimi_k2", **{**SPARSE_KEYS, "ep_size": 1}, vocab_size=163840, hidden_size=7168, intermediate_size=18432,
        num_hidden_layers=61, num_attention_heads=64, num_key_value_heads=64, rms_norm_eps=1e-6, max_position_embeddings=131072,
        moe_intermediate_size=2048, n_routed_experts=384, n_shared_experts=1, n_group=1, topk_group=1, topk_method="noaux_tc",
        num_experts_per_tok=8, q_lora_rank=1536, norm_topk_prob=True, scoring_func="sigmoid", routed_scaling_factor=2.827,
        first_k_dense_replace=1, num_nextn_predict_layers=0, rope_theta=50000.0, aux_loss_alpha=0.001, pretraining_tp=1,
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        rope_scaling={"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                      "original_max_position_embeddings": 4096, "type": "yarn"}),
    "Gemma 2B": kin("GemmaForCausalLM", vocab_size=256000, hidden_size=2048, intermediate_size=16384, num_hidden_layers=18, num_attention_heads=8,
                    num_key_value_heads=1, head_dim=256, hidden_act="gelu", hidden_activation=None, attention_bias=False, rms_norm_eps=1e-06,
                    max_position_embeddings=8192, tie_word_embeddings=True),
    "Gemma 2 27B": kin(
        "Gemma2ForCausalLM", vocab_size=256000, hidden_size=4608, intermediate_size=36864, num_hidden_layers=46, num_attention_heads=32,
        num_key_value_heads=16, head_dim=128, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", attention_bias=False,
        rms_norm_eps=1e-06, max_position_embeddings=8192, tie_word_embeddings=True, cache_implementation="hybrid", query_pre_attn_scalar=144,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096, sliding_window_size=4096),
    "Gemma 3 1B": kin(
        "Gemma3ForCausalLM", model_type="gemma3_text", vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh", attention_bias=False, rms_norm_eps=1e-06, max_position_embeddings=32768, cache_implementation="hybrid", query_pre_attn_scalar=256,
        attn_logit_softcapping=None, final_logit_softcapping=None, sliding_window=512, sliding_window_pattern=6, rope_theta=1000000,
        rope_local_base_freq=10000, tie_word_embeddings=True),
    "Bamba 9B": kin(
        "BambaForCausalLM", vocab_size=128256, intermediate_size=14336, max_position_embeddings=262144, attn_layer_indices=[9, 18, 27],
        partial_rotary_factor=0.5, mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64, mamba_d_state=128, mamba_expand=2,
        mamba_n_groups=1, mamba_n_heads=128, mamba_proj_bias=False, attention_bias=False, mlp_bias=False, num_logits_to_keep=1),
    "gpt-oss 20b": kin(
        "GptOssForCausalLM", model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
        num_attention_heads=64, head_dim=64, max_position_embeddings=131072, num_local_experts=32, num_experts_per_tok=4, experts_per_token=4,
        initial_context_length=4096, attention_bias=True, sliding_window=128, swiglu_limit=7.0, rope_theta=150000, output_router_logits=False,
        router_aux_loss_coef=0.9, layer_types=["sliding_attention", "full_attention"] * 12,
        rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
                      "truncate": False}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_and_comes_back_the_same(name: str) -> None:
    config = json.loads(json.dumps(PUBLISHED[name]))
    family = family_of_config(config, name)
    settings, problems = family.settings_from_config(config)
    assert problems == []
    model = model_config_from_settings(settings)
    back = {**family.to_hf_config(model, config)}
    added = {key: value for key, value in back.items() if key not in config}
    assert {key: back.get(key) for key in config if config[key] is not False} == {k: v for k, v in config.items() if v is not False}
    assert all(value in (None, False, True) or key in ("n_inner", "embd_pdrop") for key, value in added.items()), added
    assert lost_settings(model, family) == []
    assert family.settings_from_config(back) == (settings, [])


def test_sizes_of_a_published_config_become_the_settings_of_the_same_network() -> None:
    settings, _ = FAMILIES["llama"].settings_from_config(PUBLISHED["Llama 3.1 8B"])
    model = model_config_from_settings(settings)
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.kv_channels) == (32, 4096, 14336, 128)
    assert (model.num_attention_heads, model.num_query_groups, model.true_vocab_size) == (32, 8, 128256)
    assert (model.activation_name, model.has_gated_mlp, model.normalization, model.norm_epsilon) == ("silu", True, "RMSNorm", 1e-5)
    assert (model.ties_embeddings, model.add_bias_linear, model.add_qkv_bias) == (False, False, False)
    rope = model.rope
    assert (rope.position_embedding_type, rope.rotary_base, rope.use_rope_scaling) == ("rope", 500000.0, True)
    assert (rope.rope_scaling_factor, rope.rope_scaling_low_freq_factor, rope.rope_scaling_high_freq_factor,
            rope.rope_scaling_original_length) == (8.0, 1.0, 4.0, 8192)


DYNAMIC = {"type": "dynamic", "factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SPARSE = "Qwen3 30B-A3B"


@pytest.mark.parametrize("name, changes, complaint", [
    ("Llama 2 7B", {"rope_scaling": DYNAMIC}, "rope_type: 'dynamic' is not built here"),
    ("Llama 2 7B", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max_position_embeddings: nothing is not"),
    ("Llama 2 7B", {"rope_scaling": {**YARN, "attention_factor": 1.5}}, "attention_factor: 1.5 has no counterpart here; 1.1386"),
    ("Llama 2 7B", {"rope_scaling": {**YARN, "mscale": 0.7}}, "mscale: 0.7 with mscale_all_dim: 0"),
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
    ("Mistral 7B v0.3", {"sliding_window": -1}, "sliding_window: -1 is not a positive whole number"),
    ("Qwen2.5 0.5B", {"use_sliding_window": True, "sliding_window": None}, "sliding_window: None is not a positive whole number"),
    ("Qwen3 0.6B", {"layer_types": ["full_attention", "sliding_attention"] * 14}, "layer_types: sliding_attention with use_sliding_window"),
    ("Qwen3 0.6B", {"layer_types": ["full_attention"] * 5}, "layer_types: 5 is not built here; 28 times full_attention or sliding"),
    ("Qwen3 0.6B", {"layer_types": ["linear_attention"] * 28}, "layer_types: linear_attention is not built here"),
    ("Mixtral 8x7B", {"num_local_experts": 0}, "num_local_experts: 0 is not a positive whole number"),
    ("Mixtral 8x7B", {"attention_sink": 4}, "attention_sink: 4 is unknown here"),
    (SPARSE, {"decoder_sparse_step": 49}, "decoder_sparse_step: 49 with mlp_only_layers: [] leaves no layer with experts"),
    (SPARSE, {"num_experts": "many"}, "num_experts: 'many' is not a positive whole number"),
    ("DeepSeek V2 Lite", {"scoring_func": "sigmoid"}, "scoring_func: 'sigmoid' has no counterpart here; 'softmax' has"),
    ("DeepSeek V2 Lite", {"norm_topk_prob": True}, "norm_topk_prob: True has no counterpart here"),
    ("DeepSeek V2 Lite", {"rms_norm_eps": 1e-5}, "rms_norm_eps: 1e-05 has no counterpart here; 1e-06"),
    ("DeepSeek V2 Lite", {"moe_layer_freq": 2}, "moe_layer_freq: 2 has no counterpart here; 1 has"),
    ("DeepSeek V2 Lite", {"q_lora_rank": -4}, "q_lora_rank: -4 is not a positive whole number"),
    ("DeepSeek V2 Lite", {"num_key_value_heads": 4}, "num_key_value_heads: 4 has no counterpart here"),
    ("DeepSeek V3", {"first_k_dense_replace": 61}, "first_k_dense_replace: 61 is no number of layers from 0 to 60"),
    ("DeepSeek V3", {"topk_group": 8}, "topk_group: 8 of num_experts_per_tok: 8; here a group's score is the sum of its best 1"),
    ("gpt-oss 20b", {"experts_per_token": 2}, "experts_per_token: 2 has no counterpart here; 4 has"),
    ("gpt-oss 20b", {"swiglu_alpha": 1.0}, "swiglu_alpha: 1.0 has no counterpart here; 1.702 has"),
    ("Qwen3 0.6B", {"attention_bias": True}, "attention_bias: True has no counterpart"),
    ("Gemma 2B", {"hidden_activation": "silu"}, "hidden_activation: 'silu' has no counterpart here; 'gelu_new' or"),
    ("Gemma 2B", {"attention_bias": True}, "attention_bias: True has no counterpart"),
    ("Gemma 2 27B", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True is unknown here"),
    ("Gemma 3 1B", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0 has no counterpart here; null has"),
    ("Gemma 3 1B", {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "of sliding_attention: rope_type: 'linear' has"),
    ("Gemma 3 1B", {"rope_parameters": {"sliding_attention": [1]}}, "of sliding_attention: sliding_attention: [1] is unknown"),
    ("Gemma 3 1B", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters: rope_type is no kind of layer here"),
    ("Gemma 3 1B", {"rope_parameters": "default"}, "rope_parameters: 'default' does not say them by kind of layer"),
    ("Gemma 2 27B", {"layer_types": ["full_attention"]}, "layer_types: 1 is not built here; 46 times"),
    ("Gemma 2 27B", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping: 0.0 is not a positive number"),
    ("GPT-2", {"activation_function": "relu"}, "activation_function: 'relu' has no counterpart here"),
    ("GPT-2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True"),
    ("GPT-2", {"add_cross_attention": True}, "add_cross_attention: True"),
    ("GPT-2", {"n_embd": 770}, "n_embd: 770 is not a multiple of n_head, 12"),
])
def test_what_cannot_be_expressed_is_refused_with_the_key_and_its_value(name: str, changes: dict[str, Any], complaint: str) -> None:
    config = {**PUBLISHED[name], **changes}
    _, problems = family_of_config(config, name).settings_from_config(config)
    assert len(problems) == 1 and complaint in problems[0], problems


def test_all_that_is_wrong_is_listed_at_once() -> None:
    config = {**PUBLISHED["Llama 2 7B"], "hidden_act": "relu", "rope_scaling": DYNAMIC, "hidden_size": -1, "logit_scale": 2.0}
    assert len(FAMILIES["llama"].settings_from_config(config)[1]) == 4


@pytest.mark.parametrize("config, complaint", [
    ({"architectures": ["FalconForCausalLM"]}, "architectures: FalconForCausalLM, which is not known here; known are GPT2LMHeadModel"),
    ({"architectures": ["LlamaForTokenClassification"], "model_type": "llama"}, "LlamaForTokenClassification"),
    ({"model_type": "mamba"}, "model_type: mamba"), ({}, "model_type: None"), ({"architectures": 3}, "model_type: None")])
def test_an_unknown_architecture_is_named_with_those_known(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        family_of_config(config, "config.json")


BASE = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 12, "num_attention_heads": 2, "true_vocab_size": 10, "max_position_embeddings": 4}
GEMMA = {"position_embedding_type": "rope", "normalization": "RMSNorm", "geglu": True, "openai_gelu": True, "add_bias_linear": False,
         "apply_layernorm_1p": True, "scale_embeddings": True}
ROTARY = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False}


@pytest.mark.parametrize("changes, family", [
    ({"openai_gelu": True}, "gpt2"), ({}, "gpt2"), (ROTARY, "llama"), ({**ROTARY, "add_bias_linear": True}, "llama"),
    ({**ROTARY, "norm_after_sublayer": True, "qk_layernorm": True, "qk_layernorm_across_heads": True}, "olmo2"),
    ({**ROTARY, "add_qkv_bias": True}, "qwen2"), ({**ROTARY, "qk_layernorm": True}, "qwen3"), (GEMMA, "gemma"),
    ({**GEMMA, "sandwich_norm": True, "final_logit_softcap": 5.0, "softmax_scale": 0.25}, "gemma2"),
    ({**GEMMA, "sandwich_norm": True, "qk_layernorm": True, "rotary_base_local": 50.0, "window_size": "3,0"}, "gemma3")])
def test_a_network_of_ours_finds_the_family_that_can_say_it(changes: dict[str, Any], family: str) -> None:
    assert fitting_family(model_config_from_settings({**BASE, **changes})).name == family


@pytest.mark.parametrize("changes, word", [
    ({"squared_relu": True}, "--squared-relu is True, there False"), ({**ROTARY, "rotary_percent": 0.5}, "--rotary-percent is 0.5"),
    ({**ROTARY, "apply_layernorm_1p": True}, "--apply-layernorm-1p"), ({"kv_channels": 8}, "--kv-channels is 8, there 4"),
    ({**ROTARY, "rotary_interleaved": True}, "--rotary-interleaved"), ({"qk_layernorm": True}, "--qk-layernorm"),
    ({**ROTARY, "use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2.0}, "--rotary-seq-len-interpolation-factor"),
    ({"apply_residual_connection_post_layernorm": True}, "--apply-residual-connection-post-layernorm")])
def test_a_network_that_no_family_computes_is_refused_with_the_settings_that_are_lost(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match="no published architecture") as raised:
        fitting_family(model_config_from_settings({**BASE, **changes}))
    assert len(raised.value.problems) == 4 and f"{len(FAMILIES) - 3} more families" in str(raised.value) and word in str(raised.value)
    with pytest.raises(CheckpointError, match="llama does not compute"):
        fitting_family(model_config_from_settings({**BASE, **changes}), "llama")
