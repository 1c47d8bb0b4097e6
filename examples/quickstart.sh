#!/usr/bin/env bash
# From text to a trained model in a few minutes, on two processor cores or on GPUs:
#
#   bash examples/quickstart.sh
#
#   1. a vocabulary, and two .bin/.idx pairs, from the text that comes with the repository
#   2. most of the training with every matrix sharded over two ranks (tensor parallel), ending with a checkpoint
#   3. the rest with the layers on one rank and the output layer on another (pipeline parallel), resumed from that checkpoint
#   4. bits per byte and perplexity of text the model has not seen, a continuation of a prompt, and the loss curve as a picture
#
# It fails unless the model learns more than how common each token is: the loss must end well below the unigram entropy.
# Vocabulary, shape, optimizer and schedule are the best that benchmarks/quickstart_search.py found for two minutes on two cores.
# Everything is written to runs/quickstart, which is emptied first. On a machine with one GPU there is one rank, which
# holds everything.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/setup.sh requirements.txt
OUT=runs/quickstart
DATA=examples/data
BEGAN=$SECONDS
ITERS=460 # the last of them under another layout
SWITCH=400
say() { printf '\n== %s  [%d s]\n' "$*" $((SECONDS - BEGAN)); }

rm -rf "$OUT"
mkdir -p "$OUT"
GPUS="$(nvidia-smi -L 2>/dev/null | grep -c GPU || true)"
if [ "$GPUS" -eq 1 ]; then
    RANKS=1
    FIRST=(--tensor-model-parallel-size 1 --micro-batch-size 8)
    SECOND=(--pipeline-model-parallel-size 1 --micro-batch-size 8)
else
    RANKS=2
    FIRST=(--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 8)
    # Several microbatches keep both stages busy; the second has the output layer alone, which is large here.
    SECOND=(--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Ett|L' --micro-batch-size 2)
fi
export OMP_NUM_THREADS=1 # one core a rank

VOCABULARY="$OUT/vocabulary"
TOKENIZER=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$VOCABULARY/vocab.json"
    --merge-file "$VOCABULARY/merges.txt"
)
MODEL=(
    --num-layers 2
    --hidden-size 96
    --num-attention-heads 4
    --seq-length 256
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0
    --attention-dropout 0
    --init-method-std 0.02
)
# Muon for the matrices of the layers, Adam with a rate of its own for embedding and output layer.
TRAINING=(
    --global-batch-size 8
    --train-iters "$ITERS"
    --optimizer muon
    --muon-momentum 0.95
    --muon-nesterov
    --muon-extra-scale-factor 0.2
    --muon-fp32-matmul-prec high
    --lr 1e-2
    --min-lr 0
    --decoupled-lr 2e-2
    --decoupled-min-lr 0
    --lr-decay-style linear
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
    --log-interval 20
    --eval-interval 1000000 # at the end only
    --full-validation       # through all of the validation text
)

# train LAYOUT...: trains on from the newest checkpoint, or from the start.
train() {
    "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$RANKS" pretrain_gpt.py \
        "${MODEL[@]}" "${TRAINING[@]}" "${TOKENIZER[@]}" "${FILES[@]}" "$@"
}

say "1. preprocessing: text to tokens"
"$PYTHON" -m megatron tokenizer train --input "$DATA/demo_train_small.jsonl" --vocab-size 12000 --output-dir "$VOCABULARY"
for part in train_small valid; do
    "$PYTHON" tools/preprocess_data.py --input "$DATA/demo_$part.jsonl" --output-prefix "$OUT/${part%_small}" \
        --append-eod "${TOKENIZER[@]}"
done
ENTROPY="$("$PYTHON" -m megatron unigram-entropy --quiet "$OUT/train_text_document")"
echo "unigram entropy of the training text: $ENTROPY nats per token"

say "2. training up to iteration $SWITCH of $ITERS: ${FIRST[*]}"
train "${FIRST[@]}" --exit-interval "$SWITCH"

say "3. training from iteration $SWITCH to $ITERS: ${SECOND[*]}"
train "${SECOND[@]}"

say "4. results"
"$PYTHON" -m megatron generate-text --load "$OUT/checkpoints" --num-tokens 60 --temperature 0.7 --top-p 0.9 --seed 3 \
    --prompt "The state of the Union is" | tee "$OUT/continuation.txt"
"$PYTHON" -m megatron plot-loss "$OUT/log.jsonl" --output "$OUT/loss.png" --line "unigram entropy" "$ENTROPY"
"$PYTHON" - "$OUT/log.jsonl" "$ENTROPY" "$ITERS" "$OUT/valid_text_document.bin" "$DATA/demo_valid.jsonl" <<'PYTHON'
import json, math, os, sys
log, entropy, iterations, tokens, texts = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
records = [json.loads(line) for line in open(log, encoding="utf-8")]
steps = {record["iteration"]: record["losses"]["lm loss"] for record in records if record["kind"] == "step"}
final = sum(steps[iteration] for iteration in range(iterations - 19, iterations + 1)) / 20
valid = [record["losses"]["lm loss"] for record in records if record["kind"] == "validation"][-1]
num_bytes = sum(len(json.loads(line)["text"].encode()) for line in open(texts, encoding="utf-8"))
tokens_per_byte = os.path.getsize(tokens) / 2 / num_bytes  # ids of two bytes
print(f"\nunigram entropy         {entropy:.3f} nats per token"
      f"\nfinal training loss     {final:.3f} nats per token (mean of the last 20 of {iterations} steps)"
      f"\nvalidation loss         {valid:.3f} nats per token: perplexity {math.exp(valid):.1f}"
      f"\n                        {valid * tokens_per_byte / math.log(2):.3f} bits per byte")
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
