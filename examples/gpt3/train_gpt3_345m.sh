#!/usr/bin/env bash
# The GPT of 345M parameters that Megatron-LM published, trained on one GPU or on as many as GPUS_PER_NODE says.
#
#   bash examples/gpt3/train_gpt3_345m.sh CHECKPOINTS TENSORBOARD VOCAB MERGES DATA [more flags]
#
# VOCAB and MERGES are GPT-2's files (examples/data/gpt2); DATA is the prefix of a .bin/.idx pair made with them by
# tools/preprocess_data.py. The number format is PRECISION, --fp16 unless given; on GPUs that know it, use --bf16.
#
# Environment: GPUS_PER_NODE, PRECISION; LAUNCH=echo prints the command instead of running it.

set -euo pipefail
if [ $# -lt 5 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/examples/print_command.sh"
CHECKPOINTS="$1"
TENSORBOARD="$2"
VOCAB="$3"
MERGES="$4"
DATA="$5"

MODEL=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
)
TRAINING=(
    --micro-batch-size 4
    --global-batch-size 32
    --train-iters 500000
    --lr 1.5e-4
    --min-lr 1.0e-5
    --lr-decay-style cosine
    --lr-decay-iters 320000
    --lr-warmup-fraction 0.01
    --weight-decay 1e-2
    --clip-grad 1.0
    "${PRECISION:---fp16}"
)
DATASET=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$VOCAB"
    --merge-file "$MERGES"
    --data-path "$DATA"
    --split 949,50,1
)
LOGGING=(
    --log-interval 100
    --eval-interval 1000
    --eval-iters 10
    --save-interval 10000
    --save "$CHECKPOINTS"
    --load "$CHECKPOINTS"
    --tensorboard-dir "$TENSORBOARD"
)

${LAUNCH:-torchrun} --nproc_per_node "${GPUS_PER_NODE:-1}" "$ROOT/pretrain_gpt.py" \
    "${MODEL[@]}" "${TRAINING[@]}" "${DATASET[@]}" "${LOGGING[@]}" "${@:6}"
