#!/usr/bin/env bash
# Qwen2.5, 7B parameters, on one machine of 8 GPUs: matrices over four of them.
#
#   bash examples/qwen/train_qwen2.5_7b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]

set -euo pipefail
MACHINES=1
MODEL=(
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --group-query-attention
    --num-query-groups 4
    --seq-length 4096
    --max-position-embeddings 131072
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-6
    --rotary-base 1000000
    --untie-embeddings-and-output-weights
    --add-qkv-bias
)
PARALLEL=(
    --tensor-model-parallel-size 4
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
