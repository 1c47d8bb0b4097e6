#!/usr/bin/env bash
# Serve a checkpoint on this machine; the page is at http://localhost:5000.
#
#   bash examples/inference/run_text_generation_server.sh FOLDER [more flags of tools/run_text_generation_server.py]
#
# FOLDER is a run's --save, a Hugging Face folder, or one of Megatron's. RANKS=2 divides its matrices over two ranks.

set -euo pipefail
LOAD=${1:?a folder with a checkpoint is needed: bash $0 FOLDER}
RANKS=${RANKS:-1}
LOAD="$(cd "$LOAD" && pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/setup.sh requirements-server.txt

SERVER=(tools/run_text_generation_server.py --load "$LOAD" "${@:2}")
if [ "$RANKS" -eq 1 ]; then
    exec "$PYTHON" "${SERVER[@]}"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$RANKS" "${SERVER[@]}" --tensor-model-parallel-size "$RANKS"
