#!/usr/bin/env bash
# What can be done with a checkpoint, on two CPU cores in under a minute: a run is killed without warning and resumes under another
# layout; its checkpoint is verified and exported to a Hugging Face folder, from which transformers generates the same text.
#
#   bash examples/checkpoints.sh [FOLDER]          (default: runs/checkpoints)

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/setup.sh requirements-dev.txt
OUT=${1:-runs/checkpoints}
[ ! -e "$OUT" ] || { echo "$OUT exists already; remove it, or give another folder" >&2; exit 1; }
mkdir -p "$OUT"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

RUN=(
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0
    --micro-batch-size 4 --global-batch-size 8 --train-iters 60 --lr 3e-3 --lr-decay-style constant
    --train-data-path "$OUT/train_text_document" --data-cache-path "$OUT/cache" --eval-iters 0
    --tokenizer-type GPT2BPETokenizer --vocab-file examples/data/demo-vocab.json --merge-file examples/data/demo-merges.txt
    --save "$OUT/run" --load "$OUT/run" --save-interval 10 --log-interval 10
)
TRAIN=("$PYTHON" -m torch.distributed.run --standalone --nproc_per_node 2 pretrain_gpt.py "${RUN[@]}")
lines() { grep --line-buffered -E "iteration +[0-9]+/|saved|loaded|GOING BACK" | sed -u -E 's/\| *(consumed|elapsed|learning|global|loss scale|grad|number)[^|]*//g'; }

"$PYTHON" tools/preprocess_data.py --input examples/data/demo_valid.jsonl --output-prefix "$OUT/train" --append-eod \
    --tokenizer-type GPT2BPETokenizer --vocab-file examples/data/demo-vocab.json --merge-file examples/data/demo-merges.txt

echo "== 1. training on two tensor ranks until kill -9"
"${TRAIN[@]}" --tensor-model-parallel-size 2 --sequence-parallel > "$OUT/first.log" 2>&1 &
LAUNCHER=$!
until [ -e "$OUT/run/iter_0000020/commit.txt" ]; do
    kill -0 $LAUNCHER 2> /dev/null || { cat "$OUT/first.log" >&2; exit 1; }
    sleep 0.05
done
kill -KILL $LAUNCHER $(pgrep -P $LAUNCHER) || true # only the launcher and the ranks of this run
wait $LAUNCHER 2> /dev/null || true
lines < "$OUT/first.log"

echo "== 2. resuming with the same command under two pipeline stages"
"${TRAIN[@]}" --pipeline-model-parallel-size 2 2>&1 | lines

echo "== 3. verifying every byte"
"$PYTHON" -m megatron checkpoint verify "$OUT/run"

echo "== 4. exporting to a Hugging Face folder"
"$PYTHON" -m megatron checkpoint export --load "$OUT/run" --save "$OUT/published"

echo "== 5. generating the same tokens from both"
"$PYTHON" -m megatron generate-text --load "$OUT/run" --prompt "The state of the Union" --num-tokens 12 --temperature 0
"$PYTHON" - "$OUT/published" << 'PYTHON'
import sys

import torch
import transformers

from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.tokenizers.build import build_tokenizer

tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file="examples/data/demo-vocab.json",
                                            merge_file="examples/data/demo-merges.txt"))
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = model.generate(torch.tensor([tokenizer.tokenize("The state of the Union")]), max_new_tokens=12, do_sample=False)
print(tokenizer.detokenize(ids[0].tolist()))
PYTHON
