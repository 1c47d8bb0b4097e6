#!/usr/bin/env bash
# Finetune BERT-large on MNLI, on the GPUs of one machine or more, with the settings of Megatron-LM's example.
#
#   bash examples/tasks/finetune_mnli_distributed.sh PRETRAINED VOCAB GLUE CHECKPOINTS [more flags]
#
# PRETRAINED is a checkpoint of a BERT of 340M parameters: a run's --save, a published folder, or one of Megatron's. VOCAB
# is its vocab.txt. GLUE is the folder of GLUE with MNLI/train.tsv, dev_matched.tsv and dev_mismatched.tsv. The epoch that
# does best is kept in CHECKPOINTS, and what it says of every pair is written to CHECKPOINTS/predictions.jsonl.
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
GLUE="$3"
CHECKPOINTS="$4"

DISTRIBUTED=(
    --nproc_per_node "${GPUS_PER_NODE:-8}"
    --nnodes "${NUM_NODES:-1}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)
TASK=(
    --task MNLI
    --train-data "$GLUE/MNLI/train.tsv"
    --valid-data "$GLUE/MNLI/dev_matched.tsv" "$GLUE/MNLI/dev_mismatched.tsv"
    --epochs 5
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
    --micro-batch-size 8
    --lr 5.0e-5
    --lr-decay-style linear
    --lr-warmup-fraction 0.065
    --weight-decay 1.0e-1
    --tensor-model-parallel-size 1
    "${PRECISION:---fp16}"
    --log-interval 10
    --save "$CHECKPOINTS"
)

${LAUNCH:-torchrun} "${DISTRIBUTED[@]}" "$ROOT/tasks/main.py" "${TASK[@]}" "${MODEL[@]}" "${TRAINING[@]}" "${@:5}"
