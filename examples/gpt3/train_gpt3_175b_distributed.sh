#!/usr/bin/env bash
# GPT-3, 175B parameters: 8 tensor ranks within each machine, 16 pipeline stages across machines, data parallel over the rest.
#
# Start it on every machine, with the same arguments and environment but for NODE_RANK:
#
#   NUM_NODES=128 NODE_RANK=0 MASTER_ADDR=node000 \
#       bash examples/gpt3/train_gpt3_175b_distributed.sh CHECKPOINTS TENSORBOARD VOCAB MERGES DATA [more flags]
#
# Under Slurm, examples/slurm/train.sbatch does that. CHECKPOINTS is a folder that all machines see; DATA is the prefix of a
# .bin/.idx pair. 16 machines of 8 GPUs hold one replica; more replicas, up to 16, make it faster (powers of two).
#
# Environment: GPUS_PER_NODE, NUM_NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT; LAUNCH=echo prints the command.

set -euo pipefail
if [ $# -lt 5 ]; then
    sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/examples/print_command.sh"
CHECKPOINTS="$1"
TENSORBOARD="$2"
VOCAB="$3"
MERGES="$4"
DATA="$5"

DISTRIBUTED=(
    --nproc_per_node "${GPUS_PER_NODE:-8}"
    --nnodes "${NUM_NODES:-16}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)
MODEL=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
)
PARALLEL=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --recompute-activations
)
# The batch grows from 16 to 1536 samples over the first 5.9M, then stays.
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-samples 146484375
    --lr 6.0e-5
    --min-lr 6.0e-6
    --lr-decay-style cosine
    --lr-decay-samples 126953125
    --lr-warmup-samples 183105
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --bf16
)
DATASET=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$VOCAB"
    --merge-file "$MERGES"
    --data-path "$DATA"
    --split 949,50,1
)
LOGGING=(
    --log-interval 10
    --log-throughput
    --eval-interval 1000
    --eval-iters 10
    --save-interval 500
    --save "$CHECKPOINTS"
    --load "$CHECKPOINTS"
    --tensorboard-dir "$TENSORBOARD"
    --distributed-timeout-minutes 60
)

${LAUNCH:-torchrun} "${DISTRIBUTED[@]}" "$ROOT/pretrain_gpt.py" \
    "${MODEL[@]}" "${PARALLEL[@]}" "${TRAINING[@]}" "${DATASET[@]}" "${LOGGING[@]}" "${@:6}"
