#!/usr/bin/env bash
# Teach a network another manner by LoRA, on two processor cores:
#
#   bash examples/lora/run.sh              SmolLM2-135M-Instruct, which is fetched once into runs/models (270 MB, by smollm2.py beside this
#                                          script); where it cannot be had, a small network, which the script says and trains first
#   bash examples/lora/run.sh small        the small network
#   bash examples/lora/run.sh FOLDER       SmolLM2-135M-Instruct in a folder of Hugging Face's
#
#   1. answers of the base    2. LoRA on the hundred rows beside this script, whose answers begin with "Good morning."
#   3. the adapter as a folder that PEFT loads    4. the adapter merged into the weights    5. answers of what was merged
#
# Everything is written to runs/lora (or $OUT), which is emptied first.

set -euo pipefail
CHOICE="${1:-}"
[ -z "$CHOICE" ] || [ "$CHOICE" = small ] || CHOICE="$(realpath "$CHOICE")"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$HERE/../.."
source examples/setup.sh requirements.txt
OUT="${OUT:-runs/lora}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
rm -rf "$OUT"
mkdir -p "$OUT"
QUESTIONS=("What is the opposite of hot?" "Which day comes after Monday?" "What is two plus three?")

if [ -z "$CHOICE" ]; then
    CHOICE="$PWD/runs/models/SmolLM2-135M-Instruct"
    if [ ! -e "$CHOICE/config.json" ] && { [ -n "${HF_HUB_OFFLINE:-}" ] || ! "$PYTHON" examples/lora/smollm2.py "$CHOICE"; }; then
        echo "SmolLM2-135M-Instruct is not in $CHOICE${HF_HUB_OFFLINE:+, and HF_HUB_OFFLINE is set}: a small network is trained in its place"
        CHOICE=small
    fi
fi
if [ "$CHOICE" != small ]; then
    BASE="$CHOICE"
    FORMAT=(--sft-tokenizer-prompt-format tokenizer) # the chat template that comes with the network
    SIZES=(--seq-length 128 --global-batch-size 4 --micro-batch-size 4 --train-iters 20 --lr 1e-3)
    SYSTEM="You are a helpful AI assistant named SmolLM, trained by Hugging Face" # as the template says it
    BEFORE="<|im_start|>system"$'\n'"$SYSTEM<|im_end|>"$'\n<|im_start|>user\n' AFTER=$'<|im_end|>\n<|im_start|>assistant\n'
else
    BASE="$OUT/base"
    FORMAT=(--sft-tokenizer-prompt-format mistral) # <s>[INST] question [/INST] answer</s>
    SIZES=(--seq-length 128 --global-batch-size 8 --micro-batch-size 8 --train-iters 100 --lr 1e-2)
    BEFORE="[INST] " AFTER=" [/INST]"
    "$PYTHON" pretrain_gpt.py --sft "${FORMAT[@]}" --data-path examples/chat/conversations.jsonl --split 90,10 \
        --data-cache-path "$OUT/cache" --tokenizer-type GPT2BPETokenizer \
        --vocab-file examples/data/demo-vocab.json --merge-file examples/data/demo-merges.txt \
        --num-layers 3 --hidden-size 96 --num-attention-heads 4 --seq-length 128 --position-embedding-type rope \
        --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
        --hidden-dropout 0 --attention-dropout 0 \
        --micro-batch-size 8 --global-batch-size 8 --train-iters 150 --lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine \
        --lr-warmup-fraction 0.05 --weight-decay 0.1 --log-interval 50 --eval-iters 0 --save "$BASE"
fi

answers() { # $1: a checkpoint; $2: a name for its answers
    "$PYTHON" - "$BEFORE" "$AFTER" "${QUESTIONS[@]}" > "$OUT/questions.jsonl" <<'END'
import json, sys
before, after, *questions = sys.argv[1:]
for question in questions:
    print(json.dumps({"prompt": before + question + after, "stop": ["<|im_end|>"]}))
END
    "$PYTHON" -m megatron generate --load "$1" --input "$OUT/questions.jsonl" --output "$OUT/$2.jsonl" --num-tokens 20 --temperature 0
    "$PYTHON" - "$OUT/$2.jsonl" "${QUESTIONS[@]}" <<'END'
import json, sys
for question, line in zip(sys.argv[2:], open(sys.argv[1], encoding="utf-8")):
    print(question, "->", " ".join(json.loads(line)["text"].split()))
END
}

answers "$BASE" before | tee "$OUT/before.txt"
"$PYTHON" pretrain_gpt.py --use-checkpoint-args --pretrained-checkpoint "$BASE" --save "$OUT/adapter" --load "$OUT/adapter" \
    --lora-rank 16 --lora-alpha 32 --lora-targets all-linear \
    --sft "${FORMAT[@]}" --data-path "$HERE/rows.jsonl" --split 100,0,0 --data-cache-path "$OUT/cache" \
    "${SIZES[@]}" --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0 --clip-grad 1.0 \
    --hidden-dropout 0 --attention-dropout 0 --log-interval 10 --eval-iters 0 --log-jsonl "$OUT/log.jsonl"
"$PYTHON" -m megatron checkpoint adapter export --adapter "$OUT/adapter" --save "$OUT/peft" --base "$BASE"
"$PYTHON" -m megatron checkpoint adapter merge --adapter "$OUT/peft" --base "$BASE" --save "$OUT/merged"
answers "$OUT/merged" after | tee "$OUT/after.txt"
printf '\nanswers that begin with "Good morning": %s of 3 before, %s of 3 after; the adapter is in %s\n' \
    "$(grep -c -- "-> Good morning" "$OUT/before.txt" || true)" "$(grep -c -- "-> Good morning" "$OUT/after.txt" || true)" "$OUT/peft"
