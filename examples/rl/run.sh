#!/usr/bin/env bash
# Reinforcement learning with a verifiable reward, on two processor cores in a few minutes: a small network that writes sums with
# random answers learns to write the right ones from the reward alone.
#
#   bash examples/rl/run.sh [more flags of train_rl.py]
#
#   1. sums with random answers    2. pretraining: the format, and nothing about sums    3. GRPO    4. the curve of the reward
#
# It fails unless the mean reward ends above 0.8. Everything is written to runs/rl, which is emptied first.
# Environment: GPUS_PER_NODE, ranks; LAUNCH=echo prints the training command instead of running anything.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
ROOT="$PWD"
source "$ROOT/examples/print_command.sh"
OUT="$ROOT/runs/rl"
NETWORK=(
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --tokenizer-type ByteTokenizer --make-vocab-size-divisible-by 8 --hidden-dropout 0 --attention-dropout 0
    --weight-decay 0 --log-interval 50
)
POLICY=(
    --langrl-env-config "$ROOT/examples/rl/environments.yaml" --rl-algorithm grpo --rl-max-new-tokens 6
    --grpo-prompts-per-step 32 --grpo-group-size 16 --grpo-iterations 1 --grpo-kl-beta 0
    --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.28 --grpo-entropy-term-weight 0.05 --rl-prompts-per-eval 25
    --micro-batch-size 64 --train-iters 500 --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --adam-beta2 0.95 --eval-interval 50
    --pretrained-checkpoint "$OUT/base" --save "$OUT/policy" --save-interval 500 --log-jsonl "$OUT/log.jsonl"
)

if [ -z "${LAUNCH:-}" ]; then
    source examples/setup.sh requirements.txt
    rm -rf "$OUT"
    mkdir -p "$OUT"
    "$PYTHON" - "$OUT/sums.jsonl" <<'PROGRAM'
import json, random, sys

random.seed(0)
with open(sys.argv[1], "w") as file:
    for _ in range(20000):
        text = f"{random.randint(0, 9)}+{random.randint(0, 9)}={random.randint(0, 18)}"
        file.write(json.dumps({"text": text}) + "\n")
PROGRAM
    "$PYTHON" tools/preprocess_data.py --input "$OUT/sums.jsonl" --output-prefix "$OUT/sums" --append-eod --tokenizer-type ByteTokenizer
    echo "== pretraining on sums with random answers"
    "$PYTHON" pretrain_gpt.py "${NETWORK[@]}" --micro-batch-size 32 --train-iters 300 --lr 3e-3 --lr-decay-style constant --data-path "$OUT/sums_text_document" \
        --split 100,0,0 --eval-iters 0 --reset-attention-mask --reset-position-ids --save "$OUT/base"
    echo "== GRPO"
    LAUNCH="$PYTHON -m torch.distributed.run --standalone"
fi
$LAUNCH --nproc_per_node "${GPUS_PER_NODE:-1}" "$ROOT/train_rl.py" "${NETWORK[@]}" "${POLICY[@]}" "$@"
if [ -f "$OUT/log.jsonl" ] && [ "$LAUNCH" != print_command ]; then
    "$PYTHON" -m megatron plot-loss "$OUT/log.jsonl" --loss reward --output "$OUT/reward.png"
    "$PYTHON" - "$OUT/log.jsonl" <<'PROGRAM'
import json, sys

rewards = [line["losses"]["reward"] for line in map(json.loads, open(sys.argv[1])) if line["kind"] == "step"]
first, last = sum(rewards[:5]) / 5, sum(rewards[-20:]) / 20
print("mean reward of every 50 rounds:", *(f"{sum(rewards[at:at + 50]) / len(rewards[at:at + 50]):.2f}" for at in range(0, len(rewards), 50)))
print(f"mean reward: {first:.3f} in the first 5 rounds, {last:.3f} in the last 20; the curve: runs/rl/reward.png")
sys.exit(0 if last > 0.8 else "the policy has not learned: the last rewards are not above 0.8")
PROGRAM
fi
