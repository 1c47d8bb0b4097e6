#!/usr/bin/env bash
# DeepSeek-V3, 671B parameters of which a token uses 37B, on 128 machines of 8 GPUs; a last layer predicts one token further.
#
#   bash examples/deepseek/train_deepseek_v3.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]

set -euo pipefail
MACHINES=128
MODEL=(
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 128
    --seq-length 4096
    --max-position-embeddings 163840
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-6
    --untie-embeddings-and-output-weights
    --multi-latent-attention
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --qk-layernorm
    --rotary-scaling-factor 40
    --mscale 1.0
    --mscale-all-dim 1.0
    --q-lora-rank 1536
    --num-experts 256
    --moe-layer-freq '[0]*3+[1]*58'
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-router-topk 8
    --moe-router-num-groups 8
    --moe-router-group-topk 4
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-topk-scaling-factor 2.5
    --mtp-num-layers 1
)
PARALLEL=(
    --pipeline-model-parallel-size 16
    --pipeline-model-parallel-layout 'Et*3|(tt|)*29m|L'
    --expert-model-parallel-size 64
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 8192
    --train-iters 500000
    --lr 2.2e-4
    --init-method-std 0.006
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4
    --mtp-loss-scaling-factor 0.1
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
