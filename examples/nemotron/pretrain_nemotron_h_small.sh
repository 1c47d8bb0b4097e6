#!/usr/bin/env bash
# A small Nemotron-H on the text of the repository: two layers of Mamba-2, one of attention, an MLP.
# About a minute on two processor cores; see examples/small.sh.
#
#   bash examples/nemotron/pretrain_nemotron_h_small.sh [more flags]

set -euo pipefail
NAME=nemotron_h_small
ENTRY=pretrain_hybrid.py
MODEL=(
    --hybrid-layer-pattern 'M*M-'
    --num-attention-heads 6
    --group-query-attention
    --num-query-groups 2
    --kv-channels 16
    --ffn-hidden-size 384
    --mamba-num-heads 12
    --mamba-head-dim 16
    --mamba-num-groups 2
    --mamba-state-dim 32
    --position-embedding-type none
    --squared-relu
    --disable-bias-linear
)
source "$(dirname "${BASH_SOURCE[0]}")/../small.sh"
