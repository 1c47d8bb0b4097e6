#!/usr/bin/env bash
# Preference optimization of a small network on two processor cores, in two minutes:
#
#   bash examples/dpo/run.sh
#
#   1. a small base learns to answer    2. its answers    3. pairs: the better answer begins with "Good morning."
#   4. DPO on the pairs, with the base as the reference    5. its answers now, and the margins as a plot
#
# Everything is written to runs/dpo, which is emptied first.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/setup.sh requirements.txt
OUT=runs/dpo
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
rm -rf "$OUT"
mkdir -p "$OUT"
FORMAT=(--sft-tokenizer-prompt-format mistral) # <s>[INST] question [/INST] answer</s>
QUESTIONS=("What is the opposite of hot?" "Which day comes after Monday?" "What is two plus three?")

"$PYTHON" pretrain_gpt.py --sft "${FORMAT[@]}" --data-path examples/chat/conversations.jsonl --split 90,10 \
    --data-cache-path "$OUT/cache" --tokenizer-type GPT2BPETokenizer \
    --vocab-file examples/data/demo-vocab.json --merge-file examples/data/demo-merges.txt \
    --num-layers 3 --hidden-size 96 --num-attention-heads 4 --seq-length 128 --position-embedding-type rope \
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
    --hidden-dropout 0 --attention-dropout 0 \
    --micro-batch-size 8 --global-batch-size 8 --train-iters 150 --lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine \
    --lr-warmup-fraction 0.05 --weight-decay 0.1 --log-interval 50 --eval-iters 0 --save "$OUT/base"

# The hundred rows of examples/lora, whose answers begin with "Good morning."; the same answer without it is the worse one.
"$PYTHON" - examples/lora/rows.jsonl "$OUT/pairs.jsonl" <<'PYTHON'
import json, sys
with open(sys.argv[1]) as rows, open(sys.argv[2], "w") as pairs:
    for row in map(json.loads, rows):
        *prompt, answer = row["messages"]
        worse = {"role": "assistant", "content": answer["content"].removeprefix("Good morning. ")}
        pairs.write(json.dumps({"prompt": prompt, "chosen": [answer], "rejected": [worse]}) + "\n")
PYTHON

answers() { # $1: a checkpoint
    local prompts=() question
    for question in "${QUESTIONS[@]}"; do prompts+=(--prompt "[INST] $question [/INST]"); done
    "$PYTHON" -m megatron generate-text --load "$1" --num-tokens 20 --temperature 0 "${prompts[@]}"
}

answers "$OUT/base" | tee "$OUT/before.txt"
"$PYTHON" finetune.py --use-checkpoint-args --pretrained-checkpoint "$OUT/base" --save "$OUT/policy" --load "$OUT/policy" \
    --preference-prompt-format mistral --data-path "$OUT/pairs.jsonl" --split 90,10,0 --data-cache-path "$OUT/cache" \
    --preference-loss sigmoid --preference-beta 0.1 --preference-sft-weight 1.0 \
    --seq-length 128 --micro-batch-size 4 --global-batch-size 8 --train-iters 30 --lr 3e-4 --lr-decay-style constant \
    --weight-decay 0 --log-interval 5 --eval-interval 20 --eval-iters 1 --log-jsonl "$OUT/log.jsonl"
"$PYTHON" -m megatron plot-loss "$OUT/log.jsonl" --loss "reward margin" --output "$OUT/margins.png"
answers "$OUT/policy" | tee "$OUT/after.txt"
printf '\nanswers that begin with "Good morning": %s of 3 before, %s of 3 after\n' \
    "$(grep -c "Good morning" "$OUT/before.txt" || true)" "$(grep -c "Good morning" "$OUT/after.txt" || true)"
