#!/usr/bin/env bash
# DeepSeek-V2, 236B parameters of which a token uses 21B, on 32 machines of 8 GPUs: 16 stages, experts over 8 ranks of a machine.
#
#   bash examples/deepseek/train_deepseek_v2.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]

set -euo pipefail
MACHINES=32
MODEL=(
    --num-layers 60
    --hidden-size 5120
    --ffn-hidden-size 12288
    --num-attention-heads 128
    --seq-length 4096
    --max-position-embeddings 163840
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-6
    --untie-embeddings-and-output-weights
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --qk-layernorm
    --rotary-scaling-factor 40
    --mscale 0.707
    --mscale-all-dim 0.707
    --num-experts 160
    --moe-layer-freq '[0]*1+[1]*59'
    --moe-ffn-hidden-size 1536
    --moe-shared-expert-intermediate-size 3072
    --moe-router-topk 6
    --moe-router-pre-softmax
    --moe-router-num-groups 8
    --moe-router-group-topk 3
    --moe-router-group-score max
    --moe-router-topk-scaling-factor 16
)
PARALLEL=(
    --pipeline-model-parallel-size 16
    --decoder-first-pipeline-num-layers 2
    --decoder-last-pipeline-num-layers 2
    --expert-model-parallel-size 8
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 9216
    --train-iters 500000
    --lr 2.4e-4
    --init-method-std 0.006
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 3e-3
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
