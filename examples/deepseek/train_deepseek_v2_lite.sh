#!/usr/bin/env bash
# DeepSeek-V2-Lite, 16B parameters of which a token uses 2.4B, on one machine of 8 GPUs: experts over all of them.
#
#   bash examples/deepseek/train_deepseek_v2_lite.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]

set -euo pipefail
MACHINES=1
MODEL=(
    --num-layers 27
    --hidden-size 2048
    --ffn-hidden-size 10944
    --num-attention-heads 16
    --seq-length 4096
    --max-position-embeddings 163840
    --swiglu
    --disable-bias-linear
    --norm-epsilon 1e-6
    --untie-embeddings-and-output-weights
    --multi-latent-attention
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --qk-layernorm
    --rotary-scaling-factor 40
    --mscale 0.707
    --mscale-all-dim 0.707
    --num-experts 64
    --moe-layer-freq '[0]*1+[1]*26'
    --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 2816
    --moe-router-topk 6
    --moe-router-pre-softmax
)
PARALLEL=(
    --expert-model-parallel-size 8
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --recompute-activations
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters 500000
    --lr 4.2e-4
    --init-method-std 0.006
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-3
)
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
