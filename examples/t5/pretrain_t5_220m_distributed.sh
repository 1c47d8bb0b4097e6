#!/usr/bin/env bash
# T5-base (220M parameters) on the GPUs of one or more machines, with the settings of Megatron-LM's example.
#
#   bash examples/t5/pretrain_t5_220m_distributed.sh CHECKPOINTS TENSORBOARD VOCAB DATA [more flags]
#
# VOCAB is BERT's cased vocab.txt; DATA is the prefix of a .bin/.idx pair of sentences made with it by
# tools/preprocess_data.py --split-sentences --tokenizer-type BertWordPieceCase --vocab-extra-ids 100.
# The 100 sentinels stand in the place of the spans that the decoder learns to write.
#
# Environment: GPUS_PER_NODE, NUM_NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT; PRECISION (--bf16 unless given);
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
    --encoder-num-layers 12
    --decoder-num-layers 12
    --hidden-size 768
    --num-attention-heads 12
    --kv-channels 64
    --ffn-hidden-size 3072
    --encoder-seq-length 512
    --decoder-seq-length 128
    --max-position-embeddings 512
    --init-method-std 0.015
)
TRAINING=(
    --micro-batch-size 64
    --global-batch-size 512
    --train-iters 1000000
    --lr 1.0e-4
    --min-lr 1.0e-5
    --lr-decay-style linear
    --lr-decay-iters 1000000
    --lr-warmup-fraction 0.01
    --weight-decay 1e-2
    --clip-grad 1.0
    "${PRECISION:---bf16}"
)
PARALLEL=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
)
DATASET=(
    --tokenizer-type BertWordPieceCase
    --vocab-file "$VOCAB"
    --vocab-extra-ids 100
    --data-path "$DATA"
    --split 99982,9,9
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

${LAUNCH:-torchrun} "${DISTRIBUTED[@]}" "$ROOT/pretrain_t5.py" \
    "${MODEL[@]}" "${TRAINING[@]}" "${PARALLEL[@]}" "${DATASET[@]}" "${LOGGING[@]}" "${@:5}"
