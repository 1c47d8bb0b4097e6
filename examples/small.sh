#!/usr/bin/env bash
# What the small runs of published architectures share: from text to a loss curve in about a minute on two processor cores.
# They set NAME and MODEL, and ENTRY if it is not pretrain_gpt.py, and source this:
#
#   bash examples/mixtral/pretrain_mixtral_small.sh [more flags]
#
#   1. two .bin/.idx pairs of the text that comes with the repository    2. training    3. the loss curve
#
# It fails unless the loss ends below the entropy of single tokens. Everything is written to runs/NAME, which is emptied
# first. Environment: GPUS_PER_NODE, ranks; LAUNCH=echo prints the training command instead of running anything.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT="$PWD"
source "$ROOT/examples/print_command.sh"
OUT="$ROOT/runs/$NAME"
DATA="$ROOT/examples/data"
TOKENIZER=(
    --tokenizer-type GPTSentencePieceTokenizer
    --tokenizer-model "$DATA/demo-llama.model"
)
MODEL=(
    --hidden-size 96
    --seq-length 64
    --normalization RMSNorm
    --position-embedding-type rope
    --untie-embeddings-and-output-weights
    --init-method-std 0.05
    --hidden-dropout 0
    --attention-dropout 0
    "${MODEL[@]}"
)
TRAINING=(
    --micro-batch-size 16
    --global-batch-size "$((16 * ${GPUS_PER_NODE:-1}))"
    --train-iters 120
    --lr 8e-3
    --min-lr 2e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --adam-beta2 0.95
)
FILES=(
    --train-data-path "$OUT/train_text_document"
    --valid-data-path "$OUT/valid_text_document"
    --save "$OUT/checkpoints"
    --log-jsonl "$OUT/log.jsonl"
    --log-interval 10
    --eval-interval 120
    --eval-iters 8
)

if [ -z "${LAUNCH:-}" ]; then
    source examples/setup.sh requirements.txt
    rm -rf "$OUT"
    mkdir -p "$OUT"
    for part in train_small valid; do
        "$PYTHON" tools/preprocess_data.py --input "$DATA/demo_$part.jsonl" --output-prefix "$OUT/${part%_small}" \
            --append-eod "${TOKENIZER[@]}"
    done
    LAUNCH="$PYTHON -m torch.distributed.run --standalone"
fi
$LAUNCH --nproc_per_node "${GPUS_PER_NODE:-1}" "$ROOT/${ENTRY:-pretrain_gpt.py}" \
    "${MODEL[@]}" "${TRAINING[@]}" "${TOKENIZER[@]}" "${FILES[@]}" "$@"
if [ -f "$OUT/log.jsonl" ] && [ "$LAUNCH" != print_command ]; then
    ENTROPY="$("$PYTHON" -m megatron unigram-entropy --quiet "$OUT/train_text_document")"
    "$PYTHON" -m megatron plot-loss "$OUT/log.jsonl" --output "$OUT/loss.png" --line "unigram entropy" "$ENTROPY"
    "$PYTHON" - "$OUT/log.jsonl" "$ENTROPY" <<'PYTHON'
import json, sys
losses = [line["losses"]["lm loss"] for line in map(json.loads, open(sys.argv[1])) if line["kind"] == "step"]
final, entropy = sum(losses[-10:]) / len(losses[-10:]), float(sys.argv[2])
print(f"loss at the end {final:.3f}, entropy of single tokens {entropy:.3f}")
sys.exit(f"the network has not learned more than how common tokens are" if final >= entropy else 0)
PYTHON
    printf 'loss curve: %s\n' "$OUT/loss.png"
fi
