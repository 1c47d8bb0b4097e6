#!/usr/bin/env bash
# Qwen3-30B-A3B, 30B parameters of which a token uses 3B, on 4 machines of 8 GPUs: attention over four, experts over eight.
#
#   bash examples/qwen/train_qwen3_30b_a3b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]

set -euo pipefail
MACHINES=4
MODEL=(
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 4
    --seq-length 4096
    --max-position-embeddings 40960
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-6
    --rotary-base 1000000
    --untie-embeddings-and-output-weights
    --kv-channels 128
    --qk-layernorm
    --num-experts 128
    --moe-ffn-hidden-size 768
    --moe-router-topk 8
)
PARALLEL=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters 500000
    --lr 3e-4
    --init-method-std 0.02
    --moe-router-load-balancing-type global_aux_loss
    --moe-aux-loss-coeff 1e-3
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
