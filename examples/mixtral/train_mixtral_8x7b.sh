#!/usr/bin/env bash
# Mixtral 8x7B, 47B parameters of which a token uses 13B, on 4 machines of 8 GPUs: layers over machines, experts within one.
#
#   bash examples/mixtral/train_mixtral_8x7b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]

set -euo pipefail
MACHINES=4
MODEL=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 32768
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-5
    --rotary-base 1000000
    --untie-embeddings-and-output-weights
    --num-experts 8
    --moe-router-topk 2
)
PARALLEL=(
    --pipeline-model-parallel-size 4
    --num-virtual-stages-per-pipeline-rank 8
    --recompute-granularity selective
    --recompute-modules core_attn layernorm moe_act
    --expert-model-parallel-size 8
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 500000
    --lr 1e-4
    --init-method-std 0.02
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
