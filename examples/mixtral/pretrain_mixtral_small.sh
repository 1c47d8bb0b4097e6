#!/usr/bin/env bash
# A small Mixtral: four experts, of which each token uses two, on the text of the repository.
# About a minute on two processor cores; see examples/small.sh.
#
#   bash examples/mixtral/pretrain_mixtral_small.sh [more flags]

set -euo pipefail
NAME=mixtral_small
MODEL=(
    --num-layers 3
    --num-attention-heads 6
    --group-query-attention
    --num-query-groups 2
    --ffn-hidden-size 128
    --swiglu
    --disable-bias-linear
    --num-experts 4
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
)
source "$(dirname "${BASH_SOURCE[0]}")/../small.sh"
