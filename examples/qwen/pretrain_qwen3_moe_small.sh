#!/usr/bin/env bash
# A small Qwen3 with experts on the text of the repository.
# About a minute on two processor cores; see examples/small.sh.
#
#   bash examples/qwen/pretrain_qwen3_moe_small.sh [more flags]

set -euo pipefail
NAME=qwen3_moe_small
MODEL=(
    --num-layers 3
    --num-attention-heads 6
    --group-query-attention
    --num-query-groups 2
    --kv-channels 16
    --ffn-hidden-size 192
    --swiglu
    --disable-bias-linear
    --qk-layernorm
    --num-experts 8
    --moe-ffn-hidden-size 64
    --moe-router-topk 2
    --moe-router-load-balancing-type global_aux_loss
    --moe-aux-loss-coeff 1e-3
)
source "$(dirname "${BASH_SOURCE[0]}")/../small.sh"
