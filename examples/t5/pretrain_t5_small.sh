#!/usr/bin/env bash
# A small T5 on the text of the repository, from text to a picture of its loss in some minutes on two processor cores:
#
#   bash examples/t5/pretrain_t5_small.sh [more flags]
#
#   1. two .bin/.idx pairs of sentences    2. training    3. the loss curve beside the entropy of single word pieces
#
# Everything is written to runs/t5_small, which is emptied first. With GPUS_PER_NODE=2 or more the layers stand in a line
# of that many ranks. LAUNCH=echo prints the training command instead of running anything.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
ROOT="$PWD"
source "$ROOT/examples/print_command.sh"
OUT="$ROOT/runs/t5_small"
DATA="$ROOT/examples/data"
RANKS="${GPUS_PER_NODE:-1}"
TOKENIZER=(
    --tokenizer-type BertWordPieceLowerCase
    --vocab-file "$DATA/demo-bert-vocab.txt"
    --vocab-extra-ids 100
)
MODEL=(
    --encoder-num-layers 2
    --decoder-num-layers 2
    --encoder-seq-length 64
    --decoder-seq-length 32
    --hidden-size 128
    --num-attention-heads 4
    --position-embedding-type relative
    --hidden-dropout 0
    --attention-dropout 0
    --untie-embeddings-and-output-weights
    --init-method-std 0.09
    --embedding-init-method-std 0.5 # as large as what is added to them: attention soon tells tokens apart
    --pipeline-model-parallel-size "$RANKS"
)
TRAINING=(
    --micro-batch-size 16
    --global-batch-size 32
    --train-iters 400
    --lr 2e-3
    --min-lr 1e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.01
    --adam-beta2 0.98
    --clip-grad 1.0
)
FILES=(
    --train-data-path "$OUT/train_text_sentence"
    --valid-data-path "$OUT/valid_text_sentence"
    --save "$OUT/checkpoints"
    --load "$OUT/checkpoints"
    --tensorboard-dir "$OUT/tensorboard"
    --log-jsonl "$OUT/log.jsonl"
    --log-interval 10
    --eval-interval 100
    --eval-iters 8
)

if [ -z "${LAUNCH:-}" ]; then
    source examples/setup.sh requirements.txt
    rm -rf "$OUT"
    mkdir -p "$OUT"
    for part in train_small valid; do
        "$PYTHON" tools/preprocess_data.py --input "$DATA/demo_$part.jsonl" --output-prefix "$OUT/${part%_small}" \
            --split-sentences "${TOKENIZER[@]}"
    done
    LAUNCH="$PYTHON -m torch.distributed.run --standalone"
fi
$LAUNCH --nproc_per_node "$RANKS" "$ROOT/pretrain_t5.py" \
    "${MODEL[@]}" "${TRAINING[@]}" "${TOKENIZER[@]}" "${FILES[@]}" "$@"
if [ -f "$OUT/log.jsonl" ] && [ "$LAUNCH" != print_command ]; then
    ENTROPY="$("$PYTHON" -m megatron unigram-entropy --quiet "$OUT/train_text_sentence")"
    "$PYTHON" -m megatron plot-loss "$OUT/log.jsonl" --output "$OUT/loss.png" --line "unigram entropy" "$ENTROPY"
    printf 'unigram entropy of the training text: %s nats per token\nloss curve: %s\n' "$ENTROPY" "$OUT/loss.png"
fi
