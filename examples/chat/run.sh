#!/usr/bin/env bash
# Teach a small model to answer, on two processor cores or on one GPU, in a minute or two:
#
#   bash examples/chat/run.sh
#
# It reads the conversations beside it, learns the assistant's answers only, and then answers a few questions. The model
# starts from nothing and the data are 115 conversations, so it knows little else. To tune a model that you have trained,
# give its shape, and --load FOLDER --finetune. Everything is written to runs/chat, which is emptied first.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/setup.sh
OUT=runs/chat
GPUS="$(nvidia-smi -L 2>/dev/null | grep -c GPU || true)"
RANKS=2
if [ "$GPUS" -eq 1 ]; then
    RANKS=1
fi
export OMP_NUM_THREADS=1 # one core a rank
rm -rf "$OUT"
mkdir -p "$OUT"

DATA=(
    --sft
    --sft-tokenizer-prompt-format mistral # <s>[INST] question [/INST] answer</s>
    --data-path examples/chat/conversations.jsonl
    --split 90,10
    --data-cache-path "$OUT/cache"
    --tokenizer-type GPT2BPETokenizer
    --vocab-file examples/data/demo-vocab.json
    --merge-file examples/data/demo-merges.txt
)
MODEL=(
    --num-layers 3
    --hidden-size 96
    --num-attention-heads 4
    --seq-length 128
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --hidden-dropout 0
    --attention-dropout 0
    --tensor-model-parallel-size "$RANKS"
)
TRAINING=(
    --micro-batch-size 8
    --global-batch-size 8
    --train-iters 150
    --lr 5e-3
    --min-lr 5e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --log-interval 25
    --eval-interval 75
    --eval-iters 1
    --save "$OUT/checkpoints"
    --log-jsonl "$OUT/log.jsonl"
)
"$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$RANKS" pretrain_gpt.py "${DATA[@]}" "${MODEL[@]}" "${TRAINING[@]}"

"$PYTHON" -m megatron generate-text --load "$OUT/checkpoints" --num-tokens 20 --temperature 0 \
    --prompt "[INST] What is the opposite of hot? [/INST]" \
    --prompt "[INST] Which day comes after Monday? [/INST]" \
    --prompt "[INST] What is two plus three? [/INST]" | tee "$OUT/answers.txt"
