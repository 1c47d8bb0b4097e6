#!/usr/bin/env bash
# GPT-3 "Small", 125M parameters, on one machine: data parallel over its GPUs.
#
#   bash examples/gpt3/train_gpt3_125m.sh [CHECKPOINTS] [TENSORBOARD] [VOCAB] [MERGES] [DATA] [more flags]
#
# DATA is the prefix of a .bin/.idx pair made by tools/preprocess_data.py with the same VOCAB and MERGES. Without it a few
# short steps on the text that comes with the repository show that everything works, with or without a GPU.
#
# Environment: GPUS_PER_NODE; LAUNCH=echo prints the command instead of running it.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/examples/print_command.sh"
CHECKPOINTS="${1:-$ROOT/runs/gpt3_125m/checkpoints}"
TENSORBOARD="${2:-$ROOT/runs/gpt3_125m/tensorboard}"
VOCAB="${3:-$ROOT/examples/data/gpt2/vocab.json}"
MERGES="${4:-$ROOT/examples/data/gpt2/merges.txt}"
DATA="${5:-}"
SPLIT=949,50,1
GPUS="$(nvidia-smi -L 2>/dev/null | grep -c GPU || true)"
GPUS_PER_NODE="${GPUS_PER_NODE:-$((GPUS > 0 ? GPUS : 1))}"

MODEL=(
    --num-layers 12
    --hidden-size 768
    --num-attention-heads 12
    --seq-length 2048
    --max-position-embeddings 2048
)
TRAINING=(
    --micro-batch-size 8
    --global-batch-size 256
    --train-iters 572204
    --lr 6.0e-4
    --min-lr 6.0e-5
    --lr-decay-style cosine
    --lr-decay-iters 430000
    --lr-warmup-iters 715
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.02
    --clip-grad 1.0
    --use-distributed-optimizer
)
PRECISION=(--bf16)
LOGGING=(
    --log-interval 100
    --log-throughput
    --eval-interval 1000
    --eval-iters 10
    --tensorboard-dir "$TENSORBOARD"
)

if [ "$GPUS" -eq 0 ]; then PRECISION=(--no-bf16); fi # processors are faster in fp32
if [ -z "$DATA" ]; then
    DATA="$ROOT/runs/gpt3_125m/demo_text_document"
    SPLIT=9,1,0 # few documents: one in a thousand would be none
    TRAINING+=(--seq-length 128 --micro-batch-size 2 --global-batch-size $((2 * GPUS_PER_NODE)) --train-iters 20
        --lr-decay-iters 20 --lr-warmup-iters 2)
    LOGGING+=(--log-interval 1 --eval-iters 1)
    if [ -z "${LAUNCH:-}" ]; then
        source "$ROOT/examples/setup.sh" requirements.txt
        mkdir -p "$ROOT/runs/gpt3_125m"
        "$PYTHON" "$ROOT/tools/preprocess_data.py" --input "$ROOT/examples/data/demo_train_small.jsonl" --append-eod \
            --output-prefix "${DATA%_text_document}" --tokenizer-type GPT2BPETokenizer \
            --vocab-file "$VOCAB" --merge-file "$MERGES"
    fi
else
    LOGGING+=(--save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 10000)
fi

${LAUNCH:-torchrun} --nproc_per_node "$GPUS_PER_NODE" "$ROOT/pretrain_gpt.py" \
    "${MODEL[@]}" "${TRAINING[@]}" "${PRECISION[@]}" "${LOGGING[@]}" \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB" --merge-file "$MERGES" \
    --data-path "$DATA" --split "$SPLIT" "${@:6}"
