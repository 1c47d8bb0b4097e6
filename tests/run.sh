#!/usr/bin/env bash
# The whole test suite, or what the arguments choose:
#
#   bash tests/run.sh                                 everything, about half an hour on two cores
#   bash tests/run.sh --quick                         for work in between, at most 3: one parity row a feature, one file a package
#   bash tests/run.sh tests/unit/datasets -k blend
#   bash tests/run.sh --help                          these lines
#
# Arguments go to pytest, and its exit code comes back. One thread a process, as the tests start many ranks; three files
# of tests at a time, since many wait for processes (-n 0: one).

set -euo pipefail
if [ "${1:-}" = --help ]; then exec sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/setup.sh requirements-dev.txt

# The suite starts hundreds of processes: none of them is to compile what an earlier one has.
unset PYTHONDONTWRITEBYTECODE
# The models and data sets of others are never fetched: a test that needs the network is broken.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
# Files in the order of their names: the longest ones come before the many short ones of tests/unit.
exec "$PYTHON" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
