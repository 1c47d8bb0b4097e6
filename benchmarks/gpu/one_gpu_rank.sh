#!/usr/bin/env bash
# One rank of several on ONE GPU, over real NCCL:
#
#   torchrun --nproc-per-node 2 --no-python bash benchmarks/gpu/one_gpu_rank.sh pretrain_gpt.py --tensor-model-parallel-size 2 ...
#
# NCCL refuses two ranks of one host on the same GPU ("Duplicate GPU detected"), so each says that it is a host of its own, and they
# talk over sockets of this machine. That shows right calls, groups, orders and streams. It shows no speed: the processes take turns
# on the GPU, and a collective takes some 10 ms. hostid/ does the same for ranks that Python starts itself.

set -euo pipefail
export NCCL_HOSTID="rank${RANK:?torchrun sets it}" NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_ALGO=Ring NCCL_PROTO=Simple
exec "${PYTHON:-python3}" "$@"
