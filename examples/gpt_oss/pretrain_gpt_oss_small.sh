#!/usr/bin/env bash
# A small gpt-oss: attention sinks, windows of 16 tokens in every other layer, and experts, on the text of the repository.
# About a minute on two processor cores; see examples/small.sh.
#
#   bash examples/gpt_oss/pretrain_gpt_oss_small.sh [more flags]

set -euo pipefail
NAME=gpt_oss_small
MODEL=(
    --num-layers 4
    --num-attention-heads 6
    --group-query-attention
    --num-query-groups 2
    --ffn-hidden-size 96
    --quick-geglu
    --activation-func-clamp-value 7.0
    --glu-linear-offset 1.0
    --softmax-type learnable
    --window-size 15,0
    --window-attn-skip-freq 2
    --num-experts 4
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-3
)
source "$(dirname "${BASH_SOURCE[0]}")/../small.sh"
