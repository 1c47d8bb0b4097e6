"""What Megatron's arguments that are no settings here mean for a network: a reason for each group of names. Data only.

The namespace in a checkpoint holds 450 (Megatron Core 0.12) to 850 (0.19) arguments. `arguments_to_settings.py` takes those of the
network; the others stand here with the reason why they change nothing when the checkpoint is read, or with the value at which they do
nothing, and any other is refused by name. A name that ends in * stands for all that begin so.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from megatron.core.config.flags.declare import field_resume_roles
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RunConfig

_HARMLESS = (
    (
        "counters, which the run goes on from, and what a run computes from its other arguments",
        """_is_global_batch_size_explicitly_specified consumed_train_bins consumed_train_samples consumed_valid_samples
        curr_iteration data_parallel_size do_test do_train do_valid dynamic_loss_scale iteration model_type
        num_floating_point_operations_so_far params_dtype phase_transition_iterations rank
        skipped_train_samples variable_seq_lengths world_size""",
    ),
    (
        "the layout of the run that saved; its optimizer's state is found by it, and any other layout goes on",
        """DDP_impl data_parallel_sharding_strategy encoder_pipeline_model_parallel_size
        encoder_tensor_model_parallel_size expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards
        fake_process_group gtp_* high_priority_stream_groups local_rank mtp_standalone model_parallel_size
        moe_extended_tp
        nccl_communicator_config_path num_distributed_optimizer_instances outer_dp_sharding_strategy
        pipeline_model_parallel_comm_backend pipeline_model_parallel_split_rank scatter_gather_tensors_in_pipeline
        sharp_enabled_group standalone_embedding_stage symmetric_ar_type tensor_parallel_num_weight_shards
        transformer_pipeline_model_parallel_size use_*fsdp use_gloo_process_groups enable_gloo_process_groups
        use_layer_wise_distributed_optimizer use_layer_wise_param_layout use_ring_exchange_p2p use_sharp
        virtual_pipeline_model_parallel_size microbatch_group_size_per_vp_stage lazy_mpu_init
        use_contiguous_buffers_in_*ddp enable_full_sharding_in_hsdp""",
    ),
    (
        "when ranks talk and where memory is kept, not what they compute",
        """align_grad_reduce align_param_gather async_tensor_model_parallel_allreduce *offload* cpu_offloading
        clone_scatter_output_in_embedding create_all_gather_group ddp_* defer_embedding_wgrad_compute delay_grad_reduce
        delay_param_gather delta_offload_bytes_across_pp_ranks disable_grad_buffers_cpu_backup
        disable_param_buffers_cpu_backup disable_symmetric_registration ep_overlap_early_attn_memory_release
        fsdp_* gradient_reduce_div_fusion high_priority_a2a_comm_stream keep_fp8_transpose_cache* megatron_fsdp_*
        mlp_chunks_for_* moe_deepep_num_sms moe_flex_dispatcher_num_sms moe_hybridep_* moe_ncclep_* moe_paged_stash*
        nccl_* overlap_dispatch_backward_with_experts_wgrad overlap_p2p_comm overlap_p2p_comm_warmup_flush
        overlap_param_gather_with_optimizer_step reuse_grad_buf_for_mxfp8_param_ag suggested_communication_unit_size
        torch_fsdp2_reshard_after_forward tp_comm_* train_sync_interval wgrad_deferral_limit checkpoint_activations
        checkpoint_num_layers activations_checkpoint_* distribute_checkpointed_activations moe_layer_recompute
        use_torch_optimizer_for_cpu_offload load_main_params_from_ckpt init_model_with_meta_device""",
    ),
    (
        "which kernel computes the same function",
        """apply_dsa_kernel_fusion apply_query_key_layer_scaling apply_rope_fusion attention_softmax_in_fp32
        batch_invariant_* bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion cache_mla_latents cross_entropy_loss_fusion
        cuda_graph_* delay_offload_until_cuda_graph disable_bf16_reduced_precision_matmul disable_jit_fuser
        disable_mamba_mem_eff_path dsa_kernel_backend enable_cuda_graph enable_experimental external_cuda_graph
        flash_attention_version flash_decode fp16_lm_cross_entropy fused_residual_rmsnorm gdp_cutedsl_kernel
        gdp_num_chunk_states_to_recompute kitchen_attention_backend mamba_training_ssm_states_dtype
        masked_softmax_fusion mla_down_proj_fusion moe_expert_rank_capacity_factor moe_pad_experts_for_cuda_graph_inference
        moe_permute_fusion* moe_router_fusion moe_router_padding_for_* moe_single_grouped_* moe_use_grouped_tensor
        moe_use_legacy_grouped_gemm muon_use_syrk no_persist_layer_norm onnx_safe optimizer_cuda_graph
        scaled_masked_softmax_fusion scaled_upper_triang_masked_softmax_fusion te_precision_config_file te_rng_tracker
        use_flash_attn use_fused_weighted_squared_relu use_grouped_gemm_for_* use_kitchen_attention use_legacy_models
        use_mamba_mem_eff_path use_mcore_models use_te_activation_func use_transformer_engine_op_fuser
        deprecated_use_mcore_models perform_initialization offset_sampling_seed_by_dp_rank""",
    ),
    (
        "the precision of training, which the run's own flags give",
        """embedding_weights_in_fp32 fp32_allreduce fp4 fp4_param fp4_quantizer_factory fp8 fp8_e4m3 fp8_hybrid fp8_interval
        fp8_output_proj fp8_quantizer_factory kitchen_config_file kitchen_recipe_number logit_dtype min_scale
        moe_combine_bwd_dtype moe_dispatch_fwd_dtype""",
    ),
    (
        "the schedule and the optimizer, which the run's own flags give",
        """batch_size exit_signal_handler_for_* freeze_all_layers freeze_base_for_mtp head_lr_mult iterations_to_skip
        muon_use_nesterov no_weight_decay_cond_type start_eval_at_iter eval_micro_batch_size warmup
        multiple_validation_sets validation_set_names""",
    ),
    (
        "data and tokenizer, which are files of the run's own",
        """create_attention_mask_in_dataloader data_impl dataloader_* finetune_data_* finetune_hf_dataset legacy_tokenizer
        metadata_path mmap_warmup pad_packed_seq_alignment pad_vocab_size per_dataset_sequences_path renormalize_blend_weights
        s3_cache_path sample_rate sequence_packing_scheduler sft_mock_dataset_config_json special_tokens
        tiktoken_special_tokens tokenizer_hf_* tokenizer_metadata tokenizer_sentencepiece_* trust_remote_code
        use_one_sent_docs use_varlen_dataset varlen_*""",
    ),
    (
        "how checkpoints are written and read",
        """async_ckpt_* async_strategy auto_detect_ckpt_format ckpt_* dist_ckpt_* distrib_optim_fully_reshardable_mem_efficient
        load_model_opt_format no_load_optim no_load_rng no_save_optim no_save_rng non_persistent_* override_ckpt_iteration
        replication* save_tokenizer_assets stream_ckpt_dequant strict_fsdp_dtensor_load use_dist_ckpt*
        use_mp_args_from_checkpoint_args use_persistent_ckpt_worker enable_msc disable_msc_deprecated""",
    ),
    (
        "logs, profiles and services beside the run",
        """adlr_autoresume* app_tag_run_* barrier_with_L1_time calc_ft_timeouts config_logger_dir disable_straggler_on_startup
        dump_param_to_param_group_map enable_ft_package enable_one_logger fault_injector_* flight_recorder_*
        ft_num_warmup_iters gpu_sniff_test_interval inprocess_* log_* manual_gc_eval memory_snapshot_path
        moe_routing_trace_* nvtx_ranges one_logger_* otel_* pytorch_profiler_* record_memory_history record_shapes
        run_workload_inspector_server save_activations_interval save_dgrads_interval save_params_interval
        save_tokens_per_expert_interval save_wgrads_interval straggler_ctrlr_port test_mode use_pytorch_profiler
        distributed_timeout_seconds_after_init yaml_cfg max_tokens_to_oom""",
    ),
    (
        "generation, reinforcement learning and distillation, beside the network that is trained",
        """decode_only_cuda_graphs disable_chunked_prefill enable_chunked_prefill export_* grpo_* inference_* langrl_* logits_*
        mamba_inference_* modelopt_enabled num_speculative_tokens perform_rl_step qad_train_target refit_method rl_*
        teacher_model_config use_gigatoken use_legacy_static_engine""",
    ),
    (
        "networks of other programs: retrieval, images",
        """bert_embedder_type bert_load biencoder_* block_data_path classes_fraction data_per_class_fraction dino_*
        embedding_path evidence_data_path faiss_use_gpu ict_* img_dim indexer_* iter_per_epoch mask_factor mask_type
        output_bert_embeddings query_in_block_prob report_topk_accuracies retriever_* retro_* swin_backbone_type
        titles_data_path vision_*""",
    ),
    (
        "parts of a feature that an argument of its own switches on, which is read, or refused below",
        """csa_* dsa_* enable_gpt_oss gdp_num_householder mhc_* moe_router_quantile_balancing_ema moe_token_dropping
        mup_* o_groups o_lora_rank original_max_position_embeddings""",
    ),
    (
        "read in another form: hybrid layers, positions, the size of the vocabulary",
        """add_position_embedding hybrid_override_pattern is_hybrid_model layernorm_epsilon layernorm_zero_centered_gamma
        mtp_hybrid_override_pattern spec use_rotary_position_embeddings""",
    ),
)
HARMLESS: Mapping[str, str] = {name: reason for reason, names in _HARMLESS for name in names.split()}

# Arguments that make another network, and the value at which they do nothing.
AT_DEFAULT: Mapping[str, Any] = {
    "enable_mhc_connections": False,
    "heterogeneous_layers_config_encoded_json": None,
    "heterogeneous_layers_config_path": None,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
    "moe_mlp_glu_interleave_size": None,
    "moe_router_force_biased": None,
    "moe_router_topk_limited_devices": None,
    "moe_shared_expert_glu_interleave_size": None,
    "mtp_hsm": False,
    "retro_add_retriever": False,
    "use_mup": False,
}


def harmless_reason(name: str) -> str:
    """Return why an argument changes nothing when a checkpoint is read; "" if it does, or is unknown."""
    if name in AT_DEFAULT:
        return ""
    roles = field_resume_roles(RunConfig)
    if name in roles.keys() - field_resume_roles(ModelConfig).keys():
        return "a setting of the run, which its own flags give"
    if name in HARMLESS:
        return HARMLESS[name]
    return next((reason for pattern, reason in HARMLESS.items() if "*" in pattern and fnmatchcase(name, pattern)), "")
