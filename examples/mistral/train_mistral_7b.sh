#!/usr/bin/env bash
# Mistral 7B (v0.1), whose queries see 4096 positions, on one machine of 8 GPUs: pairs of them share layers and sequence.
#
#   bash examples/mistral/train_mistral_7b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]

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
    --max-position-embeddings 32768
    --window-size 4095,0
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-5
    --rotary-base 10000
    --untie-embeddings-and-output-weights
)
PARALLEL=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --recompute-activations
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters 500000
    --lr 3e-4
    --init-method-std 0.02
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
