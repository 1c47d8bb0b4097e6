#!/usr/bin/env bash
# The zero-shot tasks on a small GPT, in a minute or two on two processor cores:
#
#   bash examples/tasks/zeroshot_small.sh [more flags]
#
#   1. a GPT: that of the quick start (runs/quickstart), or else a smaller one that is trained here first
#   2. perplexity of a text in WikiText's format, and the last words of passages in LAMBADA's    3. a table
#
# Everything is written to runs/tasks. With GPUS_PER_NODE=2 or more the ranks share the texts. LAUNCH=echo prints the
# commands of the tasks instead of running anything.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
ROOT="$PWD"
source "$ROOT/examples/print_command.sh"
OUT="$ROOT/runs/tasks"
DATA="$ROOT/examples/data"
SAMPLES="$ROOT/examples/tasks/data"
GPT="$ROOT/runs/quickstart/checkpoints"
TOKENIZER=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$DATA/demo-vocab.json"
    --merge-file "$DATA/demo-merges.txt"
)

if [ -z "${LAUNCH:-}" ]; then
    source examples/setup.sh requirements.txt
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
    mkdir -p "$OUT"
    LAUNCH="$PYTHON -m torch.distributed.run --standalone"
fi
if [ "$LAUNCH" != print_command ] && ! [ -f "$GPT/latest_checkpointed_iteration.txt" ]; then
    GPT="$OUT/gpt/checkpoints"
    if ! [ -f "$GPT/latest_checkpointed_iteration.txt" ]; then
        "$PYTHON" tools/preprocess_data.py --input "$DATA/demo_train_small.jsonl" --output-prefix "$OUT/gpt_train" --append-eod \
            "${TOKENIZER[@]}"
        "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node 1 "$ROOT/pretrain_gpt.py" "${TOKENIZER[@]}" \
            --num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --position-embedding-type rope \
            --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.05 --micro-batch-size 16 --train-iters 120 --lr 6e-3 \
            --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --data-path "$OUT/gpt_train_text_document" --split 1,0,0 \
            --eval-iters 0 --log-interval 50 --save "$GPT"
    fi
fi

# score TASK FILE FLAGS...: one line of results, on the screen and in the log.
score() {
    $LAUNCH --nproc_per_node "${GPUS_PER_NODE:-1}" "$ROOT/tasks/main.py" --task "$1" --valid-data "$2" --load "$GPT" \
        --use-checkpoint-args --seq-length 128 --micro-batch-size 8 "${@:3}" | tee "$OUT/$1.log"
}
if [ "$LAUNCH" = print_command ]; then OUT="$(mktemp -d)"; fi
score WIKITEXT103 "$SAMPLES/wiki.valid.tokens" "$@"
score LAMBADA "$SAMPLES/lambada.jsonl" --strict-lambada "$@"
if [ "$LAUNCH" != print_command ]; then
    "$PYTHON" - "$OUT/WIKITEXT103.log" "$OUT/LAMBADA.log" <<'PYTHON'
import re, sys
rows = []
for path in sys.argv[1:]:
    line = [line for line in open(path, encoding="utf-8") if re.match(r"\w+ on .*: ", line)][-1].strip()
    task, numbers = line.split(" on ", 1)[0], line.rpartition(": avg loss")[2] if "avg loss" in line else line
    rows += [(task, *pair) for pair in re.findall(r"([a-z][a-z ]*): ([0-9.e+-]+)", line)]
print("\ntask         result             value")
for task, name, value in rows:
    print(f"{task:<12} {name:<17} {value:>7}")
PYTHON
fi
