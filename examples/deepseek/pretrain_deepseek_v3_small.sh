#!/usr/bin/env bash
# A small DeepSeek-V3, which also learns to predict one token further, on the text of the repository.
# About a minute on two processor cores; see examples/small.sh.
#
#   bash examples/deepseek/pretrain_deepseek_v3_small.sh [more flags]

set -euo pipefail
NAME=deepseek_v3_small
MODEL=(
    --num-layers 3
    --num-attention-heads 6
    --ffn-hidden-size 256
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-6
    --multi-latent-attention
    --q-lora-rank 48
    --kv-lora-rank 32
    --qk-head-dim 12
    --qk-pos-emb-head-dim 8
    --v-head-dim 16
    --qk-layernorm
    --rope-type rope
    --num-experts 8
    --moe-layer-freq '[0]*1+[1]*2'
    --moe-ffn-hidden-size 64
    --moe-shared-expert-intermediate-size 64
    --moe-router-topk 4
    --moe-router-num-groups 4
    --moe-router-group-topk 2
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-topk-scaling-factor 2.5
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4
    --mtp-num-layers 1
)
source "$(dirname "${BASH_SOURCE[0]}")/../small.sh"
