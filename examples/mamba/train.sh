#!/usr/bin/env bash
# Megatron's hybrids of Mamba-2 and attention, 800M or 8B parameters, on one machine of 8 GPUs, with the flags of its examples/mamba/train.sh.
#
#   bash examples/mamba/train.sh DATA TOKENIZER [more flags]
#
# DATA is the prefix of a .bin/.idx pair, TOKENIZER a SentencePiece model.
# Environment: MODEL_SCALE, 800M or 8B; GPUS_PER_NODE; LAUNCH=echo prints the command.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/examples/print_command.sh"
if [ $# -lt 2 ]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
case "${MODEL_SCALE:-800M}" in
    800M) SIZES=(--tensor-model-parallel-size 1 --num-layers 48 --hidden-size 1024 --num-attention-heads 16 --global-batch-size 32) ;;
    8B) SIZES=(--tensor-model-parallel-size 4 --num-layers 56 --hidden-size 4096 --num-attention-heads 32 --global-batch-size 8) ;;
    *)
        echo "MODEL_SCALE is $MODEL_SCALE; give 800M or 8B" >&2
        exit 2
        ;;
esac
FLAGS=(
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --use-distributed-optimizer
    --overlap-param-gather
    --overlap-grad-reduce
    --untie-embeddings-and-output-weights
    --init-method-std 0.02
    --position-embedding-type none
    --group-query-attention
    --num-query-groups 8
    --hybrid-attention-ratio 0.08
    --hybrid-mlp-ratio 0.5
    --seq-length 4096
    --max-position-embeddings 4096
    --train-samples 73242188
    --lr-warmup-samples 50000
    --lr-decay-samples 73192188
    --save checkpoints
    --load checkpoints
    --data-path "$1"
    --data-cache-path data-cache
    --split 99,1,0
    --tokenizer-type GPTSentencePieceTokenizer
    --tokenizer-model "$2"
    --distributed-backend nccl
    --micro-batch-size 4
    --lr 2.5e-4
    --min-lr 2.5e-5
    --lr-decay-style cosine
    --weight-decay 0.1
    --clip-grad 1.0
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --disable-bias-linear
    --normalization RMSNorm
    --adam-beta1 0.9
    --adam-beta2 0.95
    --log-interval 10
    --save-interval 2000
    --eval-interval 2000
    --eval-iters 32
    --bf16
    --use-mcore-models
    --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec
    --no-create-attention-mask-in-dataloader
    --tensorboard-dir tensorboard
)

${LAUNCH:-torchrun} --nproc_per_node "${GPUS_PER_NODE:-8}" "$ROOT/pretrain_mamba.py" "${SIZES[@]}" "${FLAGS[@]}" "${@:3}"
