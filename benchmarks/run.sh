#!/usr/bin/env bash
# The benchmarks that this machine can run; their figures go into docs/benchmarks.md, with the machine's description:
#
#   bash benchmarks/run.sh                    all of them (hours)
#   bash benchmarks/run.sh startup train      some
#   bash benchmarks/run.sh --list             which there are, and what each needs
#
# Peers that are no dependencies of the project are installed below runs/benchmarks, where pip can have them.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/setup.sh requirements-dev.txt
exec "$PYTHON" benchmarks/figures.py "$@"
