from __future__ import annotations

from typing import Any

import pytest

from megatron.core.config.flags.declare import config_from_flat_dict
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.rules.engine import ALWAYS, NEEDS, RULES, broken_rules
from megatron.core.config.rules.rule import divisors_text
from megatron.core.config.settings.run import RequestedRun

GOOD: dict[str, Any] = {
    "num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 32, "micro_batch_size": 2, "global_batch_size": 16,
    "train_iters": 10, "lr": 1e-3, "mock_data": True}
TP4, PP2 = {"tensor_model_parallel_size": 4}, {"pipeline_model_parallel_size": 2}
CP2: dict[str, Any] = {"context_parallel_size": 2}
HYBRID: dict[str, Any] = {"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 16, "reset_attention_mask": True,
                          "calculate_per_token_loss": True}
FP8: dict[str, Any] = {"fp8_format": "hybrid"}
ZERO: dict[str, Any] = {"use_distributed_optimizer": True}
GQA = {"group_query_attention": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
BERT: dict[str, Any] = {"architecture": "bert"}
T5: dict[str, Any] = {"architecture": "t5", "num_layers": None, "encoder_num_layers": 4, "decoder_num_layers": 3, "decoder_seq_length": 16}
FIM: dict[str, Any] = {"fim_data": True, "fim_prefix_token": "<p>", "fim_middle_token": "<m>", "fim_suffix_token": "<s>"}
MLA: dict[str, Any] = {"multi_latent_attention": True, "position_embedding_type": "rope"}
MOE: dict[str, Any] = {"num_experts": 8}
SIGMOID: dict[str, Any] = {**MOE, "moe_router_score_function": "sigmoid"}
UPCYCLED: dict[str, Any] = {**MOE, "moe_use_upcycling": True, "load": "x", "ffn_hidden_size": 64}
GRAPHS: dict[str, Any] = {"cuda_graph_impl": "local", "hidden_dropout": 0.0, "attention_dropout": 0.0}
RESIDUAL: dict[str, Any] = {"kernel": ("residual_norm=triton",)}
NARROW: dict[str, Any] = {"bf16": True, "use_precision_aware_optimizer": True}
ASIDE: dict[str, Any] = {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",)}

IMAGES: dict[str, Any] = {"vision_model_type": "clip", "img_h": 32, "img_w": 32}
CLASSIFIER: dict[str, Any] = {"architecture": "vit", "img_h": 32, "img_w": 32, "seq_length": 1, "num_classes": 10}

# (name of the rule, world size, what is changed, words that the message must hold)
BAD: tuple[tuple[str, int, dict[str, Any], tuple[str, ...]], ...] = (
    ("required", 1, {"num_layers": None}, ("--num-layers must be given; --load FOLDER --use-checkpoint-args takes",)),
    ("required", 1, {"hidden_size": None, "seq_length": None}, ("--hidden-size, --seq-length must be given",)),
    ("required", 1, {"micro_batch_size": None, "global_batch_size": None}, ("--micro-batch-size",)),
    ("no-effect", 1, {"lora_alpha": 16.0}, ("--lora-alpha 16 has no effect; give --lora-rank",)),
    ("adapter-numbers", 1, {"lora_rank": 8, "lora_dropout": 1.0}, ("--lora-dropout 1.0 must lie in [0, 1)",)),
    ("image-classifier", 2, {**CLASSIFIER, "seq_length": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}, ("so leave it out",)),
    ("adapter-start", 1, {"adapter": "my_adapter"}, ("give them with --pretrained-checkpoint",)),
    ("adapter-targets", 1, {"lora_rank": 8, "lora_targets": ("q_porj",)}, ("q_porj names no linear layer", "choose of all-linear, q_proj")),
    ("adapter-fit", 1, {"lora_rank": 8, "optimizer": "muon"}, ("choose adam",)),
    ("positive", 1, {"num_layers": 0}, ("--num-layers 0",)),
    ("positive", 1, {"micro_batch_size": -2}, ("--micro-batch-size -2",)),
    ("positive", 1, {"tensor_model_parallel_size": 0}, ("--tensor-model-parallel-size 0",)),
    ("positive", 1, {"log_interval": 0, "eval_interval": 0}, ("--log-interval 0", "--eval-interval 0")),
    ("positive", 1, {**GQA, "num_query_groups": 0}, ("--num-query-groups 0",)),
    ("kernels", 1, {"kernel": ("rotary=triton",), "compile": True}, ("--kernel rotary=triton and --compile both make", "drop one")),
    ("kernels", 1, {"kernel": ("rotary=triton",)}, ("--kernel rotary=triton: no part of this network asks for that operation; leave it out",)),
    ("kernels", 1, {"kernel": ("bias_activation=triton", "quantise=triton", "adamw=torch"), "add_bias_linear": False, "optimizer": "sgd"},
     ("no MLP here has a bias just before its activation", "for --fp8-format only", "no weight is updated by Adam")),
    ("context", 2, {**CP2, "attention_backend": "flex"}, ("--attention-backend flex is for whole sequences", "choose a2a")),
    ("kernels", 1, {"kernel": ("rms_norm=fast", "conv=torch", "rotary", "rotary=torch")},
     ("--kernel rms_norm=fast: no such kernel; choose of rms_norm=torch", "--kernel conv=torch names no operation", "--kernel rotary: no such",
      "--kernel rotary=torch: another kernel was given for rotary")),
    ("no-effect", 2, {"architecture": "bert", **CP2}, ("--context-parallel-size 2 has no effect; start pretrain_gpt.py",)),
    ("context", 2, {**CP2, "seq_length": 30}, ("--seq-length 30", "28 or 32")),
    ("context", 8, {**CP2, **TP4, "sequence_parallel": True, "seq_length": 36, "max_position_embeddings": 64},
     ("--tensor-model-parallel-size 4", "32 or 40")),
    ("context", 2, {**CP2, "cp_comm_type": ("p2p", "a2a")}, ("names 2 ways", "each of 8")),
    ("context", 4, {"context_parallel_size": 4, "cp_comm_type": ("a2a+p2p",)}, ("needs --hierarchical-context-parallel-sizes",)),
    ("context", 4, {"context_parallel_size": 4, "cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 4)}, ("2 4", "size 4")),
    ("no-effect", 4, {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": (2, 2)}, ("--hierarchical-context-parallel-sizes 2 2 has no effect; give --cp-comm-type a2a+p2p",)),
    ("context", 8, {"context_parallel_size": 4, "tensor_model_parallel_size": 2, "num_attention_heads": 6, "hidden_size": 48,
                    "ffn_hidden_size": 96, "cp_comm_type": ("a2a",)}, ("3 heads a tensor rank to 4 ranks",)),
    ("context", 2, {**CP2, "cp_comm_type": ("allgather",), "attention_backend": "flash"}, ("no mask tensor", "p2p or a2a")),
    ("no-effect", 1, {"first_last_layers_bf16": True, "fp8_margin": 2}, ("--fp8-margin 2 has no effect; give --fp8-format or --fp4-format", "--first-last-layers-bf16 has no effect; give --fp8-format or --fp4-format")),
    ("low-precision", 1, {**FP8, "fp4_format": "e2m1"}, ("keep one",)),
    ("low-precision", 1, {**FP8, "fp16": True}, ("--fp16", "choose --bf16")),
    ("no-effect", 1, {**FP8, "fp8_recipe": "tensorwise", "fp8_amax_history_len": 16}, ("--fp8-amax-history-len 16 has no effect; give --fp8-recipe delayed",)),
    ("no-effect", 1, {"fp4_format": "e2m1", "fp8_recipe": "tensorwise"}, ("--fp8-recipe tensorwise has no effect; leave out --fp4-format",)),
    ("no-effect", 1, {**FP8, "num_layers_at_end_in_bf16": 2}, ("--num-layers-at-end-in-bf16 2 has no effect; give --first-last-layers-bf16",)),
    ("low-precision", 1, {**FP8, "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 7}, ("none of 8 layers", "choose fewer")),
    ("low-precision", 1, {**FP8, "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": -1}, ("-1", "at least 0")),
    ("low-precision", 1, {**FP8, "fp8_amax_history_len": 0}, ("at least one step",)),
    ("low-precision", 2, {**FP8, **HYBRID}, ("--hybrid-context-parallel", "leave one of them out")),
    ("low-precision", 1, {**FP8, "fp8_param_gather": True}, ("--use-distributed-optimizer", "add it")),
    ("low-precision", 1, {**ZERO, "fp4_format": "e2m1", "fp8_param_gather": True}, ("another format", "--fp4-param-gather instead")),
    ("low-precision", 1, {**FP8, **ZERO, "fp8_param_gather": True, "num_attention_heads": 4, **MLA, "kv_lora_rank": 32, "qk_head_dim": 16,
                     "qk_pos_emb_head_dim": 16, "v_head_dim": 16}, ("--multi-latent-attention",)),
    ("low-precision", 1, {**FP8, **ZERO, "fp8_param_gather": True, "bf16": True, "use_precision_aware_optimizer": True}, ("main weights of its own",)),
    ("low-precision-sizes", 8, {**FP8, "tensor_model_parallel_size": 8}, ("all queries is 8 over 8 ranks", "no multiple of the 16")),
    ("low-precision-sizes", 1, {**FP8, "fp8_recipe": "blockwise"}, ("--hidden-size 64 is 64, no multiple of the 128", "another recipe")),
    ("low-precision-sizes", 4, {**FP8, "fp8_recipe": "mxfp8", **TP4}, ("all queries is 16 over 4 ranks, no multiple of the 32",)),
    ("low-precision-sizes", 1, {"fp4_format": "e2m1", **MOE, "moe_ffn_hidden_size": 24}, ("--moe-ffn-hidden-size 24", "--fp4-recipe nvfp4")),
    ("no-effect", 1, {"max_seqlen_per_dp_cp_rank": 8}, ("--max-seqlen-per-dp-cp-rank 8 has no effect; give --hybrid-context-parallel",)),
    ("hybrid-context", 2, {**HYBRID, "max_seqlen_per_dp_cp_rank": None}, ("needs --max-seqlen-per-dp-cp-rank",)),
    ("hybrid-context", 2, {**HYBRID, "max_seqlen_per_dp_cp_rank": 10}, ("holds sequences of 20", "at least 16")),
    ("hybrid-context", 4, {**HYBRID, **CP2}, ("--context-parallel-size 2", "keep one")),
    ("hybrid-context", 4, {**HYBRID, **PP2}, ("pipeline of 2 stages",)),
    ("hybrid-context", 2, {**HYBRID, "calculate_per_token_loss": False}, ("add --calculate-per-token-loss",)),
    ("hybrid-context", 2, {**HYBRID, "reset_attention_mask": False}, ("--reset-attention-mask",)),
    ("hybrid-context", 2, {**HYBRID, "dataloader_type": "cyclic"}, ("--dataloader-type cyclic", "single")),
    ("hybrid-context", 2, {**HYBRID, **MOE}, ("--num-experts",)),
    ("hybrid-context", 2, {**HYBRID, "cp_comm_type": ("a2a+p2p",)}, ("two fixed sizes",)),
    ("hybrid-context", 4, {**HYBRID, "num_attention_heads": 2, "cp_comm_type": ("a2a",)}, ("2 heads", "up to 4 ranks")),
    ("world-size", 6, TP4, ("6 ranks", "= 4", "multiple of 4")),
    ("world-size", 2, {**PP2, "tensor_model_parallel_size": 2}, ("2 ranks", "= 4")),
    ("heads-over-tensor", 3, {"tensor_model_parallel_size": 3, "global_batch_size": 6, "ffn_hidden_size": 96, **GQA, "num_query_groups": 1},
     ("--num-attention-heads 8", "1, 2, 4, 8")),
    ("query-groups", 1, {**GQA, "num_query_groups": 3}, ("--num-attention-heads 8 is not a multiple", "1, 2, 4, 8")),
    ("query-groups", 2, {**GQA, "num_attention_heads": 6, "hidden_size": 96, "num_query_groups": 3, "tensor_model_parallel_size": 2},
     ("--num-query-groups 3", "do not divide each other")),
    ("ffn-over-tensor", 4, {**TP4, "ffn_hidden_size": 90}, ("--ffn-hidden-size 90", "88 or 92")),
    ("head-size", 1, {"hidden_size": 60}, ("--hidden-size 60", "--kv-channels")),
    ("head-size", 1, {"position_embedding_type": "rope", "kv_channels": 6, "rotary_percent": 0.5}, ("odd number",)),
    ("head-size", 1, {"position_embedding_type": "rope", "rotary_percent": 0.1}, ("rotates nothing",)),
    ("head-size", 1, {**MLA, "qk_pos_emb_head_dim": 3}, ("--qk-pos-emb-head-dim 3", "odd number")),
    ("hybrid-pattern", 1, {"hybrid_layer_pattern": "*X", "num_layers": None}, ("'X' means no layer", "write layers as M G * + - E")),
    ("hybrid-pattern", 1, {"hybrid_layer_pattern": "*E", "num_layers": 3, "mtp_num_layers": 1},
     ("two numbers", "--num-experts go together", "--mtp-num-layers")),
    ("multipliers", 1, {"parallel_mamba": True, "mamba_num_heads": 8, "multi_latent_attention": True}, ("puts Mamba-2 beside the attention",)),
    ("multipliers", 1, {"embedding_multiplier": 2.0, "add_bias_linear": True}, ("--embedding-multiplier", "are for GPTs with gated MLPs")),
    ("states", 1, {"hybrid_layer_pattern": "M", "num_layers": None, "mamba_num_heads": 6, "mamba_num_groups": 4}, ("choose a multiple",)),
    ("states", 4, {**TP4, "experimental_attention_variant": "gdn", "linear_num_key_heads": 2}, ("--tensor-model-parallel-size 4", "divides both")),
    ("no-effect", 1, {**MLA, **GQA, "num_query_groups": 2}, ("--group-query-attention has no effect; leave out --multi-latent-attention",)),
    ("latent-attention", 1, {**MLA, "position_embedding_type": "mrope", "mrope_section": (16, 16, 0)}, ("mrope", "choose rope or yarn")),
    ("latent-attention", 1, {**MLA, "v_head_dim": 0, "q_lora_rank": -1}, ("--q-lora-rank -1, --v-head-dim 0",)),
    ("no-effect", 1, {**MLA, "add_qkv_bias": True}, ("--add-qkv-bias has no effect; leave out --multi-latent-attention",)),
    ("no-effect", 1, {**MLA, "rotary_interleaved": True}, ("--rotary-interleaved has no effect; leave out --multi-latent-attention",)),
    ("no-effect", 1, {**MLA, "use_rope_scaling": True}, ("--use-rope-scaling has no effect; stretch its rotations by --rope-type yarn --rotary-scaling-factor",)),
    ("no-effect", 1, {**MLA, "rope_type": "rope", "use_rope_scaling": True}, ("--use-rope-scaling has no effect; stretch its rotations by --rope-type yarn --rotary-scaling-factor",)),
    ("no-effect", 1, {"position_embedding_type": "yarn", "use_rope_scaling": True}, ("--use-rope-scaling has no effect; give --rope-type rope",)),
    ("no-effect", 1, {**MLA, **BERT}, ("--multi-latent-attention has no effect; start pretrain_gpt.py",)),
    ("no-effect", 1, {"kv_lora_rank": 16, "v_head_dim": 8}, ("--kv-lora-rank 16 has no effect; give --multi-latent-attention", "--v-head-dim 8 has no effect; give --multi-latent-attention")),
    ("latent-attention", 1, {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj",)}, ("nothing has latents",)),
    ("multi-token-prediction", 1, {"mtp_num_layers": 0}, ("--mtp-num-layers 0",)),
    ("multi-token-prediction", 1, {"mtp_num_layers": 32}, ("--seq-length 32", "at most 31")),
    ("multi-token-prediction", 1, {"mtp_num_layers": 1, "mtp_loss_scaling_factor": -1.0}, ("--mtp-loss-scaling-factor -1",)),
    ("no-effect", 1, {"mtp_detach_heads": True}, ("--mtp-detach-heads has no effect; give --mtp-num-layers",)),
    ("no-effect", 1, {**T5, "mtp_num_layers": 1}, ("--mtp-num-layers 1 has no effect; start pretrain_gpt.py",)),
    ("positions", 1, {"max_position_embeddings": 16}, ("--seq-length 32 is longer", "at least 32")),
    ("sequence-parallel", 4, {**TP4, "sequence_parallel": True, "seq_length": 30, "max_position_embeddings": 32}, ("28 or 32",)),
    ("pipeline-split", 3, {"pipeline_model_parallel_size": 3, "global_batch_size": 6}, ("--num-layers 8", "6 or 9")),
    ("pipeline-split", 2, {**PP2, "num_layers_per_virtual_pipeline_stage": 3}, ("3",)),
    ("pipeline-split", 2, {**PP2, "num_layers_per_virtual_pipeline_stage": 2, "num_virtual_stages_per_pipeline_rank": 2}, ("keep one",)),
    ("pipeline-split", 2, {**PP2, "pipeline_model_parallel_layout": "Ettt|tttL"}, ("6 t", "--num-layers is 8")),
    ("pipeline-split", 2, {**PP2, "pipeline_model_parallel_layout": "Et*4|t*4"}, ("L must stand once",)),
    ("pipeline-split", 2, {**PP2, "decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 4}, ("leave 1",)),
    ("pipeline-split", 2, {**PP2, "account_for_embedding_in_pipeline_split": True}, ("9 in all",)),
    ("pipeline-split", 2, {**PP2, "num_virtual_stages_per_pipeline_rank": 3}, ("6 or 12",)),
    ("pipeline-split", 1, {"num_virtual_stages_per_pipeline_rank": 2}, ("2 chunks on a pipeline of one rank",)),
    ("pipeline-split", 1, {"pipeline_model_parallel_layout": "Et*4|t*4L"}, ("--pipeline-model-parallel-size 2 or more",)),
    ("multi-token-prediction", 2, {**PP2, "pipeline_model_parallel_layout": "Et*4|t*4mL"}, ("1 m", "--mtp-num-layers is not given")),
    ("multi-token-prediction", 2, {**PP2, "mtp_num_layers": 2, "pipeline_model_parallel_layout": "Et*4|t*4mL"}, ("1 m", "--mtp-num-layers is 2")),
    ("pipeline-split", 2, {**PP2, "mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et*4m|t*4L"}, ("behind the last t",)),
    ("pipeline-split", 2, {**PP2, "mtp_num_layers": 2, "pipeline_model_parallel_layout": "Et*4|t*4m|m|L"}, ("one stage",)),
    ("pipeline-split", 2, {**PP2, "mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et*4|tt|ttm|L"}, ("rank of the embedding", "beside L")),
    ("global-batch", 1, {"global_batch_size": 15}, ("--global-batch-size 15", "14 or 16")),
    ("global-batch", 4, {"global_batch_size": 20}, ("= 8", "16 or 24")),
    ("interleaved-groups", 2, {**PP2, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 6, "micro_batch_size": 2},
     ("a last group of 1 of 3 microbatches", "2 or 4 microbatches")),
    ("interleaved-groups", 2, {**PP2, "num_virtual_stages_per_pipeline_rank": 2, "microbatch_group_size_per_virtual_pipeline_stage": 1},
     ("group-size-per-virtual-pipeline-stage 1 is smaller",)),
    ("interleaved-groups", 2, {**PP2, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 16, "micro_batch_size": 2,
                               "rampup_batch_size": (4, 2, 100)}, ("a last group of 1 of 3 microbatches",)),
    ("vocabulary", 4, {**TP4, "padded_vocab_size": 1001}, ("--padded-vocab-size 1001",)),
    ("duration", 1, {"train_iters": None}, ("neither",)),
    ("duration", 1, {"train_samples": 100}, ("keep one",)),
    ("learning-rate", 1, {"lr": None}, ("--lr must be given",)),
    ("number-formats", 1, {"fp16": True, "bf16": True}, ("--fp16 and --bf16",)),
    ("no-effect", 1, {"loss_scale": 128.0}, ("--loss-scale 128 has no effect; give --fp16",)),
    ("no-effect", 1, {"bf16": True, "loss_scale": 128.0}, ("--loss-scale 128 has no effect; give --fp16",)),
    ("no-effect", 1, {"grad_reduce_in_bf16": True}, ("--grad-reduce-in-bf16 has no effect; give --bf16",)),
    ("no-effect", 1, {"optimizer": "sgd", "muon_momentum": 0.95}, ("--muon-momentum 0.95 has no effect; give --optimizer muon",)),
    ("no-effect", 1, {"lion_beta1": 0.9}, ("--lion-beta1 0.9 has no effect; give --optimizer lion",)),
    ("update-rule", 1, {"optimizer": "muon", "muon_momentum": 1.0, "muon_num_ns_steps": 0, "muon_extra_scale_factor": 0.0},
     ("--muon-momentum 1", "give 5", "must be above 0")),
    ("update-rule", 1, {"optimizer": "muon", "optimizer_cpu_offload": True}, ("no work for a CPU", "choose adam")),
    ("update-rule", 1, {"optimizer": "soap", "soap_shampoo_beta": 1.0, "optimizer_cpu_offload": True}, ("--soap-shampoo-beta 1", "of --optimizer soap")),
    ("no-effect", 1, {"soap_shampoo_beta": 0.9}, ("--soap-shampoo-beta 0.9 has no effect; give --optimizer soap",)),
    ("no-effect", 1, {"adafactor_decay_rate": 0.5}, ("--adafactor-decay-rate 0.5 has no effect; give --optimizer adafactor",)),
    ("update-rule", 1, {"optimizer": "adafactor", "adafactor_min_rms": 0.0, "optimizer_cpu_offload": True}, ("must be above 0", "choose adam")),
    ("no-effect", 1, {"pin_cpu_grads": False}, ("--no-pin-cpu-grads has no effect; give --optimizer-cpu-offload",)),
    ("update-rule", 1, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.5}, ("1.5", "from 0 to 1")),
    ("no-effect", 1, {"exp_avg_dtype": "bf16"}, ("--exp-avg-dtype bf16 has no effect; give --use-precision-aware-optimizer",)),
    ("low-precision-state", 1, {**NARROW, "optimizer": "lion"}, ("--optimizer lion", "drop one")),
    ("low-precision-state", 1, {**NARROW, "optimizer_cpu_offload": True}, ("keep one",)),
    ("low-precision-state", 1, {**NARROW, "bf16": False, "fp64": True}, ("--fp64", "drop one")),
    ("low-precision-state", 1, {**NARROW, "bf16": False, "main_grads_dtype": "bf16"}, ("--main-grads-dtype bf16", "choose fp32")),
    ("low-precision-state", 1, {**NARROW, "bf16": False, "main_params_dtype": "fp16"}, ("--main-params-dtype fp16", "choose fp32")),
    ("low-precision-state", 2, {**NARROW, "use_torch_fsdp2": True, "main_params_dtype": "fp16"}, ("--use-torch-fsdp2", "at fp32")),
    ("no-effect", 1, {"offload_modules": ("core_attn",)}, ("--offload-modules core_attn has no effect; give --fine-grained-activation-offloading or --cpu-offloading-num-layers",)),
    ("activation-offloading", 1, {"cpu_offloading_num_layers": -1}, ("neither is below 0",)),
    ("activation-offloading", 1, {"fine_grained_activation_offloading": True}, ("name them",)),
    ("activation-offloading", 1, {**ASIDE, "cpu_offloading_num_layers": 2}, ("keep one",)),
    ("activation-offloading", 1, {**ASIDE, "offload_modules": ("moe_act",)}, ("--offload-modules moe_act", "leave out")),
    ("activation-offloading", 1, {**ASIDE, "compile": True}, ("--compile", "drop it")),
    ("activation", 1, {"swiglu": True, "squared_relu": True}, ("--swiglu and --squared-relu",)),
    ("activation", 1, {"quick_geglu": True, "openai_gelu": True}, ("keep one",)),
    ("recompute", 1, {"recompute_granularity": "full"}, ("needs --recompute-method",)),
    ("no-effect", 1, {"recompute_method": "block"}, ("--recompute-method block has no effect; give --recompute-granularity full",)),
    ("recompute", 1, {**FULL, "recompute_num_layers": 0}, ("must be at least 1",)),
    ("no-effect", 1, {**FULL, "recompute_modules": ("mlp",)}, ("--recompute-modules mlp has no effect; give --recompute-granularity selective",)),
    ("no-effect", 1, {"recompute_granularity": "selective", "distribute_saved_activations": True}, ("--distribute-saved-activations has no effect; give --recompute-granularity full",)),
    ("recompute", 4, {**FULL, **TP4, "sequence_parallel": True, "distribute_saved_activations": True}, ("--sequence-parallel",)),
    ("no-effect", 2, {"overlap_param_gather": True}, ("--overlap-param-gather has no effect; give --use-distributed-optimizer",)),
    ("norms", 1, {**RESIDUAL, "fp32_residual_connection": True}, ("--kernel residual_norm=triton", "leave it out")),
    ("norms", 1, {**RESIDUAL, "recompute_granularity": "selective", "recompute_modules": ("layernorm",)}, ("recomputed", "leave it out")),
    ("no-effect", 1, {"cuda_graph_modules": ("attn",), "cuda_graph_warmup_steps": 5}, ("--cuda-graph-modules attn has no effect; give --cuda-graph-impl local", "--cuda-graph-warmup-steps 5 has no effect; give --cuda-graph-impl local")),
    ("cuda-graphs", 1, {**GRAPHS, "cuda_graph_warmup_steps": 0, "compile": True, "qk_clip": True},
     ("--cuda-graph-warmup-steps 0", "leave out --compile", "leave out --qk-clip")),
    ("cuda-graphs", 1, {**GRAPHS, "attention_dropout": 0.1}, ("--attention-dropout 0.1", "give --attention-dropout 0")),
    ("cuda-graphs", 2, {**GRAPHS, "hidden_dropout": 0.1, "tensor_model_parallel_size": 2, "sequence_parallel": True}, ("give --hidden-dropout 0",)),
    ("cuda-graphs", 1, {**GRAPHS, "recompute_granularity": "selective"}, ("leave out --recompute-granularity",)),
    ("cuda-graphs", 2, {**GRAPHS, **CP2}, ("leave out --context-parallel-size",)),
    ("cuda-graphs", 2, {**GRAPHS, "use_torch_fsdp2": True}, ("leave out --use-torch-fsdp2",)),
    ("cuda-graphs", 1, {**GRAPHS, **FP8}, ("leave out --fp8-format",)),
    ("cuda-graphs", 1, {**GRAPHS, **ASIDE}, ("leave out activation offloading",)),
    ("cuda-graphs", 2, {**GRAPHS, **PP2, "pipeline_schedule": "zb-h1"}, ("choose --pipeline-schedule 1f1b or gpipe",)),
    ("cuda-graphs", 2, {**GRAPHS, "tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True}, ("leave out --tp-comm-overlap",)),
    ("cuda-graphs", 1, {**GRAPHS, "mtp_num_layers": 2, "mtp_use_repeated_layer": True}, ("leave out --mtp-use-repeated-layer",)),
    ("cuda-graphs", 1, {**GRAPHS, **MOE, "cuda_graph_modules": ("mlp",)}, ("no layer has an MLP without experts", "choose attn")),
    ("cuda-graphs", 1, {**GRAPHS, **MOE, **RESIDUAL}, ("leave out --kernel residual_norm",)),
    ("cuda-graphs", 1, {**GRAPHS, "transformer_impl": "transformer_engine", "reset_attention_mask": True}, ("choose --attention-backend fused",)),
    ("no-effect", 1, {"compile_backend": "aot_eager", "compile_mode": "max-autotune-no-cudagraphs"}, ("--compile-mode max-autotune-no-cudagraphs has no effect; give --compile", "--compile-backend aot_eager has no effect; give --compile")),
    ("no-effect", 1, {"compile": True, "compile_backend": "aot_eager", "compile_mode": "max-autotune-no-cudagraphs"}, ("--compile-mode max-autotune-no-cudagraphs has no effect; give --compile-backend inductor",)),
    ("no-effect", 2, {"torch_fsdp2_no_reshard_after_forward": True}, ("--torch-fsdp2-no-reshard-after-forward has no effect; give --use-torch-fsdp2",)),
    ("fully-sharded", 2, {"use_torch_fsdp2": True, "use_distributed_optimizer": True, "ddp_bucket_size": 100},
     ("--use-distributed-optimizer cuts", "--ddp-bucket-size is for buckets")),
    ("fully-sharded", 2, {"use_torch_fsdp2": True, "eval_generate": "x"}, ("--eval-generate lets every",)),
    ("fully-sharded", 2, {**IMAGES, "use_torch_fsdp2": True, "online_evaluation_config": "x"}, ("--online-evaluation-config lets every",)),
    ("overlap", 2, {"ddp_bucket_size": 100, "ddp_num_buckets": 3}, ("keep one",)),
    ("no-effect", 2, {"tensor_model_parallel_size": 2, "tp_comm_overlap": True}, ("--tp-comm-overlap has no effect; give --sequence-parallel",)),
    ("no-effect", 1, {"tp_comm_overlap_rs_dgrad": True}, ("--tp-comm-overlap-rs-dgrad has no effect; give --tp-comm-overlap",)),
    ("overlap", 1, {"delay_wgrad_compute": True}, ("--expert-model-parallel-size", "leave it out")),
    ("overlap", 2, {**MOE, "expert_model_parallel_size": 2, "delay_wgrad_compute": True, "pipeline_schedule": "zb-h1",
                    "pipeline_model_parallel_size": 1}, ("--pipeline-schedule zb-h1", "choose 1f1b")),
    ("overlap", 2, {**MOE, "expert_model_parallel_size": 2, "delay_wgrad_compute": True, "use_torch_fsdp2": True},
     ("FSDP2 has summed", "leave it out")),
    ("overlap", 1, {"overlap_moe_expert_parallel_comm": True}, ("--expert-model-parallel-size", "leave it out")),
    ("overlap", 2, {**MOE, "expert_model_parallel_size": 2, "overlap_moe_expert_parallel_comm": True, "recompute_granularity": "selective"},
     ("two passes under way", "--recompute-granularity")),
    ("overlap", 2, {**MOE, "expert_model_parallel_size": 2, "overlap_moe_expert_parallel_comm": True, "pipeline_schedule": "gpipe"},
     ("1F1B two by two",)),
    ("data", 1, {"data_path": ("x",)}, ("--mock-data and --data-path",)),
    ("data", 1, {"mock_data": False}, ("nothing says what to read",)),
    ("data", 1, {"train_data_path": ("x",)}, ("paths for each split",)),
    ("no-effect", 1, {"fim_rate": 0.7, "fim_eod_token": "x"}, ("--fim-rate 0.7 has no effect; give --fim-data", "--fim-eod-token x has no effect; give --fim-data")),
    ("fill-in-the-middle", 1, {**FIM, "fim_rate": 1.5, "fim_fragment_rate": -1.0, "fim_split_sample": "x"}, ("--fim-rate 1.5", "--fim-fragment-rate -1")),
    ("no-effect", 1, {**FIM, "fim_fragment_rate": 0.5}, ("--fim-fragment-rate 0.5 has no effect; give --fim-split-sample",)),
    ("fill-in-the-middle", 1, {**FIM, "sft": True}, ("--sft reads conversations; keep one",)),
    ("no-effect", 1, {"sft_tokenizer_prompt_format": "chatml"}, ("--sft-tokenizer-prompt-format chatml has no effect; give --sft",)),
    ("conversations", 1, {"sft": True, "eod_mask_loss": True}, ("--eod-mask-loss has no place under --sft",)),
    ("conversations", 1, {"sft": True, "chat_template": "x", "sft_tokenizer_prompt_format": "llama3"}, ("keep one",)),
    ("dropout", 1, {"hidden_dropout": 1.0}, ("--hidden-dropout 1.0",)),
    ("dropout", 1, {"attention_dropout": -0.1}, ("--attention-dropout -0.1",)),
    ("elastic", 1, {"elastic": True, "save": "x", "load": "y", "save_interval": 1}, ("one folder as both --save and --load",)),
    ("elastic", 1, {"elastic": True, "save": "x", "load": "x"}, ("give --save-interval",)),
    ("elastic", 1, {"elastic": True, "save": "x", "load": "x", "save_interval": 1, "dataloader_type": "cyclic"}, ("choose single",)),
    ("elastic", 1, {"elastic": True, "save": "x", "load": "x", "save_interval": 1, "decrease_batch_size_if_needed": True}, ("drop one of them",)),
    ("no-effect", 1, {"save_interval": 10}, ("--save-interval 10 has no effect; give --save",)),
    ("checkpoints", 1, {"save": "x", "save_interval": 10, "save_retain_interval": 15}, ("not a multiple",)),
    ("checkpoints", 1, {"use_checkpoint_args": True}, ("give --load",)),
    ("no-effect", 1, {"require_iteration": 5}, ("--require-iteration 5 has no effect; give --load",)),
    ("checkpoints", 1, {"load": "x", "require_iteration": 5, "ckpt_step": 3}, ("give one of them",)),
    ("no-effect", 1, {"export_hf": "x"}, ("--export-hf x has no effect; give --save",)),
    ("no-effect", 1, {"export_hf_like": "x"}, ("--export-hf-like x has no effect; give --export-hf",)),
    ("positive", 1, {**T5, "decoder_num_layers": -1, "decoder_seq_length": 0}, ("--decoder-num-layers -1", "--decoder-seq-length 0")),
    ("pipeline-split", 2, {**T5, **PP2}, ("--encoder-num-layers + --decoder-num-layers 7", "6 or 8")),
    ("encoder-and-decoder", 1, {**T5, "num_layers": 5}, ("--num-layers 5 and --encoder-num-layers 4", "keep one")),
    ("encoder-and-decoder", 1, {**T5, "encoder_seq_length": 64}, ("--seq-length 32 and --encoder-seq-length 64",)),
    ("no-effect", 1, {"decoder_num_layers": 2, "decoder_seq_length": 16}, ("--decoder-num-layers 2 has no effect; start pretrain_t5.py", "--decoder-seq-length 16 has no effect; start pretrain_t5.py")),
    ("encoder-and-decoder", 1, {**T5, "decoder_seq_length": 64, "max_position_embeddings": 32}, ("--decoder-seq-length 64", "at least 64")),
    ("encoder-and-decoder", 4, {**T5, **TP4, "sequence_parallel": True, "decoder_seq_length": 18}, ("16 or 20",)),
    ("encoder-and-decoder", 1, {**T5, "decoder_seq_length": 3}, ("at least 4",)),
    ("no-effect", 1, {"mask_prob": 0.3}, ("--mask-prob 0.3 has no effect; start pretrain_bert.py or pretrain_t5.py",)),
    ("masked-text", 1, {**BERT, "mask_prob": 0.0}, ("--mask-prob 0",)),
    ("masked-text", 1, {**T5, "short_seq_prob": 1.5}, ("--short-seq-prob 1.5",)),
    ("no-effect", 1, {**BERT, "reset_attention_mask": True, "eod_mask_loss": True}, ("--reset-attention-mask has no effect; start pretrain_gpt.py", "--eod-mask-loss has no effect; start pretrain_gpt.py")),
    ("masked-text", 1, {**BERT, "seq_length": 4}, ("at least 5",)),
    ("relative-positions", 1, {"position_embedding_type": "relative"}, ("pretrain_t5.py",)),
    ("relative-positions", 1, {**T5, "position_embedding_type": "relative", "relative_attention_num_buckets": 6}, ("multiple of 4",)),
    ("relative-positions", 1, {**T5, "position_embedding_type": "relative", "relative_attention_max_distance": 16}, ("more than half",)),
    ("norms", 1, {**BERT, "norm_after_residual": True, "apply_residual_connection_post_layernorm": True}, ("keep one",)),
    ("norms", 1, {**BERT, "norm_after_residual": True, "fp32_residual_connection": True}, ("drop one",)),
    ("no-effect", 1, {"embedding_layernorm": True}, ("--embedding-layernorm has no effect; start pretrain_bert.py",)),
    ("norms", 1, {"sandwich_norm": True, "apply_residual_connection_post_layernorm": True}, ("--sandwich-norm", "keep one")),
    ("no-effect", 1, {**T5, "sandwich_norm": True}, ("--sandwich-norm has no effect; start pretrain_gpt.py, pretrain_bert.py or the image classifier",)),
    ("norms", 1, {"softmax_scale": 0.0}, ("--softmax-scale 0",)),
    ("layer-patterns", 1, {"window_size": "4"}, ("--window-size 4 cannot be read", "127,0")),
    ("layer-patterns", 1, {"window_size": "4,0", "window_attn_skip_freq": "[1,0]"}, ("--window-attn-skip-freq [1,0] is a list of 2", "write 8")),
    ("no-effect", 1, {"window_attn_skip_freq": "2"}, ("--window-attn-skip-freq 2 has no effect; give --window-size",)),
    ("no-effect", 1, {"position_embedding_type": "rope", "rotary_base_local": 50.0}, ("--rotary-base-local 50 has no effect; give --window-size",)),
    ("rotations", 1, {"position_embedding_type": "rope", "window_size": "4,0", "rotary_base_local": 0.0, "rotary_base": -1.0}, ("--rotary-base -1 ", "--rotary-base-local 0 must")),
    ("no-effect", 1, {"no_rope_freq": "2"}, ("--no-rope-freq 2 has no effect; give --position-embedding-type rope",)),
    ("attention", 1, {"attention_logit_softcap": 0.0, "final_logit_softcap": -1.0}, ("--attention-logit-softcap 0", "--final-logit-softcap -1")),
    ("attention", 1, {"qk_clip": True, "qk_clip_alpha": 1.5}, ("--qk-clip-alpha 1.5",)),
    ("attention", 1, {"qk_clip": True, "qk_layernorm": True}, ("--qk-layernorm", "keep one")),
    ("no-effect", 1, {"qk_clip_threshold": 30.0}, ("--qk-clip-threshold 30 has no effect; give --qk-clip",)),
    ("no-effect", 1, {"activation_func_clamp_value": 7.0}, ("--activation-func-clamp-value 7 has no effect; give --swiglu, --geglu or --quick-geglu",)),
    ("no-effect", 1, {**T5, "softmax_type": "learnable", "window_size": "4,0"}, ("--window-size 4,0 has no effect; start pretrain_gpt.py, pretrain_bert.py or the image classifier", "--softmax-type learnable has no effect; start pretrain_gpt.py, pretrain_bert.py or the image classifier")),
    ("no-effect", 1, {"multi_latent_attention": True, "position_embedding_type": "rope", "attention_output_gate": True}, ("--attention-output-gate has no effect; leave out --multi-latent-attention",)),
    ("rotations", 1, {"rope_type": "yarn"}, ("--position-embedding-type learned_absolute does not",)),
    ("rotations", 1, {"position_embedding_type": "yarn", "rope_type": "rope"}, ("contradict",)),
    ("no-effect", 1, {"position_embedding_type": "rope", "mscale": 2.0, "rotary_scaling_factor": 4.0},
     ("--rotary-scaling-factor 4 has no effect; give --rope-type yarn", "--mscale 2 has no effect; give --rope-type yarn")),
    ("no-effect", 1, {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "use_rope_scaling": True}, ("--use-rope-scaling has no effect; give --rope-type rope",)),
    ("rotations", 1, {"position_embedding_type": "yarn", "rotary_scaling_factor": 0.5}, ("at least 1",)),
    ("rotations", 1, {"position_embedding_type": "yarn", "yarn_beta_slow": 64.0}, ("not above --yarn-beta-fast 32",)),
    ("rotations", 1, {"position_embedding_type": "mrope"}, ("--mrope-section nothing", "4 pairs")),
    ("rotations", 1, {"position_embedding_type": "mrope", "mrope_section": (2, 1, 2)}, ("--mrope-section 2 1 2", "4 pairs")),
    ("no-effect", 1, {"position_embedding_type": "rope", "mrope_section": (2, 1, 1)}, ("--mrope-section 2 1 1 has no effect; give --position-embedding-type mrope",)),
    ("activation", 1, {"geglu": True, "relu": True, "ffn_hidden_size": 64}, ("--relu and --geglu",)),
    ("no-effect", 1, {"moe_router_topk": 4, "expert_tensor_parallel_size": 1}, ("--moe-router-topk 4 has no effect; give --num-experts",)),
    ("experts", 1, {"recompute_granularity": "selective", "recompute_modules": ("moe",)}, ("--recompute-modules moe: there are no experts",)),
    ("experts", 1, {**MOE, **BERT}, ("--num-experts 8: for pretrain_gpt.py only",)),
    ("no-effect", 1, {**MOE, "moe_shared_expert_gate": True, "moe_shared_expert_overlap": True},
     ("--moe-shared-expert-gate has no effect; give --moe-shared-expert-intermediate-size", "--moe-shared-expert-overlap has no effect; give --moe-shared-expert-intermediate-size")),
    ("experts", 1, {**MOE, "recompute_granularity": "selective", "recompute_modules": ("shared_experts",)}, ("there is none",)),
    ("experts", 1, {**MOE, "moe_shared_expert_intermediate_size": 8, "moe_shared_expert_overlap": True}, ("alltoall or flex",)),
    ("no-effect", 1, {**MOE, "moe_pad_expert_input_to_capacity": True, "moe_token_drop_policy": "position"},
     ("--moe-pad-expert-input-to-capacity has no effect; give --moe-expert-capacity-factor", "--moe-token-drop-policy position has no effect; give --moe-expert-capacity-factor")),
    ("experts-over-ranks", 3, {**MOE, "expert_model_parallel_size": 3, "global_batch_size": 6}, ("--num-experts 8 cannot be divided",)),
    ("experts-over-ranks", 4, {**MOE, **TP4, "moe_ffn_hidden_size": 6}, ("--moe-ffn-hidden-size 6", "4 (the tensor size)", "4 or 8")),
    ("experts-over-ranks", 4, {**MOE, "expert_model_parallel_size": 8}, ("4 ranks are not a multiple of", "= 8")),
    ("experts-over-ranks", 4, {**MOE, **TP4, "moe_shared_expert_intermediate_size": 30}, ("28 or 32",)),
    ("choice-of-experts", 1, {**MOE, "moe_router_topk": 9}, ("--moe-router-topk 9", "from 1 to --num-experts 8")),
    ("choice-of-experts", 1, {**MOE, "moe_router_topk": 1}, ("learns nothing", "--moe-router-pre-softmax")),
    ("choice-of-experts", 1, {**MOE, "moe_router_enable_expert_bias": True}, ("sigmoid or sqrtsoftplus",)),
    ("choice-of-experts", 1, {**SIGMOID, "moe_router_num_groups": 4}, ("belong together",)),
    ("choice-of-experts", 1, {**SIGMOID, "moe_router_num_groups": 3, "moe_router_group_topk": 1}, ("does not divide --num-experts 8",)),
    ("choice-of-experts", 1, {**SIGMOID, "moe_router_num_groups": 4, "moe_router_group_topk": 5}, ("from 1 to --moe-router-num-groups 4",)),
    ("choice-of-experts", 1, {**SIGMOID, "moe_router_num_groups": 4, "moe_router_group_topk": 1, "moe_router_topk": 3},
     ("not to be had in --moe-router-group-topk 1 groups of 2",)),
    ("choice-of-experts", 1, {**SIGMOID, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 3},
     ("choose 2 or 4", "--moe-router-group-score max")),
    ("choice-of-experts", 1, {**MOE, "moe_input_jitter_eps": 1.0, "moe_router_topk_scaling_factor": -1.0},
     ("--moe-input-jitter-eps 1", "--moe-router-topk-scaling-factor -1")),
    ("balance-of-experts", 1, {**MOE, "moe_router_load_balancing_type": ("aux_loss", "aux_loss")}, ("twice",)),
    ("balance-of-experts", 1, {**MOE, "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"), "moe_aux_loss_coeff": (0.1, 0.1, 0.1)},
     ("3 weights for the 2 kinds",)),
    ("balance-of-experts", 1, {**MOE, "moe_router_load_balancing_type": ("sinkhorn", "aux_loss")}, ("stands alone",)),
    ("balance-of-experts", 1, {**MOE, "moe_router_load_balancing_type": ("none",), "moe_aux_loss_coeff": (0.1,)}, ("has no loss",)),
    ("balance-of-experts", 1, {**MOE, "moe_z_loss_coeff": -1.0}, ("must not be negative",)),
    ("upcycling", 1, {**MOE, "moe_upcycling_granularity": 2}, ("for --moe-use-upcycling only",)),
    ("upcycling", 1, {**UPCYCLED, "load": None}, ("no dense checkpoint",)),
    ("upcycling", 1, {**UPCYCLED, "moe_upcycling_granularity": 2}, ("another width", "--moe-ffn-hidden-size 64")),
    ("upcycling", 1, {**UPCYCLED, "moe_upcycling_granularity": 2, "moe_ffn_hidden_size": 32, "moe_router_topk": 3}, ("must be multiples",)),
    ("upcycling", 1, {**UPCYCLED, "moe_shared_expert_intermediate_size": 16}, ("nothing to make",)),
    ("upcycling", 1, {**UPCYCLED, "moe_router_score_function": "sigmoid", "moe_router_topk": 1}, ("cannot know",)),
    ("checkpoints", 1, {"save_best": "loss", "eval_iters": 0}, ("give --save", "compares evaluations")),
    ("no-effect", 1, {"save_best_mode": "max"}, ("--save-best-mode max has no effect; give --save-best",)),
    ("samples-in-training", 1, {"eval_generate": "prompts.txt", "eval_generate_tokens": 0}, ("--eval-generate-tokens",)),
    ("samples-in-training", 2, {**IMAGES, "online_evaluation_config": "x.yaml", "context_parallel_size": 2}, ("--online-evaluation-config: answers",)),
    ("no-effect", 1, {"online_evaluation_config": "x.yaml"}, ("--online-evaluation-config x.yaml has no effect; give --vision-model-type",)),
    ("faults", 1, {"failure_dump_weights": True}, ("give --on-bad-step",)),
    ("faults", 1, {"error_injection_rate": 9, "rerun_mode": "report_stats"}, ("is for --rerun-mode validate_results",)),
    ("faults", 1, {"rerun_mode": "validate_results", "check_for_nan_in_loss_and_grad": False}, ("knows no bad result",)),
    ("faults", 1, {"on_bad_step": "rollback", "save": "x"}, ("--save-interval", "or choose skip")),
    ("no-effect", 1, {"freeze_ViT": True}, ("--freeze-ViT has no effect; give --vision-model-type",)),
    ("image-sizes", 1, {**IMAGES, "img_h": 40}, ("--img-h 40 is not a multiple", "choose 32")),
    ("image-sizes", 1, {**IMAGES, "patch_dim": 0}, ("is not a multiple of --patch-dim 0",)),
    ("image-sizes", 1, {**IMAGES, "vision_num_attention_heads": 5}, ("does not divide --vision-hidden-size",)),
    ("images-in-text", 1, {**IMAGES, "img_h": 112, "img_w": 112}, ("no text has room",)),
    ("no-effect", 1, {**IMAGES, "use_thumbnail": True}, ("--use-thumbnail has no effect; give --use-tiling",)),
    ("image-tiles", 1, {**IMAGES, "use_tiling": True, "image_tag_type": "smolvlm", "max_num_tiles": 6}, ("choose 4, 9 or 16", "add --use-thumbnail")),
    ("no-effect", 1, {**CLASSIFIER, "freeze_LM": True}, ("--freeze-LM has no effect; freeze the encoder with --freeze-ViT",)),
)


def found(world_size: int, changes: dict[str, Any]) -> dict[str, str]:
    return dict(broken_rules(config_from_flat_dict(RequestedRun, {**GOOD, **changes}).resolve(world_size), world_size))


@pytest.mark.parametrize("name, world_size, changes, words", BAD, ids=[f"{row[0]} {' '.join(map(str, row[2]))}" for row in BAD])
def test_a_bad_setting_breaks_its_rule_and_the_message_says_what_to_do(name: str, world_size: int, changes: dict[str, Any],
                                                                       words: tuple[str, ...]) -> None:
    problems = found(world_size, changes)
    assert list(problems) == [name], problems
    for word in words:
        assert word in problems[name], problems[name]


@pytest.mark.parametrize("world_size, changes", [
    (1, {}), (8, {**TP4, **PP2, "sequence_parallel": True}), (4, {**TP4, **GQA, "num_query_groups": 2}), (4, {**TP4, **GQA, "num_query_groups": 1}),
    (2, {**PP2, "num_layers_per_virtual_pipeline_stage": 2}),
    (2, {**PP2, "pipeline_model_parallel_layout": "Et*3|t*5L"}), (1, {"hidden_size": 60, "kv_channels": 8}), (1, {"bf16": True, "grad_reduce_in_bf16": True}),
    (1, {"fp16": True, "loss_scale": 2.0}), (1, {**FULL, "recompute_num_layers": 2}), (1, {"recompute_activations": True}),
    (1, T5), (1, {**T5, "geglu": True, "openai_gelu": True, "position_embedding_type": "relative"}),
    (1, {**BERT, "norm_after_residual": True, "embedding_layernorm": True}), (7, {**T5, "pipeline_model_parallel_size": 7}),
    (1, {**SIGMOID, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_enable_expert_bias": True}),
    (1, {**MOE, "moe_router_topk": 1, "moe_router_load_balancing_type": ("sinkhorn",)}),
    (1, {**UPCYCLED, "moe_upcycling_granularity": 2, "moe_ffn_hidden_size": 32}),
    (2, {"use_torch_fsdp2": True, "torch_fsdp2_no_reshard_after_forward": True, "ddp_average_in_collective": True}),
    (1, {"sequence_parallel": True}), (2, {"overlap_param_gather": True, "use_distributed_optimizer": True}),
    (1, {"train_iters": None, "train_samples": 100}), (1, {"train_iters": None, "lr": None, "skip_train": True}),
    (4, {"global_batch_size": 20, "decrease_batch_size_if_needed": True}), (1, {"save": "x", "save_interval": 10, "save_retain_interval": 20}),
    (1, {"window_size": "(4, 0)", "window_attn_skip_freq": "[1]*7+[0]", "softmax_type": "learnable", "attention_output_gate": True}),
    (1, {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "mscale_all_dim": 1.0, "no_rope_freq": "4"}),
    (1, {"position_embedding_type": "mrope", "mrope_section": (2, 1, 1)}), (1, {"qk_clip": True, "qk_clip_threshold": 30.0}),
    (4, {**FP8, **TP4}), (4, {**FP8, **TP4, "sequence_parallel": True, "tp_comm_overlap": True}), (1, {**FP8, "bf16": True, "first_last_layers_bf16": True}), (1, {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}),
    (1, {"fp4_format": "e2m1", "fp4_recipe": "nvfp4"}),
    (2, {**FP8, "fp8_param_gather": True, "use_distributed_optimizer": True})])
def test_good_settings_break_no_rule(world_size: int, changes: dict[str, Any]) -> None:
    assert found(world_size, changes) == {}


def test_all_reasons_come_at_once() -> None:
    problems = found(4, {**TP4, "ffn_hidden_size": 90, "lr": None, "mock_data": False, "global_batch_size": 15, "fp16": True, "bf16": True,
                         "max_position_embeddings": 16, "hidden_dropout": 2.0})
    assert set(problems) == {"ffn-over-tensor", "learning-rate", "data", "global-batch", "number-formats", "positions", "dropout"}


def test_what_needs_sizes_waits_until_they_are_there() -> None:
    assert set(found(1, {"num_layers": None, "lr": None})) == {"required", "learning-rate"}


def test_every_rule_has_a_bad_setting_here_and_a_name_of_its_own() -> None:
    names = [rule.name for rule in (*NEEDS, *RULES, *ALWAYS)]
    assert len(set(names)) == len(names)
    assert set(names) == {row[0] for row in BAD} and len(BAD) >= 40


def test_stages_follow_the_flags() -> None:
    def layers(**changes: Any) -> list[list[int]]:
        config = config_from_flat_dict(RequestedRun, {**GOOD, **changes}).resolve(2)
        return [[plan.index for plan in stage.layers] for stage in stage_specs_of_run(config)]

    assert layers() == [[*range(8)]]
    assert layers(**PP2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layers(**PP2, num_layers_per_virtual_pipeline_stage=2) == layers(**PP2, num_virtual_stages_per_pipeline_rank=2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layers(**PP2, decoder_first_pipeline_num_layers=3) == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert layers(**PP2, pipeline_model_parallel_layout="Et*7|tL") == [[*range(7)], [7]]
    assert layers(**T5, **PP2, decoder_first_pipeline_num_layers=5) == [[0, 1, 2, 3, 0], [1, 2]], "encoder and decoder are one line"


def test_divisors_are_shown_in_order_and_not_all() -> None:
    assert divisors_text(8) == "1, 2, 4, 8" and divisors_text(60) == "1, 2, 3, 4, 5, 6, ..."
