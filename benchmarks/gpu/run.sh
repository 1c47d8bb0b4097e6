#!/usr/bin/env bash
# The first minutes on a GPU, in four calls that each end within nine minutes, the most valuable first:
#
#   bash benchmarks/gpu/run.sh --call 1      does it work: tests/gpu, masks, plans, NCCL's calls
#   bash benchmarks/gpu/run.sh --call 2      how fast are the pieces: rates, attention, layers in eleven ways with their profiles
#   bash benchmarks/gpu/run.sh --call 3      whole runs beside a plain loop, and peak memory; which kernels to choose
#   bash benchmarks/gpu/run.sh --call 4      layouts over real NCCL, several ranks on this one GPU; decoding; experts
#   bash benchmarks/gpu/run.sh --call 0      before there is a GPU: what can be computed and compiled without one
#
#   --dry-run    print the steps      --out FOLDER    where results go (runs/gpu)      --again    what is done, too
#   --seconds S  of the call (520); 400 for all four in half an hour
#
# A call that is made again goes on where it stopped, also after Ctrl-C. Every figure is written as it is found, and each call ends with
# a verdict. Nothing is installed and no network is asked: PYTHON, or python3, is used as it is. Without a GPU a call says what it leaves out.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python3}" benchmarks/gpu/calls.py "$@"
