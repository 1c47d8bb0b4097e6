#!/usr/bin/env bash
# LoRA of Llama 3.1 8B on one machine of 8 GPUs, each with the whole network: what is trained is 0.5 % of it.
#
#   bash examples/lora/train_llama3_8b.sh CHECKPOINTS TENSORBOARD BASE CONVERSATIONS [more flags]
#
# BASE is the folder of the published network, tokenizer included; CONVERSATIONS a JSONL file as examples/chat/README.md says. The run
# writes adapters into CHECKPOINTS, which megatron checkpoint adapter exports for PEFT or merges into BASE.
# Environment: as examples/launch.sh; LAUNCH=echo prints the command.

set -euo pipefail
if [ $# -lt 4 ]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
exec bash "$(dirname "${BASH_SOURCE[0]}")/../llama/train_llama3_8b.sh" "${@:1:4}" \
    --pretrained-checkpoint "$3" --sft --lora-rank 32 --lora-alpha 64 --lora-targets all-linear \
    --tensor-model-parallel-size 1 --no-sequence-parallel \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    --global-batch-size 64 --train-iters 1000 --lr 2e-4 --min-lr 0 --weight-decay 0 "${@:5}"
