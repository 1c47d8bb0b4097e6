#!/usr/bin/env bash
# LoRA of Qwen3-30B-A3B on one machine of 8 GPUs, which share the experts: adapters beside attention, experts frozen.
#
#   bash examples/lora/train_qwen3_30b_a3b.sh CHECKPOINTS TENSORBOARD BASE CONVERSATIONS [more flags]
#
# BASE is the folder of the published network, tokenizer included; CONVERSATIONS a JSONL file as examples/chat/README.md says. The run
# writes adapters into CHECKPOINTS, which megatron checkpoint adapter exports for PEFT or merges into BASE. --lora-targets all-linear
# gives each expert adapters of its own, too.
# Environment: as examples/launch.sh; LAUNCH=echo prints the command.

set -euo pipefail
if [ $# -lt 4 ]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
export NUM_NODES="${NUM_NODES:-1}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/../qwen/train_qwen3_30b_a3b.sh" "${@:1:4}" \
    --pretrained-checkpoint "$3" --sft --lora-rank 32 --lora-alpha 64 --lora-targets q_proj k_proj v_proj o_proj \
    --tensor-model-parallel-size 1 --no-sequence-parallel \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    --global-batch-size 64 --train-iters 1000 --lr 2e-4 --min-lr 0 --weight-decay 0 "${@:5}"
