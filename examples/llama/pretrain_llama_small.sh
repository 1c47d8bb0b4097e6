#!/usr/bin/env bash
# A small Llama on the text of the repository.
# About a minute on two processor cores; see examples/small.sh.
#
#   bash examples/llama/pretrain_llama_small.sh [more flags]

set -euo pipefail
NAME=llama_small
MODEL=(
    --num-layers 3
    --num-attention-heads 6
    --group-query-attention
    --num-query-groups 2
    --ffn-hidden-size 256
    --swiglu
    --disable-bias-linear
)
source "$(dirname "${BASH_SOURCE[0]}")/../small.sh"
