#!/usr/bin/env bash
# Llama 3.1, 405B parameters, on 64 machines of 8 GPUs or more: the embedding and the loss count as layers of the pipeline.
#
#   bash examples/llama/train_llama3_405b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]

set -euo pipefail
MACHINES=64
MODEL=(
    --num-layers 126
    --hidden-size 16384
    --ffn-hidden-size 53248
    --num-attention-heads 128
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
    --pipeline-model-parallel-size 16
    --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split
    --recompute-granularity selective
    --recompute-modules core_attn layernorm mlp
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 2048
    --train-iters 1000000
    --lr 8e-5
    --init-method-std 0.02
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
