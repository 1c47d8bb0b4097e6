#!/usr/bin/env bash
# Llama 3.1, 70B parameters, on 8 machines of 8 GPUs: matrices within a machine, layers over 4 of them.
#
#   bash examples/llama/train_llama3_70b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]

set -euo pipefail
MACHINES=8
MODEL=(
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
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
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --num-virtual-stages-per-pipeline-rank 5
    --recompute-activations
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1024
    --train-iters 500000
    --lr 1.5e-4
    --init-method-std 0.02
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
