#!/usr/bin/env bash
# Score a GPT as it is, on WikiText-103 (perplexity) or LAMBADA (the last word of passages).
#
#   bash examples/tasks/evaluate_zeroshot_gpt.sh TASK CHECKPOINT VOCAB MERGES DATA [more flags]
#
# TASK is WIKITEXT103 or LAMBADA; CHECKPOINT is a run's --save, whose network is taken as it was saved; VOCAB and MERGES
# are its vocab.json and merges.txt; DATA is wiki.test.tokens, or lambada_test.jsonl with a `text` a line. LAMBADA asks for
# the whole last word.
#
# Environment: GPUS_PER_NODE (1 unless given: they share the text, or the network with --tensor-model-parallel-size);
# LAUNCH=echo prints the command instead of running it.

set -euo pipefail
if [ $# -lt 5 ]; then
    sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/examples/print_command.sh"
TASK=(--task "$1" --valid-data "$5")
if [ "$1" = LAMBADA ]; then
    TASK+=(--strict-lambada)
fi
MODEL=(
    --load "$2"
    --use-checkpoint-args
    --no-use-tokenizer-model-from-checkpoint-args
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$3"
    --merge-file "$4"
    --seq-length 1024
    --micro-batch-size 8
)

${LAUNCH:-torchrun} --nproc_per_node "${GPUS_PER_NODE:-1}" "$ROOT/tasks/main.py" "${TASK[@]}" "${MODEL[@]}" "${@:6}"
