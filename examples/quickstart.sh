#!/usr/bin/env bash
# From text to a trained model in a few minutes, on two processor cores or on GPUs:
#
#   bash examples/quickstart.sh
#
#   1. two .bin/.idx pairs from the text that comes with the repository
#   2. half of the training with every matrix cut over two ranks (tensor parallel), ending with a checkpoint
#   3. the other half with the layers on two ranks in a line (pipeline parallel), going on from that checkpoint
#   4. perplexity on text the model has not seen, a continuation of a prompt, and the loss curve as a picture
#
# It fails unless the model learns more than how common each token is: the loss must end well below the unigram entropy.
# Everything is written to runs/quickstart, which is emptied first. On a machine with one GPU there is one rank, which
# holds everything.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/setup.sh requirements.txt
OUT=runs/quickstart
DATA=examples/data
BEGAN=$SECONDS
ITERS=400 # of which the first half runs under one layout, and the rest under another
SWITCH=200
say() { printf '\n== %s  [%d s]\n' "$*" $((SECONDS - BEGAN)); }

rm -rf "$OUT"
mkdir -p "$OUT"
GPUS="$(nvidia-smi -L 2>/dev/null | grep -c GPU || true)"
if [ "$GPUS" -eq 1 ]; then
    RANKS=1
    FIRST=(--tensor-model-parallel-size 1 --micro-batch-size 16)
    SECOND=(--pipeline-model-parallel-size 1 --micro-batch-size 16)
else
    RANKS=2
    FIRST=(--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 16)
    # Several micro batches keep both stages busy; the last has fewer layers, as the output layer is large here.
    SECOND=(--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1 --micro-batch-size 4)
fi
export OMP_NUM_THREADS=1 # one core a rank

TOKENIZER=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$DATA/demo-vocab.json"
    --merge-file "$DATA/demo-merges.txt"
)
MODEL=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 128
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --hidden-dropout 0
    --attention-dropout 0
    --init-method-std 0.05
)
TRAINING=(
    --global-batch-size 16
    --train-iters "$ITERS"
    --lr 6e-3
    --min-lr 1e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --adam-beta2 0.95
)
FILES=(
    --train-data-path "$OUT/train_text_document"
    --valid-data-path "$OUT/valid_text_document"
    --save "$OUT/checkpoints"
    --load "$OUT/checkpoints"
    --log-jsonl "$OUT/log.jsonl"
    --tensorboard-dir "$OUT/tensorboard"
    --log-interval 10
    --eval-interval 100
    --eval-iters 60 # once through the validation text
)

# train LAYOUT...: trains on from the newest checkpoint, or from the start.
train() {
    "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$RANKS" pretrain_gpt.py \
        "${MODEL[@]}" "${TRAINING[@]}" "${TOKENIZER[@]}" "${FILES[@]}" "$@"
}

say "1. text to tokens"
for part in train_small valid; do
    "$PYTHON" tools/preprocess_data.py --input "$DATA/demo_$part.jsonl" --output-prefix "$OUT/${part%_small}" \
        --append-eod "${TOKENIZER[@]}"
done
ENTROPY="$("$PYTHON" tools/unigram_entropy.py --quiet "$OUT/train_text_document")"
echo "unigram entropy of the training text: $ENTROPY nats per token"

say "2. training up to iteration $SWITCH of $ITERS: ${FIRST[*]}"
train "${FIRST[@]}" --exit-interval "$SWITCH"

say "3. training from iteration $SWITCH to $ITERS: ${SECOND[*]}"
train "${SECOND[@]}"

say "4. what came of it"
"$PYTHON" tools/generate_text.py --load "$OUT/checkpoints" --num-tokens 40 --temperature 0.7 --top-k 40 \
    --prompt "The state of the Union is" | tee "$OUT/continuation.txt"
"$PYTHON" tools/plot_loss.py "$OUT/log.jsonl" --output "$OUT/loss.png" --line "unigram entropy" "$ENTROPY"
"$PYTHON" - "$OUT/log.jsonl" "$ENTROPY" "$ITERS" <<'PYTHON'
import json, math, sys
log, entropy, iterations = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
records = [json.loads(line) for line in open(log, encoding="utf-8")]
steps = {record["iteration"]: record["losses"]["lm loss"] for record in records if record["kind"] == "step"}
final = sum(steps[iteration] for iteration in range(iterations - 19, iterations + 1)) / 20
valid = [record["losses"]["lm loss"] for record in records if record["kind"] == "validation"][-1]
print(f"\nunigram entropy         {entropy:.3f} nats per token"
      f"\nfinal training loss     {final:.3f} nats per token (mean of the last 20 of {iterations} steps)"
      f"\nvalidation loss         {valid:.3f} nats per token: perplexity {math.exp(valid):.1f}")
if final > entropy - 1:
    sys.exit("the loss did not fall well below the unigram entropy: something is wrong")
PYTHON
cat <<END
loss curve              $OUT/loss.png
log, one line a step    $OUT/log.jsonl
checkpoints             $OUT/checkpoints
TensorBoard             tensorboard --logdir $OUT/tensorboard
a page to try it        bash examples/serve.sh
END
say "done"
