#!/usr/bin/env bash
# Serve what examples/quickstart.sh has trained, and open its page in the browser, if this machine has one:
#
#   bash examples/serve.sh [FOLDER [more flags of tools/run_text_generation_server.py]]
#
# FOLDER: another checkpoint. It says at which address it serves; Ctrl+C ends it.

set -euo pipefail
HERE="$(dirname "${BASH_SOURCE[0]}")"
LOAD="${1:-$HERE/../runs/quickstart/checkpoints}"
if [ ! -d "$LOAD" ]; then
    echo "there is no $LOAD: train a network first (bash examples/quickstart.sh), or name a folder with a checkpoint" >&2
    exit 1
fi
exec bash "$HERE/inference/run_text_generation_server.sh" "$LOAD" --open "${@:2}"
