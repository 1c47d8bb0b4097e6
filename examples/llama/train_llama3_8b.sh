#!/usr/bin/env bash
# Llama 3.1, 8B parameters, on one machine of 8 GPUs: matrices over pairs of them. More machines make it faster.
#
#   bash examples/llama/train_llama3_8b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]

set -euo pipefail
MACHINES=1
MODEL=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 131072
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-5
    --rotary-base 500000
    --use-rope-scaling
    --untie-embeddings-and-output-weights
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
