#!/usr/bin/env bash
# A launcher with mistakes, on purpose. docs/trust.md finds them, and makes a run of it.
#
#   bash examples/trust/pretrain_small.sh [more flags, which win over those here]
#
# Environment: LAUNCH, what the command is given to: torchrun, or a tool such as "python -m megatron check-config --".

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/examples/print_command.sh"
MODEL=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 6
    --seq-length 64
    --max-position-embeddings 32
    --attention-dropout 0
    --hidden-dropout 0
)
TRAINING=(
    --micro-batch-size 2
    --global-batch-size 9
    --train-iters 12
    --lr 1e-3
    --clip-grad 1.0
)
LAYOUT=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --sequence-parallel
)
DATA=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 1000
    --num-workers 0
    --eval-iters 0
    --log-interval 4
)
${LAUNCH:-torchrun --standalone} --nproc_per_node 4 "$ROOT/pretrain_gpt.py" "${MODEL[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${DATA[@]}" "$@"
