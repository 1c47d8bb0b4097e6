"""The arguments of a run of Megatron-LM (0.16) as its checkpoints hold them: every default, and what follows from them.

A checkpoint holds the whole namespace, not what the user typed: `num_query_groups` is 1 without grouped-query attention,
`moe_layer_freq` is the int 1 without experts, and latent attention has sizes where there is none. Only facts about that
interface are here: names and values. Values of classes of Megatron Core are filled in by the process that has it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

MODEL: dict[str, Any] = {
    "num_layers": None, "encoder_num_layers": None, "decoder_num_layers": None, "hidden_size": None, "ffn_hidden_size": None,
    "num_attention_heads": None, "kv_channels": None, "group_query_attention": False, "num_query_groups": 1, "softmax_type": "vanilla",
    "window_size": None, "window_attn_skip_freq": None, "max_position_embeddings": None, "position_embedding_type": "learned_absolute",
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "use_rotary_position_embeddings": False,
    "rotary_base": 10000, "rotary_percent": 1.0, "rotary_interleaved": False, "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False, "rope_scaling_factor": 8.0, "no_rope_freq": None, "add_position_embedding": True, "mrope_section": None,
    "make_vocab_size_divisible_by": 128, "normalization": "LayerNorm", "norm_epsilon": 1e-5, "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False, "openai_gelu": False, "squared_relu": False, "swiglu": False,
    "quick_geglu": False, "activation_func_clamp_value": None, "glu_linear_offset": 0.0, "onnx_safe": None, "bert_binary_head": True,
    "untie_embeddings_and_output_weights": False, "multi_latent_attention": False, "mtp_num_layers": None,
    "mtp_loss_scaling_factor": 0.1, "qk_layernorm": False, "qk_l2_norm": False, "rope_type": None, "add_bias_linear": True,
    "add_qkv_bias": False, "attention_dropout": 0.1, "hidden_dropout": 0.1, "init_method_std": 0.02,
    "embedding_init_method_std": None, "init_method_xavier_uniform": False, "transformer_impl": "transformer_engine",
    "attention_softmax_in_fp32": False, "apply_query_key_layer_scaling": False, "fp32_residual_connection": False,
    "heterogeneous_layers_config_path": None, "heterogeneous_layers_config_encoded_json": None, "spec": None,
    "hybrid_attention_ratio": 0.0, "hybrid_mlp_ratio": 0.0, "hybrid_override_pattern": None, "mamba_state_dim": 128,
    "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_num_heads": None, "is_hybrid_model": False,
    "disable_mamba_mem_eff_path": False, "masked_softmax_fusion": True, "bias_gelu_fusion": True, "bias_swiglu_fusion": True,
    "bias_dropout_fusion": True, "apply_rope_fusion": True, "cross_entropy_loss_fusion": False, "cross_entropy_fusion_impl": "native",
    "use_flash_attn": False, "no_persist_layer_norm": False, "use_legacy_models": False, "deprecated_use_mcore_models": False,
}
MOE: dict[str, Any] = {
    "num_experts": None, "moe_layer_freq": 1, "moe_ffn_hidden_size": None, "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_overlap": False, "moe_grouped_gemm": False, "moe_use_legacy_grouped_gemm": False, "moe_layer_recompute": False,
    "moe_extended_tp": False, "moe_use_upcycling": False, "moe_router_load_balancing_type": "aux_loss", "moe_router_dtype": None,
    "moe_router_fusion": False, "moe_router_score_function": "softmax", "moe_router_topk": 2, "moe_router_pre_softmax": False,
    "moe_router_num_groups": None, "moe_router_group_topk": None, "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False, "moe_router_bias_update_rate": 1e-3, "moe_router_force_load_balancing": False,
    "moe_router_padding_for_fp8": False, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None, "moe_input_jitter_eps": None,
    "moe_per_layer_logging": False, "moe_token_dispatcher_type": "allgather", "moe_enable_deepep": False, "moe_deepep_num_sms": 20,
    "moe_permute_fusion": False, "moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False,
    "moe_token_drop_policy": "probs", "moe_apply_probs_on_input": False, "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False, "moe_upcycling_granularity": 1, "moe_pad_experts_for_cuda_graph_inference": False,
}
MLA: dict[str, Any] = {
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
    "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0, "cache_mla_latents": False,
}
TRAINING: dict[str, Any] = {
    "micro_batch_size": None, "global_batch_size": None, "rampup_batch_size": None, "decrease_batch_size_if_needed": False,
    "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None, "recompute_modules": None,
    "distribute_saved_activations": False, "check_for_nan_in_loss_and_grad": True, "check_for_spiky_loss": False,
    "check_for_large_grads": False, "cpu_offloading_num_layers": 0, "use_cpu_initialization": None, "deterministic_mode": False,
    "calculate_per_token_loss": False, "train_iters": None, "train_samples": None, "log_interval": 100, "exit_interval": None,
    "exit_duration_in_mins": None, "exit_signal_handler": False, "tensorboard_dir": None, "optimizer": "adam",
    "optimizer_cpu_offload": False, "optimizer_offload_fraction": 1.0, "dataloader_type": None, "sequence_parallel": False,
    "gradient_accumulation_fusion": True, "manual_gc": False, "manual_gc_interval": 0, "manual_gc_eval": True,
    "iterations_to_skip": [], "cuda_graph_impl": "none", "cuda_graph_scope": "full", "weight_decay": 0.01, "start_weight_decay": None,
    "end_weight_decay": None, "weight_decay_incr_style": "constant", "clip_grad": 1.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_eps": 1e-8, "sgd_momentum": 0.9, "seed": 1234, "data_parallel_random_init": False, "lr": None, "lr_decay_style": "linear",
    "lr_wsd_decay_style": "exponential", "lr_decay_iters": None, "lr_decay_samples": None, "lr_wsd_decay_samples": None,
    "lr_wsd_decay_iters": None, "lr_warmup_fraction": None, "lr_warmup_iters": 0, "lr_warmup_samples": 0, "lr_warmup_init": 0.0,
    "min_lr": 0.0, "override_opt_param_scheduler": False, "use_checkpoint_opt_param_scheduler": False, "decoupled_lr": None,
    "decoupled_min_lr": None, "fp16": False, "bf16": False, "grad_reduce_in_bf16": False, "loss_scale": None,
    "initial_loss_scale": 2 ** 32, "min_loss_scale": 1.0, "loss_scale_window": 1000, "hysteresis": 2,
    "accumulate_allreduce_grads_in_fp32": False, "fp16_lm_cross_entropy": False, "fp8": None, "fp8_recipe": "delayed", "fp4": None,
    "use_precision_aware_optimizer": False, "eval_iters": 100, "eval_interval": 1000, "skip_train": False,
}
CHECKPOINTS: dict[str, Any] = {
    "save": None, "save_interval": None, "save_retain_interval": None, "no_save_optim": None, "no_save_rng": None, "load": None,
    "no_load_optim": None, "no_load_rng": None, "finetune": False, "pretrained_checkpoint": None, "ckpt_step": None,
    "perform_initialization": True, "use_checkpoint_args": False, "use_mp_args_from_checkpoint_args": False,
    "use_tokenizer_model_from_checkpoint_args": True, "exit_on_missing_checkpoint": False, "ckpt_format": "torch_dist",
    "ckpt_fully_parallel_save": True, "async_save": None, "ckpt_fully_parallel_load": False, "ckpt_assume_constant_structure": False,
    "dist_ckpt_strictness": "assume_ok_unexpected", "dist_ckpt_save_pre_mcore_014": False, "dist_ckpt_optim_fully_reshardable": False,
    "distrib_optim_fully_reshardable_mem_efficient": False, "use_dist_ckpt": True, "auto_detect_ckpt_format": False,
    "non_persistent_save_interval": None, "non_persistent_ckpt_type": None,
}
LAYOUT: dict[str, Any] = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
    "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None, "pipeline_model_parallel_layout": None,
    "context_parallel_size": 1, "cp_comm_type": ["p2p"], "hierarchical_context_parallel_sizes": None, "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None, "distributed_backend": "nccl", "distributed_timeout_minutes": 10, "overlap_grad_reduce": False,
    "overlap_param_gather": False, "use_distributed_optimizer": False, "use_megatron_fsdp": False, "use_torch_fsdp2": False,
    "data_parallel_sharding_strategy": "no_shard", "num_distributed_optimizer_instances": 1, "ddp_num_buckets": None,
    "ddp_bucket_size": None, "use_tp_pp_dp_mapping": False, "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False, "enable_gloo_process_groups": True, "rank": 0, "world_size": 1,
}
DATA: dict[str, Any] = {
    "vocab_size": None, "padded_vocab_size": None, "vocab_file": None, "merge_file": None, "vocab_extra_ids": 0, "tokenizer_type": None,
    "tokenizer_model": None, "tokenizer_metadata": None, "tiktoken_pattern": None, "tiktoken_num_special_tokens": 1000,
    "tiktoken_special_tokens": None, "legacy_tokenizer": False, "trust_remote_code": False, "data_path": None, "split": None,
    "train_data_path": None, "valid_data_path": None, "test_data_path": None, "data_cache_path": None, "mmap_bin_files": True,
    "mock_data": False, "seq_length": None, "encoder_seq_length": None, "decoder_seq_length": None, "mask_prob": 0.15,
    "short_seq_prob": 0.1, "num_workers": 2, "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
    "create_attention_mask_in_dataloader": True, "sft": False, "sft_tokenizer_prompt_format": "nemotron-h-aligned",
}


def namespace(given: Mapping[str, Any], *, rank: int, world_size: int, iteration: int) -> argparse.Namespace:
    """The namespace at a save: defaults, what the user gave, and what validation derives from both."""
    args = argparse.Namespace(**{**MODEL, **MOE, **MLA, **TRAINING, **CHECKPOINTS, **LAYOUT, **DATA, **given})
    args.rank, args.world_size, args.iteration = rank, world_size, iteration
    args.encoder_num_layers, args.encoder_seq_length = args.num_layers, args.seq_length
    args.transformer_pipeline_model_parallel_size = args.pipeline_model_parallel_size
    args.data_parallel_size = world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size)
    args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    args.use_dist_ckpt = args.ckpt_format != "torch"
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = int((4 * args.hidden_size * 2 / 3) / 64) * 64 if args.swiglu else 4 * args.hidden_size
    if args.kv_channels is None:
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.num_experts is not None and args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    args.add_qkv_bias = args.add_qkv_bias or args.add_bias_linear
    args.apply_rope_fusion = args.apply_rope_fusion and args.position_embedding_type == "rope"
    args.start_weight_decay = args.end_weight_decay = args.weight_decay
    args.dataloader_type = args.dataloader_type or "single"
    args.variable_seq_lengths = False
    args.consumed_train_samples = iteration * args.global_batch_size
    args.skipped_train_samples = args.consumed_valid_samples = 0
    return args
