#!/usr/bin/env bash
# RACE on a small BERT, from text to a table in a minute or two on two processor cores:
#
#   bash examples/tasks/finetune_race_small.sh [more flags]
#
#   1. a small BERT, pretrained here on the text of the repository unless runs/tasks has it already
#   2. 3 epochs of finetuning    3. a table of the accuracy after each epoch
#
# The samples are made up, in the published format: the right answer is
# always the one about the sea, so a network that learns gets nearly all right; guessing gets 25 %.
# Everything is written to runs/tasks. With GPUS_PER_NODE=2 or more the ranks share the batch. LAUNCH=echo prints the
# command of the task instead of running anything.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
ROOT="$PWD"
source "$ROOT/examples/print_command.sh"
OUT="$ROOT/runs/tasks"
DATA="$ROOT/examples/data"
SAMPLES="$ROOT/examples/tasks/data/RACE"
BERT="$OUT/bert/checkpoints"
RANKS="${GPUS_PER_NODE:-1}"
TOKENIZER=(
    --tokenizer-type BertWordPieceLowerCase
    --vocab-file "$DATA/demo-bert-vocab.txt"
)
MODEL=(
    --num-layers 2
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 64
    --max-position-embeddings 64
    --position-embedding-type rope
    --init-method-std 0.05
)
TASK=(
    --task RACE
    --train-data "$SAMPLES/train/middle" "$SAMPLES/train/high"
    --valid-data "$SAMPLES/dev/middle" "$SAMPLES/dev/high"
    --epochs 3
    --pretrained-checkpoint "$BERT"
    --output-file "$OUT/race/predictions.jsonl"
)
TRAINING=(
    --micro-batch-size 4
    --lr 1e-3
    --lr-decay-style linear
    --lr-warmup-fraction 0.06
    --weight-decay 0.1
    --hidden-dropout 0
    --attention-dropout 0
    --log-interval 20
    --save "$OUT/race/checkpoints"
)

LOG=/dev/null
if [ -z "${LAUNCH:-}" ]; then
    source examples/setup.sh requirements.txt
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
    rm -rf "${OUT:?}/race"
    mkdir -p "$OUT/race"
    LOG="$OUT/race/log.txt"
    LAUNCH="$PYTHON -m torch.distributed.run --standalone"
    if ! [ -f "$BERT/latest_checkpointed_iteration.txt" ]; then
        "$PYTHON" tools/preprocess_data.py --input "$DATA/demo_train_small.jsonl" --output-prefix "$OUT/bert_train" --split-sentences \
            "${TOKENIZER[@]}"
        "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node 1 "$ROOT/pretrain_bert.py" "${TOKENIZER[@]}" "${MODEL[@]}" \
            --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 16 --train-iters 120 --lr 3e-3 --min-lr 1e-4 \
            --lr-decay-style cosine --lr-warmup-fraction 0.05 --data-path "$OUT/bert_train_text_sentence" --split 1,0,0 --eval-iters 0 \
            --log-interval 50 --save "$BERT"
    fi
fi
$LAUNCH --nproc_per_node "$RANKS" "$ROOT/tasks/main.py" \
    "${TASK[@]}" "${MODEL[@]}" "${TRAINING[@]}" "${TOKENIZER[@]}" "$@" | tee "$LOG"
if [ -s "$LOG" ]; then
    "$PYTHON" - "$LOG" <<'PYTHON'
import re, sys
sets, epochs = [], []
for line in open(sys.argv[1], encoding="utf-8"):
    if re.match(r"epoch \d+ is done", line):
        epochs.append({})
    found = re.match(r"RACE (?:on )?(.*): accuracy: ([0-9.]+) %", line)
    if found and epochs:
        name = found[1].rsplit("/", 1)[-1].removesuffix(".tsv")
        sets += [name] * (name not in sets)
        epochs[-1][name] = found[2]
print("\nepoch" + "".join(f"{name:>18}" for name in sets))
for number, row in enumerate(epochs, 1):
    print(f"{number:5}" + "".join(f"{row[name] + ' %':>18}" for name in sets))
PYTHON
    printf 'predictions of the best epoch: %s\n' "$OUT/race/predictions.jsonl"
fi
