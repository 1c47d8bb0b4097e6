#!/usr/bin/env bash
# A language model learns to see, on two processor cores in minutes: questions about pictures of coloured shapes (easy-vqa).
#
#   bash examples/multimodal/run.sh [more flags of the two runs of pretrain_vlm.py]
#
#   1. an encoder learns to classify pictures       2. a language model learns the questions, blind
#   3. both in one checkpoint                       4. pretraining: the projector alone         5. SFT: with the language model
#   6. a thousand questions about pictures that it has not seen: with their own picture, with another, and blind
#
# It fails unless 85 % are right with their own pictures, and at most 70 % with others. Everything is written to runs/multimodal, which is
# emptied first. The pictures come with the package easy-vqa (pip install easy-vqa).

set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$HERE/../.."
source examples/setup.sh requirements.txt
OUT=runs/multimodal
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
rm -rf "$OUT"
mkdir -p "$OUT"
step() { printf '\n== %s  [%s s]\n' "$1" "$SECONDS"; }

step "questions and pictures"
IMAGES="$("$PYTHON" "$HERE/prepare.py" "$OUT" 1000)"
TOKENIZER=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$OUT/tokenizer")
SHORT=(--lr-decay-style cosine --lr-warmup-fraction 0.05 --hidden-dropout 0 --attention-dropout 0 --eval-iters 5 --log-interval 100)
PICTURES=(
    --pretrained-checkpoint "$OUT/combined" --use-checkpoint-args --data-path "$OUT/train.json" --image-folder "$IMAGES" --split 98,2,0
    --seq-length 128 --micro-batch-size 16 --global-batch-size 16 --freeze-ViT "${SHORT[@]}"
)

step "1. an encoder of images, by classification"
"$PYTHON" pretrain_vision_classify.py --vision-model-type siglip --num-layers 3 --hidden-size 64 --ffn-hidden-size 256 \
    --num-attention-heads 4 --img-h 64 --img-w 64 --patch-dim 8 \
    --num-classes 24 --data-path "$OUT/classes" --split 95,5,0 --micro-batch-size 50 --global-batch-size 50 --train-iters "${VIT_ITERS:-900}" \
    --lr 2e-3 --min-lr 1e-5 "${SHORT[@]}" --save "$OUT/vit"

step "2. a language model, without pictures"
"$PYTHON" pretrain_gpt.py --sft --data-path "$OUT/text.jsonl" --split 98,2,0 "${TOKENIZER[@]}" --num-layers 2 --hidden-size 96 \
    --num-attention-heads 4 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --seq-length 128 \
    --micro-batch-size 8 --global-batch-size 8 --train-iters 120 --lr 3e-3 --min-lr 1e-4 "${SHORT[@]}" --save "$OUT/lm"

step "3. one checkpoint of both"
"$PYTHON" tools/checkpoint/combine.py --language-model "$OUT/lm" --vision-model "$OUT/vit" --save "$OUT/combined" \
    --vision-final-norm yes --pixel-shuffle --pixel-shuffle-factor 4 # 64 patches: 4 rows

step "4. pretraining: the projector"
"$PYTHON" pretrain_vlm.py "${PICTURES[@]}" --freeze-LM --allow-missing-vision-projection-checkpoint --train-iters "${PROJECTOR_ITERS:-60}" \
    --lr 5e-3 --min-lr 5e-4 --save "$OUT/pretrained" "$@"

step "5. SFT: the projector and the language model"
"$PYTHON" pretrain_vlm.py "${PICTURES[@]}" --pretrained-checkpoint "$OUT/pretrained" --train-iters "${SFT_ITERS:-500}" \
    --lr 3e-3 --min-lr 1e-5 --save "$OUT/sft" "$@"

step "6. questions about pictures that it has not seen"
for name in test shuffled; do
    "$PYTHON" tools/generate.py --load "$OUT/sft" --input "$OUT/$name.jsonl" --output "$OUT/$name.answers.jsonl" --num-tokens 4 --temperature 0
done
"$PYTHON" tools/generate.py --load "$OUT/lm" --input "$OUT/blind.jsonl" --output "$OUT/blind.answers.jsonl" --num-tokens 4 --temperature 0
"$PYTHON" "$HERE/score.py" "blind=$OUT/blind.answers.jsonl" "other pictures=$OUT/shuffled.answers.jsonl" "own pictures=$OUT/test.answers.jsonl"
step "done"
