#!/usr/bin/env bash
# Finetune BERT-large on RACE, on the GPUs of one machine or more, with the settings of Megatron-LM's example.
#
#   bash examples/tasks/finetune_race_distributed.sh PRETRAINED VOCAB RACE CHECKPOINTS [more flags]
#
# PRETRAINED is a checkpoint of a BERT of 340M parameters: a run's --save, a published folder, or one of Megatron's. VOCAB
# is its vocab.txt. RACE is the published folder with train/middle, train/high, dev/middle and dev/high. The epoch that
# does best is kept in CHECKPOINTS, and what it says of every question is written to CHECKPOINTS/predictions.jsonl.
#
# Environment: GPUS_PER_NODE, NUM_NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT; PRECISION (--fp16 unless given);
# LAUNCH=echo prints the command instead of running it.

set -euo pipefail
if [ $# -lt 4 ]; then
    sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/examples/print_command.sh"
PRETRAINED="$1"
VOCAB="$2"
RACE="$3"
CHECKPOINTS="$4"

DISTRIBUTED=(
    --nproc_per_node "${GPUS_PER_NODE:-8}"
    --nnodes "${NUM_NODES:-1}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)
TASK=(
    --task RACE
    --train-data "$RACE/train/middle" "$RACE/train/high"
    --valid-data "$RACE/dev/middle" "$RACE/dev/high"
    --epochs 3
    --pretrained-checkpoint "$PRETRAINED"
    --output-file "$CHECKPOINTS/predictions.jsonl"
    --tokenizer-type BertWordPieceLowerCase
    --vocab-file "$VOCAB"
)
MODEL=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 512
    --max-position-embeddings 512
)
TRAINING=(
    --seed 1234
    --micro-batch-size 4
    --lr 1.0e-5
    --lr-decay-style linear
    --lr-warmup-fraction 0.06
    --weight-decay 1.0e-1
    --clip-grad 1.0
    --hidden-dropout 0.1
    --attention-dropout 0.1
    --tensor-model-parallel-size 1
    "${PRECISION:---fp16}"
    --log-interval 10
    --save "$CHECKPOINTS"
)

${LAUNCH:-torchrun} "${DISTRIBUTED[@]}" "$ROOT/tasks/main.py" "${TASK[@]}" "${MODEL[@]}" "${TRAINING[@]}" "${@:5}"
