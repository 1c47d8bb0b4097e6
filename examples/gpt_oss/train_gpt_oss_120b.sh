#!/usr/bin/env bash
# gpt-oss-120b, 117B parameters of which a token uses 5.1B, on 8 machines of 8 GPUs: layers over 4 stages, experts over 16 GPUs.
#
#   bash examples/gpt_oss/train_gpt_oss_120b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]

set -euo pipefail
MACHINES=8
MODEL=(
    --num-layers 36
    --hidden-size 2880
    --ffn-hidden-size 2880
    --num-attention-heads 64
    --kv-channels 64
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 131072
    --quick-geglu
    --activation-func-clamp-value 7.0
    --glu-linear-offset 1.0
    --norm-epsilon 1e-5
    --rope-type yarn
    --rotary-base 150000
    --rotary-scaling-factor 32
    --no-yarn-correction-range-round-to-int
    --untie-embeddings-and-output-weights
    --softmax-type learnable
    --window-size 127,0
    --window-attn-skip-freq 2
    --num-experts 128
    --moe-router-topk 4
)
PARALLEL=(
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 16
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1024
    --train-iters 500000
    --lr 2e-4
    --init-method-std 0.02
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-3
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
