#!/usr/bin/env bash
# A GPT of 345M parameters on whatever machines there are, from one to four: it goes on when one is lost, and when one is added.
#
#   RENDEZVOUS=first-machine:29400 bash examples/elastic/train.sh CHECKPOINTS VOCAB MERGES DATA [more flags]
#
# Start it on every machine, with the same arguments and environment; on another machine later, and it joins. CHECKPOINTS is a
# folder that all machines see; DATA is the prefix of a .bin/.idx pair made by tools/preprocess_data.py with the same VOCAB and
# MERGES. What happens when the number of machines changes is told in docs/elastic.md.
#
# Environment: RENDEZVOUS, a machine that stays, and a free port of it; NODES, the least and the most machines (1:4);
# GPUS_PER_NODE (8); RESTARTS after errors (100); JOB, the same on all machines; LAUNCH=echo prints the command.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/examples/print_command.sh"
if [ $# -lt 4 ]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

# By default torch 2.13 tells the address of the first rank in the first round of a job only: a machine that comes later would
# wait for it in vain.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

DISTRIBUTED=(
    --nnodes "${NODES:-1:4}"
    --nproc_per_node "${GPUS_PER_NODE:-8}"
    --max-restarts "${RESTARTS:-100}"
    --rdzv-backend c10d
    --rdzv-endpoint "${RENDEZVOUS:-localhost:29400}"
    --rdzv-id "${JOB:-elastic}"
    --rdzv-conf join_timeout=3600,last_call_timeout=30
    --monitor-interval 5
)
MODEL=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
)
# 384 samples in micro batches of 4 are shared out evenly by one, two, three and four machines of 8 GPUs: no rank stands by.
TRAINING=(
    --elastic
    --micro-batch-size 4
    --global-batch-size 384
    --train-iters 300000
    --lr 3.0e-4
    --min-lr 3.0e-5
    --lr-decay-style cosine
    --lr-warmup-iters 1000
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --use-distributed-optimizer
    --distributed-timeout-minutes 5
)
FILES=(
    --vocab-file "$2"
    --merge-file "$3"
    --data-path "$4"
    --split 949,50,1
    --save "$1"
    --load "$1"
    --save-interval 100
    --save-keep-last 3
    --log-interval 10
    --eval-interval 1000
    --eval-iters 10
)

${LAUNCH:-torchrun} "${DISTRIBUTED[@]}" "$ROOT/pretrain_gpt.py" "${MODEL[@]}" "${TRAINING[@]}" "${FILES[@]}" "${@:5}"
