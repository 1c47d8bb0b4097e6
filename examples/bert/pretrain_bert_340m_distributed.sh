#!/usr/bin/env bash
# BERT-large (340M parameters) on the GPUs of one or more machines, with the settings of Megatron-LM's example.
#
#   bash examples/bert/pretrain_bert_340m_distributed.sh CHECKPOINTS TENSORBOARD VOCAB DATA [more flags]
#
# VOCAB is BERT's vocab.txt; DATA is the prefix of a .bin/.idx pair of sentences made with it by
# tools/preprocess_data.py --split-sentences --tokenizer-type BertWordPieceLowerCase. The first layout that fits is the
# fastest: with 80 GB a GPU no matrix needs to be cut.
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
CHECKPOINTS="$1"
TENSORBOARD="$2"
VOCAB="$3"
DATA="$4"

DISTRIBUTED=(
    --nproc_per_node "${GPUS_PER_NODE:-8}"
    --nnodes "${NUM_NODES:-1}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)
MODEL=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 512
    --max-position-embeddings 512
)
TRAINING=(
    --micro-batch-size 4
    --global-batch-size 32
    --train-iters 1000000
    --lr 1.0e-4
    --min-lr 1.0e-5
    --lr-decay-style linear
    --lr-decay-iters 990000
    --lr-warmup-fraction 0.01
    --weight-decay 1e-2
    --clip-grad 1.0
    "${PRECISION:---fp16}"
)
PARALLEL=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
)
DATASET=(
    --tokenizer-type BertWordPieceLowerCase
    --vocab-file "$VOCAB"
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

${LAUNCH:-torchrun} "${DISTRIBUTED[@]}" "$ROOT/pretrain_bert.py" \
    "${MODEL[@]}" "${TRAINING[@]}" "${PARALLEL[@]}" "${DATASET[@]}" "${LOGGING[@]}" "${@:5}"
