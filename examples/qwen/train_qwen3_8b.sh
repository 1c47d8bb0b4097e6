#!/usr/bin/env bash
# Qwen3, 8B parameters, on one machine of 8 GPUs: matrices over pairs of them.
#
#   bash examples/qwen/train_qwen3_8b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]

set -euo pipefail
MACHINES=1
MODEL=(
    --num-layers 36
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 40960
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-6
    --rotary-base 1000000
    --untie-embeddings-and-output-weights
    --kv-channels 128
    --qk-layernorm
)
PARALLEL=(
    --tensor-model-parallel-size 2
    --sequence-parallel
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters 500000
    --lr 3e-4
    --init-method-std 0.02
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
