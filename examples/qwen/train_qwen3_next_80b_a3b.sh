#!/usr/bin/env bash
# Qwen3-Next, 80B parameters of which a token uses 3B, on 8 machines of 8 GPUs: three layers of a gated delta net to each of attention.
#
#   bash examples/qwen/train_qwen3_next_80b_a3b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]

set -euo pipefail
MACHINES=8
MODEL=(
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 5120
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 2
    --kv-channels 256
    --experimental-attention-variant gated_delta_net
    --linear-attention-freq 4
    --linear-num-key-heads 16
    --linear-num-value-heads 32
    --linear-key-head-dim 128
    --linear-value-head-dim 128
    --attention-output-gate
    --qk-layernorm
    --apply-layernorm-1p
    --rotary-percent 0.25
    --rotary-base 10000000
    --norm-epsilon 1e-6
    --seq-length 4096
    --max-position-embeddings 262144
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --num-experts 512
    --moe-ffn-hidden-size 512
    --moe-shared-expert-intermediate-size 512
    --moe-shared-expert-gate
    --moe-router-topk 10
)
PARALLEL=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --expert-model-parallel-size 32
    --expert-tensor-parallel-size 1
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --kernel delta_rule_scan=triton # planned three times as fast as torch's scan; it has not run on a GPU yet
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1024
    --train-iters 500000
    --lr 3e-4
    --init-method-std 0.02
    --moe-router-load-balancing-type global_aux_loss
    --moe-aux-loss-coeff 1e-3
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
