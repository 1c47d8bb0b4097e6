#!/usr/bin/env bash
# What the launchers of published networks share. They set MACHINES, MODEL, PARALLEL and TRAINING, and ENTRY if it is not
# pretrain_gpt.py, and source this:
#
#   bash examples/llama/train_llama3_8b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]
#
# Start it on every machine, with the same arguments and environment but for NODE_RANK. CHECKPOINTS is a folder that all
# machines see; TOKENIZER is a tokenizer.json or the folder of one, as published with the network; DATA is the prefix of a
# .bin/.idx pair made with it by tools/preprocess_data.py. To begin with published weights, add --load FOLDER --finetune.
#
# Each fits GPUs of 80 GB (a test plans it); LAUNCH="python -m megatron plan --gpu h100-80 --" in front plans it for others.
#
# ENTRY is the script that is started, pretrain_gpt.py unless finetune.py is set.
#
# Environment: GPUS_PER_NODE, NUM_NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT; LAUNCH=echo prints the command.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/examples/print_command.sh"
if [ $# -lt 4 ]; then
    for file in "$0" "${BASH_SOURCE[0]}"; do sed -n '2,/^$/s/^# \{0,1\}//p' "$file" >&2; done
    exit 2
fi

DISTRIBUTED=(
    --nproc_per_node "${GPUS_PER_NODE:-8}"
    --nnodes "${NUM_NODES:-$MACHINES}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)
MODEL=(
    --normalization RMSNorm
    --position-embedding-type rope
    --hidden-dropout 0
    --attention-dropout 0
    "${MODEL[@]}"
)
TRAINING+=(
    --min-lr 1e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
FILES=(
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$3"
    --data-path "$4"
    --split 99,1,0
    --save "$1"
    --load "$1"
    --save-interval 500
    --tensorboard-dir "$2"
    --log-interval 10
    --log-throughput
    --eval-interval 1000
    --eval-iters 10
    --distributed-timeout-minutes 60
)

${LAUNCH:-torchrun} "${DISTRIBUTED[@]}" "$ROOT/${ENTRY:-pretrain_gpt.py}" \
    "${MODEL[@]}" "${PARALLEL[@]}" "${TRAINING[@]}" "${FILES[@]}" "${@:5}"
