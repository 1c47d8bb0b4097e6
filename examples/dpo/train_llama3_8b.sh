#!/usr/bin/env bash
# DPO of Llama 3.1 8B on one machine of 8 GPUs: all weights are trained, beside a frozen copy of the network as the reference.
#
#   bash examples/dpo/train_llama3_8b.sh CHECKPOINTS TENSORBOARD BASE PAIRS [more flags]
#
# BASE is the folder of an instruct network, tokenizer and chat template included; PAIRS a JSONL file of chosen and rejected answers as
# docs/finetuning.md says. The best checkpoint by validation loss is CHECKPOINTS/best. With --preference-reference-cache FOLDER the
# reference is asked once, before the first step, and is then not in memory.
# Environment: as examples/launch.sh; LAUNCH=echo prints the command.

set -euo pipefail
if [ $# -lt 4 ]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
export ENTRY=finetune.py
exec bash "$(dirname "${BASH_SOURCE[0]}")/../llama/train_llama3_8b.sh" "${@:1:4}" \
    --finetune-task dpo --pretrained-checkpoint "$3" --preference-beta 0.1 \
    --seq-length 4096 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    --global-batch-size 64 --train-iters 1000 --lr 5e-7 --min-lr 0 --weight-decay 0 \
    --eval-interval 100 --full-validation --save-interval 100 --save-keep-last 1 --save-best loss "${@:5}"
